"""Regions of a program: `step` and `compile`, whose body is one graph, and eager mode, in which each op is
one.

>>> with step():
...     loss = train(batch)
>>> fast = compile(train, full_graph=True)
>>> eager_mode(True)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dynamotor.extension_api import Event, XlaError, subscribe

from . import sync as _sync
from .compat import TorchDispatchMode, tree_leaves
from .errors import require
from .tensor import is_xla, node_of


class _Eager(TorchDispatchMode):
    """Runs each op on xla tensors at once, as a graph of its own."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((result, args)):
            if is_xla(value):
                _sync.flush(node_of(value).lane, "eager mode")
                break
        return result


_mode: list[_Eager] = []


def is_eager_mode() -> bool:
    """Whether each op runs at once instead of being recorded."""
    return bool(_mode)


def eager_mode(enable: bool) -> None:
    """Switch eager mode: with True each op on an xla tensor runs at once; regions of `compile` stay graphs.
    For this thread.
    """
    if enable and not _mode:
        _sync.sync()
        _mode.append(_Eager())
        _mode[0].__enter__()
    elif not enable and _mode:
        _mode.pop().__exit__(None, None, None)


@contextlib.contextmanager
def eager_mode_context(enable: bool) -> Iterator[None]:
    """Within this, eager mode is switched on or off."""
    before = is_eager_mode()
    eager_mode(enable)
    try:
        yield
    finally:
        eager_mode(before)


_refusing: list[Callable[[], None]] = []  # ends the refusal


def allow_execution(allowed: bool) -> None:
    """With False, each execution is an error (DM663) from now on."""
    while _refusing:
        _refusing.pop()()
    if not allowed:
        _refusing.append(subscribe(_Region("the program", True, None)._check))


def step() -> contextlib.AbstractContextManager[None]:
    """`with step():` earlier records run first, and those of the body run, as one graph, at
    its end.
    """
    return _Region("the step", full_graph=False, limit=None)


def compile(
    f: Callable[..., Any] | None = None,
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
) -> Any:
    """Make the body of a function one graph a call; also a decorator (`@compile()`) and, without `f`, a
    context manager.

    f: function or module. full_graph: raise DM663, with the line, where the body needs a value early
    (`.item()`, `print`, an op that falls back to the CPU) and would be cut into several graphs; what replicas
    tell each other before the first operation, such as DDP's order of buckets, may be read. name: how
    errors call it. max_different_graphs: raise DM664 when calls compiled more graphs than this (shapes or
    constants keep changing).
    """
    title = name or getattr(f, "__qualname__", None) or ("the region" if f is None else type(f).__name__)
    region = _Region(title, bool(full_graph), max_different_graphs)
    if f is None:
        return region
    if not isinstance(f, torch.nn.Module):
        return region(f)

    @functools.wraps(f.forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs)

    return region(call)


class _Region(contextlib.ContextDecorator):
    """Ops recorded from `__enter__` to `__exit__` are one graph. As a decorator, each call is a region."""

    def __init__(
        self, name: str, full_graph: bool, limit: int | None, graphs: list[str] | None = None
    ) -> None:
        self.name, self.full_graph, self.limit, self.at_end = name, full_graph, limit, False
        self.graphs: list[str] = (
            [] if graphs is None else graphs
        )  # why each graph was compiled, over all calls

    def _recreate_cm(self) -> _Region:
        return _Region(self.name, self.full_graph, self.limit, self.graphs)

    def __enter__(self) -> None:
        self.eager = is_eager_mode()
        eager_mode(False)
        _sync.sync()
        self.at_end = False
        self.unsubscribe = subscribe(self._check)

    def __exit__(self, *exc: object) -> None:
        try:
            self.at_end = True
            _sync.sync()
        finally:
            self.unsubscribe()
            eager_mode(self.eager)

    def _check(self, event: Event) -> None:
        if event.kind == "xla.flush" and self.full_graph and not (self.at_end or event.data["apart"]):
            raise XlaError(
                "DM663",
                f"{self.name} is not one graph",
                why="Unexpected execution happens inside the compiled function, exiting at the line that "
                f"needs a value before its end ({event.data['cause']})",
                cure="move that line out of it, or compile with full_graph=False",
                where=event.data["line"],
            )
        if event.kind == "xla.compile" and self.limit is not None:
            self.graphs.append(event.data["reason"])
            require(
                len(self.graphs) <= self.limit,
                "DM664",
                f"{self.name} made more than {self.limit} different graphs",
                why=self.graphs[-1],
                cure="pad inputs to few shapes and keep changing numbers in tensors, or raise "
                "max_different_graphs",
            )
