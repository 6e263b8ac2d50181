"""Reductions: sums, extremes, moments, norms; softmax, scans, sorting and distances between rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ...base.compat import OpOverload
from ...base.registry import register_all
from ..bucket_padding import (
    Axes,
    Call,
    CannotPad,
    Padded,
    Padder,
    axis_of,
    broadcast_axes,
    is_padded,
    untouched,
)
from ..kernel_checks import (
    run_kernel,
    spec_at_hints,
)
from ..layouts import (
    dense,
    dense_as,
    in_row_major,
    is_dim,
    row_major,
    with_stride,
)
from ..nodes import overload
from ..op_definition import (
    PASS,
    Shape,
    broadcast,
    check,
    contiguous,
    define,
    layout,
    padding,
    require,
    require_equal,
    require_numbers,
    shape,
    shape_of_argument,
    sizes_from_data,
)
from ..result_strides import (
    preserved_stride,
)
from ..shapes import (
    infer_by_meta_kernel,
)
from ..sizes import hint
from ..spec import TensorSpec, aten


@shape(
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.any.dim,
    aten.all.dim,
    aten.prod.dim_int,
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.logsumexp.default,
    aten.any.dims,
    aten.all.dims,
)
def _reduced_shape(x: TensorSpec, dims: Any = None, keepdim: bool = False, **kwargs: Any) -> Shape:
    rank = len(x.shape)
    chosen = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    gone = {d % rank for d in chosen} if rank else set()
    return tuple([1 if d in gone else n for d, n in enumerate(x.shape) if keepdim or d not in gone])


def _reduced_by_name(
    x: TensorSpec, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Shape:
    return _reduced_shape(x, dim, keepdim)


define(
    *(aten.sum.dim_IntList, aten.mean.dim, aten.prod.dim_int, aten.amax.default, aten.amin.default),
    *(aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.any.dim, aten.all.dim),
    layout=row_major,
)
define(aten.logsumexp.default, contiguous=row_major)
define(aten.sum.default, aten.mean.default, shape=lambda x, **kwargs: (), layout=row_major)
define(aten.any.default, aten.all.default, shape=lambda x: (), contiguous=row_major)
define(aten.max.default, aten.min.default, aten.prod.default, shape=lambda x, **kwargs: ())
define(aten.var.correction, aten.var_mean.correction, shape=_reduced_by_name, layout=row_major)
define(
    *(aten.std.correction, aten.std_mean.correction, aten.count_nonzero.default, aten.aminmax.default),
    shape=_reduced_by_name,
    contiguous=row_major,
)


@layout(
    aten.linalg_vector_norm.default,
    shape=lambda x, ord=2, dims=None, keepdim=False, **kwargs: _reduced_shape(x, dims, keepdim),
)
def _vector_norm_layout(
    x: TensorSpec, ord: Any = 2, dims: Any = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    """PyTorch 2.11's meta kernel keeps a dimension of one element that is reduced."""
    shape = _reduced_shape(x, dims, keepdim)
    rank = len(x.shape)
    within = dims is None or all(-rank <= dim < rank for dim in dims)
    if within and x.dtype.is_floating_point and not kwargs and 0 not in x.shape:
        return TensorSpec.dense(shape, x.dtype, x.device)
    out = infer_by_meta_kernel(aten.linalg_vector_norm.default, (x, ord, dims, keepdim), kwargs)
    return out if out.shape == shape else TensorSpec.dense(shape, out.dtype, out.device)


