"""Views, parts and their writes, joined and repeated tensors, pads."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from ...base.compat import OpOverload
from ..bucket_padding import (
    Call,
    CannotPad,
    Padded,
    Padder,
    Run,
    axis_of,
    broadcast_axes,
    in_a_row,
    is_padded,
    regrouped,
    row_of,
    settle,
    size_of,
    untouched,
)
from ..kernel_checks import (
    ask_fill,
)
from ..layouts import (
    as_argument,
    dense,
    in_row_major,
    row_major,
    with_stride,
)
from ..nodes import operand, operands, overload
from ..op_definition import (
    PASS,
    Shape,
    TakesOp,
    Unknown,
    check,
    define,
    layout,
    padding,
    question,
    require,
    require_equal,
    require_numbers,
    requires,
    shape,
    shape_of_argument,
    shapes_of,
)
from ..result_strides import (
    preserved_stride,
    suggested_stride,
    suggests_channels_last,
    viewed_stride,
)
from ..shapes import (
    infer_spec,
)
from ..sizes import Dim, Size, equal, hint, minimum
from ..spec import TensorSpec, aten, channels_last_stride, contiguous_stride
from .create import like_layout


def _look(x: TensorSpec, shape: Sequence[Any], stride: Sequence[Any], offset: Any = None) -> TensorSpec:
    return TensorSpec(tuple(shape), tuple(stride), x.dtype, x.device, x.offset if offset is None else offset)


# View and reshape -------------------------------------------------------------------------------------------


@shape(aten.view.default, aten._unsafe_view.default)
def _view_shape(x: TensorSpec, shape: Sequence[Any]) -> TensorSpec:
    shape = _without_free(x, shape)
    if _is_row_major(x):
        return _look(x, shape, contiguous_stride(shape))
    stride = viewed_stride(x.shape, x.stride, shape)
    if stride is None:
        raise Unknown
    return _look(x, shape, stride)


@shape(aten.reshape.default)
def _reshape_shape(x: TensorSpec, shape: Sequence[Any]) -> TensorSpec:
    """Passes make these of views that another layout forbids."""
    shape = _without_free(x, shape)
    try:
        return _view_shape(x, shape)
    except Unknown:
        return TensorSpec.dense(tuple(shape), x.dtype, x.device)


def _without_free(x: TensorSpec, shape: Sequence[Any]) -> Sequence[Any]:
    """The shape with the size that is meant where it says -1."""
    free = [d for d, n in enumerate(shape) if type(n) is int and n == -1]
    if free:
        rest = math.prod([n for d, n in enumerate(shape) if d not in free])
        require(x.numel % rest == 0)
        shape = [x.numel // rest if d in free else n for d, n in enumerate(shape)]
    require(math.prod(shape) == x.numel)
    return shape


def _is_row_major(x: TensorSpec) -> bool:
    """Whether all strides are row-major: a dimension of size 1 may have any other, and keeps it."""
    return equal(x.stride, contiguous_stride(x.shape)) or any(equal(n, 0) for n in x.shape)


@layout(aten.view.default, aten._unsafe_view.default)
def _view_layout(x: TensorSpec, shape: Any) -> Any:
    return shapes_of(aten.view.default, x, shape) if _is_row_major(x) and 0 not in shape else PASS


@padding(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _view_padding(call: Call) -> Padded:
    axes = regrouped(call.axes(0), call.shape)
    call.args = [call.args[0], list(call.writer.number(tuple(call.shape)))]
    return call.emit(axes, aten.reshape.default)


@shape(aten.expand.default)
def _expand_shape(x: TensorSpec, shape: Sequence[Any], **kwargs: Any) -> TensorSpec:
    sizes: list[Dim] = []
    strides: list[Dim] = []
    for k, n in enumerate(reversed(shape), 1):
        if k <= len(x.shape):
            have, stride = x.shape[-k], x.stride[-k]
        else:
            have, stride = 1, sizes[0] * strides[0] if sizes else 0
        n = have if type(n) is int and n == -1 else n
        keeps = n == have
        require(keeps or have == 1)
        sizes, strides = [n, *sizes], [stride if keeps else 0, *strides]
    return _look(x, sizes, strides)


@padding(aten.expand.default)
def _expand_padding(call: Call) -> Padded:
    axes, shape = call.axes(0), call.shape
    new = len(shape) - len(axes)
    found = [axes[d - new] if d >= new and axes[d - new] else axis_of(n) for d, n in enumerate(shape)]
    call.args = [call.args[0], list(call.writer.number(tuple(shape)))]
    return call.emit(tuple(found))


question("_unsafe_view", "cat")(None)  # not worth asking
# Dimensions in another order --------------------------------------------------------------------------------


@shape(aten.permute.default)
def _permute_shape(x: TensorSpec, dims: Sequence[int]) -> TensorSpec:
    return _look(x, [x.shape[d] for d in dims], [x.stride[d] for d in dims])


@shape(aten.transpose.int)
def _transpose_shape(x: TensorSpec, a: int, b: int) -> TensorSpec:
    dims = list(range(len(x.shape)))
    dims[a], dims[b] = dims[b], dims[a]
    return _permute_shape(x, dims)


define(aten.t.default, shape=lambda x: _permute_shape(x, list(range(len(x.shape)))[::-1]))


@shape(aten.unsqueeze.default)
def _unsqueeze_shape(x: TensorSpec, dim: int) -> TensorSpec:
    dim %= len(x.shape) + 1
    stride = x.shape[dim] * x.stride[dim] if dim < len(x.shape) else 1
    return _look(x, (*x.shape[:dim], 1, *x.shape[dim:]), (*x.stride[:dim], stride, *x.stride[dim:]))


@shape(aten.squeeze.dim, aten.squeeze.dims)
def _squeeze_shape(x: TensorSpec, dims: Any) -> TensorSpec:
    chosen = {d % len(x.shape) for d in ([dims] if isinstance(dims, int) else dims)} if x.shape else set()
    kept = [d for d, n in enumerate(x.shape) if d not in chosen or n != 1]
    return _permute_shape(x, kept)


define(aten.squeeze.default, shape=lambda x: _permute_shape(x, [d for d, n in enumerate(x.shape) if n != 1]))


@padding(aten.permute.default, aten.transpose.int, aten.t.default, aten.squeeze.dim, aten.squeeze.dims)
def _permute_padding(call: Call) -> Padded:
    """Some of the dimensions in another order: strides say which."""
    axes, spec = call.axes(0), operand(call.node, 0).meta["val"]
    named = replace(spec, stride=tuple(range(len(axes))))
    seen = shapes_of(overload(call.node), named, *call.args[1:])
    return call.emit(tuple([axes[d] for d in seen.stride]))


@padding(aten.unsqueeze.default)
def _unsqueeze_padding(call: Call) -> Padded:
    axes, d = list(call.axes(0)), call.args[1]
    axes.insert(d if d >= 0 else d + len(axes) + 1, ())
    return call.emit(tuple(axes))


# Parts ------------------------------------------------------------------------------------------------------


@shape(aten.select.int)
def _select_shape(x: TensorSpec, dim: int, index: Any) -> TensorSpec:
    dim %= len(x.shape)
    index = index if index >= 0 else index + x.shape[dim]
    require(index >= 0 and x.shape[dim] > index)
    kept = [d for d in range(len(x.shape)) if d != dim]
    return _look(x, [x.shape[d] for d in kept], [x.stride[d] for d in kept], x.offset + index * x.stride[dim])


@shape(aten.slice.Tensor)
def _slice_shape(
    x: TensorSpec, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> TensorSpec:
    dim %= len(x.shape)
    n = x.shape[dim]
    first, last = _clamped(0 if start is None else start, n), n if end is None else _clamped(end, n)
    length = (last - first + step - 1) // step if last >= first else 0
    shape, stride = list(x.shape), list(x.stride)
    shape[dim], stride[dim] = length, stride[dim] * step
    return _look(x, shape, stride, x.offset + first * x.stride[dim])


def _clamped(position: Any, n: Any) -> Any:
    """A slice's bound as Python counts it, in 0 .. n."""
    if type(position) is int and position >= 1 << 62:
        return n
    if position < 0:
        position = position + n
        return position if position >= 0 else 0
    return position if n >= position else n


