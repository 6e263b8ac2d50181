"""Flushing traces: live values are computed by one executable, which is compiled when its key was never seen
(`Reasons` says why it was not).

>>> sync()          # xm.mark_step()
>>> sync(wait=True)
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from dynamotor.extension_api import emit, listening

from . import device as devices, execute, metrics, placement, replication, rng, tensor
from .checks import raise_failed
from .execute import Graph, raise_coded
from .ir import Lane, Node, lock, overfull
from .recent import Recent


class Reasons:
    """Compares each graph that is compiled with those before."""

    def __init__(self) -> None:
        self._by_ops = Recent(256)
        self._count = 0

    def explain(self, graph: Graph, key: tuple, cause: str) -> str:
        """The reason, also emitted as an event "xla.compile" {reason, cause, nodes, line}."""
        ops = tuple((str(step.instruction.func), step.inputs, step.item) for step in graph.steps.values())
        before = self._by_ops.get(ops)
        self._by_ops[ops] = graph
        self._count += 1
        if before is None:
            reason = (
                "first graph"
                if self._count == 1
                else "new structure: no graph with these operations was compiled before"
            )
        else:
            reason = _difference(before, graph)
        if listening("xla.compile"):
            emit("xla.compile", reason=reason, cause=cause, nodes=len(graph.steps), line=metrics.user_line())
        return reason


def _difference(before: Graph, after: Graph) -> str:
    shapes = [f"{a!r} -> {b!r}" for a, b in zip(before.leaves, after.leaves) if a is not b]
    if shapes:
        return "new shapes: " + ", ".join(shapes[:3])
    for old, new in zip(before.steps.values(), after.steps.values()):
        if old.instruction is not new.instruction:
            return f"constant changed: {old.instruction.show()} -> {new.instruction.show()}"
    if before.outputs != after.outputs:
        return "other results are kept: the same operations, but other tensors are alive at the barrier"
    return "other buffers may be reused (donated), or other shardings"


# As many as torch_xla keeps; its variable sets another number.
_executables = Recent(int(os.environ.get("XLA_COMPILATION_CACHE_SIZE", 2048)))
metrics.sources.append(
    (
        lambda: Counter(ForgottenExecutable=_executables.forgotten) if _executables.forgotten else Counter(),
        lambda: setattr(_executables, "forgotten", 0),
    )
)
_reasons = Reasons()


def _references_of_a_dead_item() -> int:
    items = [object()]
    return sys.getrefcount(items[0])


_DEAD = _references_of_a_dead_item()


def live_nodes(lane: Lane) -> list[Node]:
    """Pending values whose roots are still referenced by a tensor or a view, in the order in which they were
    first written.
    """
    pending, found, seen = lane.pending, [], set()
    for index in range(len(pending)):
        if sys.getrefcount(pending[index]) > _DEAD:
            node = pending[index].node
            if node.data is None and node.epoch == lane.epoch and node.position not in seen:
                seen.add(node.position)
                found.append(node)
    return found


def flush(lane: Lane, cause: str) -> None:
    """Compute everything live of a lane. `cause` is shown by the analysis: "mark_step", "item", "print",
    "cpu", "fallback aten::x"."""
    with lock:
        outputs = live_nodes(lane)
        if listening("xla.flush"):
            facts = {"nodes": len(lane.nodes), "line": metrics.user_line(), "apart": _is_apart(lane)}
            emit("xla.flush", cause=cause, **facts)
        if outputs or lane.collective:
            _run(lane, outputs, cause)
        else:
            lane.clear()


def _is_apart(lane: Lane) -> bool:
    """Whether all that waits is what replicas tell each other of numbers that the CPU has since given: no
    part of a program's graph. DDP agrees so on its buckets, in its second forward pass, and reads the answer.
    """
    return lane.collective and all(getattr(leaf, "uploaded", -1) == lane.epoch for leaf in lane.leaves)


@tensor.relieve.define
def _relieve() -> None:
    with lock:
        for lane in tuple(overfull):
            overfull.discard(lane)
            flush(lane, "trace limit")


def _run(lane: Lane, outputs: list[Node], cause: str) -> None:
    kind = "EagerOp" if cause == "eager mode" else ""  # in the report
    leaves, scalars, draws, checks = lane.leaves, lane.scalars, lane.draws, lane.checks
    positions = tuple([node.position for node in outputs])
    # Written in place and without another holder: the result may take the buffer over.
    donated = _donated(lane) if lane.replaced else ()
    for leaf in leaves:
        leaf.data = placement.settle(leaf.data)
    inputs = [leaf.data for leaf in leaves]
    key = (tuple(lane.key), positions, donated, placement.settings(), placement.signature(inputs))
    executable = _executables.get(key)
    if scalars:
        inputs.append(jax.device_put(execute.scalar_vector(scalars), placement.home(lane.device)))
    if draws:
        inputs.append(jax.device_put(rng.words(draws), placement.home(lane.device)))
    try:
        if executable is None:
            with metrics.timing("LazyTracing"):  # what recording left to do
                graph = execute.Graph.of(lane, positions, donated)
            _reasons.explain(graph, key, cause)
            executable = _executables[key] = execute.compile_graph(graph, inputs, kind)
        else:
            metrics.counter("CachedCompile")
    finally:
        lane.clear()
    run(executable, inputs, outputs, kind)
    raise_failed(checks, [check.bad.node.data for check in checks])


def _donated(lane: Lane) -> tuple[int, ...]:
    """Leaf numbers whose buffers may be reused. `owners` never sees a tensor die; where it says more than
    none, references are counted: those of a dead item of a list, one of the list of leaves, one of the local,
    and one for each use in the trace. Counted through the item, since CPython 3.14 passes a local without a
    reference of its own.
    """
    replaced, found = lane.replaced, []
    for index in range(len(replaced)):
        leaf = replaced[index]
        if sys.getrefcount(leaf.data) != _DEAD:
            continue  # something holds the array itself
        if leaf.owners == 0 or (
            leaf.owners > 0 and sys.getrefcount(replaced[index]) == _DEAD + 2 + lane.key.count(leaf.position)
        ):
            found.append(-leaf.position - 1)
    return tuple(dict.fromkeys(found))


def run(executable: execute.Executable, inputs: list[jax.Array], outputs: list[Node], kind: str = "") -> None:
    """Run and hand the results to their nodes."""
    for node, array in zip(outputs, executable.run(inputs, kind)):
        node.data = array
        node.instruction, node.inputs, node.epoch = None, (), -1


_closures: list[tuple[Callable, tuple]] = []
_async_closures: list[tuple[Callable, tuple]] = []
_async_worker: threading.Thread | None = None
_async_errors: list[BaseException] = []  # raised at the next barrier


def add_step_closure(closure: Callable, args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Run `closure(*args)` at the end of this step, when tensors have values: printing a loss then costs no
    extra execution.

    closure: called after the barrier, in the order in which closures were added. args: its arguments; tensors
    among them are computed with the step. run_async: on a thread of its own, so that the next step need not
    wait.
    """
    (_async_closures if run_async else _closures).append((closure, tuple(args)))


