"""Functional collectives (`torch.distributed._functional_collectives`) in captured graphs: they stay, in
order, and overlap.

A call becomes two nodes, the start and its wait. Starts keep their order; a wait moves down to where its
result is first used.

>>> y = all_reduce(x, "sum", group)      # in compiled code
    all_reduce = torch.ops._c10d_functional.all_reduce.default(x, 'sum', '0')
    ...                                  # what does not need y
    y = torch.ops._c10d_functional.wait_tensor.default(all_reduce)
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..base import compat
from ..base.probe import COMPILE, lost
from ..capture.breaks import unsupported_if
from ..capture.guards import IdIs
from ..capture.values.base import MISSING, CallRule, Trace, Value, builtin_rule, call_finder, calls_python
from ..capture.values.constant import Constant
from ..graph.op_definition import layout
from ..graph.op_facts import is_collective
from ..graph.sizes import contiguous_stride, equal
from ..graph.spec import TensorSpec
from ..lower.lowering import LoopBuilder, lowerings
from ..lower.value import LoopValue

_ops = torch.ops._c10d_functional
_start_all_reduce, _start_broadcast = _ops.all_reduce.default, _ops.broadcast.default
_start_all_gather, _start_reduce_scatter = (
    _ops.all_gather_into_tensor.default,
    _ops.reduce_scatter_tensor.default,
)
_start_all_to_all = _ops.all_to_all_single.default
_wait = _ops.wait_tensor.default
_cat = torch.cat


# What compiled code runs in place of the library's functions: the same ops without its wrapper class --------
def _name(group: Any, tag: str) -> Any:
    """The group's name; answered while tracing."""
    return compat.resolve_group_name()(group, tag)


def _size(group: Any, tag: str) -> int:
    """The group's number of ranks; answered while tracing."""
    return compat.group_size_by_name(_name(group, tag))


def all_reduce(self: torch.Tensor, reduceOp: str, group: object, tag: str = "") -> torch.Tensor:
    return _wait(_start_all_reduce(self, reduceOp.lower(), _name(group, tag)))


def broadcast(self: torch.Tensor, src: int, group: object, tag: str = "") -> torch.Tensor:
    return _wait(_start_broadcast(self, src, _name(group, tag)))


def all_gather(self: torch.Tensor, gather_dim: int, group: object, tag: str = "") -> torch.Tensor:
    gathered = _wait(_start_all_gather(self.contiguous(), _size(group, tag), _name(group, tag)))
    return gathered if gather_dim == 0 else _cat(gathered.chunk(_size(group, tag), 0), gather_dim)


def reduce_scatter(
    self: torch.Tensor, reduceOp: str, scatter_dim: int, group: object, tag: str = ""
) -> torch.Tensor:
    if scatter_dim != 0:
        self = _cat(self.chunk(_size(group, tag), scatter_dim))
    return _wait(
        _start_reduce_scatter(self.contiguous(), reduceOp.lower(), _size(group, tag), _name(group, tag))
    )


def all_to_all(
    self: torch.Tensor,
    output_split_sizes: list[int] | None,
    input_split_sizes: list[int] | None,
    group: object,
    tag: str = "",
) -> torch.Tensor:
    ranks = _size(group, tag)
    even = [self.shape[0] // ranks] * ranks
    return _wait(
        _start_all_to_all(
            self.contiguous(), output_split_sizes or even, input_split_sizes or even, _name(group, tag)
        )
    )


# The functions that differentiate under a name of their own do so with the same ops, in PyTorch versions
# whose ops can.
_POLYFILLS: dict[str, Any] = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "all_to_all_single": all_to_all,
    "all_gather_tensor": all_gather,
    "all_gather_single": all_gather,
    "reduce_scatter_tensor": reduce_scatter,
    "reduce_scatter_single": reduce_scatter,
}
if not lost(COMPILE) and compat.has_kernel(_start_all_gather.name(), "Autograd"):
    _POLYFILLS |= {
        f"{name}_autograd": fn for name, fn in _POLYFILLS.items() if name not in ("all_reduce", "broadcast")
    }


@call_finder
def _find_collective(fn: Callable[..., Any]) -> CallRule | None:
    if not isinstance(fn, types.FunctionType) or fn.__module__ != "torch.distributed._functional_collectives":
        return None
    if fn.__name__ == "wait_tensor":
        return lambda trace, tensor: tensor  # what collectives give in compiled code is waited for
    polyfill = _POLYFILLS.get(fn.__name__)
    if polyfill is None:
        return None
    return calls_python(polyfill)


