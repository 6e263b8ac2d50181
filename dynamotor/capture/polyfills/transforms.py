"""Functions that function transforms hand out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def pullback(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What `vjp` gives besides the outputs."""

    def wrapper(cotangents: Any) -> Any:
        return run(cotangents)

    return wrapper
