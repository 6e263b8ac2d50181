"""A compiled call replayed as one CUDA graph: warm-up calls, one recording, then replays that cost the host one launch.

Parameters keep their addresses, other inputs are copied to where the recording found them. What a recording gave lies in
memory of the graph: there is no replay while somebody holds it. Where a replay would be wrong, the call runs plainly, and
the reason is counted.

>>> call = GraphedCall(program, static=frozenset({0, 1}), mutated=frozenset(), device=torch.device("cuda", 0))
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..base.events import counters, emit

WARM_UP = 2  # plain calls before the recording: kernels are loaded, libraries choose their algorithms
RECORDINGS = 4  # recordings of one call before it is left alone: its parameters move too often
_view = torch._C._dynamo.guards._reinterpret_tensor
_use_count = torch._C._storage_Use_Count
_memory_of_graphs: dict[int, int] = {}  # address of a storage that a recording gave -> how many hold it

Call = Callable[..., tuple[Any, ...]]


class Recorder(Protocol):
    """How a call is recorded: CUDA's graphs, or something like them in a test."""

    def record(self, call: Callable[[], tuple[Any, ...]]) -> tuple[Callable[[], None], tuple[Any, ...]]:
        """Record a call without arguments; what replays it, and its (not yet computed) results."""

    def stream(self) -> int:
        """The current stream."""

    def is_ours(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies where graphs can reach it."""


class CudaRecorder:
    """Graphs of one device. They share a memory pool, because they are replayed one after the other on one stream."""

    _pools: dict[torch.device, Any] = {}

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self, call: Callable[[], tuple[Any, ...]]) -> tuple[Callable[[], None], tuple[Any, ...]]:
        """See Recorder; the device is idle before and nothing else may allocate on this thread meanwhile."""
        with torch.cuda.device(self.device):
            pool = self._pools.get(self.device)
            if pool is None:
                pool = self._pools[self.device] = (torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool[0], stream=pool[1], capture_error_mode="thread_local"):
                results = call()

        def replay() -> None:
            with torch.cuda.device(self.device):
                graph.replay()

        return replay, results

    def stream(self) -> int:
        """See Recorder."""
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def is_ours(self, tensor: torch.Tensor) -> bool:
        """See Recorder."""
        return tensor.device == self.device


class _Result:
    """A tensor that each replay fills: handed out as a new tensor over its memory."""

    __slots__ = ("tensor", "storage", "owners", "references")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        self.owners = _use_count(self.storage._cdata)
        self.references = sys.getrefcount(self.storage)

    def is_free(self) -> bool:
        """Whether nobody but the graph holds the memory."""
        return _use_count(self.storage._cdata) == self.owners and sys.getrefcount(self.storage) == self.references

    def hand_out(self) -> torch.Tensor:
        return _view(self.tensor, self.tensor.shape, self.tensor.stride(), 0)


class _Recording:
    """One recorded call: where it reads its inputs, and what it gives."""

    def __init__(self, call: Call, inputs: Sequence[Any], static: frozenset[int], recorder: Recorder) -> None:
        self.stream = recorder.stream()
        self.fixed: list[tuple[int, int]] = []  # inputs that must lie where they lay: position, address
        self.copied: list[tuple[int, torch.Tensor]] = []
        arguments = list(inputs)
        for i, x in enumerate(inputs):
            if not isinstance(x, torch.Tensor):
                continue
            if i in static or x.untyped_storage().data_ptr() in _memory_of_graphs:
                self.fixed.append((i, x.data_ptr()))
            else:
                place = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                place.copy_(x)
                self.copied.append((i, place))
                arguments[i] = place
        self.replay, results = recorder.record(lambda: tuple(call(*arguments)))
        self.results = [_Result(r) if isinstance(r, torch.Tensor) else r for r in results]
        addresses = {r.storage.data_ptr() for r in self.results if isinstance(r, _Result)}
        addresses -= {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor)}
        for address in addresses:
            _memory_of_graphs[address] = _memory_of_graphs.get(address, 0) + 1
        weakref.finalize(self, _forget, addresses).atexit = False

    def is_free(self) -> bool:
        return all(r.is_free() for r in self.results if isinstance(r, _Result))

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether everything lies where the recording reads it, or can be copied there."""
        return all(inputs[i].data_ptr() == address for i, address in self.fixed)

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        for i, place in self.copied:
            place.copy_(inputs[i], non_blocking=True)
        self.replay()
        return tuple([r.hand_out() if isinstance(r, _Result) else r for r in self.results])


def _forget(addresses: set[int]) -> None:
    for address in addresses:
        left = _memory_of_graphs.pop(address, 1) - 1
        if left:
            _memory_of_graphs[address] = left


class GraphedCall:
    """Calls `call(*inputs)` and, once it is warm, replays a recording of it.

    static: inputs that are the same tensor at each call. mutated: inputs that the call writes; they must be static.
    """

    def __init__(self, call: Call, static: frozenset[int], mutated: frozenset[int], device: torch.device,
                 recorder: Recorder | None = None) -> None:
        self.call, self.static, self.mutated = call, static, mutated
        self._recorder = recorder or CudaRecorder(device)
        self._recording: _Recording | None = None
        self._calls = self._recordings = 0
        self._refused = ""

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        self._calls += 1
        if self._refused:
            return self.call(*inputs)
        if self._calls <= WARM_UP:
            return self.call(*inputs)
        if self._recording is None and not self._record(inputs):
            return self.call(*inputs)
        why = self._why_not(self._recording, inputs)
        if not why:
            counters["cudagraphs"]["replayed"] += 1
            return self._recording.run(inputs)
        counters["cudagraphs"][why] += 1
        if why == "a parameter has moved":
            self._recording = None
        return self.call(*inputs)

    def _why_not(self, recording: _Recording, inputs: Sequence[Any]) -> str:
        """Why this call cannot be a replay."""
        if not recording.is_free():
            return "what the last replay gave is still in use"
        if recording.stream != self._recorder.stream():
            return "another stream"
        if recording.fits(inputs):
            return ""
        moved = any(inputs[i].data_ptr() != address for i, address in recording.fixed if i in self.static)
        return "a parameter has moved" if moved else "an input comes from a call that was not replayed"

    def _record(self, inputs: Sequence[Any]) -> bool:
        """Record the call, or refuse for good and say why."""
        reason = self._unfit(inputs)
        if not reason:
            try:
                self._recording = _Recording(self.call, inputs, self.static, self._recorder)
                self._recordings += 1
                counters["cudagraphs"]["recorded"] += 1
                return True
            except RuntimeError as error:  # an op that waits for the device, or memory that is not there
                reason = f"recording failed: {error}"
        self._refused = reason
        counters["fallback"]["cudagraphs"] += 1
        emit("fallback", what="cudagraphs", reason=reason)
        return False

    def _unfit(self, inputs: Sequence[Any]) -> str:
        """Why this call cannot be recorded."""
        if self._recordings >= RECORDINGS:
            return "parameters move between calls"
        if self.mutated - self.static:
            return "an input that is no parameter or buffer is changed in place"
        for i, x in enumerate(inputs):
            if not isinstance(x, torch.Tensor):
                continue
            if not self._recorder.is_ours(x):
                return f"an input lies on {x.device}"
            if i not in self.static and any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True)):
                return "an expanded input"
        return ""
