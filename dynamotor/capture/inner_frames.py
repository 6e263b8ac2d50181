"""Functions that user code enters while a graph break runs it natively: each is captured on its own.

While `InnerFrames.call` runs, the frame hook asks about each function that has a tensor or a module among its
parameters; user functions get a dispatcher, library functions run as they are.

>>> inner = InnerFrames(lambda function: make_dispatcher_for(function))
>>> inner.call(list, map(user_function, batches))     # user_function's calls go through its dispatcher
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from dynamotor import _C

from ..base.events import emit
from .marks import disables_calls, is_disabled
from .resume import why_not_resumable
from .siblings import Shelf
from .source import trusted_module

# File names of generated code: ours and that of torch.fx.
_GENERATED = ("<dynamotor", "<eval_with_key>")


class InnerFrames:
    """The frame hook of one compiled callable and the dispatchers of the functions that it met."""

    def __init__(self, dispatcher_of: Callable[[types.FunctionType], Any]) -> None:
        self._dispatcher_of = dispatcher_of
        self._closures: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.shelf = Shelf(lasting=False)
        self.native: dict[str, str] = {}  # users' functions that are not captured, and why
        # The dispatcher of a function that is an optimizer's step; None for other functions.
        self.steps: Callable[[types.FunctionType], Any] = lambda function: None
        self._hook = _C.FrameHook(self._answer, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer))

    def call(self, function: Callable[..., Any], *args: Any, around: Callable[..., Any] | None = None) -> Any:
        """Call natively, with the functions entered inside captured. around: calls their dispatchers:
        (dispatcher, *args) -> result.
        """
        if around is None:
            return self._hook.call(function, *args)
        before, self._hook.around = self._hook.around, around
        try:
            return self._hook.call(function, *args)
        finally:
            self._hook.around = before

    def skip(self, function: Callable[..., Any]) -> None:
        """From now on run this function natively (only its callees are captured)."""
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None:
            self._hook.skip(code)

    def dispatchers(self) -> list[Any]:
        """Those of the functions that were entered."""
        known = [answer for _, _, answer in self._hook.answers.values()] + list(self._closures.values())
        return [answer for answer in known if type(answer) is _C.Dispatcher]

    def forget(self) -> None:
        """Drop the dispatchers; functions are asked about anew."""
        self._closures.clear()
        self.shelf.clear()
        self._hook.answers.clear()

    def _answer(self, code: types.CodeType, function: types.FunctionType) -> Any:
        if is_disabled(function) and not disables_calls(function):
            return None
        if is_disabled(function) or is_compiled_code(code, function):
            return False  # nothing that it calls is captured either
        if (step := self.steps(function)) is not None:
            return step
        if (known := self._closures.get(function)) is not None:  # asked about at each call
            return known
        why = why_native(code, function)
        if why is not None:
            if why:
                name = f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
                self.native[name] = why
                emit("native", name=name, why=why)
            return None
        if function.__closure__ is None:
            return self._dispatcher_of(function)  # the hook remembers it
        found = self._closures[function] = self._dispatcher_of(function)
        return found


def is_compiled_code(code: types.CodeType, function: types.FunctionType) -> bool:
    """Whether a function is the compiler's own or was generated: a backward that a break runs ends in
    these.
    """
    if code.co_filename.startswith(_GENERATED):
        return True
    module = function.__globals__.get("__name__")
    # Capture's own functions are what calls the user's code natively.
    return (
        isinstance(module, str)
        and module.startswith("dynamotor.")
        and not module.startswith("dynamotor.capture.")
    )


def why_native(code: types.CodeType, function: types.FunctionType) -> str | None:
    """Why calls of a function entered natively are not captured ("": it is a library's); None if they are: users'
    functions, the forward of PyTorch's own modules, and its distributions, which are written as users' code is.
    """
    module = function.__globals__.get("__name__")
    own = isinstance(module, str) and (
        module.startswith("torch.distributions.")
        or (code.co_name == "forward" and module.startswith("torch.nn.modules."))
    )
    if trusted_module(module) and not own:
        return ""
    if code.co_name.startswith("<") and code.co_name != "<lambda>":
        return "the body of a comprehension, a module or a class is no function"
    return why_not_resumable(code)
