"""Small tensor programs in many kinds of code: compiled in batches and compared with eager.

>>> examine([Generator(1).program()], "avx2")           # one Verdict a program
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import dynamotor
from dynamotor import config
from dynamotor.base.errors import BuildError
from dynamotor.base.events import counters
from dynamotor.codegen.cpp_kernel import ISAS, machine_width

from .batch import Batch, Waiting
from .bounds import spread
from .compare import Outcome, differences, observe
from .generate import Generator
from .program import Program

# How a program may be compiled: fields of dynamotor.config.
TARGETS: dict[str, dict[str, Any]] = {
    "avx512": {"isa": "avx512"},
    "avx2": {"isa": "avx2"},
    "portable": {"isa": "portable"},
    "triton": {"target": "triton"},
}
QUICK = ("-O1",)
BATCH = 48


def targets() -> list[str]:
    """The C++ targets that this machine can run, and Triton's interpreter."""
    width = machine_width()
    return [name for name in TARGETS if name not in ISAS or ISAS[name][0] <= width]


@dataclass
class Verdict:
    """What became of a program: problems (empty when it is right), and why parts of it were not compiled."""

    program: Program
    problems: list[str] = field(default_factory=list)
    refused: list[str] = field(
        default_factory=list
    )  # "aten NAME" is an op left to aten, which is right that way
    skipped: bool = False  # eager itself refuses it

    @property
    def broken(self) -> bool:
        """Whether more than single ops was left uncompiled."""
        return any(not reason.startswith("aten ") for reason in self.refused)


@contextlib.contextmanager
def compiling(target: str) -> Iterator[None]:
    """The settings under which programs are compiled for a target."""
    flags = QUICK if target != "triton" else ()
    with config.patch(**TARGETS[target], cxx_flags=flags, disk_cache=target == "triton"):
        yield


def eager(program: Program) -> Outcome:
    """The program in eager PyTorch on its own inputs."""
    return observe(program.function(), program.make_inputs(), program.cotangents, program.seed)


@dataclass
class _Case:
    verdict: Verdict
    call: Callable[..., Any]
    want: Outcome
    done: bool = False

    def run(self) -> Outcome:
        program = self.verdict.program
        return observe(self.call, program.make_inputs(), program.cotangents, program.seed)


def examine(programs: Sequence[Program], target: str) -> list[Verdict]:
    """Compile the programs for a target, run each twice and compare with eager. A build error counts."""
    cases = []
    for program in programs:
        want, verdict = eager(program), Verdict(program)
        verdict.skipped = want.error is not None
        if not verdict.skipped:
            cases.append(_Case(verdict, dynamotor.compile(program.function()), want))
        else:
            cases.append(_Case(verdict, program.function(), want, done=True))
    with compiling(target), Batch() as batch:
        for _ in range(6):  # forward, backward, and a graph more for each break
            waiting = [case for case in cases if not case.done and _waits(case)]
            if not waiting:
                break
            _build(batch, waiting, target)
    return [case.verdict for case in cases]


def _waits(case: _Case) -> bool:
    """Run a case; whether it needs kernels to be built first. When it has run through, it is judged."""
    before = reasons()
    try:
        got = case.run()
    except Waiting:
        return True
    finally:
        case.verdict.refused += sorted(reasons() - before)
    case.done = True
    case.verdict.problems = judge(case.verdict.program, case.want, got)
    if not case.verdict.problems:
        kept = (
            copy.copy(got.outputs),
            [o.detach().clone() if isinstance(o, torch.Tensor) else o for o in got.outputs],
        )
        case.verdict.problems = [
            f"second call: {p}" for p in judge(case.verdict.program, case.want, case.run())
        ]
        for n, (now, before) in enumerate(zip(*kept, strict=True)):
            if isinstance(now, torch.Tensor) and not _equal(now.detach(), before):
                case.verdict.problems.append(f"output {n} of the first call was changed by the second")
    return False


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def judge(program: Program, want: Outcome, got: Outcome) -> list[str]:
    """Differences from eager, rounding set aside."""
    return differences(want, got, lambda: spread(lambda: eager(program)))


def reasons() -> Counter[str]:
    """Why parts of programs were not compiled, so far: graph breaks, fallbacks, ops left to aten."""
    total = Counter({f"break {code}": n for code, n in counters["breaks"].items()})
    total.update({name.replace("aten.", "aten ", 1): n for name, n in counters["fallback"].items()})
    return total


def _build(batch: Batch, waiting: list[_Case], target: str) -> None:
    """Build what the cases wait for; when the compiler refuses, find out whose kernels it refuses."""
    try:
        batch.build()
    except BuildError as error:
        for case in waiting:
            case.done = True
            problems = (
                [str(error).splitlines()[0]]
                if len(waiting) == 1
                else examine([case.verdict.program], target)[0].problems
            )
            case.verdict.problems = problems


def problems(program: Program) -> list[str]:
    """What is wrong with one program, for its own target."""
    return examine([program], program.target)[0].problems


def generated(seed: int, n: int, target: str) -> Program:
    """The n-th program of a seed."""
    program = Generator(seed * 1_000_003 + n, small=target == "triton").program()
    return replace(program, target=target, name=f"{seed}:{n}")


def chunk(seed: int, start: int, count: int, target: str) -> Iterator[Verdict]:
    """The verdicts of programs start .. start + count of a seed."""
    programs = [generated(seed, n, target) for n in range(start, start + count)]
    try:
        yield from examine(programs, target)
    finally:
        dynamotor.reset()


def tally(verdicts: Sequence[Verdict]) -> Counter[str]:
    """How many were right, wrong, skipped (eager refuses them) or broken (left to eager in part)."""
    return Counter(
        "wrong" if v.problems else "skipped" if v.skipped else "broken" if v.broken else "right"
        for v in verdicts
    )


def main(seed: int, count: int, target: str) -> None:
    """Run `count` programs here and print what is wrong: for trying things out."""
    start = time.time()
    found = list(chunk(seed, 0, count, target))
    print(tally(found), f"{count / (time.time() - start):.1f} programs a second")
    for v in found:
        if v.problems:
            print(
                v.program.name, v.problems, [i.text() for i in v.program.inputs], v.program.source(), sep="\n"
            )
