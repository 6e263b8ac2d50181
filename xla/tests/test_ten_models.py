"""The ten models of PyTorch's bridge to XLA, small: eager, the lazy device and trace_once agree; calls of
trace_once record nothing.

They run in processes of their own, with settings under which XLA's rounding does not depend on what shares a
program: the bridge's forward and backward executables and the lazy device's one big graph are fused
differently. So multiplications and additions are not contracted (AVX has no such instruction), sums are not
vectorised, and no sum goes to XLA's kernel library with what comes before it.
"""

import json
from pathlib import Path

import pytest
from children import run_forked

pytest.importorskip("jax", reason="jax is not installed")

PROGRAM = Path(__file__).with_name("programs") / "ten_models.py"
EXACT = "--xla_cpu_max_isa=AVX --xla_cpu_experimental_ynn_fusion_type="
MODELS = [
    "BERT_pytorch",
    "timm_vision_transformer",
    "resnet18",
    "alexnet",
    "vgg16",
    "squeezenet1_1",
    "mobilenet_v2",
    "mnasnet1_0",
    "resnet50",
    "resnext50_32x4d",
]


@pytest.mark.slow  # test_fifty_steps.py trains smaller ones
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_lazy_bit_for_bit_and_eager_within_rounding(name):
    # vgg16, with 138 million parameters, takes minutes beside other tests.
    done = run_forked(PROGRAM.read_text(), name, limit=900.0, XLA_FLAGS=EXACT)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["model"] for row in rows] == [name]
    for row in rows:
        infer, train = row["infer"], row["train"]
        assert row["fallbacks"] == []
        assert infer["error"] < 1e-5
        assert infer["bits"]
        assert (infer["executables"], infer["records"]) == (1, 0)
        assert train["bits"] and train["gradients"] > 0
        assert train["loss_error"] < 1e-9
        assert train["gradient_error"] < 1e-9
        assert row.get("dropout", {"bits": True})["bits"]
