"""A compiled call replayed as one CUDA graph: warm-up calls, one recording, then replays that cost the host
one launch.

Parameters keep their addresses, and so do large inputs that the call writes (the caches of a decoder); other
inputs are copied to where the recording found them, and back where they are written. A result of a replay is
never overwritten while it is referenced: small results are copied out, others are in memory of the recording,
which is not replayed until they are let go of (another recording of the same call takes its place meanwhile,
or the plain call). A recording whose large inputs have moved is kept for calls with the former ones. Where a
replay would be wrong, the call runs plainly, and the reason is counted.

>>> call = GraphedCall(program, static=frozenset({0, 1}), mutated=frozenset(), device=torch.device("cuda", 0))
"""

from __future__ import annotations

import contextlib
import gc
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from .. import _C
from ..base import compat
from ..base.events import counters, fall_back, warn_once
from ..graph.spec import copy_as, write
from . import device_memory
from .memory import reinterpret

WARM_UP = 2  # plain calls before the recording: kernels are loaded, libraries choose their algorithms
ALTERNATES = 3  # recordings of one call that are kept: while the results of one are held, another is replayed
RECORDINGS = 8  # recordings that were hardly replayed before no more are made: parameters move too often
WORTH = 16  # replays that make up for a recording
# Bytes of results: a recording with fewer is kept when its inputs have moved, since they may come back.
MOST_KEPT = 64 << 20
# Bytes of an input that is written and always copied: counters have other places in each cache.
TINY = 1 << 12
SMALL = 1 << 20  # bytes: results of the user's up to here are copied out of the recording
MOST_COPIED = 256 << 20  # bytes of inputs that a replay may copy; a call with more runs plainly
_use_count = compat.storage_use_count
_below_autograd = compat.BelowAutograd
_memory_of_graphs: dict[int, int] = {}  # address of a storage that a recording gave -> how many hold it

Call = Callable[..., tuple[Any, ...]]


class CallRecorder(Protocol):
    """How a call is recorded: CUDA's graphs, or something like them in a test."""

    def record(self, call: Callable[[], tuple[Any, ...]]) -> tuple[Callable[[], None], tuple[Any, ...], Any]:
        """Record a call without arguments: what replays it, its (not yet computed) results, and what must be
        kept alive.
        """

    def stream(self) -> int:
        """The current stream."""

    def is_ours(self, tensor: torch.Tensor) -> bool:
        """Whether graphs can reach a tensor's memory."""


class CudaRecorder:
    """Graphs of one device.

    Each recording has a memory pool of its own: in a shared one, results of a later recording may be placed
    where
    an earlier one keeps intermediates, and its next replay would overwrite them while they are held. The
    scratch block, which holds most intermediates, is shared by all recordings that are replayed on one
    stream, and so is the stream that they are recorded on.
    """

    _streams: dict[tuple[torch.device, int], Any] = {}

    def __init__(self, device: torch.device) -> None:
        self.device, self._has_recorded = device, False

    def record(self, call: Callable[[], tuple[Any, ...]]) -> tuple[Callable[[], None], tuple[Any, ...], Any]:
        """See CallRecorder; the device is idle before, nothing else may allocate on this thread meanwhile."""
        with torch.cuda.device(self.device):
            key = (self.device, self.stream())
            if key not in self._streams:
                self._streams[key] = torch.cuda.Stream(self.device)
            stream, graph, current = self._streams[key], torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            # what plain calls on this stream have worked in: the recording gets a block of its own, and
            # replays need no other (entering `torch.cuda.graph` gives free memory back)
            device_memory.arena_of(self.device).forget(key[1])
            keep, self._has_recorded = self._has_recorded, False  # one that failed may have found no memory
            collecting = gc.isenabled()
            gc.disable()  # memory freed by it may belong to another graph, which a capture does not permit
            try:
                compat.clear_cublas_workspaces()  # this graph's workspace is in its own pool
                with _capturing(graph, stream, keep):
                    results = call()
            finally:
                torch.cuda.set_stream(current)  # a recording that fails leaves its own stream the current one
                compat.clear_cublas_workspaces()
                if collecting:
                    gc.enable()
            self._has_recorded = True
            scratch = device_memory.arena_of(self.device).idle(stream.cuda_stream)

        def replay() -> None:
            if compat.current_gpu() == self.device.index:
                graph.replay()
                return
            with torch.cuda.device(self.device):
                graph.replay()

        return replay, results, scratch

    def stream(self) -> int:
        """See CallRecorder."""
        return int(compat.current_raw_stream(self.device.index))

    def is_ours(self, tensor: torch.Tensor) -> bool:
        """See CallRecorder."""
        return tensor.device == self.device


