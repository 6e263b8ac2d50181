"""Eight processes on an empty cache: each source is built once, and all compute what eager computes."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import children
import pytest

PROGRAM = """
import json, pathlib, sys, time, torch, dynamotor
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
x = torch.randn(8, 16)
fast = dynamotor.compile(model)
pathlib.Path(sys.argv[1]).touch()
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.01)
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


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8])
def test_processes_that_begin_together_build_once(count: int, tmp_path: Path) -> None:
    kept = tmp_path / "cache"
    env = children.environment(DYNAMOTOR_CACHE_DIR=str(kept), DYNAMOTOR_VERIFY="0")
    ready, said = ([tmp_path / f"{what} {n}" for n in range(count)] for what in ("ready", "said"))
    processes = [
        children.start(PROGRAM, env, out, arguments=(str(path), str(tmp_path / "go")))
        for path, out in zip(ready, said)
    ]
    while not all(path.exists() for path in ready):
        assert all(process.is_alive() for process in processes), [out.read_text() for out in said]
        time.sleep(0.01)
    (tmp_path / "go").touch()  # all are at the start
    total: Counter[str] = Counter()
    for process, out in zip(processes, said):
        process.join()
        assert process.exitcode == 0, out.read_text()
        for counts in json.loads(out.read_text()):
            total.update(counts)
    libraries = [path for path in (kept / "build").rglob("*") if path.is_file() and path.suffix != ".making"]
    assert total["compiled"] == len(libraries)
    assert total["program.hit"] == 2 * (count - 1) and not total["program.damaged"]