def sync(wait: bool = False, device: Any = None) -> None:
    """The barrier at the end of a step: flush every device (or one), then run the step closures. `wait`
    blocks until the work is done."""
    for lane in devices.lanes(device):
        flush(lane, "mark_step")
    metrics.counter("MarkStep")
    if wait:
        wait_device_ops([] if device is None else [device])
    run_step_closures()


def run_step_closures() -> None:
    """Run the closures queued by `add_step_closure`, in order; asynchronous ones on a worker thread, after
    those of earlier steps."""
    global _async_worker
    queued, _closures[:] = list(_closures), []
    background, _async_closures[:] = list(_async_closures), []
    if background:
        before = _async_worker

        def work() -> None:
            if before is not None:
                before.join()
            if _async_errors:  # an earlier one failed
                return
            try:
                for closure, args in background:
                    closure(*args)
            except BaseException as error:  # raised in the thread of the program
                _async_errors.append(error)

        _async_worker = threading.Thread(target=work, daemon=False, name="xla step closures")
        _async_worker.start()
    for closure, args in queued:
        closure(*args)
    _raise_async_error()


def _raise_async_error() -> None:
    """Raise, in the thread of the program, the exception of an asynchronous step closure."""
    if _async_errors:
        error = _async_errors[0]
        _async_errors.clear()
        raise error


def wait_device_ops(wanted: Sequence[Any] = ()) -> None:
    """Block until all work that was sent to the devices (all, when none is named) is done."""
    if _async_worker is not None and _async_worker is not threading.current_thread():
        _async_worker.join()
        _raise_async_error()
    names = {str(torch.device(d)) for d in wanted}
    for lane in devices.lanes(None):
        if not names or str(lane.device) in names:
            barrier(lane)


def barrier(lane: Lane) -> None:
    """Block until the device of a lane is idle: a computation queued behind all others is waited for."""
    target = devices.jax_device(lane.device)
    try:
        replication.wait([a for a in jax.live_arrays() if target in a.devices() and not a.is_deleted()])
    except Exception as error:
        raise_coded(error)
