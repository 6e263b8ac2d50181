"""Reads at positions: `gather`, `index_select`, `index`, embeddings, and positions that masks choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...base.compat import OpOverload
from ..bucket_padding import (
    Axes,
    Call,
    CannotPad,
    Padded,
    at_end,
    axis_of,
    broadcast_axes,
    in_a_row,
    is_padded,
    untouched,
)
from ..kernel_checks import ask_positions
from ..layouts import (
    dense,
    in_row_major,
    row_major,
    with_stride,
)
from ..op_definition import (
    PASS,
    Shape,
    TakesOp,
    Unknown,
    broadcast,
    define,
    layout,
    padding,
    question,
    require,
    shape,
    shapes_of,
    sizes_from_data,
)
from ..result_strides import (
    iterated_stride,
)
from ..shapes import (
    UnsupportedOp,
    has_symbols,
    infer_by_meta_kernel,
    meta_tensor,
)
from ..sizes import INFINITY, Size, equal, maximum
from ..spec import CPU, TensorSpec, aten, numel

# gather, take, index_select ---------------------------------------------------------------------------------
define(
    aten.gather.default,
    aten.take.default,
    shape=lambda x, *args, **kwargs: next(a for a in args if type(a) is TensorSpec).shape,
)
define(
    aten.gather.default,
    requires=lambda x, dim, index, **kwargs: require_within(index.shape, x.shape, dim),
    layout=row_major,
)


def require_within(index: Shape, shape: Shape, dim: int | None) -> None:
    """No dimension of the positions is larger, but for `dim`."""
    if shape and index and 0 not in [n for n in index if type(n) is int]:
        dim = None if dim is None else dim % len(shape)
        require(
            len(index) == len(shape) and all(m <= n for d, (m, n) in enumerate(zip(index, shape)) if d != dim)
        )


@padding(aten.gather.default)
def _gather_padding(call: Call) -> Padded:
    x, places = call.axes(0), call.axes(2)
    d = call.args[1] % len(x)
    in_a_row(call, x, d)
    CannotPad.when(
        any(a != b for n, (a, b) in enumerate(zip(x, places, strict=True)) if n != d), "aten.gather of a part"
    )
    call.mask(2, range(len(places)))
    return call.emit(places)


@shape(aten.index_select.default)
def _index_select_shape(x: TensorSpec, dim: int, index: TensorSpec) -> Shape:
    dim %= len(x.shape)
    return (*x.shape[:dim], index.shape[0] if index.shape else 1, *x.shape[dim + 1 :])


@layout(aten.index_select.default)
def _index_select_layout(x: TensorSpec, dim: int, index: TensorSpec) -> Any:
    """Nothing can be picked where nothing is, even if the result has no elements."""
    if x.shape and x.shape[dim] == 0 and index.numel:
        raise RuntimeError("index_select(): self indexing axis dim should be positive")
    return PASS


@padding(aten.index_select.default)
def _index_select_padding(call: Call) -> Padded:
    x, d = call.axes(0), call.args[1] % len(call.axes(0))
    in_a_row(call, x, d)
    call.mask(2, [0])
    return call.emit((*x[:d], *call.axes(2), *x[d + 1 :]))


# index ------------------------------------------------------------------------------------------------------


@shape(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index_shape(x: TensorSpec, indices: Sequence[TensorSpec | None]) -> Shape:
    places = [d for d, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        raise Unknown
    picked = broadcast([index.shape for index in given])
    first = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    before = [n for d, n in enumerate(x.shape) if d not in places and d < first]
    return (*before, *picked, *[n for d, n in enumerate(x.shape) if d not in places and d >= first])


@layout(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index_layout(x: TensorSpec, indices: Sequence[TensorSpec | None]) -> TensorSpec:
    """TensorIterator goes over the positions and the rest of `x`, which does not move along the positions'
    dimensions.
    """
    picks = [i for i in indices if i is not None]
    plain = len(indices) <= len(x.shape) and all(i.dtype is torch.int64 for i in picks) and 0 not in x.shape
    try:
        if picks and plain:
            found = shapes_of(aten.index.Tensor, x, indices)
            out: Any = TensorSpec.dense(found, x.dtype, x.device)
        else:
            out = infer_by_meta_kernel(aten.index.Tensor, (x, indices), {})
    except (Unknown, RuntimeError) as error:  # eager's class and words
        if type(error) is not Unknown and "broadcast" not in str(error):
            raise
        shapes = ", ".join([str(list(i.shape)) for i in picks])
        what = f"shape mismatch: indexing tensors could not be broadcast together with shapes {shapes}"
        raise IndexError(what) from None
    at = [d for d, index in enumerate(indices) if index is not None]
    rest = [stride for d, stride in enumerate(x.stride) if d not in at]
    before = (
        at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    )  # dimensions of the result before the positions'
    after, count = len(rest) - before, len(out.shape) - len(rest)
    source = replace(x, shape=out.shape, stride=(*rest[:before], *[0] * count, *rest[before:]))
    shape = out.shape[before : before + count]
    whole = (torch.int64, torch.int32)
    picked = any(not n and i is not None and i.dtype in whole for n, i in zip(x.shape, indices))
    if picked and 0 not in shape:
        raise IndexError("index is out of bounds for dimension with size 0")
    positions = [
        TensorSpec.of(meta_tensor(i).expand(shape).reshape((*[1] * before, *shape, *[1] * after)))
        for i in indices
        if i is not None
    ]
    return out.with_stride(iterated_stride([source, *positions], out.shape))


def positions(call: Call, x: Axes, indices: Sequence[fx.Node | None]) -> list[fx.Node | None]:
    """Positions that meet no padding: those in padding are 0, negative ones are counted from the front."""
    writer = call.writer
    found: list[fx.Node | None] = []
    for axis, index in zip(x, indices):
        if index is not None:
            own, dtype = writer.axes[index], index.meta["val"].dtype
            CannotPad.when(dtype in (torch.bool, torch.uint8), f"{call.node.target} of a mask")
            index = writer.masked(index, own, range(len(own)), 0)
            if is_padded(axis):
                CannotPad.when(not at_end(axis), f"{call.node.target} along merged dimensions")
                below, count = writer.compared("lt", index, 0), writer.count([axis])
                index = writer.op(aten.where.self, below, writer.op(aten.add.Tensor, index, count), index)
        found.append(index)
    return found


def of_positions(call: Call, x: Axes, indices: Sequence[fx.Node | None]) -> tuple[int, Axes, Axes]:
    """(the first dimension of the positions, theirs, and the whole result's)."""
    at = [d for d, index in enumerate(indices) if index is not None]
    picked = broadcast_axes([call.writer.axes[index] for index in indices if index is not None])
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    rest = [axis for d, axis in enumerate(x) if d not in at]
    return first, picked, (*rest[:first], *picked, *rest[first:])


@padding(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index_padding(call: Call) -> Padded:
    x, indices = call.axes(0), call.args[1]
    _, _, found = of_positions(call, x, indices)
    call.args = [call.args[0], positions(call, x, indices)]
    return call.emit(found)


@layout(aten._unsafe_masked_index.default)
def _masked_index_layout(x: TensorSpec, *args: Any) -> TensorSpec:
    """Of a tensor without elements, its kernel gives none along the dimensions without positions."""
    out, behind = (
        infer_by_meta_kernel(aten._unsafe_masked_index.default, (x, *args), {}),
        len(x.shape) - len(args[1]),
    )
    return (
        TensorSpec.dense((*out.shape[: len(out.shape) - behind], *[0] * behind), x.dtype, x.device)
        if 0 in x.shape
        else out
    )


# Embeddings -------------------------------------------------------------------------------------------------


@layout(aten.embedding.default, shape=lambda weight, index, *args: (*index.shape, *weight.shape[1:]))
def _embedding_layout(weight: TensorSpec, index: TensorSpec, *args: Any) -> Any:
    if len(weight.shape) != 2 or index.dtype not in (torch.int64, torch.int32):
        return PASS
    _index_select_layout(weight, 0, index)
    return TensorSpec.dense((*index.shape, *weight.shape[1:]), weight.dtype, weight.device)


@padding(aten.embedding.default)
def _embedding_padding(call: Call) -> Padded:
    weight, places = call.axes(0), call.axes(1)
    untouched(call, 0, 0, 1)
    call.mask(1, range(len(places)))
    return call.emit((*places, weight[1]))


define(
    aten.embedding_dense_backward.default,
    shape=lambda grad, index, rows, *args: (rows, grad.shape[-1]),
    layout=lambda grad, index, rows, *args: dense((rows, grad.shape[-1]), grad),
)


@padding(aten.embedding_dense_backward.default)
def _embedding_backward_padding(call: Call) -> Padded:
    places = call.axes(1)
    call.mask(0, range(len(places)))
    call.mask(1, range(len(places)))
    return call.emit(tuple(map(axis_of, call.shape)))


@layout(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
@TakesOp
def _embedding_bag_layout(op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
    """The bookkeeping follows the kernel that is taken: a CPU's runs, with one row of the weight, zeros.
    Sparse gradients are left to eager.
    """
    last = any(args[7:8])
    if (
        kwargs
        or args[0].device != CPU
        or 0 in args[0].shape + args[2].shape
        or has_symbols(args)
        or any(args[5:6])
        or last
        and args[2].shape == (1,)  # no bags
    ):
        raise UnsupportedOp(
            "DM243",
            "embedding_bag's bookkeeping tensors follow the kernel that is taken at run time",
            cure="use embedding and a sum",
        )
    specs = (replace(args[0], shape=(1, *args[0].shape[1:])), *args[1:])
    zeros = [s.empty().zero_() if type(s) is TensorSpec else s for s in specs]
    return tuple(map(TensorSpec.of, op(*zeros)))


# Positions that data decide ---------------------------------------------------------------------------------
define(aten.nonzero_static.default, layout=with_stride(in_row_major))


@sizes_from_data(aten.nonzero.default)
def _nonzero_from_data(count: Any, x: TensorSpec) -> TensorSpec:
    n = count(hi=x.numel, of=0, shape=x.shape)
    return TensorSpec((n, len(x.shape)), (1, maximum(n.env, n, 1)), torch.int64, x.device)


@sizes_from_data(aten.index.Tensor)
def _index_from_data(count: Any, x: TensorSpec, indices: Any) -> TensorSpec:
    at = [d for d, i in enumerate(indices) if i is not None]
    mask = indices[at[0]]
    require(len(at) == 1 and mask.dtype is torch.bool)
    end = at[0] + len(mask.shape)
    require(equal(mask.shape, x.shape[at[0] : end]))
    require(at[0] == 0 and len(x.shape) - end < 2 or x.is_contiguous)  # else the layout is another one
    n = count(hi=mask.numel, of=1, shape=mask.shape)
    return TensorSpec.dense((*x.shape[: at[0]], n, *x.shape[end:]), x.dtype, x.device)


@sizes_from_data(aten.masked_select.default)
def _masked_select_from_data(count: Any, x: TensorSpec, mask: TensorSpec) -> TensorSpec:
    shape = broadcast([x.shape, mask.shape])
    return TensorSpec.dense((count(hi=numel(shape), of=1, shape=shape),), x.dtype, x.device)


@sizes_from_data(aten._unique2.default)
def _unique_from_data(
    count: Any, x: TensorSpec, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[TensorSpec, ...]:
    n = count(hi=x.numel)
    places = (n,), x.shape if return_inverse else (0,), (n,) if return_counts else (0,)
    dtypes = x.dtype, torch.int64, torch.int64
    return tuple([TensorSpec.dense(s, d, x.device) for s, d in zip(places, dtypes, strict=True)])


@sizes_from_data(aten.unique_consecutive.default)
def _unique_consecutive_from_data(
    count: Any, x: TensorSpec, return_inverse: bool = False, return_counts: bool = False, dim: Any = None
) -> tuple[TensorSpec, ...]:
    require(dim is None)
    return _unique_from_data(count, x, True, return_inverse, return_counts)


@sizes_from_data(aten.repeat_interleave.Tensor)
def _repeat_interleave_from_data(count: Any, repeats: TensorSpec, *, output_size: Any = None) -> TensorSpec:
    return TensorSpec.dense((count(),), repeats.dtype, repeats.device)


_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


@sizes_from_data(aten._local_scalar_dense.default)
def _item_from_data(count: Any, x: TensorSpec) -> Size:
    require(x.dtype in _INTEGERS)  # what else a tensor holds is no size
    limits = torch.iinfo(x.dtype)
    return count(lo=max(limits.min, -INFINITY), hi=min(limits.max, INFINITY), of=0)


question("index_select", "embedding")(ask_positions)
