"""How the call program calls aten: the fastest callable of an overload, its `out=` names, and which results
may alias.

>>> callee_of(ExternStep(aten.mm.default, ..., out_variant=aten.mm.out))
('mm', Callee(target=aten.mm.out, row_major=False))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import _C
from ..base import compat
from ..graph.op_facts import facts
from ..graph.plain_data import plain
from ..lower.program import ExternStep
from . import attend_gpu, grouped_gpu, masked_attention

aten = torch.ops.aten


def row_major_backward(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
    """A convolution's backward on a CPU with row-major operands."""
    if x.device.type == "cpu":
        grad, x = grad.contiguous(), x.contiguous()
    return aten.convolution_backward.default._op(grad, x, *rest)


def _overwrites_memory(step: ExternStep) -> bool:
    """Whether oneDNN (torch 2.13) writes beyond memory if operands are channels-last: 1×1 with a stride and
    few channels.
    """
    if step.target is not aten.convolution_backward.default:
        return False
    _, x, weight, _, stride, *_ = step.args
    return max(stride) > 1 and x.shape[1] < 32 and all(n == 1 for n in weight.shape[2:])


# Python bindings parse their arguments faster than OpOverload does, and functions need no dispatcher; rooms
# above add their own ops.
FAST: dict[Any, Callable[..., Any]] = {
    aten.mm.out: torch.mm,
    aten.addmm.out: torch.addmm,
    aten.bmm.out: torch.bmm,
    aten.baddbmm.out: torch.baddbmm,
    aten.mm.default: torch.mm,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.sort.default: torch.sort,
    torch.ops.dynamotor.attend.out: attend_gpu.attend,
    torch.ops.dynamotor.masked_attention.default: masked_attention.forward,
    torch.ops.dynamotor.masked_attention_backward.default: masked_attention.backward,
    torch.ops.dynamotor.grouped_product.out: grouped_gpu.grouped_product,
}


_BOUND = (
    compat.variable_functions,
    compat.special_functions,
    compat.nn_functions,
    compat.linalg_functions,
    compat.fft_functions,
)


def _binding(target: Any) -> Callable[..., Any] | None:
    """Python's binding of an op, where all arguments of an overload are those of it alone: bindings choose
    one by the arguments, tensors before numbers. Their default for a `reduction`, a name, is none.
    """
    if not isinstance(target, compat.OpOverload) or target.namespace != "aten" or _writes(target):
        return None
    if any(a.name == "reduction" for a in target._schema.arguments):
        return None
    packet = target.overloadpacket
    same = [name for name in packet.overloads() if not _writes(getattr(packet, name))]
    tensors = all(isinstance(a.type, torch.TensorType) for a in target._schema.arguments)
    found = [getattr(place, packet.__name__, None) for place in _BOUND]
    return next(filter(None, found), None) if tensors or len(same) == 1 else None


def _direct(target: Any) -> Callable[..., Any] | None:
    """Libtorch's own function of an elementwise op on tensors alone (others may warn, which bindings pass on
    to Python); the binding raises its errors.
    """
    binding = _binding(target)
    if binding is None or _C.AtenFunction is None:
        return None
    if torch.Tag.pointwise not in target.tags and not facts(target).elementwise:
        return None
    schema = target._schema
    if not all(isinstance(a.type, torch.TensorType) for a in (*schema.arguments, *schema.returns)):
        return None
    n_in, n_out = len(schema.arguments), len(schema.returns)
    try:
        return _C.AtenFunction(_symbol(target, n_in), n_in, n_out, binding)
    except ValueError:
        return None


def _symbol(target: Any, n_in: int) -> str:
    """The symbol of `at::_ops::NAME::call`, a function of `n_in` references to tensors."""
    name = "_".join(filter(None, (target.overloadpacket.__name__, target._schema.overload_name)))
    return f"_ZN2at4_ops{len(name)}{name}4callERKNS_6TensorE" + "S4_" * (n_in - 1)


def _writes(target: Any) -> bool:
    return any(a.is_out or a.alias_info is not None for a in target._schema.arguments)


@plain
@dataclass(frozen=True)
class Callee:
    """The meaning of an aten call's name, as data."""

    target: Any
    row_major: bool = False
    converts: bool = False  # to another dtype: a method of tensors does no more than that

    @property
    def function(self) -> Callable[..., Any]:
        """The fastest callable."""
        if self.converts:
            return torch.Tensor.to
        return (
            row_major_backward
            if self.row_major
            else FAST.get(self.target)
            or _direct(self.target)
            or _binding(self.target)
            or getattr(self.target, "_op", self.target)
        )


def callee_of(step: ExternStep) -> tuple[str, Callee]:
    """A name for the generated text and its meaning."""
    if _overwrites_memory(step):
        return "row_major_backward", Callee(step.target, row_major=True)
    if step.target is aten._to_copy.default and step.kwargs.keys() == {"dtype"}:
        if step.args[0].dtype is not step.kwargs["dtype"]:
            return "to", Callee(step.target, converts=True)
    target = step.out_variant or step.target
    if not isinstance(target, compat.OpOverload):
        name = getattr(target, "__name__", "")
        return name if name.isidentifier() else "function", Callee(target)
    namespace, _, name = target._schema.name.partition("::")
    return name if namespace == "aten" else f"{namespace}_{name}", Callee(target)


def returns_many(target: Any) -> bool:
    """Whether a call gives a tuple or list even when it holds one result."""
    if not isinstance(target, compat.OpOverload):
        return False
    returns = target._schema.returns
    return len(returns) > 1 or (len(returns) == 1 and isinstance(returns[0].type, torch.ListType))
