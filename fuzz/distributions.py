"""Random numbers drawn in compiled programs: whole distributions, resolution, independence.

A draw of 2**15 numbers is held against eager's by the two-sample Kolmogorov-Smirnov statistic (exact for discrete
distributions in that it is conservative there), and by the correlation of neighbours at several distances, of
consecutive calls and of two draws of one call. Bounds are those of chance once in 10**8.

>>> problems(3)
[]
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch

import dynamotor

N = 1 << 15
CHANCE = 1e-8
DTYPES = ("torch.float32", "torch.float32", "torch.float64", "torch.bfloat16", "torch.float16")
# {n} numbers in {dtype}.
DRAWS = (
    "torch.rand({n}, dtype={dtype})",
    "torch.randn({n}, dtype={dtype})",
    "torch.rand_like(torch.empty({n}, dtype={dtype}))",
    "torch.randn_like(torch.empty({n}, dtype={dtype}))",
    "torch.empty({n}, dtype={dtype}).uniform_({a}, {b})",
    "torch.empty({n}, dtype={dtype}).normal_({a}, {s})",
    "torch.empty({n}, dtype={dtype}).exponential_({s})",
    "torch.empty({n}, dtype={dtype}).bernoulli_({p})",
    "torch.bernoulli(torch.full(({n},), {p}, dtype={dtype}))",
    "torch.randint({low}, {high}, ({n},))",
    "torch.randint_like(torch.empty({n}, dtype={dtype}), {low}, {high})",
    "F.dropout(torch.ones({n}, dtype={dtype}), {p}, True)",
    "F.alpha_dropout(torch.ones({n}, dtype={dtype}), {p}, True)",
    "torch.nn.functional.gumbel_softmax(torch.zeros({n} // 2, 2, dtype={dtype}), dim=-1).flatten()",
    "torch.multinomial(torch.tensor([0.1, 0.2, 0.7]), {n}, replacement=True)",
    "torch.empty({n}, dtype={dtype}).geometric_(max({p}, 0.01))",
    "torch.empty({n}, dtype={dtype}).cauchy_({a}, {s})",
    "torch.empty({n}, dtype={dtype}).log_normal_(0, {s})",
    "torch.randperm({n})",
)
AROUND = ("{x}", "{x} * 2 + 1", "({x}).view(256, -1).t().reshape(-1)", "torch.where(({x}) > 0.5, 1.0, 0.0)")


def write(seed: int) -> str:
    """An expression that draws."""
    draw = random.Random(seed)
    low = draw.choice((0, -5, 1 << 20))
    text = draw.choice(DRAWS).format(
        n=N,
        dtype=draw.choice(DTYPES),
        a=draw.choice((0.0, -1.0, 3.0)),
        b=draw.choice((3.5, 4.0, 100.0)),
        s=draw.choice((0.1, 1.0, 5.0)),
        p=draw.choice((0.5, 0.1, 0.9, 1e-3, 1e-5)),
        low=low,
        high=low + draw.choice((2, 3, 10, 1000, 1 << 24)),
    )
    return draw.choice(AROUND).format(x=text)


def dtype_of(text: str) -> torch.dtype:
    """The floating type of an expression."""
    return next((d for d in map(eval, DTYPES) if str(d) in text), torch.float32)


def apart(a: torch.Tensor, b: torch.Tensor, unit: float) -> float:
    """The Kolmogorov-Smirnov statistic of two samples, but for differences of `unit` relative to a value: numbers
    that are taken often may be rounded otherwise."""
    values = torch.cat([a, b])
    below = values - unit * values.abs()
    first, second = a.sort().values, b.sort().values

    def share(sample: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(sample, at, right=True) / len(sample)

    return max(
        float((share(first, below) - share(second, values)).max()),
        float((share(second, below) - share(first, values)).max()),
    )


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of the ranks of two samples, in standard deviations of independent ones."""
    ranks = [x.argsort().argsort().double() for x in (a, b)]
    ranks = [(r - r.mean()) / r.std() for r in ranks]
    return float((ranks[0] * ranks[1]).mean()) * math.sqrt(len(a))


def problems(seed: int, run: Callable[[Any], Any] = dynamotor.compile) -> list[str]:
    """How the numbers of a seed's expression differ from eager's distribution."""
    text, lag = write(seed), random.Random(seed).choice((1, 2, 4, 8, 16, 32, 64, 256, 4096))
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(f"def call():\n    return {text}, {text}", space)
    torch.manual_seed(seed)
    want = [x.double().flatten() for x in space["call"]()]
    dynamotor.reset()
    call = run(space["call"])
    got = [x.double().flatten() for _ in range(2) for x in call()]
    found, n = [], len(want[0])
    if any(len(x) != n for x in got):
        return [f"{text}: sizes"]
    unit = 4 * torch.finfo(dtype_of(text)).eps
    bound = math.sqrt(-math.log(CHANCE / 2) / 2) * math.sqrt(2 / n)
    distance = max(apart(x, want[0], unit) for x in got)
    eager = apart(want[1], want[0], unit)
    if distance > max(bound, 2 * eager) and "randperm" not in text:
        found.append(f"{text}: the distributions are {distance:.4f} apart (eager's own {eager:.4f})")
    noise = [x + 0 * x for x in got]
    deviations = math.sqrt(2 * -math.log(CHANCE)) + 0.5
    pairs = {
        "calls": (noise[0], noise[2]),
        "draws": (noise[0], noise[1]),
        f"lag {lag}": (noise[0][lag:], noise[0][:-lag]),
    }
    jitter = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    other = torch.rand(n, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    for name, (a, b) in pairs.items():
        if "gumbel" in text and "lag" in name:
            continue  # neighbours sum to one
        width = 1e-9 * max(1.0, float(a.abs().max()))
        off = correlation(a + jitter[: len(a)] * width, b + other[: len(b)] * width)
        if abs(off) > deviations:
            found.append(f"{text}: {name} are correlated ({off:.1f} standard deviations)")
    if "torch.float64" in text and "rand(" in text and "where" not in text:
        fine = got[0] * 2.0**24
        if bool((fine == fine.round()).all()):
            found.append(f"{text}: float64 numbers have the digits of float32")
    return found
