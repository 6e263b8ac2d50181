"""Runs a piece of code in several processes at once, as torchrun would, with a limit on time so that nothing can hang."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_SECONDS = 60.0


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
        "PYTHONPATH": str(ROOT),
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
    end, texts = time.monotonic() + limit, [""] * size
    try:
        for i in range(size) if survivors is None else survivors:
            try:
                texts[i] = processes[i].communicate(timeout=max(0.1, end - time.monotonic()))[0]
            except subprocess.TimeoutExpired:
                processes[i].kill()
                raise AssertionError(f"replica {i} did not end within {limit} s:\n{processes[i].communicate()[0]}") from None
            assert processes[i].returncode == 0, f"replica {i}: {texts[i]}"
    finally:
        for process in processes:
            process.kill()
    return texts
