"""Whether a compiled callable is slower than eager PyTorch: each new graph runs a few times beside its torch calls.

Both run in turns on the first call's inputs, behind its first run, where the graph may run again and no GPU is
involved, and for a small part of the time that its compilation took: later calls cost nothing. The shortest time of
each counts, which other work of the machine does not shorten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.compat import TorchDispatchMode, count_dispatch_modes, top_saved_hooks
from ..base.config import config
from ..base.events import silence
from ..graph.repeatable import may_run_again

BUDGET = 0.03  # of the seconds of a compilation
LEAST, MOST = 3, 10  # rounds
SLOWER = 1.25  # so many times eager's time is no noise,
SECONDS = 1e-4  # nor is so much more


@dataclass
class EagerTimes:
    """Seconds of the graphs of a callable: compiled, and by their torch calls in eager."""

    compiled: float = 0.0
    eager: float = 0.0

    def __str__(self) -> str:
        return f"{1e3 * self.compiled:.3g} ms compiled, {1e3 * self.eager:.3g} ms in eager PyTorch"

    @property
    def are_slower(self) -> bool:
        """Whether the graphs take longer than eager does, beyond noise."""
        return self.compiled > SLOWER * self.eager and self.compiled - self.eager > SECONDS

    def add(
        self, gm: torch.fx.GraphModule, run: Callable[..., Any], inputs: Sequence[Any], seconds: float
    ) -> None:
        """Measure a graph that has run once; `seconds`: what its compilation took."""
        if config.warn_slower and not config.check and _is_pure(gm, inputs):
            try:
                with silence():
                    with _RefuseDraws():
                        gm.forward(*inputs)
                    self._measure(gm.forward, run, inputs, BUDGET * seconds)
            except Exception:  # the graph's first run has passed: nothing that the caller should see
                return

    def _measure(
        self, eager: Callable[..., Any], run: Callable[..., Any], inputs: Sequence[Any], budget: float
    ) -> None:
        rounds = [[_seconds(each, inputs) for each in (run, eager)]]
        if LEAST * sum(rounds[0]) > budget:
            return
        while len(rounds) < LEAST or len(rounds) < MOST and EagerTimes(*_shortest(rounds)).are_slower:
            rounds.append([_seconds(each, inputs) for each in (run, eager)])
        compiled, in_eager = _shortest(rounds)
        self.compiled, self.eager = self.compiled + compiled, self.eager + in_eager


class _RefuseDraws(TorchDispatchMode):
    """Stops a graph before it draws a random number: the generators are the program's, and other threads draw from
    them too, so that to set one back would give these the same numbers twice."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(f"{func} draws random numbers")
        return func(*args, **(kwargs or {}))


def _is_distributed() -> bool:
    """Whether other processes take part."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _shortest(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [min(column) for column in zip(*rounds, strict=True)]


def _seconds(run: Callable[..., Any], inputs: Sequence[Any]) -> float:
    start = time.perf_counter()
    run(*inputs)
    return time.perf_counter() - start


def _is_pure(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a graph that writes no input may run again beside eager, unseen by the program."""
    watched = count_dispatch_modes() or top_saved_hooks(True) is not None or _is_distributed()
    return not watched and may_run_again(gm, inputs)
