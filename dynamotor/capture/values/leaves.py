"""Tensors that become leaves of autograd inside a trace: `requires_grad_()`, `requires_grad = True`, `detach_()`.

A graph is cut around the node of `requires_grad_`, so that the tensor that leaves it is the leaf of what follows.
`detach_()` of a tensor of the trace needs no node of its own: later uses of the tensor are those of its detached
alias.

>>> h = x * 2; h.requires_grad = True      # node: h.requires_grad_(True)
>>> y = w * x; y.detach_()                 # node: y.detach(), in the place of y from here on
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ...base import compat
from ...graph.shape_tensor import ShapeTensor
from ...graph.spec import TensorSpec
from ..breaks import unsupported, unsupported_if
from ..guards import Answer
from ..source import Joined
from .base import MISSING, Args, Kwargs, Trace, Value, builtin_rule
from .constant import TRUE
from .data_writes import layout, refuse_if_recorded
from .tensor import TensorValue, attribute_setters, torch_call, trial, version


@builtin_rule(torch.Tensor.requires_grad_)
def _requires_grad_(trace: Trace, tensor: Value, requires_grad: Value = TRUE) -> Value:
    if not isinstance(tensor, TensorValue) or requires_grad.python_type() is not bool:
        raise unsupported("autograd", "requires_grad_() is called with unusual arguments")
    return set_requires_grad(trace, tensor, requires_grad.as_constant())


def set_requires_grad(trace: Trace, tensor: TensorValue, wanted: bool) -> TensorValue:
    """`tensor.requires_grad_(wanted)`."""
    example, real = tensor.example, tensor.real()
    leaf = real is not MISSING and example.requires_grad and example.is_leaf
    by_base = leaf and trace.reader.ask(tensor.source, real, "being a view", compat.is_view)
    if wanted == example.requires_grad and not by_base:
        return tensor
    unsupported_if(
        by_base or _is_apart(trace, tensor) or real is not MISSING and tensor.written,
        "autograd",
        "requires_grad of a tensor is set",
        "it is a view or of a subclass, or the call belongs to a checkpoint, a transform or control flow",
        "set requires_grad outside the compiled function",
    )
    node = tensor.node
    trial(trace, "requires_grad_", torch.Tensor.requires_grad_, [example, wanted], {})
    if real is MISSING and example._is_view():
        _view_in_eager(node)
    changed = trace.graph.call_method("requires_grad_", (node, wanted), {}, example.spec)
    if real is MISSING:
        tensor.put(changed)
    elif wanted:
        trace.tensors.new_leaves.append(tensor)
    return tensor


def _view_in_eager(node: fx.Node) -> None:
    """Leave the call that makes a view to PyTorch. The result of a compiled part is no view, and autograd's error about
    a write into a leaf tells views from other tensors."""
    node.meta["view_of_leaf"] = True
    if node.target is operator.getitem and type(node.all_input_nodes[0].meta.get("val")) is not TensorSpec:
        _view_in_eager(node.all_input_nodes[0])  # one of the results of `unbind`


@builtin_rule(torch.Tensor.detach_, torch.detach_)
def _detach_(trace: Trace, tensor: Value) -> Value:
    if not isinstance(tensor, TensorValue) or tensor.real() is not MISSING or _is_apart(trace, tensor):
        raise unsupported(
            "autograd", "detach_() is called", "it changes autograd's state of a tensor", "use detach()"
        )
    if not tensor.example.requires_grad:
        return tensor
    if tensor.node.users or tensor.example._is_view():  # eager's backward refuses tensors saved before
        stop = unsupported("autograd", "detach_() of a tensor that was used before", cure="use detach()")
        stop.whole = True
        raise stop
    node = tensor.node
    trial(trace, "detach_", torch.Tensor.detach_, [tensor.example], {})
    tensor.put(trace.graph.call_method("detach", (node,), {}, tensor.example.spec))
    return tensor


def _is_apart(trace: Trace, tensor: TensorValue) -> bool:
    """Whether a graph cannot be cut at the call, or the tensor leaves the trace as another one: a subclass's, which
    is an alias of it."""
    plain = type(tensor.example) is ShapeTensor and tensor.data_of is None
    return trace.sizes.in_body or bool(trace.graph.recompute) or trace.calls.plain > 0 or not plain


@attribute_setters.register("requires_grad")
def _requires_grad_is_set(trace: Trace, tensor: TensorValue, value: Value) -> bool:
    if value.python_type() is not bool or not tensor.example.is_leaf:
        return False
    set_requires_grad(trace, tensor, value.as_constant())
    return True


@attribute_setters.register("data")
def _data_is_set(trace: Trace, tensor: TensorValue, value: Value) -> bool:
    """`tensor.data = value`: the tensor has the memory of another one from here on. A leaf
    gets it in a node around which the graph is cut. For a backend that cuts no graph it is a new value of the trace, and
    gets the memory after the graph, if autograd has saved nothing of it.
    """
    if (
        not isinstance(value, TensorValue)
        or {type(value.example), type(tensor.example)} != {ShapeTensor}
        or layout(value.example) != layout(tensor.example)
    ):
        return False
    if value.data_of is tensor or _has_memory_of(trace, tensor, value):  # it is unchanged
        return True
    refuse_if_recorded(trace, {tensor.example.memory, value.example.memory})
    if (
        tensor.source is None
        or value.source is not None
        or value.data_of is not None
        or value.example._is_view()
        or tensor.written
        or _is_apart(trace, tensor)
        or value.example.requires_grad
        or _has_other_aliases(trace, tensor)
    ):
        return False
    for other in trace.tensors.by_example.values():
        if other.data_of is tensor:  # it keeps the old memory
            other.data_of = None
    if trace.sizes.policy.states and tensor.example.is_leaf:
        trace.graph.call_function(setattr, (tensor.node, "data", value.node), {})
        trace.tensors.given_away.add(value.example.memory)
        return True
    if tensor.example.requires_grad:
        return False
    alias = torch_call(trace, "detach", [value], {})
    assert isinstance(alias, TensorValue)
    tensor.put(alias.node)
    tensor.example, tensor.new_data, tensor.first_version = alias.example, alias, version(alias.example)
    trace.tensors.by_example[id(alias.example)] = tensor
    trace.effects.touch(tensor)
    return True


def _has_memory_of(trace: Trace, tensor: TensorValue, value: TensorValue) -> bool:
    """Whether two tensors from outside have the same elements of one storage, guarded. Once the program has set the
    memory of any tensor, their objects no longer tell."""
    moved = trace.tensors.given_away or any(v.new_data is not None for v in trace.tensors.by_example.values())
    if moved or MISSING in (tensor.real(), value.real()) or not tensor.obj.is_set_to(value.obj):
        return False
    assert tensor.source is not None and value.source is not None
    pair = Joined((tensor.source, value.source))
    trace.reader.guard(Answer(pair, _is_set_to, True, f"the memory of {value.source}"))
    return True


def _is_set_to(pair: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return pair[0].is_set_to(pair[1])


def _has_other_aliases(trace: Trace, tensor: TensorValue) -> bool:
    memory = tensor.example.memory
    others = [
        v for v in trace.tensors.by_example.values() if type(v.example) is ShapeTensor and v is not tensor
    ]
    alike = [v for v in others if v.example.memory is memory]
    return any(v.data_of is not tensor for v in alike)


def makes_leaf(fn: Callable[..., Any], kwargs: Kwargs) -> bool:
    """Whether a call makes a tensor that is to be a leaf."""
    wanted = kwargs.get("requires_grad")
    factory = isinstance(fn, types.BuiltinFunctionType) or getattr(fn, "__name__", "").startswith("new_")
    return wanted is not None and factory and wanted.python_type() is bool and "out" not in kwargs


def make_leaf(trace: Trace, fn: Callable[..., Any], args: Args, kwargs: Kwargs) -> Value:
    """`torch.zeros(3, requires_grad=True)`: the call without that, and `requires_grad_`."""
    plain = {name: value for name, value in kwargs.items() if name != "requires_grad"}
    made = trace.call_builtin(fn, args, plain)
    if isinstance(made, TensorValue) and kwargs["requires_grad"].as_constant():
        return set_requires_grad(trace, made, True)
    return made
