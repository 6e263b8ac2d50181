"""Parts of this package that other distributions install: dynamotor-xla installs `dynamotor.xla`.

An extension names its parts in entry points, so that the core never imports it:

* group `dynamotor.backends`: backends by name, `(graph_module, example_inputs) -> callable`;
* group `dynamotor.run`: functions without arguments that an option of `python -m dynamotor run` calls.

>>> provided(BACKENDS, "xla")
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .errors import XlaError

BACKENDS, RUN = "dynamotor.backends", "dynamotor.run"
XLA = "dynamotor.xla"
_PACKAGE = XLA.partition(".")[0]


class MissingExtension(XlaError, ModuleNotFoundError):
    """An extension that is not installed."""

    def __init__(self, asked_for: str) -> None:
        super().__init__(
            "DM690",
            f"{asked_for} comes with dynamotor-xla, which is not installed",
            why="the XLA device and its backends are a distribution of their own",
            cure="pip install dynamotor[xla]",
        )


def _portions() -> list[str]:
    """Folders of `sys.path` with a part of this package: those named as it is and without an `__init__.py`,
    which a copy of the core would have."""
    found = [os.path.join(folder, _PACKAGE) for folder in sys.path if isinstance(folder, str)]
    return [path for path in found if os.path.isdir(path) and not os.path.exists(f"{path}/__init__.py")]


class _Finder:
    """Says which distribution an absent extension comes from. Last of `sys.meta_path`."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Never finds a module; raises `MissingExtension` for the name of an extension."""
        if name == XLA:
            raise MissingExtension(name)
        return None


def install() -> None:
    """Let Python find the parts of this package in folders of other distributions."""
    path = sys.modules[_PACKAGE].__path__
    path += [folder for folder in _portions() if folder not in path]
    if _Finder not in sys.meta_path:
        sys.meta_path.append(_Finder)


@functools.cache
def _points(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=group)}


def names(group: str) -> list[str]:
    """The names that extensions give a group of entry points."""
    return sorted(_points(group))


def provided(group: str, name: str) -> Any:
    """The object that an extension provides under a name; None where there is none of this name."""
    point = _points(group).get(name)
    return None if point is None else point.load()
