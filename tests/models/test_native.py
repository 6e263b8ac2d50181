"""Real models through the native compiler at reduced size: outputs, gradients, buffers and optimizer steps
are eager's.
"""

from __future__ import annotations

import copy

import pytest
import torch

import dynamotor
from bench import models, torchvision_stub
from bench.numerics import gradient_error, largest_error, relative_error

pytest.importorskip("transformers")
torchvision_stub.prepare()
pytest.importorskip("timm")

# resnet18 asks for what resnet50's training does.
TRAINED = [pytest.param(name, marks=[pytest.mark.slow] * (name == "resnet50")) for name in models.TWELVE]


@pytest.mark.parametrize("name", models.TWELVE)
def test_inference_gives_eagers_output(name):
    case = models.load(name, small=True)
    case.model.eval()
    compiled = dynamotor.compile(case.model, fullgraph=True)
    with torch.no_grad():
        for seed in (1, 2):
            args, kwargs = case.make_inputs(seed=seed)
            ours, theirs = compiled(*args, **kwargs), case.model(*args, **kwargs)
            assert type(ours) is type(theirs)
            assert largest_error(models.output_tensors(ours), models.output_tensors(theirs)) < 1e-4


@pytest.mark.sweep(24)
@pytest.mark.parametrize("optimizer", ["SGD", pytest.param("AdamW", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TRAINED)
def test_two_training_steps_are_eagers(name, optimizer):
    """Dropout on, with eager's random numbers; in double, where rounding cannot hide a wrong gradient."""
    case = models.load(name, small=True)
    model = case.model.double().train()
    reference = copy.deepcopy(model)
    make = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        # Llama's norms are float32 in a double model. With Adam's own eps of 1e-8 an update divides gradients that are
        # only rounding noise by their own size, and the states differ by noise.
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-6),
    }[optimizer]
    compiled = dynamotor.compile(model, fullgraph=True, options={"fallback_random": True})
    pairs = (
        (compiled, model, make(model.parameters())),
        (reference, reference, make(reference.parameters())),
    )
    for seed in (1, 2):
        args, kwargs = case.make_inputs(seed=seed, train=True)
        args = [a.double() if a.is_floating_point() else a for a in args]
        losses, gradients = [], []
        for call, owner, step in pairs:
            torch.manual_seed(seed)
            loss = case.loss(call(*args, **kwargs))
            step.zero_grad()
            loss.backward()
            gradients.append({n: p.grad.clone() for n, p in owner.named_parameters() if p.grad is not None})
            step.step()
            losses.append(loss.detach())
        # Hugging Face models compute rotary embeddings and the loss in float32 whatever the parameters'
        # dtype.
        assert relative_error(*losses) < 1e-6
        assert gradient_error(*gradients) < 1e-4
    ours, theirs = model.state_dict(), reference.state_dict()
    assert list(ours) == list(theirs) == list(compiled.state_dict())
    assert gradient_error(ours, theirs) < 1e-4
