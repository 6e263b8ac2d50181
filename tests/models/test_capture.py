"""Real models are captured as one graph without a break, and the graph run eagerly gives eager's results."""

from __future__ import annotations

import copy

import pytest
import torch
from kept_graphs import Recorder

import dynamotor
from bench import models, torchvision_stub

pytest.importorskip("transformers")
torchvision_stub.prepare()
pytest.importorskip("timm")


def run(case, model, inputs, seed):
    args, kwargs = inputs
    torch.manual_seed(seed)
    return model(*args, **kwargs)


def same(ours, theirs):
    assert type(ours) is type(theirs)
    ours, theirs = models.output_tensors(ours), models.output_tensors(theirs)
    assert len(ours) == len(theirs) and ours
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", models.TWELVE)
def test_inference_is_one_graph(name):
    case = models.load(name, small=True)
    case.model.eval()
    backend = Recorder()
    compiled = dynamotor.compile(case.model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for seed in (1, 2):
            inputs = case.make_inputs(seed=seed)
            same(run(case, compiled, inputs, seed), run(case, case.model, inputs, seed))
    assert len(backend.graphs) == 1


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", models.TWELVE)
def test_training_is_one_graph(name):
    """With dropout on: the random ops stay in eager's order, so the same seed gives the same numbers."""
    case = models.load(name, small=True)
    reference = copy.deepcopy(case.model).train()
    case.model.train()
    backend = Recorder()
    compiled = dynamotor.compile(case.model, backend=backend, fullgraph=True)
    for seed in (1, 2):
        inputs = case.make_inputs(seed=seed, train=True)
        ours, theirs = run(case, compiled, inputs, seed), run(case, reference, inputs, seed)
        same(ours, theirs)
        case.loss(ours).backward()
        case.loss(theirs).backward()
    assert len(backend.graphs) == 1
    mine, others = dict(case.model.named_parameters()), dict(reference.named_parameters())
    assert mine.keys() == others.keys() == dict(compiled.named_parameters()).keys()
    for key, parameter in mine.items():
        assert (parameter.grad is None) == (others[key].grad is None), key
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, others[key].grad, rtol=1e-4, atol=1e-6)
    assert case.model.state_dict().keys() == compiled.state_dict().keys() == reference.state_dict().keys()
    for key, buffer in compiled.state_dict().items():
        torch.testing.assert_close(buffer, reference.state_dict()[key], rtol=1e-5, atol=1e-6)
