"""What lies beside the package in a checkout of the repository, and in no wheel."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

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
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return importlib.import_module(f"bench.{name}")
