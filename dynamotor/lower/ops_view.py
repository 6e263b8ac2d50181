"""Lowerings of views, layout changes, joins and factories: index arithmetic only, no memory of their own.
Random numbers: `dynamotor::rand`, a function of (seed, stream, linear index); graph/prims.py has the bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..base.registry import register_all
from ..graph import prims  # noqa: F401  (defines torch.ops.dynamotor)
from ..graph.kernel_checks import sees_twice
from ..graph.nodes import operand, spec_of
from ..graph.sizes import Dim, Dims, Size, divides, equal, known, maximum, minimum
from ..graph.spec import TensorSpec, aten, contiguous_stride, numel
from . import value as views
from .claim import write_part
from .extern import OwnStorage
from .index_expr import ZERO, Index, Var, flatten, is_one, is_zero
from .ir import (
    COMPUTE_TYPE,
    F32,
    F64,
    I64,
    Expr,
    cast,
    compare,
    const,
    index_value,
    make,
    masked,
    op,
    round_to,
    select,
)
from .lowering import Decline, LoopBuilder, Scalar, decline_if, lowering
from .ops_pointwise import held
from .program import BufRef
from .value import LoopValue

MAX_PARTS = 8  # joined by one kernel; each element asks for each part whether it is the one


def _dim(x: LoopValue, dim: int) -> int:
    return dim % len(x.shape) if x.shape else 0


@lowering(aten.transpose.int)
def _transpose(ctx: LoopBuilder, x: LoopValue, a: int, b: int) -> LoopValue:
    dims = list(range(len(x.shape)))
    if dims:
        a, b = _dim(x, a), _dim(x, b)
        dims[a], dims[b] = dims[b], dims[a]
    return views.permute(x, dims)


@lowering(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(ctx: LoopBuilder, x: LoopValue, dim: Any = None) -> LoopValue:
    rank = len(x.shape)
    picked = (
        range(rank)
        if dim is None
        else [d % max(rank, 1) for d in (dim if isinstance(dim, (list, tuple)) else [dim])]
    )
    for d in sorted(set(picked), reverse=True):
        if d < rank and is_one(x.shape[d]):
            x = views.select_dim(x, d, 0)
    return x


@lowering(aten.unsqueeze.default)
def _unsqueeze(ctx: LoopBuilder, x: LoopValue, dim: int) -> LoopValue:
    dim %= len(x.shape) + 1
    return LoopValue.view(x, ctx.spec.shape, lambda i: (*i[:dim], *i[dim + 1 :]))


def _first(start: Dim | None, size: Dim) -> Dim:
    """Where a slice of a dimension begins: from the end when negative, cut to the dimension."""
    if start is None:
        return 0
    if type(start) is Size:
        env = start.env
    elif type(size) is Size:
        env = size.env
    else:
        return slice(start, None).indices(size)[0]
    if known(">=", -1 - start) or not known(">=", start) and start < 0:
        start = maximum(env, start + size, 0)
    return minimum(env, start, size)


@lowering(aten.slice.Tensor)
def _slice(
    ctx: LoopBuilder,
    x: LoopValue,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> LoopValue:
    dim = _dim(x, dim)
    first = _first(start, x.shape[dim])
    return views.slice_dim(ctx.whole(x), dim, first, step, ctx.spec.shape[dim])


def _counted(index: Dim, size: Dim) -> Dim:
    """A position from the start of a dimension; negative ones are counted from its end."""
    return index if known(">=", index) or index >= 0 else index + size


@lowering(aten.select.int)
def _select(ctx: LoopBuilder, x: LoopValue, dim: int, index: int) -> LoopValue:
    dim = _dim(x, dim)
    return views.select_dim(ctx.whole(x), dim, _counted(index, x.shape[dim]))


@lowering(aten.split.Tensor, aten.split_with_sizes.default)
def _split(ctx: LoopBuilder, x: LoopValue, sizes: Any, dim: int = 0) -> tuple[LoopValue, ...]:
    dim, result, start = _dim(ctx.whole(x), dim), [], 0
    for size in [spec.shape[dim] for spec in ctx.spec]:
        result.append(views.slice_dim(x, dim, start, 1, size))
        start += size
    return tuple(result)


@lowering(aten.unbind.int)
def _unbind(ctx: LoopBuilder, x: LoopValue, dim: int = 0) -> tuple[LoopValue, ...]:
    dim = _dim(ctx.whole(x), dim)
    return tuple(views.select_dim(x, dim, k) for k in range(x.shape[dim]))


@lowering(aten.roll.default)
def _roll(ctx: LoopBuilder, x: LoopValue, shifts: Sequence[int], dims: Sequence[int] = ()) -> LoopValue:
    decline_if(not dims, "roll of the flattened tensor")
    for shift, dim in zip(
        shifts if isinstance(shifts, (list, tuple)) else [shifts],
        dims if isinstance(dims, (list, tuple)) else [dims],
        strict=True,
    ):
        dim = _dim(x, dim)
        n = x.shape[dim]
        decline_if(
            type(n) is Size and not known(">=", n - abs(shift)),
            "a shift that may be longer than the dimension",
        )
        shift = _counted(shift, n) if type(n) is Size else shift % n if n else 0
        if not is_zero(shift):
            cut = n - shift
            x = _nested(
                ctx, [views.slice_dim(x, dim, cut, 1, n - cut), views.slice_dim(x, dim, 0, 1, cut)], dim
            )
    return ctx.pointwise(lambda e: e, x)  # new memory also where nothing moves


@lowering(aten.diagonal.default)
def _diagonal(ctx: LoopBuilder, x: LoopValue, offset: int = 0, dim1: int = 0, dim2: int = 1) -> LoopValue:
    return _diagonal_of(ctx.whole(x), ctx.spec.shape, offset, dim1, dim2)


def _diagonal_of(x: LoopValue, shape: Dims, offset: int, dim1: int, dim2: int) -> LoopValue:
    a, b = _dim(x, dim1), _dim(x, dim2)
    down, right = max(-offset, 0), max(offset, 0)

    def index_map(i: tuple[Index, ...]) -> tuple[Index, ...]:
        rest, k = list(i[:-1]), i[-1]
        return tuple(
            k + down if d == a else k + right if d == b else rest.pop(0) for d in range(len(x.shape))
        )

    return LoopValue.view(x, shape, index_map)


@lowering(aten.diagonal_scatter.default)
def _diagonal_scatter(
    ctx: LoopBuilder, x: LoopValue, source: LoopValue, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> LoopValue:
    part = _diagonal_of(ctx.whole(x), source.shape, offset, dim1, dim2)
    put = write_part(ctx, x, part, _cast(ctx, source))
    if put is None:
        raise Decline("a diagonal of a value that is read later")
    return put


@lowering(aten.unfold.default)
def _unfold(ctx: LoopBuilder, x: LoopValue, dim: int, size: int, step: int) -> LoopValue:
    decline_if(not x.shape, "0-d operand")
    dim = _dim(x, dim)
    return LoopValue.view(
        ctx.whole(x),
        ctx.spec.shape,
        lambda i: tuple([v * step + i[-1] if d == dim else v for d, v in enumerate(i[:-1])]),
    )


def _own_offset(ctx: LoopBuilder, storage_offset: Dim | None) -> Dim:
    """A storage offset of eager's, counted from the first element of the operand."""
    spec = spec_of(operand(ctx.node, 0))
    return 0 if storage_offset is None else storage_offset - spec.offset


