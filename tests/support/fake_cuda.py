"""Stand-ins for the parts of `torch.cuda` that time and record, so that code for a GPU runs once before it
meets one.
"""

import contextlib
import itertools
import types

import torch

from dynamotor.base import compat


class Event:
    """Counts up: each recorded event is a millisecond after the one before."""

    clock = itertools.count()

    def __init__(self, enable_timing=False):
        self.at = 0

    def record(self):
        self.at = next(self.clock)

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return float(end.at - self.at)


class Stream:
    """A stream by number."""

    numbers = itertools.count(7)

    def __init__(self, device=None):
        self.cuda_stream = next(self.numbers)


class Graphs:
    """What `torch.cuda.graph` and `CUDAGraph` do here: nothing is recorded, replays are counted."""

    def __init__(self):
        self.replayed, self.recording, self.streams, self.emptied = 0, False, [], []

    def replay(self):
        self.replayed += 1

    def capture_begin(self, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.recording = True

    def capture_end(self):
        self.recording = False

    @contextlib.contextmanager
    def stream(self, stream):
        self.streams.append(stream)
        yield

    @contextlib.contextmanager
    def graph(self, graph, stream=None, capture_error_mode=""):
        assert capture_error_mode == "thread_local"
        self.streams.append(stream)
        self.emptied.append(stream)
        self.recording = True
        yield
        self.recording = False


def install(patch):
    """Put them in place; gives the graphs."""
    graphs = Graphs()
    main = Stream()
    current = [main]
    fakes = {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": lambda: graphs,
        "graph": graphs.graph,
        "stream": graphs.stream,
        "_sleep": lambda cycles: None,
        "synchronize": lambda: None,
        "get_device_properties": lambda device: types.SimpleNamespace(L2_cache_size=16),
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda: current[0],
        "set_stream": lambda stream: current.__setitem__(0, stream),
    }
    for name, fake in fakes.items():
        patch.setattr(torch.cuda, name, fake)
    for name, fake in {
        "clear_cublas_workspaces": lambda: None,
        "current_gpu": lambda: 0,
        "current_raw_stream": lambda index: current[0].cuda_stream,
        "gpu_sleep": lambda cycles: None,
    }.items():
        patch.setattr(compat, name, fake)
    graphs.current = current
    return graphs
