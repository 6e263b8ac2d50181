"""Strides of results whose size data decides are eager's, also where it is 0 or 1 and operands are broadcast."""

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters

FORMS = {
    "column": lambda y, t, row: y * t[:, None],
    "column first": lambda y, t, row: t[:, None] + y,
    "row": lambda y, t, row: row * y,
    "row of two": lambda y, t, row: y + row[None],
    "three": lambda y, t, row: torch.where(t[:, None] > 0.5, y, row),
    "number": lambda y, t, row: t.unsqueeze(-1) * (y * 2.0),
    "columns of a table": lambda y, t, row: y[:, 1:3] * t[:, None],
    "in three dimensions": lambda y, t, row: y.view(-1, 2, 2) * t[:, None, None] + row.view(2, 2),
    "one of size one": lambda y, t, row: y[:, None] * t[:, None, None],
}


@pytest.mark.parametrize("name", FORMS)
def test_broadcast_operands(name):
    form = FORMS[name]

    def program(table, weights, row, mask):
        (chosen,) = torch.where(mask)
        return form(table[chosen], weights[chosen], row)

    dynamotor.reset()
    compiled = dynamotor.compile(program)
    table, weights, row = torch.randn(6, 4), torch.rand(6), torch.randn(4)
    for n in (3, 1, 0, 6, 2):
        mask = torch.arange(6) < n
        ours, eager = compiled(table, weights, row, mask), program(table, weights, row, mask)
        torch.testing.assert_close(ours, eager)
        assert ours.stride() == eager.stride(), (n, ours.shape)
    if name != "one of size one":
        assert counters["frames"]["captured"] == 1 and not counters["breaks"]


def test_a_loop_over_experts_is_one_graph():
    gate, first, second = torch.nn.Linear(8, 4), torch.randn(4, 8, 16), torch.randn(4, 8, 8)
    first.requires_grad_()

    def experts(x):
        weights, chosen = gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for e in range(4):
            rows, places = torch.where(chosen == e)
            a, b = (x[rows] @ first[e]).chunk(2, -1)
            out.index_add_(0, rows, ((a.sigmoid() * b) @ second[e]) * weights[rows, places, None])
        return out

    dynamotor.reset()
    compiled, found = dynamotor.compile(experts), []
    for i in range(3):
        x = torch.randn(6 if i else 1, 8)
        for call in (compiled, experts):
            out = call(x)
            found.append((out, *torch.autograd.grad(out.square().sum(), [first, gate.weight])))
        torch.testing.assert_close(found[-2], found[-1])
    assert not counters["breaks"] and not counters["fallback"]


@pytest.mark.regression
def test_a_size_beside_an_operand_of_fewer_dimensions_is_asked_for_nothing():
    weight = torch.randn(3)

    def program(x):
        return x * weight + x.sum(0)

    dynamotor.reset()
    compiled = dynamotor.compile(program, dynamic=True)
    for n in (2, 5, 3, 4):  # the weight has three elements
        x = torch.randn(n, 3)
        torch.testing.assert_close(compiled(x), program(x))
    assert counters["frames"]["captured"] == 1
