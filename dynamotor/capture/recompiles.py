"""Log of compilations: an ID for each, and each recompile once, in terms of the user's program.

>>> with Compilations().next():
...     log("breaks", "a graph break")      # with the ID "0/0"
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

from ..base.events import compile_id, emit, log
from .guards import ConstEquals
from .symbolic_inputs import FloatIs, SizePolicy

P = ParamSpec("P")
R = TypeVar("R")
_callables = itertools.count()


class Compilations:
    """The compilations of one callable: the second program of the first callable has the ID "0/1"."""

    def __init__(self) -> None:
        self.number, self.programs = -1, 0

    def upcoming(self) -> str:
        """The ID of the next compilation."""
        if self.number < 0:
            self.number = next(_callables)
        return f"{self.number}/{self.programs}"

    @contextlib.contextmanager
    def next(self) -> Iterator[None]:
        """Number one more compilation, for the duration of a `with` block."""
        before = compile_id.set(self.upcoming())
        self.programs += 1
        try:
            yield
        finally:
            compile_id.reset(before)


class _Call(threading.local):
    depth = 0
    reported = False


_call = _Call()


def one_report(miss: Callable[P, R]) -> Callable[P, R]:
    """Log at most one recompile within a call of `miss`: the rest of a function behind a graph break is
    compiled again for the same reason as the part before it.
    """

    @functools.wraps(miss)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        _call.depth += 1
        try:
            return miss(*args, **kwargs)
        finally:
            _call.depth -= 1
            if not _call.depth:
                _call.reported = False

    return call


def by_reason(reasons: Iterable[str], failed: Iterable[str]) -> str:
    """Each reason once, with the IDs of the programs that do not serve the call for it."""
    programs: dict[str, list[str]] = {}
    for reason, program in zip(reasons, failed):
        programs.setdefault(reason, []).append(program)
    return "; ".join(f"{reason} ({', '.join(found)})" for reason, found in programs.items())


def report(name: str, title: str, entries: Sequence[Any], reasons: list[str], new: str) -> None:
    """Say why a callable is compiled again; `reasons` has one text per entry, none of which serves the call.
    `new`: the ID of the program that is made, "" where the call runs eager since there are as many as may be.
    """
    failed = [e.info.data.compile_id for e in entries]
    before = compile_id.set(new)
    try:
        emit("recompile", name=name, reasons=reasons, failed=failed, new=new)
        if not _call.reported:
            _call.reported = True
            then = f"is compiled again as {new}" if new else "runs in eager PyTorch, for its many programs"
            log("recompiles", lambda: f"{title} {then}: {by_reason(reasons, failed)}")
    finally:
        compile_id.reset(before)


def why_many(entries: tuple[Any, ...], policy: SizePolicy, dynamic: bool | None) -> str:
    """Why a size or number that differs between calls is no symbol, if that explains the number of programs,
    and what to do about it.
    """
    fixed = {source: guard for e in entries for source, guard in e.info.data.sizes.fixed.items()}
    for source, guard in fixed.items():
        if type(guard) is FloatIs:
            return (
                f"{source} differs between calls and is needed as a number at {guard.where}: pass a tensor. "
            )
        return (
            f"{source} differs between calls and is needed as a number at {guard.where} (range(), indexing a list, text, "
            "true division and the like): keep it an integer of tensor calls there, or compile a smaller part. "
        )
    for row in entries[0].info.guards if entries else ():
        if type(row) is ConstEquals and type(row.value) is float and row.source in policy.varying:
            return (
                f"{row.source} differs between calls and is needed as a number (sums, products, quotients and "
                "comparisons with a tensor of floats take it as an input): pass a tensor. "
            )
    if policy.varying and policy.refused:
        return f"{next(iter(policy.varying))} differs between calls, and with symbols for sizes: {policy.refused}. "
    if policy.varying and dynamic is False:
        return (
            f"{next(iter(policy.varying))} differs between calls, and dynamic=False compiles for each size. "
        )
    return ""
