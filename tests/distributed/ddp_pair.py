"""Two processes joined by gloo that run functions for the tests: started once a file, killed when a call takes too long.

>>> results = pair.run(cases.matches_eager, "tied", "ingraph")      # [what rank 0 returned, what rank 1 returned]
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

CALL_SECONDS = 25.0
START_SECONDS = 90.0


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(rank: int, port: int, timeout: float, pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    import dynamotor  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
                            timeout=timedelta(seconds=timeout))
    pipe.send(("ready", None))
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send(("done", function(rank, *args)))
        except BaseException as error:
            pipe.send(("error", f"rank {rank}: {error!r}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class Pair:
    """The two processes. `run` gives both ranks' results; an error on either is raised here."""

    def __init__(self, group_timeout: float = 20.0) -> None:
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self.pipes, self.processes = [], []
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, group_timeout, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        for pipe in self.pipes:
            self._answer(pipe, START_SECONDS)

    def _answer(self, pipe: Any, seconds: float) -> Any:
        if not pipe.poll(seconds):
            self.kill()
            raise TimeoutError(f"no answer within {seconds:.0f} s")
        kind, value = pipe.recv()
        if kind == "error":
            self.kill()
            raise AssertionError(value)
        return value

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(rank, *args)` in both processes."""
        for pipe in self.pipes:
            pipe.send((function, args))
        return [self._answer(pipe, CALL_SECONDS) for pipe in self.pipes]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        """Let the processes end."""
        for pipe in self.pipes:
            if self.alive:
                pipe.send(None)
        for process in self.processes:
            process.join(5)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


@pytest.fixture(scope="module")
def _pairs() -> Iterator[list[Pair]]:
    pairs: list[Pair] = []
    yield pairs
    for pair in pairs:
        pair.close()


@pytest.fixture
def pair(_pairs: list[Pair]) -> Pair:
    """The file's two processes; new ones when an earlier test lost them."""
    if not _pairs or not _pairs[-1].alive:
        _pairs.append(Pair())
    return _pairs[-1]
