"""Anything that can be run in eager and compiled: many are compiled with one run of g++, and each is judged.

>>> examine([Trial("tanh", lambda compiled: lambda: observe(fn(compiled), [x]))], "avx2")
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import dynamotor
from dynamotor import config
from dynamotor.base.errors import BuildError
from dynamotor.base.events import counters
from dynamotor.codegen.cpp_kernel import ISAS

from .batch import Batch, Waiting
from .bounds import spread
from .compare import Outcome, differences
from .place import on_device
from .templates import templates_everywhere

# How things may be compiled: fields of dynamotor.config.
TARGETS: dict[str, dict[str, Any]] = {
    "native": {"isa": ""},  # what users get: -march=native and -O2, which g++ tunes for this processor
    "avx512": {"isa": "avx512"},
    "avx2": {"isa": "avx2"},
    "portable": {"isa": "portable"},
    "triton": {"target": "triton"},
    "templates": {"target": "triton"},  # each matrix product that a template can compute is one
    "cuda": {},  # Triton on a GPU, beside eager on the GPU
}
XLA = ("xla", "xla-bridge")  # where jax is: lazily, and compiled by the bridge
UNBATCHED = ("triton", "templates", "cuda")  # no kernel is C++
QUICK = ("-O1",)
INTERPRETED = ("triton", "templates")  # their programs are small
# Contexts in which programs of a target are compiled and run.
PLACES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "cuda": lambda: on_device("cuda"),
    "templates": templates_everywhere,
}
_VERSION = "needed for gradient computation has been modified by an inplace operation: ["
GRAPHS = 8  # forward, backward, and one more for each break


def targets() -> list[str]:
    """The C++ targets that this machine can run, and Triton: its interpreter, and on a GPU where there is one."""
    gpu = torch.cuda.is_available()
    return [name for name in TARGETS if (ISAS[name].is_here if name in ISAS else name != "cuda" or gpu)]


@contextlib.contextmanager
def compiling(target: str) -> Iterator[None]:
    """The settings under which programs are compiled for a target; random numbers are eager's."""
    triton = target in UNBATCHED
    flags = () if triton or target == "native" else QUICK
    with (
        PLACES.get(target, contextlib.nullcontext)(),
        config.patch(**TARGETS[target], cxx_flags=flags, disk_cache=triton, fallback_random=True),
    ):
        yield


