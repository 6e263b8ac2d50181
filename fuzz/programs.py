"""Random Python programs, eager and compiled side by side, each in a world that changes in the same ways.

>>> problems(write(3))       # what differs: results, errors, side effects, memory, gradients, random state
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import re
import signal
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import torch

import dynamotor
from dynamotor import config
from dynamotor.base.events import counters

from .compare import CLOSE
from .program import define
from .python_program import Block, Call, PythonProgram, Statement
from .world import STATE, WORLD

Examine = Callable[[PythonProgram], list[str]]
DM405 = "the compiled call had written its inputs"
DM410 = "[DM410] "
_STALE = "a leaf Variable that requires grad is being used in an in-place operation"
EAGER, COMPILED = 2.0, 60.0  # seconds that a call may take
_WORLD = compile(WORLD, "<world>", "exec", dont_inherit=True)


class Picture:
    """A value as plain data, to be compared with another world's.

    Objects and memory are numbered as they appear: two references to one object here must be to one there.
    """

    def __init__(self) -> None:
        self.objects: dict[int, int] = {}
        self.memory: dict[int, int] = {}
        self.keep: list[Any] = []  # ids stay taken while the picture is drawn

    def of(self, value: Any, depth: int = 0) -> Any:
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.Size)):
            return value
        if isinstance(value, tuple):  # identity of tuples is not compared
            return type(value).__name__, [self.of(v) for v in value]
        if id(value) in self.objects:
            return "again", self.objects[id(value)]
        self.objects[id(value)] = len(self.objects)
        self.keep.append(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        name = type(value).__name__
        if isinstance(value, dict):
            return name, [(self.of(k), self.of(v)) for k, v in value.items()]
        if isinstance(value, list):
            return name, [self.of(v) for v in value]
        if isinstance(value, (set, frozenset)):
            return name, sorted(map(repr, value))
        if isinstance(value, BaseException):
            chain = self.of(value.__cause__), self.of(value.__context__), value.__suppress_context__
            return name, str(value), self.of(_told(value)), chain
        if isinstance(value, types.FunctionType):
            cells = [
                c.cell_contents
                for c in value.__closure__ or ()
                if not isinstance(c.cell_contents, types.CellType)
            ]
            return name, value.__name__, [self.of(c) for c in cells], self.of(value.__defaults__)
        if is_dataclass(value) or hasattr(value, "__dict__"):
            return name, [(k, self.of(v)) for k, v in sorted(vars(value).items())] if not isinstance(
                value, type
            ) else []
        return name

    def _tensor(self, t: torch.Tensor) -> Any:
        place = t.untyped_storage().data_ptr() if t.numel() else 0
        where = self.memory.setdefault(place, len(self.memory)) if place else None
        facts = {
            "dtype": t.dtype,
            "shape": tuple(t.shape),
            "stride": t.stride(),
            "requires_grad": t.requires_grad,
            "is_leaf": _is_leaf(t),
            "memory": where,
            "grad": None if _is_leaf(t) is not True or t.grad is None else self.of(t.grad),
        }
        return "tensor", facts, t.detach().clone()


def _told(error: BaseException) -> dict[str, Any]:
    """An error's attributes without the note of DM405, which is meant (docs/trust.md)."""
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(DM405)]
    return {k: v for k, v in vars(error).items() if k != "__notes__"} | (
        {"__notes__": notes} if notes else {}
    )


def _is_leaf(t: torch.Tensor) -> bool | str:
    """A view that was written behind autograd's back does not say it."""
    try:
        return t.is_leaf
    except RuntimeError as error:
        return str(error)


