"""Calls that eager refuses, once sizes are symbols: a program is called validly at two sizes, then invalidly.

A program is one expression over tensors whose sizes are drawn; invalid calls have sizes, indices or memory that eager
refuses for most programs. Where eager raises, the compiled function must, with an error of a class that eager's is
one of; where it does not, results are equal.

>>> problems(3)
[]
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

import dynamotor

BACKENDS = ("aot_eager", "aot_eager", "native")
# Over x: [n, m], y: [n, m], v: [m], i: positions below n, n: an int
EXPRESSIONS = (
    "x + y",
    "x * v",
    "x @ y.t()",
    "torch.cat([x, y], 1)",
    "torch.stack([x, y])",
    "x.view(n, -1) + 1",
    "x.reshape(n * v.shape[0])",
    "x[i]",
    "x.index_select(0, i)",
    "x.gather(0, i[:, None].expand(-1, x.shape[1]))",
    "x.scatter(0, i[:1, None], 1.0)",
    "x.index_add(0, i, y[:i.shape[0]])",
    "F.embedding(i, x)",
    "F.cross_entropy(x.t(), i[: x.shape[1]] if i.shape[0] >= x.shape[1] else i)",
    "F.linear(x, y)",
    "F.layer_norm(x, v.shape)",
    "x.expand(2, *y.shape)",
    "x.narrow(0, 1, n - 1)",
    "x[n - 1]",
    "x.split([1, n - 1])[1]",
    "x.unflatten(0, (n, 1))",
    "x.masked_fill(y > 0, 1.0)",
    "torch.where(y > 0, x, v)",
    "x.roll(1, 0).copy_(y)",
    "x.clone().t().copy_(y)",
    "torch.einsum('nm,nm->n', x, y)",
    "torch.bmm(x[None], y.t()[None])",
    "x.clone()[1:].add_(y[:-1])",
    "in_place(x, y)",
    "overlapping(x)",
    "widened(v)",
    "x.as_strided((n, 2), (1, 1)) * 1",
    "x.unfold(0, n, 1)",
    "F.pad(x, (-1, 0, 0, -n + 1))",
    "torch.tensor_split(x, n)[0]",
    "x.repeat_interleave(i, 0)",
    "x.var(0, correction=n)",
    "F.conv1d(x[None], y[:, :, None].transpose(0, 1)[:1])",
    "F.max_pool1d(x[None], n)",
    "torch.linalg.inv(x[:, :n] + torch.eye(n))",
    "x.diagonal_scatter(v[:n])",
    "x.select_scatter(v, 0, n - 1)",
)
AROUND = ("{y}", "({y}) * 2", "({y}).sin().sum()", "({y}) + x.sum()")
HEAD = """
def in_place(x, y):
    z = x.clone()
    z.copy_(y)
    return z
def overlapping(x):
    z = x.clone()
    z[1:].copy_(z[:-1])
    return z
def widened(v):
    z = v.expand(2, v.shape[0])
    z.add_(1)
    return z
"""


def write(seed: int) -> tuple[str, list[tuple[Any, ...]]]:
    """The text of `call(x, y, v, i, n)`, and the arguments of its calls."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def arguments(n: int, m: int, k: int, q: int, w: int, most: int, number: int) -> tuple[Any, ...]:
        x, y, v = (torch.randn(size, generator=generator) for size in ((n, m), (k, q), (w,)))
        return x, y, v, torch.randint(0, most, (n,), generator=generator), number

    calls = [arguments(n, n + 1, n, n + 1, n + 1, n, n) for n in draw.sample(range(2, 9), 2)]
    for _ in range(4):
        n, m = draw.randint(2, 9), draw.randint(2, 9)
        other = [n, m, m, n, draw.choice((n, m, 1)), n, n]
        for at in draw.sample(range(1, 7), draw.randint(1, 2)):
            other[at] = draw.choice((1, 2, 3, 5, 12))
        calls.append(arguments(*other))
    text = draw.choice(AROUND).format(y=draw.choice(EXPRESSIONS))
    return f"{HEAD}\ndef call(x, y, v, i, n):\n    return {text}\n", calls


def outcome(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The result of a call, or the exception that it raises."""
    try:
        return call(*[a.clone() if isinstance(a, torch.Tensor) else a for a in arguments])
    except Exception as error:  # noqa: BLE001 (eager's or ours)
        return error


def problems(seed: int) -> list[str]:
    """The calls of a seed's program that do not end as in eager."""
    text, calls = write(seed)
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(text, space)
    dynamotor.reset()
    backend = BACKENDS[seed % len(BACKENDS)]
    compiled = dynamotor.compile(space["call"], backend=backend, dynamic=True if seed % 2 else None)
    shown = f"{backend}: {text.rpartition('return ')[2].strip()}"
    for arguments in calls:
        want, got = outcome(space["call"], arguments), outcome(compiled, arguments)
        sizes = [list(a.shape) if isinstance(a, torch.Tensor) and a.dim() else a for a in arguments]
        if isinstance(want, Exception):
            if not isinstance(got, type(want)):
                how = f"raised {got!r}"[:200] if isinstance(got, Exception) else f"gave {list(got.shape)}"
                return [f"{shown} of {sizes}: {how} and not {type(want).__name__}: {str(want)[:120]}"]
        elif isinstance(got, Exception):
            return [f"{shown} of {sizes}: raised {got!r}"[:500]]
        elif got.shape != want.shape or not torch.allclose(got, want, rtol=1e-3, atol=1e-4, equal_nan=True):
            return [f"{shown} of {sizes}: another result"]
    return []