@shape(aten.unfold.default)
def _unfold_shape(x: TensorSpec, dim: int, size: int, step: int) -> TensorSpec:
    dim %= len(x.shape)
    require(x.shape[dim] >= size)
    shape, stride = list(x.shape), list(x.stride)
    shape[dim], stride[dim] = (x.shape[dim] - size) // step + 1, x.stride[dim] * step
    return _look(x, [*shape, size], [*stride, x.stride[dim]])


define(aten.unbind.int, shape=lambda x, dim=0: [_select_shape(x, dim, k) for k in range(int(x.shape[dim]))])


@shape(aten.split.Tensor)
def _split_shape(x: TensorSpec, size: Any, dim: int = 0) -> list[TensorSpec]:
    dim %= len(x.shape)
    n = x.shape[dim]
    count = (n + size - 1) // size
    starts = [k * size for k in range(max(int(count), 1))]
    return [
        _slice_shape(x, dim, at, minimum(n.env, at + size, n) if type(n) is Size else min(at + size, n))
        for at in starts
    ]


@shape(aten.split_with_sizes.default)
def _split_with_sizes_shape(x: TensorSpec, sizes: Sequence[Any], dim: int = 0) -> list[TensorSpec]:
    dim %= len(x.shape)
    require(sum(sizes) == x.shape[dim])
    ends = list(itertools.accumulate(sizes))
    return [_slice_shape(x, dim, end - n, end) for end, n in zip(ends, sizes)]


