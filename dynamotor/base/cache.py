"""The disk cache: content-keyed entries, written whole or not at all, checked when read.

An entry is a file `<kind>/<key[:2]>/<key>`: 32 bytes of SHA-256 over the payload, then the payload. It is
written to a temporary file in the same folder, flushed to disk and renamed, so a killed process or a full
disk leaves no entry that loads. A file whose checksum is wrong is removed and counts as a miss. Entries are
code: where others could have written a folder or a file, nothing is loaded or stored, and DM307 is said once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .config import config
from .errors import SettingWarning
from .events import counters, warn_once

_DIGEST = 32
used: set[tuple[str, str]] = set()  # entries that this process has read or written
_WRITING = ".writing-"  # how the names of files begin that are not whole yet


def digest(*parts: str | bytes) -> str:
    """A hex key over the parts, which are length-prefixed so that they cannot run into each other."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()


def make_folder(folder: Path) -> None:
    """Make a folder that only this user can write, and those above it."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def entry_path(kind: str, key: str) -> Path:
    """The path of an entry (whether or not it exists)."""
    return Path(config.cache_dir) / kind / key[:2] / key


def _is_ours(path: Path | str, status: os.stat_result) -> bool:
    """Whether only this user (or root) can have written it."""
    trusted = (
        status.st_uid in (os.geteuid(), 0) and not stat.S_ISLNK(status.st_mode) and not status.st_mode & 0o022
    )
    if not trusted:
        counters["cache"]["refused"] += 1
        warn_once(
            "cache-refused",
            f"[DM307] the cache at {config.cache_dir} is not used: others than you may write {path} "
            f"(owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}), "
            "and its contents run as code\n"
            f"  what to do: remove it, or point DYNAMOTOR_CACHE_DIR at a folder of your own",
            SettingWarning,
        )
    return trusted


def _folders_are_ours(path: Path) -> bool:
    """Whether the folders of an entry, as far as they exist, are this user's alone."""
    try:
        return all(
            _is_ours(folder, os.stat(folder))
            for folder in (path.parents[2], path.parents[1], path.parents[0])
        )
    except FileNotFoundError:
        return True


def _read(path: Path) -> bytes | None:
    """A file's bytes; None when others may have written it. OSError when it is not there or is a link."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return file.read() if _is_ours(path, os.fstat(file.fileno())) and _folders_are_ours(path) else None


def load(kind: str, key: str) -> bytes | None:
    """The payload stored under (kind, key), or None when there is none, it is damaged or not ours, or the
    cache is off.
    """
    if not config.disk_cache:
        return None
    path = entry_path(kind, key)
    try:
        data = _read(path)
    except OSError:
        data = None
    if data is None:
        counters["cache"][f"{kind}.miss"] += 1
        return None
    payload = data[_DIGEST:]
    if len(data) < _DIGEST or hashlib.sha256(payload).digest() != data[:_DIGEST]:
        counters["cache"][f"{kind}.damaged"] += 1
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    counters["cache"][f"{kind}.hit"] += 1
    used.add((kind, key))
    _touch(path)
    return payload


def _touch(path: Path) -> None:
    """Note that an entry is in use: its time says so to `prune`, to the hour."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > 3600:
            os.utime(path)


@contextlib.contextmanager
def exclusive(kind: str, key: str, seconds: float) -> Iterator[bool]:
    """One process at a time makes this entry, the others wait (at most so long); gives whether it may be
    there now: another process was waited for, or made it after this one had looked and before it asked.
    """
    path = entry_path(kind, key).with_suffix(".making")
    handle = -1
    with contextlib.suppress(OSError):
        make_folder(path.parent)
        if config.disk_cache and _folders_are_ours(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    deadline, waited = time.monotonic() + seconds, False
    try:
        while handle >= 0 and not _locked(handle) and time.monotonic() < deadline:
            waited = True
            time.sleep(0.02)
        yield waited or entry_path(kind, key).exists()
    finally:
        if handle >= 0:
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(handle)


def _locked(handle: int) -> bool:
    """Try to take a file's lock, which ends with the process that holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (
            errno.EWOULDBLOCK,
            errno.EINTR,
        )  # a file system without locks: no waiting
    return True


@dataclass(frozen=True)
class Entry:
    """A file of the cache: its kind, path, size and when it was last used (seconds since 1970,
    to the hour).
    """

    kind: str
    path: Path
    nbytes: int
    used: float

    def is_whole(self) -> bool:
        """Whether its content matches its checksum, and only this user can have written it; a source that
        did not build is there for people and has none.
        """
        try:
            data = _read(self.path)
        except OSError:
            return False
        if self.kind == "failed":
            return data is not None
        return data is not None and hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST]


def entries() -> Iterator[Entry]:
    """All entries, in no order. Files that a killed process left half written are among them."""
    for path in Path(config.cache_dir).glob("*/??/*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and path.suffix != ".making":
                yield Entry(path.parts[-3], path, status.st_size, status.st_mtime)


def prune(nbytes: int) -> int:
    """Remove the least recently used until so many bytes are left, and leftovers of killed processes; gives
    how many went.
    """
    kept, removed = 0, 0
    for entry in sorted(entries(), key=lambda entry: -entry.used):
        kept += entry.nbytes
        left_behind = entry.path.name.startswith(_WRITING) and time.time() - entry.used > 3600
        if kept > nbytes or left_behind:
            with contextlib.suppress(OSError):
                entry.path.unlink()
                kept, removed = kept - entry.nbytes, removed + 1
    return removed


_written = 0  # bytes by this process since it last looked at all that is there
_looked = False


def _keep_within_bounds(nbytes: int) -> None:
    """Look after the size of the cache at the first write and after each eighth of its bound."""
    global _written, _looked
    bound = config.cache_megabytes << 20
    _written += nbytes
    if not _looked or _written > bound // 8:
        _written, _looked = 0, True
        prune(bound)


def store(kind: str, key: str, payload: bytes) -> bool:
    """Store the payload; False (and one warning) when the disk refuses. Never raises, never leaves half an
    entry.
    """
    if not config.disk_cache:
        return False
    path = entry_path(kind, key)
    temporary = None
    try:
        make_folder(path.parent)
        if not _folders_are_ours(path):
            return False
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_WRITING)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(payload).digest())
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        used.add((kind, key))
        _keep_within_bounds(len(payload))
        return True
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        counters["cache"]["store_failed"] += 1
        warn_once(
            "cache-store",
            f"[DM310] the cache at {config.cache_dir} cannot be written: {error}\n"
            f"  what happens: programs are compiled anew in each process\n"
            "  what to do: free disk space there, or point DYNAMOTOR_CACHE_DIR at a folder that can be "
            "written",
            SettingWarning,
        )
        return False
