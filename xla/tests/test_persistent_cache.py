"""A second process loads the programs of the first one."""

from __future__ import annotations

import json
import pathlib

import pytest

pytest.importorskip("jax")
from children import run_forked  # noqa: E402

from dynamotor.base.errors import DynamotorError  # noqa: E402
from dynamotor.xla import initialize_cache  # noqa: E402

PROGRAM = """
import json, sys, warnings
import torch, dynamotor.xla as torch_xla
from dynamotor.xla import metrics
warnings.simplefilter("ignore")
torch_xla.initialize_cache(sys.argv[1], readonly=sys.argv[2] == "readonly")
x = torch.arange(12.0).reshape(3, 4).to("xla")
y = (torch.softmax(x @ x.T, 0) * 1.5).sum().item()
print(json.dumps([metrics.counters["PersistentCacheHit"], metrics.counters["PersistentCacheMiss"], y]))
"""


def run(folder, mode=""):
    done = run_forked(PROGRAM, str(folder), mode)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def entries(folder):
    return sorted(p.name for p in pathlib.Path(folder).iterdir() if p.name.endswith("-cache"))


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path):
    folder = tmp_path / "cache"
    hits, misses, value = run(folder)
    assert hits == 0 and misses == 1
    assert run(folder) == [1, 0, value]
    stored = entries(folder)
    assert len(stored) == 1
    damaged = (folder / stored[0]).read_bytes()[:50]
    (folder / stored[0]).write_bytes(damaged)
    assert run(folder, "readonly")[2] == value and (folder / stored[0]).read_bytes() == damaged
    assert run(folder)[2] == value
    assert run(folder) == [1, 0, value]


def test_a_damaged_entry_is_a_coded_warning(tmp_path):
    run(tmp_path)
    (entry,) = entries(tmp_path)
    (tmp_path / entry).write_bytes(b"nothing of sense")
    program = PROGRAM.replace('warnings.simplefilter("ignore")', "")
    (tmp_path / "p.py").write_text(program)
    # the first run's environment, whatever another test left in this process's: another would miss the entry
    file = str(tmp_path / "p.py")
    done = run_forked(f"import runpy; runpy.run_path({file!r})", str(tmp_path), "")
    assert "DM675" in done.stderr and "p.py:" in done.stderr and f"removed {entry}" in done.stderr, (
        done.stderr
    )


@pytest.mark.slow
def test_the_environment_names_the_folder(tmp_path):
    program = "import torch, dynamotor.xla; print((torch.ones(3).to('xla') * 5).sum().item())"
    done = run_forked(program, XLA_PERSISTENT_CACHE_PATH=str(tmp_path / "c"))
    assert done.stdout == "15.0\n" and len(entries(tmp_path / "c")) == 1


def test_readonly_writes_nothing(tmp_path):
    assert run(tmp_path, "readonly")[0] == 0 and entries(tmp_path) == []


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DynamotorError, match="DM661"):
        initialize_cache(str(tmp_path / "file"))
    with pytest.raises(DynamotorError, match="DM661"):
        initialize_cache(str(tmp_path / "none"), readonly=True)
