"""Looks private PyTorch names up when the package is imported, and knows which capability each missing one
turns off.

>>> empty = name("torch._C._new_empty", "torch._C._empty", off=COMPILE)   # the first that this PyTorch has
>>> require(COMPILE)                                                      # DM150 where such a name is missing
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import CaptureError, CompatibilityWarning
from .events import warn_once

TESTED = (2, 11), (2, 14)  # the oldest and the newest minor version of PyTorch that the test suite runs on
# Names that a test takes to be missing.
_HIDDEN = frozenset(filter(None, os.environ.get("DYNAMOTOR_HIDE_NAMES", "").split(",")))
MISSING = object()
_RANGE = "{}.{} to {}.{}".format(*TESTED[0], *TESTED[1])


@dataclass(frozen=True)
class Capability:
    """A part of the compiler that can be off, and the consequence for the user."""

    name: str
    when_off: str
    is_built: bool = True  # whether this PyTorch is meant to have it


COMPILE = Capability("compile", "every function runs in eager PyTorch")
GPU = Capability("gpu", "graphs on NVIDIA GPUs run in eager PyTorch", is_built=torch.version.cuda is not None)
DDP = Capability("ddp", "DistributedDataParallel's own reducer averages gradients, after the backward")
FSDP = Capability("fsdp", "the hooks of fully_shard run between graphs, in eager PyTorch")
ADAPTER = Capability("torch.compile", "backends of torch.compile cannot be used, nor ours under it")
RULE = Capability("rule", "calls of this function break the graph")


@dataclass
class PrivateName:
    """A private name: the places where versions of PyTorch have it, newest first."""

    paths: tuple[str, ...]
    off: Capability
    instead: Any = MISSING
    found: str | None = None
    late: bool = field(default=False, kw_only=True)  # probed at its first use: it imports a module

    def value(self) -> Any:
        """The object, its public equivalent, or an `MissingName` class that raises DM150 when it is used."""
        for path in self.paths:
            if path not in _HIDDEN and (value := _find(path)) is not MISSING:
                self.found = path
                return value
        return absent(self.paths[0], self.off) if self.instead is MISSING else self.instead

    def state(self) -> str:
        """Where it was found, or the consequence of its absence."""
        if self.found is not None:
            return self.found
        if self.instead is not MISSING:
            return "missing; a public equivalent is used"
        return f"missing; {self.off.name} is off: {self.off.when_off}"

    @property
    def is_lost(self) -> bool:
        return self.found is None and self.instead is MISSING


table: list[PrivateName] = []


def _find(path: str) -> Any:
    """The object at a dotted path, its modules imported; `MISSING` where there is none."""
    found = _attributes_of_loaded(path)
    for module in (
        path.rpartition(".")[0],
        path,
    ):  # a package may hide a module behind a function of its name
        if found is MISSING:
            try:
                importlib.import_module(module)
            except ImportError:
                continue
            found = _attributes_of_loaded(path)
    return found


def _attributes_of_loaded(path: str) -> Any:
    """The object at a dotted path, from the innermost module on it that is loaded."""
    parts = path.split(".")
    at = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in sys.modules)
    found: Any = sys.modules[".".join(parts[:at])]
    for part in parts[at:]:
        found = getattr(found, part, MISSING)
    return found


class MissingName(type):
    """The type of stand-ins for missing names: classes without instances, so that they can be base classes,
    keys and arguments of `isinstance` wherever the name would be.
    """

    path: str
    off: Capability

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise _error(cls.path, cls.off)

    def __getattr__(cls, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return absent(f"{cls.path}.{attribute}", cls.off)


def absent(path: str, off: Capability) -> Any:
    """A stand-in for a missing name."""
    return MissingName(path.rpartition(".")[2], (), {"path": path, "off": off})


def _error(path: str, off: Capability) -> CaptureError:
    return CaptureError(
        "DM150",
        f"PyTorch {torch.__version__} has no {path}: {off.when_off}",
        why="the compiler uses private parts of PyTorch, which versions move and remove",
        cure=f"use PyTorch {_RANGE}, or a newer dynamotor; `python -m dynamotor doctor` lists the names",
    )


def name(*paths: str, off: Capability = COMPILE, instead: Any = MISSING) -> Any:
    """Add a row and look it up now. instead: what does the same with public means."""
    row = PrivateName(paths, off, instead)
    table.append(row)
    return row.value()


def late(*paths: str, off: Capability = COMPILE) -> Callable[[], Any]:
    """Add a row that is looked up when the returned function is called."""
    row = PrivateName(paths, off, late=True)
    table.append(row)
    return row.value


class Attribute:
    """A private attribute that changes while the program runs."""

    def __init__(self, path: str, off: Capability) -> None:
        self.owner, _, self.attribute = path.rpartition(".")
        self.row = PrivateName((path,), off)
        table.append(self.row)
        self.row.value()

    def get(self) -> Any:
        """Its present value."""
        return self.row.value() if self.row.is_lost else getattr(_find(self.owner), self.attribute)

    def set(self, value: Any) -> None:
        """Let it hold something else."""
        setattr(_find(self.owner), self.attribute, value)


def attribute(path: str, off: Capability = COMPILE) -> Attribute:
    """Add a row for an attribute that changes."""
    return Attribute(path, off)


def lost(off: Capability) -> list[str]:
    """The missing names that turn a capability off."""
    rows = table if off.is_built else ()
    return [row.paths[0] for row in rows if row.off is off and row.is_lost and not row.late]


def why_off(off: Capability) -> str:
    """The reason why a capability is off; empty where it is on."""
    missing = lost(off)
    return f"PyTorch {torch.__version__} has no {', '.join(missing)}" if missing else ""


def require(off: Capability) -> None:
    """Raise DM150 where a capability is off."""
    for path in lost(off):
        raise _error(path, off)


def tell() -> None:
    """Warn once about missing names, and about a PyTorch that the tests have not run on."""
    for off in dict.fromkeys(row.off for row in table):
        if why := why_off(off):
            _warn("DM150", f"{why}: {off.when_off}")
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if not TESTED[0] <= version <= TESTED[1]:
        _warn("DM151", f"this dynamotor was tested with PyTorch {_RANGE}, not with {torch.__version__}")


def _warn(code: str, text: str) -> None:
    warn_once(text, f"[{code}] {text}", CompatibilityWarning)