def difference(a: Any, b: Any, where: str) -> str | None:
    """Where two pictures differ first."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        rtol, atol = CLOSE.get(a.dtype, (0.0, 0.0))
        same = a.shape == b.shape and torch.allclose(a, b, rtol=4 * rtol, atol=4 * atol, equal_nan=True)
        return None if same else f"{where}: numbers differ"
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
        return next(
            (d for n, (x, y) in enumerate(zip(a, b)) if (d := difference(x, y, f"{where}[{n}]"))), None
        )
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next((d for k in a if (d := difference(a[k], b[k], f"{where}.{k}"))), None)
    if (
        isinstance(a, float)
        and isinstance(b, float)
        and (math.isclose(a, b, rel_tol=1e-5) or (a != a and b != b))
    ):
        return None
    same = type(a) is type(b) and not isinstance(a, (torch.Tensor, tuple, list, dict)) and a == b
    return None if same else f"{where}: {_short(a)} in eager, {_short(b)} compiled"


def _short(value: Any) -> str:
    return re.sub(r"\s+", " ", repr(value))[:100]


class World:
    """One run of a program: its globals, and `f` as it is or compiled."""

    def __init__(self, program: PythonProgram, compiled: bool) -> None:
        self.program, self.scope, self.grad_mode = program, {"__name__": "world"}, True
        exec(_WORLD, self.scope)
        f = define(program.source(), "f", scope=self.scope)
        self.f: Callable[..., Any] = dynamotor.compile(f, backend=program.backend) if compiled else f

    def call(self, n: int) -> dict[str, Any]:
        """Do the n-th call and give a picture of everything that it may have touched."""
        call, printed, picture = self.program.calls[n], io.StringIO(), Picture()
        torch.default_generator.manual_seed(n)
        random.seed(n)
        torch.set_grad_enabled(self.grad_mode)
        seen: dict[str, Any] = {"changed": self._change(call.change)}
        given = eval(f"(lambda *a, **k: (a, k))({call.arguments})", self.scope)
        result = error = None
        with contextlib.redirect_stdout(printed):
            try:
                result = self.f(*given[0], **given[1])
            except Exception as e:
                error = e
        self.grad_mode = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        seen["error"] = picture.of(error)
        seen["skipped"] = any(note.startswith(DM405) for note in getattr(error, "__notes__", ()))
        seen["traceback"] = _lines_of(error)
        _let_go(error)
        seen["random state"] = torch.default_generator.get_state().tolist()[:32], random.getstate()[1][-1]
        seen["backward"] = _backward(result)
        seen["result"] = picture.of(result)
        seen["arguments"] = picture.of([*given[0]])
        seen["grad mode"], seen["printed"] = self.grad_mode, printed.getvalue()
        for name in STATE:
            seen[name] = picture.of(eval(name, self.scope))
        picture.keep.clear()  # an error holds this frame, which must not hold the error and what was pictured:
        error = result = None  # generators end with the last reference, not when garbage is collected
        return seen

    def _change(self, change: str) -> Any:
        try:
            exec(change, self.scope)
        except Exception as error:
            return type(error).__name__
        return None


def _let_go(error: BaseException | None) -> None:
    """Release the objects that frames of an error hold, and the frames (their closures, too): now, not when garbage is
    collected.
    """
    while error is not None and error.__traceback__ is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__, error = None, error.__context__


def _lines_of(error: BaseException | None) -> list[tuple[str, int | None]]:
    """Where an error went through the program, as its traceback says."""
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    if isinstance(error, UnboundLocalError):  # CPython itself names the line before once the code is warm
        del frames[-1:]
    return [(f.name, f.lineno) for f in frames if f.filename.startswith(("<fuzz", "<world"))]


def _backward(result: Any) -> Any:
    """The backward of all results that ask for one; its error, if any."""
    found: list[torch.Tensor] = []

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.requires_grad and all(value is not f for f in found):
            found.append(value)
        for item in (
            value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        ):
            look(item)

    look(result)
    try:
        if found:
            torch.stack([value.double().square().sum() for value in found]).sum().backward()
    except RuntimeError as error:
        code = DM410 if any("DM410" in note for note in getattr(error, "__notes__", ())) else ""
        words = re.sub(r"^Function \w+ ", "", str(error).strip())  # the node of a compiled graph is another
        return code + words.splitlines()[0][:60]
    return None


class Refused(Exception):
    """A compiled call said by a code that it does not follow the program there (docs/trust.md)."""


def check_refusal(
    program: PythonProgram, n: int, want: dict[str, Any], got: dict[str, Any], broke: bool
) -> None:
    """Raise `Refused` where a backward met other data than its forward: eager follows `x.data = ...` for some
    of what it saved, and behind a break (`broke`: there was one) an input may be written that only we saved.
    And where a view of what got a history is, in eager, a leaf until it is asked.
    """
    given = program.calls[n].arguments
    shared = "A := " in given and "requires_grad" not in given
    if _STALE in str(want["error"]) and _STALE not in str(got["error"]) and shared:
        raise Refused("eager: a view that had not asked for its history is a leaf")
    skipped, got["skipped"] = got["skipped"], False
    alike = difference(want["error"], got["error"], "error") is None
    if skipped and alike and any(difference(want[name], got[name], name) for name in STATE):
        raise Refused("DM405")
    if alike and len(want["traceback"]) > 1 and got["traceback"] == want["traceback"][-1:]:
        raise Refused("a graph that wrote shows an error's line alone")  # docs/trust.md
    told = str(got["backward"])
    if told.startswith("[DM407]") and ".data = " in program.source():
        raise Refused("DM407")
    if told.startswith(DM410):
        if want["backward"] is None and broke:
            raise Refused("DM410")
        got["backward"] = told.removeprefix(DM410)


def _breaks() -> int:
    return sum(counters["breaks"].values())


class Endless(BaseException):
    """A call that does not end; no `except Exception` of a program takes it."""


@contextlib.contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Raise `Endless` when the block has used so much time of the processor."""

    def end(*_: Any) -> None:
        raise Endless

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def problems(program: PythonProgram) -> list[str]:
    """Differences of the compiled twin; empty when all calls were alike. Raises `Endless` when eager does
    not end.
    """
    try:
        compile(program.source(), "<program>", "exec", dont_inherit=True)
    except SyntaxError:
        return []
    try:
        with config.patch(fallback_random=True, cxx_flags=("-O1",)):
            eager, compiled, breaks = World(program, False), World(program, True), _breaks()
            for n in range(len(program.calls)):
                with ended_after(EAGER):
                    want = eager.call(n)
                try:
                    with ended_after(COMPILED):
                        got = compiled.call(n)
                except Endless:
                    return [f"call {n}: error: none in eager, no end compiled"]
                check_refusal(program, n, want, got, _breaks() > breaks)
                for what in want:
                    found = difference(want[what], got[what], what)
                    if found:
                        return [f"call {n}: {found}"]
        return []
    finally:
        torch.set_grad_enabled(True)
        dynamotor.reset()