@contextlib.contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, keep: bool) -> Iterator[None]:
    """Record all launches. keep: leave free memory with PyTorch's allocator, as `torch.cuda.graph` does not.
    The caches of one generation after the other then get the same places, for which there is a recording.
    """
    if not keep:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


class _Result:
    """A tensor that each replay fills: handed out as a new tensor over its memory, or as a copy."""

    __slots__ = ("tensor", "storage", "owners", "references", "copied")

    def __init__(self, tensor: torch.Tensor, copied: bool) -> None:
        self.tensor, self.copied = tensor, copied
        self.storage = tensor.untyped_storage()
        self.owners = _use_count(self.storage._cdata)
        self.references = sys.getrefcount(self.storage)

    def is_free(self) -> bool:
        """Whether only the recording holds the memory."""
        return (
            _use_count(self.storage._cdata) == self.owners
            and sys.getrefcount(self.storage) == self.references
        )

    def hand_out(self) -> torch.Tensor:
        """The tensor that the caller gets."""
        t = self.tensor
        return copy_as(t, t.stride()) if self.copied else reinterpret(t, t.shape, t.stride(), 0)


class _Given:
    """A result that is one of the inputs: the caller gets its own argument back."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


class _Recording:
    """One recorded call: the addresses of its inputs, and its results."""

    def __init__(
        self,
        call: Call,
        inputs: Sequence[Any],
        static: frozenset[int],
        mutated: frozenset[int],
        at_place: frozenset[int],
        n_copied: int,
        recorder: CallRecorder,
    ) -> None:
        self.replays = 0
        self.begun: tuple[Any, ...] | None = None  # the inputs of a call that has begun
        self.stream, self.inference = recorder.stream(), torch.is_inference_mode_enabled()
        self.fixed: list[int] = []  # inputs that must keep their addresses
        self.copied: list[tuple[int, torch.Tensor]] = []
        self.plain: list[tuple[int, Any]] = []  # numbers: part of the recording
        self.static, self.mutated = static, tuple(mutated)
        self.copied_back: list[tuple[int, torch.Tensor]] = []
        arguments = list(inputs)
        for i, x in enumerate(inputs):
            if not isinstance(x, torch.Tensor):
                self.plain.append((i, x))
            elif i in static or in_graph_memory(x) or i in at_place:
                self.fixed.append(i)
            else:
                arguments[i] = copy_as(x, x.stride())
                self.copied.append((i, arguments[i]))
                if i in mutated:
                    self.copied_back.append((i, arguments[i]))
        # A batch of images (9.6 MB) takes the kernel for all 16.6 us, a copy of its own 6.3 (H200).
        small = {i for i, place in self.copied if 0 not in place.stride() and place.nbytes <= SMALL}
        self.together = _by_dtype([(i, place) for i, place in self.copied if i in small])
        self.alone = [(i, place) for i, place in self.copied if i not in small]
        self.back = _by_dtype(self.copied_back)
        self.pointers = _C.data_ptrs([inputs[i] for i in self.fixed])
        position = {id(x): i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)}
        self.replay, results, self.kept = recorder.record(lambda: tuple(call(*arguments)))
        own = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor)}
        made = [
            r for r in results if isinstance(r, torch.Tensor) and r.untyped_storage().data_ptr() not in own
        ]
        places = {place.untyped_storage().data_ptr() for _, place in self.copied_back}
        if any(id(r) not in position and r.untyped_storage().data_ptr() in places for r in made):
            raise RuntimeError("a result shows an input that is written")
        storages = [r.untyped_storage() for r in made if id(r) not in position]
        self.nbytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        addresses = {storage.data_ptr() for storage in storages}
        self.results: list[Any] = []
        for n, r in enumerate(results):
            if isinstance(r, torch.Tensor):
                r = (
                    _Given(position[id(r)])
                    if id(r) in position
                    else _Result(r, n < n_copied and r.nbytes <= SMALL)
                )
            self.results.append(r)
        del results, made, storages
        self.lent = [r for r in self.results if isinstance(r, _Result) and r.storage.data_ptr() in addresses]
        for r in self.lent:  # counted when all of the recording's own references are there
            r.owners, r.references = _use_count(r.storage._cdata), sys.getrefcount(r.storage)
        for address in addresses:
            _memory_of_graphs[address] = _memory_of_graphs.get(address, 0) + 1
        weakref.finalize(self, _forget, addresses).atexit = False

    def why_not(self, inputs: Sequence[Any], stream: int) -> str:
        """Why this call cannot be a replay; empty when it can."""
        if self.stream != stream:
            return "another stream"
        if self.inference != torch.is_inference_mode_enabled():
            return "inference mode was switched"
        if any(type(inputs[i]) is not type(x) or inputs[i] != x for i, x in self.plain):
            return "another number"
        if _C.data_ptrs([inputs[i] for i in self.fixed]) != self.pointers:
            return self._moved(inputs)
        return ""

    def has_begun(self, inputs: tuple[Any, ...]) -> bool:
        """Whether these inputs are copied already, and nothing is in the way of a replay."""
        return self.begun is not None and are_same(self.begun, inputs) and self.is_free()

    def is_free(self) -> bool:
        """Whether the results of the last replay are no longer in use."""
        return all(r.is_free() for r in self.lent)

    def _moved(self, inputs: Sequence[Any]) -> str:
        """Why an input is not at the address that the recording reads."""
        moved = [
            i for i, address in zip(self.fixed, self.pointers, strict=True) if inputs[i].data_ptr() != address
        ]
        if any(i in self.static or i in self.mutated for i in moved):
            return MOVED
        return (
            "an input of another recording"
            if all(in_graph_memory(inputs[i]) for i in moved)
            else _NOT_REPLAYED
        )

    def fill(self, inputs: Sequence[Any]) -> None:
        """Copy inputs to where the recording reads them."""
        for positions, places in self.together:
            torch._foreach_copy_(places, [inputs[i] for i in positions], True)
        for i, place in self.alone:
            write(place, inputs[i], non_blocking=True)

    def run(self, inputs: Sequence[Any], filled: bool = False) -> tuple[Any, ...]:
        """Replay. filled: `fill` has copied these inputs."""
        if not filled:
            self.fill(inputs)
        self.begun = None
        self.replay()
        self.replays += 1
        for positions, places in self.back:
            torch._foreach_copy_([inputs[i] for i in positions], places, True)
        if self.mutated:
            written = [inputs[i] for i in self.mutated if not inputs[i].is_inference()]
            torch.autograd.graph.increment_version(written)
        return tuple(
            [
                r.hand_out() if isinstance(r, _Result) else inputs[r.position] if isinstance(r, _Given) else r
                for r in self.results
            ]
        )


def are_same(begun: tuple[Any, ...], inputs: tuple[Any, ...]) -> bool:
    """Whether a call has the very inputs that it began with."""
    if all(map(operator.is_, begun, inputs)):  # a tenth of the time, while the device waits
        return True
    return all(x is y or type(x) is int and x == y for x, y in zip(begun, inputs, strict=True))


def _by_dtype(copied: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[list[int], list[torch.Tensor]]]:
    """The positions and places of each dtype: `_foreach_copy_` has one kernel for tensors of one dtype."""
    found: dict[torch.dtype, tuple[list[int], list[torch.Tensor]]] = {}
    for i, place in copied:
        positions, places = found.setdefault(place.dtype, ([], []))
        positions.append(i)
        places.append(place)
    return list(found.values())


IN_USE = "results of the last replay are still in use"
MOVED = "a parameter, or an input that is written, has moved"
_RESTLESS = "parameters, or inputs that are written, move between calls"
_NOT_REPLAYED = "an input comes from a call that was not replayed"


def in_graph_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a recording's result."""
    return tensor.untyped_storage().data_ptr() in _memory_of_graphs


