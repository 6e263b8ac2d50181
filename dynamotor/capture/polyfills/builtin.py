"""Builtins that call back into user code, as plain Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def iter_until(fn: Callable[[], Any], sentinel: Any) -> Iterator[Any]:
    """`iter(fn, sentinel)`."""
    while True:
        value = fn()
        if value == sentinel:
            return
        yield value
