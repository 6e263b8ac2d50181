"""What moves elements along padded dimensions: one function an op. Padding lies behind the elements there, so
that each is found at its place, and what is written behind the last is nobody's.

See `bucket_padding.py` for what a rule is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .bucket_padding import (
    Axes,
    Call,
    CannotPad,
    Padder,
    Run,
    at_end,
    broadcast,
    is_padded,
    row_of,
    rule,
    settle,
    size_of,
)
from .sizes import Dim, Size, equal

aten = torch.ops.aten


def _in_a_row(call: Call, axes: Axes, *dims: int) -> None:
    CannotPad.when(not all(at_end(axes[d]) for d in dims), f"{call.node.target} along merged dimensions")


def _amount(writer: Padder, size: Dim) -> fx.Node | int:
    """A size as it is at the call."""
    return writer.actual(Run(size)) if type(size) is Size else size


@rule(aten.flip.default)
def _flip(call: Call) -> tuple[fx.Node, Any]:
    axes, writer, x = call.axes(0), call.writer, call.args[0]
    dims = [d % len(axes) for d in call.args[1]]
    plain = [d for d in dims if not is_padded(axes[d])]
    _in_a_row(call, axes, *dims)
    for d in dims:
        if d not in plain:
            last = writer.op(aten.sub.Tensor, writer.count([axes[d]]), 1)
            x = writer.moved(x, d, writer.op(aten.sub.Tensor, last, writer.places(x.meta["val"].shape[d])))
    call.args = [x, plain]
    return call.emit(axes) if plain else (x, axes)


@rule(aten.roll.default)
def _roll(call: Call) -> tuple[fx.Node, Any]:
    axes, writer, x = call.axes(0), call.writer, call.args[0]
    shifts, dims = call.named["shifts"], [d % len(axes) for d in call.named["dims"]]
    if not dims or any(isinstance(a, fx.Node) for a in call.node.args[1]):  # type: ignore[union-attr]
        raise CannotPad("aten.roll of all elements, or by a size")
    _in_a_row(call, axes, *dims)
    for shift, d in zip(shifts, dims, strict=True):
        if is_padded(axes[d]):
            places = writer.op(aten.sub.Tensor, writer.places(x.meta["val"].shape[d]), shift)
            x = writer.moved(x, d, writer.op(aten.remainder.Tensor, places, writer.count([axes[d]])))
    plain = [(shift, d) for shift, d in zip(shifts, dims, strict=True) if not is_padded(axes[d])]
    call.args, call.kwargs = [x, *map(list, zip(*plain, strict=True))], {}
    return call.emit(axes) if plain else (x, axes)


@rule(aten.stack.default)
def _stack(call: Call) -> tuple[fx.Node, Any]:
    parts, d = call.args[0], call.named["dim"] % len(call.shape)
    found = broadcast([call.writer.axes[part] for part in parts])
    return call.emit((*found[:d], row_of(len(parts)), *found[d:]))


@rule(aten.cat.default)
def _cat(call: Call) -> tuple[fx.Node, Any]:
    """The parts one behind the other, with the padding of each taken out."""
    writer, parts, d = call.writer, call.args[0], call.named["dim"]
    all_axes = [writer.axes[part] for part in parts]
    CannotPad.when(len({len(axes) for axes in all_axes}) > 1, "aten.cat of tensors without elements")
    d %= len(all_axes[0])
    rest = broadcast([axes[:d] + ((),) + axes[d + 1 :] for axes in all_axes])
    found = (*rest[:d], row_of(call.shape[d]), *rest[d + 1 :])
    if not any(is_padded(axes[d]) for axes in all_axes[:-1]):
        return call.emit(found)
    for axes in all_axes:
        _in_a_row(call, axes, d)
    whole, _ = call.emit(found)
    n = whole.meta["val"].shape[d]
    places = at = writer.places(n)
    end: Dim = 0
    for part, axes in zip(parts[:-1], all_axes[:-1], strict=True):
        end = end + size_of(axes[d])
        if is_padded(axes[d]):  # what comes behind lies further on by the padding
            padding = writer.op(aten.rsub.Scalar, writer.count([axes[d]]), part.meta["val"].shape[d])
            behind = writer.compared("ge", places, _amount(writer, settle(end)))
            at = writer.op(aten.add.Tensor, at, writer.op(aten.mul.Tensor, behind, padding))
    return writer.moved(whole, d, at), found


# Parts ------------------------------------------------------------------------------------------------------
def _begin(call: Call, whole: Dim, part: Dim) -> Dim:
    """Where a part of a dimension begins: a number, or a size."""
    start = call.size("start") or 0
    if type(start) is not Size and start < 0:
        start = 0 if equal(whole, part) else settle(whole + start)
    return start


@rule(aten.slice.Tensor)
def _slice(call: Call) -> tuple[fx.Node, Any]:
    """What begins at a fixed place keeps its padding at the end."""
    axes, writer, named = list(call.axes(0)), call.writer, call.named
    d, step, end = named["dim"] % len(axes), named["step"], named["end"]
    x, length = call.args[0], settle(call.shape[d])
    if is_padded(axes[d]):
        _in_a_row(call, tuple(axes), d)
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


@rule(aten.slice_scatter.default)
def _slice_scatter(call: Call) -> tuple[fx.Node, Any]:
    axes, src, writer, named = call.axes(0), call.axes(1), call.writer, call.named
    d, step = named["dim"] % len(axes), named["step"]
    rest = broadcast([axes[:d] + axes[d + 1 :], src[:d] + src[d + 1 :]])
    found = (*rest[:d], axes[d], *rest[d:])
    if not is_padded(axes[d]) and not is_padded(src[d]) and type(call.size("start")) is not Size:
        return call.emit(found)
    _in_a_row(call, axes, d)
    _in_a_row(call, src, d)
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


def _place(call: Call, axis: Any) -> Dim:
    """A place along a dimension: an element from the front lies where it lay, one from the end is counted
    from where the padding begins.
    """
    place = call.size("index")
    assert place is not None
    return (
        place if not is_padded(axis) or type(place) is Size or place >= 0 else settle(size_of(axis) + place)
    )


@rule(aten.select.int)
def _select(call: Call) -> tuple[fx.Node, Any]:
    axes, writer, d = list(call.axes(0)), call.writer, call.args[1] % len(call.axes(0))
    _in_a_row(call, tuple(axes), d)
    place = _place(call, axes.pop(d))
    if type(place) is not Size:
        call.args[2] = place
        return call.emit(tuple(axes))
    at = writer.op(aten.view.default, writer.actual(Run(place)), [1])
    call.args = [writer.moved(call.args[0], d, at), d]
    return call.emit(tuple(axes), aten.squeeze.dim)


@rule(aten.select_scatter.default)
def _select_scatter(call: Call) -> tuple[fx.Node, Any]:
    axes, writer, d = call.axes(0), call.writer, call.args[2] % len(call.axes(0))
    _in_a_row(call, axes, d)
    rest = broadcast([axes[:d] + axes[d + 1 :], call.axes(1)])
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


# Positions --------------------------------------------------------------------------------------------------
@rule(aten.gather.default)
def _gather(call: Call) -> tuple[fx.Node, Any]:
    x, places = call.axes(0), call.axes(2)
    d = call.args[1] % len(x)
    _in_a_row(call, x, d)
    CannotPad.when(
        any(a != b for n, (a, b) in enumerate(zip(x, places, strict=True)) if n != d), "aten.gather of a part"
    )
    call.mask(2, range(len(places)))
    return call.emit(places)


@rule(aten.index_select.default)
def _index_select(call: Call) -> tuple[fx.Node, Any]:
    x, d = call.axes(0), call.args[1] % len(call.axes(0))
    _in_a_row(call, x, d)
    call.mask(2, [0])
    return call.emit((*x[:d], *call.axes(2), *x[d + 1 :]))


def _positions(call: Call, x: Axes, indices: Sequence[fx.Node | None]) -> list[fx.Node | None]:
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


def _of_positions(call: Call, x: Axes, indices: Sequence[fx.Node | None]) -> tuple[int, Axes, Axes]:
    """(the first dimension of the positions, theirs, and the whole result's)."""
    at = [d for d, index in enumerate(indices) if index is not None]
    picked = broadcast([call.writer.axes[indices[d]] for d in at])  # type: ignore[index]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    rest = [axis for d, axis in enumerate(x) if d not in at]
    return first, picked, (*rest[:first], *picked, *rest[first:])


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(call: Call) -> tuple[fx.Node, Any]:
    x, indices = call.axes(0), call.args[1]
    _, _, found = _of_positions(call, x, indices)
    call.args = [call.args[0], _positions(call, x, indices)]
    return call.emit(found)


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(call: Call) -> tuple[fx.Node, Any]:
    """What is added from padding is 0."""
    x, indices, named = call.axes(0), call.args[1], call.named
    first, picked, whole = _of_positions(call, x, indices)
    values = call.axes(2)
    if is_padded(*picked):
        CannotPad.when(
            not named["accumulate"] or values != whole, "a write at positions of which some are padding"
        )
        call.mask(2, range(first, first + len(picked)))
    elif broadcast([values, whole]) != whole:
        raise CannotPad("a write of values whose padding lies elsewhere")
    call.args[1] = _positions(call, x, indices)
    return call.emit(x)


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def _scatter(call: Call) -> tuple[fx.Node, Any]:
    """Rows of padding write to rows of padding; what they add is 0."""
    x, places, adds = call.axes(0), call.axes(2), call.node.target is aten.scatter_add.default
    d = call.args[1] % len(x)
    _in_a_row(call, x, d)
    CannotPad.when(
        any(a != b for n, (a, b) in enumerate(zip(x, places, strict=True)) if n != d),
        f"{call.node.target} of a part",
    )
    CannotPad.when(
        isinstance(call.args[3], fx.Node) and call.axes(3) != places or is_padded(places[d]) and not adds,
        f"{call.node.target} at positions of which some are padding",
    )
    if adds:
        call.mask(3, [d])
    call.mask(2, range(len(places)))
    return call.emit(x)


@rule(aten.constant_pad_nd.default)
def _constant_pad(call: Call) -> tuple[fx.Node, Any]:
    """What is put behind is there already once the padding holds it."""
    axes, more, named = list(call.axes(0)), call.args[1], call.named
    wider = [len(axes) - 1 - k for k in range(len(more) // 2) if more[2 * k] or more[2 * k + 1]]
    if any(isinstance(a, fx.Node) for a in call.node.args[1]):  # type: ignore[union-attr]
        raise CannotPad("aten.constant_pad_nd by a size")
    _in_a_row(call, tuple(axes), *wider)
    call.mask(0, wider, named["value"])
    for d in wider:
        axes[d] = row_of(call.shape[d])
    return call.emit(tuple(axes))