@shape(aten.diagonal.default)
def _diagonal_shape(x: TensorSpec, offset: Any = 0, dim1: int = 0, dim2: int = 1) -> TensorSpec:
    dim1, dim2 = dim1 % len(x.shape), dim2 % len(x.shape)
    rows, columns = x.shape[dim1] + min(offset, 0), x.shape[dim2] - max(offset, 0)
    env = next((n.env for n in (rows, columns) if type(n) is Size), None)
    length = min(rows, columns) if env is None else minimum(env, rows, columns)
    kept = [d for d in range(len(x.shape)) if d not in (dim1, dim2)]
    first = x.offset + (offset * x.stride[dim2] if offset >= 0 else -offset * x.stride[dim1])
    strides = (*[x.stride[d] for d in kept], x.stride[dim1] + x.stride[dim2])
    return _look(x, (*[x.shape[d] for d in kept], length), strides, first)


define(aten.diag_embed.default, layout=with_stride(in_row_major))
define(aten.diagonal_copy.default, shape=lambda x, *args: _diagonal_shape(x, *args).shape)
define(aten.diagonal_backward.default, shape=lambda grad, size, *args: tuple(size))


@requires(aten.as_strided.default)
def _as_strided_requires(
    x: TensorSpec, size: Sequence[Any], stride: Sequence[Any], offset: Any = None
) -> None:
    """Within the memory that the tensor shows; what goes beyond it is for these sizes alone."""
    last = (x.offset if offset is None else offset) + sum([(n - 1) * step for n, step in zip(size, stride)])
    end = x.offset + sum([(n - 1) * step for n, step in zip(x.shape, x.stride)])
    if hint(last) <= hint(end):
        require(last <= end)
    else:
        require_numbers(x, *[n for n in (*size, *stride) if type(n) is Size])


def _amount(writer: Padder, size: Dim) -> fx.Node | int:
    """A size as it is at the call."""
    return writer.actual(Run(size)) if type(size) is Size else size


def _begin(call: Call, whole: Dim, part: Dim) -> Dim:
    """Where a part of a dimension begins: a number, or a size."""
    start = call.size("start") or 0
    if type(start) is not Size and start < 0:
        start = 0 if equal(whole, part) else settle(whole + start)
    return start


