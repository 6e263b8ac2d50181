"""Trials on the lazy xla device, or through its bridge, against eager's CPU. Lazily, all trials of a call are
one graph: XLA's time is mostly one of programs.

>>> examine([fusion.trial(Generator(1).program())], "xla")
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dynamotor import DynamotorError, config

from .bounds import spread
from .compare import Outcome, differences, observe
from .place import extent, on_device
from .trial import Trial, Verdict, backend, compiled as tried, reasons


def examine(trials: Sequence[Trial], way: str) -> list[Verdict]:
    """Run each trial on the CPU and on xla (`way`: lazily, or compiled by the bridge), and compare."""
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # a third of the time is LLVM's
    from dynamotor.xla.sync import sync

    eager = [trial.prepare(False) for trial in trials]
    wanted = [run() for run in eager]
    with on_device("xla"), config.patch(fallback_random=True), backend("xla"):
        runs = [_run(trial, want, way) for trial, want in zip(trials, wanted, strict=True)]
        try:
            sync()
        except DynamotorError as error:
            if len(trials) > 1:  # whose graph XLA refuses is seen alone
                return [verdict for trial in trials for verdict in examine([trial], way)]
            runs[0][0].error = error
    return [_judged(*case) for case in zip(trials, eager, wanted, runs, strict=True)]


def problems(
    function: Callable[..., Any],
    inputs: Callable[[], list[torch.Tensor]],
    cotangents: Sequence[int] = (),
    way: str = "xla",
) -> list[str]:
    """Differences of a function of these inputs on xla: for tests."""

    def prepare(compiled: bool) -> Callable[[], Outcome]:
        call = tried(function) if compiled else function
        return lambda: observe(call, inputs(), cotangents)

    return examine([Trial("", prepare)], way)[0].problems


def _run(trial: Trial, want: Outcome, way: str) -> tuple[Outcome, list[str]]:
    """The effects of the trial on xla, still to be computed, and why parts of it ran elsewhere."""
    if want.error is not None:
        return want, []
    before = reasons()
    got = trial.prepare(way == "xla-bridge")()
    return got, sorted(reasons() - before)


def _judged(
    trial: Trial, eager: Callable[[], Outcome], want: Outcome, run: tuple[Outcome, list[str]]
) -> Verdict:
    if want.error is not None:
        return Verdict(trial, skipped=True)
    got, refused = run
    problems = differences(want, _on_cpu(got), functools.partial(spread, eager), trial.settled)
    return Verdict(trial, problems, refused)


def _on_cpu(seen: Outcome) -> Outcome:
    """The outcome with its tensors on the CPU, laid out as they say that they are."""

    return replace(seen, **{name: [_back(v) for v in getattr(seen, name)] for name in _VALUES})


def _back(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type != "xla":
        return value
    numbers = value.detach() if value.is_leaf else value
    numbers = numbers.cpu()
    if numbers.layout is torch.strided and numbers.numel():
        places = torch.arange(extent(value)).as_strided(value.shape, value.stride())
        memory = numbers.new_zeros(extent(value)).index_put((places.flatten(),), numbers.flatten())
        numbers = memory.as_strided(value.shape, value.stride())
    return numbers.requires_grad_(value.requires_grad) if value.is_leaf else numbers


_VALUES = ("outputs", "written", "gradients")