_backend = ["native"]


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """The backend that `compiled` asks for."""
    _backend.append(name)
    try:
        yield
    finally:
        _backend.pop()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is tried."""
    return dynamotor.compile(function, backend=_backend[-1])


running: list[Callable[[str], None]] = []  # told what runs, before it may end the process


@dataclass
class Trial:
    """prepare(compiled) gives what runs it once, on new equal inputs. settled: its numbers mean something."""

    name: str
    prepare: Callable[[bool], Callable[[], Outcome]]
    settled: bool = True
    source: str = ""  # for reports


@dataclass
class Verdict:
    """What became of a trial: problems (none when it is right), and why parts of it were not compiled."""

    trial: Trial
    problems: list[str] = field(default_factory=list)
    refused: list[str] = field(
        default_factory=list
    )  # "aten NAME" is an op left to aten, which is right that way
    skipped: bool = False  # eager itself refuses it

    @property
    def broken(self) -> bool:
        """Whether more than single ops was left uncompiled."""
        return any(not reason.startswith("aten ") for reason in self.refused)


@dataclass
class _Case:
    verdict: Verdict
    eager: Callable[[], Outcome]
    want: Outcome
    run: Callable[[], Outcome]
    done: bool = False


def examine(trials: Sequence[Trial], target: str) -> list[Verdict]:
    """Compile the trials for a target, run each twice and compare with eager. A build error counts.

    The target "eager" compiles nothing: does eager itself run through?
    """
    if target == "eager":
        return [_case(trial).verdict for trial in trials]
    if target in XLA:
        from . import xla

        return xla.examine(trials, target)
    with compiling(target), Batch(waits=target not in UNBATCHED) as batch:
        cases = [_case(trial) for trial in trials]
        for _ in range(GRAPHS):
            waiting = [case for case in cases if not case.done and _waits(case)]
            if not waiting:
                break
            _build(batch, waiting, target)
    return [case.verdict for case in cases]


def _case(trial: Trial) -> _Case:
    eager, verdict = trial.prepare(False), Verdict(trial)
    _tell(trial, "in eager")
    want = eager()
    verdict.skipped = want.error is not None
    return _Case(verdict, eager, want, eager if verdict.skipped else trial.prepare(True), verdict.skipped)


def _tell(trial: Trial, how: str) -> None:
    for tell in running:
        tell(f"{trial.name} {how}")


def _waits(case: _Case) -> bool:
    """Run a case; whether it needs kernels to be built first. When it has run through, it is judged."""
    before, failed = reasons(), counters["frames"]["failed"]
    _tell(case.verdict.trial, "compiled")
    try:
        got = case.run()
    except Waiting:
        return True
    finally:
        case.verdict.refused += sorted(reasons() - before)
    case.done = True
    if _VERSION in str(got.error):  # PyTorch refuses it: one node keeps for all gradients
        case.verdict.refused.append("a kept value was written before the backward")
        return False
    found = case.verdict.problems = _judge(case, got)
    if counters["frames"]["failed"] > failed:
        found.append("the compiler stopped at an error of its own and ran eager")
    if not found:
        kept = [o.detach().clone() if isinstance(o, torch.Tensor) else o for o in got.outputs]
        found += [f"second call: {p}" for p in _judge(case, case.run())]
        for n, (now, before_it) in enumerate(zip(got.outputs, kept, strict=True)):
            if isinstance(now, torch.Tensor) and not _equal(now.detach(), before_it):
                found.append(f"output {n} of the first call was changed by the second")
    if found and _wavers(case):
        found.clear()
        case.verdict.skipped = True
    return False


def _wavers(case: _Case) -> bool:
    """Whether eager's result depends on unwritten memory: its median of an expanded tensor does."""
    for number in (torch.nan, 1.0, -3.0):
        junk = [torch.full((size,), number) for size in (1, 2, 4, 8, 16, 32, 64) for _ in range(50)]
        del junk
        for now, then in zip(case.eager().outputs, case.want.outputs, strict=True):
            if isinstance(now, torch.Tensor) and not _equal(now.detach(), then.detach()):
                return True
    return False


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.layout is not torch.strided or bool(((a == b) | ((a != a) & (b != b))).all())


def _judge(case: _Case, got: Outcome) -> list[str]:
    """Differences from eager, rounding set aside."""
    return differences(case.want, got, functools.partial(spread, case.eager), case.verdict.trial.settled)


def reasons() -> Counter[str]:
    """Why parts of programs were not compiled, so far: graph breaks, fallbacks, ops left to aten."""
    total = Counter({f"break {code}": n for code, n in counters["breaks"].items()})
    total.update({name.replace("aten.", "aten ", 1): n for name, n in counters["fallback"].items()})
    return total


def _build(batch: Batch, waiting: list[_Case], target: str) -> None:
    """Build the kernels that the cases wait for; when the compiler refuses, find out whose kernels it refuses."""
    try:
        batch.build()
    except BuildError as error:
        for case in waiting:
            case.done = True
            alone = [str(error).splitlines()[0]]
            case.verdict.problems = (
                alone if len(waiting) == 1 else examine([case.verdict.trial], target)[0].problems
            )


def tally(verdicts: Sequence[Verdict]) -> Counter[str]:
    """How many were right, wrong, skipped (eager refuses them) or right and partly eager."""
    return Counter(
        "wrong" if v.problems else "skipped" if v.skipped else "partly eager" if v.broken else "right"
        for v in verdicts
    )
