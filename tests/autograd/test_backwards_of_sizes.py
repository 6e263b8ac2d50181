"""A backward of a general program serves the sizes that its forward serves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from warned import text_of

import dynamotor
from dynamotor.base.config import config
from dynamotor.base.events import counters


@pytest.fixture(autouse=True)
def counted_from_zero():
    dynamotor.reset()
    counters.clear()


def trained(function, weight, ids):
    weight.grad = None
    out = function(weight, ids)
    out.square().sum().backward()
    return out.detach(), weight.grad


def padded_rows(weight, ids):
    return F.embedding(ids, weight, padding_idx=0) * 2


def test_an_embedding_with_a_padding_row_is_compiled_once():
    weight = torch.randn(30, 8, dtype=torch.float64, requires_grad=True)
    compiled = dynamotor.compile(padded_rows)
    for batch, length in ((4, 20), (3, 7), (5, 11)):
        ids = torch.randint(0, 30, (batch, length))
        ids[0, 0] = 0
        for ours, eagers in zip(trained(compiled, weight, ids), trained(padded_rows, weight, ids)):
            torch.testing.assert_close(ours, eagers)
    assert counters["frames"]["captured"] == 2
    assert not counters["specialised"] and not counters["fallback"]


def test_a_backward_that_assumes_more_runs_op_by_op_and_says_so(monkeypatch, recwarn):
    from dynamotor.lower import embedding

    real = embedding.call

    def specialising(graph, target, *args, spec=None, **kwargs):
        if spec is not None:
            int(spec.shape[0])
        return real(graph, target, *args, spec=spec, **kwargs)

    monkeypatch.setattr(embedding, "call", specialising)
    weight = torch.randn(30, 8, dtype=torch.float64, requires_grad=True)
    compiled = dynamotor.compile(padded_rows)
    with config.patch(verify=False):
        for batch, length in ((4, 20), (3, 7), (5, 11)):
            ids = torch.randint(0, 30, (batch, length))
            for ours, eagers in zip(trained(compiled, weight, ids), trained(padded_rows, weight, ids)):
                torch.testing.assert_close(ours, eagers)
    assert counters["fallback"]["backward.sizes"] == 1
    assert "s0*s1 == 21; at others it runs op by op" in text_of(recwarn)


def few_pixels(weight, x):
    return F.conv2d(x, weight, stride=2, padding=1).relu()


def test_a_weight_gradient_by_patches_is_compiled_once():
    weight = torch.randn(128, 16, 3, 3, requires_grad=True)
    compiled = dynamotor.compile(few_pixels)
    for batch, side in ((2, 6), (3, 8), (5, 5), (2, 11)):
        x = torch.randn(batch, 16, side, side)
        for ours, eagers in zip(trained(compiled, weight, x), trained(few_pixels, weight, x)):
            torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-3)
    assert counters["frames"]["captured"] == 2
    assert not counters["specialised"] and "backward.sizes" not in counters["fallback"]