@padding(aten.slice.Tensor)
def _slice_padding(call: Call) -> Padded:
    """What begins at a fixed place keeps its padding at the end."""
    axes, writer, named = list(call.axes(0)), call.writer, call.named
    d, step, end = named["dim"] % len(axes), named["step"], named["end"]
    x, length = call.args[0], settle(call.shape[d])
    if is_padded(axes[d]):
        in_a_row(call, tuple(axes), d)
        start = _begin(call, settle(size_of(axes[d])), length)
        axes[d] = row_of(length)
        if type(start) is Size:
            places = writer.op(aten.mul.Tensor, writer.places(writer.value(length)), step)
            return writer.moved(x, d, writer.op(aten.add.Tensor, places, writer.actual(Run(start)))), tuple(
                axes
            )
        call.args, call.kwargs = [x, d, start, end, step], {}
    elif type(call.size("start")) is Size:
        raise CannotPad("a part that begins at a size")
    else:
        axes[d] = row_of(length)
    return call.emit(tuple(axes))


def _place(call: Call, axis: Any) -> Dim:
    """A place along a dimension: an element from the front keeps its place, one from the end is counted
    from where the padding begins.
    """
    place = call.size("index")
    assert place is not None
    return (
        place if not is_padded(axis) or type(place) is Size or place >= 0 else settle(size_of(axis) + place)
    )


@padding(aten.select.int)
def _select_padding(call: Call) -> Padded:
    axes, writer, d = list(call.axes(0)), call.writer, call.args[1] % len(call.axes(0))
    in_a_row(call, tuple(axes), d)
    place = _place(call, axes.pop(d))
    if type(place) is not Size:
        call.args[2] = place
        return call.emit(tuple(axes))
    at = writer.op(aten.view.default, writer.actual(Run(place)), [1])
    call.args = [writer.moved(call.args[0], d, at), d]
    return call.emit(tuple(axes), aten.squeeze.dim)


@padding(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.chunk.default)
def _split_padding(call: Call) -> Padded:
    axes = call.axes(0)
    unbind = call.node.target is aten.unbind.int
    place = 1 if unbind else 2
    d = (call.args[place] if len(call.args) > place else call.kwargs.get("dim", 0)) % len(axes)
    untouched(call, 0, d)
    return call.emit(
        tuple(
            [
                axes[:d] + axes[d + 1 :] if unbind else (*axes[:d], axis_of(spec.shape[d]), *axes[d + 1 :])
                for spec in call.node.meta["val"]
            ]
        )
    )


# Writes of a part -------------------------------------------------------------------------------------------
define(
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    shape=lambda x, *args, **kwargs: x,  # with its holes
)


def _require_shape_of_part(view: OpOverload, x: TensorSpec, source: TensorSpec, *where: Any) -> None:
    require_equal(source.shape, shapes_of(view, x, *where).shape)


def _part_written_layout(view: OpOverload, x: TensorSpec, source: TensorSpec, *where: Any) -> Any:
    """PyTorch's meta kernels write what fits and what does not, and PyTorch 2.11's let expanded stay so."""
    have, wanted = list(source.shape), list(infer_spec(view, (x, *where), {}).shape)
    if have != wanted:
        raise RuntimeError(
            "expected src to have a size equal to the slice of self. "
            f"src size = {have}, slice size = {wanted}"
        )
    if any(not step and n != 1 for n, step in zip(x.shape, x.stride, strict=True)):
        return like_layout(x)
    row_major = equal(x.stride, contiguous_stride(x.shape)) and x.dtype is source.dtype
    return TensorSpec.dense(x.shape, x.dtype, x.device) if row_major and 0 not in x.shape else PASS


for _write, _part in (
    (aten.slice_scatter.default, aten.slice.Tensor),
    (aten.select_scatter.default, aten.select.int),
    (aten.diagonal_scatter.default, aten.diagonal.default),
):
    define(
        _write,
        requires=functools.partial(_require_shape_of_part, _part),
        layout=functools.partial(_part_written_layout, _part),
    )
