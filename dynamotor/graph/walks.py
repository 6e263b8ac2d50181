"""Walks over graphs with a stack of their own: chains are longer than Python's stack is deep.

>>> reached(outputs, lambda node: node.all_input_nodes)  # what outputs depend on, with them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def reached(start: Iterable[T], following: Callable[[T], Iterable[T]]) -> set[T]:
    """What one comes to from these, these with it."""
    found: set[T] = set()
    todo = list(start)
    while todo:
        item = todo.pop()
        if item not in found:
            found.add(item)
            todo.extend(following(item))
    return found


def in_order(start: Iterable[T], needs: Callable[[T], Iterable[T]]) -> list[T]:
    """The same, each behind what it needs; the last of `start` is looked at first."""
    placed: dict[T, None] = {}
    stack = [(item, False) for item in start]
    while stack:
        item, ready = stack.pop()
        if ready:
            placed[item] = None
        elif item not in placed:
            stack.append((item, True))
            stack.extend((each, False) for each in needs(item) if each not in placed)
    return list(placed)
