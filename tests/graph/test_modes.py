"""Modes of PyTorch that a graph changes while it runs, and their state where it stops."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dynamotor.graph.modes import TrialMode
from dynamotor.graph.private_draws import PrivateDraws
from dynamotor.graph.states import enter_inference, open_regions

PACKAGE = Path(__file__).resolve().parents[2] / "dynamotor"
# Traces run under it within `preserved_modes`, and it never runs a graph.
OTHER_MODES = {"shape_tensor.py"}


class Ones(TrialMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("mode", [Ones, PrivateDraws])
@pytest.mark.parametrize("raises", [True, False])
def test_a_region_entered_beneath_a_trial_is_left_before_it(mode: type[TrialMode], raises: bool) -> None:
    stopped = pytest.raises(ValueError) if raises else torch.enable_grad()
    with stopped, mode():
        enter_inference(True)
        torch.ones(2) + 1
        if raises:
            raise ValueError
    assert open_regions() == 0
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    torch.ones(2) + 1  # no call looks for the mode any more


def test_grad_mode_and_autocast_are_as_before_a_trial() -> None:
    with Ones():
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.slow
def test_every_mode_that_runs_graphs_is_a_trial_mode() -> None:
    classes = {
        path.name: cls
        for path in PACKAGE.rglob("*.py")
        for cls in ast.walk(ast.parse(path.read_text()))
        if isinstance(cls, ast.ClassDef)
        and any(ast.unparse(base).endswith("TorchDispatchMode") for base in cls.bases)
    }
    assert set(classes) - OTHER_MODES == {"modes.py"}


SEEDS = """
import torch
from dynamotor.base import compat
from dynamotor.graph.states import seed
last = lambda: compat.cuda_seeds.call_order[-1][0].__closure__[0].cell_contents
seed(5)
first, told = torch.rand(3), compat.cuda_seeds.call_order
seed(5)
assert torch.equal(torch.rand(3), first) and compat.cuda_seeds.call_order is told
torch.cuda.manual_seed(8)  # one device alone
seed(5)
assert last() == 5
torch.manual_seed(7)
seed(5)
assert last() == 5 and torch.equal(torch.rand(3), first)
seed(6)
assert last() == 6 and not torch.equal(torch.rand(3), first)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is seeded at once")
def test_a_seed_reaches_devices_that_have_not_begun_whoever_seeded_last() -> None:
    subprocess.run([sys.executable, "-c", SEEDS], check=True)
