"""`python -m dynamotor doctor`: what this machine has, and whether a small function compiles and agrees with eager."""

from __future__ import annotations

import argparse
import platform

import torch

from ..api import compile as compile_
from ..base.config import config
from ..base.errors import DynamotorError
from ..runtime.build import find_compiler
from .numerics import relative_error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The doctor has no options."""


def main(args: argparse.Namespace) -> int:
    """Print the findings; 0 when the small compile agrees with eager."""
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}, CUDA {'yes' if torch.cuda.is_available() else 'no'}"
    )
    try:
        print(f"C++ compiler: {' '.join(find_compiler())}")
    except DynamotorError as error:
        print(error)
    print(f"cache: {config.cache_dir} ({'on' if config.disk_cache else 'off'})")
    x = torch.randn(64, 96, requires_grad=True)

    def small(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x).softmax(-1) * x.mean(0)

    try:
        with config.patch(strict=True):
            ours = compile_(small, fullgraph=True)(x)
    except DynamotorError as error:
        print(f"small compile: failed\n{error}")
        return 1
    difference = relative_error(ours, small(x))
    print(f"small compile: largest relative error {difference:.1e} ({'fine' if difference < 1e-5 else 'WRONG'})")
    return 0 if difference < 1e-5 else 1
