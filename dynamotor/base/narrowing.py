"""Values whose class the caller knows and a type checker does not."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def checked(kind: type[T], value: object) -> T:
    """The value, as an instance of `kind`.

    >>> checked(fx.Node, node.args[0]).meta["val"]
    """
    assert isinstance(value, kind), f"{value!r} is no {kind.__name__}"
    return value
