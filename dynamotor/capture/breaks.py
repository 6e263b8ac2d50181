"""Why a trace stopped: `Unsupported` carries one `BreakReason`, which logs, `explain` and strict errors all
show.

>>> raise unsupported("side-effect", "print() writes to the terminal", cure="call it outside the compiled function")
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ..base.errors import CaptureError, UserLine, link

# Kind of break -> stable error code (docs/errors.md).
CODES: dict[str, str] = {
    "data-dependent": "DM210",
    "side-effect": "DM211",
    "unsupported-call": "DM212",
    "unsupported-op": "DM213",
    "unsupported-value": "DM214",
    "unsupported-mutation": "DM215",
    "random": "DM216",
    "context": "DM217",
    "modes": "DM217",  # the stack of modes itself is read
    "generator": "DM218",
    "reconstruct": "DM219",
    "tensor-subclass": "DM220",
    "autograd": "DM221",
    "disabled": "DM222",
    "too-long": "DM223",
    "raised": "DM224",
    "finalizer": "DM225",
    "loop": "DM226",
    "transform": "DM227",
    "frames": "DM228",
    "sharded": "DM460",
}

# Cures for users, where the rule that refused has no better one (docs/errors.md has these, too).
CURES: dict[str, str] = {
    "data-dependent": "keep the value in tensors (torch.where, masks)",
    "side-effect": "move it out of the compiled function",
    "unsupported-call": "call it outside of the compiled function, make it an operator "
    "(torch.library.custom_op), or accept the break",
    "unsupported-op": "rewrite it with supported operations, or accept the break",
    "unsupported-value": "pass plain numbers, tensors, containers or modules, or accept the break",
    "unsupported-mutation": "write outside of the compiled function, or return the new value",
    "random": "torch.rand and its kin, or pass the number as an argument",
    "context": "enter it around the compiled function",
    "modes": "ask outside of the compiled function",
    "generator": "make a list of it",
    "reconstruct": "make the object outside of the compiled function",
    "tensor-subclass": "pass plain tensors",
    "autograd": "call it outside of the compiled function",
    "disabled": "take the mark away, or accept the break",
    "transform": "keep the function free of effects",
    "frames": "pass the needed value as an argument",
    "sharded": "accept the break, or change what only the hooks can do",
}


_TORCH = os.path.dirname(torch.__file__) + os.sep


def _in_torch(line: UserLine) -> bool:
    return line.filename.startswith(_TORCH)


@dataclass(frozen=True)
class BreakReason:
    """One reason for a graph break: its kind, what happened, why it cannot be captured, the user's options,
    and where.
    """

    kind: str
    what: str
    cause: str = ""
    cure: str = ""
    stack: tuple[UserLine, ...] = ()

    @property
    def code(self) -> str:
        return CODES[self.kind]

    @property
    def where(self) -> UserLine | None:
        """The innermost user line."""
        return self.stack[-1] if self.stack else None

    @property
    def own_line(self) -> UserLine | None:
        """The innermost line outside of PyTorch; the innermost one, if all are inside."""
        return next((line for line in reversed(self.stack) if not _in_torch(line)), self.where)

    def error(self) -> CaptureError:
        """The same reason as an error, for `fullgraph=True`."""
        return CaptureError(self.code, self.what, why=self.cause, cure=self.cure, where=self.own_line)

    def __str__(self) -> str:
        text = f"[{self.code}] {self.what}" + (f": {self.cause}" if self.cause else "")
        own, inside = self.own_line, self.where
        if own is not None:
            text += f"\n  at {own}"
            text += f"\n  inside PyTorch: {inside.on_one_line()}" if inside is not own and inside else ""
            callers = self.stack[: self.stack.index(own)]
            text += "".join(
                f"\n  called from {line.on_one_line()}" for line in reversed(callers) if not _in_torch(line)
            )
        text += f"\n  what to do: {self.cure}" if self.cure else ""
        return f"{text}\n  more: {link(self.code)}"


class OfTrace(Exception):
    """Base of exceptions raised and caught within a trace. A frame that raises one by its name is in a cycle with it,
    through the traceback, and so are the frames of all callers and their variables: `let_go` ends these.
    """

    _made: ClassVar[list[OfTrace]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._made.append(self)

    @classmethod
    def let_go(cls) -> None:
        """Release the frames of all tracebacks raised so far."""
        while cls._made:
            cls._made.pop().__traceback__ = None


class Unsupported(OfTrace):
    """Raised anywhere in a trace to break the graph before the current instruction."""

    def __init__(self, reason: BreakReason) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.frames: tuple[Any, ...] = ()  # the inlined frames where it was raised
        self.read_at: tuple[Any, ...] = ()  # frames and their steps where the number in question was read
        self.uncaptured_calls = False  # with `whole`: the callees are not captured either
        self.whole = False  # discard the captured part, run the whole call in eager PyTorch

    def at(self, stack: tuple[UserLine, ...]) -> Unsupported:
        """Fill in the user's stack, once."""
        if not self.reason.stack:
            self.reason = replace(self.reason, stack=stack)
        return self


class Stop(Exception):
    """Raised by the interpreter when it reaches the instruction before which this trace is to be cut."""


def unsupported(kind: str, what: str, cause: str = "", cure: str = "") -> Unsupported:
    """An `Unsupported` to raise; `kind` is a key of `CODES`."""
    assert kind in CODES, kind
    return Unsupported(BreakReason(kind, what, cause, cure or CURES.get(kind, "")))


def unsupported_if(bad: Any, kind: str, what: str, cause: str = "", cure: str = "") -> None:
    """Raise `unsupported(...)` if `bad`; the texts are evaluated in any case."""
    if bad:
        raise unsupported(kind, what, cause, cure)


def too_deep(happened: str) -> Unsupported:
    """The break of a recursion that capture cannot follow; the whole function runs eager."""
    stop = unsupported("too-long", happened, "the recursion does not end, or is very deep")
    stop.whole = True  # frames rebuilt at a break take more of Python's stack than the program's own
    return stop
