"""Real models through capture and ahead-of-time autograd, op by op in float64: outputs, gradients and buffers
are eager's.
"""

from __future__ import annotations

import copy

import pytest
import torch

import dynamotor
from bench import models, torchvision_stub
from dynamotor.base.events import counters

pytest.importorskip("transformers")
torchvision_stub.prepare()
pytest.importorskip("timm")


def double(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def close(a, b, name=""):
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9, msg=lambda text: f"{name}: {text}")


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", models.TWELVE)
def test_a_training_step_with_dropout_on(name):
    counters["fallback"].clear()
    case = models.load(name, small=True)
    ours = case.model.double().train()
    theirs = copy.deepcopy(ours)
    with dynamotor.config.patch(fallback_random=True, verify=True, strict=True):
        compiled = dynamotor.compile(ours, backend="aot_eager", fullgraph=True)
        for seed in (1, 2):
            args, kwargs = case.make_inputs(seed=seed, train=True)
            args, kwargs = [double(a) for a in args], {k: double(v) for k, v in kwargs.items()}
            results = []
            for model in (compiled, theirs):
                torch.manual_seed(seed)
                outputs = models.output_tensors(model(*args, **kwargs))
                sum(o.pow(2).mean() for o in outputs if o.requires_grad).backward()
                results.append(outputs)
            for a, b in zip(*results, strict=True):
                close(a, b)
                assert a.stride() == b.stride() and a.requires_grad == b.requires_grad
    for (key, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), key
        if q.grad is not None:
            close(p.grad, q.grad, key)
            assert p.grad.stride() == q.grad.stride(), key
    for (key, p), q in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        close(p, q, key)
    assert not any(key.startswith("aot.") for key in counters["fallback"])
