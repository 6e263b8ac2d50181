"""Build Triton functions into GPU code in worker processes; the code is kept in the disk cache by content.

>>> pending = start_kernel(TritonJob(text, "k0", ("*fp32", "*fp32"), warps=4, arch=90))
>>> pending.result().shared           # bytes of shared memory of a launch

A process that finds all its kernels in the cache starts no worker and does not import triton.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ..base import cache
from ..base.errors import BuildError
from ..base.events import counters, emit, log, timed
from . import triton_worker
from .cpp_build import processors

MAX_WORKERS = 16
WAIT_SECONDS = 60.0  # for another process that builds the same kernel
_CURE = "report the kernel; dynamotor.config.strict=False runs such graphs on aten kernels"


@dataclass(frozen=True, slots=True)
class TritonJob:
    """What decides the code of one function.

    aligned: all pointers are multiples of 16. arch: 90 for an H100 or H200. stages: of a loop's pipeline, 0
    for triton's own. scratch: bytes of memory of its own that a launch gives each program. overlaps: it waits
    for the kernel before it itself, so that a launch may begin before that one ends.
    """

    source: str
    name: str
    signature: tuple[str, ...]
    warps: int
    arch: int
    aligned: bool = True
    debug: bool = False
    stages: int = 0
    scratch: int = 0
    overlaps: bool = False


@dataclass(frozen=True, slots=True)
class GpuCode:
    """Built code: the cubin, the name of its entry, and the shape of a launch.

    extra: pointers that triton expects behind the function's own: the first to its scratch memory (null ones
    do without any).
    """

    cubin: bytes
    symbol: str
    shared: int
    warps: int
    extra: int


@functools.cache
def triton_version() -> str:
    """The installed triton, "" when there is none."""
    return "" if importlib.util.find_spec("triton") is None else metadata.version("triton")


def job_key(job: TritonJob) -> str:
    """The cache key of a build."""
    return cache.digest("triton-4", triton_version(), repr(sorted(asdict(job).items())))


class _Worker:
    """One process that compiles, forked by `server`. `ask` is called by one thread at a time."""

    def __init__(self, server: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(server, [b"w"], [theirs.fileno()])
            self.stream: Any = ours.makefile("rwb")

    def ask(self, job: TritonJob) -> Any:
        """The worker's answer; None when it died."""
        try:
            triton_worker.send(self.stream, asdict(job))
            return triton_worker.receive(self.stream)
        except OSError:
            return None


class _Pool:
    """Threads that wait for workers; idle workers are kept for the next job."""

    def __init__(self) -> None:
        self.process = os.getpid()
        count = min(MAX_WORKERS, processors())
        self.threads = ThreadPoolExecutor(count, thread_name_prefix="dynamotor-triton")
        self.idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self.lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        self.server, theirs = socket.socketpair()
        with theirs:
            self.forks = subprocess.Popen(
                [sys.executable, triton_worker.__file__],
                stdin=theirs.fileno(),
                cwd=str(Path(triton_worker.__file__).parent.anchor),
            )

    def _worker(self) -> _Worker:
        with contextlib.suppress(queue.Empty):
            return self.idle.get_nowait()
        with self.lock:
            try:
                return _Worker(self.server)
            except OSError:  # the process was killed
                self.server.close()
                self._start()
                return _Worker(self.server)

    def run(self, job: TritonJob) -> Any:
        worker = self._worker()
        answer = worker.ask(job)
        if answer is not None:
            self.idle.put(worker)
        return answer

    def stop(self) -> None:
        """End the processes; workers end with their streams."""
        self.server.close()
        self.idle = queue.LifoQueue()
        self.forks.wait(10)


_lock = threading.Lock()
_pool: _Pool | None = None
_pending: dict[str, Future[GpuCode]] = {}


def _workers() -> _Pool:
    global _pool
    if _pool is None or _pool.process != os.getpid():  # a forked child gets workers of its own
        _pool = _Pool()
        for key in [key for key, future in _pending.items() if not future.done()]:
            del _pending[key]
    return _pool


def prepare() -> None:
    """Start what imports triton, for a graph that is still to be traced."""
    if triton_version():
        with _lock:
            _workers()


def stop_workers() -> None:
    """End the worker processes; the next build starts new ones."""
    global _pool
    with _lock:
        if _pool is not None and _pool.process == os.getpid():
            _pool.stop()
            _pool = None


def _compile(job: TritonJob, key: str) -> GpuCode:
    with cache.exclusive("triton", key, WAIT_SECONDS) as waited:
        stored = cache.load("triton", key) if waited else None
        return _unpacked(stored) if stored is not None else _compile_now(job, key)


def _compile_now(job: TritonJob, key: str) -> GpuCode:
    with timed("triton"):
        answer = _workers().run(job)
    if answer is None or "error" in answer:
        counters["build"]["failed"] += 1
        why = "a worker process died" if answer is None else answer["error"]
        raise BuildError(
            "DM305", f"Triton could not build the kernel {job.name}", why=f"{why}\n{job.source}", cure=_CURE
        )
    counters["build"]["triton"] += 1
    code = GpuCode(**answer)
    cache.store("triton", key, _packed(code))
    return code


def _packed(code: GpuCode) -> bytes:
    """Built code as bytes: a line of JSON, then the cubin."""
    facts = {name: value for name, value in asdict(code).items() if name != "cubin"}
    return json.dumps(facts).encode() + b"\n" + code.cubin


def _unpacked(stored: bytes) -> GpuCode:
    facts, _, cubin = stored.partition(b"\n")
    return GpuCode(cubin=cubin, **json.loads(facts))


def start_kernel(job: TritonJob) -> Future[GpuCode]:
    """Build in the background; equal jobs share one build. `.result()` gives the code or BuildError DM304,
    DM305.
    """
    key = job_key(job)
    with _lock:
        future = _pending.get(key)
        if future is not None and not (future.done() and future.exception() is not None):
            return future
        future = _pending[key] = Future()
    log("code", job.source)
    emit("build", key=key, source=job.source, flags=(f"sm_{job.arch}", f"{job.warps} warps"))
    stored = cache.load("triton", key)
    if stored is not None:
        future.set_result(_unpacked(stored))
        return future
    if not triton_version():
        future.set_exception(
            BuildError(
                "DM304",
                "triton is not installed",
                why="GPU kernels are built with it",
                cure="pip install triton",
            )
        )
        return future
    with _lock:
        threads = _workers().threads
    running = threads.submit(contextvars.copy_context().run, _compile, job, key)
    running.add_done_callback(lambda done: _copy(done, future))
    return future


def _copy(done: Future[GpuCode], to: Future[GpuCode]) -> None:
    error = done.exception()
    if error is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())
