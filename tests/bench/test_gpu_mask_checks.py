"""The GPU's check of masks runs in Triton's interpreter, and knows a wrong kernel."""

import pytest

from bench import gpu_mask_checks
from bench.triton_interpret import available
from dynamotor.codegen import flex_attention

pytestmark = pytest.mark.skipif(not available(), reason="Triton is not there as an interpreter")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", dict(gpu_mask_checks.rows("cpu")))
def test_masks_are_right(name):
    found = dict(gpu_mask_checks.rows("cpu", length=300, small=True))[name]()
    assert found["ok"], found


def test_a_wrong_gradient_is_seen(monkeypatch):
    backward = flex_attention.backward
    monkeypatch.setattr(flex_attention, "backward", lambda *given: [1.1 * g for g in backward(*given)])
    found = dict(gpu_mask_checks.rows("cpu", length=300, small=True))["attention-padding"]()
    assert not found["ok"] and max(found["errors"]) > 5e-2