@lowering(aten.as_strided.default)
def _as_strided(
    ctx: LoopBuilder,
    x: LoopValue,
    size: Sequence[Dim],
    stride: Sequence[Dim],
    storage_offset: Dim | None = None,
) -> LoopValue:
    """Where x has eager's memory layout and nothing outside of it is read; else a call on a copy with a
    storage of its own.
    """
    spec = spec_of(operand(ctx.node, 0))
    start = _own_offset(ctx, storage_offset)
    ref = ctx.realize(x, spec.stride)
    extent = TensorSpec(tuple(size), tuple(stride), x.dtype).extent
    if ref.stride != spec.stride or start < 0 or start + extent > spec.extent:
        copied: LoopValue = ctx.extern(
            OwnStorage(aten.as_strided_copy.default), (x, size, stride, start), fallback=True
        )
        return copied
    return LoopValue(
        size, x.dtype, ref=BufRef(ref.name, tuple(size), tuple(stride), ref.offset + start, ref.dtype)
    )


@lowering(aten.as_strided_scatter.default)
def _as_strided_scatter(
    ctx: LoopBuilder,
    x: LoopValue,
    source: LoopValue,
    size: Sequence[Dim],
    stride: Sequence[Dim],
    storage_offset: Dim | None = None,
) -> LoopValue:
    """A dense run of elements of a dense x is a range of positions; anything else is a call on a copy with
    its own storage.
    """
    spec = spec_of(operand(ctx.node, 0))
    start, shape = _own_offset(ctx, storage_offset), tuple(size)
    if x.ref is not None and x.ref.stride == spec.stride and start >= 0 and numel(shape):
        there = BufRef(x.ref.name, shape, tuple(stride), x.ref.offset + start, x.ref.dtype)
        put = write_part(ctx, x, LoopValue(shape, x.dtype, ref=there), _cast(ctx, source))
        if put is not None:
            return put
    if (
        not spec.is_contiguous
        or not TensorSpec(shape, tuple(stride), x.dtype).is_contiguous
        or not numel(shape)
    ):
        scattered: LoopValue = ctx.extern(
            OwnStorage(aten.as_strided_scatter.default), (x, source, size, stride, start), fallback=True
        )
        return scattered
    flat = views.reshape(source, (numel(shape),))

    def body(index: tuple[Index, ...]) -> Expr:
        position = flatten(index, spec.stride) - start
        inside = op("and", compare("ge", index_value(position), const(0, I64)), _less(position, numel(shape)))
        return masked(inside, flat.at((position,)), x.at(index))

    return ctx.generate(body)


