"""Lowerings of reductions, softmax and losses, and of running results along one dimension (cumsum, cummax).
Sums run in the compute type (float32 for half precisions).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.registry import register_all
from ..graph.sizes import Dim, Size, known, maximum
from ..graph.spec import HALVES, TensorSpec, aten, numel
from . import value as views
from .index_expr import Index
from .ir import (
    BOOL,
    COMPUTE_TYPE,
    F32,
    F64,
    I32,
    I64,
    Expr,
    LoopNode,
    ReduceKind,
    ScanKind,
    cast,
    compare,
    const,
    index_value,
    op,
    round_to,
    select,
    walk,
)
from .lowering import LoopBuilder, Scalar, decline_if, lowering, picked_element
from .ops_index import loaded_index
from .ops_pointwise import add, div, like, mul, sub
from .program import BufRef
from .value import LoopValue, is_dense


def all_dims(x: LoopValue, dim: Any) -> list[int]:
    """The dimensions an aten `dim` argument means (None or empty: all)."""
    rank = len(x.shape)
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(rank))
    return (
        sorted({d % max(rank, 1) for d in (dim if isinstance(dim, (list, tuple)) else [dim])}) if rank else []
    )


def count(x: LoopValue, dims: Sequence[int]) -> Dim:
    """Elements that go into one result."""
    return numel(x.shape[d] for d in dims)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a float reduction's result is kept until it is finished."""
    return COMPUTE_TYPE[dtype]


def narrow(ctx: LoopBuilder, x: LoopValue, dtype: torch.dtype) -> LoopValue:
    """Round a float32 result to the output's dtype."""
    return x if x.dtype is dtype else ctx.pointwise(lambda e: e, x, shape=x.shape, dtype=dtype)


def total(
    ctx: LoopBuilder, x: LoopValue, dims: Sequence[int], keepdim: bool, compute: torch.dtype, **options: Any
) -> LoopValue:
    """Sum in a compute type."""
    return ctx.reduce("sum", x, dims, keepdim=keepdim, dtype=compute, **options)


def _arithmetic(
    ctx: LoopBuilder,
    kind: ReduceKind,
    of_booleans: ReduceKind,
    x: LoopValue,
    dim: Any,
    keepdim: bool,
    fn: Callable[[Expr], Expr] | None = None,
) -> LoopValue:
    """A sum or a product, of `fn` of each element, in the type that the result is computed in; booleans have
    no arithmetic.
    """
    out, dims = ctx.spec.dtype, all_dims(x, dim)
    if out is BOOL:
        return ctx.reduce(of_booleans, x, dims, keepdim=keepdim, dtype=BOOL, compute=BOOL)
    return narrow(ctx, ctx.reduce(kind, x, dims, keepdim=keepdim, dtype=COMPUTE_TYPE[out], fn=fn), out)


