"""A registry of rules: one decorated function or one row each, looked up by key.

>>> rules = Registry("lowering")
>>> @rules.register("relu", "relu6")
... def _relu(x): ...
>>> rules["relu"] is _relu
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

MaybeNone = Any  # in a union, as typeshed has it: None too, but where code relies on it there is something


K = TypeVar("K")
F = TypeVar("F")


class Registry(Generic[K, F]):
    """Rules by key; a key registered twice is a mistake and raises KeyError."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._rules: dict[K, F] = {}

    def register(self, *keys: K) -> Callable[[F], F]:
        """Decorator: the function is the rule of each key."""

        def add(rule: F) -> F:
            for key in keys:
                self.add(key, rule)
            return rule

        return add

    def add(self, key: K, rule: F) -> None:
        """Add one row."""
        if key in self._rules:
            raise KeyError(f"{self.name} rule for {key!r} is registered twice")
        self._rules[key] = rule

    def get(self, key: K) -> F | None:
        return self._rules.get(key)

    def __getitem__(self, key: K) -> F:
        return self._rules[key]

    def __contains__(self, key: object) -> bool:
        return key in self._rules

    def __iter__(self) -> Iterator[K]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)


def register_all(
    register: Callable[..., Callable[..., Any]],
    rows: Iterable[tuple[Iterable[Any], Callable[..., Any]]],
) -> None:
    """A table of rules of one line: `register(*keys)(rule)` for each row (keys, rule)."""
    for keys, rule in rows:
        register(*keys)(rule)
