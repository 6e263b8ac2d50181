"""A replica's end of the lifeline: who has died, and waiting for the device without waiting for the dead.

>>> peers = Peers.connect(("127.0.0.1", 4711), rank=1)
>>> peers.guard(lambda: jax.block_until_ready(arrays))      # raises DM640 when a peer is gone
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from dynamotor.extension_api import XlaError

from . import metrics
from .coordinator import BEAT, BEAT_SECONDS, FAREWELL

T = TypeVar("T")
_POLL_SECONDS = 0.2
_VERDICT_SECONDS = 5.0  # how long after a failed collective the news of a death may still arrive


def start_coordinator(host: str, replicas: int, silence: float) -> tuple[int, int]:
    """Start coordinator.py on an address of this machine; (jax port, lifeline port). DM644 when it does not
    start.
    """
    command = [
        sys.executable,
        str(Path(__file__).with_name("coordinator.py")),
        host,
        str(replicas),
        str(silence),
    ]
    # A session of its own: Ctrl-C and a launcher's signals are for the replicas; it ends when they have.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None  # both are pipes
    line = process.stdout.readline().split()
    if len(line) != 2:
        _, errors = process.communicate()
        raise XlaError(
            "DM644",
            "the coordination service of the replicas did not start",
            why=errors.strip()[-500:],
            cure="check that jaxlib can be imported and that this machine may open ports",
        )
    threading.Thread(target=process.stderr.read, daemon=True, name="xla coordinator log").start()
    return int(line[0]), int(line[1])


class Peers:
    """The state of the other replicas, kept by a thread that listens at the lifeline and beats."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._news = threading.Condition()
        self._waiter: queue.SimpleQueue[Callable[[], None]] | None = None
        self.dead: dict[int, str] = {}
        self.left: set[int] = set()
        self.closed = False

    @classmethod
    def connect(cls, address: tuple[str, int], rank: int, timeout: float = 60.0) -> Peers:
        """Open this replica's lifeline. OSError without a listener."""
        connection = socket.create_connection(address, timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"%d\n" % rank)
        peers = cls(connection)
        threading.Thread(target=peers._listen, daemon=True, name="xla lifeline").start()
        return peers

    def _listen(self) -> None:
        text = b""
        while not self.closed:
            try:
                if select.select([self._connection], [], [], BEAT_SECONDS)[0]:
                    data = self._connection.recv(4096)
                    if not data:
                        raise ConnectionError
                    *lines, text = (text + data).split(b"\n")
                    for line in lines:
                        self._learn(line.decode())
                self._connection.sendall(BEAT)
            except (OSError, ValueError):
                if not self.closed:
                    self._learn("dead -1 the coordination service ended")
                return

    def _learn(self, line: str) -> None:
        kind, rank, *reason = line.split(" ", 2)
        with self._news:
            if kind == "dead":
                self.dead[int(rank)] = reason[0]
            else:
                self.left.add(int(rank))
            self._news.notify_all()

    def error(self, error: BaseException | None = None) -> XlaError:
        """The coded error that says which peers are gone (DM640), or that a collective failed while all are
        alive (DM641).
        """
        gone = dict.fromkeys(self.left, "it finished") | self.dead
        if not gone:
            return XlaError(
                "DM641",
                "a collective operation failed",
                why=str(error)[:500],
                where=metrics.user_line(),
                cure="check that all replicas run the same steps with the same shapes",
            )
        who = "; ".join(f"replica {rank}: {why}" if rank >= 0 else why for rank, why in sorted(gone.items()))
        return XlaError(
            "DM640",
            "a collective operation cannot complete: a peer is gone",
            why=who,
            where=metrics.user_line(),
            cure="look at the first error of that replica; restart all of them from the last checkpoint",
        )

    def check(self) -> None:
        """Raise DM640 when a peer is known to be dead."""
        if self.dead:
            raise self.error()

    def judge(self, error: BaseException) -> XlaError:
        """The coded error for a collective that failed: waits a little for the news of a death."""
        with self._news:
            self._news.wait_for(lambda: bool(self.dead or self.left), _VERDICT_SECONDS)
        return self.error(error)

    def guard(self, job: Callable[[], T]) -> T:
        """`job()`, run on another thread so that this one can give up: it may block in the runtime on a peer
        that never answers.

        DM640 when a peer is or becomes dead, DM641 when the runtime fails while all peers are alive.
        """
        self.check()
        done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def work() -> None:
            try:
                done.put((job(), None))
            except BaseException as error:  # handed to the thread that waits
                done.put((None, error))

        self._on_waiter(work)
        while True:
            try:
                result, error = done.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                self._check_while_waiting()
                continue
            if error is not None:
                raise (
                    self.judge(error)
                    if isinstance(error, (jax.errors.JaxRuntimeError, ValueError))
                    else error
                ) from error
            return result

    def _check_while_waiting(self) -> None:
        if self.dead:
            self._waiter = None  # its thread may never come back
            raise self.error()

    def _on_waiter(self, job: Callable[[], None]) -> None:
        """Run a job on the thread that blocks in the runtime, so that this one can give up."""
        if self._waiter is None:
            jobs = self._waiter = queue.SimpleQueue()

            def work() -> None:
                while True:
                    jobs.get()()

            threading.Thread(target=work, daemon=True, name="xla waiter").start()
        self._waiter.put(job)

    def farewell(self) -> None:
        """Leave in good order: the others are told that this replica has finished."""
        self.close(FAREWELL)

    def close(self, last_words: bytes = b"") -> None:
        """End the lifeline; without last words the others take it for a death."""
        self.closed = True
        with contextlib.suppress(OSError):  # the coordinator is gone already
            self._connection.sendall(last_words)
            self._connection.shutdown(socket.SHUT_RDWR)
