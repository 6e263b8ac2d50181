"""A private name of PyTorch that is missing turns one capability off, with a warning, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from children import run_forked
from warned import text_of

import dynamotor
from dynamotor.base import compat, events, probe
from dynamotor.base.errors import CaptureError
from dynamotor.base.probe import COMPILE, PrivateName

DRIVER = Path(__file__).with_name("without_names.py")
ROWS = {",".join(row.paths): row for row in probe.table}


def without(*names):
    found = run_forked(DRIVER.read_text(), *names, limit=900.0)
    return [json.loads(line) for line in found.stdout.splitlines()]


def check(runs, names):
    for found, name in zip(runs, names, strict=True):
        row = ROWS[name]
        assert not found["error"], found["error"]
        is_off = row.off.is_built and not row.late and row.instead is probe.MISSING
        assert ("[DM150]" in found["warned"]) == is_off, (found, row)
        assert row.off.when_off in found["warned"] or not is_off
        assert found["graphs"] == (0 if is_off and row.off is COMPILE else 1), found


@pytest.mark.slow
def test_the_readme_s_example_runs_without_any_private_name_and_without_some():
    some = [*ROWS][3::48]
    found, *others = without(",".join(ROWS), *some)
    assert not found["error"] and found["graphs"] == 0
    assert all(off.when_off in found["warned"] for off in (COMPILE, probe.RULE, probe.DDP))
    check(others, some)


@pytest.mark.slow
def test_the_readme_s_example_runs_without_each_private_name():
    # Without any of these nothing is compiled: whichever is missing, the same code runs.
    alike = [n for n, row in ROWS.items() if row.off is COMPILE and row.instead is probe.MISSING]
    others = [name for name in ROWS if name not in alike]
    groups = [alike[n::8] for n in range(8)]
    check(without(*map(",".join, groups), *others), [*[group[0] for group in groups], *others])


def test_modules_compile_where_the_states_of_fsdp_have_no_name(monkeypatch):
    import torch.distributed._composable_state  # noqa: F401

    missing = probe.absent("torch.distributed._composable_state", probe.FSDP)
    monkeypatch.setattr(compat, "states_of_modules", lambda: missing)
    net, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    assert dynamotor.compile(net, backend="eager")(x).equal(net(x))


def test_what_must_be_compiled_is_refused_where_compilation_is_off(monkeypatch):
    monkeypatch.setattr(probe, "table", [PrivateName(("torch._C._gone",), COMPILE)])
    x = torch.ones(2)
    assert dynamotor.compile(lambda x: x + 1)(x).equal(x + 1)
    with pytest.raises(CaptureError, match=r"\[DM150\] .* has no torch._C._gone"):
        dynamotor.compile(lambda x: x + 1, fullgraph=True)(x)


def test_the_newest_place_of_a_name_is_taken_and_a_stand_in_raises_when_it_is_used(monkeypatch):
    monkeypatch.setattr(probe, "table", [])
    assert probe.name("torch._C._gone", "torch._C._set_grad_enabled") is compat.set_grad_enabled
    gone = probe.name("torch._C._gone")
    assert not isinstance(1, gone) and not issubclass(int, gone)
    with pytest.raises(CaptureError, match=r"DM150.*torch\._C\._gone"):
        gone(1)
    with pytest.raises(CaptureError, match=r"DM150.*torch\._C\._gone\.inner"):
        gone.inner()
    assert probe.lost(COMPILE) == ["torch._C._gone"]


def test_a_newer_pytorch_is_said_to_be_untested(monkeypatch, recwarn):
    events.forget_warnings()
    monkeypatch.setattr(torch, "__version__", "9.1.0")
    probe.tell()
    assert "[DM151]" in text_of(recwarn)
