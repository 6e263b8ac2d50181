"""Cut a failing program down to the smallest that fails in the same way.

>>> reduce(program, examine)        # examine: programs -> the problems of each, asked a round at a time
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from .generate import drop, prune
from .program import Input, Program, Step

Examine = Callable[[Sequence[Program]], list[list[str]]]
ROUND = 24  # candidates that are compiled at once


def kind(problem: str) -> str:
    """A problem without its numbers: two programs with the same kind fail in the same way."""
    head = re.sub(r"\s+", " ", re.sub(r"\(.*?\)|\[.*?\]|-?\b\d[\w.+-]*|\binf\b|\bnan\b|'.*?'", "", problem))
    head = re.sub(r"^(second call: )?(output|input|gradient of input)", r"\2", head)
    return (
        re.split(r" elements differ|, shape", head)[0].split(":")[0]
        + (" elements" if "elements differ" in problem else "")
        if "raised" not in problem
        else re.sub(r"(raised \w+).*?(?=,|$)", r"\1", head)
    )


def reduce(program: Program, examine: Examine, seconds: float = 40.0) -> Program:
    """The smallest program found in the given time that has a problem of the same kind."""
    found = examine([program])[0]
    if not found:
        return program  # it does not fail when it is compiled alone
    wanted, deadline = kind(found[0]), time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for moves in (fewer_outputs, without_steps, smaller_sizes, plainer_inputs, fewer_gradients):
            smaller = _first(moves(program), wanted, examine, deadline)
            while smaller is not None:
                program, progress = smaller, True
                smaller = _first(moves(program), wanted, examine, deadline)
    return program


def _first(candidates: Iterator[Program], wanted: str, examine: Examine, deadline: float) -> Program | None:
    """The first candidate that fails as wanted; None when there is none or time is up."""
    rest = list(candidates)
    while rest and time.monotonic() < deadline:
        some, rest = rest[:ROUND], rest[ROUND:]
        for candidate, problems in zip(some, examine(some), strict=True):
            if any(kind(p) == wanted for p in problems):
                return candidate
    return None


def fewer_outputs(program: Program) -> Iterator[Program]:
    """One output alone, then all but one."""
    n = len(program.outputs)
    for at in range(n) if n > 1 else ():
        yield _with_outputs(program, [at])
    for at in range(n) if n > 2 else ():
        yield _with_outputs(program, [k for k in range(n) if k != at])


def _with_outputs(program: Program, kept: list[int]) -> Program:
    cotangents = tuple(new for new, old in enumerate(kept) if old in program.cotangents)
    return prune(replace(program, outputs=tuple(program.outputs[k] for k in kept), cotangents=cotangents))


def without_steps(program: Program) -> Iterator[Program]:
    """A step left out (its result is unread), or replaced by one of its operands or a new input of its size."""
    at = len(program.inputs)
    for n, step in enumerate(program.steps):
        results = range(at, at + step.results)
        used = set(results) & ({o for s in program.steps for o in s.operands} | set(program.outputs))
        if not used:
            yield drop(program, [n], [])
        elif step.results == 1:
            for operand in step.operands:
                yield prune(drop(_renamed(program, at, operand), [n], []))
            fresh = _as_input(program, n)
            if fresh is not None:
                yield fresh
        at += step.results


def _renamed(program: Program, old: int, new: int) -> Program:
    """The program with one value used in the place of another."""
    steps = tuple(
        replace(s, operands=tuple(new if o == old else o for o in s.operands)) for s in program.steps
    )
    return replace(program, steps=steps, outputs=tuple(new if o == old else o for o in program.outputs))


def _as_input(program: Program, n: int) -> Program | None:
    """The program with step n's result given as an input."""
    count = len(program.inputs)
    before = replace(
        program, steps=program.steps[: n + 1], outputs=(count + sum(s.results for s in program.steps[:n]),)
    )
    try:
        value = before.function()(*before.make_inputs())[0]
    except Exception:  # noqa: BLE001 (of a candidate whose sizes no longer fit)
        return None
    dtype = str(value.dtype).removeprefix("torch.")
    if value.is_complex():
        return None
    most = -1 if value.is_floating_point() or dtype == "bool" or not value.numel() else int(value.max())
    fill = f"index:{most + 1}" if most >= 0 else "random"
    one = Input(tuple(value.shape), dtype, fill, "", bool(value.requires_grad))
    # The new input stands behind the others: every later number moves up by one.
    place = before.outputs[0]

    def moved(o: int) -> int:
        return count if o == place else o if o < count else o + 1

    steps = tuple(replace(s, operands=tuple(map(moved, s.operands))) for s in program.steps)
    widened = replace(
        program, inputs=(*program.inputs, one), steps=steps, outputs=tuple(map(moved, program.outputs))
    )
    return prune(drop(widened, [n], []))


def smaller_sizes(program: Program) -> Iterator[Program]:
    """Every occurrence of a size replaced by a smaller one; an input's dimension dropped to 1."""
    sizes = sorted({n for one in program.inputs for n in one.shape if n > 1}, reverse=True)
    for size in sizes:
        for other in (n for n in (1, 2, 3, 5, 7, 8, 9, 16, 17) if n < size):
            yield _resized(program, size, other)


def _resized(program: Program, size: int, other: int) -> Program:
    def text(line: str) -> str:
        return _renumbered(line, {size: other})

    steps = tuple(Step(text(s.text), s.operands, s.results) for s in program.steps)
    return replace(
        program, inputs=tuple(resized_input(i, {size: other}) for i in program.inputs), steps=steps
    )


def resized_input(i: Input, to: Mapping[int, int]) -> Input:
    """The input with other sizes in the place of some, also where they bound its positions."""
    fill = _renumbered(i.fill, to) if ":" in i.fill else i.fill
    return replace(i, shape=tuple(to.get(n, n) for n in i.shape), fill=fill)


def _renumbered(text: str, to: Mapping[int, int]) -> str:
    return re.sub(r"(?<![\w.])\d+(?![\w.])", lambda m: str(to.get(int(m[0]), m[0])), text)


def plainer_inputs(program: Program) -> Iterator[Program]:
    """Inputs without a layout, with ordinary numbers, in float32, with fewer dimensions."""
    floats = {i.dtype for i in program.inputs if i.dtype in ("bfloat16", "float16", "float64")}
    for dtype in floats:
        inputs = tuple(replace(i, dtype="float32") if i.dtype == dtype else i for i in program.inputs)
        yield replace(program, inputs=inputs)
    for n, i in enumerate(program.inputs):
        others = [replace(i, layout="")] if i.layout else []
        others += [replace(i, fill="random")] if i.fill != "random" and ":" not in i.fill else []
        others += [replace(i, grad=False)] if i.grad else []
        others += [replace(i, shape=i.shape[1:], layout="")] if i.shape else []
        others += [replace(i, shape=i.shape[:-1], layout="")] if len(i.shape) > 1 else []
        for other in others:
            yield replace(program, inputs=(*program.inputs[:n], other, *program.inputs[n + 1 :]))


def fewer_gradients(program: Program) -> Iterator[Program]:
    """Without a backward, or from fewer outputs."""
    if program.trains():
        yield program.without_gradients()
    for n in program.cotangents if len(program.cotangents) > 1 else ():
        yield replace(program, cotangents=tuple(c for c in program.cotangents if c != n))
