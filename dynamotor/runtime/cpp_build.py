"""Compile C++ text to a shared library and load it; libraries are kept in the disk cache by content.

>>> library = load_library('extern "C" int two() { return 2; }')
>>> library.address("two")            # the function's address, an int
>>> kernel = make_kernel(library, "k0", 2)
>>> kernel(source, result)            # calls void k0(void** ptrs, const int64_t* ints) with two data pointers

The cache holds the library's bytes, so a damaged or half-written entry is rebuilt and two processes may share
it.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from .. import _C
from ..base import cache
from ..base.config import config
from ..base.errors import BuildError
from ..base.events import counters, emit, log, timed
from .cpp_text import laid_out

BASE_FLAGS = ("-shared", "-fPIC")
WAIT_SECONDS = 60.0  # for another process that builds the same source
_NO_SPACE = ("No space left on device", "Disk quota exceeded", "File size limit exceeded")  # compilers' words
_CURE = "install g++ (or clang++), set $CXX or dynamotor.config.cxx"


@dataclass(frozen=True)
class Library:
    """A loaded shared library. It stays loaded for the life of the process: kernels may still point into
    it.
    """

    handle: ctypes.CDLL = field(repr=False)
    key: str

    def address(self, name: str) -> int:
        """The address of an exported function; AttributeError when the library has none of that name."""
        return ctypes.cast(getattr(self.handle, name), ctypes.c_void_p).value or 0

    def number(self, name: str) -> ctypes.c_int64:
        """An exported 64-bit variable, to read and set."""
        return ctypes.c_int64.in_dll(self.handle, name)


def find_compiler() -> list[str]:
    """The C++ compiler as a command: config.cxx, $CXX ("ccache g++" is fine), g++, clang++. BuildError DM301
    without one.
    """
    asked = config.cxx or os.environ.get("CXX", "")
    for name in (asked,) if asked else ("g++", "clang++"):
        words = shlex.split(name)
        path = shutil.which(words[0]) if words else None
        if path:
            return [path, *words[1:]]
    raise BuildError(
        "DM301",
        "no C++ compiler was found",
        cure=_CURE,
        why=f"{asked!r} is not an executable on PATH" if asked else "neither g++ nor clang++ is on PATH",
    )


@functools.cache
def _compiler_version(command: tuple[str, ...], modified: int) -> str:
    """The compiler's version text; kept on disk, because asking takes as long as a small kernel."""
    key = cache.digest("compiler-1", *command, str(modified))
    known = cache.load("compiler", key)
    if known is not None:
        return known.decode()
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(
            "DM301", f"the C++ compiler {' '.join(command)} does not run", why=str(error), cure=_CURE
        ) from error
    cache.store("compiler", key, done.stdout.encode())
    return done.stdout


@functools.cache
def cpu_model() -> str:
    """Names the processor and its instruction sets: code built with -march=native may only be shared among
    equals.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(
        line for line in lines if line.startswith(("model", "flags", "Features", "CPU", "vendor_id"))
    )


def _version() -> str:
    compiler = find_compiler()
    return _compiler_version(tuple(compiler), os.stat(compiler[0]).st_mtime_ns)


@functools.cache
def _without_faults(version: str) -> tuple[str, ...]:
    """Flags that keep a compiler of this version from code that is known to be wrong.

    GCC 12 tuned for Zen 3 or Haswell makes gathers of AVX2 of the loops over a vector's lanes, and some read
    nothing (bilinear upsampling lost four of eight lanes). AVX-512's gathers, which have masks, are right;
    older versions know no such setting.
    """
    found = re.search(r"^\S+ \(.*\) (\d+)\..*\n.*Free Software Foundation", version)
    concerned = found is not None and int(found[1]) >= 12 and platform.machine() in ("x86_64", "AMD64")
    if not concerned or "avx512f" in cpu_model():
        return ()
    return ("-mtune-ctrl=^use_gather,^use_gather_4parts,^use_gather_2parts",)


def _without_unused(flags: Sequence[str], version: str) -> tuple[str, ...]:
    """Flags that link a kernel with threads to the libraries that it uses: C++'s costs GCC 8 ms more."""
    concerned = "-fopenmp" in flags and not config.sanitize and "Free Software Foundation" in version
    return ("-nodefaultlibs", "-lgomp", "-lm", "-lc", "-lgcc") if concerned else ()


