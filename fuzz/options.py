"""Functions with a number among their options that differs between calls: an argument, or read from a tensor. Inputs
have any layout and dtype, and halves that are next to the number; values, dtypes, strides, gradients and errors are
eager's.

>>> problems(3)
[]
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (for the expressions)

import dynamotor

from .operators import relaid

EXPRESSIONS = (
    "torch.add(x, x.sin(), alpha=k)", "torch.rsub(x, x.sin(), alpha=k)", "torch.addcmul(x, x, x, value=k)",
    "torch.addmm(x.flatten(1), x.flatten(1), torch.eye(x.flatten(1).shape[1], dtype=x.dtype), beta=k, alpha=k)",
    "torch.addmm(x.flatten(1).t(), torch.eye(x.flatten(1).shape[1], dtype=x.dtype), x.flatten(1).t(), beta=k)",
    "x.clamp(-k, k)", "x.clamp_min(k)", "x.clone().clamp_(max=k)", "torch.lerp(x, x.sin(), k)",
    "x.masked_fill(x > 0, k)", "x.masked_fill(x > 0, torch.tensor(k))", "torch.full_like(x, k)", "x.new_full(x.shape, k)",
    "x.index_fill(0, torch.tensor([0]), k)", "torch.where(x > 0, x, k)", "torch.where(x > 0, k, 0.0)", "(x + 4) ** k",
    "k**x", "x % k", "x.fmod(k)", "F.leaky_relu(x, k)", "F.elu(x, k)", "F.celu(x, k)", "F.softplus(x, k)",
    "F.softplus(x, 1, k)", "F.threshold(x, k, 0.5)", "F.threshold(x, 0.1, k)", "F.hardtanh(x, -k, k)",
    "F.hardshrink(x, k)", "F.softshrink(x, k)", "F.huber_loss(x, x.detach() * 2, delta=k, reduction='none')",
    "F.smooth_l1_loss(x, x.detach() * 2, beta=k, reduction='none')", "F.pad(x, (1, 2), value=k)",
    "F.layer_norm(x, x.shape[-1:], eps=k)", "F.rms_norm(x, x.shape[-1:], eps=k)", "F.group_norm(x, 2, eps=k)",
    "F.instance_norm(x, eps=k)", "F.batch_norm(x, None, None, training=True, eps=k)", "F.normalize(x, dim=0, eps=k)",
    "x.nan_to_num(k)", "torch.renorm(x, 2, 0, k)", "F.cosine_similarity(x, x.flip(0), eps=k)", "x * k", "k / x", "x > k",
    "x.clone().fill_(k)", "torch.full(x.shape, k, dtype=x.dtype) + x", "torch.tensor([k, 1], dtype=x.dtype)",
)  # fmt: skip
LAYOUTS = ("", "transposed", "transposed", "channels_last", "strided", "offset")
HALVES = (torch.float16, torch.bfloat16)
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}


def write(seed: int) -> tuple[str, torch.dtype, str, str]:
    """An expression of x and k, the dtype and layout of x, and where k comes from."""
    draw = random.Random(seed)
    source = draw.choice(("argument", "argument", "tensor"))
    types = (torch.int8, torch.int32, torch.int64) if source == "tensor" else (torch.float32, *HALVES)
    return draw.choice(EXPRESSIONS), draw.choice(types), draw.choice(LAYOUTS), source


def _numbers(draw: random.Random, dtype: torch.dtype) -> list[Any]:
    if dtype.is_floating_point:
        return [draw.uniform(0.3, 2) for _ in range(4)]
    return [3, draw.choice((2, 5, 100)), draw.choice((300, -200, 1 << 33)), 4]


def _input(seed: int, dtype: torch.dtype, layout: str, numbers: list[Any]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = random.Random(seed).choice(((2, 4, 3, 5), (4, 6), (3, 4, 5)))
    x = torch.randn(shape, generator=generator) * 2
    if dtype in HALVES:  # the numbers between which k is
        x.view(-1)[: 2 * len(numbers)] = torch.tensor([*numbers, *(-n for n in numbers)])
    return relaid(x.to(dtype), layout)


def _outcome(run: Callable[..., torch.Tensor], x: torch.Tensor, k: Any, source: str) -> tuple[Any, ...]:
    x = relaid_alike(x).requires_grad_(x.is_floating_point())
    try:
        result = run(x, torch.tensor(k) if source == "tensor" else k)
    except (RuntimeError, ValueError, OverflowError, IndexError) as error:
        return (type(error).__name__, str(error))
    if result.requires_grad:
        result.float().sum().backward()
    return result.detach(), x.grad


def relaid_alike(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


def _differ(want: Any, got: Any) -> str:
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return "" if type(want) is type(got) and want == got else f"{got!r:.80} and not {want!r:.80}"
    if (want.dtype, want.shape) != (got.dtype, got.shape):
        return f"{got.dtype} {tuple(got.shape)} and not {want.dtype} {tuple(want.shape)}"
    wide = TOLERANCE.get(want.dtype, 0.0)
    if not torch.allclose(want.double(), got.double(), wide, wide, equal_nan=True):
        return f"values differ by {(want.double() - got.double()).abs().max().item():.3g}"
    return ""


def problems(seed: int) -> list[str]:
    """Numbers for which the compiled function is not eager's."""
    text, dtype, layout, source = write(seed)
    numbers = _numbers(random.Random(seed + 1), dtype)
    read = "k.item()" if source == "tensor" else "k"
    program = eval(f"lambda x, k: (lambda k: {text})({read})", {"torch": torch, "F": F})  # noqa: S307
    compiled, x = dynamotor.compile(program), _input(seed, dtype, layout, numbers)
    found = []
    for k in numbers:
        want, got = _outcome(program, x, k, source), _outcome(compiled, x, k, source)
        said = [_differ(a, b) for a, b in zip(want, got)] if len(want) == len(got) else ["an error"]
        if not any(said) and type(want[0]) is torch.Tensor and want[0].stride() != got[0].stride():
            said = [f"strides {got[0].stride()} and not {want[0].stride()}"]
        found += [f"{text} of {dtype} {layout}, k {k} ({source}): {one}" for one in said if one][:1]
    return found
