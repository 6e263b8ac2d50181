"""The check mode (`config.check`, DYNAMOTOR_CHECK=1): a compiled graph runs beside eager, over memory that
tells of mistakes.

Planned memory holds NaN before a buffer's first and after its last step, and bytes behind each buffer stay as
they are (`StepChecks`). Each call's results and written inputs are compared with the aten graph, run node by
node (`Checked`); where they differ, the call is repeated with every buffer compared, so that the first node
that differs is named.

>>> call = Checked(call, copy_of(gm), optimised_gm, info)
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..base import compat
from ..base.errors import InternalError, UserLine
from ..base.events import counters
from ..graph.op_facts import is_collective, is_custom
from ..graph.private_draws import NotPrivate, PrivateDraws
from ..graph.sizes import hint, numbers
from ..graph.spec import CPU, TensorSpec, copy_as, far
from ..lower.outputs import COPY_
from ..lower.program import ExternStep, Program, writes_of
from ..runtime.memory import poison
from .externs import row_major_backward
from .folded import FoldedCall
from .rounding import RUNS, Moved, beyond

Values = dict[fx.Node, Any]
States = dict[torch.device, torch.Tensor]  # of generators
_below_autograd = compat.BelowAutograd
_CURE = "report the program; backend='aot_eager' runs it without the native compiler"
# The tolerated distance of a result from eager's, relative to its largest element. Beyond it, `rounding.py`
# estimates how far rounding alone may move the result.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}


def _batch_norm_elements(
    x: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, rstd: torch.Tensor, eps: float
) -> torch.Tensor:
    """aten's op, which has no kernel on a CPU."""
    shape = (-1, *[1] * (x.dim() - 2))
    y = (x - mean.reshape(shape)) * rstd.reshape(shape)
    y = y if weight is None else y * weight.reshape(shape)
    return (y if bias is None else y + bias.reshape(shape)).to(x.dtype)


# Saved values may have other strides than eager's: a view then needs a copy, and oneDNN may overwrite memory.
_RELAXED = {
    torch.ops.aten.view.default: torch.reshape,
    torch.ops.aten._unsafe_view.default: torch.reshape,
    torch.ops.aten.convolution_backward.default: row_major_backward,
    torch.ops.aten.batch_norm_elemt.default: _batch_norm_elements,
}
_EXACT = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_reference: ContextVar[dict[str, tuple[fx.Node, Any, list[Any]]] | None] = ContextVar(
    "dynamotor.reference", default=None
)


@dataclass(frozen=True)
class MemoryPlan:
    """Planned memory, by buffer: where its bytes start, where they end, where those that guard it end; first
    and last steps.
    """

    starts: dict[str, int]
    stops: dict[str, int]
    ends: dict[str, int]
    first: dict[str, int]
    last: dict[str, int]


# -- memory --------------------------------------------------------------------------------------------------
class StepChecks:
    """The checks around each step of one program; `watch(block)` gives the hooks of one call."""

    def __init__(self, program: Program, plan: MemoryPlan) -> None:
        self.steps, steps = program.steps, range(len(program.steps))
        self.plan, start = plan, plan.starts
        live = [[n for n in start if plan.first[n] <= at <= plan.last[n]] for at in steps]
        behind = [[i for n in names for i in range(plan.stops[n], plan.ends[n])] for names in live]
        self.guards = [torch.tensor(places, dtype=torch.int64) for places in behind]
        # A buffer may take over the memory of one that ends in the step where it begins.
        first = [{start[n]: n for n in live[at] if plan.first[n] == at} for at in steps]
        last = [{start[n]: n for n in live[at] if plan.last[n] == at} for at in steps]
        self.begins = [[n for o, n in first[at].items() if last[at].get(o, n) == n] for at in steps]
        self.ends = [[n for o, n in last[at].items() if first[at].get(o, n) == n] for at in steps]
        self.ends[-1:] = [[]]  # results that show planned memory are copied behind the last step
        made = {name: at for at, step in enumerate(program.steps) for name in writes_of(step)}
        nodes = {ref: name for name, ref in program.values.items()}  # of two that share memory, the later
        self.values = [
            [(name, ref) for ref, name in nodes.items() if made.get(ref.name) == at] for at in steps
        ]

    def watch(self, block: Any) -> StepWatch:
        return StepWatch(self, block.bytes)


