"""Graphs with symbols for compilers of fixed sizes (XLA): an executable for each bucket of sizes
(`options={"pad": ...}`).

>>> call = Bucketed(gm, lambda graph: compile_once(graph, info), pad=16, device=device)      # multiples of 16
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dynamotor.extension_api import (
    Axes,
    CannotPad,
    Compiled,
    Dim,
    Padder,
    Run,
    Size,
    Values,
    Written,
    counters,
    fall_back,
    is_padded,
    is_size,
)

from . import compat

TRIED = 3  # buckets of each size, where guards refuse the smallest
_below_autograd = compat.BelowViews


def bucket_of(n: int, pad: Any) -> int:
    """The size that `n` is padded to: a multiple of a number, the smallest of some that is large enough (or n
    itself, beyond them), or with "powers" a power of two."""
    if pad == "powers":
        return 1 << (n - 1).bit_length()
    return -(-n // pad) * pad if isinstance(pad, int) else min((size for size in pad if size >= n), default=n)


class Bucketed:
    """A graph with symbols as executables for buckets of sizes; for each size where padding is refused."""

    def __init__(
        self,
        gm: fx.GraphModule,
        compile_graph: Callable[[fx.GraphModule], Compiled],
        pad: Any,
        device: torch.device,
        name: str = "",
    ) -> None:
        self.gm, self.compile_graph, self.pad, self.device = gm, compile_graph, pad, device
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.symbols = [
            (n, symbol)
            for n, node in enumerate(placeholders)
            if is_size(node)
            for symbol in node.meta["val"].symbols
        ]
        self.env = gm.meta["shape_env"]
        self._buckets: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._known: dict[tuple[int, ...], tuple[Written, Compiled]] = {}
        self.refused = self._why_not()
        if self.refused:
            reason = f"{self.refused}: compiled for each size"
            fall_back("xla.pad", what="xla.pad", name=name, reason=reason, code="DM679")

    def _why_not(self) -> str:
        """Why padding may do harm; empty where it does none."""
        try:
            Padder(self.gm, self.env.hints, True, self.device).write()
        except CannotPad as why:
            return str(why)
        return ""

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        of = {symbol: inputs[n] for n, symbol in self.symbols}
        key = tuple(of.values())
        if not self.refused:
            if key not in self._buckets:
                self._buckets[key] = self._bucket(of)
            key = self._buckets[key]
        known = self._known.get(key)
        if known is None:
            at = dict(zip(of, key, strict=True))
            written = Padder(self.gm, at, not self.refused, self.device).write()
            known = self._known[key] = written, self.compile_graph(written.gm)
            counters["xla"]["buckets"] += 1
        written, call = known
        sizes = dict(zip(of, key, strict=True))
        with _below_autograd():  # no result is a view to the caller, who may write it
            given = [_padded(inputs[n], axes, of, sizes) for n, axes in written.given]
        if written.needed:
            given.append(torch.tensor([size.value(of) for size in written.needed], device="cpu"))
        results = call(*given)
        with _below_autograd():
            return tuple(
                [
                    x if how is None else how.value(of) if type(how) is Size else _cut(x, *how, of, sizes)
                    for x, how in zip(results, written.outputs, strict=True)
                ]
            )

    def _bucket(self, of: Values) -> tuple[int, ...]:
        """The smallest sizes to pad to that the graph is right for: its guards may tell some sizes apart. A
        call's own where there are none."""
        choices = []
        for symbol, n in of.items():
            sizes = [n if symbol in self.env.fixed else bucket_of(n, self.pad)]
            while len(sizes) < TRIED and symbol not in self.env.fixed:
                sizes.append(bucket_of(sizes[-1] + 1, self.pad))
            choices.append(sizes)
        for chosen in sorted(itertools.product(*choices), key=math.prod):
            larger = dict(zip(of, chosen, strict=True))
            for symbol, n in self.env.fixed.items():  # another one, or a number
                if symbol in larger:
                    larger[symbol] = n.value(larger) if type(n) is Size else n
            if self.env.admits(larger):
                return tuple(larger.values())
        return tuple(of.values())


def _sizes_of(axes: Axes, of: Values) -> list[list[int]]:
    return [[f.size.value(of) if isinstance(f, Run) else f for f in axis] for axis in axes]


def zeros_behind(x: torch.Tensor, more: list[int]) -> torch.Tensor:
    """A larger tensor; `more` as `torch.nn.functional.pad` takes it."""
    return torch.nn.functional.pad(x, more)


def _padded(x: Any, axes: Axes, of: Values, larger: Values) -> Any:
    """An input with zeros behind its values."""
    if not is_padded(*axes):
        return x
    own, wanted = _sizes_of(axes, of), _sizes_of(axes, larger)
    if own != wanted:
        x = x.reshape([n for some in own for n in some])
        more: list[int] = []
        for a, b in zip((n for some in own for n in some), (n for some in wanted for n in some), strict=True):
            more = [0, b - a, *more]
        x = zeros_behind(x, more)
        x = x.reshape([math.prod(some) for some in wanted])
    return x.contiguous()


def _cut(x: Any, axes: Axes, strides: tuple[Dim, ...], of: Values, larger: Values) -> Any:
    """A result without padding, with the strides that the graph says."""
    if not is_padded(*axes):
        return x
    own, wanted = _sizes_of(axes, of), _sizes_of(axes, larger)
    steps = [s.value(of) if type(s) is Size else s for s in strides]
    if own != wanted:
        x = x.reshape([n for some in wanted for n in some])
        for d, n in enumerate(n for some in own for n in some):
            x = x.narrow(d, 0, n)
        x = x.reshape([math.prod(some) for some in own])
    elif all(n < 2 or a == b for n, a, b in zip(x.shape, x.stride(), steps, strict=True)):
        return x
    order = sorted(range(x.dim()), key=lambda d: (-steps[d], d))
    back = [order.index(d) for d in range(x.dim())]
    return x.permute(order).contiguous().permute(back)
