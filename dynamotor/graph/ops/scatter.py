"""Writes at positions: `scatter`, `index_add`, `index_put` and their like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...base.compat import OpOverload
from ..bucket_padding import (
    Call,
    CannotPad,
    Padded,
    broadcast_axes,
    in_a_row,
    is_padded,
)
from ..kernel_checks import (
    argument_names,
    ask_dtypes,
    ask_fill,
    spec_at_hints,
)
from ..layouts import (
    in_row_major,
    like_argument,
    like_first,
    row_major,
    with_stride,
)
from ..op_definition import (
    broadcast,
    check,
    define,
    padding,
    question,
    require_equal,
    require_fits,
    requires,
    shape_of_argument,
    shapes_of,
)
from ..shapes import (
    UnsupportedOp,
    infer_spec,
)
from ..spec import TensorSpec, aten
from .index import of_positions, positions, require_within

# scatter ----------------------------------------------------------------------------------------------------
define(
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    shape=shape_of_argument(0),
    layout=row_major,
)
define(aten.scatter_reduce.two, aten.masked_scatter.default, shape=shape_of_argument(0))


@requires(
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
)
def _scatter_requires(
    x: TensorSpec, dim: int, index: TensorSpec, source: Any, *args: Any, **kwargs: Any
) -> None:
    require_within(index.shape, x.shape, dim)
    if type(source) is TensorSpec:
        require_within(index.shape, source.shape, None)


@padding(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def _scatter_padding(call: Call) -> Padded:
    """Rows of padding write to rows of padding; their addend is 0."""
    x, places, adds = call.axes(0), call.axes(2), call.node.target is aten.scatter_add.default
    d = call.args[1] % len(x)
    in_a_row(call, x, d)
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


define(aten.masked_scatter.default, requires=lambda x, mask, source: broadcast([x.shape, mask.shape]))


@check(
    *(name + end for name in ("index_add", "index_copy", "index_reduce") for end in ("", "_")),
    *(name + end for name in ("scatter_add", "scatter_reduce") for end in ("", "_")),
)
def _refuse_positions_in_nothing(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Every position is out of range in a dimension of size 0, where no kernel of ours looks at any."""
    named = dict(zip(argument_names(func), args)) | kwargs
    x, index = named["self"], named["index"]
    sizes = (
        x.shape if func.overloadpacket.__name__.startswith("index_reduce") else x.shape[named["dim"] :][:1]
    )
    if any(type(n) is int and n == 0 for n in sizes) and not any(
        type(n) is int and n == 0 for n in index.shape
    ):
        raise UnsupportedOp("DM213", f"{func} writes at positions of a tensor without elements")


@check("scatter", "scatter_", "index_fill", "index_fill_")
def _check_fill(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The number fits into the dtype, and the dimension has positions."""
    ask_fill(func, args, kwargs)
    _refuse_positions_in_nothing(func, args, kwargs)


# index_add, index_copy, index_fill --------------------------------------------------------------------------
define(
    aten.index_add.default,
    aten.index_copy.default,
    shape=shape_of_argument(0),
    layout=with_stride(in_row_major),
)
define(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, shape=shape_of_argument(0))
define(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, layout=with_stride(like_argument(0)))


@requires(aten.index_add.default, aten.index_copy.default, aten.index_reduce.default)
def _index_add_requires(
    x: TensorSpec, dim: int, index: TensorSpec, source: TensorSpec, *args: Any, **kwargs: Any
) -> None:
    if x.shape and source.shape:
        dim %= len(x.shape)
        count = index.shape[0] if index.shape else 1
        require_equal(source.shape, (*x.shape[:dim], count, *x.shape[dim + 1 :]))


# index_put --------------------------------------------------------------------------------------------------
define(
    aten.index_put.default,
    aten._unsafe_index_put.default,
    shape=shape_of_argument(0),
    layout=like_first,
)


@requires(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put_requires(
    x: TensorSpec, indices: Sequence[TensorSpec | None], values: TensorSpec, *args: Any
) -> None:
    masks, at = 0, 0
    for index in indices:
        rank = 1
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            rank, masks = len(index.shape), masks + 1
            require_equal(index.shape, x.shape[at : at + rank])
        at += rank
    if not masks:
        require_fits(values.shape, shapes_of(aten.index.Tensor, x, indices))


@padding(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put_padding(call: Call) -> Padded:
    """The addend from padding is 0."""
    x, indices, named = call.axes(0), call.args[1], call.named
    first, picked, whole = of_positions(call, x, indices)
    values = call.axes(2)
    if is_padded(*picked):
        CannotPad.when(
            not named["accumulate"] or values != whole, "a write at positions of which some are padding"
        )
        call.mask(2, range(first, first + len(picked)))
    elif broadcast_axes([values, whole]) != whole:
        raise CannotPad("a write of values with padding at another place")
    call.args[1] = positions(call, x, indices)
    return call.emit(x)


@check("index_put", "index_put_", "_unsafe_index_put")
def _check_values(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Values have the shape of the elements at the positions, or are broadcast to it."""
    x, positions, values = (*args, kwargs.get("values"))[:3]
    specs = [spec_at_hints(t) if isinstance(t, torch.Tensor) else t for t in (x, *positions, values)]
    if any(spec is not None and spec.dtype in (torch.bool, torch.uint8) for spec in specs[1:-1]):
        return  # the data decide how many there are
    shape = infer_spec(aten.index.Tensor, (specs[0], specs[1:-1]), {}).shape
    given = specs[-1].shape
    if len(given) > len(shape) or any(n not in (1, m) for n, m in zip(reversed(given), reversed(shape))):
        raise UnsupportedOp("DM213", f"{func} puts values of shape {tuple(given)} where {tuple(shape)} are")


@question("index_put", "index_put_", "_unsafe_index_put")
def _ask_dtypes_of_put(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The shape of the values is checked above, or only the data say whether it fits."""
    values = args[2] if len(args) > 2 else kwargs["values"]
    others = {name: value for name, value in kwargs.items() if name != "values"}
    ask_dtypes(func, (*args[:2], torch.ones((), dtype=values.dtype, device="cpu"), *args[3:]), others)
