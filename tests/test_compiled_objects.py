"""Compiled functions and modules as objects: copied, pickled, parametrized, saved, with slots, under their
own class's name.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import dynamotor
from bench import torchvision_stub

x = torch.randn(2, 3)


@dynamotor.compile
def doubled(x):
    return x * 2


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = dynamotor.compile(nn.Linear(3, 3))
        self.function, self.method = doubled, dynamotor.compile(self.helper)
        self.scale = 1.0

    def helper(self, x):
        return x * self.scale

    def forward(self, x):
        return self.method(self.function(self.inner(x)))


def saved(holder):
    file = io.BytesIO()
    torch.save(holder, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
def test_a_module_that_holds_compiled_functions_is_copied(copied):
    holder = Holder()
    before = holder(x)
    other = copied(holder)
    torch.testing.assert_close(other(x), before)
    assert other.function is doubled
    other.scale = 0.0
    assert not other(x).any() and holder(x).any()
    with torch.no_grad():
        other.inner.weight.fill_(7.0)
    torch.testing.assert_close(holder(x), before)


def test_compiled_functions_are_copied_and_pickled():
    assert copy.deepcopy(doubled) is doubled and pickle.loads(pickle.dumps(doubled)) is doubled
    local = dynamotor.compile(lambda x: x + 1, backend="eager")
    assert copy.copy(local)(torch.ones(1)).item() == 2


def test_the_class_is_the_modules():
    module = nn.Linear(3, 3)
    compiled = dynamotor.compile(module)
    assert (
        compiled.__class__ is nn.Linear
        and type(compiled).__name__ == "Linear"
        and isinstance(compiled, nn.Linear)
    )
    assert repr(compiled) == repr(module) and compiled._orig_mod is module


def test_transformers_saves_the_models_own_name(tmp_path):
    pytest.importorskip("transformers")
    torchvision_stub.prepare()
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=11
    )
    dynamotor.compile(BertForMaskedLM(config)).save_pretrained(tmp_path)
    assert BertForMaskedLM.from_pretrained(tmp_path).config.architectures == ["BertForMaskedLM"]


class Triangular(nn.Module):
    def forward(self, weight):
        return weight.triu()


@pytest.mark.parametrize("target", ["compiled", "module"])
def test_parametrizations(target):
    module = nn.Linear(3, 3)
    compiled = dynamotor.compile(module)
    compiled(x)
    reached = compiled if target == "compiled" else module
    parametrize.register_parametrization(reached, "weight", Triangular())
    whole = compiled.parametrizations.weight.original
    torch.testing.assert_close(compiled(x), x @ whole.triu().T + compiled.bias)
    torch.testing.assert_close(module(x), compiled(x))
    with torch.no_grad():
        whole.mul_(2)
    torch.testing.assert_close(compiled(x), x @ whole.triu().T + compiled.bias)
    assert compiled.__class__.__name__ == "ParametrizedLinear" and parametrize.is_parametrized(compiled)
    torch.testing.assert_close(compiled.weight, whole.triu())
    parametrize.remove_parametrizations(reached, "weight")
    torch.testing.assert_close(compiled(x), x @ whole.triu().T + compiled.bias)
    assert type(module) is nn.Linear


@pytest.mark.parametrize(
    "norm", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_norms_of_a_compiled_modules_weight(norm):
    compiled = norm(dynamotor.compile(nn.Linear(3, 3)))
    compiled.eval()
    torch.testing.assert_close(compiled(x), x @ compiled.weight.T + compiled.bias)
    torch.testing.assert_close(compiled(x), compiled._orig_mod(x))


def test_weight_norm_with_hooks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = nn.utils.weight_norm(dynamotor.compile(nn.Linear(3, 3)))
    with torch.no_grad():
        compiled.weight_g.mul_(2)
    torch.testing.assert_close(compiled(x), compiled._orig_mod(x))


def test_a_module_with_slots():
    class Slotted(nn.Module):
        __slots__ = ("scale",)

        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(3, 3), 2.0

        def forward(self, x):
            return self.linear(x) * self.scale

    module = Slotted()
    compiled = dynamotor.compile(module)
    for owner, value in ((module, 3.0), (compiled, 4.0)):
        owner.scale = value
        assert module.scale == compiled.scale == value
        torch.testing.assert_close(compiled(x), module.linear(x) * value)


def test_forward_is_compiled_too():
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    class Scaled(nn.Linear):
        def forward(self, x, *, factor=1.0):
            return super().forward(x) * factor

    plain = Scaled(3, 3)
    compiled = dynamotor.compile(plain, backend=backend)
    compiled.register_forward_hook(lambda module, args, out: out + 1)
    whole = dynamotor.compile(lambda x: compiled.forward(x) * 2, backend="eager", fullgraph=True)
    assert whole(x).equal(plain.forward(x) * 2)
    assert compiled.forward(x, factor=2.0).equal(plain.forward(x, factor=2.0)) and len(graphs) == 1
    assert compiled(x).equal(plain(x)) and len(graphs) == 2
    assert inspect.signature(compiled.forward) == inspect.signature(plain.forward)
    compiled.forward = lambda x: x + 5  # both have it, as both have all attributes
    assert compiled(x).equal(x + 6) and plain(x).equal(x + 6)


def test_attributes_of_a_function_are_those_of_its_compiled_one():
    def counts(x):
        counts_.calls += 1
        return x * counts_.calls * getattr(counts_, "factor", 1)

    counts.calls = 0
    counts_ = dynamotor.compile(counts)
    assert counts_.calls == 0
    assert [counts_(torch.ones(1)).item() for _ in range(3)] == [1, 2, 3]
    assert counts_.calls == counts.calls == 3
    counts_.factor = 10
    assert counts_(torch.ones(1)).item() == 40 and counts.factor == 10
    del counts_.factor
    assert counts_(torch.ones(1)).item() == 5 and not hasattr(counts, "factor")
    assert counts_.__code__ is counts.__code__ and "warm_up" not in vars(counts)
    with pytest.raises(AttributeError, match="'function' object has no attribute 'other'"):
        _ = counts_.other
    reader = dynamotor.compile(lambda x: x * counts_.calls)
    assert reader(torch.ones(1)).item() == 5
    counts.calls = 7
    assert reader(torch.ones(1)).item() == 7


def test_attributes_of_a_compiled_object_are_its_own():
    class Scale:
        factor = 2

        def __call__(self, x):
            self.factor += 1
            return x * self.factor

    scale = Scale()
    compiled = dynamotor.compile(scale)
    assert compiled(torch.ones(1)).item() == 3 and compiled.factor == 3
    compiled.factor = 9
    assert compiled(torch.ones(1)).item() == 10 and scale.factor == 10


def test_a_compiled_module_is_exported():
    exported = torch.export.export(dynamotor.compile(nn.Linear(3, 3)), (x,))
    assert exported.module()(x).shape == (2, 3)


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 3), lambda: doubled], ids=["module", "function"])
def test_torch_jit_scripts_and_traces_compiled_objects(make):
    plain = make()
    compiled = dynamotor.compile(plain)
    other = torch.randn(5, 3)
    for jitted in (torch.jit.script(compiled), torch.jit.trace(compiled, (x,))):
        torch.testing.assert_close(jitted(other), plain(other))


def test_a_module_that_holds_compiled_modules_is_scripted():
    inner = nn.Linear(3, 3)
    model = nn.Sequential(dynamotor.compile(inner), nn.ReLU())
    torch.testing.assert_close(torch.jit.script(model)(x), inner(x).relu())


class Parts(nn.Module):
    """A module with a compiled function, and whose forward may be compiled."""

    def __init__(self, forward_too):
        super().__init__()
        self.linear, self.double = nn.Linear(3, 3), doubled
        if forward_too:
            self.forward = dynamotor.compile(self.forward, backend="eager")

    def forward(self, x):
        return self.double(self.linear(x)) + 1


@pytest.mark.parametrize("forward_too", [False, True])
def test_modules_that_hold_compiled_functions_are_scripted_traced_and_exported(forward_too):
    model = Parts(forward_too)
    expected = doubled.__wrapped__(model.linear(x)) + 1
    ways = {
        "script": lambda: torch.jit.script(model),
        "trace": lambda: torch.jit.trace(model, (x,)),
        "export": lambda: torch.export.export(model, (x,)).module(),
        "fx": lambda: torch.fx.symbolic_trace(model),
    }
    for name, way in ways.items():
        torch.testing.assert_close(way()(x), expected, msg=name)


def test_a_compiled_function_is_traced_by_strict_export():
    exported = torch.export.export(Parts(False), (x,), strict=True)
    assert [n.name for n in exported.graph.nodes if n.op == "call_function"] == ["linear", "mul", "add"]


def test_a_compiled_function_or_method_is_one_to_isinstance():
    module = nn.Linear(3, 3)
    method = dynamotor.compile(module.forward, backend="eager")
    assert inspect.isfunction(doubled) and inspect.ismethod(method)
    assert not inspect.isfunction(dynamotor.compile(Plain(), backend="eager"))
    assert torch.fx.symbolic_trace(doubled)(x).equal(x * 2)


class Plain:
    def __call__(self, x):
        return x


def test_a_compiled_module_is_traced_symbolically():
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    traced = torch.fx.symbolic_trace(dynamotor.compile(module))
    torch.testing.assert_close(traced(x), module(x))
    function = torch.fx.symbolic_trace(doubled.__wrapped__)
    assert function(x).equal(x * 2)


def test_a_compiled_method_is_compiled_again():
    module = nn.Linear(3, 3)
    method = dynamotor.compile(module.forward, backend="eager")
    whole = dynamotor.compile(method, fullgraph=True)
    torch.testing.assert_close(whole(x), module(x))
    torch.testing.assert_close(dynamotor.export(method, x).module("eager")(x), module(x))


class Told(nn.Linear):
    """1 more when it runs compiled."""

    def forward(self, x):
        return super().forward(x) * 0 + (1 if dynamotor.is_compiling() else 0)


def test_compile_of_a_compiled_module_is_in_place_and_leaves_the_module_alone():
    model = Told(3, 3)
    compiled = dynamotor.compile(model, fullgraph=True)
    assert compiled(x).all()
    for arguments in ({"backend": "eager"}, {}, {"fullgraph": True, "dynamic": True}):
        assert compiled.compile(**arguments) is None
        assert compiled(x).all() and compiled.forward(x).all() and not model(x).any()
        settings = type(compiled)._dynamotor.miss.__self__.options
        asked = arguments.get("fullgraph", False), arguments.get("dynamic")
        assert (settings.fullgraph, settings.dynamic) == asked
    assert model._compiled_call_impl is None and compiled.state_dict().keys() == model.state_dict().keys()
    assert copy.deepcopy(compiled)(x).all()
    compiled.compile(disable=True)
    assert not compiled(x).any()
    compiled.compile()
    assert compiled(x).all()
    with pytest.raises(TypeError, match="treads"):
        compiled.compile(treads=2)


def test_compile_in_place_survives_another_class():
    compiled = dynamotor.compile(Told(3, 3))
    compiled.compile(fullgraph=True)
    parametrize.register_parametrization(compiled, "weight", nn.Identity())
    assert compiled(x).all() and type(compiled)._dynamotor.miss.__self__.options.fullgraph


def test_a_modules_own_compile_method_is_kept():
    class Keras(nn.Linear):
        def compile(self, optimizer):
            return f"compiled for {optimizer}"

    assert dynamotor.compile(Keras(3, 3)).compile("adam") == "compiled for adam"


def test_compile_of_a_module_twice_in_place():
    model = Told(3, 3)
    with dynamotor.replace_torch_compile():
        model.compile()
        model.compile(fullgraph=True)
    assert model(x).all() and list(model.state_dict()) == ["weight", "bias"]
    assert dynamotor.compile(model)(x).all()
    assert not copy.deepcopy(model)(x).any()  # as after torch.compile
    with dynamotor.replace_torch_compile():
        model.compile(disable=True)
    assert not model(x).any()
