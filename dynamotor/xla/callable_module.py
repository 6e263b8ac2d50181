"""Modules that can be called: `torch_xla.sync()` and `torch_xla.device()` are functions whose names modules
of this package have too.

>>> make_callable(sys.modules["dynamotor.xla.sync"], sync)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """A module that passes a call of itself on to one of its functions."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._called_as(*args, **kwargs)


def make_callable(module: ModuleType, function: Callable[..., Any]) -> None:
    """Let `module(...)` mean `function(...)`; everything else about the module stays."""
    module.__class__ = _CallableModule
    module._called_as = function  # type: ignore[attr-defined]
    module.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
