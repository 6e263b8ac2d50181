"""The recorder of whole steps: beside ops of forward and backward it knows those of optimizers.

Traced numbers become 0-d tensors in ops that take such, `_foreach_` ops become the op for each tensor, `out=`
becomes a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..autograd.aten_recorder import GraphRecorder
from ..base.compat import OpOverload
from ..base.registry import Registry, register_all
from ..graph.op_facts import facts
from ..graph.shape_tensor import UnsupportedOp, recording
from . import host
from .numbers import NumberNode, Operand, Question, node_behind, traced

aten = torch.ops.aten
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# One row an op that may take a traced number: (recorder, func, *args, **kwargs) -> result, of tensors alone.
number_rules: Registry[OpOverload, Callable[..., Any]] = Registry("numbers")
number_rule = number_rules.register
_OF_A_TENSOR = {"clamp_min": "maximum", "clamp_max": "minimum"}
_OF_A_NUMBER = {name: bound for bound, name in _OF_A_TENSOR.items()}
_KEYWORDS = {"addcmul": "value", "addcdiv": "value"}  # keyword-only parameters of the op of one tensor


class StepRecorder(GraphRecorder):
    """`updates` is set while the optimizer's own Python runs; `questions` are what its branches assumed of
    numbers.
    """

    backward_may_run_again = False  # a step draws in its backward, once

    def __init__(self) -> None:
        super().__init__()
        self.updates = False
        self.raised: Exception | None = None  # of an op of the update, whose Python may have caught it
        self.questions: dict[Question, bool] = {}
        self.known: dict[fx.Node, float | None] = {}  # numbers as they are now

    # -- numbers ---------------------------------------------------------------------------------------------
    def hint(self, value: Operand) -> float | None:
        """See `numbers.Recording`."""
        if not isinstance(value, fx.Node):
            return value
        if value not in self.known:
            known = None
            if value.op == "call_function" and value.target in host.OPS and host.is_number(value):
                hints = {
                    node: hint for node in value.all_input_nodes if (hint := self.hint(node)) is not None
                }
                if len(hints) == len(value.all_input_nodes):
                    known = host.calculate(value, hints)
            self.known[value] = known
        return self.known[value]

    def note(self, question: Question, answer: bool) -> None:
        """See `numbers.Recording`."""
        self.questions[question] = answer

    def number(self, value: Any, like: torch.Tensor | None = None) -> Any:
        """A traced number as a 0-d tensor; one that is to meet a tensor without dimensions takes its type."""
        node = node_behind(value)
        if not isinstance(node, fx.Node):
            return node
        tensor = self.tensor(node)
        if like is not None and not like.dim() and like.dtype is not torch.float64:
            return self.call(aten._to_copy.default, tensor, dtype=like.dtype)
        return tensor

    # -- ops -------------------------------------------------------------------------------------------------
    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.updates:
            return super()._record(func, args, kwargs)
        try:
            return self._update(func, args, kwargs)
        except Exception as error:
            self.raised = error
            raise

    def _update(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and args[0].dtype in _FLOATS:
            return self._read(args[0])
        if "_foreach_" in func.name():
            return self._each(func, args, kwargs)
        if not facts(func).writes and any(type(a) is torch.SymFloat for a in (*args, *kwargs.values())):
            rule = number_rules.get(func)
            if rule is not None:
                return rule(self, func, *args, **kwargs)
            args, kwargs = tuple([_plain(a) for a in args]), {k: _plain(v) for k, v in kwargs.items()}
        return super()._record(func, args, kwargs)

    def _read(self, tensor: torch.Tensor) -> torch.SymFloat:
        """`tensor.item()` of a floating tensor."""
        node = self.node_of(tensor)
        val = node.meta["val"]
        if val.shape:
            node = self.emit(aten.view.default, (node, []), {})
        if val.dtype is not torch.float64:
            node = self.emit(aten._to_copy.default, (node,), {"dtype": torch.float64})
        return traced(node, self)

    def _each(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op of one tensor for each of the lists' elements."""
        base = func._schema.name.split("::_foreach_")[1]
        UnsupportedOp.when("non_finite_check" in base, "DM236", f"{func} has no form for one tensor")
        name, writes = base.rstrip("_"), base.endswith("_")
        count = next(len(a) for a in args if isinstance(a, (list, tuple)))
        results = []
        with recording(self):
            for k in range(count):
                own = [a[k] if isinstance(a, (list, tuple)) else a for a in args]
                results.append(_one(name, own, kwargs))
                if writes:
                    own[0].copy_(results.pop())
        return None if writes else results


def _plain(value: Any) -> Any:
    """A number as it is now, noted to be part of the program."""
    return (
        value.node.guard_float()
        if type(value) is torch.SymFloat and type(value.node) is NumberNode
        else value
    )


