"""Runs a piece of code in several processes at once, as torchrun would, with a limit on time so that nothing
can hang.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_SECONDS = 150.0  # a run takes 5 to 15 s; this is for machines with much else to do


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**more: str) -> dict[str, str]:
    """An environment for child processes: the CPU, this checkout, one thread, and no place in another
    world.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    return env | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "PJRT_DEVICE": "CPU",
        "DYNAMOTOR_XLA_TIMEOUT": "40",
        **more,
        # Compiling is a third of these tests, and LLVM's work on the programs is not what they are of.
        "XLA_FLAGS": " ".join(
            [env.get("XLA_FLAGS", ""), more.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"]
        ),
    }


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


def run_forked(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """One process of the server that has imported torch and jax (see `_server`), for programs that say
    nothing of how they begin.
    """
    with tempfile.TemporaryDirectory() as folder:
        said, errors = Path(folder, "said"), Path(folder, "errors")
        process = start(textwrap.dedent(code), environment(**env), said, errors, arguments)
        process.join(LIMIT_SECONDS)
        process.kill()
        process.join()
        return subprocess.CompletedProcess(code, process.exitcode, said.read_text(), errors.read_text())


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


@functools.cache
def _server() -> multiprocessing.context.ForkServerContext:
    """Where replicas are forked from: a process that has imported torch and jax, with those of their parts that
    most replicas would import, which takes longer than most replicas run, and has started neither. Programs under torchrun and `spawn` (test_torchrun.py,
    test_spawn.py) start from nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "jax", "numpy", "sympy", "torch._dynamo", "torch.distributed.tensor"]
    )
    with mock.patch.dict(os.environ, environment(), clear=True):
        forkserver.ensure_running()
    return context


def start(
    code: str, env: dict[str, str], output: Path, errors: Path | None = None, arguments: tuple[str, ...] = ()
) -> BaseProcess:
    """A process that runs `code` as `python -c` would, with this environment; what it says goes to files."""
    for path in (output, errors or output):
        path.touch()
    process = _server().Process(target=_run, args=(code, env, str(output), str(errors or output), arguments))
    process.start()
    return process


def _run(code: str, env: dict[str, str], output: str, errors: str, arguments: tuple[str, ...]) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [str(ROOT)]
    sys.argv[:] = ["-c", *arguments]
    for stream, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except Exception as error:  # what ends an interpreter is seen at its exit
        sys.last_value = error
        raise
    finally:
        atexit._run_exitfuncs()
