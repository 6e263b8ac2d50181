"""operator.itemgetter, attrgetter and methodcaller as closures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def itemgetter(*items: Any) -> Callable[[Any], Any]:
    if len(items) == 1:
        item = items[0]
        return lambda obj: obj[item]
    return lambda obj: tuple([obj[item] for item in items])


def _resolve(obj: Any, name: str) -> Any:
    for part in name.split("."):
        obj = getattr(obj, part)
    return obj


def attrgetter(*names: str) -> Callable[[Any], Any]:
    if len(names) == 1:
        name = names[0]
        return lambda obj: _resolve(obj, name)
    return lambda obj: tuple([_resolve(obj, name) for name in names])


def methodcaller(name: str, /, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda obj: getattr(obj, name)(*args, **kwargs)
