"""Eight processes on an empty cache: each source is built once, and all compute what eager computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PROGRAM = """
import json, sys, torch, dynamotor
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
x = torch.randn(8, 16)
fast = dynamotor.compile(model)
print("ready", flush=True)
sys.stdin.readline()
loss = fast(x).square().mean()
loss.backward()
found = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
expected = model(x).square().mean()
expected.backward()
torch.testing.assert_close(loss, expected)
torch.testing.assert_close(found, [p.grad for p in model.parameters()])
print(json.dumps([dict(dynamotor.counters["cache"]), dict(dynamotor.counters["build"])]))
"""


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_processes_that_begin_together_build_once(count: int, tmp_path: Path) -> None:
    env = {
        **os.environ,
        "DYNAMOTOR_CACHE_DIR": str(tmp_path),
        "DYNAMOTOR_VERIFY": "0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    (tmp_path / "program.py").write_text(PROGRAM)
    processes = [
        subprocess.Popen([sys.executable, str(tmp_path / "program.py")], env=env, text=True, **pipes)
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:  # all are at the start
        process.stdin.write("go\n")
        process.stdin.flush()
    total: Counter[str] = Counter()
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        for counts in json.loads(out):
            total.update(counts)
    libraries = [
        path for path in (tmp_path / "build").rglob("*") if path.is_file() and path.suffix != ".making"
    ]
    assert total["compiled"] == len(libraries)
    assert total["program.hit"] == 2 * (count - 1) and not total["program.damaged"]
