"""Functions that development packages register with the compiler, which never imports them.

`bench.verification` registers the costly checks that `config.verify` adds, and Triton's interpreter for
kernels on CPU tensors. A wheel has neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .config import config
from .registry import Registry

functions: Registry[str, Callable[..., Any]] = Registry("development function")


def verify(name: str, *args: Any) -> None:
    """Under `config.verify`, call the check of this name, if one is registered."""
    check = functions.get(name) if config.verify else None
    if check is not None:
        check(*args)
