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


def merge_sort(items: list[Any], keys: list[Any], reverse: bool) -> list[Any]:
    """Stable insertion sort of items by keys that only `<` can compare."""
    order: list[int] = []
    for i in range(len(items)):
        at = len(order)
        while at > 0 and (keys[order[at - 1]] < keys[i] if reverse else keys[i] < keys[order[at - 1]]):
            at -= 1
        order.insert(at, i)
    return [items[i] for i in order]
