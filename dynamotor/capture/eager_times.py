"""Whether a compiled callable is slower than eager PyTorch: each new graph runs a few times beside its torch calls.

Both run in turns on the first call's inputs, behind its first run, and for a small part of the time that its
compilation took: later calls cost nothing. The shortest time of each counts, which other work of the machine does not
shorten. The torch calls run first under a mode (`_OnlyComputes`) that sees each aten call before its kernel runs, and
ends the measurement at one that could be noticed: what this run has not done, the timed ones do not do either.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.compat import count_dispatch_modes, profiler_enabled, top_saved_hooks
from ..base.config import config
from ..base.events import silence
from ..graph.modes import TrialMode
from ..graph.op_facts import HIDDEN_WRITES, facts
from ..graph.repeatable import may_run_again
from ..graph.sizes import hint, leaves_in
from ..graph.spec import TensorSpec

BUDGET = 0.03  # of the seconds of a compilation
LEAST, MOST = 3, 10  # rounds
SLOWER = 1.25  # so many times eager's time is no noise,
SECONDS = 1e-4  # nor is so much more
MOST_BYTES = 1 << 30  # of all results of a graph
FASTEST = 20e9  # bytes a second that a processor reads or writes
_COMPUTING = frozenset(("aten", "prims"))


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
        budget = BUDGET * seconds
        may_run = config.warn_slower and not config.check and _least_seconds(gm) <= budget / (2 * LEAST)
        may_run = may_run and not _is_watched() and may_run_again(gm, inputs)
        if may_run and not any(_may_warn(node.target) for node in gm.graph.nodes):
            try:
                with silence():
                    with _OnlyComputes(budget / LEAST):  # less warm than the rounds that follow
                        gm.forward(*inputs)
                    self._measure(gm.forward, run, inputs, budget)
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


def _least_seconds(gm: torch.fx.GraphModule) -> float:
    """What eager needs on a CPU at the least: it reads the inputs and writes the results, each once."""
    specs = (spec for node in gm.graph.nodes for spec in leaves_in(node.meta.get("val")))
    tensors = (spec for spec in specs if isinstance(spec, TensorSpec) and spec.device.type == "cpu")
    return sum(hint(spec.nbytes) for spec in tensors) / FASTEST


class _Noticed(Exception):
    """A run of a graph stops before something that the program could notice."""


class _OnlyComputes(TrialMode):
    """Stops a graph before an aten call that draws random numbers (the generators are the program's, and other threads
    draw from them too), that writes memory which the graph has not made, or that is another library's; and when its
    time is up, or it has made more memory than a program spares."""

    def __init__(self, budget: float, most: int = MOST_BYTES) -> None:
        super().__init__()
        self.end, self.most = time.perf_counter() + budget, most
        self.made, self.nbytes = dict[int, Any](), 0

    def __torch_dispatch__(
        self, func: Any, types: Collection[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if _only_asks(func):
            return func(*args, **(kwargs or {}))
        given = (*args, *(kwargs or {}).values())
        if (
            func.namespace not in _COMPUTING
            or torch.Tag.nondeterministic_seeded in func.tags
            or any(isinstance(value, torch.Generator) for value in given)
            or not self.made.keys() >= set(map(_memory, self._written(func, args, kwargs or {})))
            or time.perf_counter() > self.end
            or self.nbytes > self.most
        ):
            raise _Noticed(func)
        known = set(map(_memory, _tensors(given)))
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if (memory := _memory(tensor)) not in known and memory not in self.made:
                self.made[memory] = tensor  # held: its address is not another's
                self.nbytes += tensor.untyped_storage().nbytes()
        return result

    def _written(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        names = [argument.name for argument in func._schema.arguments]
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        if func in HIDDEN_WRITES and not values.get("training"):
            return []
        places = facts(func).writes
        return _tensors([values.get(names[place] if isinstance(place, int) else place) for place in places])


@functools.cache
def _only_asks(func: Any) -> bool:
    """Whether a call gives facts of tensors (sizes, layout, device): C++ asks them of wrapper subclasses where
    no error may leave, and one would end the process."""
    returned = func._schema.returns
    return bool(returned) and not facts(func).writes and all("Tensor" not in str(r.type) for r in returned)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_in(values) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _may_warn(target: Any) -> bool:
    """Whether a function of PyTorch's Python may write a warning, which would be there twice."""
    return "warnings" in getattr(getattr(target, "__code__", None), "co_names", ())


def _is_watched() -> bool:
    """Whether somebody looks on who would see the calls twice: modes, hooks, profilers, other processes."""
    tools = sys.gettrace() is not None or sys.getprofile() is not None or profiler_enabled()
    return tools or bool(count_dispatch_modes()) or top_saved_hooks(True) is not None or _is_distributed()


def _is_distributed() -> bool:
    """Whether other processes take part."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _shortest(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [min(column) for column in zip(*rounds, strict=True)]


def _seconds(run: Callable[..., Any], inputs: Sequence[Any]) -> float:
    start = time.perf_counter()
    run(*inputs)
    return time.perf_counter() - start