# -- joins and pads ------------------------------------------------------------------------------------------
def _less(i: Index, n: Dim) -> Expr:
    return compare("lt", index_value(i), const(n, I64))


@lowering(aten.cat.default)
def concatenated(ctx: LoopBuilder, parts: Sequence[LoopValue], dim: int = 0) -> LoopValue:
    parts = [p for p in parts if not equal(p.shape, (0,))]
    decline_if(not parts, "nothing to join")
    dim = _dim(parts[0], dim)
    parts = [p for p in parts if not is_zero(p.shape[dim])]
    decline_if(not parts, "nothing to join")
    parts = [_cast(ctx, p) for p in parts]
    # A vector of a CPU is within one part, and a loop ends at a known end.
    unaligned = dim == len(parts[0].shape) - 1 and not all(
        ctx.on_gpu or type(p.shape[dim]) is int or divides(16, p.shape[dim]) for p in parts[:-1]
    )
    decline_if(len(parts) > MAX_PARTS or unaligned, "many or unaligned parts")
    return ctx.pointwise(lambda e: e, parts[0]) if len(parts) == 1 else _nested(ctx, parts, dim)


def _cast(ctx: LoopBuilder, x: LoopValue) -> LoopValue:
    """The value in the result's type."""
    return x if x.dtype is ctx.spec.dtype else ctx.pointwise(lambda e: e, x, shape=x.shape)


def _nested(ctx: LoopBuilder, parts: Sequence[LoopValue], dim: int) -> LoopValue:
    """One value of several along a dimension: each part is read only within its own range."""
    starts = [sum(p.shape[dim] for p in parts[:k]) for k in range(len(parts))]

    def body(index: tuple[Index, ...]) -> Expr:
        def at(k: int) -> Expr:
            return _inside(parts[k], (*index[:dim], index[dim] - starts[k], *index[dim + 1 :]))

        result = at(len(parts) - 1)
        for k in reversed(range(len(parts) - 1)):
            result = masked(_less(index[dim], starts[k] + parts[k].shape[dim]), at(k), result)
        return result

    return ctx.generate(body)


def _inside(x: LoopValue, index: tuple[Index, ...]) -> Expr:
    """The element at an index that is read only where it is inside x: divisions in views of x need not wrap
    elsewhere.
    """
    taken = {v.name for i in index for v in i.vars()}
    found = list(index)
    places: dict[Var, Index] = {}
    for d, (i, size) in enumerate(zip(index, x.shape, strict=True)):
        if not i.within(size):
            name = f"inside{d}"
            while name in taken:
                name += "_"
            places[Var(name, size)] = i
            found[d] = Index.of(Var(name, size))
    return x.at(tuple(found)).subst(places) if places else x.at(index)


