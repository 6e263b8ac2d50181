"""A GPU that never comes to the end of a backward, because another rank is gone, is reported, and the process
does not hang.

NCCL's collectives wait on the device: nothing that Python calls fails when a rank dies, and a program sooner
or later waits for its GPU, out of which no exception leads. PyTorch's watchdog ends the process some time
after the group's timeout, with a text that names no line of the program. So an event follows each
backward; a thread that sleeps most of the time looks at it, names the cause in time, and ends the process
when PyTorch has not.

>>> watch = RankWatch(timeout=600.0); watch.behind_backward(where)
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TextIO

import torch
import torch.distributed as dist

from ..base.errors import DistributedError, UserLine

# Of the group's timeout: looked at every fifth of that, so that it is said before three quarters are over.
PATIENCE = 0.6
GRACE = 30.0  # seconds behind the timeout that PyTorch's watchdog has to end the process


class RankWatch:
    """Looks after the latest backward of this process.

    timeout: seconds that the process group waits. out: where the report goes (stderr).
    """

    def __init__(self, timeout: float, out: TextIO | None = None) -> None:
        self.timeout, self.limit, self.out = timeout, PATIENCE * timeout, out
        self._events: dict[int, torch.cuda.Event] = {}
        self._latest: tuple[torch.cuda.Event, float, UserLine | None] | None = None
        threading.Thread(target=self._run, name="dynamotor-watch", daemon=True).start()

    def behind_backward(self, where: UserLine | None) -> None:
        """All of a backward is queued on the current stream, which waits for its all-reduces."""
        if torch.cuda.is_current_stream_capturing():
            return
        device = torch.cuda.current_device()
        event = self._events.get(device)
        if event is None:
            event = self._events[device] = torch.cuda.Event()
        event.record()
        self._latest = event, time.monotonic(), where

    def _run(self) -> None:
        said = False
        while True:
            time.sleep(self.limit / 5)
            late = self.look()
            if late is None:
                said = False
                continue
            if not said:
                print(late, file=self.out or sys.stderr, flush=True)
                said = True
            latest = self._latest
            if latest is not None and time.monotonic() - latest[1] > self.timeout + GRACE and _may_end():
                print(
                    "dynamotor: the group's timeout is long over: ending this process",
                    file=self.out or sys.stderr,
                    flush=True,
                )
                os._exit(1)

    def look(self) -> DistributedError | None:
        """An error when the latest backward is overdue. The device is asked only then: a question may disturb
        a graph capture.
        """
        latest = self._latest
        if latest is None or time.monotonic() - latest[1] < self.limit:
            return None
        event, began, where = latest
        if event.query():
            if self._latest is latest:
                self._latest = None
            return None
        return DistributedError(
            "DM703",
            f"rank {dist.get_rank()} waits for the all-reduces of a backward "
            f"for {time.monotonic() - began:.0f} s",
            why="another rank died or is late; "
            f"this process ends when the timeout of {self.timeout:.0f} s is over",
            cure="see the other ranks' own errors. The gradients of this step are lost; "
            "go on from the last checkpoint",
            where=where,
        )


def _may_end() -> bool:
    """Whether PyTorch would end the process too: not when its own error handling is switched off or told to
    clean up only.
    """
    return os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") not in ("0", "2")