# -- smaller programs -----------------------------------------------------------------------


def kind(problem: str) -> str:
    """A problem without what changes from program to program."""
    text = re.sub(r"\[.*?\]|\d+", "", problem)
    where, _, rest = text.partition(": ")[2].partition(":")
    error = (
        re.search(r"compiled|(\w+Error|Failure)", rest.split("in eager,")[-1]) if where == "error" else None
    )
    return f"{where} {error.group() if error else ''}".strip()


def reduce(program: PythonProgram, examine: Examine, deadline: float = math.inf) -> PythonProgram:
    """The smallest program that differs in the same way and is found before the deadline."""
    found = examine(program)
    if not found:
        return program
    wanted, progress = kind(found[0]), True
    while progress and time.monotonic() < deadline:
        progress = False
        for candidate in smaller(program):
            if time.monotonic() > deadline:
                break
            if any(kind(p) == wanted for p in examine(candidate)):
                program, progress = candidate, True
                break
    return program


def smaller(program: PythonProgram) -> Iterator[PythonProgram]:
    """Programs with one thing less: calls and changes first, then statements."""
    calls = program.calls
    for n in reversed(range(len(calls) if len(calls) > 1 else 0)):
        yield replace(program, calls=calls[:n] + calls[n + 1 :])
    for n, call in enumerate(calls):
        plain = Call()
        for other in (replace(call, change=""), replace(call, arguments=plain.arguments)):
            if other != call:
                yield replace(program, calls=(*calls[:n], other, *calls[n + 1 :]))
    if program.helper:
        yield replace(program, helper=())
        for block in smaller_blocks(program.helper):
            yield replace(program, helper=block)
    for block in smaller_blocks(program.body):
        yield replace(program, body=block)
    if program.backend != "eager":
        yield replace(program, backend="eager")


def smaller_blocks(block: Block) -> Iterator[Block]:
    """The block with a statement left out, opened or made plainer."""
    for n, statement in enumerate(block):
        before, after = block[:n], block[n + 1 :]
        yield (*before, *after)
        for head, inner in statement.parts:
            if not head.startswith(("def ", "case ")):
                yield (*before, *inner, *after)
        for part, (head, inner) in enumerate(statement.parts):
            rest = statement.parts[:part] + statement.parts[part + 1 :]
            if rest and part:
                yield (*before, Statement(parts=rest), *after)
            for less in smaller_blocks(inner):
                parts = (*statement.parts[:part], (head, less), *statement.parts[part + 1 :])
                yield (*before, Statement(parts=parts), *after)
        for text in plainer(statement.text):
            yield (*before, Statement(text), *after)


def plainer(text: str) -> Iterator[str]:
    """A line with one bracketed expression replaced by a name or a number, or by its contents."""
    for found in re.finditer(r"\(([^()]*)\)", text):
        start, end = found.span()
        called = start and (text[start - 1].isalnum() or text[start - 1] in "_]")
        if not called:
            for other in (found.group(1), "x", "1"):
                if other != found.group():
                    yield text[:start] + other + text[end:]
    target, equals, value = text.partition(" = ")
    if equals and value not in ("x", "n", "[x]"):
        for other in {"t": ["x"], "n": ["n"], "l": ["[x]"]}.get(target[:1], []):
            yield f"{target} = {other}"


def test_of(program: PythonProgram, found: Sequence[str]) -> str:
    """A test that fails as the program does."""
    lines = [f"# {found[0]}", *program.source().rstrip().splitlines()]
    calls = "".join(f"    Call({c.change!r}, {c.arguments!r}),\n" for c in program.calls)
    return "\n".join(lines) + f"\n\nCALLS = [\n{calls}]  # backend {program.backend!r}\n"
