"""Generated matrix products on a GPU against eager in float64: every tiling that may be chosen, operands and
epilogues.

>>> check("gelu", *cases("cuda")["gelu"], tiling=Tiling(128, 64, 64))["ok"]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from dynamotor.api import compile as compile_, reset
from dynamotor.base.config import config
from dynamotor.codegen import triton_gemm_choice
from dynamotor.codegen.triton_gemm import Tiling
from dynamotor.codegen.triton_gemm_sites import find_sites, put
from dynamotor.lower.program import Program

from .numerics import largest_error

Case = tuple[Callable[..., torch.Tensor], list[torch.Tensor]]
TOLERANCE = {
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
    torch.float32: 4e-3,
}  # float32 rounds its operands to TF32
USUAL = Tiling(128, 64, 64, warps=4, stages=4)


def cases(device: str) -> dict[str, Case]:
    """Products by name. "gelu" is the one that all tilings are tried on."""
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32

    def randn(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=f32).to(dtype)

    def last(images: torch.Tensor) -> torch.Tensor:
        return images.to(memory_format=torch.channels_last)

    return {
        "gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), [randn(512, 320), randn(640, 320), randn(640)]),
        "odd sizes": (
            lambda x, w, b: F.relu(F.linear(x, w, b)),
            [randn(333, 77), randn(201, 77), randn(201)],
        ),
        "one row": (lambda x, w: F.silu(x @ w) * 2, [randn(1, 256), randn(256, 512)]),
        "gradient layouts": (lambda g, x: (g.t() @ x).float(), [randn(1000, 192), randn(1000, 256)]),
        "batches": (
            lambda a, b: torch.bmm(a, b.transpose(1, 2)) * 0.125,
            [randn(24, 128, 64), randn(24, 128, 64)],
        ),
        "residual and permuted": (
            lambda x, w, r: (x @ w).view(8, 64, 4, 32).transpose(1, 2).contiguous() + r,
            [randn(512, 96), randn(96, 128), randn(8, 4, 64, 32)],
        ),
        "float16": (lambda x, w: torch.tanh(x @ w), [randn(256, 128, dtype=f16), randn(128, 256, dtype=f16)]),
        "convolution": (
            lambda x, w, b: F.relu(F.conv2d(x, w, b, padding=1)),
            [last(randn(4, 64, 28, 28)), last(randn(96, 64, 3, 3)), randn(96)],
        ),
        "convolution with stride and dilation": (
            lambda x, w: F.silu(F.conv2d(x, w, stride=2, padding=(2, 1), dilation=(2, 1))),
            [last(randn(3, 40, 31, 23)), last(randn(72, 40, 3, 3))],
        ),
        "convolution of 1x1": (
            lambda x, w: F.relu(F.conv2d(x, w)),
            [last(randn(8, 64, 14, 14)), last(randn(128, 64, 1, 1))],
        ),
        "float32 with TF32": (
            lambda x, w: F.relu(x @ w),
            [randn(256, 128, dtype=f32), randn(128, 256, dtype=f32)],
        ),
        "rows of 49": (lambda q, k: torch.bmm(q, k.transpose(1, 2)), [randn(64, 49, 32), randn(64, 49, 32)]),
        "turned rows of 49": (
            lambda p, g: torch.bmm(p.transpose(1, 2), g),
            [randn(64, 49, 49), randn(64, 49, 32)],
        ),
        "convolution of 2x2 with stride": (
            lambda x, w, b: F.conv2d(x, w, stride=2) + b.view(1, -1, 1, 1),
            [last(randn(4, 64, 28, 28)), last(randn(128, 64, 2, 2)), randn(128)],
        ),
        "padded vocabulary": (lambda x, w: F.linear(x, w), [randn(4, 256, 512), randn(1001, 512)]),
        "offset": (lambda x, w: F.relu(x[1:].view(64, 96) @ w), [randn(64 * 96 + 1), randn(96, 128)]),
        "unaligned": (lambda x, w: F.relu(x @ w), [randn(64 * 96 + 1)[1:].view(64, 96), randn(96, 128)]),
    }


@contextlib.contextmanager
def forced(tiling: Tiling) -> Iterator[list[str]]:
    """Every product compiled meanwhile is a template; the list fills with their labels."""
    labels: list[str] = []

    def choose(program: Program, gpu: str, tune: Any = None) -> Program:
        sites = [site.variants()[-1] for site in find_sites(program, tf32=bool(triton_gemm_choice.tf32()))]
        labels.extend(site.label() for site in sites)
        return put(program, [(site, tiling) for site in sites])

    real, triton_gemm_choice.choose = triton_gemm_choice.choose, choose
    try:
        yield labels
    finally:
        triton_gemm_choice.choose = real


def check(
    name: str, fn: Callable[..., torch.Tensor], inputs: list[torch.Tensor], tiling: Tiling
) -> dict[str, Any]:
    """One product under a tiling."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = "TF32" in name
    target = "triton" if inputs[0].device.type == "cpu" else ""
    reset()  # functions of one code share programs
    try:
        with torch.no_grad(), forced(tiling) as labels, config.patch(target=target, program_cache=False):
            got = compile_(lambda *given: fn(*given))(*inputs)
            want = fn(*(t.double() for t in inputs))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    error = largest_error([got], [want])
    return {
        "error_out": error,
        "labels": labels,
        "ok": error < TOLERANCE[inputs[0].dtype] and len(labels) == 1,
    }


def rows(device: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name and work of each row."""
    found = cases(device)
    for tiling in triton_gemm_choice.TILINGS:
        yield str(tiling), lambda tiling=tiling: check("gelu", *found["gelu"], tiling)
    through = Tiling(128, 128, 64, warps=8, stages=3, persistent=True, tma=True, tma_store=True)
    plain = ("odd sizes", "gradient layouts", "batches", "residual and permuted", "float16", "unaligned")
    for name in (*plain, "convolution of 1x1", "padded vocabulary"):
        yield f"{name}, descriptors", lambda name=name: check(name, *found[name], through)
    for name, case in found.items():
        tiling = Tiling(64, 64, 32, warps=4, stages=4) if "float32" in name else USUAL
        yield name, lambda name=name, case=case, tiling=tiling: check(name, *case, tiling)
