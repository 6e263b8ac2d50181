"""Old names of functions: they warn and call the new ones.

>>> world_size = deprecated(xm, runtime.world_size, "xrt_world_size")
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any


def deprecated(module: types.ModuleType, new: Callable[..., Any], old_name: str | None = None) -> Callable:
    """`new` under its old name in a module; a call warns (DeprecationWarning)."""
    name = f"{module.__name__}.{old_name or new.__name__}"

    @functools.wraps(new)
    def old(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"{name} is deprecated: use {new.__module__}.{new.__name__}", DeprecationWarning, stacklevel=2
        )
        return new(*args, **kwargs)

    return old
