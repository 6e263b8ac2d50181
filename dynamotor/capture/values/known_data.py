"""Tensors whose data the trace knows: made of plain numbers by a few functions, and unwritten; and the real
object that a value stands for in the call that is captured, for functions whose result is taken as a constant.

>>> x.sum(torch.arange(2, 4).tolist())       # no break: the list is [2, 3]
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ...base import compat
from ...graph.sizes import Size, is_unbacked
from ...graph.spec import duplicate
from ..breaks import unsupported, unsupported_if
from .base import MISSING, Trace, Value
from .containers import DictValue, ListValue, SequenceValue, TupleValue
from .tensor import TensorValue, writes_inputs

_MOST = 256  # calls, and numbers of the result
# Of a function's or method's name: the same on a CPU wherever and whenever they run.
_NAMES = """
    tensor as_tensor scalar_tensor stack arange linspace zeros ones full eye getitem long int float double bool
    add sub mul div true_divide floor_divide floordiv truediv remainder mod neg abs pow floor ceil trunc
    sum prod amax amin max min cumsum flip eq ne lt le gt ge any all unbind reshape view flatten unsqueeze squeeze
"""
_PURE = frozenset(_NAMES.split())
_FUNCTIONS = {
    getattr(m, name) for m in (torch, operator) for name in _PURE if callable(getattr(m, name, None))
}
_PLAIN = (int, float, bool, type(None), torch.dtype, str, slice, fx.Node)
# What these take besides the tensor itself are sizes.
SIZED = frozenset(
    ("view", "reshape", "expand", "repeat", "as_strided", "zeros", "ones", "empty")
    + ("new_zeros", "new_ones", "new_empty")
)


def sizes_as_numbers(trace: Trace, value: Any) -> Value:
    """A size, or a list of sizes, with numbers in the place of tensors whose data the trace knows."""
    if type(value) in (ListValue, TupleValue) and any(type(item) is TensorValue for item in value.items):
        return type(value)([sizes_as_numbers(trace, item) for item in value.items])
    whole = type(value) is TensorValue and value.example.dtype is torch.int64 and not value.example.ndim
    return value if not whole or (data := known(trace, value)) is None else trace.fresh(data.item())


def known(trace: Trace, tensor: TensorValue) -> torch.Tensor | None:
    """The tensor itself, on a CPU; None where its data come from outside, or are not known to stay."""
    example = tensor.example
    if (
        tensor.source is not None
        or example.device.type != "cpu"
        or example.requires_grad
        or not all(type(n) is int for n in example.shape)
        or example.numel() > _MOST
        or trace.sizes.in_body
    ):
        return None
    env: dict[fx.Node, Any] = {}
    return env[tensor.node] if _work_out(tensor.node, env) else None


def _work_out(node: fx.Node, env: dict[fx.Node, Any]) -> bool:
    """Run the node's graph on real tensors; returns whether that can be done."""
    if node in env:
        return True
    if not node.op.startswith("call") or len(env) > _MOST or not _is_pure(node) or _may_be_written(node):
        return False
    leaves = compat.tree_leaves((node.args, node.kwargs))
    if node.target is torch.scalar_tensor:  # a size that made a number of a tensor becomes one here
        sizes = [
            n for n in node.all_input_nodes if type(n.meta["val"]) is Size and not is_unbacked(n.meta["val"])
        ]
        env |= {n: int(n.meta["val"]) for n in sizes}
    plain = (isinstance(x, _PLAIN) or isinstance(x, torch.device) and x.type == "cpu" for x in leaves)
    if not all(plain) or not all(_work_out(one, env) for one in node.all_input_nodes):
        return False
    with torch.no_grad(), torch.device("cpu"):
        run_node(node, env)
    return True


def run_node(node: fx.Node, env: dict[fx.Node, Any]) -> None:
    """Run a call on what its arguments are in `env`."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
    function = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    env[node] = function(*args, **kwargs)


def _is_pure(node: fx.Node) -> bool:
    return (node.target in _PURE if isinstance(node.target, str) else node.target in _FUNCTIONS) and (
        "out" not in node.kwargs
    )


def _may_be_written(node: fx.Node) -> bool:
    """Whether anything but a pure function takes it, or what may be a view of it."""
    return any(user.op != "output" and (not _is_pure(user) or _may_be_written(user)) for user in node.users)


# In the call that is captured ------------------------------------------------------------------------------
def now(trace: Trace, value: Value) -> Any:
    """The object, as the program would have it here. Raises Unsupported where the trace changed something
    that it may be made of, or its content is unknown.
    """
    if trace.effects.changes_objects or writes_inputs(trace) or trace.sizes.in_body:
        raise _unknown(value, "the program changed objects before")
    if isinstance(value, TensorValue):
        return value.obj if value.source is not None else _computed(trace, value.node)
    if isinstance(value, DictValue) and value.source is None:
        return {key.as_constant(): now(trace, item) for key, item in value.load().values()}
    if isinstance(value, SequenceValue) and value.source is None:
        return value.kind([now(trace, item) for item in value.items])
    return value.real() if not value.is_constant() and value.real() is not MISSING else value.as_constant()


def _computed(trace: Trace, wanted: fx.Node) -> torch.Tensor:
    """Run the graph up to a node, on copies of the real inputs."""
    unsupported_if(
        trace.calls.draws, "random", "a function whose result is constant takes a tensor of random numbers"
    )
    env: dict[fx.Node, Any] = {}
    held: dict[int, torch.UntypedStorage] = {}
    copies = (duplicate(e, held) if isinstance(e, torch.Tensor) else e for e in trace.graph.examples)
    with torch.no_grad():
        for node in trace.graph.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(copies)
            else:
                run_node(node, env)
            if node is wanted:
                break
    return env[wanted]


def _unknown(value: Value, cause: str) -> Exception:
    return unsupported(
        "unsupported-value", f"{value.describe()} is given to a function whose result is constant", cause
    )
