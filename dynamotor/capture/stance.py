"""What compiled callables do at a call: run what fits and compile what does not, or less.

>>> with set_stance("fail_on_recompile"):
...     fast(x)          # UsageError when that would compile
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .. import _C
from ..base.errors import UsageError

STANCES = ("default", "force_eager", "eager_on_recompile", "fail_on_recompile")
_current = "default"
Function = TypeVar("Function", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


def stance() -> str:
    """The one that holds."""
    return _current


def _set(name: str) -> None:
    global _current
    _current = name
    _C.set_force_eager(name == "force_eager")


class set_stance(contextlib.ContextDecorator):  # noqa: N801
    """Set the stance of this process: from the call on, for a `with` block, or for the calls of a decorated
    function.

    "default": compile where nothing fits. "force_eager": nothing compiled runs. "eager_on_recompile": what
    fits runs, the rest runs eager. "fail_on_recompile": UsageError (DM111) where something would be compiled.
    Raises UsageError (DM110) for others.
    """

    def __init__(self, name: str) -> None:
        if name not in STANCES:
            raise UsageError("DM110", f"unknown stance {name!r}", cure=f"one of {', '.join(STANCES)}")
        self.name, self.before = name, _current
        _set(name)

    def __call__(self, function: Function) -> Function:
        _set(self.before)
        return super().__call__(function)

    def __enter__(self) -> set_stance:
        return self

    def __exit__(self, *error: object) -> None:
        _set(self.before)

    def _recreate_cm(self) -> set_stance:
        return set_stance(self.name)


def run(fn: Callable[P, R]) -> Callable[P, R]:
    """A function whose calls run compiled programs and compile nothing."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with set_stance("eager_on_recompile"):
            return fn(*args, **kwargs)

    return call


RUN = run(run).__code__  # of its result
