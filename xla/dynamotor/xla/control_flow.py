"""`torch.cond`, `while_loop`, `scan`, `map`, `associative_scan` and `flex_attention` on the lazy device.

PyTorch asks a tensor subclass for a rule of each such operator. Ours is what PyTorch does on any device: a
predicate is read, a loop's body is called for each turn, and all of it is recorded. PyTorch captures their
functions with torch.compile first, which must see xla tensors as plain ones (`torch_compile.py`): that holds
from the moment that `torch._dynamo` is imported.

>>> torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x.to("xla"),))
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from . import compat
from .tensor import XLATensor

_OPERATORS = [
    "cond",
    "while_loop",
    "scan",
    "map_impl",
    "associative_scan",
    "flex_attention",
    "flex_attention_backward",
]
_CAPTURE = "torch._dynamo"
_FLEX = "torch.nn.attention.flex_attention"


def _register() -> None:
    for name in _OPERATORS:
        operator: Any = getattr(torch.ops.higher_order, name, None)
        kernel = None if operator is None else operator.py_kernels.get(compat.composite_explicit)
        if kernel is not None:
            operator.py_impl(XLATensor)(kernel)


class _AfterImport(MetaPathFinder):
    """Calls a function once a module has been imported by other code."""

    def __init__(self, module: str, call: Callable[[], Any]) -> None:
        self.module, self.call = module, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def run(module: ModuleType) -> None:
                execute(module)
                self.call()

            spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


def _admit_to_flex_attention() -> None:
    """Skip FlexAttention's list of known device types for xla tensors: its operator has a rule for them."""
    module: Any = sys.modules[_FLEX]
    check = getattr(module, "_validate_device", None)
    if check is None:
        return

    @functools.wraps(check)
    def validate(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "xla":
            check(query, key, value)

    module._validate_device = validate


def install(capture_as_plain: Callable[[], Any]) -> None:
    """Register the operators; `capture_as_plain` is called when PyTorch's capture is there."""
    _register()
    for module, call in ((_CAPTURE, capture_as_plain), (_FLEX, _admit_to_flex_attention)):
        if module in sys.modules:
            call()
        else:
            sys.meta_path.insert(0, _AfterImport(module, call))
