"""Files in Google Cloud Storage, and functions that take local and `gs://` paths alike. Needs `pip install
dynamotor[gcs]`.

>>> write("gs://bucket/run/notes.txt", "hello")
>>> generic_read("gs://bucket/run/notes.txt")
b'hello'
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import uuid
from datetime import datetime
from glob import has_magic
from typing import IO, Any, NamedTuple

from dynamotor.extension_api import XlaError

from ..errors import require

CLOUD_STORAGE_PREFIX = "gs://"


class GcsBlob(NamedTuple):
    """One object or folder: its `gs://` path, its bytes, its time of change in seconds since 1970 (0.0 where
    unknown).
    """

    path: str
    size: int
    mtime: float
    isdir: bool


@functools.cache
def _filesystem() -> Any:
    """The fsspec filesystem behind all calls (tests put another one here)."""
    try:
        import gcsfs
    except ImportError:
        raise XlaError(
            "DM650",
            "Google Cloud Storage needs the gcsfs library, which is not installed",
            why="a gs:// path was used",
            cure="pip install dynamotor[gcs], or use a local path",
        ) from None
    # Other machines write to the same bucket: nothing that was listed before may be believed.
    return gcsfs.GCSFileSystem(use_listings_cache=False)


def _key(path: str) -> str:
    require(
        is_gcs_path(path),
        "DM651",
        f"{path!r} is not a GCS path",
        why="it must be gs://BUCKET_NAME/PATH",
        cure="or use generic_*",
    )
    return path.removeprefix(CLOUD_STORAGE_PREFIX)


def _blob(info: dict[str, Any]) -> GcsBlob:
    when = info.get("mtime") or info.get("updated") or info.get("created") or 0.0
    if isinstance(when, str):
        when = datetime.fromisoformat(when.replace("Z", "+00:00"))
    mtime = when.timestamp() if isinstance(when, datetime) else float(when)
    path = CLOUD_STORAGE_PREFIX + info["name"].lstrip("/")
    return GcsBlob(path, int(info.get("size") or 0), mtime, info["type"] == "directory")


class _Rewritten(io.BytesIO):
    """A blob opened for appending or updating: GCS cannot change objects, so the whole content is written
    back at close.
    """

    def __init__(self, path: str, content: bytes, at_end: bool) -> None:
        super().__init__(content)
        self._path = path
        self.seek(0, os.SEEK_END if at_end else os.SEEK_SET)

    def close(self) -> None:
        if not self.closed:
            write(self._path, self.getvalue())
        super().close()


def open(path: str, mode: str = "r", encoding: str | None = None) -> IO[Any]:
    """Open a GCS file.

    path: "gs://BUCKET_NAME/PATH". mode: as for the built-in `open` ("r", "w", "a", "r+", with "b" for bytes).
    encoding: for text modes. Raises FileNotFoundError as `open` does.
    """
    key, binary = _key(path), "b" in mode
    if mode[0] == "a" or "+" in mode:
        exists = _filesystem().exists(key)
        if not exists and mode[0] == "r":
            raise FileNotFoundError(path)
        content = _filesystem().cat_file(key) if exists and mode[0] != "w" else b""
        raw = _Rewritten(path, content, at_end=mode[0] == "a")
        return raw if binary else io.TextIOWrapper(raw, encoding=encoding)
    return _filesystem().open(key, mode, encoding=encoding)


def list(path: str) -> builtins.list[GcsBlob]:
    """The contents of a path: the entries of a bucket or folder, the matches of a pattern (`*`, `?`, `**`),
    or the one file.

    path: "gs://BUCKET_NAME/PATH". An empty list where nothing is there.
    """
    fs, key = _filesystem(), _key(path).rstrip("/")
    with contextlib.suppress(FileNotFoundError):
        found = fs.glob(key, detail=True).values() if has_magic(key) else fs.ls(key, detail=True)
        return sorted(map(_blob, found))
    return []


def stat(path: str) -> GcsBlob:
    """The size, time and kind of a GCS file ("gs://BUCKET_NAME/PATH"). FileNotFoundError where it is
    missing.
    """
    return _blob(_filesystem().info(_key(path)))


def remove(path: str) -> None:
    """Remove one GCS blob ("gs://BUCKET_NAME/PATH"). FileNotFoundError where it is missing."""
    _filesystem().rm_file(_key(path))


def rmtree(path: str) -> None:
    """Remove all blobs under a folder, or all that match a pattern ("gs://BUCKET_NAME/PATH"); no error where
    there are none.
    """
    with contextlib.suppress(FileNotFoundError):
        _filesystem().rm(_key(path).rstrip("/"), recursive=True)


def read(path: str) -> bytes:
    """The whole content of a GCS blob ("gs://BUCKET_NAME/PATH")."""
    return _filesystem().cat_file(_key(path))


def write(path: str, content: str | bytes | IO[Any]) -> None:
    """Write a string (as UTF-8), bytes, or the rest of a file object, into a GCS blob
    ("gs://BUCKET_NAME/PATH").
    """
    data = content if isinstance(content, (str, bytes, bytearray, memoryview)) else content.read()
    _filesystem().pipe_file(_key(path), data.encode() if isinstance(data, str) else bytes(data))


def generic_open(path: str, mode: str = "r", encoding: str | None = None) -> IO[Any]:
    """Open a file, on GCS ("gs://BUCKET_NAME/PATH") or not; mode and encoding as for the built-in `open`."""
    return (open if is_gcs_path(path) else builtins.open)(path, mode=mode, encoding=encoding)


def generic_read(path: str) -> bytes:
    """The whole content of a GCS blob or a local file."""
    with generic_open(path, "rb") as f:
        return f.read()


def generic_write(output_string: str | bytes, path: str, makedirs: bool = False) -> None:
    """Write a string (as UTF-8) or bytes to a GCS blob or a local file.

    makedirs: make the local path's folders where they are missing (GCS has none to make). A reader of a local
    file sees the old or the new content, never a part: the file is written beside and renamed.
    """
    if is_gcs_path(path):
        write(path, output_string)
        return
    if makedirs:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    with builtins.open(temporary, "wb") as f:
        f.write(output_string.encode() if isinstance(output_string, str) else output_string)
    os.replace(temporary, path)


def is_gcs_path(path: str) -> bool:
    """Whether a path is a GCS path (begins with `gs://`)."""
    return path.startswith(CLOUD_STORAGE_PREFIX)
