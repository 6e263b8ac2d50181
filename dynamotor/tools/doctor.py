"""`python -m dynamotor doctor`: what this machine has, and whether each engine compiles a small function as
eager has it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..api import compile as compile_
from ..base import probe
from ..base.config import config
from ..base.errors import DynamotorError
from ..base.extensions import BACKENDS, names
from ..capture.stance import switched_off
from ..runtime.cpp_build import find_compiler


@dataclass(frozen=True)
class Engine:
    """A way to run compiled graphs: the backend's name, the device, and the missing part (empty:
    nothing).
    """

    name: str
    backend: str
    device: str
    missing: Callable[[], str]


def _nothing() -> str:
    return ""


def _library(name: str, cure: str) -> str:
    return "" if importlib.util.find_spec(name) else f"{name} is not installed: {cure}"


def _gpu() -> str:
    return (
        "there is no NVIDIA GPU"
        if not torch.cuda.is_available()
        else _library("triton", "pip install triton")
    )


def _xla() -> str:
    return "" if "xla" in names(BACKENDS) else "dynamotor-xla is not installed: pip install dynamotor[xla]"


ENGINES = (
    Engine("eager (capture alone)", "eager", "cpu", _nothing),
    Engine("aot_eager (with autograd)", "aot_eager", "cpu", _nothing),
    Engine("native, C++", "native", "cpu", _nothing),
    Engine("native, Triton", "native", "cuda", _gpu),
    Engine("xla", "xla", "cpu", _xla),
)
# Libraries of tools: name, purpose, package to install.
LIBRARIES = (
    ("matplotlib", "charts in reports", "pip install dynamotor[report]"),
    ("safetensors", "scripts that repeat internal errors", "pip install safetensors"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--names", action="store_true", help="list every private PyTorch name that is used")


def main(args: argparse.Namespace) -> int:
    """Print the findings; 0 when every engine that can run agrees with eager."""
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}, CUDA {'yes' if torch.cuda.is_available() else 'no'}"
    )
    try:
        print(f"C++ compiler: {' '.join(find_compiler())}")
    except DynamotorError as error:
        print(error)
    print(f"cache: {config.cache_dir} ({'on' if config.disk_cache else 'off'}, {_free(config.cache_dir)})")
    if name := switched_off():
        print(f"{name}=1: compiled functions run in eager PyTorch, and the checks below say nothing")
    for name, purpose, cure in LIBRARIES:
        print(f"{name} ({purpose}): {_library(name, cure) or 'there'}")
    worst = max(_examine(engine) for engine in ENGINES)
    _print_names(args.names)  # those of extensions, too, which the engines have imported
    return worst


def _print_names(every: bool) -> None:
    """The private names of PyTorch by the capability that needs them; missing ones, or every one."""
    print(f"private PyTorch names ({'all' if every else 'those found are listed by --names'}):")
    for off in dict.fromkeys(row.off for row in probe.table):
        rows = [row for row in probe.table if row.off is off]
        for row in rows:
            row.value()  # those that are looked up late, too
        found = sum(row.found is not None for row in rows)
        state = "not in this build" if not off.is_built else "off" if any(r.is_lost for r in rows) else "on"
        print(f"  {off.name}: {state}, {found} of {len(rows)} found")
        for row in rows:
            if off.is_built and (every or row.found is None):
                print(f"    {row.paths[0]}: {row.state()}")


def _free(folder: str) -> str:
    """Room on the disk of a folder, which may not be there yet."""
    while not os.path.exists(folder):
        folder = os.path.dirname(folder) or "/"
    return f"{shutil.disk_usage(folder).free / 2**30:.0f} GiB free"


def _examine(engine: Engine) -> int:
    """Compile a small training step on an engine; 0 when it agrees with eager, or when something is missing
    for it.
    """
    why = engine.missing()
    if why:
        print(f"{engine.name}: not here, {why}")
        return 0
    x = torch.randn(64, 96, device=engine.device, requires_grad=True)

    def small(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x).softmax(-1) * x.mean(0)

    def step(fn: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        result = fn(x)
        return result, torch.autograd.grad(result.square().sum(), x)[0]

    try:
        with config.patch(strict=True):
            ours = step(compile_(small, fullgraph=True, backend=engine.backend))
    except DynamotorError as error:
        print(f"{engine.name}: failed\n{error}")
        return 1
    errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(ours, step(small))]
    worst = torch.stack(errors).max().item()  # NaN when one is
    verdict = "fine" if worst < 1e-5 else "WRONG"
    print(f"{engine.name}: compiles; largest relative error of result and gradient {worst:.1e} ({verdict})")
    return 0 if worst < 1e-5 else 1