def _mixed(version: str) -> tuple[str, ...]:
    """Flags that mix the operations of several vectors in one turn of a loop: GCC leaves that to processors
    with x86-64, which look ahead less far than an `exp` is long.
    """
    return ("-fschedule-insns", "-fsched-pressure") if "Free Software Foundation" in version else ()


def _options(flags: Sequence[str]) -> tuple[str, ...]:
    version = _version()
    return (
        *BASE_FLAGS,
        *flags,
        *_mixed(version),
        *_without_faults(version),
        *_without_unused(flags, version),
        *config.cxx_flags,
    )


def build_key(source: str, flags: Sequence[str]) -> str:
    """The cache key of a build: everything that decides the bytes of the library."""
    options = "\0".join((*find_compiler(), *_options(flags)))
    return cache.digest("build-1", source, options, _version(), cpu_model())


def _failure(code: str, what: str, why: str, source: str, key: str, cure: str) -> BuildError:
    """A BuildError whose text names a kept copy of the source."""
    counters["build"]["failed"] += 1
    for folder in (cache.entry_path("failed", key).parent, Path(tempfile.gettempdir())):
        try:
            cache.make_folder(folder)
            handle, kept = tempfile.mkstemp(
                ".cpp", f"dynamotor-{key[:16]}-", folder
            )  # no name that others can foresee
            with os.fdopen(handle, "w") as file:
                file.write(source)
        except OSError:
            continue
        return BuildError(code, what, why=f"{why}\n  source: {kept}", cure=cure)
    return BuildError(code, what, why=f"{why}\n  source: (could not be kept: the disk refuses)", cure=cure)


def _run_compiler(source: str, flags: Sequence[str], key: str) -> bytes:
    """The bytes of the library built from `source`; BuildError DM302 (compiler error) or DM303 (time,
    disk).
    """
    compiler = find_compiler()
    try:
        with tempfile.TemporaryDirectory(prefix="dynamotor-build-") as folder:
            text, out = os.path.join(folder, "unit.cpp"), os.path.join(folder, "unit.so")
            with open(text, "w") as file:
                file.write(source)
            command = [*compiler, text, "-o", out, *_options(flags)]
            with timed("build"):
                quick = (
                    {**os.environ, "LD_PRELOAD": ""} if config.sanitize else None
                )  # the sanitizers are for built code alone
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=config.build_seconds,
                    check=False,
                    env=quick,
                )
            if done.returncode == 0:
                counters["build"]["compiled"] += 1
                return Path(out).read_bytes()
            if any(text in done.stderr for text in _NO_SPACE):
                raise OSError(done.stderr.strip().splitlines()[0])
            errors = [line for line in done.stderr.splitlines() if "error" in line][
                :5
            ] or done.stderr.splitlines()[:5]
            why = f"{' '.join(compiler)} exited with {done.returncode}: " + "\n    ".join(errors)
    except subprocess.TimeoutExpired as error:
        raise _failure(
            "DM303",
            "compiling generated C++ took too long",
            str(error),
            source,
            key,
            "use a faster machine or file system, raise config.build_seconds, or report the source",
        ) from error
    except OSError as error:
        raise _failure(
            "DM303",
            "generated C++ could not be written or compiled",
            str(error),
            source,
            key,
            "free disk space, or point TMPDIR at a writable folder",
        ) from error
    raise _failure(
        "DM302",
        "the C++ compiler refused generated code",
        why,
        source,
        key,
        "report the source; dynamotor.config.strict=False runs such graphs on aten kernels",
    )