@lowering(aten.nansum.default)
def _nansum(
    ctx: LoopBuilder,
    x: LoopValue,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> LoopValue:
    """A sum to which NaN adds nothing; of integers and booleans, which hold none, `sum`."""
    floats = x.dtype.is_floating_point
    decline_if(floats and not ctx.spec.dtype.is_floating_point, "floats summed as integers")

    def fn(e: Expr) -> Expr:
        return select(compare("ne", e, e), like(0, e), e)

    return _arithmetic(ctx, "sum", "any", x, dim, keepdim, fn if floats else None)


@lowering(aten.mean.default, aten.mean.dim)
def _mean(
    ctx: LoopBuilder,
    x: LoopValue,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> LoopValue:
    dims = all_dims(x, dim)
    s = total(ctx, x, dims, keepdim, wide(ctx.spec.dtype))
    n = count(x, dims)
    return ctx.pointwise(lambda e: div(e, like(n, e)), s)


@lowering(aten.linalg_vector_norm.default)
def _vector_norm(
    ctx: LoopBuilder,
    x: LoopValue,
    ord: Scalar = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> LoopValue:
    """The root of a sum of squares; of one element eager takes the absolute value."""
    dims = all_dims(x, dim)
    decline_if(ord != 2 or not known(">=", count(x, dims) - 2), "another norm, or of few elements")
    squares = total(ctx, x, dims, keepdim, wide(ctx.spec.dtype), fn=lambda e: mul(e, e))
    return ctx.pointwise(lambda e: op("sqrt", e), squares)


def _extreme(
    kind: ReduceKind, ctx: LoopBuilder, x: LoopValue, dim: Any = None, keepdim: bool = False
) -> LoopValue:
    decline_if(x.dtype is BOOL or not numel(x.shape), "bool or empty operand")
    return ctx.reduce(kind, x, all_dims(x, dim), keepdim=keepdim)


lowering(aten.amax.default, aten.max.default)(functools.partial(_extreme, "max"))
lowering(aten.amin.default, aten.min.default)(functools.partial(_extreme, "min"))


def _held(dtype: torch.dtype) -> Callable[[Expr], Expr]:
    """An element as memory holds it: halves that are equal there are a tie, and the first one wins."""
    return lambda e: round_to(e, dtype)


def _extreme_with_position(
    kind: ReduceKind, arg: ReduceKind, ctx: LoopBuilder, x: LoopValue, dim: int, keepdim: bool = False
) -> tuple[LoopValue, LoopValue]:
    decline_if(x.dtype is BOOL or not x.shape or not numel(x.shape), "bool, 0-d or empty operand")
    ctx.keep(x)
    return (
        ctx.reduce(kind, x, [dim], keepdim=keepdim),
        ctx.reduce(
            arg, x, [dim], keepdim=keepdim, dtype=I64, compute=COMPUTE_TYPE[x.dtype], fn=_held(x.dtype)
        ),
    )


lowering(aten.max.dim)(functools.partial(_extreme_with_position, "max", "argmax"))
lowering(aten.min.dim)(functools.partial(_extreme_with_position, "min", "argmin"))


def _position(
    kind: ReduceKind, ctx: LoopBuilder, x: LoopValue, dim: int | None = None, keepdim: bool = False
) -> LoopValue:
    decline_if(x.dtype is BOOL or not x.shape or not numel(x.shape), "bool, 0-d or empty operand")
    dims = range(len(x.shape)) if dim is None else [dim]  # a position in all counts them in order
    return ctx.reduce(
        kind, x, dims, keepdim=keepdim, dtype=I64, compute=COMPUTE_TYPE[x.dtype], fn=_held(x.dtype)
    )


lowering(aten.argmax.default)(functools.partial(_position, "argmax"))
lowering(aten.argmin.default)(functools.partial(_position, "argmin"))


def _truths(ctx: LoopBuilder, x: LoopValue) -> LoopValue:
    if x.dtype is BOOL:
        return x
    compute = COMPUTE_TYPE[x.dtype]
    return ctx.pointwise(
        lambda e: compare("ne", e, like(0, e)), x, shape=x.shape, dtype=BOOL, compute=compute
    )


def _quantifier(
    kind: ReduceKind, ctx: LoopBuilder, x: LoopValue, dim: Any = None, keepdim: bool = False
) -> LoopValue:
    """Of bytes on a CPU by their greatest or least, which have vectors of bytes."""
    dims = all_dims(x, dim)
    if x.dtype is torch.uint8 and not ctx.on_gpu and known(">=", numel(x.shape) - 1):
        extreme: ReduceKind = "max" if kind == "any" else "min"
        found = _truths(ctx, ctx.reduce(extreme, x, dims, keepdim=keepdim))
    else:
        found = ctx.reduce(kind, x, dims, keepdim=keepdim, dtype=BOOL, compute=BOOL)
    if ctx.spec.dtype is BOOL:
        return found
    return ctx.pointwise(lambda e: e, found, shape=found.shape)  # of bytes the answer is a byte


lowering(aten.any.default, aten.any.dim, aten.any.dims)(functools.partial(_quantifier, "any"))
lowering(aten.all.default, aten.all.dim, aten.all.dims)(functools.partial(_quantifier, "all"))


# -- variance ------------------------------------------------------------------------------------------------
FEW_HALVES = 8192


def moments(ctx: LoopBuilder, x: LoopValue, dims: Sequence[int]) -> tuple[LoopValue, LoopValue]:
    """(mean, sum of squared differences from it), in the compute type, with kept dimensions. Two passes over
    x.

    The mean is rounded. Far from zero its error is larger than the spread of the data, and each difference
    would have its square: the sum of the differences gives that error, which is subtracted. Not so for a few
    thousand halves: numbers of 11 bits that differ at all differ by far more than such a mean's error.
    """
    compute = wide(x.dtype)
    n = count(x, dims)
    ctx.keep(x)
    s = total(ctx, x, dims, True, compute)
    mean = ctx.pointwise(lambda e: div(e, like(n, e)), s, shape=s.shape, dtype=compute)
    apart = ctx.pointwise(sub, x, mean, shape=x.shape, dtype=compute)
    square = ctx.pointwise(lambda d: mul(d, d), apart, shape=x.shape, dtype=compute)
    squares = total(ctx, square, dims, True, compute)
    if x.dtype in HALVES and isinstance(n, int) and n <= FEW_HALVES:
        return mean, squares
    rest = total(ctx, apart, dims, True, compute)

    def without(q: Expr, r: Expr) -> Expr:
        exact = sub(q, mul(div(r, like(n, r)), r))
        exact = select(compare("lt", exact, like(0, exact)), like(0, exact), exact)
        return select(compare("lt", q, like(math.inf, q)), exact, q)  # squares that overflow are inf

    return mean, ctx.pointwise(without, squares, rest, shape=squares.shape, dtype=compute)


def _variance(
    ctx: LoopBuilder, x: LoopValue, dim: Any, correction: Scalar | None, root: bool, spec: Any
) -> tuple[LoopValue, LoopValue]:
    decline_if(not x.dtype.is_floating_point, "complex operand")
    dims = all_dims(x, dim)
    n = count(x, dims) - (1 if correction is None else correction)
    mean, ss = moments(ctx, x, dims)
    n = maximum(n.env, n, 0) if type(n) is Size else max(n, 0)

    def fn(e: Expr) -> Expr:
        v = div(e, like(n, e))
        return op("sqrt", v) if root else v

    mean, ss = (views.reshape(part, spec.shape) for part in (mean, ss))
    var = ctx.pointwise(fn, ss, shape=spec.shape, dtype=spec.dtype)
    # Eager takes the mean in steps: an infinity that others follow makes it NaN, as it makes the variance.
    alone = count(x, dims) == 1
    return var, ctx.pointwise(
        lambda m, q: m if alone else select(compare("ne", q, q), q, m),
        *(mean, ss),
        shape=spec.shape,
        dtype=spec.dtype,
    )


# -- softmax -------------------------------------------------------------------------------------------------
def _row_max(ctx: LoopBuilder, x: LoopValue, dim: int) -> tuple[torch.dtype, LoopValue]:
    """The type that a softmax computes in, and its rows' maxima."""
    compute = wide(ctx.spec.dtype)
    decline_if(not x.shape or not numel(x.shape), "0-d or empty operand")
    ctx.keep(x)
    return compute, ctx.reduce("max", x, [dim], keepdim=True, dtype=compute)


@lowering(aten._softmax.default)
def _softmax(ctx: LoopBuilder, x: LoopValue, dim: int, half_to_float: bool) -> LoopValue:
    compute, top = _row_max(ctx, x, dim)
    return _shares(ctx, x, top, dim, compute, lambda s: div(like(1, s), s))


def _shares(
    ctx: LoopBuilder,
    x: LoopValue,
    low: LoopValue,
    dim: int,
    compute: torch.dtype,
    inverse: Callable[[Expr], Expr],
) -> LoopValue:
    """exp(x - low) times what `inverse` gives for its sum."""
    e = ctx.pointwise(lambda a, m: op("exp", sub(a, m)), x, low, shape=x.shape, dtype=compute)
    ctx.realize(e)
    s = total(ctx, e, [dim], True, compute)
    return ctx.pointwise(mul, e, ctx.pointwise(inverse, s, shape=s.shape, dtype=compute), compute=compute)


@lowering(aten._safe_softmax.default)
def _safe_softmax(ctx: LoopBuilder, x: LoopValue, dim: int, dtype: torch.dtype | None = None) -> LoopValue:
    """Softmax in which a row that is -inf throughout gives zeros and not NaN (attention with everything
    masked).
    """
    compute, top = _row_max(ctx, x, dim)
    low = ctx.pointwise(
        lambda m: select(compare("eq", m, like(float("-inf"), m)), like(0, m), m),
        top,
        shape=top.shape,
        dtype=compute,
    )
    return _shares(
        ctx, x, low, dim, compute, lambda s: select(compare("eq", s, like(0, s)), s, div(like(1, s), s))
    )


@lowering(aten._log_softmax.default)
def _log_softmax(ctx: LoopBuilder, x: LoopValue, dim: int, half_to_float: bool) -> LoopValue:
    compute, top = _row_max(ctx, x, dim)
    e = ctx.pointwise(lambda a, m: op("exp", sub(a, m)), x, top, shape=x.shape, dtype=compute)
    s = total(ctx, e, [dim], True, compute)
    shift = ctx.pointwise(lambda s: op("log", s), s, shape=s.shape, dtype=compute)
    return ctx.pointwise(lambda a, top, shift: sub(sub(a, top), shift), x, top, shift, compute=compute)


@lowering(aten.logsumexp.default)
def _logsumexp(ctx: LoopBuilder, x: LoopValue, dim: Any, keepdim: bool = False) -> LoopValue:
    decline_if(
        not x.dtype.is_floating_point or not x.shape or not numel(x.shape), "integer, 0-d or empty operand"
    )
    compute = wide(ctx.spec.dtype)
    dims = all_dims(x, dim)
    ctx.keep(x)
    top = ctx.reduce("max", x, dims, keepdim=True, dtype=compute)
    finite = ctx.pointwise(
        lambda m: select(compare("eq", op("abs", m), like(float("inf"), m)), like(0, m), m),
        top,
        shape=top.shape,
        dtype=compute,
    )
    s = total(
        ctx,
        ctx.pointwise(lambda a, m: op("exp", sub(a, m)), x, finite, shape=x.shape, dtype=compute),
        dims,
        True,
        compute,
    )
    result = ctx.pointwise(
        lambda s, m: add(op("log", s), m), s, finite, shape=s.shape, dtype=ctx.spec.dtype, compute=compute
    )
    return views.reshape(result, ctx.spec.shape)


@lowering(aten._softmax_backward_data.default)
def _softmax_backward(
    ctx: LoopBuilder, g: LoopValue, y: LoopValue, dim: int, input_dtype: torch.dtype
) -> LoopValue:
    compute = wide(y.dtype)
    ctx.keep(g), ctx.keep(y)
    product = ctx.pointwise(mul, g, y, shape=y.shape, dtype=compute)
    s = total(ctx, product, [dim], True, compute)
    return ctx.pointwise(lambda g, y, s: mul(sub(g, s), y), g, y, s, compute=compute)


@lowering(aten._log_softmax_backward_data.default)
def _log_softmax_backward(
    ctx: LoopBuilder, g: LoopValue, y: LoopValue, dim: int, input_dtype: torch.dtype
) -> LoopValue:
    compute = wide(y.dtype)
    if not g.shape or picked_element(g, dim % len(g.shape)) is None:  # else its sum does not read it
        ctx.keep(g)
    s = total(ctx, g, [dim], True, compute)
    return ctx.pointwise(lambda g, y, s: sub(g, mul(op("exp", y), s)), g, y, s, compute=compute)


# -- losses --------------------------------------------------------------------------------------------------
MEAN, SUM = 1, 2


@lowering(aten.nll_loss_forward.default)
def _nll_loss(
    ctx: LoopBuilder, x: LoopValue, target: LoopValue, weight: LoopValue | None, reduction: int, ignore: int
) -> tuple[LoopValue, LoopValue]:
    decline_if(
        weight is not None or len(x.shape) != 2 or target.dtype not in (I64, torch.uint8),
        "class weights, a single sample, or classes that eager refuses",
    )
    rows, classes = x.shape
    compute = wide(x.dtype)
    out = ctx.spec[0].dtype

    def picked(index: tuple[Index, ...]) -> Expr:
        t = cast(target.at((index[0],)), I64)  # bytes are classes too
        used = compare("ne", t, const(ignore, I64))
        at = loaded_index(select(used, t, const(0, I64)), classes, wrap=False)
        return select(used, op("neg", cast(x.at((index[0], at)), compute)), const(0, compute))

    loss = ctx.generate(picked, (rows,), compute)
    decline_if(not any(e.op == "wrap_index" for e in walk(ctx.probe(loss))), "nothing depends on the classes")
    used = LoopValue(
        (rows,),
        compute,
        lambda i: cast(compare("ne", cast(target.at((i[0],)), I64), const(ignore, I64)), compute),
    )
    if reduction == 0:
        return narrow(ctx, loss, out), LoopValue((), out, lambda i: const(0, compute))
    n = total(ctx, used, [0], False, compute)
    s = total(ctx, loss, [0], False, compute)
    if reduction == MEAN:
        s = ctx.pointwise(div, s, n, shape=(), dtype=compute)
    return narrow(ctx, s, out), narrow(ctx, n, out)


@lowering(aten.nll_loss_backward.default)
def _nll_loss_backward(
    ctx: LoopBuilder,
    g: LoopValue,
    x: LoopValue,
    target: LoopValue,
    weight: LoopValue | None,
    reduction: int,
    ignore: int,
    total_weight: LoopValue,
) -> LoopValue:
    decline_if(
        weight is not None or len(x.shape) != 2 or target.dtype not in (I64, torch.uint8),
        "class weights, a single sample, or classes that eager refuses",
    )
    compute = wide(x.dtype)
    scale = ctx.pointwise(div, g, total_weight, shape=(), dtype=compute) if reduction == MEAN else g

    classes = x.shape[1]

    def body(index: tuple[Index, ...]) -> Expr:
        t = cast(target.at((index[0],)), I64)
        used = op("and", compare("ne", t, const(ignore, I64)), compare("lt", t, const(classes, I64)))
        place = cast(select(used, t, const(-1, I64)), I32)  # 32 bits are enough from here on
        hit = compare("eq", index_value(index[1], I32), place)
        grad = cast(scale.at(() if reduction else (index[0],)), compute)
        return select(hit, op("neg", grad), const(0, compute))

    return ctx.generate(body)


register_all(
    lowering,
    (
        (
            (aten.sum.default, aten.sum.dim_IntList),
            lambda ctx, x, dim=None, keepdim=False, *, dtype=None: _arithmetic(
                ctx, "sum", "any", x, dim, keepdim
            ),
        ),
        (
            (aten.prod.default, aten.prod.dim_int),
            lambda ctx, x, dim=None, keepdim=False, *, dtype=None: _arithmetic(
                ctx, "prod", "all", x, dim, keepdim
            ),
        ),
        (
            (aten.count_nonzero.default, aten.count_nonzero.dim_IntList),
            lambda ctx, x, dim=None: total(ctx, _truths(ctx, x), all_dims(x, dim), False, I64),
        ),
        (
            (aten.var.correction,),
            lambda ctx, x, dim=None, *, correction=None, keepdim=False: _variance(
                ctx, x, dim, correction, False, ctx.spec
            )[0],
        ),
        (
            (aten.std.correction,),
            lambda ctx, x, dim=None, *, correction=None, keepdim=False: _variance(
                ctx, x, dim, correction, True, ctx.spec
            )[0],
        ),
        (
            (aten.var_mean.correction,),
            lambda ctx, x, dim=None, *, correction=None, keepdim=False: _variance(
                ctx, x, dim, correction, False, ctx.spec[0]
            ),
        ),
    ),
)


# -- running results along one dimension ---------------------------------------------------------------------


FEW_ROWS, LONG_ROW = (
    64,
    1 << 16,
)  # few rows longer than this leave a GPU idle when one program goes through each


def scan(
    ctx: LoopBuilder, kind: ScanKind, x: LoopValue, dim: int, spec: TensorSpec, compute: torch.dtype
) -> LoopValue:
    """The running `kind` of x along a dimension, gathered in `compute`."""
    dim %= max(len(x.shape), 1)
    decline_if(
        spec.dtype is BOOL or x.dtype is BOOL and kind not in ("sum", "prod"), "bool operand or result"
    )
    if not x.shape or x.shape[dim] < 2 or not numel(x.shape):
        position = kind.startswith("arg")
        return ctx.pointwise(lambda e: e, 0 if position else x, shape=x.shape, dtype=spec.dtype)
    decline_if(
        ctx.on_gpu and x.shape[dim] > LONG_ROW and numel(x.shape) < FEW_ROWS * x.shape[dim], "few long rows"
    )

    if not ctx.on_gpu:
        ctx.keep_if_heavy(x)

    def body(index: tuple[Index, ...]) -> Expr:
        return cast(x.at(index), compute)

    stride = spec.stride if is_dense(spec) else TensorSpec.dense(spec.shape, spec.dtype).stride
    buffer = ctx.new_buffer(TensorSpec(spec.shape, stride, spec.dtype))
    ctx.add(
        LoopNode(
            buffer.name,
            spec.shape,
            body,
            stride,
            spec.dtype,
            scan=kind,
            along=dim,
            serial=not ctx.on_gpu,
            origin=str(ctx.node),
        )
    )
    return LoopValue(spec.shape, spec.dtype, ref=BufRef.whole(buffer))


def _gathered_in(ctx: LoopBuilder, dtype: torch.dtype) -> torch.dtype:
    """Eager's type for running sums: float64 for float32 on a CPU."""
    return F64 if dtype is F32 and not ctx.on_gpu else COMPUTE_TYPE[dtype]


def _running(
    kind: ScanKind, ctx: LoopBuilder, x: LoopValue, dim: int, *, dtype: torch.dtype | None = None
) -> LoopValue:
    return scan(ctx, kind, x, dim, ctx.spec, _gathered_in(ctx, ctx.spec.dtype))


lowering(aten.cumsum.default)(functools.partial(_running, "sum"))
lowering(aten.cumprod.default)(functools.partial(_running, "prod"))


@lowering(aten.logcumsumexp.default)
def _logcumsumexp(ctx: LoopBuilder, x: LoopValue, dim: int) -> LoopValue:
    decline_if(not x.dtype.is_floating_point, "complex operand")
    return scan(ctx, "logaddexp", x, dim, ctx.spec, _gathered_in(ctx, x.dtype))


def _running_extreme(
    kind: ScanKind, position: ScanKind, ctx: LoopBuilder, x: LoopValue, dim: int
) -> tuple[LoopValue, LoopValue]:
    ctx.keep(x)
    compute = COMPUTE_TYPE[x.dtype]
    return scan(ctx, kind, x, dim, ctx.spec[0], compute), scan(ctx, position, x, dim, ctx.spec[1], compute)


lowering(aten.cummax.default)(functools.partial(_running_extreme, "max", "argmax"))
lowering(aten.cummin.default)(functools.partial(_running_extreme, "min", "argmin"))
