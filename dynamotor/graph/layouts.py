"""Layout rules that several families of ops use: results in row-major order, in the order of an argument, or
as eager gives them for small arguments.

>>> define(aten.mm.default, layout=row_major)
>>> define(aten.pixel_shuffle.default, layout=with_stride(as_argument(0)))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base.compat import OpOverload
from .op_definition import PASS, TakesOp, definition, shapes_of
from .result_strides import preserved_stride, suggested_stride
from .shapes import infer_by_meta_kernel, run_small
from .sizes import Dim, Dims, leaves_in
from .spec import CPU, TensorSpec, contiguous_stride

StrideOf = Callable[[tuple[Any, ...], TensorSpec], Dims]  # (arguments, result) -> the result's strides


def dense(shape: Sequence[Dim], like: TensorSpec, dtype: torch.dtype | None = None) -> TensorSpec:
    """A row-major tensor with the dtype (unless given) and device of `like`."""
    return TensorSpec.dense(shape, dtype or like.dtype, like.device)


def dense_as(position: int) -> Callable[..., TensorSpec]:
    """Row-major with the shape, dtype and device of an argument."""
    return lambda *args, **kwargs: dense(args[position].shape, args[position])


def _row_major(op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
    tensors = [leaf for leaf in leaves_in(args) if type(leaf) is TensorSpec]
    first = tensors[0]
    if any(0 in t.shape or t.device != first.device for t in tensors):
        return PASS
    out = run_small(op, 2, args, kwargs)
    requirement = definition(op).requires
    if requirement is not None:
        requirement(*args, **kwargs)
    shapes = shapes_of(op, *args, **kwargs)
    results = [
        TensorSpec.dense(shapes[k] if type(shapes) is list else shapes, o.dtype, first.device)
        for k, o in enumerate(out if isinstance(out, tuple) else (out,))
    ]
    return tuple(results) if isinstance(out, tuple) else results[0]


# Row-major results with the op's `shape`, and the dtypes that the op gives for tensors of two elements per
# dimension (of one element a variance warns).
row_major = TakesOp(_row_major)


def with_stride(stride_of: StrideOf) -> TakesOp:
    """The meta kernel's answer, its (first) result with other strides."""

    def rule(op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
        out = infer_by_meta_kernel(op, args, kwargs)
        if type(out) is not tuple:
            return out.with_stride(stride_of(args, out))
        return out if out[0] is None else (out[0].with_stride(stride_of(args, out[0])), *out[1:])

    return TakesOp(rule)


def as_argument(position: int) -> StrideOf:
    """Strides in the memory format, channels-last or row-major, that an argument suggests."""
    return lambda args, out: suggested_stride(args[position], out.shape)


def like_argument(position: int) -> StrideOf:
    """Strides of `torch.empty_like(argument)`."""
    return lambda args, out: preserved_stride(args[position])


def _like_first(op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
    first = args[0]
    fast = first.stride == contiguous_stride(first.shape)
    return (row_major if fast else with_stride(like_argument(0))).rule(op, *args, **kwargs)


# `torch.empty_like` of the first argument; without the meta kernel where that is row-major.
like_first = TakesOp(_like_first)


def in_row_major(args: tuple[Any, ...], out: TensorSpec) -> Dims:
    """Row-major strides."""
    return contiguous_stride(out.shape)


def with_dtype_of(position: int) -> TakesOp:
    """The meta kernel's answer with the dtype of an argument, even beside a wider one: kernels compute in
    place.
    """
    return TakesOp(
        lambda op, /, *args, **kwargs: replace(
            infer_by_meta_kernel(op, args, kwargs), dtype=args[position].dtype
        )
    )


def _ask_eager(op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
    tensors = [a for a in args if type(a) is TensorSpec]
    if any(t.device != CPU or t.numel > 1 << 20 for t in tensors):
        return PASS
    real = [a.empty().zero_() if type(a) is TensorSpec else a for a in args]
    with torch.no_grad():
        out = op(*real, **kwargs)
    return tuple(map(TensorSpec.of, out)) if isinstance(out, (tuple, list)) else TensorSpec.of(out)


# Run the op on zeros if its arguments are small: for kernels whose strides follow no simple rule.
ask_eager = TakesOp(_ask_eager)


def is_dim(dim: int, x: TensorSpec) -> bool:
    """Whether a tensor has this dimension."""
    return -len(x.shape) <= dim < len(x.shape)
