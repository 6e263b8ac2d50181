"""A map over part of a reduction's loops: along reduced dimensions, along kept ones, or over a single
number.
"""

import pytest
import torch

import dynamotor
from dynamotor.autograd.aot import aot_compile
from dynamotor.codegen.call_program import CallProgram
from dynamotor.lower import fusion
from dynamotor.lower.lower_graph import lower_graph

pytestmark = pytest.mark.regression

N, M = 24, 40
REDUCTIONS = {
    "sum": lambda x: x.sum(-1),
    "softmax": lambda x: x.softmax(-1),
    "columns": lambda x: x.sum(0),
    "rows and columns": lambda x: (x.sum(0), x.sum(1)),
    "all": lambda x: x.sum(),
    "all, in rows": lambda x: (x.sum(), x.amax(1)),
}
MAPS = {
    "of a row's length": lambda x, row, column, one: row * 2,
    "of a column's length": lambda x, row, column, one: column * 2,
    "of one number": lambda x, row, column, one: one * 2,
    "of each": lambda x, row, column, one: (row + 1, column + 1, one + 1),
    "in place": lambda x, row, column, one: (row.add_(1), column.mul_(2), one.add_(1)),
    "of the sum": lambda x, row, column, one: (row / x.sum(), one * x.sum(), column + x.sum(1)[:, None]),
}


def programs():
    for kind, reduction in REDUCTIONS.items():
        for place, change in MAPS.items():
            yield pytest.param(reduction, change, id=f"{kind}, {place}")


def everything_fused(gm, inputs):
    """The native compiler without the rule that keeps such maps apart."""
    rules = [rule for rule in fusion.RULES if rule is not fusion.beside_the_nest]

    def refuse(error):
        raise error

    def compiled(graph, info):
        return CallProgram(lower_graph(graph, info, rules), info, refuse)

    return aot_compile(gm, list(inputs), compiled)


def check(reduction, change, backend="native"):
    def fn(x, row, column, one):
        product = x * row + column * one
        return reduction(product), change(product, row, column, one)

    inputs = torch.randn(N, M), torch.randn(M), torch.randn(N, 1), torch.randn(())
    ours, eager = ([t.clone() for t in inputs] for _ in range(2))
    got, want = dynamotor.compile(fn, backend=backend)(*ours), fn(*eager)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize(("reduction", "change"), programs())
def test_each_result_is_written(reduction, change):
    check(reduction, change)


@pytest.mark.parametrize(("reduction", "change"), programs())
def test_each_result_is_written_where_the_map_is_fused(reduction, change):
    check(reduction, change, everything_fused)
