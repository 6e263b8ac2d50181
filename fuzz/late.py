"""Programs whose Python runs at several times (backwards, hooks, checkpoints, operators, regions that raise), over
objects that change between calls, and between forward and backward.

A program is run in eager and compiled; results, gradients, effects, the generators of random numbers and the modes of
the thread must be equal.

>>> problems(write(7), "aot_eager")
[]
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import dynamotor

from . import late_parts
from .late_parts import EFFECTS, HEAD, PLACES, READS, REGIONS, UNARY

BACKENDS = ("eager", "aot_eager", "aot_eager", "native")
WAYS = ("backward", "backward", "backward", "twice", "double", "forward", "no gradient")
# Places without second derivatives: eager refuses `autograd.grad`, and a graph would run the forward again.
ONCE = ("reentrant checkpoint", "forward of a function")
RAISING = ("region", "region that raises")
WRITING = ("custom operator", "gradient inside", "detached in place")
WRITTEN = "a saved tensor was written"
VALUES = (2.0, 3.0, 5.0, 7.0)
Change = tuple[int, float]  # which of the program's reads is set, and to what


@dataclass(frozen=True)
class Place:
    """A place of `PLACES`, its reads and effects, and the lines around it."""

    name: str
    read: str
    effect: str
    before: str  # a line, or nothing
    region: str = REGIONS[0]
    row: int = 0

    def text(self, n: int) -> tuple[str, str]:
        """The place's definitions and its lines of `call`."""
        fill = {
            "n": str(n),
            "read": self.read,
            "effect": self.effect,
            "region": self.region,
            "row": str(self.row),
        }
        definitions, lines = PLACES[self.name]
        for key, value in fill.items():
            definitions, lines = (part.replace(f"{{{key}}}", value) for part in (definitions, lines))
        return definitions, "\n".join([*([f"x = {self.before}"] if self.before else []), lines])


@dataclass(frozen=True)
class Call:
    """One call: the changes before it and between its forward and its backward; how its gradients are made."""

    before: tuple[Change, ...]
    between: tuple[Change, ...]
    way: str
    rows: int
    seed: int


@dataclass(frozen=True)
class Program:
    """Places in the order of `call`, and the calls."""

    places: tuple[Place, ...]
    calls: tuple[Call, ...]

    @property
    def changes(self) -> int:
        """How often an object is set."""
        return sum(len(call.before) + len(call.between) for call in self.calls)

    def source(self) -> str:
        """The text that defines `call(x)` and `change(which, v)`."""
        parts = [place.text(n) for n, place in enumerate(self.places)]
        lines = ["leaf = x", *itertools.chain(*(lines.splitlines() for _, lines in parts)), "return x.sum()"]
        changes = [f"    if which == {n}: {READS[place.read]}" for n, place in enumerate(self.places)]
        change = [
            "def change(which, v):",
            f"    global {late_parts.GLOBALS}",
            *(changes or ["    pass"]),
            "",
        ]
        return "\n".join(
            [
                HEAD,
                *(one for one, _ in parts),
                *change,
                "def call(x):",
                *(f"    {line}" for line in lines),
                "",
            ]
        )


def write(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed)
    places = tuple(
        Place(
            draw.choice(list(PLACES)),
            draw.choice(list(READS)),
            draw.choice(EFFECTS),
            draw.choice(UNARY) if draw.random() < 0.6 else "",
            draw.choice(REGIONS),
            draw.choice((0, 99)),
        )
        for _ in range(draw.choice((1, 1, 2, 2, 3)))
    )

    def changes(least: int) -> tuple[Change, ...]:
        number = draw.choice((least, 1, 1, 2))
        return tuple((draw.randrange(len(places)), draw.choice(VALUES)) for _ in range(number))

    same = draw.random() < 0.7  # the calls' sizes
    if any(place.name in RAISING for place in places):
        places = tuple(map(_without_writes, places))
    once = any(place.name in ONCE for place in places)
    ways = [way for way in WAYS if way != "double" or not once]
    calls = tuple(
        Call(changes(0), changes(0), draw.choice(ways), 2 if same else draw.randint(2, 5), draw.randrange(9))
        for _ in range(draw.choice((2, 3, 3, 4)))
    )
    return Program(places, calls)


def _without_writes(place: Place) -> Place:
    """Behind a write, the error of a graph enters no `except` (docs/trust.md)."""
    name = "forward" if place.name in WRITING else place.name
    return replace(place, name=name, effect="pass" if place.effect == "net.held.add_(1)" else place.effect)


class Operators:
    """The operators of one run: each program defines its own."""

    count = itertools.count()

    def __init__(self) -> None:
        self.name = f"fuzz_late_{next(self.count)}"
        self.library = torch.library.Library(self.name, "DEF")

    def composite(self, name: str, key: str) -> Callable[[Any], Any]:
        """A decorator that makes an operator of a function."""

        def decorate(function: Any) -> Any:
            self.library.define(f"{name}(Tensor x) -> Tensor")
            self.library.impl(name, function, key)
            return getattr(getattr(torch.ops, self.name), name)

        return decorate

    def custom(self, name: str) -> Callable[[Any], Any]:
        """As `torch.library.custom_op`."""
        return torch.library.custom_op(f"{self.name}::{name}", mutates_args=())


@contextlib.contextmanager
def _settings_kept() -> Iterator[None]:
    """State of the thread that a program may leave changed."""
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        os.environ.pop("DM_FUZZ_K", None)