class StepWatch:
    """The hooks that a call program in check mode calls around each step."""

    def __init__(self, checks: StepChecks, memory: torch.Tensor) -> None:
        self.checks, self.memory = checks, memory

    def before(self, at: int) -> None:
        """Poison the memory of buffers that begin with this step."""
        plan = self.checks.plan
        for name in self.checks.begins[at]:
            self._poison(name)
            self.memory[plan.stops[name] : plan.ends[name]].fill_(0xA5)

    def _poison(self, name: str) -> None:
        self.memory[self.checks.plan.starts[name] : self.checks.plan.stops[name]].fill_(0xFF)

    def after(self, at: int, made: dict[str, Any]) -> None:
        """Look at the guard bytes, compare the step's results, poison buffers that end with it."""
        step = self.checks.steps[at]
        if self.checks.guards[at].numel() and not bool((self.memory[self.checks.guards[at]] == 0xA5).all()):
            what = f"{step.target}" if isinstance(step, ExternStep) else f"the kernel of {step.note}"
            raise InternalError(
                "DM921",
                f"{what} wrote beyond the memory of its buffers",
                why="guard bytes changed",
                where=getattr(step, "where", None),
                cure=_CURE,
            )
        reference = _reference.get()
        for name, ref in self.checks.values[at] if reference is not None else ():
            buffer = made.get(ref.name)
            if reference is not None and name in reference and isinstance(buffer, torch.Tensor):
                node, want, moved = reference[name]
                start = int(buffer.storage_offset() + ref.offset)
                got = torch.as_strided(buffer.view(ref.dtype), numbers(ref.shape), numbers(ref.stride), start)
                if (why := difference(got, want, moved)) is not None:
                    raise _differs(f"the value of {node} = {node.target}", why, node.meta.get("where"))
        for name in self.checks.ends[at]:
            self._poison(name)