def _open(payload: bytes, key: str) -> ctypes.CDLL:
    """dlopen library bytes from a private file, or from memory when no file can be written."""
    with contextlib.suppress(OSError):
        handle, path = tempfile.mkstemp(".so", f"dynamotor-{key[:16]}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(payload)
            return ctypes.CDLL(path)
        finally:
            os.unlink(path)
    # The descriptor stays open: the loader knows libraries by path, and a closed number would come back as
    # another file.
    handle = os.memfd_create(f"dynamotor-{key[:16]}")
    os.write(handle, payload)
    return ctypes.CDLL(f"/proc/self/fd/{handle}")


def library_of(payload: bytes, key: str) -> Library:
    """A library that was built elsewhere, for a machine like this one."""
    return Library(_open(payload, key), key)


def _build(source: str, flags: tuple[str, ...], key: str) -> Library:
    """Load the library from the cache or build it; a cached one that does not load is built again."""
    found = _from_cache(key)
    if found is not None:
        return found
    with cache.exclusive("build", key, WAIT_SECONDS) as waited:
        found = _from_cache(key) if waited else None
        if found is not None:
            return found
        payload = _run_compiler(source, flags, key)
        try:
            library = Library(_open(payload, key), key)
        except OSError as error:
            raise _failure(
                "DM302", "a built library does not load", str(error), source, key, "report the source"
            ) from error
        cache.store("build", key, payload)
    return library


def _from_cache(key: str) -> Library | None:
    payload = cache.load("build", key)
    if payload is not None:
        with contextlib.suppress(OSError), timed("load"):
            return Library(_open(payload, key), key)
        counters["cache"]["build.unloadable"] += 1
    return None


def stored_library(key: str) -> Library | None:
    """The library of an earlier build of this key, if need be once another process has built it; None when
    there is none.
    """
    place = config.cache_dir, key
    with _lock:
        future = _libraries.get(place)
    if future is not None and (future.done() or _pool_process == os.getpid()):
        return None if future.exception() is not None else future.result()
    found = _from_cache(key)
    if found is None:
        with cache.exclusive("build", key, WAIT_SECONDS) as waited:
            found = _from_cache(key) if waited else None
    if found is not None:
        done: Future[Library] = Future()
        done.set_result(found)
        with _lock:
            _libraries.setdefault(place, done)
    return found


_lock = threading.Lock()
# By the folder of the disk cache, too: a library is loaded and stored in each cache that is used.
_libraries: dict[tuple[str, str], Future[Library]] = {}
_pool: ThreadPoolExecutor | None = None
_pool_process = 0


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _workers() -> ThreadPoolExecutor:
    """The pool that waits for compilers; a forked child gets its own, because threads do not survive a
    fork.
    """
    global _pool, _pool_process
    if _pool is None or _pool_process != os.getpid():
        _pool = ThreadPoolExecutor(max_workers=max(2, processors()), thread_name_prefix="dynamotor-build")
        _pool_process = os.getpid()
        for place in [place for place, future in _libraries.items() if not future.done()]:
            del _libraries[place]
    return _pool


def start_build(source: str, flags: Sequence[str] = ()) -> Future[Library]:
    """Build and load in the background; equal sources share one build. `.result()` gives the Library or
    BuildError.
    """
    log("code", lambda: laid_out(source))
    try:
        key = build_key(source, flags)
    except BuildError as error:
        failed: Future[Library] = Future()
        failed.set_exception(error)
        return failed
    emit("build", key=key, source=source, flags=tuple(flags))
    with _lock:
        pool = _workers()
        place = config.cache_dir, key
        future = _libraries.get(place)
        if future is None or (future.done() and future.exception() is not None):
            future = _libraries[place] = pool.submit(
                contextvars.copy_context().run, _build, source, tuple(flags), key
            )
        return future


def load_library(source: str, flags: Sequence[str] = ()) -> Library:
    """Build (or find) and load one C++ source. Errors: BuildError DM301 no compiler, DM302 refused, DM303
    time or disk.
    """
    return start_build(source, flags).result()


def make_kernel(library: Library, name: str, n_tensors: int, ints: Sequence[int] = ()) -> Callable[..., None]:
    """A callable of `n_tensors` tensors that runs the library's C function on their data pointers and on
    `ints`.
    """
    return _C.Kernel(library.address(name), n_tensors, tuple(ints), release_gil=True, owner=library)
