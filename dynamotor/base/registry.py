"""A registry of rules: one decorated function or row each, by key; functions that are defined elsewhere.

>>> rules = Registry("lowering")
>>> @rules.register("relu", "relu6")
... def _relu(x): ...
>>> rules["relu"] is _relu
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

MaybeNone = Any  # in a union, as typeshed has it: None too, but where code relies on it there is something


K = TypeVar("K")
F = TypeVar("F")
P = ParamSpec("P")
R = TypeVar("R")


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


class Deferred(Generic[P, R]):
    """A function that one module calls and a module above it, which imports the first, defines.

    >>> relieve = Deferred[[], None]("relieve")
    >>> @relieve.define
    ... def _relieve(): ...
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._function: Callable[P, R] | None = None

    def define(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorator: calls go to this function. A second definition raises KeyError."""
        if self._function is not None:
            raise KeyError(f"{self.name} is defined twice")
        self._function = function
        return function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._function is None:
            raise NotImplementedError(f"{self.name} is not defined: its module was not imported")
        return self._function(*args, **kwargs)


def register_all(
    register: Callable[..., Callable[..., Any]],
    rows: Iterable[tuple[Iterable[Any], Callable[..., Any]]],
) -> None:
    """A table of rules of one line: `register(*keys)(rule)` for each row (keys, rule)."""
    for keys, rule in rows:
        register(*keys)(rule)
