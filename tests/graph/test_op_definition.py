"""Definitions of ops: one record per op, rules by facet, written once for static and for dynamic shapes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamotor.graph import op_definition, ops
from dynamotor.graph.op_definition import TakesOp, define, definition, shape, shapes_of
from dynamotor.graph.shapes import infer_spec
from dynamotor.graph.sizes import ShapeEnv
from dynamotor.graph.spec import TensorSpec

aten = torch.ops.aten
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def defined(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test's definitions are forgotten after it."""
    monkeypatch.setattr(op_definition, "definitions", dict(op_definition.definitions))
    yield


def test_an_op_without_rules_has_an_empty_definition() -> None:
    assert definition(aten.digamma.default) == op_definition.OpDefinition()


def test_two_rules_for_one_facet_are_refused(defined: None) -> None:
    shape("op")(lambda x: x.shape)
    define("op", layout=lambda x: x)
    with pytest.raises(KeyError, match="op has two rules of 'shape'"):
        define("op", shape=lambda x: ())


def test_a_rule_of_several_ops_may_take_the_op(defined: None) -> None:
    define("one", "other", shape=TakesOp(lambda op, x: (op, x)))
    assert shapes_of("one", 1) == ("one", 1) and shapes_of("other", 2) == ("other", 2)  # type: ignore[arg-type]


def test_every_family_is_loaded() -> None:
    folder = Path(next(iter(ops.__path__)))
    for path in folder.glob("[a-z]*.py"):
        assert getattr(ops, path.stem) is importlib.import_module(f"dynamotor.graph.ops.{path.stem}")


def test_lowerings_are_in_families_of_the_same_names() -> None:
    """On XLA some ops are decomposed, and collectives and detection (`torchvision`) have no definition."""
    families = {path.stem for path in Path(next(iter(ops.__path__))).glob("[a-z]*.py")}
    for folder in ("dynamotor/lower", "xla/dynamotor/xla"):
        found = {path.stem.removeprefix("ops_") for path in (ROOT / folder).glob("ops_*.py")}
        assert found <= families | {"collective", "decomposed", "detection"}, folder


def test_a_shape_is_written_once_for_static_and_dynamic_sizes() -> None:
    def product(rows: Any, inner: Any) -> Any:
        a = TensorSpec.dense((rows, inner), torch.float32)
        return shapes_of(aten.mm.default, a, TensorSpec.dense((inner, 7), torch.float32))

    env = ShapeEnv()
    rows, inner = env.symbol(3), env.symbol(5)
    assert product(3, 5) == (3, 7)
    assert product(rows, inner) == (rows, 7) and not env.guards


def test_a_requirement_becomes_a_guard() -> None:
    env = ShapeEnv()
    edges = TensorSpec.dense((env.symbol(4), 6), torch.float32)
    values = TensorSpec.dense((env.symbol(4), 9), torch.float32)
    found = infer_spec(aten.searchsorted.Tensor, (edges, values), {})
    assert found.shape[1] == 9 and [repr(g) for g in env.guards] == ["-s1 + s0 == 0"]