def _one(name: str, own: list[Any], kwargs: dict[str, Any]) -> Any:
    """The functional op `name` on one element of each list."""
    if name == "norm":
        return torch.linalg.vector_norm(
            own[0], *own[1:], **{k: v for k, v in kwargs.items() if v is not None}
        )
    if name == "copy":
        return own[1]
    if name == "zero":
        return torch.zeros_like(own[0])
    keyword = _KEYWORDS.get(name)
    if keyword is not None and len(own) == 4:
        kwargs = {keyword: own.pop()}
    forms = _OF_A_TENSOR if isinstance(own[-1], torch.Tensor) else _OF_A_NUMBER
    return getattr(torch, forms.get(name, name))(*own, **kwargs)


@number_rule(aten.add.Tensor, aten.sub.Tensor)
def _sum(r: StepRecorder, func: OpOverload, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    y = r.number(y, x)
    if type(alpha) is torch.SymFloat:
        y, alpha = r.call(aten.mul.Tensor, y, r.number(alpha, y)), 1
    return r.call(func, x, y, alpha=alpha) if alpha != 1 else r.call(func, x, y)


register_all(
    number_rule,
    (
        (
            (aten.add.Scalar, aten.sub.Scalar),
            lambda r, func, x, y, alpha=1: _sum(
                r, aten.add.Tensor if func is aten.add.Scalar else aten.sub.Tensor, x, y, alpha=alpha
            ),
        ),
        (
            (aten.addcdiv.default,),
            lambda r, func, x, a, b, *, value: r.call(
                aten.add.Tensor, x, r.call(aten.div.Tensor, r.call(aten.mul.Tensor, a, r.number(value, a)), b)
            ),
        ),
        (
            (aten.addcmul.default,),
            lambda r, func, x, a, b, *, value: r.call(
                aten.add.Tensor, x, r.call(aten.mul.Tensor, r.call(aten.mul.Tensor, a, r.number(value, a)), b)
            ),
        ),
        (
            (aten.fill.Scalar,),
            lambda r, func, x, value: r.call(
                aten.expand.default,
                r.call(aten._to_copy.default, r.number(value), dtype=x.dtype),
                list(x.shape),
            ),
        ),
    ),
)


@number_rule(aten.rsub.Scalar, aten.rsub.Tensor)
def _reversed(r: StepRecorder, func: OpOverload, x: Any, y: Any, alpha: Any = 1) -> Any:
    x = x if type(alpha) is int and alpha == 1 else r.call(aten.mul.Tensor, x, r.number(alpha, x))
    y = r.number(y, x)
    return (
        r.call(aten.rsub.Scalar, x, y) if not isinstance(y, torch.Tensor) else r.call(aten.sub.Tensor, y, x)
    )


_WITH_TENSORS = {
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.pow.Scalar: aten.pow.Tensor_Tensor,
    aten.clamp_min.default: aten.maximum.default,
    aten.clamp_max.default: aten.minimum.default,
}


@number_rule(aten.mul.Tensor, aten.div.Tensor, *_WITH_TENSORS)
def _pair(r: StepRecorder, func: OpOverload, x: Any, y: Any) -> Any:
    x, y = (
        r.number(x, y if isinstance(y, torch.Tensor) else None),
        r.number(y, x if isinstance(x, torch.Tensor) else None),
    )
    form = _WITH_TENSORS.get(func, func)
    if form in (aten.maximum.default, aten.minimum.default):
        y = r.call(aten._to_copy.default, y, dtype=x.dtype)
    return r.call(form, x, y)


@number_rule(aten.clamp.default)
def _clamp(r: StepRecorder, func: OpOverload, x: Any, low: Any = None, high: Any = None) -> Any:
    for bound, form in ((low, aten.maximum.default), (high, aten.minimum.default)):
        if type(bound) is torch.SymFloat:
            x = r.call(form, x, r.call(aten._to_copy.default, r.number(bound), dtype=x.dtype))
        elif bound is not None:
            x = r.call(func, x, *((bound,) if bound is low else (None, bound)))
    return x


@number_rule(aten.lerp.Scalar)
def _lerp(r: StepRecorder, func: OpOverload, x: Any, end: Any, weight: Any) -> Any:
    """Eager takes the end that is nearer, for the sake of rounding."""
    distance = r.call(aten.sub.Tensor, end, x)
    if weight < 0.5 and weight > -0.5:
        return r.call(aten.add.Tensor, x, r.call(aten.mul.Tensor, distance, r.number(weight, x)))
    return r.call(aten.sub.Tensor, end, r.call(aten.mul.Tensor, distance, r.number(1 - weight, x)))


@number_rule(aten.full.default)
def _full(
    r: StepRecorder,
    func: OpOverload,
    size: Any,
    value: Any,
    *,
    dtype: Any = None,
    device: Any = None,
    **_: Any,
) -> Any:
    filled = r.call(aten._to_copy.default, r.number(value), dtype=dtype or torch.get_default_dtype())
    return r.call(aten.expand.default, filled, list(size))