def observed(program: Program, compile: Callable[[Any], Any], last: float = 1.0) -> list[Any]:
    """Results and effects of the calls of a program, with changes between them; a code of ours ends it. last: the
    largest element of the inputs."""
    operators, shown = Operators(), list[str]()
    space: dict[str, Any] = {
        "__name__": "late",
        "op": operators.composite,
        "custom": operators.custom,
        "again": compile,
    }
    with _settings_kept(), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
        exec(compile_text(program.source()), space)
        call, found = compile(space["call"]), list[Any]()
        random.seed(1)
        for one in program.calls:
            found += _called(call, one, space, last)
            if found[-1] == "refused":
                return found
            found += [_state(space), [text for text in shown if text.startswith("seen")]]
            torch.set_grad_enabled(True)
            torch.set_autocast_enabled("cpu", False)
    return found


def _called(call: Any, one: Call, space: dict[str, Any], last: float) -> list[Any]:
    """One call and its gradients."""
    found: list[Any] = []
    for change in one.before:
        space["change"](*change)
    torch.manual_seed(one.seed)
    x = torch.linspace(0.5, last, one.rows * 3, dtype=torch.float64).view(one.rows, 3)
    x.requires_grad_(one.way != "no gradient")
    net = space["net"]
    net.zero_grad()
    try:
        loss = call(x)
        found.append(loss.detach().clone())
        for change in one.between:
            space["change"](*change)
        if one.way in ("backward", "twice"):
            for keep in (True, False) if one.way == "twice" else (False,):
                loss.backward(retain_graph=keep)
                found.append(x.grad)
                x.grad = None
        elif one.way == "double":
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            found.append(grad.detach().clone())
            if grad.requires_grad:
                grad.sin().sum().backward()
                found.append(x.grad)
        found.append([p.grad for p in net.parameters()])
    except Exception as error:  # noqa: BLE001 (the program's)
        if "[DM" in str(error) and "[DM401]" not in str(error):
            return [str(error).partition("[DM")[2][:3], "refused"]
        if "of a compiled graph was modified" in str(error):  # a second derivative runs the graph again
            return ["408", "refused"]
        notes = "".join(getattr(error, "__notes__", ()))
        for code in ("405", "410"):  # no `except` is entered; an input is kept in the place of a value
            if f"DM{code}" in notes:
                return [code, "refused"]
        written = "modified by an inplace operation" in str(error)
        found.append(WRITTEN if written else type(error).__name__)
    return found


def _state(space: dict[str, Any]) -> list[Any]:
    """The effects of a call."""
    holder, net = space["holder"], space["net"]
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()
    return [
        list(modes), list(space["ITEMS"]), dict(space["TABLE"]), list(space["LOG"]), holder.calls, float(holder.k),
        space["SPACE"].k, net.held.clone(), net.training, torch.get_rng_state().sum(), random.getstate()[1][-1],
    ]  # fmt: skip


def compile_text(text: str) -> Any:
    """The code of a program."""
    return compile(text, "<late>", "exec")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        huge = a.is_floating_point() and not bool((a.abs() < 1e6).all())  # functions of it may be anything
        return huge or torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return math.isclose(a, b, rel_tol=1e-6) if isinstance(a, float) and isinstance(b, float) else a == b


def problems(program: Program, backend: str, refused: Callable[[str], None] = lambda code: None) -> list[str]:
    """What differs from eager. refused: told the code of ours that ends a program."""
    dynamotor.reset()
    want = observed(program, lambda f: f)
    with dynamotor.config.patch(fallback_random=True, warn_slower=False):
        got = observed(program, lambda f: dynamotor.compile(f, backend=backend))
    ended = got[-1:] == ["refused"]
    if ended:
        refused(f"late.DM{got[-2]}")
    until = len(got) - 2 if ended else max(len(got), len(want))
    for k, (a, b) in enumerate(itertools.zip_longest(want[:until], got[:until], fillvalue="nothing")):
        if b == WRITTEN and a != WRITTEN:  # a graph may save more than eager does
            refused("late.written")
            return []
        if not _same(a, b):
            # Does eager itself differ, between runs or for inputs as far off as roundings? (the sine of 1e60)
            again = observed(program, lambda f: f, 1 + 1e-13)
            return [f"{backend}: result {k}: eager {a}, compiled {b}"] if _same(want, again) else []
    return []


def reduce(program: Program, backend: str) -> Program:
    """A smaller program that is wrong, too."""
    again = True
    while again:
        again = False
        for smaller in _smaller(program):
            with contextlib.suppress(Exception):
                if problems(smaller, backend):
                    program, again = smaller, True
                    break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with one piece less."""
    places, calls = program.places, program.calls
    for n in range(len(places)) if len(places) > 1 else ():
        fewer = tuple(_without(call, n) for call in calls)
        yield Program(places[:n] + places[n + 1 :], fewer)
    for n in range(len(calls)) if len(calls) > 1 else ():
        yield Program(places, calls[:n] + calls[n + 1 :])
    for n, place in enumerate(places):
        for plain in ({"before": ""}, {"effect": "pass"}, {"read": "1.5"}):
            small = replace(place, **plain)
            if small != place:
                yield Program((*places[:n], small, *places[n + 1 :]), calls)
    for n, call in enumerate(calls):
        cuts = [
            {"before": call.before[:-1]},
            {"between": call.between[:-1]},
            {"way": "backward"},
            {"rows": 2},
        ]
        for cut in cuts:
            small_call = replace(call, **cut)  # type: ignore[arg-type]
            if small_call != call:
                yield Program(places, (*calls[:n], small_call, *calls[n + 1 :]))


def _without(call: Call, n: int) -> Call:
    """A call without the changes of one place."""

    def left(changes: tuple[Change, ...]) -> tuple[Change, ...]:
        return tuple((which - (which > n), v) for which, v in changes if which != n)

    return replace(call, before=left(call.before), between=left(call.between))
