"""A pytest plugin that hides jax and dynamotor-xla, for the core's tests: `make test-core`."""

from __future__ import annotations

import sys

for name in ("jax", "jaxlib", "dynamotor.xla"):
    sys.modules[name] = None  # type: ignore[assignment]  # an import of it is a ModuleNotFoundError
