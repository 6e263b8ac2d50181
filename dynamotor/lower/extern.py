"""Facts about aten calls: which write into given memory, which take any strides, which would alias their
inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..base import compat
from ..graph import (  # noqa: F401  (they define torch.ops.dynamotor)
    attend_op,
    byte_product_op,
    few_rows_op,
    grouped_op,
    masked_attention_op,
    prims,
)
from ..graph.op_facts import is_collective
from ..graph.plain_data import plain
from ..graph.spec import aten, copy_as

# Functional overload -> its out= overload, for calls whose result goes into planned memory.
OUT_VARIANTS: dict[Any, Any] = {
    aten.mm.default: aten.mm.out,
    aten.addmm.default: aten.addmm.out,
    aten.bmm.default: aten.bmm.out,
    aten.baddbmm.default: aten.baddbmm.out,
    aten.mv.default: aten.mv.out,
    aten.dot.default: None,
    aten._scaled_mm.default: aten._scaled_mm.out,
    torch.ops.dynamotor.attend.default: torch.ops.dynamotor.attend.out,
    torch.ops.dynamotor.byte_product.default: torch.ops.dynamotor.byte_product.out,
    torch.ops.dynamotor.few_rows_product.default: torch.ops.dynamotor.few_rows_product.out,
    torch.ops.dynamotor.grouped_product.default: torch.ops.dynamotor.grouped_product.out,
}

_ATEN_BY_DESIGN = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.mv.default,
    aten.addmv.default,
    aten.dot.default,
    aten._scaled_mm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten._convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
)


def _overloads(namespace: Any, names: Iterable[str]) -> Iterator[Any]:
    for name in names:
        packet = getattr(namespace, name, None)
        for overload in packet.overloads() if packet is not None else ():
            yield getattr(packet, overload)


# Attention on a GPU: PyTorch's flash, memory-efficient and cuDNN kernels.
_ATTENTION = [
    f"_scaled_dot_product_{kind}_attention{part}"
    for kind in ("flash", "efficient", "cudnn")
    for part in ("", "_backward")
]

_OWN = (
    *("new_seed", "attend", "byte_product", "few_rows_product", "grouped_product"),
    *("masked_attention", "masked_attention_backward"),
)
# Calls to aten that are not for want of a lowering.
BY_DESIGN: frozenset[Any] = frozenset(
    (
        *_ATEN_BY_DESIGN,
        *_overloads(aten, _ATTENTION),
        *_overloads(
            torch.ops.mkldnn, ("_convolution_pointwise", "_convolution_pointwise_", "_linear_pointwise")
        ),
        *_overloads(torch.ops.dynamotor, _OWN),
    )
)

# Calls that give the same result layout whatever the strides of their inputs.
_AGNOSTIC = {
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "mv",
    "grouped_product",
    "embedding_dense_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
}


def is_layout_agnostic(target: Any) -> bool:
    """Whether the call may see other input strides than eager's."""
    return isinstance(target, compat.OpOverload) and target.overloadpacket.__name__ in _AGNOSTIC


@plain
@dataclass(frozen=True, repr=False)
class Materialized:
    """Calls an op that returns views of its inputs, and copies its results, so that no buffer aliases
    another.
    """

    target: Any

    @property
    def __name__(self) -> str:
        return f"materialized_{getattr(self.target, '__name__', 'op')}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.target(*args, **kwargs)
        if isinstance(result, (tuple, list)):
            return tuple(
                r.clone(memory_format=torch.preserve_format) if isinstance(r, torch.Tensor) else r
                for r in result
            )
        return result.clone(memory_format=torch.preserve_format)

    def __repr__(self) -> str:
        return f"Materialized({self.target})"


@plain
@dataclass(frozen=True, repr=False)
class OwnStorage:
    """Calls an op that counts from the start of its first operand's storage, or copies that storage from its
    start, on a copy that has a storage of its own.
    """

    target: Any

    @property
    def __name__(self) -> str:
        return f"own_storage_{getattr(self.target, '__name__', 'op')}"

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        alone = x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.numel() * x.element_size()
        return self.target(x if alone else copy_as(x, x.stride()), *args, **kwargs)

    def __repr__(self) -> str:
        return f"OwnStorage({self.target})"


@plain
@dataclass(frozen=True, repr=False)
class Awaited:
    """Calls a collective and waits for it: until then it reads and writes memory of the program."""

    target: Any

    @property
    def __name__(self) -> str:
        return f"awaited_{getattr(self.target, '__name__', 'op')}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = self.target(*args, **kwargs)
        for result in results if isinstance(results, (tuple, list)) else (results,):
            torch.ops._c10d_functional.wait_tensor.default(result)
        return results

    def __repr__(self) -> str:
        return f"Awaited({self.target})"


# An all-reduce starts with a copy of its input.
_MAY_BE_ON_ITS_WAY = ("all_reduce", "wait_tensor")


def awaited(target: Any) -> Any:
    """The callable to run for a call: a collective without a lowering of its own is waited for at once."""
    known = not is_collective(target) or target.namespace != "_c10d_functional"
    return target if known or target.overloadpacket.__name__ in _MAY_BE_ON_ITS_WAY else Awaited(target)


# Results have their first operand's place in a copy of its whole storage (`clone_preserve_strides`), which
# may be the memory of the whole program.
_COPY_STORAGE = frozenset(
    (aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default)
)


def aten_call_target(target: Any) -> Any:
    """The callable to run: the op itself, or one that copies when the op's schema says that results alias
    arguments, or its kernel copies a whole storage.
    """
    if target in _COPY_STORAGE:
        return OwnStorage(target)
    if is_collective(target):
        return awaited(target)
    schema = getattr(target, "_schema", None)
    if schema is not None and any(r.alias_info is not None for r in schema.returns):
        return Materialized(target)
    return target


# Views whose schema does not say so.
_ALIASING_UNDECLARED = {aten._unsafe_view.default, aten._reshape_alias.default, aten.lift_fresh.default}


def may_alias(target: Any) -> bool:
    """Whether a result of the call may share memory with an argument (declared, or possible in a composite
    op).
    """
    if not isinstance(target, compat.OpOverload):
        return not isinstance(target, Materialized | OwnStorage | Awaited)
    if target in _ALIASING_UNDECLARED or any(r.alias_info is not None for r in target._schema.returns):
        return True
    return bool(compat.has_kernel(target.name(), "CompositeImplicitAutograd"))