# PyTorch's shape function does not check sizes.
define(aten.as_strided_scatter.default, requires=require_numbers)


@padding(aten.slice_scatter.default)
def _slice_scatter_padding(call: Call) -> Padded:
    axes, src, writer, named = call.axes(0), call.axes(1), call.writer, call.named
    d, step = named["dim"] % len(axes), named["step"]
    rest = broadcast_axes([axes[:d] + axes[d + 1 :], src[:d] + src[d + 1 :]])
    found = (*rest[:d], axes[d], *rest[d:])
    if not is_padded(axes[d]) and not is_padded(src[d]) and type(call.size("start")) is not Size:
        return call.emit(found)
    in_a_row(call, axes, d)
    in_a_row(call, src, d)
    x, part = call.args[:2]
    start = _amount(writer, _begin(call, settle(size_of(axes[d])), settle(size_of(src[d]))))
    places = writer.op(aten.sub.Tensor, writer.places(x.meta["val"].shape[d]), start)
    at = writer.op(aten.div.Tensor_mode, places, step, rounding_mode="floor")
    here = [
        writer.compared("ge", places, 0),
        writer.compared("lt", at, writer.count([src[d]])),
        writer.compared("eq", writer.op(aten.remainder.Scalar, places, step), 0),
    ]
    inside = writer.op(aten.logical_and.default, writer.op(aten.logical_and.default, *here[:2]), here[2])
    call.args = [writer.along(inside, d, len(axes)), writer.moved(part, d, at), x]
    call.kwargs = {}
    return call.emit(found, aten.where.self)


@padding(aten.select_scatter.default)
def _select_scatter_padding(call: Call) -> Padded:
    axes, writer, d = call.axes(0), call.writer, call.args[2] % len(call.axes(0))
    in_a_row(call, axes, d)
    rest = broadcast_axes([axes[:d] + axes[d + 1 :], call.axes(1)])
    found = (*rest[:d], axes[d], *rest[d:])
    place = _place(call, axes[d])
    if type(place) is not Size:
        call.args[3] = place
        return call.emit(found)
    x, row = call.args[:2]
    here = writer.compared("eq", writer.places(x.meta["val"].shape[d]), writer.actual(Run(place)))
    row = writer.op(aten.unsqueeze.default, row, d)
    call.args, call.kwargs = [writer.along(here, d, len(axes)), row, x], {}
    return call.emit(found, aten.where.self)


# Joined, repeated, moved ------------------------------------------------------------------------------------


@shape(aten.cat.default)
def _cat_shape(parts: Sequence[TensorSpec], dim: int = 0) -> Shape:
    parts = [p for p in parts if not (len(p.shape) == 1 and type(p.shape[0]) is int and p.shape[0] == 0)]
    dim %= len(parts[0].shape)
    for part in parts[1:]:
        require(all(a == b for d, (a, b) in enumerate(zip(part.shape, parts[0].shape)) if d != dim))
    return (*parts[0].shape[:dim], sum([p.shape[dim] for p in parts]), *parts[0].shape[dim + 1 :])


@shape(aten.stack.default)
def _stack_shape(parts: Sequence[TensorSpec], dim: int = 0) -> Shape:
    require(all(a == b for p in parts[1:] for a, b in zip(p.shape, parts[0].shape)))
    dim %= len(parts[0].shape) + 1
    return (*parts[0].shape[:dim], len(parts), *parts[0].shape[dim:])


