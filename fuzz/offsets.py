"""Statistics and norms of data with a large mean, and their gradients: the error against float64 is about eager's.

>>> problems(3)
[]
"""

from __future__ import annotations

import random
from typing import Any

import torch

import dynamotor

FACTOR, FLOOR = 8.0, 4.0  # times eager's error, and units of rounding of the data's size, that are allowed
EXPRESSIONS = (
    "x.var({d}, correction={c})",
    "x.std({d}, keepdim=True)",
    "torch.var_mean(x, {d})[0]",
    "torch.std_mean(x, {d})[0]",
    "F.layer_norm(x, x.shape[1:])",
    "F.layer_norm(x, x.shape[-1:], torch.linspace(0.5, 2, x.shape[-1], dtype=x.dtype))",
    "F.group_norm(x, 2)",
    "F.instance_norm(x)",
    "F.batch_norm(x, None, None, training=True)",
    "F.rms_norm(x, x.shape[-1:])",
    "(x - x.mean({d}, keepdim=True)).square().mean({d})",
    "x - x.mean({d}, keepdim=True)",
    "torch.logsumexp(x, {d})",
    "torch.softmax(x, {d})",
    "torch.log_softmax(x, {d})",
    "torch.logcumsumexp(x, {d})",
    "x.mean({d})",
    "x.sum({d})",
    "torch.cov(x.flatten(1)[:3])",
    "torch.corrcoef(x.flatten(1)[:3])",
    "F.cosine_similarity(x, x.flip({d}), dim={d})",
    "x.norm(dim={d})",
    "torch.cdist(x[0], x[1])",
    "F.normalize(x, dim={d})",
    "F.mse_loss(x, x.roll(1, {d}))",
    "x.cumsum({d}).diff(dim={d})",
    "F.softplus(x - x.amax({d}, keepdim=True))",
    "torch.logaddexp(x, x.flip({d}))",
)
AFTER = ("{y}", "{y} * 2 + 1", "({y}).tanh()", "({y}).relu()")
DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16)


def write(seed: int) -> tuple[str, torch.Tensor]:
    """An expression and data."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    shape = [
        draw.choice((2, 3, 4)),
        draw.choice((2, 4, 6)),
        draw.choice((1, 5, 16, 33, 257)),
        draw.choice((2, 7, 64)),
    ]
    offset, scale = draw.choice((0.0, 1.0, 30.0, 1e3, 1e5, -1e4)), draw.choice((1.0, 1.0, 0.01, 10.0))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + offset
    d = draw.choice((0, 1, 2, 3, -1))
    text = draw.choice(AFTER).format(y=draw.choice(EXPRESSIONS).format(d=d, c=draw.choice((0, 1))))
    return text, x.to(draw.choice(DTYPES))


def results(fn: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The result and the gradient of a weighed sum of it."""
    leaf = x.detach().clone().requires_grad_()
    y = fn(leaf)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).to(y.dtype).view(y.shape)
    (grad,) = torch.autograd.grad(y, leaf, weights, materialize_grads=True)
    return [y.detach().double(), grad.double()]


def rounding_decides(text: str, x: torch.Tensor) -> bool:
    """Whether a step of the data decides on which side of 0 a number is that `relu` cuts: one flipped element
    changes all gradients of its row.
    """
    if not text.endswith(".relu()"):
        return False
    before = eval(f"lambda x: {text.removesuffix('.relu()')}", {"torch": torch, "F": torch.nn.functional})
    try:
        exact, moved = before(x.double()), before(x.double() * (1 + 2 * torch.finfo(x.dtype).eps))
        rounded = before(x).double()
    except RuntimeError:
        return False
    step = max(float((rounded - exact).abs().max()), float((moved - exact).abs().max()))
    return bool((exact.abs() <= FACTOR * step).any())


def problems(seed: int) -> list[str]:
    """Results and gradients that are further from float64 than eager's."""
    text, x = write(seed)
    if rounding_decides(text, x):
        return []
    fn = eval(f"lambda x: {text}", {"torch": torch, "F": torch.nn.functional})
    try:
        exact, eager = results(fn, x.double()), results(fn, x)
    except RuntimeError:
        return []  # eager refuses the expression
    dynamotor.reset()
    with dynamotor.config.patch(warn_slower=False):
        ours = results(dynamotor.compile(fn), x)
    found = []
    for name, e, a, b in zip(("result", "gradient"), exact, eager, ours, strict=True):
        known = torch.isfinite(e) & torch.isfinite(a)
        if bool((~torch.isfinite(b) & known).any()):
            found.append(f"{name} of {text} for {x.dtype}{list(x.shape)} is not finite")
            continue
        size = float(e[known].abs().max()) if known.any() else 0.0
        if name == "gradient":  # zero but for rounding where the result does not depend on the data
            size = max(size, 1 / max(1.0, float(x.abs().max())))
        off, its = (float((z - e)[known].abs().max()) if known.any() else 0.0 for z in (b, a))
        if off > FACTOR * its + FLOOR * torch.finfo(x.dtype).eps * size:
            found.append(
                f"{name} of {text} for {x.dtype}{list(x.shape)}: {off:.3g} off, eager {its:.3g}, of {size:.3g}"
            )
    return found
