"""Lowerings of layer, group and batch normalisation, forward and backward. Statistics are kept in the compute
type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..graph.nodes import overload
from ..graph.sizes import Dim, Size, maximum
from ..graph.spec import TensorSpec, aten, numel
from . import value as views
from .ir import COMPUTE_TYPE, Expr, const, op
from .lowering import Decline, LoopBuilder, decline_if, lowering
from .ops_pointwise import add, div, like, mul, share, sub
from .ops_reduce import moments, narrow, total
from .value import LoopValue


def _root(v: Expr, eps: float) -> Expr:
    """1/std of a variance."""
    return op("rsqrt", add(v, like(eps, v)))


def _scale_shift(
    ctx: LoopBuilder,
    x: LoopValue,
    mean: LoopValue,
    rstd: LoopValue,
    weight: LoopValue | None,
    bias: LoopValue | None,
    shape: Sequence[Dim],
    dtype: torch.dtype,
    root: Callable[[Expr], Expr] = lambda rstd: rstd,
) -> LoopValue:
    """(x - mean) * rstd * weight + bias, everything broadcastable to `shape`. root: makes 1/std of the
    given for it.
    """
    parts = [x, mean, rstd] + [p for p in (weight, bias) if p is not None]

    def fn(x: Expr, mean: Expr, rstd: Expr, *affine: Expr) -> Expr:
        y = mul(sub(x, mean), root(rstd))
        rest = list(affine)
        if weight is not None:
            y = mul(y, rest.pop(0))
        return add(y, rest.pop(0)) if bias is not None else y

    return ctx.pointwise(fn, *parts, shape=shape, dtype=dtype)


def _normalised(
    ctx: LoopBuilder,
    x: LoopValue,
    dims: Sequence[int],
    weight: LoopValue | None,
    bias: LoopValue | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[LoopValue, LoopValue, LoopValue, LoopValue]:
    """(y, mean, 1/std, sum of squared differences) over `dims`, the statistics with these kept."""
    n = numel(x.shape[d] for d in dims)
    mean, squares = moments(ctx, x, dims)
    rstd = ctx.pointwise(
        lambda s: _root(div(s, like(n, s)), eps), squares, shape=squares.shape, dtype=squares.dtype
    )
    y = _scale_shift(ctx, x, mean, rstd, weight, bias, x.shape, dtype)
    ctx.keep(mean), ctx.keep(rstd)
    return y, mean, rstd, squares


@lowering(aten.native_layer_norm.default)
def _layer_norm(
    ctx: LoopBuilder,
    x: LoopValue,
    normalized: Sequence[Dim],
    weight: LoopValue | None,
    bias: LoopValue | None,
    eps: float,
) -> tuple[LoopValue, LoopValue, LoopValue]:
    out, mean_spec, rstd_spec = ctx.spec
    rank = len(x.shape)
    dims = list(range(rank - len(normalized), rank))
    decline_if(not numel(x.shape), "empty operand")
    y, mean, rstd, _ = _normalised(ctx, x, dims, weight, bias, eps, out.dtype)
    return y, narrow(ctx, mean, mean_spec.dtype), narrow(ctx, rstd, rstd_spec.dtype)


def _norm_backward_input(
    ctx: LoopBuilder,
    g: LoopValue,
    x: LoopValue,
    mean: LoopValue,
    rstd: LoopValue,
    weight: LoopValue | None,
    dims: Sequence[int],
    dtype: torch.dtype,
) -> LoopValue:
    """Gradient of a normalisation over `dims`; weight is broadcastable to x, mean and rstd have kept
    dimensions.
    """
    compute = COMPUTE_TYPE[dtype]
    n = numel(x.shape[d] for d in dims)

    def weighted(g: Expr, *w: Expr) -> Expr:
        return mul(g, w[0]) if w else g

    w = [weight] if weight is not None else []
    gw = ctx.pointwise(weighted, g, *w, shape=x.shape, dtype=compute)
    s1 = total(ctx, gw, dims, True, compute)
    s2 = total(
        ctx,
        ctx.pointwise(
            lambda gw, x, m, r: mul(gw, mul(sub(x, m), r)), gw, x, mean, rstd, shape=x.shape, dtype=compute
        ),
        dims,
        True,
        compute,
    )

    def fn(gw: Expr, x: Expr, m: Expr, r: Expr, a: Expr, b: Expr) -> Expr:
        scale = share(1.0, n, gw)
        return mul(r, sub(sub(gw, mul(a, scale)), mul(mul(sub(x, m), r), mul(b, scale))))

    return ctx.pointwise(fn, gw, x, mean, rstd, s1, s2, shape=x.shape, dtype=dtype, compute=compute)


@lowering(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    ctx: LoopBuilder,
    g: LoopValue,
    x: LoopValue,
    normalized: Sequence[Dim],
    mean: LoopValue,
    rstd: LoopValue,
    weight: LoopValue | None,
    bias: LoopValue | None,
    mask: Sequence[bool],
) -> tuple[LoopValue | None, ...]:
    rank, inner = len(x.shape), len(normalized)
    outer, dims = list(range(rank - inner)), list(range(rank - inner, rank))
    decline_if(not numel(x.shape), "empty operand")
    ctx.keep(g), ctx.keep(x)
    dx = None
    if mask[0]:
        dx = _norm_backward_input(ctx, g, x, mean, rstd, weight, dims, x.dtype)
        dx.stride = ctx.spec[0].stride
    return dx, *_affine_gradients(ctx, g, x, mean, rstd, outer, mask)


def _affine_gradients(
    ctx: LoopBuilder,
    g: LoopValue,
    x: LoopValue,
    mean: LoopValue,
    rstd: LoopValue,
    outer: Sequence[int],
    mask: Sequence[bool],
) -> Iterator[LoopValue | None]:
    """Gradients of weight and bias, summed over `outer`; None where they are not wanted."""
    product = ctx.pointwise(
        lambda g, x, m, r: mul(g, mul(sub(x, m), r)),
        g,
        x,
        mean,
        rstd,
        shape=x.shape,
        dtype=COMPUTE_TYPE[x.dtype],
    )
    for wanted, summed, spec in zip(mask[1:], (product, g), ctx.spec[1:], strict=True):
        found = total(ctx, summed, outer, False, COMPUTE_TYPE[x.dtype]) if wanted else None
        yield None if found is None else narrow(ctx, views.reshape(found, spec.shape), spec.dtype)


@lowering(aten.native_group_norm.default)
def _group_norm(
    ctx: LoopBuilder,
    x: LoopValue,
    weight: LoopValue | None,
    bias: LoopValue | None,
    n: int,
    c: int,
    hw: int,
    group: int,
    eps: float,
) -> tuple[LoopValue, LoopValue, LoopValue]:
    out, mean_spec, rstd_spec = ctx.spec
    decline_if(not numel(x.shape), "empty operand")
    ctx.keep(x)
    grouped = views.reshape(x, (n, group, c // group, hw))
    w, b = (None if p is None else views.reshape(p, (1, group, c // group, 1)) for p in (weight, bias))
    y, mean, rstd, _ = _normalised(ctx, grouped, [2, 3], w, b, eps, out.dtype)
    flat_mean, flat_rstd = (views.reshape(v, (n, group)) for v in (mean, rstd))
    return (
        views.reshape(y, out.shape),
        narrow(ctx, flat_mean, mean_spec.dtype),
        narrow(ctx, flat_rstd, rstd_spec.dtype),
    )


@lowering(aten.native_group_norm_backward.default)
def _group_norm_backward(
    ctx: LoopBuilder,
    g: LoopValue,
    x: LoopValue,
    mean: LoopValue,
    rstd: LoopValue,
    weight: LoopValue | None,
    n: int,
    c: int,
    hw: int,
    group: int,
    mask: Sequence[bool],
) -> tuple[LoopValue | None, ...]:
    decline_if(not numel(x.shape), "empty operand")
    ctx.keep(g), ctx.keep(x)
    shape = (n, group, c // group, hw)
    g4, x4 = views.reshape(g, shape), views.reshape(x, shape)
    m4, r4 = views.reshape(mean, (n, group, 1, 1)), views.reshape(rstd, (n, group, 1, 1))
    w4 = None if weight is None else views.reshape(weight, (1, group, c // group, 1))
    dx = _norm_backward_input(ctx, g4, x4, m4, r4, w4, [2, 3], x.dtype) if mask[0] else None
    affine = _affine_gradients(ctx, g4, x4, m4, r4, [0, 3], mask)
    return None if dx is None else views.reshape(dx, x.shape), *affine


# -- batch norm ----------------------------------------------------------------------------------------------
def _channel(x: LoopValue, rank: int) -> LoopValue:
    """A (C,) value as (1, C, 1, ...)."""
    return views.reshape(x, (1, x.shape[0], *[1] * (rank - 2)))


def _batch_norm_train(
    ctx: LoopBuilder,
    x: LoopValue,
    weight: LoopValue | None,
    bias: LoopValue | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[LoopValue, LoopValue, LoopValue, LoopValue]:
    """(y, mean, 1/std, sum of squared differences), the last three (C,) in the compute type."""
    rank = len(x.shape)
    dims = [0, *range(2, rank)]
    decline_if(not numel(x.shape[d] for d in dims) or rank < 2, "empty batch")
    w, b = (None if p is None else _channel(p, rank) for p in (weight, bias))
    y, mean, rstd, squares = _normalised(ctx, x, dims, w, b, eps, dtype)
    c = (x.shape[1],)
    return y, views.reshape(mean, c), views.reshape(rstd, c), views.reshape(squares, c)


def _batch_norm_eval(
    ctx: LoopBuilder,
    x: LoopValue,
    weight: LoopValue | None,
    bias: LoopValue | None,
    mean: LoopValue,
    var: LoopValue,
    eps: float,
    dtype: torch.dtype,
) -> LoopValue:
    rank = len(x.shape)
    c = (x.shape[1],)
    compute = COMPUTE_TYPE[dtype]
    decline_if(not numel(x.shape), "empty batch")
    w, b = (None if p is None else _channel(p, rank) for p in (weight, bias))
    root = functools.partial(_root, eps=eps)
    if (
        ctx.on_gpu
    ):  # there a root for each element is free beside memory, and a launch for a few channels is not
        return _scale_shift(ctx, x, _channel(mean, rank), _channel(var, rank), w, b, x.shape, dtype, root)
    rstd = ctx.pointwise(root, var, shape=c, dtype=compute)
    ctx.realize(rstd)
    return _scale_shift(ctx, x, _channel(mean, rank), _channel(rstd, rank), w, b, x.shape, dtype)


@lowering(aten.batch_norm_elemt.default)
def _batch_norm_elements(
    ctx: LoopBuilder,
    x: LoopValue,
    weight: LoopValue | None,
    bias: LoopValue | None,
    mean: LoopValue,
    rstd: LoopValue,
    eps: float,
) -> LoopValue:
    decline_if(not numel(x.shape), "empty batch")
    rank = len(x.shape)
    w, b = (None if p is None else _channel(p, rank) for p in (weight, bias))
    return _scale_shift(ctx, x, _channel(mean, rank), _channel(rstd, rank), w, b, x.shape, ctx.spec.dtype)


def _running(
    ctx: LoopBuilder, old: LoopValue, new: LoopValue, momentum: float, dtype: torch.dtype
) -> LoopValue:
    return ctx.pointwise(
        lambda o, m: add(mul(o, like(1 - momentum, o)), mul(m, like(momentum, m))),
        old,
        new,
        shape=old.shape,
        dtype=dtype,
    )


def _unbiased(ctx: LoopBuilder, squares: LoopValue, n: Dim) -> LoopValue:
    free = maximum(n.env, n - 1, 1) if type(n) is Size else max(n - 1, 1)
    return ctx.pointwise(lambda s: div(s, like(free, s)), squares, shape=squares.shape, dtype=squares.dtype)


def _nothing(spec: TensorSpec) -> LoopValue:
    return LoopValue(spec.shape, spec.dtype, lambda index: const(0, COMPUTE_TYPE[spec.dtype]))


def _eval_stats(ctx: LoopBuilder, mean: LoopValue, var: LoopValue, eps: float) -> tuple[LoopValue, LoopValue]:
    """What evaluation gives as statistics: nothing on a CPU, the running ones elsewhere."""
    _, mean_spec, rstd_spec, *_ = ctx.spec
    if not mean_spec.numel:
        return _nothing(mean_spec), _nothing(rstd_spec)
    rstd = ctx.pointwise(lambda v: _root(v, eps), var, shape=rstd_spec.shape, dtype=rstd_spec.dtype)
    return ctx.pointwise(lambda m: m, mean, shape=mean_spec.shape, dtype=mean_spec.dtype), rstd


@lowering(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
)
def _batch_norm(
    ctx: LoopBuilder, x: LoopValue, weight: LoopValue | None, bias: LoopValue | None, *rest: Any
) -> tuple[LoopValue, ...]:
    specs = ctx.spec
    name = overload(ctx.node).name()
    functional = name.endswith("functional")
    if name.endswith("no_training"):
        mean, var, momentum, eps = rest
        training = False
    elif name.endswith("no_stats"):
        training, momentum, eps = rest
        mean = var = None
    else:
        mean, var, training, momentum, eps = rest
    if not training:
        Decline.when(mean is None or var is None, "no statistics")
        y = _batch_norm_eval(ctx, x, weight, bias, mean, var, eps, specs[0].dtype)
        return y, *_eval_stats(ctx, mean, var, eps), *((mean, var) if functional else ())
    decline_if(mean is not None and not functional, "updates running statistics in place")
    y, m, r, squares = _batch_norm_train(ctx, x, weight, bias, eps, specs[0].dtype)
    results = y, narrow(ctx, m, specs[1].dtype), narrow(ctx, r, specs[2].dtype)
    if not functional:
        return results
    unbiased = _unbiased(ctx, squares, numel(x.shape) // x.shape[1])
    pairs = zip((mean, var), (m, unbiased), specs[3:])
    return *results, *(_running(ctx, old, new, momentum, spec.dtype) for old, new, spec in pairs)


@lowering(aten.native_batch_norm_backward.default)
def _batch_norm_backward(
    ctx: LoopBuilder,
    g: LoopValue,
    x: LoopValue,
    weight: LoopValue | None,
    running_mean: LoopValue | None,
    running_var: LoopValue | None,
    mean: LoopValue | None,
    rstd: LoopValue | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[LoopValue | None, ...]:
    rank = len(x.shape)
    dims = [0, *range(2, rank)]
    compute = COMPUTE_TYPE[x.dtype]
    n = numel(x.shape[d] for d in dims)
    decline_if(not numel(x.shape), "empty batch")
    if not train:
        if running_mean is None or running_var is None:
            raise Decline("no statistics")
        mean = running_mean
        rstd = ctx.pointwise(lambda v: _root(v, eps), running_var, shape=running_var.shape, dtype=compute)
        ctx.realize(rstd)
    if mean is None or rstd is None:
        raise Decline("no statistics")
    ctx.keep(g), ctx.keep(x)
    m, r = _channel(mean, rank), _channel(rstd, rank)
    w = None if weight is None else _channel(weight, rank)
    db = total(ctx, g, dims, True, compute)
    product = ctx.pointwise(lambda g, x, m: mul(g, sub(x, m)), g, x, m, shape=x.shape, dtype=compute)
    dot = total(ctx, product, dims, True, compute)
    dx = None
    if mask[0]:
        dx = _batch_norm_backward_input(ctx, g, x, m, r, w, db, dot, n, train)
        dx.stride = ctx.spec[0].stride
    c = (x.shape[1],)
    dw = (
        ctx.pointwise(mul, views.reshape(dot, c), rstd, shape=c, dtype=ctx.spec[1].dtype, compute=compute)
        if mask[1]
        else None
    )
    return dx, dw, narrow(ctx, views.reshape(db, c), ctx.spec[2].dtype) if mask[2] else None


def _batch_norm_backward_input(
    ctx: LoopBuilder,
    g: LoopValue,
    x: LoopValue,
    m: LoopValue,
    r: LoopValue,
    w: LoopValue | None,
    db: LoopValue,
    dot: LoopValue,
    n: Dim,
    train: bool,
) -> LoopValue:
    compute = COMPUTE_TYPE[x.dtype]
    weights = [w] if w is not None else []
    if not train:
        return ctx.pointwise(
            lambda g, r, *w: mul(mul(g, r), w[0]) if w else mul(g, r),
            g,
            r,
            *weights,
            shape=x.shape,
            dtype=x.dtype,
        )

    def fn(g: Expr, x: Expr, m: Expr, r: Expr, db: Expr, dot: Expr, *w: Expr) -> Expr:
        scale = share(1.0, n, g)
        projected = mul(sub(x, m), mul(mul(mul(dot, scale), r), r))
        return mul(sub(sub(g, projected), mul(db, scale)), mul(r, w[0]) if w else r)

    return ctx.pointwise(fn, g, x, m, r, db, dot, *weights, shape=x.shape, dtype=x.dtype, compute=compute)
