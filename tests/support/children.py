"""Processes of the tests: forked from a server that has imported torch and jax, which takes longer than most run.

>>> run_forked("import sys, torch, dynamotor; print(sys.argv[1])", "x", DYNAMOTOR_DEBUG="1").stdout
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import textwrap
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT), str(ROOT / "xla")]  # both distributions
LIMIT_SECONDS = 150.0  # a run takes 5 to 15 s; this is for machines with much else to do


def environment(**more: str | None) -> dict[str, str]:
    """An environment for child processes: the CPU, this checkout, one thread, and no place in another world.
    None takes a name away.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    found = env | {
        "PYTHONPATH": os.pathsep.join([*PATHS, *filter(None, [env.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "PJRT_DEVICE": "CPU",
        "DYNAMOTOR_XLA_TIMEOUT": "40",
        **more,
        # Compiling is a third of these tests, and LLVM's work on the programs is not their subject.
        "XLA_FLAGS": " ".join(
            [env.get("XLA_FLAGS", ""), more.get("XLA_FLAGS") or "", "--xla_backend_optimization_level=0"]
        ),
    }
    return {name: value for name, value in found.items() if value is not None}


def run_forked(
    code: str, *arguments: str, limit: float = LIMIT_SECONDS, **env: str | None
) -> subprocess.CompletedProcess[str]:
    """One process of the server that has imported torch and jax (see `_server`), for programs that say
    nothing of how they begin; it is killed after `limit` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        said, errors = Path(folder, "said"), Path(folder, "errors")
        process = start(textwrap.dedent(code), environment(**env), said, errors, arguments)
        process.join(limit)
        process.kill()
        process.join()
        return subprocess.CompletedProcess(code, process.exitcode, said.read_text(), errors.read_text())


@functools.cache
def server() -> multiprocessing.context.ForkServerContext:
    """What children are forked from: a process that has imported torch and jax, with those of their parts that
    most would import, which takes longer than most run, and has started neither. Nothing of ours is imported: it
    reads its settings from the environment. Programs under torchrun and `spawn` start from nothing.
    """
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
    """A process that runs `code` as `python -c` would, with this environment; its output goes to files."""
    for path in (output, errors or output):
        path.touch()
    process = server().Process(target=_run, args=(code, env, str(output), str(errors or output), arguments))
    process.start()
    return process


def _run(code: str, env: dict[str, str], output: str, errors: str, arguments: tuple[str, ...]) -> None:
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # of the environment, too
    sys.path[:0] = PATHS
    sys.argv[:] = ["-c", *arguments]
    for stream, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # some end by os._exit
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except Exception as error:  # what ends an interpreter is seen at its exit
        sys.last_value = error
        raise
    finally:
        atexit._run_exitfuncs()
