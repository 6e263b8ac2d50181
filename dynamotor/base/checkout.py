"""Parts of a checkout of the repository that no wheel contains."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .config import config
from .errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


def bench(name: str, root: Path = ROOT) -> ModuleType:
    """A module of the top-level `bench`; UsageError DM122 where there is none."""
    if not (root / "bench" / "__init__.py").is_file():
        raise UsageError(
            "DM122",
            "the benchmarks and their models are not installed",
            why=f"they are the folder `bench` of the repository, which no wheel holds; {root} has none",
            cure="clone the repository, `pip install -e .` there, and give the command again",
        )
    if "bench" not in sys.modules:  # by its path: a program's own `bench` may come first on sys.path
        place = root / "bench" / "__init__.py"
        spec = importlib.util.spec_from_file_location(
            "bench", place, submodule_search_locations=[str(place.parent)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules["bench"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["bench"])
    return importlib.import_module(f"bench.{name}")


def prove(what: str, *args: Any, root: Path = ROOT) -> None:
    """Under `config.verify`, the check of `bench/proofs.py` of this name; none where there is no checkout."""
    found = _proofs(root) if config.verify else None
    if found is not None:
        getattr(found, what)(*args)


@functools.cache
def _proofs(root: Path) -> ModuleType | None:
    return bench("proofs", root) if (root / "bench" / "proofs.py").is_file() else None
