"""XLA programs kept on disk, so that the next process loads what this one compiled.

>>> initialize_cache("/tmp/xla_cache")
>>> metrics.counters["PersistentCacheHit"], metrics.counters["PersistentCacheMiss"]
"""

from __future__ import annotations

import os
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import jax

from dynamotor.extension_api import XlaError

from . import metrics
from .errors import require

_EVENTS = {
    "/jax/compilation_cache/cache_hits": "PersistentCacheHit",
    "/jax/compilation_cache/cache_misses": "PersistentCacheMiss",
}
_listening: list[bool] = []
_readonly: list[bool] = []
_DAMAGED = "Error reading persistent compilation cache entry"  # how jax's warning begins
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Keep compiled programs in the folder `path` (made where missing), and look there before compiling.

    readonly: look, but write nothing. A damaged entry is compiled anew, with a warning (DM675). DM661 where
    the folder cannot be used. Counters: PersistentCacheHit, PersistentCacheMiss (a program was compiled),
    PersistentCacheDamaged.
    """
    path = os.path.abspath(os.path.expanduser(path))
    try:
        if not readonly:
            os.makedirs(path, exist_ok=True)
        usable = os.path.isdir(path) and os.access(path, os.R_OK if readonly else os.R_OK | os.W_OK)
    except OSError:
        usable = False
    require(
        usable,
        "DM661",
        f"{path} cannot hold the compilation cache",
        why="it is no folder that can be read"
        if readonly
        else "it is no folder that can be read and written",
        cure="give another path, or readonly=True for a cache that others fill",
    )
    _readonly[:] = [True] if readonly else []
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
        initialize_cache(
            path, readonly=os.environ.get("XLA_PERSISTENT_CACHE_READ_ONLY", "0") not in ("", "0")
        )


def watch() -> None:
    """Within `warnings.catch_warnings()`: what jax says of a damaged entry becomes a coded warning with the
    user's line, and the entry is removed, so that the program that is compiled now takes its place."""
    warnings.filterwarnings("always", message=_DAMAGED)
    show = warnings.showwarning

    def explained(message: Any, *args: Any, **kwargs: Any) -> None:
        if _DAMAGED in str(message):
            message = type(message)(str(_damaged_entry(str(message))))
        show(message, *args, **kwargs)

    warnings.showwarning = explained


def _damaged_entry(reason: str) -> XlaError:
    metrics.counter("PersistentCacheDamaged")
    folder = Path(jax.config.jax_compilation_cache_dir or "")  # type: ignore[attr-defined]  # made at run time
    removed = [entry.name for entry in folder.glob("*-cache") if _is_damaged(entry) and _remove(entry)]
    cure = "nothing: the program is compiled anew" + (
        f"; removed {', '.join(removed)}" if removed else "; remove the folder"
    )
    return XlaError(
        "DM675",
        f"the compilation cache {folder} is damaged",
        why=reason,
        cure=cure,
        where=metrics.user_line(),
    )


def _is_damaged(entry: Path) -> bool:
    """Whether an entry cannot be decompressed. Where jax compresses with zstandard nothing is known."""
    data = entry.read_bytes()
    if data.startswith(_ZSTANDARD):
        return False
    try:
        zlib.decompress(data)
    except zlib.error:
        return True
    return False


def _remove(entry: Path) -> bool:
    if _readonly:
        return False
    entry.unlink(missing_ok=True)
    return True


def _count(event: str, **_: Any) -> None:
    name = _EVENTS.get(event)
    if name is not None:
        metrics.counter(name)
