"""What compiled callables do at a call: run what fits and compile what does not, or less.

>>> with set_stance("fail_on_recompile"):
...     fast(x)          # UsageError when that would compile
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .. import _C
from ..base.errors import SettingWarning, UsageError
from ..base.events import warn_once

STANCES = ("default", "force_eager", "eager_on_recompile", "fail_on_recompile")
_STRICTER = ("default", "eager_on_recompile", "fail_on_recompile", "force_eager")  # each than those before it
# Variables with which users turn torch.compile off, read when dynamotor is imported.
SWITCHES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
_current = "default"
Function = TypeVar("Function", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


def switched_off() -> str:
    """The variable of the environment that turns compilation off; "" if none does."""
    return next((name for name in SWITCHES if os.environ.get(name) == "1"), "")


_OFF = bool(switched_off())
_C.set_force_eager(_OFF)


def stance() -> str:
    """The strictest of ours, torch.compiler's, and that of the environment."""
    return max("force_eager" if _OFF else _current, _of_torch(), key=_STRICTER.index)


def said_by() -> str:
    """Where the stance comes from."""
    if _OFF:
        return f"{switched_off()}=1"
    theirs = _STRICTER.index(_of_torch()) > _STRICTER.index(_current)
    return "torch.compiler.set_stance" if theirs else "dynamotor.set_stance"


def may_compile(name: str, reasons: Callable[[], str] = lambda: "") -> bool:
    """Whether something may be compiled now. UsageError (DM111) under "fail_on_recompile"; `reasons`: why no
    program fits.
    """
    holds = stance()
    if holds == "fail_on_recompile":
        why = reasons()
        raise UsageError(
            "DM111",
            f"{name} would be compiled",
            why="the stance is fail_on_recompile" + (f": {why}" if why else ""),
            cure="call it with such arguments before set_stance",
        )
    return holds == "default"


def _of_torch() -> str:
    """The stance of `torch.compiler.set_stance`, which imports the module where it is stored. The C extension
    reads "force_eager" there at each call (csrc/dispatch.c)."""
    if getattr(sys.modules.get("torch._dynamo.config"), "disable", False):
        return "eager_on_recompile"  # programs that exist still run
    stored = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    name = getattr(stored, "stance", "default")
    forced = getattr(stored, "backend", None)
    if name not in STANCES or forced is not None:
        said = f"stance {name!r}" if forced is None else f"force_backend={forced!r}"
        warn_once(
            f"torch.compiler {said}",
            f"torch.compiler.set_stance: {said} is taken as 'default' by functions that dynamotor compiled",
            SettingWarning,
        )
    return name if name in STANCES else "default"


def _set(name: str) -> None:
    global _current
    _current = name
    _C.set_force_eager(_OFF or name == "force_eager")


class set_stance(contextlib.ContextDecorator):  # noqa: N801
    """Set the stance of this process: from the call on, for a `with` block, or for the calls of a decorated
    function.

    "default": compile where nothing fits. "force_eager": nothing compiled runs. "eager_on_recompile": what
    fits runs, the rest runs eager. "fail_on_recompile": UsageError (DM111) where something would be compiled.
    Guards are evaluated in all of them: `skip_guard_eval_unsafe` is taken for torch.compiler's signature. A
    stance of `torch.compiler.set_stance` holds, too: the stricter one of both.
    Raises UsageError (DM110) for others.
    """

    def __init__(self, stance: str = "default", *, skip_guard_eval_unsafe: bool = False) -> None:
        if stance not in STANCES:
            raise UsageError("DM110", f"unknown stance {stance!r}", cure=f"one of {', '.join(STANCES)}")
        self.name, self.before = stance, _current
        _set(stance)

    def __call__(self, function: Function) -> Function:
        _set(self.before)
        return super().__call__(function)

    def __enter__(self) -> set_stance:
        _set(self.name)
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