_lent: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def fresh(make: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """New memory for a result: unreferenced and poisoned."""
    tensor = make(*args)
    held = _lent.get(tensor.data_ptr()) if tensor.numel() else None
    if held is not None and held.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        raise InternalError(
            "DM924",
            "memory of a result that is still held was handed out again",
            why=f"{held.dtype}{list(held.shape)}",
            cure=_CURE,
        )
    _lent[tensor.data_ptr()] = tensor
    return poison(tensor)


# -- results -------------------------------------------------------------------------------------------------
class Checked:
    """A compiled graph whose every call is compared with `original`, the aten graph that it was compiled
    from.

    optimised: the graph that was lowered, whose nodes have the names that buffers are known by.
    """

    def __init__(self, call: Callable[..., Any], original: fx.GraphModule, optimised: fx.GraphModule) -> None:
        self.call, self.original, self.optimised = call, original, optimised
        nodes = list(original.graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        copies = [node for node in nodes if node.target is COPY_ and node.args[0].op == "placeholder"]
        self.written = {self.inputs.index(node.args[0]): node for node in copies}
        self.results = next(node for node in reversed(nodes) if node.op == "output").args[0]
        self.free = _arbitrary(nodes)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        counters["check"]["calls"] += 1
        given = self._private(inputs)
        draws = PrivateDraws({CPU: torch.get_rng_state()})
        try:
            with draws:
                reference: Values | Exception = evaluate(self.original, self._private(inputs))
        except NotPrivate:
            return tuple(self.call(*inputs))
        except Exception as error:  # eager refuses the call: so must the compiled graph
            reference = error
        results = self.call(*inputs)
        if isinstance(reference, Exception):
            raise _differs(
                "a compiled graph", f"eager raises {type(reference).__name__}: {reference}", None
            ) from reference
        moved: list[Values] = []
        made = zip(
            (*self.results, *self.written.values()),
            (*results, *(inputs[i] for i in self.written)),
            strict=True,
        )
        for node, got in made:
            if isinstance(node, fx.Node) and node not in self.free:
                want = reference[node]
                why = difference(got, want)
                if why is None:
                    continue
                note = "each step alone computes the right values"
                try:
                    moved = moved or self._moved(self.original, given, draws.states)
                    why = difference(got, want, [run[node] for run in moved])
                    if why is None:
                        continue
                    self._find_wrong_step(given, draws.states)
                except InternalError:
                    raise
                except Exception as error:  # no error of the program's, which would run again without checks
                    note = f"{type(error).__name__} when it was looked at: {error}"
                raise _differs(
                    f"the result of {node} = {node.target}", f"{why}; {note}", node.meta.get("where")
                )
        return tuple(results)

    def boxed(self, inputs: list[Any]) -> tuple[Any, ...]:
        """A call that empties the list."""
        given = tuple(inputs)
        inputs.clear()
        return self(*given)

    def _private(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs, those that the graph writes as copies."""
        return [copy_as(x.detach(), x.stride()) if i in self.written else x for i, x in enumerate(inputs)]

    def _moved(self, gm: fx.GraphModule, given: Sequence[Any], states: States) -> list[Values]:
        """All values of runs in which eager might have rounded otherwise; each draws the same random
        numbers.
        """
        runs = []
        for seed in range(RUNS):
            with PrivateDraws(states):
                runs.append(evaluate(gm, self._private(given), Moved(seed)))
        return runs

    def _find_wrong_step(self, given: Sequence[Any], states: States) -> None:
        """Repeat the call with each buffer compared; raises for the first node that differs."""
        inputs = self._private(given)
        constants = self.call.constants(inputs) if isinstance(self.call, FoldedCall) else ()
        given = (*given, *constants)
        with PrivateDraws(states):
            reference = evaluate(self.optimised, [*inputs, *constants])
        moved = self._moved(self.optimised, given, states)
        token = _reference.set(
            {node.name: (node, v, [run[node] for run in moved]) for node, v in reference.items()}
        )
        now = torch.get_rng_state()
        try:
            torch.set_rng_state(states[CPU])  # an error follows: draws of other threads do not matter
            self.call(*self._private(given[: len(inputs)]))
        finally:
            _reference.reset(token)
            torch.set_rng_state(now)


def checkable(gm: fx.GraphModule) -> bool:
    """Whether a graph may run twice: collectives meet other ranks, custom ops and generators may have
    effects.
    """
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    generators = (
        arg
        for node in calls
        for arg in (*node.args, *node.kwargs.values())
        if isinstance(arg, torch.Generator)
    )
    return next(generators, None) is None and not any(
        is_collective(n.target) or is_custom(n.target) for n in calls
    )


def _plainly(node: fx.Node, target: Any, args: Any, kwargs: Any) -> Any:
    return target(*args, **kwargs)


def evaluate(gm: fx.GraphModule, inputs: Sequence[Any], compute: Callable[..., Any] = _plainly) -> Values:
    """Every node's value, op by op. `compute` runs one op."""
    values: Values = {}
    given: Iterator[Any] = iter(inputs)
    copies: list[tuple[fx.Node, torch.Tensor, torch.Tensor]] = []
    with _below_autograd():
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = _as_traced(node, next(given))
            elif node.op == "get_attr":
                values[node] = operator.attrgetter(str(node.target))(gm)
            elif (
                node.target is COPY_ and node.args[0].op == "placeholder"
            ):  # behind all readers of the old contents
                copies.append(
                    (node, values[node.args[0]], copy_as(values[node.args[1]], values[node.args[1]].stride()))
                )
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = compute(node, _RELAXED.get(node.target, node.target), args, kwargs)
        for node, target, source in copies:
            values[node] = target.copy_(source)
    return values


def _as_traced(node: fx.Node, value: Any) -> Any:
    """An input; a saved value that the forward laid out in its own way, in eager's order of dimensions."""
    traced = node.meta.get("traced")
    if not isinstance(traced, TensorSpec):
        return value
    order = sorted(range(len(traced.shape)), key=lambda d: -hint(traced.stride[d]))
    return value.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])


_EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


def _packet(node: fx.Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def _arbitrary(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes whose values come from memory that the program itself leaves as it is (`torch.empty`)."""
    found: set[fx.Node] = set()
    for node in nodes:
        if _packet(node) in _EMPTY or found.intersection(node.all_input_nodes):
            found.add(node)
    return found


def difference(got: Any, want: Any, moved: Sequence[Any] = ()) -> str | None:
    """A text that says how far a value is from eager's, or None if it is equal. `moved`: eager's values under
    other roundings (`rounding.py`).
    """
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return (
            None if type(got) is type(want) and (got == want or got != got) else f"{got!r}, and not {want!r}"
        )
    if (got.shape, got.dtype, got.device) != (want.shape, want.dtype, want.device):
        return f"{got.dtype}{list(got.shape)}, and not {want.dtype}{list(want.shape)}"
    if got.layout is not torch.strided or not (got.dtype in TOLERANCE or got.dtype in _EXACT):
        return None
    off = far(got, want, TOLERANCE.get(got.dtype, 0.0))
    if moved:
        off &= beyond(got, want, list(moved))
    count = int(off.sum())
    if not count:
        return None
    place = tuple(int(i) for i in off.nonzero()[0])
    return (
        f"{count} of {off.numel()} elements differ, the first at {place}: "
        f"{got[place].item()}, and not {want[place].item()}"
    )


def _differs(what: str, why: str, where: UserLine | None) -> InternalError:
    return InternalError("DM922", f"{what} is not eager's", why=why, where=where, cure=_CURE)
