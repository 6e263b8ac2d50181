"""Attempts at capturing a call. An attempt is one trace, and says all that the trace is told; its outcome is
a finished capture, another attempt to make, or a graph break.

>>> attempt = Attempt(Invocation(args, kwnames), policy)
>>> while isinstance(outcome := make(attempt), Retry):
...     attempt = outcome.attempt
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..base.errors import UserLine
from ..base.events import Event, log
from ..graph.graph_text import program_text
from ..graph.sizes import Guard as Assumption
from . import rules_states, undo
from .breaks import BreakReason, Unsupported
from .cut import cut_points
from .guards import Ambient, AnyGuard
from .input_overlaps import guard_overlaps
from .result_emitter import ResultEmitter
from .source import Const, Made, Source
from .symbolic_inputs import FloatIs, SizePolicy, TraceSizes
from .trace import Trace
from .values import nn_module
from .values.base import Value

Numbers = Mapping[Source, Assumption | FloatIs]


@dataclass
class Captured:
    """One finished trace: the graph, its inputs, its guards, and the Python around it."""

    gm: torch.fx.GraphModule | None
    inputs: list[Any]
    examples: list[Any]  # tensors, and sizes
    guards: list[AnyGuard]
    finish: Callable[[Any, tuple[Any, ...]], Any]
    sizes: TraceSizes
    code: str
    reason: BreakReason | None = None
    steps: int = 0
    # Places of the inputs that the graph writes, which get back their contents where it raises; None: it has effects
    # that are not undone, and must not run twice.
    undone: tuple[int, ...] | None = ()
    replays: bool = False  # Python objects are written after the graph
    check: int | None = None  # the output that says whether a test of data failed
    draws: bool = False  # the graph takes random numbers, and may raise, tests data or sets states
    states: bool = False  # the graph sets states of the thread
    asked: frozenset[str] = frozenset()  # facts of tensors that the program looks at: see `Trace`
    for_all: bool = False  # its module is an argument, the last one (`siblings.py`)
    settings: Any = None  # what `config` was
    compile_id: str = ""  # "0/1": the second program of the first callable
    begin: Callable[..., Callable[[], None]] | None = None  # steps of a call that may come
    missed: int = 0  # runs that no hit of an entry counts
    fallbacks: Counter[str] = field(default_factory=Counter)
    eager: list[str] = field(default_factory=list)  # what of the graph eager PyTorch runs, and why
    left_to_eager: list[str] = field(default_factory=list)  # why, where that is all of it
    events: list[Event] = field(default_factory=list)  # "auto": backends measured; "late": built at need
    lines: dict[AnyGuard, UserLine | None] = field(
        default_factory=dict
    )  # the line that made each guard, for who listens

    @property
    def made(self) -> int:
        """Tensors that eager PyTorch makes for the graph at each call."""
        return sum(type(source) is Made for source in self.inputs)

    @property
    def ops(self) -> int:
        """Torch calls in the graph."""
        nodes = () if self.gm is None else self.gm.graph.nodes
        return sum(node.op in ("call_function", "call_method") for node in nodes)


@dataclass
class Invocation:
    """A call that is compiled: its flat arguments, and the names of the last ones.

    handling: whether who calls is handling an exception. symbols: whether an attempt had symbols for sizes.
    """

    args: tuple[Any, ...]
    kwnames: tuple[str, ...]
    handling: bool = False
    symbols: bool = False

    @property
    def n_positional(self) -> int:
        """How many arguments have no name."""
        return len(self.args) - len(self.kwnames)

    def fits(self, entry: Any) -> bool:
        """Whether an entry takes arguments that are passed so."""
        return entry.n_positional == self.n_positional and entry.kwnames == self.kwnames


@dataclass(frozen=True)
class Attempt:
    """One trace of a call, before it is made.

    fixed: sources of which an earlier attempt needed the numbers, and why. for_all: the module, or the
    function, is an argument of the program, the last one. break_at: the instruction at which the trace is
    cut.
    """

    call: Invocation
    policy: SizePolicy
    fixed: Numbers = field(default_factory=dict)
    for_all: bool = False
    break_at: int | None = None

    def trace(self) -> Trace:
        """An empty trace."""
        return Trace(
            break_at=self.break_at, policy=self.policy, fixed=self.fixed, handling=self.call.handling
        )

    def needing(self, numbers: Numbers) -> Retry | None:
        """The attempt that knows that these are numbers; None where this one knew it."""
        return (
            Retry(replace(self, fixed={**self.fixed, **numbers}))
            if numbers.keys() - self.fixed.keys()
            else None
        )


@dataclass(frozen=True)
class Done:
    """The attempt is a program."""

    captured: Captured


@dataclass(frozen=True)
class Retry:
    """The call is to be traced again."""

    attempt: Attempt


@dataclass(frozen=True)
class Break:
    """The graph breaks. cuts: where the stack of frames can be cut; guards and sizes: those of the trace. captured:
    the program up to the first of the cuts, where the trace still stood there."""

    stop: Unsupported
    cuts: list[tuple[int, int]]
    guards: list[AnyGuard]
    sizes: TraceSizes
    captured: Captured | None = None

    @staticmethod
    def of(stop: Unsupported, trace: Trace, ambient: Ambient) -> Break:
        """The break of a trace that is about to be emptied."""
        guards = [ambient, *trace.reader.guards]
        return Break(stop, cut_points(stop, trace.stack.generators), guards, trace.sizes)


Outcome = Done | Retry | Break


def finished(
    trace: Trace, ambient: Ambient, result: Callable[[ResultEmitter], str], reason: BreakReason | None = None
) -> Captured:
    """Close the graph of a trace, and generate the Python that follows it; `result` emits what that
    returns."""
    emitter = ResultEmitter(trace)
    trace.effects.guard_aliases()
    replays = trace.effects.replay(emitter)
    returned = result(emitter)
    failed = trace.checks.failed
    check = None if failed is None else emitter.place(failed.node)
    finish, code = emitter.function(returned)
    for reads in (trace.checkpoint_reads, trace.function_reads):
        finish = reads.watched(finish, emitter.outputs)
    finish = trace.late_code.watched(finish)
    log("code", code)
    gm = trace.graph.module(emitter.outputs)
    if gm is not None:
        log("graphs", lambda: f"captured\n{program_text(gm)}")
    inputs = trace.graph.inputs if gm is not None else []
    guard_overlaps(trace)
    guards = [ambient, *trace.reader.guards]
    log("guards", lambda: "\n".join(map(str, guards)))
    undone = undo.written(trace, may_join=True) if gm is not None else ()
    if undone and not (trace.calls.may_raise or trace.checks.any):
        undone = None
    lines = trace.reader.guards if trace.reader.heard else {}
    states = rules_states.StateEffect.known(trace)
    return Captured(
        gm,
        inputs,
        trace.graph.examples,
        guards,
        finish,
        trace.sizes,
        code,
        reason,
        trace.stack.steps,
        undone,
        replays,
        check,
        trace.calls.draws and (trace.checks.any or states is not None or trace.calls.may_raise),
        states=states is not None,
        asked=frozenset(trace.tensors.asked),
        lines=lines,
    )


def root_value(
    trace: Trace, fn: Callable[..., Any], source: Source | None = None
) -> tuple[Value, list[Value]]:
    """The value to call, and arguments that it gets first. source: where a method's module, or the function,
    comes from, if the program is for all of its kind."""
    trace.modules.owner = source
    trace.modules.repeated.update(() if source is None else (source,))
    if isinstance(fn, types.MethodType):
        owner = trace.wrap(source or Const(fn.__self__, "self"), fn.__self__)
        if isinstance(owner, nn_module.NNModuleValue) and type(fn.__self__).__call__ is fn.__func__:
            return owner, []
        return trace.wrap(Const(fn.__func__, fn.__name__), fn.__func__), [owner]
    return trace.wrap(source or Const(fn, getattr(fn, "__name__", "fn")), fn), []


def parameter_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional parameters, as far as they are known."""
    skip = isinstance(fn, types.MethodType)
    if isinstance(fn, types.MethodType) and isinstance(fn.__self__, torch.nn.Module):
        fn = type(fn.__self__).forward
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    return () if code is None else code.co_varnames[skip : code.co_argcount]
