"""Coded errors: every refusal says what happened, where in the user's code, why, and what to do about it.

>>> raise BuildError("DM301", "the C++ compiler was not found", why="neither $CXX nor g++ is on PATH",
...                  cure="install g++, or set dynamotor.config.cxx")
"""

from __future__ import annotations

import copyreg
import linecache
import os
import sys
from dataclasses import dataclass
from types import FrameType, FunctionType, TracebackType
from typing import Any

_STANDARD = os.path.dirname(linecache.__file__) + os.sep
_STUB = (lambda: (yield)).__code__  # on one line: positions count from the first
_LIBRARIES = ("dynamotor", "torch", "jax", "jaxlib")


@dataclass(frozen=True)
class UserLine:
    """A line of the user's program: file, 1-based line number and function name."""

    filename: str
    lineno: int
    function: str = ""

    def __str__(self) -> str:
        text = linecache.getline(self.filename, self.lineno).strip()
        where = f"{self.filename}:{self.lineno}" + (f" in {self.function}" if self.function else "")
        return f"{where}\n    {text}" if text else where

    def on_one_line(self) -> str:
        """The line without a line break, for lists."""
        return ": ".join(part.strip() for part in str(self).split("\n"))

    def entry(self) -> str:
        """The line as a traceback prints it."""
        text = linecache.getline(self.filename, self.lineno).strip()
        return f'  File "{self.filename}", line {self.lineno}, in {self.function}\n' + (
            text and f"    {text}\n"
        )

    def traceback(self) -> TracebackType:
        """A traceback that shows this line."""
        name = self.function
        return traceback_at(self.lineno, co_filename=self.filename, co_name=name, co_qualname=name)


def traceback_at(line: int, inner: TracebackType | None = None, **names: str) -> TracebackType:
    """A traceback of one more line around `inner`; `names` are those of its code object. Its frame is that of
    a generator, which has no callers: theirs would hold the error.
    """
    frame = FunctionType(_STUB.replace(**names, co_firstlineno=line), {})().gi_frame  # type: ignore[arg-type]
    return TracebackType(inner, frame, frame.f_lasti, line)


def folders_of(package: str) -> tuple[str, ...]:
    """The folders that hold a package's files, each with a separator at its end; none where it is not loaded.
    Extensions of this package may have folders of their own.
    """
    return tuple([folder + os.sep for folder in getattr(sys.modules.get(package), "__path__", ())])


def user_line() -> UserLine | None:
    """The innermost line of the running program that is neither ours nor a library's."""
    inside = ("<", *[folder for name in _LIBRARIES for folder in folders_of(name)])
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        standard = name.startswith(_STANDARD) and "site-packages" not in name
        if not standard and not name.startswith(inside):
            return UserLine(name, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


SITE = "https://dynamotor.github.io/dynamotor"


def link(code: str) -> str:
    """The address of an error code's description."""
    return f"{SITE}/errors/#{code.lower()}"


class RaisedWhen(Exception):
    """What says in one statement when it is raised: `NotPlain.when(recipe.constants, "a constant")`."""

    @classmethod
    def when(cls, bad: Any, *args: Any, **kwargs: Any) -> None:
        """Raise it, made of the other arguments, where `bad` is true; the text must cost nothing."""
        if bad:
            raise cls(*args, **kwargs)


class DynamotorWarning(UserWarning):
    """Base of all warnings of the compiler."""


class EagerWarning(DynamotorWarning):
    """A callable, graph or step runs in eager PyTorch, in part or as a whole."""


class RecompileWarning(DynamotorWarning):
    """A callable has as many programs as it may have; further variants run in eager PyTorch."""


class SettingWarning(DynamotorWarning):
    """A setting or argument has no effect, or a file that it names cannot be used."""


class CompatibilityWarning(DynamotorWarning):
    """This PyTorch has not been tested, or lacks a private name that a capability needs."""


class DynamotorError(RuntimeError, RaisedWhen):
    """Base of all errors raised by the compiler. `code` is stable (docs/errors.md lists them)."""

    def __init__(
        self, code: str, what: str, *, why: str = "", cure: str = "", where: UserLine | None = None
    ) -> None:
        self.code, self.what, self.why, self.cure, self.where = code, what, why, cure, where
        lines = [f"[{code}] {what}"]
        lines += [f"  at {where}"] if where else []
        lines += [f"  cause: {why}"] if why else []
        lines += [f"  what to do: {cure}"] if cure else []
        lines += [f"  more: {link(code)}"]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return vars(copyreg)["__newobj__"], (type(self), *self.args), self.__dict__

    def add(self, line: str) -> None:
        """One more line of its text."""
        self.args = (f"{self}\n  {line}",)


class UsageError(DynamotorError, ValueError):
    """DM1xx: an argument or a setting is wrong."""


class CaptureError(DynamotorError):
    """DM2xx: the program could not be captured and `fullgraph=True` or `config.strict` forbids breaking the
    graph.
    """


class BuildError(DynamotorError):
    """DM3xx: generated code could not be built or loaded."""


class BackendError(DynamotorError):
    """DM4xx: a backend raised or returned something that cannot be called."""


class XlaError(DynamotorError):
    """DM6xx: the XLA device, its collectives, or the files and tools around it."""


class DistributedError(DynamotorError):
    """DM7xx: processes that train together disagree, or one of them is gone."""


class InternalError(DynamotorError):
    """DM9xx: a check of the compiler's own found a graph or a program that must not be."""


def is_mistake(error: BaseException) -> bool:
    """Whether our own code is at fault: a check of ours failed, or a line of the package raised what no
    program of the user's and no op of PyTorch's does there.
    """
    if isinstance(error, DynamotorError):  # some are of Python's kinds, too
        return isinstance(error, InternalError)
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    ours = last is not None and last.tb_frame.f_code.co_filename.startswith(folders_of("dynamotor"))
    return ours and isinstance(error, (AssertionError, AttributeError, KeyError, NameError, TypeError))