def _forget(addresses: set[int]) -> None:
    for address in addresses:
        left = _memory_of_graphs.pop(address, 1) - 1
        if left:
            _memory_of_graphs[address] = left


class GraphedSizes:
    """A graphed call for each set of sizes (inputs `symbols`); of `most` sets, the least recently called with
    makes room. Sizes that come once or twice are not recorded.
    """

    def __init__(self, graphed: Callable[[], GraphedCall], symbols: Sequence[int], most: int) -> None:
        self._graphed, self._symbols, self._most = graphed, tuple(symbols), most
        self._known: dict[tuple[Any, ...], GraphedCall] = {}
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        sizes = tuple([inputs[i] for i in self._symbols])
        with self._lock:
            found = self._known.pop(sizes, None) or self._graphed()
            self._known[sizes] = found  # the last one is the most recent
            if len(self._known) > self._most:
                del self._known[next(iter(self._known))]
        return found(*inputs)


class GraphedCall:
    """Calls `call(*inputs)` and, once it is warm, replays a recording of it.

    static: inputs that are the same tensor at each call. mutated: inputs that the call writes. n_copied: the
    first so many results are the user's, and copied when they are small. Threads that call at once: one
    replays, the others run plainly.
    """

    def __init__(
        self,
        call: Call,
        static: frozenset[int],
        mutated: frozenset[int],
        device: torch.device,
        n_copied: int = 0,
        recorder: CallRecorder | None = None,
    ) -> None:
        self.call, self.static, self.mutated, self.n_copied = call, static, mutated, n_copied
        self._recorder = recorder or CudaRecorder(device)
        self._recordings: list[_Recording] = []  # the one that was replayed last is the first
        self._calls = self._wasted = 0
        self._refused = ""
        self._addresses: dict[int, int] = {}
        self._stayed: set[int] = set()
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        self._calls += 1
        if self._refused:
            return self.call(*inputs)
        if self._calls <= WARM_UP:
            self._look(inputs)
            return self.call(*inputs)
        if not self._lock.acquire(blocking=False):
            return self._plainly("another thread is in this call", inputs)
        try:
            begun = next((r for r in self._recordings if r.has_begun(inputs)), None)
            recording = begun or self._recording_for(inputs)
            if recording is not None:
                counters["cudagraphs"]["replayed"] += 1
                with _below_autograd():
                    return recording.run(inputs, recording is begun)
        finally:
            self._lock.release()
        return self.call(*inputs)

    def begin(self, *inputs: Any) -> Callable[[], None]:
        """Copy the inputs of a call that is likely to come next with these very inputs; gives the function
        that forgets it.
        """
        found = None
        if self._recordings and self._lock.acquire(blocking=False):
            try:
                stream = self._recorder.stream()
                found = next((r for r in self._recordings if not r.why_not(inputs, stream)), None)
                if found is not None:
                    with _below_autograd():
                        found.fill(inputs)
                    found.begun = inputs
            finally:
                self._lock.release()

        def forget() -> None:
            if found is not None and found.begun is inputs:  # not the call after it
                found.begun = None

        return forget

    def _plainly(self, why: str, inputs: Sequence[Any]) -> tuple[Any, ...]:
        counters["cudagraphs"][why] += 1
        return self.call(*inputs)

    def _recording_for(self, inputs: Sequence[Any]) -> _Recording | None:
        """A recording that this call can replay, made now if that helps; None: the call runs plainly, and why
        is counted.
        """
        stream = self._recorder.stream()
        why, moved = MOVED, list[_Recording]()
        for recording in tuple(self._recordings):
            reason = recording.why_not(inputs, stream)
            if not reason and recording.is_free():
                self._use(recording)
                return recording
            if reason == MOVED:
                moved.append(recording)
            else:
                why = reason or IN_USE
        if why != _NOT_REPLAYED:
            self._make_room(moved)
            if len(self._recordings) < ALTERNATES:
                return self._record(inputs)
        counters["cudagraphs"][why] += 1
        return None

    def _use(self, recording: _Recording) -> None:
        """Put the recording of this call first."""
        if self._recordings[0] is not recording:
            self._recordings.remove(recording)
            self._recordings.insert(0, recording)

    def _make_room(self, moved: list[_Recording]) -> None:
        """Drop recordings whose inputs have moved: large ones, and the one that was not replayed for longest
        if there is no room.
        """
        dropped = [recording for recording in moved if recording.nbytes > MOST_KEPT]
        if len(self._recordings) - len(dropped) == ALTERNATES:
            dropped += moved[-1:]
        for recording in dropped:
            self._recordings.remove(recording)
            self._wasted += recording.replays < WORTH

    def _record(self, inputs: Sequence[Any]) -> _Recording | None:
        """Record the call, or say why not; what will never change refuses for good."""
        self._look(inputs)
        reason = self._unfit(inputs)
        if not reason and self._bytes_to_copy(inputs) > MOST_COPIED:
            counters["cudagraphs"]["too much to copy"] += 1
            return None
        if not reason:
            try:
                recording = _Recording(
                    self.call,
                    inputs,
                    self.static,
                    self.mutated,
                    self._at_place(inputs),
                    self.n_copied,
                    self._recorder,
                )
            except RuntimeError as error:  # an op that waits for the device, or memory that is not there
                reason = f"recording failed: {error}"
            else:
                counters["cudagraphs"]["recorded"] += 1
                self._recordings.insert(0, recording)
                return recording
        least = WORTH if reason == _RESTLESS else 0
        if any(recording.replays >= least for recording in self._recordings):  # they can still be replayed
            counters["cudagraphs"][reason.split(":")[0]] += 1
            return None
        self._refused = reason
        self._recordings.clear()
        fall_back("cudagraphs", what="cudagraphs", reason=reason)
        warn_once(f"cudagraphs.{reason}", f"calls are not replayed as CUDA graphs: {reason}")
        return None

    def _hardly_replayed(self) -> int:
        """How many recordings were not worth their time, so far."""
        return self._wasted + sum(recording.replays < WORTH for recording in self._recordings)

    def _at_place(self, inputs: Sequence[Any]) -> frozenset[int]:
        """The inputs that a recording writes where the caller has them: large ones, and those that are not
        tiny and stayed where they were from one call to the next."""
        stayed = self._stayed if self._hardly_replayed() < ALTERNATES else ()
        sizes = {i: inputs[i].nbytes for i in self.mutated}
        return frozenset(i for i, n in sizes.items() if n > SMALL or n > TINY and i in stayed)

    def _look(self, inputs: Sequence[Any]) -> None:
        """Notice which of the inputs that are written stayed where they were."""
        if self.mutated:
            now = {i: inputs[i].data_ptr() for i in self.mutated}
            self._stayed |= {i for i, address in now.items() if self._addresses.get(i) == address}
            self._addresses = now

    def _bytes_to_copy(self, inputs: Sequence[Any]) -> int:
        at_place = self._at_place(inputs)
        return sum(
            x.nbytes
            for i, x in enumerate(inputs)
            if isinstance(x, torch.Tensor)
            and i not in self.static
            and not in_graph_memory(x)
            and i not in at_place
        )

    def _unfit(self, inputs: Sequence[Any]) -> str:
        """Why this call cannot be recorded."""
        if self._hardly_replayed() >= RECORDINGS:
            return _RESTLESS
        for x in inputs:
            if isinstance(x, torch.Tensor) and not self._recorder.is_ours(x):
                return f"an input is on {x.device}"
        return ""
