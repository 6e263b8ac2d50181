"""The bench of quantised weights: a row without a library, one of a library that is missing, and gradients."""

import pytest
import torch

from bench import quantised


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_times_and_graphs_of_all_ways(dtype):
    name = f"none: {str(dtype)[6:]}"
    row = quantised.measure(name, 2, 32, 0.05)
    assert (row["graphs"], row["torch.compile's"], row["left"]) == (1, 1, {})
    assert row["error"] < 1e-2 and set(row["ms"]) == {"eager", "torch.compile", "ours"}
    assert len(quantised.cells(row)) == len(quantised.COLUMNS)


def test_a_scheme_whose_library_is_missing_says_so(monkeypatch):
    def absent(model):
        raise ImportError("no such library")

    monkeypatch.setitem(quantised.SCHEMES, "absent", (absent, torch.float32, False))
    row = quantised.measure("absent", 2, 32, 0.05)
    assert row["missing"] == "ImportError: no such library"
    assert len(quantised.cells(row)) == len(quantised.COLUMNS)


def test_a_step_that_trains_gives_gradients():
    model = torch.nn.Sequential(quantised.Block(8))
    result, *gradients = quantised.step(model, model, torch.randn(3, 8), True)
    assert [g.shape for g in gradients] == [p.shape for p in model.parameters()] and result.requires_grad