def _answered(fn: Callable[..., Any], trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    values = []
    for value in (*args, *kwargs.values()):
        real = value.real()
        unsupported_if(
            real is MISSING and not value.is_constant(),
            "unsupported-value",
            "a process group made inside the captured region",
            cure="make the group outside the compiled function",
        )
        if real is not MISSING and value.source is not None:
            trace.reader.guard(IdIs(value.source, real))
        values.append(value.as_constant() if real is MISSING else real)
    return Constant(fn(*values))


builtin_rule(_name)(functools.partial(_answered, _name))
builtin_rule(_size)(functools.partial(_answered, _size))


# In aten graphs ---------------------------------------------------------------------------------------------
class OwnInput:
    """Calls a collective on a copy of its input: it reads while later kernels write."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.__name__ = f"own_input_{target.overloadpacket.__name__}"

    def __call__(self, x: torch.Tensor, *args: Any) -> Any:
        return self.target(x.clone(memory_format=torch.contiguous_format), *args)

    def __repr__(self) -> str:
        return f"OwnInput({self.target})"


class HeldInput(OwnInput):
    """Calls a collective on its input, which the program made and does not write again: its memory stays
    until the result was waited for (`lower.extern.may_alias`), and is lent to no other program if this one
    raises before that (`codegen.call_program`).
    """

    holds_memory = True

    def __call__(self, x: torch.Tensor, *args: Any) -> Any:
        return self.target(x, *args)

    def __repr__(self) -> str:
        return f"HeldInput({self.target})"


def _lower(call: Any, ctx: LoopBuilder, *args: Any) -> Any:
    return ctx.extern(call, args, {})


def _lower_start(target: Any, ctx: LoopBuilder, x: LoopValue, *args: Any) -> Any:
    ref = ctx.realize(x)
    rows = equal(ref.stride, contiguous_stride(ref.shape)) and equal(x.stride or ref.stride, ref.stride)
    held = (
        rows and ctx.buffers[ref.name].kind == "temp" and any(user.target is _wait for user in ctx.node.users)
    )
    return ctx.extern(HeldInput(target) if held else OwnInput(target), (x, *args), {})


for _target in (_start_all_gather, _start_reduce_scatter, _start_all_to_all, _start_broadcast):
    lowerings.add(_target, functools.partial(_lower_start, _target))
for _target in (_start_all_reduce, _wait):  # the first copies its input itself
    lowerings.add(_target, functools.partial(_lower, _target))
# A message from one rank to another: a copy of the tensor that it reads or fills. Other collectives are
# waited for at once (`lower.extern.Awaited`).
for _target in filter(None, (getattr(_ops, name, None) for name in ("isend", "irecv"))):
    lowerings.add(_target.default, functools.partial(_lower, OwnInput(_target.default)))


@layout(_start_broadcast)
def _row_major(x: TensorSpec, *args: Any) -> TensorSpec:
    """A broadcast's result, whatever the strides of its input (PyTorch's meta kernel keeps these)."""
    return TensorSpec.dense(x.shape, x.dtype, x.device)


def _is_functional(target: Any) -> bool:
    return isinstance(target, compat.OpOverload) and target.namespace == "_c10d_functional"


def has_collectives(graph: fx.Graph) -> bool:
    """Whether a graph holds functional collectives."""
    return any(node.op == "call_function" and _is_functional(node.target) for node in graph.nodes)


def sink_waits(graph: fx.Graph) -> None:
    """Move each wait down to right before the first use of its result (or before gradients are switched on or
    off). Starts stay in their order."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    switches = [node for node in graph.nodes if node.target is compat.set_grad_enabled]
    for node in reversed(list(graph.nodes)):
        if node.target is _wait and node.users:
            stops = [*node.users, *(s for s in switches if position[s] > position[node])]
            min(stops, key=position.__getitem__).prepend(node)


def hoist_starts(graph: fx.Graph) -> None:
    """Move each start of a functional graph up behind its last input or the collective before it, whichever
    is later.
    """
    before: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_collective(node.target) or node.target is _wait:
            continue
        if not _is_functional(node.target):  # sharded parameters: `prefetch.py` has put it there
            before = node
            continue
        anchors = {
            arg for arg in (*node.all_input_nodes, before) if arg is not None and arg.op != "placeholder"
        }
        last = next((other for other in reversed(graph.nodes) if other in anchors), None)
        if last is not None:
            last.append(node)
        before = node


def overlap(backward: fx.GraphModule) -> None:
    """Let the collectives of a backward graph run beside what does not need them."""
    if has_collectives(backward.graph):
        hoist_starts(backward.graph)
        sink_waits(backward.graph)
