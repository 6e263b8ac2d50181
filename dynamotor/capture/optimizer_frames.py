"""Steps of optimizers that a graph break runs: each update is compiled, as a program of its own.

The graph breaks before and after `optimizer.step()`. The frame hook of `inner_frames.py` meets the function that
PyTorch puts around the `step` of every optimizer class; schedulers and scalers that call it run natively.

>>> inner.steps = OptimizerFrames(lambda method: compiled_step(method), share)
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .. import _C
from ..base.narrowing import checked
from .compiled_share import Share
from .inner_frames import InnerFrames
from .stance import stance

OPTIMIZERS = 8  # so many have their steps compiled in the breaks of one callable


def is_around_step(function: Any) -> bool:
    """Whether it is the function that PyTorch puts around the `step` of each optimizer class, which runs hooks."""
    made = torch.optim.Optimizer.profile_hook_step.__code__.co_consts
    return type(function) is types.FunctionType and function.__code__ in made


_sgd_step: Any = torch.optim.SGD.step
# Of the function that a decorator puts around the `step` of all of PyTorch's optimizers.
_DECORATED = (_sgd_step.__wrapped__ if is_around_step(_sgd_step) else _sgd_step).__code__


def _is_step(function: types.FunctionType) -> bool:
    """Whether it is such a function, or the `step` of an optimizer of PyTorch's that `super()` leads to."""
    return is_around_step(function) or function.__code__ is _DECORATED


class StepForm(Protocol):
    """The compiled form of a bound `step`. `ops`: calls in the programs that it has run so far."""

    ops: int

    def call(self, natively: Callable[[str, Callable[[], Any]], Any], *args: Any, **kwargs: Any) -> Any:
        """One step; `natively(reason, function)` runs a closure, and a step that is no program."""
        ...


class OptimizerFrames:
    """Runs the steps that one compiled callable meets in its graph breaks.

    compiled_step: gives the compiled form of a bound `step`, the same one each time; None if it has none.
    """

    def __init__(
        self, compiled_step: Callable[[types.MethodType], StepForm | None], inner: InnerFrames, share: Share
    ) -> None:
        self._compiled_step, self._share = compiled_step, share
        self._inner = weakref.ref(inner)
        self._native = _C.Dispatcher(None, None)
        self._native.disabled = True
        self._is_native = False
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._count = 0
        inner.steps = self.dispatcher

    def dispatcher(self, function: types.FunctionType) -> Any:
        """The dispatcher of a class's `step`; None for other functions."""
        if not _is_step(function):
            return None
        return self._native if self._is_native else _C.Dispatcher(self._step, function, "Optimizer.step")

    def _step(self, dispatcher: Any, args: tuple[Any, ...], kwnames: tuple[str, ...]) -> Any:
        """One step: `args` has the bound parameters of the function, which takes `*args, **kwargs`."""
        (optimizer, *rest), keywords = args
        method = types.MethodType(dispatcher.original, optimizer)
        compiled, why = self._form(method)
        if compiled is None:
            return self._natively(why, functools.partial(method, *rest, **keywords))
        before = compiled.ops
        try:
            return compiled.call(self._natively, *rest, **keywords)
        finally:
            self._share.elsewhere += compiled.ops - before

    def _form(self, method: types.MethodType) -> tuple[StepForm | None, str]:
        """The compiled form of a step, or None and why. Optimizers made anew at each call would be compiled at
        each call: the first ones are."""
        optimizer = checked(torch.optim.Optimizer, method.__self__)
        if stance() != "default":
            return None, f"the stance is {stance()}"
        if optimizer not in self._known:
            if self._count == OPTIMIZERS:
                return None, f"there were {self._count} optimizers before"
            self._count += 1
            self._known.add(optimizer)
        return self._compiled_step(method), "its device or backend has no compiled steps"

    def _natively(self, reason: str, function: Callable[[], Any]) -> Any:
        """Run a step, or its closure, in eager; functions that it calls are captured."""
        before, self._is_native = self._is_native, True
        try:
            return self._share.natively(f"optimizer.step() in eager: {reason}", self._inner())(function)
        finally:
            self._is_native = before
