"""XLA programs kept on disk, so that the next process loads what this one compiled.

>>> initialize_cache("/tmp/xla_cache")
>>> metrics.counters["PersistentCacheHit"], metrics.counters["PersistentCacheMiss"]
"""

from __future__ import annotations

import os
import sys
from typing import Any

import jax

from ..base.errors import XlaError
from . import metrics

_EVENTS = {
    "/jax/compilation_cache/cache_hits": "PersistentCacheHit",
    "/jax/compilation_cache/cache_misses": "PersistentCacheMiss",
}
_listening: list[bool] = []


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Keep compiled programs in the folder `path` (made where missing), and look there before compiling.

    readonly: look, but write nothing. A damaged entry is compiled anew, with a warning. DM661 where the folder cannot be used.
    Counters: PersistentCacheHit, and PersistentCacheMiss for a program that had to be compiled.
    """
    path = os.path.abspath(os.path.expanduser(path))
    try:
        if not readonly:
            os.makedirs(path, exist_ok=True)
        usable = os.path.isdir(path) and os.access(path, os.R_OK if readonly else os.R_OK | os.W_OK)
    except OSError:
        usable = False
    if not usable:
        raise XlaError(
            "DM661",
            f"{path} cannot hold the compilation cache",
            why="it is no folder that can be read" if readonly else "it is no folder that can be read and written",
            cure="give another path, or readonly=True for a cache that others fill",
        )
    jax.config.update("jax_compilation_cache_dir", path)
    # jax writes what took at least so long to compile: everything, or with readonly nothing.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", sys.float_info.max if readonly else 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if not _listening:
        _listening.append(True)
        jax.monitoring.register_event_listener(_count)


def initialize_from_environment() -> None:
    """What XLA_PERSISTENT_CACHE_PATH and XLA_PERSISTENT_CACHE_READ_ONLY=1 ask for."""
    path = os.environ.get("XLA_PERSISTENT_CACHE_PATH")
    if path:
        initialize_cache(path, readonly=os.environ.get("XLA_PERSISTENT_CACHE_READ_ONLY", "0") not in ("", "0"))


def _count(event: str, **_: Any) -> None:
    name = _EVENTS.get(event)
    if name is not None:
        metrics.counter(name)
