"""Small tensor programs in many kinds of code: compiled in batches and compared with eager.

>>> problems([Generator(1).program()], "avx2")           # a list for each program, empty when it is right
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import dynamotor

from .compare import Outcome, observe
from .generate import Generator
from .program import Program
from .trial import INTERPRETED, Trial, Verdict, compiled as tried, examine

BATCH = 144  # programs that share a run of g++
# Others: interpreted, a process of its compiler a kernel, of one XLA graph, of one graph each.
SLOW = {"triton": 6, "templates": 6, "cuda": 12, "xla": 48, "xla-bridge": 12}


def trial(program: Program) -> Trial:
    """How the program is run."""

    def prepare(compiled: bool) -> Callable[[], Outcome]:
        function = program.function()
        call = tried(function) if compiled else function
        return lambda: observe(call, program.make_inputs(), program.cotangents, program.seed)

    return Trial(program.name, prepare)


def generated(seed: int, n: int, target: str) -> Program:
    """The n-th program of a seed."""
    seeded = seed * 1_000_003 + n
    program = Generator(seeded, small=target in INTERPRETED, products=target == "templates").program()
    return replace(program, target=target, name=f"{seed}:{n}")


def judged(programs: Sequence[Program], target: str) -> list[Verdict]:
    """The verdicts of programs that are compiled together."""
    try:
        return examine([trial(program) for program in programs], target)
    finally:
        dynamotor.reset()


def problems(programs: Sequence[Program], target: str) -> list[list[str]]:
    """The faults of each program."""
    return [verdict.problems for verdict in judged(programs, target)]
