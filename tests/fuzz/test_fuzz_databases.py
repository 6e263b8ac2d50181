"""The fuzzers of PyTorch's operator and module databases: some of their trials, and a fault that they must
find.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels import forget_kernels

import dynamotor
from dynamotor.codegen import cpp_ops
from dynamotor.graph.shapes import infer_spec
from fuzz import fuzzers, modules, operators, shapes
from fuzz.databases import module_infos, operator_infos
from fuzz.trial import examine, targets

OPS = [
    "add float32 0",
    "softmax float32 2",
    "cumsum bfloat16 1",
    "index_put int64 0",
    "var_mean float64 1",
]


def wrong(trials):
    try:
        return {v.trial.name: v.problems for v in examine(trials, targets()[0]) if v.problems}
    finally:
        dynamotor.reset()


@pytest.mark.slow
def test_some_operators_are_right():
    assert wrong([operators.by_name(name) for name in OPS]) == {}


@pytest.mark.slow
def test_some_compositions_are_right():
    found = [t for n in range(2, 6) if (t := operators.composition(n)) is not None]
    assert len(found) > 2 and wrong(found) == {}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", ["BatchNorm1d", "CrossEntropyLoss", "LayerNorm"])
@pytest.mark.slow
def test_some_modules_are_right(name):
    number = next(n for n, info in enumerate(module_infos()) if info.name == f"nn.{name}")
    trials = [t for training in (True, False) for t in modules.trials(number, "float32", training)][:8]
    assert trials and wrong(trials) == {}


@pytest.mark.parametrize("layout", operators.LAYOUTS)
def test_a_layout_keeps_shape_and_dtype(layout):
    for shape in ((), (0, 3), (4,), (2, 3), (2, 3, 4, 5)):
        tensor = operators.relaid(torch.arange(torch.Size(shape).numel()).reshape(shape).float(), layout)
        again = operators._copy(tensor)
        assert tensor.shape == shape and tensor.dtype is torch.float32
        assert torch.equal(again, tensor) and (not tensor.numel() or again.stride() == tensor.stride())


@pytest.mark.slow
def test_a_wrong_operator_is_found_and_named(monkeypatch):
    forget_kernels(monkeypatch)
    monkeypatch.setitem(cpp_ops.TEXT, "exp", cpp_ops.TEXT["sin"])
    number = next(n for n, op in enumerate(operator_infos()) if op.name == "exp")
    job = {
        "fuzzer": "operators",
        "seed": 1,
        "start": number,
        "count": 1,
        "dtype": "float32",
        "target": targets()[0],
    }
    answer = fuzzers.run(job)
    assert answer["findings"] and "fuzz.operators.is_right('exp float32 0'" in answer["findings"][0]["text"]


def test_a_wrong_shape_rule_is_found(monkeypatch):
    job = {"fuzzer": "shapes", "seed": 1, "start": 0, "count": 30, "dtype": ""}
    assert fuzzers.run(job)["findings"] == []
    monkeypatch.setattr(
        shapes, "infer_spec", lambda func, *given: wrong_about_sums(func, infer_spec(func, *given))
    )
    found = fuzzers.run(job)["findings"]
    assert found and all("sum" in one["signature"] for one in found)


def wrong_about_sums(func, spec):
    """The rule of a sum gives float64."""
    return replace(spec, dtype=torch.float64) if func.__name__.startswith("sum") else spec
