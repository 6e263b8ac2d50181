"""Lowerings of pooling over windows: every result reads its own window, every gradient the windows that cover
it.

No result is scattered, so gradients are sums in a fixed order. A CPU keeps aten's kernels, which are as fast.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.config import config
from ..graph.sizes import Dim
from . import value as views
from .index_expr import Index
from .ir import COMPUTE_TYPE, I32, I64, Expr, cast, compare, const, index_value, masked, op, select
from .lowering import Decline, LoopBuilder, decline_if, lowering
from .ops_pointwise import add
from .ops_reduce import total, wide
from .value import LoopValue

aten = torch.ops.aten
MAX_WINDOW = 25  # elements; larger windows are left to aten
Place = tuple[Index, ...]


def _pair(numbers: Any) -> tuple[int, int]:
    return (numbers, numbers) if isinstance(numbers, int) else (numbers[0], numbers[-1])


@dataclass(frozen=True)
class PoolWindow:
    """The windows along one dimension: result `o` reads `o * step - before + k * spread` for k < `count`."""

    count: int
    step: int
    before: int
    spread: int
    size: Dim  # of the input
    results: Dim

    def reads(self, o: Index) -> Iterator[tuple[Index, Expr | None]]:
        """The positions that a result reads, each with the test that it is one."""
        for k in range(self.count):
            at = o * self.step - self.before + k * self.spread
            yield at, within(at, self.size)

    def covers(self, at: Index) -> Iterator[tuple[Index, Expr | None]]:
        """The results whose windows may hold a position: with the test that there is such a result and it
        reaches so far.
        """
        reach = (self.count - 1) * self.spread + 1
        last = (at + self.before) // self.step
        for back in range(-(-reach // self.step)):
            o = last - back
            tests = [within(o, self.results)]
            if (back + 1) * self.step > reach:  # else it is near enough whatever the remainder is
                tests.append(compare("lt", index_value(at + self.before - o * self.step), const(reach, I64)))
            yield o, both(*tests)


def within(at: Index, size: Dim) -> Expr | None:
    """The test that a position is one of `size`; None when it always is."""
    low, high = at.bounds
    first = compare("ge", index_value(at), const(0, I64)) if low < 0 else None
    last = compare("lt", index_value(at), const(size, I64)) if high >= size else None
    return both(first, last)


def both(*tests: Expr | None) -> Expr | None:
    """All of the tests that there are."""
    found = [t for t in tests if t is not None]
    return functools.reduce(functools.partial(op, "and"), found) if found else None


def _windows(
    ctx: LoopBuilder, x: LoopValue, out: Sequence[Dim], kernel: Any, stride: Any, padding: Any, dilation: Any
) -> list[PoolWindow]:
    """One for each of the two last dimensions."""
    decline_if(config.aten_windows and not ctx.on_gpu, "pooling on a CPU")
    kernel, padding, dilation = _pair(kernel), _pair(padding), _pair(dilation)
    stride = _pair(stride) if stride not in ((), []) else kernel
    decline_if(
        kernel[0] * kernel[1] > MAX_WINDOW or not x.dtype.is_floating_point or 0 in x.shape or 0 in out,
        "a large window, integers or an empty operand",
    )
    return [
        PoolWindow(kernel[d], stride[d], padding[d], dilation[d], x.shape[d - 2], out[d - 2]) for d in (0, 1)
    ]


def _read(x: LoopValue, place: Place, test: Expr | None, other: float, compute: torch.dtype) -> Expr:
    """An element, or a number where the test does not hold; no memory is touched there."""
    none = const(other, COMPUTE_TYPE[x.dtype])
    return cast(x.at(place) if test is None else masked(test, x.at(place), none), compute)


# -- maxima --------------------------------------------------------------------------------------------------
@lowering(aten.max_pool2d_with_indices.default)
def _max_pool(
    ctx: LoopBuilder,
    x: LoopValue,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:
    values, positions = ctx.spec
    try:
        high, across = _windows(ctx, x, values.shape, kernel, stride, padding, dilation)
    except Decline:
        return ctx.extern(
            aten.max_pool2d_with_indices.default, (x, kernel, stride, padding, dilation, ceil_mode)
        )
    ctx.keep(x)
    compute = COMPUTE_TYPE[x.dtype]

    def best(index: Place) -> tuple[Expr, Expr]:
        """The largest element (the last NaN when there is one) and its place in its plane."""
        top, at = const(float("-inf"), compute), const(-1, I32)
        for h, h_test in high.reads(index[-2]):
            for w, w_test in across.reads(index[-1]):
                test = both(h_test, w_test)
                e = _read(x, (*index[:-2], h, w), test, float("-inf"), compute)
                first = compare("eq", at, const(-1, I32))
                take = op("or", op("or", compare("gt", e, top), compare("ne", e, e)), first)
                take = take if test is None else op("and", take, test)
                top, at = select(take, e, top), select(take, index_value(h * across.size + w, I32), at)
        return top, at

    return (
        ctx.generate(lambda i: best(i)[0], values.shape, values.dtype),
        ctx.generate(lambda i: cast(best(i)[1], I64), positions.shape, positions.dtype),
    )


@lowering(aten.max_pool2d_with_indices_backward.default)
def _max_pool_backward(
    ctx: LoopBuilder,
    grad: LoopValue,
    x: LoopValue,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    positions: LoopValue,
) -> LoopValue:
    try:
        high, across = _windows(ctx, x, grad.shape, kernel, stride, padding, dilation)
    except Decline:
        args = (grad, x, kernel, stride, padding, dilation, ceil_mode, positions)
        spread: LoopValue = ctx.extern(aten.max_pool2d_with_indices_backward.default, args)
        return spread

    def share(place: Place, index: Place, test: Expr | None) -> Expr:
        here = index_value(index[-2] * across.size + index[-1], I64)
        e = cast(
            select(
                compare("eq", positions.at(place), here), grad.at(place), const(0, COMPUTE_TYPE[grad.dtype])
            ),
            wide(x.dtype),
        )
        return e if test is None else masked(test, e, const(0, e.dtype))

    ctx.keep(positions)
    return _gathered(ctx, grad, high, across, share)


def _gathered(
    ctx: LoopBuilder,
    grad: LoopValue,
    high: PoolWindow,
    across: PoolWindow,
    share: Callable[[Place, Place, Expr | None], Expr],
) -> LoopValue:
    """A gradient: the sum of what each covering window hands on."""
    ctx.keep(grad)

    def body(index: Place) -> Expr:
        covering = itertools.product(high.covers(index[-2]), across.covers(index[-1]))
        parts = [
            share((*index[:-2], h, w), index, both(h_test, w_test)) for (h, h_test), (w, w_test) in covering
        ]
        return cast(functools.reduce(add, parts), COMPUTE_TYPE[dtype])

    dtype = ctx.spec.dtype
    return ctx.generate(body)


# -- averages ------------------------------------------------------------------------------------------------
def _counted(o: Index, window: PoolWindow, include_pad: bool) -> Expr:
    """Along one dimension: how many positions a result is the average of."""
    start = index_value(o * window.step - window.before, I32)
    end = op("min", op("add", start, const(window.count, I32)), const(window.size + window.before, I32))
    if not include_pad:
        start, end = op("max", start, const(0, I32)), op("min", end, const(window.size, I32))
    return op("sub", end, start)


def _divisor(
    o: Place, windows: Sequence[PoolWindow], include_pad: bool, given: int | None, compute: torch.dtype
) -> Expr:
    """The divisor of the sum over a window."""
    if given is not None:
        return const(given, compute)
    plain = all((w.results - 1) * w.step - w.before + w.count <= w.size + w.before for w in windows)
    if plain and (include_pad or not any(w.before for w in windows)):
        return const(windows[0].count * windows[1].count, compute)
    return cast(op("mul", *(_counted(i, w, include_pad) for i, w in zip(o, windows, strict=True))), compute)


@lowering(aten.avg_pool2d.default)
def _avg_pool(
    ctx: LoopBuilder,
    x: LoopValue,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    include_pad: bool = True,
    divisor: int | None = None,
) -> LoopValue:
    spec, compute = ctx.spec, wide(x.dtype)
    high, across = _windows(ctx, x, spec.shape, kernel, stride, padding, 1)
    ctx.keep(x)

    def body(index: Place) -> Expr:
        result = const(0, compute)
        for h, h_test in high.reads(index[-2]):
            for w, w_test in across.reads(index[-1]):
                result = op("add", result, _read(x, (*index[:-2], h, w), both(h_test, w_test), 0, compute))
        by = _divisor(index[-2:], (high, across), include_pad, divisor, compute)
        return cast(op("div", result, by), COMPUTE_TYPE[spec.dtype])

    return ctx.generate(body)


@lowering(aten.avg_pool2d_backward.default)
def _avg_pool_backward(
    ctx: LoopBuilder,
    grad: LoopValue,
    x: LoopValue,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    include_pad: bool,
    divisor: int | None,
) -> LoopValue:
    compute = wide(x.dtype)
    high, across = _windows(ctx, x, grad.shape, kernel, stride, padding, 1)

    def share(place: Place, index: Place, test: Expr | None) -> Expr:
        by = _divisor(place[-2:], (high, across), include_pad, divisor, compute)
        e = op("div", cast(grad.at(place), compute), by)
        return e if test is None else masked(test, e, const(0, compute))

    return _gathered(ctx, grad, high, across, share)


def _whole_windows(x: LoopValue, out: Sequence[Dim]) -> tuple[int, int]:
    """The window when the sizes of the result divide those of the operand."""
    sizes = x.shape[-2:]
    decline_if(
        not x.dtype.is_floating_point
        or any(n == 0 or m == 0 or n % m for n, m in zip(sizes, out[-2:], strict=True)),
        "windows of several sizes",
    )
    return sizes[0] // out[-2], sizes[1] // out[-1]


@lowering(aten._adaptive_avg_pool2d.default)
def _adaptive_avg_pool(ctx: LoopBuilder, x: LoopValue, out: Sequence[Dim]) -> LoopValue:
    h, w = _whole_windows(x, out)
    rank, shape = len(x.shape), ctx.spec.shape
    cut = views.reshape(x, (*x.shape[:-2], shape[-2], h, shape[-1], w))
    s = total(ctx, cut, [rank - 1, rank + 1], False, wide(x.dtype))
    return ctx.pointwise(lambda e: op("div", e, const(h * w, e.dtype)), s)


@lowering(aten._adaptive_avg_pool2d_backward.default)
def _adaptive_avg_pool_backward(ctx: LoopBuilder, grad: LoopValue, x: LoopValue) -> LoopValue:
    h, w = _whole_windows(x, grad.shape)
    ctx.keep(grad)
    spread = LoopValue(x.shape, grad.dtype, lambda i: grad.at((*i[:-2], i[-2] // h, i[-1] // w)))
    return ctx.pointwise(lambda e: op("div", e, const(h * w, e.dtype)), spread, compute=wide(x.dtype))
