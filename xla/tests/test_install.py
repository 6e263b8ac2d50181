"""Programs that import torch_xla run on dynamotor.xla: in this process, in spawned ones, and under `python -m
dynamotor run`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("jax")
from children import run_forked  # noqa: E402

import dynamotor.xla  # noqa: E402
from dynamotor.__main__ import main  # noqa: E402
from dynamotor.xla.install import uninstall  # noqa: E402


@pytest.fixture
def alias():
    dynamotor.xla.install_as_torch_xla()
    yield
    uninstall()


def run(tmp_path, text, *command, **env):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, *command, str(script), "first", "--second"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.dirname, dynamotor.__path__)), **env},
    )
    return done


def test_modules_are_the_same_objects(alias):
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.xla_multiprocessing as xmp
    import torch_xla.utils.serialization
    from torch_xla import runtime as xr
    from torch_xla.core.xla_model import xla_device

    assert torch_xla is dynamotor.xla and xm is dynamotor.xla.core.xla_model and xr is dynamotor.xla.runtime
    assert (
        xla_device is dynamotor.xla.core.xla_model.xla_device
        and xmp.spawn is dynamotor.xla.distributed.xla_multiprocessing.spawn
    )
    assert torch_xla.utils.serialization.save.__module__ == "dynamotor.xla.utils.serialization"
    assert dynamotor.xla.utils.serialization.__spec__.name == "dynamotor.xla.utils.serialization"
    assert callable(torch_xla.sync) and callable(torch_xla.device) and torch_xla.__version__[0].isdigit()


def test_it_can_be_installed_twice_and_taken_away():
    dynamotor.xla.install_as_torch_xla()
    dynamotor.xla.install_as_torch_xla()
    import torch_xla.runtime  # noqa: F401

    with pytest.raises(ModuleNotFoundError):
        import torch_xla.no_such_module  # noqa: F401
    uninstall()
    assert not [m for m in sys.modules if m.startswith("torch_xla")]
    with pytest.raises(ModuleNotFoundError):
        import torch_xla  # noqa: F401


PROGRAM = """
    import sys
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    if __name__ == "__main__":
        t = torch.ones(2, 2, device=xm.xla_device())
        print(t.device, (t + t).sum().item(), sys.argv[1:], __file__)
        sys.exit(7)
"""


def test_run_command(alias, tmp_path, capsys, monkeypatch):
    """In this process; `test_launch` starts one by the same command."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    uninstall()
    with pytest.raises(SystemExit) as ended:
        main(["run", "--torch-xla", str(script), "first", "--second"])
    said = capsys.readouterr().out
    assert ended.value.code == 7
    assert said.split()[:2] == ["xla:0", "8.0"] and "['first', '--second']" in said and "program.py" in said


@pytest.mark.slow  # a process that starts from nothing
def test_run_without_the_alias(tmp_path):
    done = run(tmp_path, "import sys; print(sys.argv[1:], 'jax' in sys.modules)", "-m", "dynamotor", "run")
    assert done.stdout.strip() == "['first', '--second'] False"


def test_run_without_a_program(capsys):
    assert main(["run", "none.py"]) == 2 and "DM108" in capsys.readouterr().err


SPAWNING = """
    import multiprocessing
    import sys
    import torch_xla
    import torch_xla.core.xla_model as xm

    def work(index):
        import torch_xla.runtime as xr
        print("child", index, xm.__name__, xr.__name__, flush=True)

    if __name__ == "__main__":
        child = multiprocessing.get_context("spawn").Process(target=work, args=(3,))
        child.start()
        child.join()
        sys.exit(child.exitcode)
"""


@pytest.mark.slow  # the processes that `test_launch` spawns import torch_xla too
def test_spawned_processes_have_the_alias(tmp_path):
    done = run(tmp_path, SPAWNING, "-m", "dynamotor", "run", "--torch-xla")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "child 3 dynamotor.xla.core.xla_model dynamotor.xla.runtime"


def test_old_runtime_variables_are_accepted_with_one_warning():
    text = (
        "import warnings; warnings.simplefilter('always')\nimport dynamotor.xla, dynamotor.xla.core.xla_model"
    )
    done = run_forked(text, XRT_DEVICE_MAP="CPU:0", XRT_WORKERS="localservice:0")
    assert done.returncode == 0 and done.stderr.count("XRT_DEVICE_MAP, XRT_WORKERS") == 1, done.stderr


@pytest.mark.parametrize("device,expected", [("CPU", "CPU"), ("ABACUS", "DM658")])
def test_pjrt_device(device, expected):
    done = run_forked("import dynamotor.xla.runtime as xr; print(xr.device_type())", PJRT_DEVICE=device)
    assert expected in done.stdout + done.stderr


@pytest.mark.slow
def test_a_missing_jax_is_a_coded_error(tmp_path):
    text = "import sys; sys.modules['jax'] = None\nimport importlib.util as u\nreal = u.find_spec\nu.find_spec = lambda n, *a: None if n == 'jax' else real(n, *a)\nimport dynamotor.xla"
    done = run(tmp_path, text)
    assert "DM659" in done.stderr and "pip install dynamotor[xla]" in done.stderr


LAUNCHED = """
    import sys
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    def work(index):
        t = torch.ones(2, device=xm.xla_device()) * (xr.global_ordinal() + 1)
        # One write a line: two processes share the stream.
        sys.stdout.write(f"{index} {xr.world_size()} {xm.all_reduce(xm.REDUCE_SUM, t).tolist()}\\n")
        sys.stdout.flush()

    if __name__ == "__main__":
        torch_xla.launch(work)
"""


@pytest.mark.slow  # test_spawn.py forks replicas, which import nothing again
@pytest.mark.parametrize("how", ["torchrun", "spawn"])
def test_launch(tmp_path, how):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    command = ["-m", "dynamotor", "run", "--torch-xla"]
    done = run(tmp_path, LAUNCHED, *(torchrun if how == "torchrun" else []), *command, CPU_NUM_DEVICES="2")
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.endswith("]") and line[0] in "01") == [
        "0 2 [3.0, 3.0]",
        "1 2 [3.0, 3.0]",
    ]
