"""The ten models of PyTorch's bridge to XLA, small: eager, the lazy device and trace_once agree; calls of trace_once record nothing.

They run in processes of their own, in which XLA neither contracts multiplications and additions nor vectorises sums: the forward and
backward executables of the bridge and the lazy device's one big graph fuse differently, and only so are equal programs equal in bits.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="jax is not installed")

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("programs") / "ten_models.py"
EXACT = "--xla_backend_optimization_level=0 --xla_cpu_max_isa=AVX"
GROUPS = [
    ("resnet18", "alexnet"),
    ("vgg16", "squeezenet1_1"),
    ("BERT_pytorch", "timm_vision_transformer"),
    ("mobilenet_v2",),
    ("mnasnet1_0",),
    ("resnet50",),
    ("resnext50_32x4d",),
]


@pytest.mark.parametrize("names", GROUPS, ids="+".join)
def test_models_equal_lazy_bit_for_bit_and_eager_within_rounding(names):
    done = subprocess.run([sys.executable, str(PROGRAM), *names], capture_output=True, text=True, timeout=900, check=False,
                          env={**os.environ, "XLA_FLAGS": EXACT, "PYTHONPATH": str(PROGRAM.parents[3])})
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["model"] for row in rows] == list(names)
    for row in rows:
        infer, train = row["infer"], row["train"]
        assert row["fallbacks"] == []
        assert infer["error"] < 1e-5
        assert infer["bits"]
        assert (infer["executables"], infer["records"]) == (1, 0)
        assert train["bits"] and train["gradients"] > 0
        assert train["loss_error"] < 1e-4
        assert train["gradient_error"] < max(2 * train["eager_gradient_error"], 1e-5)
        assert row.get("dropout", {"bits": True})["bits"]
