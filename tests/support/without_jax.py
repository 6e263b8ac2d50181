"""A pytest plugin that hides jax and dynamotor-xla, for the core's tests: `make test-core`."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

for name in ("jax", "jaxlib", "dynamotor.xla"):
    sys.modules[name] = None  # type: ignore[assignment]  # an import of it is a ModuleNotFoundError

_entry_points = importlib.metadata.entry_points


def _of_others(**chosen: Any) -> Any:
    """Entry points of a group without those of dynamotor-xla, which may be installed."""
    found = _entry_points(**chosen)
    if not chosen:
        return found
    return importlib.metadata.EntryPoints(p for p in found if not p.value.startswith("dynamotor.xla"))


importlib.metadata.entry_points = _of_others
