"""The model list builds, runs and repeats."""

from __future__ import annotations

import pytest
import torch

from bench import models, torchvision_stub
from dynamotor.base.errors import UsageError

pytest.importorskip("transformers")
torchvision_stub.prepare()
pytest.importorskip("timm")


def test_the_list_names_the_twelve():
    assert set(models.TWELVE) <= {
        *models.names(),
        "resnet18",
        "resnet50",
        "convnext_tiny",
        "swin_tiny_patch4_window7_224",
    }
    assert len(models.names()) == 86


def test_an_unknown_name_is_refused_with_a_cure():
    with pytest.raises(UsageError, match="models.txt"):
        models.load("no_such_model", small=True)


@pytest.mark.parametrize("name", ["resnet18", "T5ForConditionalGeneration"])
def test_the_same_seed_gives_the_same_model_and_inputs(name):
    first, second = (models.load(name, small=True, seed=3) for _ in range(2))
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    (args, kwargs), (args2, kwargs2) = first.make_inputs(seed=5), second.make_inputs(seed=5)
    assert kwargs.keys() == kwargs2.keys()
    assert all(
        torch.equal(a, b) for a, b in zip([*args, *kwargs.values()], [*args2, *kwargs2.values()], strict=True)
    )


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM", "swin_tiny_patch4_window7_224"])
def test_without_dropout_training_mode_is_deterministic(name):
    case = models.load(name, small=True, dropout=False)
    case.model.train()
    args, kwargs = case.make_inputs(train=True)
    a, b = (models.output_tensors(case.model(*args, **kwargs)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
