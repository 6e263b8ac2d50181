"""The example that trains digits: one XLA device, two replicas, and a killed and resumed run follow CPU
eager's loss curve.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from children import environment, start

pytest.importorskip("jax")
if importlib.util.find_spec("sklearn") is None:  # imported only where it is used: it takes a second
    pytest.skip("scikit-learn is not installed", allow_module_level=True)
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "xla_mnist_like.py"
TOLERANCE = 1e-4


def train(device, losses, **options):
    """The example's training in this process; the losses of all its steps."""
    spec = importlib.util.spec_from_file_location("xla_mnist_like", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    flags = {"device": device, "epochs": 5, "checkpoint": None, "losses": str(losses), **options}
    example.train(0, argparse.Namespace(**flags))
    return json.loads(losses.read_text())


def command(*options):
    return [sys.executable, str(EXAMPLE), *map(str, options)]


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return train("cpu", tmp_path_factory.mktemp("eager") / "losses")


def same_curve(found, expected):
    assert len(found) == len(expected)
    assert max(abs(a - b) for a, b in zip(found, expected)) < TOLERANCE


@pytest.mark.slow
def test_one_device(eager, tmp_path):
    same_curve(train("xla", tmp_path / "losses"), eager)
    assert eager[-1] < eager[0] / 2


@pytest.mark.slow  # test_torchrun.py trains digits on two replicas in both of the ways to start them
def test_two_replicas(eager, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command("--processes", 2, "--losses", tmp_path / "losses"),
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    same_curve(json.loads((tmp_path / "losses").read_text()), eager)


@pytest.mark.slow  # test_distributed_checkpoint.py loads the files
def test_killed_and_resumed(eager, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    process = start(
        EXAMPLE.read_text(), environment(), tmp_path / "said", arguments=("--checkpoint", str(checkpoint))
    )
    while not checkpoint.exists() and process.is_alive():
        time.sleep(0.02)
    process.kill()
    process.join()
    assert checkpoint.exists(), (tmp_path / "said").read_text()
    same_curve(train("xla", tmp_path / "losses", checkpoint=str(checkpoint)), eager)
