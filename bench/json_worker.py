"""A process that answers with a JSON object a line, for tools that must survive the code that they run.

>>> worker = JsonWorker([sys.executable, "-m", "some.module"], env)
>>> worker.send("go"); worker.next(time.monotonic() + 60)  # None: it has ended, or there is no answer in time
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any


class JsonWorker:
    """The process with a queue of its messages. Lines that are no JSON (libraries print) are dropped."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in `end`)
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        self.messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            try:
                message = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(message, dict):
                self.messages.put(message)
        self.messages.put(None)

    def next(self, deadline: float) -> dict[str, Any] | None:
        """The next message; None when there will be none before `deadline` (of `time.monotonic`)."""
        try:
            return self.messages.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def send(self, line: str) -> bool:
        """Write a line to the process; False when it is gone."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            return True
        except OSError:
            return False

    def end(self, patience: float = 5.0) -> str:
        """Stop the process; the last lines that it wrote to standard error."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.flush()
        self.errors.seek(0)
        tail = self.errors.read()[-1500:]
        self.errors.close()
        return tail
