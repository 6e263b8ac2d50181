"""Room for deep recursion while compiling: a chain of ops is as deep as it is long.

>>> with deep_recursion():
...     lower_graph(gm, info)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

FRAMES = 20_000


@contextlib.contextmanager
def deep_recursion() -> Iterator[None]:
    """Raise Python's limit inside."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, FRAMES))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