@layout(aten.cat.default, aten.stack.default)
@TakesOp
def _join_layout(func: OpOverload, parts: Any, dim: int = 0) -> Any:
    """Parts of one type; if all are channels-last, so is the result."""
    last = [suggests_channels_last(p) for p in parts]
    if func is aten.cat.default and len({p.dtype for p in parts}) == 1:  # these have no elements to join
        parts = [p for p in parts if p.shape != (0,)] or parts
    first = parts[0]
    rank = len(first.shape)
    if (
        not rank
        or any(0 in p.shape for p in parts)
        or len({(p.dtype, p.device, len(p.shape)) for p in parts}) > 1
    ):
        return PASS
    stacked = func is aten.stack.default
    if stacked and rank > 2 and not all(p.is_contiguous and not is_last for p, is_last in zip(parts, last)):
        return PASS  # a view of joined parts, or of parts with one dimension more
    require(-rank - stacked <= dim < rank + stacked)
    joined = dense(shapes_of(func, parts, dim), first)
    return joined.with_stride(channels_last_stride(joined.shape)) if all(last) else joined


@padding(aten.cat.default)
def _cat_padding(call: Call) -> Padded:
    """The parts one behind the other, with the padding of each taken out."""
    writer, parts, d = call.writer, call.args[0], call.named["dim"]
    all_axes = [writer.axes[part] for part in parts]
    CannotPad.when(len({len(axes) for axes in all_axes}) > 1, "aten.cat of tensors without elements")
    d %= len(all_axes[0])
    rest = broadcast_axes([axes[:d] + ((),) + axes[d + 1 :] for axes in all_axes])
    found = (*rest[:d], row_of(call.shape[d]), *rest[d + 1 :])
    if not any(is_padded(axes[d]) for axes in all_axes[:-1]):
        return call.emit(found)
    for axes in all_axes:
        in_a_row(call, axes, d)
    whole, _ = call.emit(found)
    n = whole.meta["val"].shape[d]
    places = at = writer.places(n)
    end: Dim = 0
    for part, axes in zip(parts[:-1], all_axes[:-1], strict=True):
        end = end + size_of(axes[d])
        if is_padded(axes[d]):  # later elements are further on by the padding
            padding = writer.op(aten.rsub.Scalar, writer.count([axes[d]]), part.meta["val"].shape[d])
            behind = writer.compared("ge", places, _amount(writer, settle(end)))
            at = writer.op(aten.add.Tensor, at, writer.op(aten.mul.Tensor, behind, padding))
    return writer.moved(whole, d, at), found


@padding(aten.stack.default)
def _stack_padding(call: Call) -> Padded:
    parts, d = call.args[0], call.named["dim"] % len(call.shape)
    found = broadcast_axes([call.writer.axes[part] for part in parts])
    return call.emit((*found[:d], row_of(len(parts)), *found[d:]))


@shape(aten.repeat.default)
def _repeat_shape(x: TensorSpec, repeats: Any) -> Shape:
    shape = (*[1] * (len(repeats) - len(x.shape)), *x.shape)
    return tuple([n * k for n, k in zip(shape, repeats)])


