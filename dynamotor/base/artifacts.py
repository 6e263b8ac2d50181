"""The disk cache's entries used by this process, as one file: built on one machine, at hand on others like
it.

>>> data = save_cache_artifacts()        # after the calls that are to be quick elsewhere
>>> load_cache_artifacts(data)           # in another process, before its first calls; 14
14
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile

from . import cache
from .errors import UsageError

FORMAT = "dynamotor-cache-1"
_KIND, _KEY = re.compile(r"[a-z][a-z_-]*"), re.compile(r"[0-9a-f]{64}")


def save_cache_artifacts() -> bytes:
    """The entries of the disk cache that this process read or wrote, as a zip file.

    On a machine of another kind, or with other versions, its entries are not found (their keys say what they
    were made for).
    """
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        index = []
        for kind, key in sorted(cache.used):
            payload = cache.load(kind, key)
            if payload is not None:
                archive.writestr(f"{kind}/{key}", payload)
                index.append([kind, key, hashlib.sha256(payload).hexdigest()])
        archive.writestr("index.json", json.dumps({"format": FORMAT, "entries": index}))
    return file.getvalue()


def load_cache_artifacts(data: bytes) -> int:
    """Put what `save_cache_artifacts` gave into the disk cache; gives the number of entries.

    The entries are code: load only what comes from where your programs come from. All are checked before the
    first is stored. Raises UsageError (DM113) when the bytes are not whole or were not made by
    `save_cache_artifacts`.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            index = json.loads(archive.read("index.json"))
            if index["format"] != FORMAT:
                raise ValueError(f"its format is {index['format']!r}, not {FORMAT!r}")
            found = [_checked(archive, *row) for row in index["entries"]]
    except (
        zipfile.BadZipFile,
        KeyError,
        ValueError,
        TypeError,
        EOFError,
        OSError,
        NotImplementedError,
    ) as error:
        raise UsageError(
            "DM113",
            "these bytes are no artifacts of dynamotor's cache, or not all of them",
            why=f"{type(error).__name__}: {error}",
            cure="make them anew with save_cache_artifacts()",
        ) from error
    return sum(cache.store(kind, key, payload) for kind, key, payload in found)


def _checked(archive: zipfile.ZipFile, kind: str, key: str, digest: str) -> tuple[str, str, bytes]:
    if not (_KIND.fullmatch(kind) and _KEY.fullmatch(key)):
        raise ValueError(f"an entry has the name {kind}/{key}")
    payload = archive.read(f"{kind}/{key}")
    if hashlib.sha256(payload).hexdigest() != digest:
        raise ValueError(f"the entry {kind}/{key} is damaged")
    return kind, key, payload
