"""Runs a piece of code in several processes at once, as torchrun would, with a limit on time so that nothing
can hang.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path

from children import LIMIT_SECONDS, environment, start


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_script(
    code: str, *arguments: str, limit: float = LIMIT_SECONDS, **env: str
) -> subprocess.CompletedProcess[str]:
    """One process."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=limit,
    )


def run_replicas(
    code: str, size: int = 2, limit: float = LIMIT_SECONDS, survivors: list[int] | None = None, **env: str
) -> list[str]:
    """Run code in `size` processes; their outputs (stdout and stderr together) in order. Fails when one fails
    or the time is up.

    `survivors`: the ordinals that must end well (all by default); the others are killed when these are done.
    """
    port = str(free_port())
    place = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(i)) for i in range(size)]
        processes = [
            start(textwrap.dedent(code), environment(RANK=str(i), LOCAL_RANK=str(i), **place, **env), output)
            for i, output in enumerate(outputs)
        ]
        try:
            _wait(processes, range(size) if survivors is None else survivors, limit)
        except AssertionError as error:
            time.sleep(1.0)  # the others may have something to say
            said = "\n".join(
                f"---- replica {i}, {p.exitcode}\n{outputs[i].read_text()}" for i, p in enumerate(processes)
            )
            raise AssertionError(f"{error}\n{said}") from None
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [output.read_text() for output in outputs]


def _wait(processes: list[BaseProcess], wanted: Iterable[int], limit: float) -> None:
    """Until all that are wanted have ended well; AssertionError when one has not, or has not ended in
    time.
    """
    end = time.monotonic() + limit
    while True:
        codes = {i: processes[i].exitcode for i in wanted}
        failed = next((i for i, code in codes.items() if code not in (None, 0)), None)
        assert failed is None, f"replica {failed} failed"
        if None not in codes.values():
            return
        assert time.monotonic() < end, f"not all replicas ended within {limit} s"
        time.sleep(0.05)
