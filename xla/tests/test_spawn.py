"""xmp.spawn: real processes, their exceptions, and what may not be forked. The functions are at module level:
children import them.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="jax is not installed")

import children  # noqa: E402
import torch  # noqa: E402
import torch.multiprocessing  # noqa: E402
from children import environment, run_forked  # noqa: E402
from replicas import run_script  # noqa: E402

import dynamotor.xla.start  # noqa: E402, F401
from dynamotor.base.errors import XlaError  # noqa: E402
from dynamotor.xla.core import xla_model as xm  # noqa: E402
from dynamotor.xla.distributed import xla_multiprocessing as xmp  # noqa: E402

SERIAL = xmp.MpSerialExecutor()
WRAPPED = xmp.MpModelWrapper(torch.nn.Linear(2, 2))


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def report(index: int, folder: str, factor: int) -> None:
    total = xm.all_reduce(xm.REDUCE_SUM, torch.full((2,), float(index + 1), device=xm.xla_device()))
    model = WRAPPED.to(xm.xla_device())
    events = Path(folder, "events")

    def alone() -> None:
        with events.open("a") as log:
            log.write(f"in {index}\n")
        time.sleep(0.1)
        with events.open("a") as log:
            log.write(f"out {index}\n")

    SERIAL.run(alone)
    count = xm.mesh_reduce("weights", model.weight, len)
    Path(folder, str(index)).write_text(
        f"{xm.get_ordinal()} {xm.xrt_world_size()} {total.tolist()} {factor} {count}"
    )


def started(call: str, method: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A program that starts two replicas: a file, which spawned ones import. `t` is this module."""
    code = f"""
    import sys
    sys.path[:0] = [{os.path.dirname(__file__)!r}, {os.path.dirname(children.__file__)!r}]
    import test_spawn as t
    if __name__ == "__main__":
        {call.replace("METHOD", f"nprocs=2, start_method={method!r}")}
    """
    script = folder / "script.py"
    script.write_text("\n".join(line[4:] for line in code.splitlines()))
    program = f"import runpy, sys; sys.argv=['x']; runpy.run_path({str(script)!r}, run_name='__main__')"
    return run_forked(program) if method == "fork" else run_script(program)


# test_install.py's launch spawns two replicas.
METHODS = [pytest.param("spawn", marks=pytest.mark.slow), "fork"]


@pytest.mark.parametrize("method", METHODS)
def test_spawn_runs_replicas(tmp_path: Path, method: str) -> None:
    done = started(f"t.xmp.spawn(t.report, args=({str(tmp_path)!r}, 7), METHOD)", method, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(i)).read_text() for i in range(2)] == [f"{i} 2 [3.0, 3.0] 7 2" for i in range(2)]
    assert (tmp_path / "events").read_text().split("\n")[:-1] == ["in 0", "out 0", "in 1", "out 1"]


def fail(index: int) -> None:
    if index == 1:
        raise KeyError("mine")
    xm.all_reduce(xm.REDUCE_SUM, torch.ones(2, device=xm.xla_device())).cpu()


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_in_a_replica_is_raised_here(tmp_path: Path, method: str) -> None:
    done = started("t.xmp.spawn(t.fail, METHOD)", method, tmp_path)
    assert done.returncode == 1
    error = done.stderr.split("ProcessRaisedException:")[-1]
    assert "ProcessRaisedException:" in done.stderr and "KeyError: 'mine'" in error, done.stderr


@pytest.mark.slow
def test_join_false_gives_a_context(tmp_path: Path) -> None:
    context = xmp.spawn(report, args=(str(tmp_path), 1), nprocs=2, join=False)
    end = time.monotonic() + 60
    while not context.join(timeout=5):
        assert time.monotonic() < end
    assert (tmp_path / "1").exists()


def test_one_process_is_this_one() -> None:
    seen = []
    xmp.spawn(lambda index, x: seen.append((index, x, os.getpid())), args=("a",), nprocs=1)
    xmp.spawn(lambda index: seen.append(index))
    assert seen == [(0, "a", os.getpid()), 0]


def test_the_number_of_cpu_replicas_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM_DEVICES", "3")
    assert xmp._device_count() == 3


def test_zero_processes_are_refused() -> None:
    with pytest.raises(XlaError, match="DM645"):
        xmp.spawn(report, nprocs=0)


def test_a_process_that_has_started_xla_is_not_forked() -> None:
    torch.ones(2, device=xm.xla_device()).cpu()
    with pytest.raises(XlaError, match="DM646"):
        xmp.spawn(fail, nprocs=2, start_method="fork")
