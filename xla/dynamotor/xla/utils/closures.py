"""Runs closures in order: at once, or on a thread, whose error is raised by the next call.

>>> handler = AsyncClosureHandler(); handler.run(lambda: print("done"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Closure = Callable[[], Any]


class ClosureHandler:
    """Calls closures at once."""

    def run(self, closure: Closure) -> None:
        """Run one closure."""
        closure()

    def run_all(self, closures: Iterable[Closure]) -> None:
        """Run closures in order."""
        for closure in closures:
            self.run(closure)


class AsyncClosureHandler(ClosureHandler):
    """Calls closures on a thread of its own. `max_queue_size` is accepted."""

    def __init__(self, max_queue_size: int = 100) -> None:
        self._worker = ThreadPoolExecutor(1, "xla closures")
        self._sent: list[Future[Any]] = []

    def run(self, closure: Closure) -> None:
        """Send one closure to the thread; raises the exception of an earlier one."""
        done = [sent for sent in self._sent if sent.done()]
        self._sent = [sent for sent in self._sent if not sent.done()]
        for sent in done:
            sent.result()
        self._sent.append(self._worker.submit(closure))