@shape(aten.roll.default, contiguous=row_major)
def _roll_shape(x: TensorSpec, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """Whether it moves something decides how images are laid out: asking makes that a guard."""
    if suggests_channels_last(x):
        for shift, dim in zip(shifts, dims):
            bool(shift % x.shape[dim] == 0)
    return x.shape


@layout(aten.roll.default)
def _roll_layout(x: TensorSpec, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """Eager joins two slices along each dimension, and that keeps channels-last, unless one is empty."""
    if (
        x.numel == 0
        or len(shifts) != len(dims)
        or not all(-len(x.shape) <= dim < len(x.shape) for dim in dims)
    ):
        return PASS
    for shift, dim in zip(shifts, dims):
        x = x.with_stride(
            suggested_stride(x, x.shape) if shift % x.shape[dim] else contiguous_stride(x.shape)
        )
    return x


@padding(aten.roll.default)
def _roll_padding(call: Call) -> Padded:
    axes, writer, x = call.axes(0), call.writer, call.args[0]
    shifts, dims = call.named["shifts"], [d % len(axes) for d in call.named["dims"]]
    if not dims or any(isinstance(a, fx.Node) for a in operands(call.node, 1)):
        raise CannotPad("aten.roll of all elements, or by a size")
    in_a_row(call, axes, *dims)
    for shift, d in zip(shifts, dims, strict=True):
        if is_padded(axes[d]):
            places = writer.op(aten.sub.Tensor, writer.places(x.meta["val"].shape[d]), shift)
            x = writer.moved(x, d, writer.op(aten.remainder.Tensor, places, writer.count([axes[d]])))
    plain = [(shift, d) for shift, d in zip(shifts, dims, strict=True) if not is_padded(axes[d])]
    call.args, call.kwargs = [x, *map(list, zip(*plain, strict=True))], {}
    return call.emit(axes) if plain else (x, axes)


@layout(aten.flip.default, shape=shape_of_argument(0))
def _flip_layout(x: TensorSpec, dims: Sequence[int]) -> Any:
    rank = len(x.shape)
    plain = all(-rank <= d < rank for d in dims) and len({d % rank for d in dims}) == len(dims)
    return replace(x, stride=preserved_stride(x), offset=0) if plain and 0 not in x.shape else PASS


@padding(aten.flip.default)
def _flip_padding(call: Call) -> Padded:
    axes, writer, x = call.axes(0), call.writer, call.args[0]
    dims = [d % len(axes) for d in call.args[1]]
    plain = [d for d in dims if not is_padded(axes[d])]
    in_a_row(call, axes, *dims)
    for d in dims:
        if d not in plain:
            last = writer.op(aten.sub.Tensor, writer.count([axes[d]]), 1)
            x = writer.moved(x, d, writer.op(aten.sub.Tensor, last, writer.places(x.meta["val"].shape[d])))
    call.args = [x, plain]
    return call.emit(axes) if plain else (x, axes)


@padding(aten.tril.default, aten.triu.default, shape=shape_of_argument(0), layout=row_major)
def _triangle_padding(call: Call) -> Padded:
    axes = call.axes(0)
    CannotPad.when(
        any(len(axis) > 1 and is_padded(axis) for axis in axes[-2:]),
        f"{call.node.target} over merged dimensions",
    )
    return call.emit(axes)


# Pads -------------------------------------------------------------------------------------------------------


@shape(aten.constant_pad_nd.default)
def _pad_shape(x: TensorSpec, pad: Any, value: Any = 0) -> Shape:
    if not x.is_contiguous:
        any(n > 0 for n in pad)  # else it is a clone, laid out as x is: asking makes that a guard
    shape = list(x.shape)
    for k in range(len(pad) // 2):
        shape[-1 - k] = shape[-1 - k] + pad[2 * k] + pad[2 * k + 1]
    return tuple(shape)


@layout(aten.constant_pad_nd.default)
def _pad_layout(x: TensorSpec, pad: Sequence[int], value: Any = 0) -> Any:
    if (
        not x.is_contiguous
        or suggests_channels_last(x)
        or len(pad) % 2
        or len(pad) > 2 * len(x.shape)
        or not any(pad)
    ):
        return PASS
    shape = [*x.shape]
    for at, (before, after) in enumerate(zip(pad[::2], pad[1::2])):
        if shape[-1 - at] + min(before, 0) + min(after, 0) <= 0:
            return PASS
        shape[-1 - at] += before + after
    return dense(shape, x) if 0 not in shape else PASS


@padding(aten.constant_pad_nd.default)
def _pad_padding(call: Call) -> Padded:
    """Elements put behind are there already once the padding holds them."""
    axes, more, named = list(call.axes(0)), call.args[1], call.named
    wider = [len(axes) - 1 - k for k in range(len(more) // 2) if more[2 * k] or more[2 * k + 1]]
    if any(isinstance(a, fx.Node) for a in operands(call.node, 1)):
        raise CannotPad("aten.constant_pad_nd by a size")
    in_a_row(call, tuple(axes), *wider)
    call.mask(0, wider, named["value"])
    for d in wider:
        axes[d] = row_of(call.shape[d])
    return call.emit(tuple(axes))


check("constant_pad_nd")(ask_fill)
define(
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    layout=with_stride(as_argument(0)),
)
define(
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
    layout=with_stride(as_argument(1)),
)
