"""The share of aten calls that run in compiled graphs, counted alike for dynamotor and torch.compile: of the calls that
a program's compiled functions and modules make in eager, those that a compiler does not leave to eager. Graphs may
hold fewer calls than eager makes (a cast to the same type is none), so that the numbers of their calls do not compare.

Both captures give their graphs to one backend, which runs a graph op by op in a range of PyTorch's profiler. An aten
call counts as compiled inside of such a range. A call outside of every compiled function, of the backward, of the
measurement itself (`aside`) or of the compilation counts for neither.

>>> shares(program)["dynamotor"].share
1.0
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

import dynamotor
from dynamotor.capture.frontend import Compiler

ASIDE, GRAPH, COMPILED = "share: aside", "share: a graph", "share: a compiled function"
# Ranges in which nothing counts; PyTorch names those of the backward.
_NOT_COUNTED = re.compile(rf"{ASIDE}|autograd::engine.*|.*Backward\d*")
_OP = re.compile(r"(?!autograd::)\w+::\w+")
# They hand numbers to Python, take a tensor over as it is, or begin a backward.
_READS = frozenset(("item", "is_nonzero", "detach", "lift_fresh", "alias", "detach_", "ones_like"))


@dataclass
class Calls:
    """Aten calls in compiled graphs, and those that eager PyTorch ran, by name. `total`: those of the program in eager,
    where they are known."""

    compiled: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    total: int = 0

    @property
    def share(self) -> float | None:
        """The part that is not left to eager; None where nothing was counted."""
        total = self.total or self.compiled + self.eager.total()
        return max(0.0, 1 - self.eager.total() / total) if total else None


def aside() -> Any:
    """A region of a program whose calls are not counted."""
    return record_function(ASIDE)


def shares(program: Callable[[Callable[..., Any]], Any]) -> Iterator[tuple[str, Calls | Exception]]:
    """The calls of "dynamotor" and "torch.compile", or the error of one, beside those of eager."""
    total = 0
    for compiler in COMPILERS:
        try:
            calls = measured(program, compiler)
        except Exception as error:
            yield compiler, error
            continue
        total, calls.total = calls.eager.total() if compiler == "eager" else total, total
        if compiler != "eager":
            yield compiler, calls


def measured(program: Callable[[Callable[..., Any]], Any], compiler: str) -> Calls:
    """Run `program(compile)` in "eager", or with the capture of "dynamotor" or "torch.compile", and count."""
    theirs = torch.compile

    def compile_(fn: Any = None, **options: Any) -> Any:
        if fn is None:
            return lambda fn: compile_(fn, **options)
        options = {key: options[key] for key in ("fullgraph", "dynamic") if key in options}
        if compiler == "eager":
            return _marked(fn)
        return _marked(
            (dynamotor.compile if compiler == "dynamotor" else theirs)(fn, backend=_backend, **options)
        )

    around = _MARKS.get(compiler, contextlib.nullcontext)
    dynamotor.reset()
    torch._dynamo.reset()
    torch.compile = compile_
    try:
        with around(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            program(compile_)
    finally:
        torch.compile = theirs
    return count(profile.events())


def _marked(fn: Any) -> Any:
    """A compiled function, or the module itself, whose calls are ranges of the profiler."""
    if not isinstance(fn, torch.nn.Module):

        @functools.wraps(fn)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with record_function(COMPILED):
                return fn(*args, **kwargs)

        return marked

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with record_function(COMPILED):
            return super(cls, self).__call__(*args, **kwargs)

    own = object.__dict__["__class__"]  # a compiled module says that it is of the class of its module
    kind = own.__get__(fn)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__call__": call}
    cls: Any = type(kind.__name__, (kind,), names)
    own.__set__(fn, cls)
    return fn


def _backend(gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with record_function(GRAPH):
            return gm.forward(*args)

    return run


@contextlib.contextmanager
def _marks_compilation_of_ours() -> Iterator[None]:
    compile_ = Compiler.entry_for

    def marked(self: Compiler, *args: Any) -> Any:
        with aside():
            return compile_(self, *args)

    Compiler.entry_for = marked  # type: ignore[method-assign]
    try:
        yield
    finally:
        Compiler.entry_for = compile_  # type: ignore[method-assign]


@contextlib.contextmanager
def _marks_compilation_of_theirs() -> Iterator[None]:
    from torch._dynamo.callback import callback_handler

    open_: list[Any] = []

    def start(*args: Any) -> None:
        open_.append(aside())
        open_[-1].__enter__()

    def end(*args: Any) -> None:
        open_.pop().__exit__(None, None, None)

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)


COMPILERS = ("eager", "dynamotor", "torch.compile")
_MARKS = {"dynamotor": _marks_compilation_of_ours, "torch.compile": _marks_compilation_of_theirs}


def count(events: Any) -> Calls:
    """The outermost aten calls of compiled functions, by where they ran."""
    found = Calls()
    for event in events:
        if _OP.fullmatch(event.name):
            ranges = list(_around(event))
            if COMPILED not in ranges or any(
                _OP.fullmatch(name) or _NOT_COUNTED.fullmatch(name) for name in ranges
            ):
                continue
            op = event.name.partition("::")[2]
            if GRAPH in ranges:
                found.compiled += op not in _READS
            elif op not in _READS:
                found.eager[event.name] += 1
    return found


def _around(event: Any) -> Iterator[str]:
    while (event := event.cpu_parent) is not None:
        yield event.name
