"""Numbers that a step calculates on the host are those of aten, also where Python raises or orders them otherwise."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import fx

from dynamotor.graph.spec import TensorSpec
from dynamotor.step.host import OPS, PYTHON, HostProgram, calculate
from dynamotor.step.numbers import IS_PYTHON

aten = torch.ops.aten
VALUES = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 1e30, -1e30, 1e300, 5e-324, math.inf, -math.inf, math.nan)
UNARY = {aten.neg.default, aten.sqrt.default, aten.reciprocal.default, aten.exp.default}
SAME = {aten._to_copy.default, aten.clone.default, aten.alias.default}
OF_A_NUMBER = {aten.rsub.Scalar, aten.pow.Tensor_Scalar}


def operands(func: Any, x: Any, y: Any, y_value: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of an op made of nodes or tensors."""
    if func in UNARY | SAME:
        return (x,), {}
    if func is aten.view.default:
        return (x, []), {}
    if func is aten.pow.Scalar:
        return (y_value, x), {}
    if func in OF_A_NUMBER:
        return (x, y_value), {}
    if func is aten.full.default:
        return ([], y_value), {}
    return (x, y), {}


def result(func: Any, dtype: torch.dtype, x: float, y: float) -> tuple[float, float]:
    """The results of the program of one op, and aten's."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in "xy"]
    args, kwargs = operands(func, *nodes, y)
    if func is aten.full.default:
        kwargs = {"dtype": dtype}
    node = graph.call_function(func, args, kwargs)
    for each in (*nodes, node):
        each.meta["val"] = TensorSpec.dense((), dtype)
    program = HostProgram.of([node], nodes, [node], [])
    tensors = [torch.tensor(value, dtype=dtype) for value in (x, y)]
    args, kwargs = operands(func, *tensors, y)
    if func is aten.full.default:
        kwargs = {"dtype": dtype}
    (found,) = program.code([tensor.item() for tensor in tensors]) or [math.nan]
    try:
        return found, func(*args, **kwargs).item()
    except RuntimeError:  # a constant that the dtype cannot hold: no trace has it
        return found, found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("func", list(OPS), ids=str)
def test_an_op_of_numbers_is_aten(func: Any, dtype: torch.dtype) -> None:
    for x, y in itertools.product(VALUES, VALUES):
        found, expected = result(func, dtype, x, y)
        close = found == pytest.approx(expected, rel=1e-6 if dtype is torch.float32 else 1e-14, abs=0.0)
        assert math.isnan(expected) and math.isnan(found) or close, (x, y, found, expected)
        if expected == 0:
            assert math.copysign(1, found) == math.copysign(1, expected), (x, y, found, expected)


@pytest.mark.parametrize("func", list(PYTHON), ids=str)
def test_an_op_of_pythons_numbers_raises_where_python_does(func: Any) -> None:
    """Then the program is not for such numbers, and the optimizer's own Python runs."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in "xy"]
    node = graph.call_function(func, tuple(nodes))
    node.meta[IS_PYTHON] = True
    for each in (*nodes, node):
        each.meta["val"] = TensorSpec.dense((), torch.float64)
    program = HostProgram.of([node], nodes, [node], [])
    for x, y in itertools.product(VALUES, VALUES):
        try:
            expected = calculate(node, {nodes[0]: x, nodes[1]: y})
        except ArithmeticError:
            assert program.code([x, y]) is None
            continue
        assert repr(program.code([x, y])) == repr([expected])


def test_the_base_of_a_power_is_rounded_as_aten_rounds_it() -> None:
    for base in (3.5e38, 0.1, -3.5e38):
        for exponent in (0.5, 2.0, -1.0):
            found, expected = result(aten.pow.Scalar, torch.float32, exponent, base)
            assert (
                found == pytest.approx(expected, rel=1e-6, abs=0.0)
                or math.isnan(expected)
                and math.isnan(found)
            )
