"""The functional overload of each in-place op, and which writes are left to eager.

>>> functional_form(torch.ops.aten.add_.Tensor)
<OpOverload(op='aten.add', overload='Tensor')>
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from ..base.compat import OpOverload
from ..graph.kernel_checks import sees_twice
from ..graph.op_facts import facts
from ..graph.shapes import UnsupportedOp
from ..graph.spec import TensorSpec, aten

# In-place ops whose functional form has another name.
_OTHER_NAMES: dict[OpOverload, OpOverload] = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
    aten._index_put_impl_.default: aten.index_put.default,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    aten.float_power_.Scalar: aten.float_power.Tensor_Scalar,
    aten.float_power_.Tensor: aten.float_power.Tensor_Tensor,
    aten.floor_divide_.Tensor: aten.floor_divide.default,
    aten.ldexp_.default: aten.ldexp.Tensor,
}


@functools.cache
def functional_form(func: OpOverload) -> OpOverload:
    """The overload that returns the value that the in-place `func` would write; raises UnsupportedOp when
    there is
    none.
    """
    return _OTHER_NAMES.get(func) or _search(func)


def _search(func: OpOverload) -> OpOverload:
    namespace, name = func._schema.name.split("::")
    if facts(func).writes == (0,) and name.endswith("_"):
        packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
        overload = func._overloadname
        if packet is not None and overload in packet.overloads():
            form = getattr(packet, overload)
            if not facts(form).writes and types_of(form) == types_of(func):
                return form
    raise UnsupportedOp(
        "DM236",
        f"{func} writes its arguments and has no functional form that is known",
        cure="use the out-of-place op",
    )


def types_of(func: OpOverload) -> list[str]:
    """The types of an op's arguments, in order."""
    return [str(argument.type) for argument in func._schema.arguments]


# Device and layout of a new tensor: an op that is given an `out` need not be told.
_OPTIONS = ("dtype", "layout", "device", "pin_memory", "memory_format")


def without_out(func: OpOverload) -> OpOverload | None:
    """The overload without `out`: that with the same other arguments, as far as may be options too; None
    where there is none.
    """

    def others(form: OpOverload, but: tuple[str, ...] = ()) -> list[tuple[str, str]]:
        plain = (a for a in form._schema.arguments if a.alias_info is None or not a.alias_info.is_write)
        return [(a.name, str(a.type)) for a in plain if a.name not in but]

    every = (getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())
    forms = [f for f in every if not f._schema.is_mutable and others(f, _OPTIONS) == others(func, _OPTIONS)]
    return max(forms, key=lambda form: others(form) == others(func), default=None)


def refuse_overlap(func: OpOverload, written: TensorSpec, read: Iterable[TensorSpec]) -> None:
    """Leave a write that eager refuses to eager: into memory that several elements share, or that an operand
    shares in part.

    func: its functional form. read: the operands in the same storage. Raises UnsupportedOp.
    """
    UnsupportedOp.when(
        sees_twice(written),
        "DM229",
        f"{func} writes memory that several elements share",
        cure="clone() the tensor first",
    )
    elementwise = (
        facts(func).pointwise or func is aten.copy_.default
    )  # each element is read before it is written
    start, stop = written.offset, written.offset + written.extent
    for other in read:
        dense = written.extent == written.numel and other.extent == other.numel
        same = elementwise and (other.offset, other.shape, other.stride) == (
            written.offset,
            written.shape,
            written.stride,
        )
        UnsupportedOp.when(
            dense and not same and start < other.offset + other.extent and other.offset < stop,
            "DM229",
            f"{func} reads memory that it writes in other places",
            cure="clone() the operand first",
        )


def all_arguments(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument by name, those that a call leaves out by their defaults."""
    arguments = func._schema.arguments
    given = dict(zip([argument.name for argument in arguments], args)) | kwargs
    return {a.name: given.get(a.name, a.default_value) for a in arguments}


def with_written(func: OpOverload, new: list[Any], given: dict[str, Any]) -> Any:
    """What `func` returns, given its new results: written arguments are returned themselves."""
    fresh, names = iter(new), [argument.name for argument in func._schema.arguments]
    values = [
        next(fresh) if place is None else given[names[place] if isinstance(place, int) else place]
        for place in facts(func).returns
    ]
    return tuple(values) if len(values) > 1 else next(iter(values), None)
