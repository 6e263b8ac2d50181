"""Runs a piece of code in several processes at once, as torchrun would, with a limit on time so that nothing can hang."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_SECONDS = 150.0  # a run takes 5 to 15 s; this is for machines with much else to do


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**more: str) -> dict[str, str]:
    """An environment for child processes: the CPU, this checkout, one thread, and no place in another world."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "XLA_FLAGS")
    }
    return env | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "PJRT_DEVICE": "CPU",
        "DYNAMOTOR_XLA_TIMEOUT": "40",
        **more,
    }


def run_script(code: str, *arguments: str, limit: float = LIMIT_SECONDS, **env: str) -> subprocess.CompletedProcess[str]:
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
    """Run code in `size` processes; their outputs (stdout and stderr together) in order. Fails when one fails or the time is up.

    `survivors`: the ordinals that must end well (all by default); the others are killed when these are done.
    """
    port = str(free_port())
    place = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=environment(RANK=str(i), LOCAL_RANK=str(i), **place, **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(size)
    ]
    end, wanted = time.monotonic() + limit, range(size) if survivors is None else survivors
    outputs = [Reader(process) for process in processes]
    try:
        failed = None
        while failed is None and any(processes[i].poll() is None for i in wanted):
            time.sleep(0.05)
            failed = next((i for i in wanted if processes[i].poll() not in (None, 0)), None)
            if time.monotonic() > end:
                raise AssertionError(f"not all replicas ended within {limit} s")
        failed = next((i for i in wanted if processes[i].poll() != 0), None)
        assert failed is None, f"replica {failed} failed"
    except AssertionError as error:
        time.sleep(1.0)  # the others may have something to say
        for process in processes:
            process.kill()
        said = "\n".join(f"---- replica {i}, {processes[i].poll()}\n{output.text()}" for i, output in enumerate(outputs))
        raise AssertionError(f"{error}\n{said}") from None
    finally:
        for process in processes:
            process.kill()
    return [output.text() for output in outputs]


class Reader(threading.Thread):
    """Reads what a process writes, so that it never waits for room."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self._process, self._text = process, ""
        self.start()

    def run(self) -> None:
        assert self._process.stdout is not None
        self._text = self._process.stdout.read()

    def text(self) -> str:
        """All of it, once the process has ended."""
        self.join(5.0)
        return self._text
