"""The disk cache: content-keyed entries, written whole or not at all, checked when read.

An entry is a file `<kind>/<key[:2]>/<key>`: 32 bytes of SHA-256 over the payload, then the payload. It is written to
a temporary file in the same folder, flushed to disk and renamed, so a killed process or a full disk leaves no entry
that loads. A file whose checksum is wrong is removed and counts as a miss.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from .config import config
from .events import counters
from .log import warn_once

_DIGEST = 32


def digest(*parts: str | bytes) -> str:
    """A hex key over the parts, which are length-prefixed so that they cannot run into each other."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()


def entry_path(kind: str, key: str) -> Path:
    """Where an entry lies (whether or not it exists)."""
    return Path(config.cache_dir) / kind / key[:2] / key


def load(kind: str, key: str) -> bytes | None:
    """The payload stored under (kind, key), or None when there is none, it is damaged, or the cache is off."""
    if not config.disk_cache:
        return None
    path = entry_path(kind, key)
    try:
        data = path.read_bytes()
    except OSError:
        counters["cache"][f"{kind}.miss"] += 1
        return None
    payload = data[_DIGEST:]
    if len(data) < _DIGEST or hashlib.sha256(payload).digest() != data[:_DIGEST]:
        counters["cache"][f"{kind}.damaged"] += 1
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    counters["cache"][f"{kind}.hit"] += 1
    return payload


def store(kind: str, key: str, payload: bytes) -> bool:
    """Store the payload; False (and one warning) when the disk refuses. Never raises, never leaves half an entry."""
    if not config.disk_cache:
        return False
    path = entry_path(kind, key)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(payload).digest())
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return True
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        counters["cache"]["store_failed"] += 1
        warn_once("cache-store", f"the cache at {config.cache_dir} cannot be written ({error}); compiling without it")
        return False
