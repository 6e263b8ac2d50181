"""Tests of data that only raise (`if (sigma <= 0).any(): raise ...`, an `assert`, what distributions ask of their
arguments): the trace goes on as if they passed, the graph's last output says whether one failed, and a call where
one did runs in eager from its start.

>>> trace.checks.passes(value, False)     # the program raises where the tensor is true
True
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..graph.sizes import Size, leaves_in
from ..graph.sym_int import Condition
from .breaks import unsupported_if
from .bytecode import CodeInfo
from .interpreter import Frame
from .undo import written
from .values.base import Trace, Value, builtin_rule
from .values.constant import Constant, is_none
from .values.instances import inline_function
from .values.known_data import known
from .values.size import ConditionValue, demand
from .values.tensor import TensorValue, function_name, torch_call
from .values.torch_function import HeldNumber

_BOUNDED = frozenset(
    ("nonzero", "where", "getitem", "index", "masked_select", "unique", "unique_consecutive")
)
_LONGEST_RAISE = 200  # instructions
_JUMPS = {"POP_JUMP_IF_TRUE": True, "POP_JUMP_IF_FALSE": False}


class CheckFailed(Exception):
    """A test of data did not pass: the call is to be run in eager, which raises the user's error."""


class Checks:
    """The tests that a trace has put off. `failed`: whether one of them did not pass, a tensor of the graph."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.failed: TensorValue | None = None
        self.of_sizes = False  # of sizes that data decides, which nodes of their own test
        self.within_ops = False  # of results, which an op (a solver) tests itself
        self.asked: list[Value] | None = None  # tests of a function that only warns, each taken to be false

    def warns(self, run: Callable[[], Value]) -> Value | None:
        """Trace a function that looks at data to warn: whether the data is as it warns of; None where it asks nothing.
        Every test of data is taken to be false, and then it must not do anything.
        """
        self.asked, before = [], len(self.trace.effects.touches)
        try:
            result = run()
            asked = self.asked
        finally:
            self.asked = None
        unsupported_if(
            not is_none(result) or len(self.trace.effects.touches) > before,
            "side-effect",
            "a function that should only warn does more",
        )
        if not asked:
            return None
        any_ = functools.reduce(lambda a, b: torch_call(self.trace, torch.logical_or, [a, b], {}), asked)
        return self.trace.call_method(any_, "item", [])

    def ask(self, value: Value) -> None:
        """Note a test of data of a function that only warns."""
        assert self.asked is not None
        tensor = value.tensor if type(value) is HeldNumber else value
        self.asked.append(torch_call(self.trace, torch.ne, [tensor, Constant(0)], {}))

    def passes(self, value: Value, truth: bool) -> bool:
        """Whether the trace goes on as if a value that only data knows had this truth."""
        trace = self.trace
        if type(value) is ConditionValue:
            asked = value.condition
            if trace.sizes.in_body or not trace.sizes.policy.checks:
                return False
            demand(trace, Condition(asked.kind, asked.expr, asked.negated is truth))
            self.of_sizes = True
            return True
        tensor = value.tensor if type(value) is HeldNumber else value
        if (
            type(tensor) is not TensorValue
            or trace.sizes.in_body
            or not trace.sizes.policy.checks
            or tensor.example.device.type != "cpu"
            or any(type(n) is not int or n != 1 for n in tensor.spec.shape)
        ):
            return False
        tensor = torch_call(trace, "reshape", [tensor, Constant(())], {})
        failed: Any = (
            torch_call(trace, torch.logical_not, [tensor], {})
            if truth
            else torch_call(trace, torch.ne, [tensor, Constant(0)], {})
        )
        if self.failed is not None:
            failed = torch_call(trace, torch.logical_or, [self.failed, failed], {})
        self.failed = failed
        return True

    def within(self, name: str, args: list[Any]) -> None:
        """An op is called that raises or not as the data are: its graph raises, and the call runs again."""
        tensors = [t for t in leaves_in(args) if isinstance(t, torch.Tensor)]
        unsupported_if(
            self.trace.sizes.in_body
            or not self.trace.sizes.policy.checks
            or any(t.device.type != "cpu" for t in tensors),
            "unsupported-op",
            f"{name} raises or not as the data are",
        )
        self.within_ops = True

    def caught(self, name: str) -> None:
        """An op is called that may raise as the data are, where the program may catch it: its graph may raise if the call
        can run again from its start; else the graph breaks here.
        """
        unsupported_if(
            not self.trace.sizes.policy.checks,
            "unsupported-op",
            f"{name} may raise where the program catches errors, in a graph that does not run twice",
        )
        self.within_ops = True

    @property
    def any(self) -> bool:
        """Whether a test was put off."""
        return self.failed is not None or self.of_sizes or self.within_ops

    def stand(self) -> bool:
        """Whether a call can still run from its start when the graph has run, and the graph may run where a
        test fails: a value that a test keeps out ends the process on a GPU, or needs any amount of memory.
        """
        trace = self.trace
        nodes = trace.graph.graph.nodes
        if self.any and written(trace) is None:
            return False
        elsewhere = any(v.example.device.type != "cpu" for v in trace.tensors.by_example.values())
        if self.of_sizes and trace.calls.draws and elsewhere:
            return False  # only the CPU's random state is put back
        return self.failed is None or not (elsewhere or any(_is_unbounded(trace, node) for node in nodes))


def _is_unbounded(trace: Trace, node: fx.Node) -> bool:
    """Whether data alone decides how large a result is."""
    if "data_dependent" not in node.meta or function_name(node.target) in _BOUNDED:
        return False
    val = node.meta["val"]  # of a number that is read, whether it is a size
    return type(val) is not Size or any(
        type(n) is Size and n.symbols & val.symbols
        for value in trace.tensors.by_example.values()
        for n in value.spec.shape
    )


def checked(run: Callable[..., Any], place: int | None, draws: bool) -> Callable[..., Any]:
    """A compiled graph that raises where its output at `place` says so; one that `draws` leaves the random state
    as it was where it raises."""
    if place is None and not draws:
        return run

    def run_checked(*tensors: Any) -> Any:
        state = torch.get_rng_state() if draws else None
        try:
            outs = run(*tensors)
            if place is not None and outs[place]:
                raise CheckFailed
        except Exception:
            if state is not None:
                torch.set_rng_state(state)
            raise
        return outs

    return run_checked


def decided(frame: Frame, instr: Any, when: bool) -> bool | None:
    """The truth that a jump's value is taken to have, since the program only raises where it has the other one;
    None where that is not so.
    """
    value = frame.stack[-1]
    if _only_data_knows(frame.trace, value):
        if frame.trace.checks.asked is not None and type(value) is not ConditionValue:
            frame.trace.checks.ask(value)
            return False
        for truth, offset in ((when, instr.target), (not when, instr.end)):
            if _only_raises(frame, offset):
                return not truth if frame.trace.checks.passes(value, not truth) else None
    return None


def _only_data_knows(trace: Trace, value: Value) -> bool:
    if type(value) is ConditionValue:
        return not (value.condition.sure(True) or value.condition.sure(False))
    return type(value) is HeldNumber or type(value) is TensorValue and known(trace, value) is None


@builtin_rule(torch._check_with)
def _check_with(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    if len(args) == 3 and _only_data_knows(trace, args[1]) and trace.checks.passes(args[1], True):
        return Constant(None)
    return inline_function(trace, torch._check_with, [*args], kwargs)


@builtin_rule(torch._assert)
def _assert(trace: Trace, condition: Value, *message: Value) -> Value:
    put_off = _only_data_knows(trace, condition) and trace.checks.passes(condition, True)
    if not put_off and not trace.truth(condition):
        raise trace.error(AssertionError, *message)
    return Constant(None)


@builtin_rule(torch._assert_async)
def _assert_async(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    if kwargs or not trace.checks.passes(args[0], True):
        return torch_call(trace, torch._assert_async, [*args], kwargs)
    return Constant(None)


def _only_raises(frame: Frame, offset: int) -> bool:
    """Whether nothing follows but the making of an exception. A guess: a test that is taken to pass is checked."""
    info: CodeInfo = frame.info
    todo, seen = [offset], set[int]()
    while todo:
        at = todo.pop()
        instr = info.at(at)
        if at in seen or instr.op in ("RAISE_VARARGS", "RERAISE"):
            continue
        seen.add(at)
        known = frame.fast[instr.arg] if instr.op == "LOAD_FAST" else None
        if type(known) is Constant and type(known.value) is bool:  # `if raises: raise ...`
            jump = info.at(instr.end)
            if jump.op in _JUMPS:
                todo.append(jump.goal if known.value is _JUMPS[jump.op] else jump.end)
                continue
        if instr.op.startswith(("RETURN", "YIELD")) or len(seen) > _LONGEST_RAISE:
            return False
        follows = [instr.end] if instr.op != "JUMP" else []
        if instr.target is not None:
            follows.append(instr.target)
        todo += follows
    return True
