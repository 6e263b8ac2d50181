"""A Triton function as a job for the workers that build it, and as a callable of Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..base import development
from ..base.errors import UsageError
from ..runtime import triton_build, triton_launch
from .triton_kernel import TritonFunction
from .triton_ops import HELPERS

OVERLAPPING = 90  # the least compute capability with programmatic dependent launches


def job_of(f: TritonFunction, arch: int) -> triton_build.TritonJob:
    """The builds of a function."""
    overlaps = arch >= OVERLAPPING
    return triton_build.TritonJob(
        HELPERS + (_overlapping(f) if overlaps else f.source),
        f.name,
        f.signature,
        f.warps,
        arch,
        debug=f.checks,
        stages=f.stages,
        scratch=f.scratch,
        overlaps=overlaps,
    )


def _overlapping(f: TritonFunction) -> str:
    """The function's text, which lets the next kernel's programs start before it waits for the kernel before
    it: launches overlap, which is 0.3 us of each in a step of decoding.
    """
    behind = f.source.index("):\n", f.source.index(f"def {f.name}(")) + 3
    return f"{f.source[:behind]}    overlap()\n{f.source[behind:]}"


def interpreted(f: TritonFunction, ints: tuple[int, ...]) -> Callable[..., None]:
    """The function in Triton's interpreter, which only tests need and register."""
    make = development.functions.get("make_interpreted")
    if make is None:
        raise UsageError(
            "DM735",
            "Triton kernels on CPU tensors need the interpreter of the development package `bench`",
            why="no wheel holds it, and this process has not registered it",
            cure="use target='cpp'; or, in a clone of the repository, `import bench.verification` first",
        )
    kernel: Callable[..., None] = make(HELPERS + f.source, f.name, int(f.grid), ints)
    if f.fallback is not None:
        kernel = development.functions["by_alignment"](kernel, interpreted(f.fallback, ints))
    return kernel


def launch(
    device: torch.device, f: TritonFunction, n_tensors: int, numbers: tuple[int, ...]
) -> Callable[..., None]:
    """The function built for a device, as a callable of tensors and a stream; its grid is a number."""
    if device.type != "cuda":
        return interpreted(f, numbers)
    job = job_of(f, triton_launch.arch(device.index))
    code = triton_build.start_kernel(job).result()
    return triton_launch.make_gpu_kernel(job, code, device, int(f.grid), n_tensors, numbers)
