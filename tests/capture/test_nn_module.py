"""Modules whose attributes, parameters or submodules come from other places than their class."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynamotor


@pytest.mark.regression
def test_default_attributes_of_generated_modules_in_a_slice():
    """LlamaForCausalLM iterates over a slice of its ModuleList."""
    layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])

    def fn(x):
        part = layers[1:]
        for layer in part:
            x = layer(x)
        return x, len(part), part.training

    out, n, training = dynamotor.compile(fn, backend="eager", fullgraph=True)(torch.ones(2, 3))
    assert n == 3 and training and torch.equal(out, fn(torch.ones(2, 3))[0])


@pytest.mark.regression
def test_a_module_that_decides_once():
    """ViTForImageClassification sets config.problem_type at its first call: the second compiles once more."""

    class Model(nn.Module):
        kind = None

        def forward(self, x):
            if self.kind is None:
                self.kind = "single"
            return x * (2 if self.kind == "single" else 3)

    graphs = []
    compiled = dynamotor.compile(
        Model(), backend=lambda gm, inputs: graphs.append(gm) or gm.forward, fullgraph=True
    )
    x = torch.randn(3)
    for _ in range(5):
        assert torch.equal(compiled(x), x * 2)
    assert len(graphs) == 2


class _Parent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.child = torch.nn.ReLU()


@pytest.mark.regression
def test_a_module_that_a_break_makes_has_its_submodules():
    """Its `__init__` is captured on its own, over a module that is there already."""
    make = dynamotor.disable(lambda cls: cls(), recursive=False)
    made = dynamotor.compile(lambda cls: make(cls), backend="eager")(_Parent)
    assert list(made._modules) == ["child"] and "child" not in made.__dict__


class _OfAClass(torch.Tensor):
    pass


@pytest.mark.regression
@pytest.mark.parametrize(
    "made",
    [
        lambda x: torch.nn.Parameter(x.as_subclass(_OfAClass)),
        torch.nn.Buffer,
        lambda x: torch.nn.Buffer(x, persistent=False),
    ],
)
def test_parameters_and_buffers_whose_class_does_not_say_so(made):
    """Set in a module, they were plain attributes: in no `state_dict`, and `parameters()` lacked them."""

    def outside(module, tensor):
        module.it = tensor
        return module

    def inside(module, tensor):
        module.it = made(tensor.detach().as_subclass(torch.Tensor))
        return module

    for fn in (outside, inside):
        said = []
        for run in (fn, dynamotor.compile(fn, backend="eager")):
            module = run(torch.nn.Module(), made(torch.ones(2)))
            tables = (module._parameters, module._buffers, module._non_persistent_buffers_set)
            said.append((str(tables), "it" in module.__dict__))
        assert said[0] == said[1]


def _load(target: nn.Module, source: nn.Module, x: torch.Tensor) -> object:
    state = source.state_dict()
    state.pop("0.bias")
    keys = target.load_state_dict(state, strict=False)
    return target(x), " ".join([*keys.missing_keys, *state, *state._metadata])


def _average(target: nn.Module, source: nn.Module, x: torch.Tensor) -> object:
    state = source.state_dict()
    for name, value in target.state_dict().items():
        if value.is_floating_point():
            value.mul_(0.9).add_(state[name], alpha=0.1)
    return target(x), ""


def _load_wrong(target: nn.Module, source: nn.Module, x: torch.Tensor) -> object:
    try:
        target.load_state_dict({**source.state_dict(), "0.weight": x, "other": x})
    except RuntimeError as error:
        return str(error)
    return target(x), ""


@pytest.mark.regression
@pytest.mark.parametrize("fn", [_load, _average, _load_wrong])
def test_states_of_modules_are_read_and_loaded_in_the_graph(fn):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        target, source = (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval() for _ in range(2))
        run = dynamotor.compile(fn, backend="eager", fullgraph=True) if compiled else fn
        found = [run(target, source, torch.full((2, 3), k + 1.0)) for k in range(2)]
        versions = [p._version for p in (*target.parameters(), *source.parameters())]
        results.append((found, target.state_dict(), versions))
    texts = [[one if type(one) is str else one[-1] for one in found] for found, *_ in results]
    assert texts[0] == texts[1]
    results = [([one[0] if type(one) is tuple else 0 for one in found], *rest) for found, *rest in results]
    torch.testing.assert_close(results[1], results[0])
