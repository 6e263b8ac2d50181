"""Values of two runs of a model, side by side: each run saves tensors by name into a folder of its own.

>>> mc.configure("/tmp/cpu"); mc.save("hidden", hidden); ...     # and the same with "/tmp/xla" on the device
>>> print(mc.compare("/tmp/cpu", "/tmp/xla", rtol=1e-5))
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import torch

_folder: list[Path] = []
_saved: Counter[Path] = Counter()


def configure(save_dir: str) -> None:
    """Save to this folder from now on, and number the values of each name from 0. MODELCMP_SAVEDIR names one,
    too.
    """
    _folder[:] = [Path(save_dir)]
    _folder[0].mkdir(parents=True, exist_ok=True)
    _saved.clear()


def save(name: str | None, tensor: torch.Tensor, step: int | None = None) -> None:
    """Write a tensor's value; nothing where no folder is configured.

    name: None for the line that calls. step: a folder of its own for each step.
    """
    where = _folder[0] if _folder else Path(os.environ.get("MODELCMP_SAVEDIR", ""))
    if not _folder and "MODELCMP_SAVEDIR" not in os.environ:
        return
    if step is not None:
        where /= f"step-{step}"
        where.mkdir(exist_ok=True)
    if name is None:
        frame = sys._getframe(1)
        name = f"{Path(frame.f_code.co_filename).stem}.l{frame.f_lineno}"
    torch.save(tensor.detach().cpu(), where / f"{name}-{_saved[where / name]}.pt")
    _saved[where / name] += 1


def compare_tensors(
    tensor1: torch.Tensor, tensor2: torch.Tensor, rtol: float = 1e-05, atol: float = 1e-08
) -> str:
    """How two tensors differ, as text; "" where they are close."""
    try:
        torch.testing.assert_close(tensor1, tensor2, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as difference:
        return f"{difference}\n"
    return ""


def compare(dir1: str, dir2: str, rtol: float = 1e-05, atol: float = 1e-08) -> str:
    """How the tensors in two folders differ: missing ones, and those that are not close. "" where nothing
    does.
    """
    names = [{str(p.relative_to(folder)) for p in Path(folder).rglob("*.pt")} for folder in (dir1, dir2)]
    lines = [
        f"{name} is only in {dir1 if name in names[0] else dir2}\n" for name in sorted(names[0] ^ names[1])
    ]
    for name in sorted(names[0] & names[1]):
        first, second = (torch.load(Path(folder) / name) for folder in (dir1, dir2))
        found = compare_tensors(first, second, rtol, atol)
        lines += [f"{name}: {found}"] if found else []
    return "".join(lines)