@lowering(aten.stack.default)
def _stack(ctx: LoopBuilder, parts: Sequence[LoopValue], dim: int = 0) -> LoopValue:
    dim %= len(parts[0].shape) + 1
    decline_if(len(parts) > (MAX_PARTS if ctx.on_gpu else 4), "many parts")
    return _nested(ctx, [_unsqueeze_at(_cast(ctx, p), dim) for p in parts], dim)


def _unsqueeze_at(x: LoopValue, dim: int) -> LoopValue:
    return views.reshape(x, (*x.shape[:dim], 1, *x.shape[dim:]))


@lowering(aten.constant_pad_nd.default)
def _pad(ctx: LoopBuilder, x: LoopValue, pad: Sequence[int], value: Scalar = 0) -> LoopValue:
    rank = len(x.shape)
    if any(not known(">=", n) for n in pad):
        ctx.whole(x)
    before = [0] * rank
    for k in range(len(pad) // 2):
        before[rank - 1 - k] = pad[2 * k]
    shape = ctx.spec.shape
    fill = round_to(const(value, COMPUTE_TYPE[x.dtype]), x.dtype)
    if 0 in x.shape:
        return ctx.generate(lambda index: fill)

    def body(index: tuple[Index, ...]) -> Expr:
        inside: Expr | None = None
        for d in range(rank):
            i = index[d] - before[d]
            tests = []
            if not known(">=", -before[d]):
                tests.append(compare("ge", index_value(i), const(0, I64)))
            if not known(">=", x.shape[d] - shape[d] + before[d]):
                tests.append(_less(i, x.shape[d]))
            for test in tests:
                inside = test if inside is None else op("and", inside, test)
        here = _inside(x, tuple(index[d] - before[d] for d in range(rank)))
        return here if inside is None else masked(inside, here, fill)

    return ctx.generate(body)


@lowering(aten.slice_scatter.default)
def _slice_scatter(
    ctx: LoopBuilder,
    x: LoopValue,
    source: LoopValue,
    dim: int = 0,
    start: Dim | None = None,
    end: Dim | None = None,
    step: int = 1,
) -> LoopValue:
    decline_if(sees_twice(ctx.spec), "elements that share memory are written together")
    dim, source = _dim(x, dim), _cast(ctx, source)
    first = _first(start, x.shape[dim])
    length = source.shape[dim]
    if 0 in source.shape:
        return ctx.generate(x.at)
    put = write_part(ctx, x, views.slice_dim(x, dim, first, step, length), source)
    if put is not None:
        return put
    decline_if(step != 1 and not ctx.on_gpu, "a step")

    def body(index: tuple[Index, ...]) -> Expr:
        i = index[dim] - first
        inside = compare("ge", index_value(i), const(0, I64))
        if step != 1:
            inside = op("and", inside, compare("eq", index_value(i % step), const(0, I64)))
            i = i // step
        inside = op("and", inside, _less(i, length))
        return masked(inside, _inside(source, (*index[:dim], i, *index[dim + 1 :])), x.at(index))

    return ctx.generate(body) if not is_zero(length) else ctx.pointwise(lambda e: e, x)


@lowering(aten.select_scatter.default)
def _select_scatter(ctx: LoopBuilder, x: LoopValue, source: LoopValue, dim: int, index: int) -> LoopValue:
    dim = _dim(x, dim)
    at = _counted(index, x.shape[dim])
    return _slice_scatter(ctx, x, _unsqueeze_at(source, dim), dim, at, at + 1)


@lowering(aten.repeat.default)
def _repeat(ctx: LoopBuilder, x: LoopValue, repeats: Sequence[Dim]) -> LoopValue:
    decline_if(any(map(is_zero, x.shape)), "empty operand")
    lead = len(repeats) - len(x.shape)

    def body(index: tuple[Index, ...]) -> Expr:
        return x.at(tuple(index[lead + d] % n for d, n in enumerate(x.shape)))

    return ctx.generate(body)


# -- factories -----------------------------------------------------------------------------------------------
def _constant_value(spec: TensorSpec, number: Scalar) -> LoopValue:
    decline_if(spec.dtype not in COMPUTE_TYPE, "dtype")
    e = round_to(const(number, COMPUTE_TYPE[spec.dtype]), spec.dtype)
    return LoopValue(spec.shape, spec.dtype, lambda index: e)


@lowering(aten.full.default, aten.full_like.default, aten.new_full.default)
def _full(ctx: LoopBuilder, _like: Any, *args: Any, **_: Any) -> LoopValue:
    fill = args[-1] if args else _["fill_value"]
    return held(ctx, fill) if isinstance(fill, LoopValue) else _constant_value(ctx.spec, fill)


def _whole(number: Scalar | Size) -> Dim:
    return number if type(number) is Size else int(number)


def _arange(ctx: LoopBuilder, start: Scalar, step: Scalar) -> LoopValue:
    compute = COMPUTE_TYPE[ctx.spec.dtype]
    if compute.is_floating_point:

        def body(index: tuple[Index, ...]) -> Expr:
            k = cast(index_value(index[0]), F64)
            return cast(op("add", const(start, F64), op("mul", k, const(step, F64))), compute)
    else:

        def body(index: tuple[Index, ...]) -> Expr:
            return cast(index_value(index[0] * _whole(step) + _whole(start)), compute)

    return ctx.generate(body)


@lowering(aten.eye.default, aten.eye.m)
def _eye(ctx: LoopBuilder, *_: Any, **__: Any) -> LoopValue:
    compute = COMPUTE_TYPE[ctx.spec.dtype]
    return ctx.generate(lambda i: cast(compare("eq", index_value(i[0]), index_value(i[1])), compute))


def _triangle(name: str, ctx: LoopBuilder, x: LoopValue, diagonal: int = 0) -> LoopValue:
    def body(index: tuple[Index, ...]) -> Expr:
        e = x.at(index)
        return select(
            compare(name, index_value(index[-1] - index[-2]), const(diagonal, I64)), e, const(0, e.dtype)
        )

    return ctx.generate(body)


lowering(aten.tril.default)(functools.partial(_triangle, "le"))
lowering(aten.triu.default)(functools.partial(_triangle, "ge"))


register_all(
    lowering,
    (
        (
            (aten.view.default, aten.reshape.default, aten._unsafe_view.default),
            lambda ctx, x, size: views.reshape(x, ctx.spec.shape),
        ),
        ((aten.alias.default, aten.detach.default, aten.contiguous.default), lambda ctx, x, **_: x),
        ((aten.permute.default,), lambda ctx, x, dims: views.permute(x, dims)),
        (
            (aten.t.default, aten.numpy_T.default),
            lambda ctx, x: views.permute(x, list(reversed(range(len(x.shape))))),
        ),
        ((aten.expand.default,), lambda ctx, x, size, implicit=False: views.expand(x, ctx.spec.shape)),
        ((aten.flip.default,), lambda ctx, x, dims: views.flip(x, dims)),
        (
            (aten.as_strided_copy.default,),  # new memory, whatever it sees
            lambda ctx, x, *args, **kwargs: ctx.pointwise(lambda e: e, _as_strided(ctx, x, *args, **kwargs)),
        ),
        (
            (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default),
            lambda ctx, *_, **__: _constant_value(ctx.spec, 0),
        ),
        (
            (aten.ones.default, aten.ones_like.default, aten.new_ones.default),
            lambda ctx, *_, **__: _constant_value(ctx.spec, 1),
        ),
        ((aten.scalar_tensor.default,), lambda ctx, number, **_: _constant_value(ctx.spec, number)),
        ((aten.fill.Scalar,), lambda ctx, x, number: _constant_value(ctx.spec, number)),
        ((aten.arange.default,), lambda ctx, end, **_: _arange(ctx, 0, 1)),
        ((aten.arange.start,), lambda ctx, start, end, **_: _arange(ctx, start, 1)),
        ((aten.arange.start_step,), lambda ctx, start, end, step=1, **_: _arange(ctx, start, step)),
    ),
)


# -- random numbers ------------------------------------------------------------------------------------------


@lowering(torch.ops.dynamotor.rand.default)
def _rand(ctx: LoopBuilder, seed: LoopValue, stream: int, size: Sequence[Dim], **_: Any) -> LoopValue:
    """A uniform float32 in [0, 1) for each element, row-major."""
    decline_if(ctx.spec.dtype is not F32, "rand of another dtype")
    strides = contiguous_stride(ctx.spec.shape)
    key = seed.at((ZERO,))
    return ctx.generate(lambda index: make("rand", (key, int(stream), flatten(index, strides)), F32))
