"""Functions that are made of pieces, and the places where two pieces meet."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import dynamotor

PIECES = {
    "hardswish": (F.hardswish, (-3, 3)),
    "hardsigmoid": (F.hardsigmoid, (-3, 3)),
    "hardtanh": (F.hardtanh, (-1, 1)),
    "hardtanh of others": (lambda x: F.hardtanh(x, -0.5, 2.0), (-0.5, 2)),
    "relu": (F.relu, (0,)),
    "relu6": (F.relu6, (0, 6)),
    "elu": (lambda x: F.elu(x, 1.5), (0,)),
    "celu": (lambda x: F.celu(x, 1.5), (0,)),
    "selu": (F.selu, (0,)),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), (0,)),
    "prelu": (lambda x: F.prelu(x, torch.full((1,), 0.3, dtype=x.dtype)), (0,)),
    "hardshrink": (F.hardshrink, (-0.5, 0.5)),
    "softshrink": (F.softshrink, (-0.5, 0.5)),
    "softplus": (lambda x: F.softplus(x, 2.0, 4.0), (2,)),
    "threshold": (lambda x: F.threshold(x, 0.5, 7.0), (0.5,)),
    "logsigmoid": (F.logsigmoid, (0,)),
    "clamp": (lambda x: x.clamp(-1, 2), (-1, 2)),
    "clamp of tensors": (lambda x: x.clamp(torch.full_like(x, -1), torch.full_like(x, 2)), (-1, 2)),
    "clamp to one value": (lambda x: x.clamp(1, 1), (1,)),
    "abs": (torch.abs, (0,)),
    "sign": (lambda x: x.sign() * x, (0,)),
    "maximum": (lambda x: torch.maximum(x, torch.ones_like(x)), (1,)),
    "minimum of itself": (lambda x: torch.minimum(x, x * 1), (1,)),
    "fmax": (lambda x: torch.fmax(x, torch.ones_like(x)), (1,)),
    "max": (lambda x: x.amax(0), (1,)),
    "max of all": (torch.max, (1,)),
    "smooth_l1": (lambda x: F.smooth_l1_loss(x, x.detach() * 0, beta=0.5, reduction="none"), (-0.5, 0, 0.5)),
    "smooth_l1 without beta": (lambda x: F.smooth_l1_loss(x, x.detach() * 0, beta=0.0), (0,)),
    "huber": (lambda x: F.huber_loss(x, x.detach() * 0, delta=0.5, reduction="none"), (-0.5, 0, 0.5)),
    "l1": (lambda x: F.l1_loss(x, x.detach() * 0, reduction="none"), (0,)),
    "hinge": (lambda x: F.hinge_embedding_loss(x, x.detach() * 0 - 1, reduction="none"), (1,)),
    "margin": (lambda x: F.margin_ranking_loss(x, x * 0, x.detach() * 0 + 1, 0.5), (-0.5, 0.5)),
    "logit": (lambda x: x.logit(0.25), (0.25, 0.75)),
    "norm": (lambda x: x.norm(dim=0), (0,)),
    "norm of one": (lambda x: x.norm(1, dim=0), (0,)),
    "norm of infinity": (lambda x: x.norm(torch.inf, dim=0), (1, -1)),
    "prod": (lambda x: x.prod(0), (0,)),
    "remainder": (lambda x: x.remainder(2), (-2, 0, 2)),
    "pow": (lambda x: x**2.0 + x**1.0 + x**0.0, (0,)),
    "xlogy": (lambda x: torch.xlogy(x, x), (0,)),
    "sinc": (torch.sinc, (0,)),
    "atan2": (lambda x: torch.atan2(x, x.detach().sign()), (0,)),
    "where": (lambda x: torch.where(x > 0.5, x * 2, x * 3), (0.5,)),
    "hypot": (lambda x: torch.hypot(x, x), (0,)),
    "cosine_similarity": (lambda x: F.cosine_similarity(x, x, 0), (0,)),
}


def ends(values: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    around = torch.tensor(values, dtype=dtype)
    one = torch.ones_like(around) * torch.inf
    around = torch.cat([around, -around, around.nextafter(one), around.nextafter(-one)])
    return around[:, None].expand(len(around), 3).contiguous().requires_grad_()


def check(backend: str, dtype: torch.dtype) -> None:
    """Values and gradients of all functions, compiled as one, are eager's where pieces meet."""

    def all_of(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [function(x) for (function, _), x in zip(PIECES.values(), tensors, strict=True)]

    ours, eagers = ([ends(values, dtype) for _, values in PIECES.values()] for _ in range(2))
    got = dynamotor.compile(all_of, backend=backend)(*ours)
    for name, y, value in zip(PIECES, eagers, got, strict=True):
        expected = PIECES[name][0](y)
        torch.testing.assert_close(value, expected, equal_nan=True, msg=lambda m: f"{name}: {m}")  # noqa: B023
        expected.sum().backward()
    torch.autograd.backward([value.sum() for value in got])
    for name, x, y in zip(PIECES, ours, eagers, strict=True):
        torch.testing.assert_close(x.grad, y.grad, equal_nan=True, msg=lambda m: f"{name}: {m}")  # noqa: B023
