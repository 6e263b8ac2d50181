"""The process that outlives every replica: it hosts jax's coordination service and tells the living who has
died.

jax ends each process whose coordinator is gone, so the coordinator must not live in a replica: replica 0
starts this file as a program of its own (it imports neither torch nor jax, only jaxlib, and starts in 0.2 s).
Every replica holds one connection, its lifeline, and says a word each second; a lifeline that closes without
a farewell, or is silent for too long, is a death, and the others are told. When the last lifeline is closed
the program ends.

    python coordinator.py HOST REPLICAS SILENCE_SECONDS      prints "JAX_PORT LIFELINE_PORT"
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from typing import Any

BEAT = b"beat\n"
FAREWELL = b"farewell\n"
BEAT_SECONDS = 1.0
_FIRST_CONNECTION_SECONDS = 300.0
_LINGER_SECONDS = 5.0


class Lifeline:
    """The connection of one replica: its ordinal once known, the unread part of a line, when it was last
    heard, and whether the others know that it is dead or has left."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank = -1
        self.text = b""
        self.heard = time.monotonic()
        self.gone = False


class Watch:
    """All lifelines: a replica sends its ordinal, beats, perhaps a farewell, and receives `dead RANK REASON`
    and `left RANK`.
    """

    def __init__(self, listener: socket.socket, silence: float) -> None:
        self.silence = silence
        self.lines: list[Lifeline] = []
        self.news: list[bytes] = []
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        self.listener = listener

    def run(self) -> None:
        """Until the last lifeline is closed, or none was opened."""
        start = time.monotonic()
        while self.lines or (not self.news and time.monotonic() - start < _FIRST_CONNECTION_SECONDS):
            for key, _ in self.selector.select(timeout=BEAT_SECONDS):
                if key.fileobj is self.listener:
                    self._welcome(*self.listener.accept())
                else:
                    self._hear(key.data)
            for line in self.lines:
                if time.monotonic() - line.heard > self.silence:
                    self._mourn(line, f"nothing was heard of it for {self.silence:.0f} s")

    def _welcome(self, connection: socket.socket, _: Any) -> None:
        connection.settimeout(1.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = Lifeline(connection)
        self.lines.append(line)
        self.selector.register(connection, selectors.EVENT_READ, line)
        self._send(line, b"".join(self.news))

    def _hear(self, line: Lifeline) -> None:
        try:
            data = line.connection.recv(4096)
        except OSError:
            data = b""
        if not data:
            self._close(line, "its process ended")
            return
        line.heard = time.monotonic()
        *words, line.text = (line.text + data).split(b"\n")
        for word in words:
            if word.isdigit():
                line.rank = int(word)
            elif word + b"\n" == FAREWELL and not line.gone:
                line.gone = True
                self._tell(line, b"left %d\n" % line.rank)

    def _close(self, line: Lifeline, reason: str) -> None:
        self.selector.unregister(line.connection)
        line.connection.close()
        self.lines.remove(line)
        self._mourn(line, reason)

    def _mourn(self, line: Lifeline, reason: str) -> None:
        if not line.gone:
            line.gone = True
            self._tell(line, b"dead %d %s\n" % (line.rank, reason.encode()))

    def _tell(self, subject: Lifeline, news: bytes) -> None:
        self.news.append(news)
        for line in list(self.lines):
            if line is not subject:
                self._send(line, news)

    @staticmethod
    def _send(line: Lifeline, text: bytes) -> None:
        with contextlib.suppress(OSError):  # its own end is noticed when it is next read
            line.connection.sendall(text)


def serve(host: str, replicas: int, silence: float) -> None:
    """Start jax's service and the watch at an address of this machine, print their ports, stay until all
    replicas are gone.
    """
    # jax's public `initialize` would start the service inside replica 0.
    from jaxlib import _jax

    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    # Recoverable: the death of one replica must not make jax end the others.
    service = _jax.get_distributed_runtime_service(
        f"{host}:{port}", replicas, recoverable=True, heartbeat_timeout=int(silence) + 10
    )
    listener = socket.create_server((host, 0), backlog=replicas)
    print(port, listener.getsockname()[1], flush=True)
    Watch(listener, silence).run()
    time.sleep(_LINGER_SECONDS)  # the last replicas may still be ending
    # At once: the destructor of the service would wait for replicas that no longer exist.
    os._exit(0 if service is not None else 1)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