@check("max", "min", "median", "nanmedian", "mode")
def _ask_of_none(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The extreme of no elements is an error; shapes do not show it."""
    spec = spec_at_hints(args[0])
    if any(type(n) is int and n == 0 for n in spec.shape):
        empty = torch.empty([hint(n) for n in spec.shape], dtype=spec.dtype, device="cpu")
        error = run_kernel(func, (empty, *args[1:]), kwargs)
        if error is not None:
            raise error


# Padded dimensions of reductions ----------------------------------------------------------------------------


def _dims(dims: Any, n: int) -> list[int]:
    every = range(n) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    return [d % n for d in every] if n else []


def _least(dtype: torch.dtype) -> Any:
    return -math.inf if dtype.is_floating_point else 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _most(dtype: torch.dtype) -> Any:
    return math.inf if dtype.is_floating_point else 1 if dtype is torch.bool else torch.iinfo(dtype).max


def _reduced_axes(axes: Axes, dims: Sequence[int], keep: bool) -> Axes:
    return tuple([() if d in dims else a for d, a in enumerate(axes) if keep or d not in dims])


def _reduction(
    fill: Callable[[torch.dtype], Any], call: Call, *, single: bool = False, both: bool = False
) -> Padded:
    """fill: what changes nothing. single: the result is a place in a dimension. both: values and places."""
    axes = call.axes(0)
    args = {a.name: v for a, v in zip(overload(call.node)._schema.arguments, call.args)} | call.kwargs
    dims = _dims(args.get("dim"), len(axes))
    if single or both:
        flat = args.get("dim") is None
        CannotPad.when(
            any(len(axes[d]) > 1 and is_padded(axes[d]) for d in dims) or flat and is_padded(*axes),
            f"{call.node.target} over merged dimensions",
        )
    call.mask(0, dims, fill(call.args[0].meta["val"].dtype))
    found = _reduced_axes(axes, dims, bool(args.get("keepdim", False)))
    return call.emit((found, found) if both else found)


register_all(
    padding,
    (
        (
            (
                aten.sum.default,
                aten.sum.dim_IntList,
                aten.nansum.default,
                aten.any.default,
                aten.any.dim,
                aten.any.dims,
            ),
            functools.partial(_reduction, lambda dtype: 0),
        ),
        (
            (
                aten.prod.default,
                aten.prod.dim_int,
                aten.all.default,
                aten.all.dim,
                aten.all.dims,
            ),
            functools.partial(_reduction, lambda dtype: 1),
        ),
        (
            (
                aten.amax.default,
                aten.max.default,
            ),
            functools.partial(_reduction, _least),
        ),
        (
            (
                aten.amin.default,
                aten.min.default,
            ),
            functools.partial(_reduction, _most),
        ),
        ((aten.argmax.default,), functools.partial(_reduction, _least, single=True)),
        ((aten.argmin.default,), functools.partial(_reduction, _most, single=True)),
        ((aten.max.dim,), functools.partial(_reduction, _least, both=True)),
        ((aten.min.dim,), functools.partial(_reduction, _most, both=True)),
    ),
)


@padding(aten.mean.default, aten.mean.dim)
def _mean_padding(call: Call) -> Padded:
    """A sum, divided by how many elements are meant."""
    axes, dtype, named, writer = call.axes(0), call.node.meta["val"].dtype, call.named, call.writer
    keep, dims = bool(named.get("keepdim")), _dims(named.get("dim"), len(axes))
    found = _reduced_axes(axes, dims, keep)
    reduced = [axes[d] for d in dims]
    if not is_padded(*reduced):
        return call.emit(found)
    call.mask(0, dims)
    wide = torch.float64 if dtype is torch.float64 else torch.float32  # sums of halves may overflow
    total = writer.op(aten.sum.dim_IntList, call.args[0], dims, keep, dtype=wide)
    mean = writer.op(aten.div.Tensor, total, writer.divisor(reduced, wide))
    call.args, call.kwargs = [mean], {"dtype": dtype}
    return call.emit(found, aten._to_copy.default)


@padding(aten.logsumexp.default)
def _logsumexp_padding(call: Call) -> Padded:
    CannotPad.when(
        not call.args[0].meta["val"].dtype.is_floating_point,
        "logsumexp of integers, none of which is nothing",
    )
    return _reduction(_least, call)


@padding(aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim)
def _norm_padding(call: Call) -> Padded:
    order = call.args[1] if len(call.args) > 1 else call.kwargs.get("ord", call.kwargs.get("p", 2))
    CannotPad.when(order is not None and order <= 0, "a norm that zeros are no part of")
    return _reduction(lambda dtype: 0, call)


def widened(writer: Padder, x: fx.Node, axes: Axes, dims: Sequence[int]) -> fx.Node:
    """The tensor with zeros for padding along these dimensions, in a type that sums may be computed in."""
    x = writer.masked(x, axes, dims, 0)
    if x.meta["val"].dtype in (torch.float32, torch.float64):
        return x
    return writer.op(aten._to_copy.default, x, dtype=torch.float32)


def moments(writer: Padder, x: fx.Node, axes: Axes, dims: Sequence[int]) -> tuple[fx.Node, fx.Node, fx.Node]:
    """(mean, sum of squares around it, number of elements); the first two keep all dimensions."""
    x = widened(writer, x, axes, dims)
    count = writer.divisor([axes[d] for d in dims], x.meta["val"].dtype)
    mean = writer.op(aten.div.Tensor, writer.op(aten.sum.dim_IntList, x, dims, True), count)
    off = writer.masked(writer.op(aten.sub.Tensor, x, mean), axes, dims, 0)
    return mean, writer.op(aten.sum.dim_IntList, writer.op(aten.mul.Tensor, off, off), dims, True), count


def with_dtype(writer: Padder, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if x.meta["val"].dtype is dtype else writer.op(aten._to_copy.default, x, dtype=dtype)


@padding(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def _variance_padding(call: Call) -> Padded:
    writer, axes, named = call.writer, call.axes(0), call.named
    dims = list(range(len(axes))) if not named["dim"] else [d % len(axes) for d in named["dim"]]
    found = tuple([() if d in dims else a for d, a in enumerate(axes) if named["keepdim"] or d not in dims])
    name, dtype = overload(call.node)._schema.name, call.args[0].meta["val"].dtype
    several = name.endswith("_mean")
    if not is_padded(*[axes[d] for d in dims]):
        return call.emit((found, found) if several else found)
    mean, squares, count = moments(writer, call.args[0], axes, dims)
    correction = 1 if named["correction"] is None else named["correction"]
    free = writer.op(aten.clamp_min.default, writer.op(aten.sub.Tensor, count, correction), 0)
    spread = writer.op(aten.div.Tensor, squares, free)
    if name.startswith("aten::std"):
        spread = writer.op(aten.sqrt.default, spread)
    results = []
    for x in (spread, mean):
        x = x if named["keepdim"] else writer.op(aten.squeeze.dims, x, dims)
        results.append(call.keep(with_dtype(writer, x, dtype), found))
    return (tuple(results), (found, found)) if several else (results[0], found)


# Softmax and scans ------------------------------------------------------------------------------------------
define(
    aten._softmax.default,
    aten._log_softmax.default,
    aten._safe_softmax.default,
    aten.cumsum.default,
    aten.cumprod.default,
    shape=shape_of_argument(0),
    layout=row_major,
)
define(aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default, shape=shape_of_argument(0))
define(
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    shape=shape_of_argument(0),
    requires=lambda grad, output, *args: require_equal(grad.shape, output.shape),
    layout=lambda grad, out, dim, dtype: dense(grad.shape, grad) if grad.dtype is dtype else PASS,
)
# Without a meta kernel.
define(aten._masked_softmax.default, aten._masked_softmax_backward.default, layout=dense_as(0))


@padding(aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default)
def _softmax_padding(call: Call) -> Padded:
    axes, d = call.axes(0), call.args[1] % len(call.axes(0))
    call.mask(0, [d], -math.inf)
    return call.emit(axes)


@padding(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward_padding(call: Call) -> Padded:
    axes = broadcast_axes([call.axes(0), call.axes(1)])
    for place in (0, 1):
        call.mask(place, [call.args[2] % len(axes)])
    return call.emit(axes)


@padding(aten.cumsum.default, aten.cumprod.default)
def _scan_padding(call: Call) -> Padded:
    """What comes before the padding knows nothing of it."""
    axes = call.axes(0)
    CannotPad.when(
        len(axes[call.args[1]]) > 1 and is_padded(axes[call.args[1]]),
        f"{call.node.target} over merged dimensions",
    )
    return call.emit(axes)


# Sorting and search -----------------------------------------------------------------------------------------


@shape(aten.searchsorted.Tensor, contiguous=row_major)
def _searchsorted_shape(edges: TensorSpec, x: TensorSpec, *, sorter: Any = None, **kwargs: Any) -> Shape:
    require(sorter is None)
    require_equal(edges.shape[:-1], x.shape[: len(edges.shape) - 1])
    return x.shape


@layout(aten.sort.default, aten.sort.stable, shape=shape_of_argument(0), contiguous=row_major)
def _sort_layout(x: TensorSpec, *args: Any, **kwargs: Any) -> tuple[TensorSpec, ...]:
    """Both results have the tensor's layout."""
    found = infer_by_meta_kernel(
        aten.sort.stable if "stable" in kwargs else aten.sort.default, (x, *args), kwargs
    )
    return tuple([spec.with_stride(preserved_stride(x)) for spec in found])


@shape(aten.topk.default)
def _topk_shape(x: TensorSpec, k: Any, dim: int = -1, *args: Any) -> Shape:
    dim %= len(x.shape)
    require(x.shape[dim] >= k)
    return (*x.shape[:dim], k, *x.shape[dim + 1 :])


@contiguous(aten.topk.default)
def _topk_contiguous(x: TensorSpec, k: int, dim: int = -1, *args: Any) -> Any:
    if not is_dim(dim, x) or not 0 < k <= x.shape[dim] or x.dtype.is_complex or x.dtype is torch.bool:
        return PASS
    shape = _topk_shape(x, k, dim)
    return dense(shape, x), dense(shape, x, torch.int64)


@padding(aten.sort.default, aten.sort.stable, aten.topk.default)
def _sort_padding(call: Call) -> Padded:
    axes, named = list(call.axes(0)), call.named
    d = named["dim"] % len(axes) if axes else 0
    untouched(call, 0, *range(len(axes))[d : d + 1])
    if call.node.target is aten.topk.default and axes:
        axes[d] = axis_of(call.node.meta["val"][0].shape[d])
    return call.emit((tuple(axes), tuple(axes)))


# Distances --------------------------------------------------------------------------------------------------


@shape(aten._cdist_forward.default, contiguous=row_major)
def _cdist_shape(a: TensorSpec, b: TensorSpec, p: Any, mode: Any) -> Shape:
    require(len(a.shape) > 1)
    require_equal((*a.shape[:-2], a.shape[-1]), (*b.shape[:-2], b.shape[-1]))
    return (*a.shape[:-1], b.shape[-2])


@shape(aten._cdist_backward.default, contiguous=row_major)
def _cdist_backward_shape(grad: TensorSpec, a: TensorSpec, b: TensorSpec, p: Any, distances: Any) -> Shape:
    """For batches that are broadcast, autograd sums the result to the operand's shape."""
    return (*broadcast([a.shape[:-2], b.shape[:-2]]), *a.shape[-2:])


define(aten.renorm.default, shape=shape_of_argument(0), layout=with_stride(in_row_major))
define(aten.segment_reduce.default, requires=require_numbers)  # PyTorch's shape function does not check sizes


@sizes_from_data(aten.bincount.default)
def _bincount_from_data(count: Any, x: TensorSpec, weights: Any = None, minlength: int = 0) -> TensorSpec:
    floats = {None: torch.int64, torch.float32: torch.float32}
    dtype = floats.get(weights and weights.dtype, torch.float64)
    return TensorSpec.dense((count(lo=minlength),), dtype, x.device)
