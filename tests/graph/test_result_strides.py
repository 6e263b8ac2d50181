"""Strides of results whose size data decides are eager's, also where it is 0 or 1 and operands are broadcast."""

import math
import random

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters
from dynamotor.graph.result_strides import viewed_stride

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


def _layouts(count):
    """Shapes with sizes of 1 and the strides of parts of larger tensors, in any order."""
    rng = random.Random(0)
    for _ in range(count):
        shape, step = [rng.choice((1, 1, 2, 3, 4)) for _ in range(rng.randint(1, 5))], 1
        strides = [0] * len(shape)
        for d in rng.sample(range(len(shape)), len(shape)):
            strides[d] = step if shape[d] > 1 else rng.randint(0, 9)
            step *= shape[d] * rng.choice((1, 1, 1, 2))
        parts = [n for n in (*shape[:-2], math.prod(shape[-2:])) if n > 1]
        for _ in range(rng.randint(0, 2)):
            parts.insert(rng.randint(0, len(parts)), 1)
        yield tuple(shape), tuple(strides), tuple(parts)


@pytest.mark.regression
def test_strides_of_views_are_eagers_where_a_dimension_has_size_one():
    for shape, strides, seen_as in _layouts(2000):
        try:
            eager = torch.empty(5000).as_strided(shape, strides).view(seen_as).stride()
        except RuntimeError:
            eager = None
        assert viewed_stride(shape, strides, seen_as) == eager, (shape, strides, seen_as)


LAST = {
    "last token": lambda n: torch.randn(2, n)[:, -1:],
    "turned": lambda n: torch.randn(5, n)[:1].t(),
    "column": lambda n: torch.randn(n, 5)[:, :1],
    "inside": lambda n: torch.randn(n, 1, 5)[:, :, 2:3],
}


@pytest.mark.regression
@pytest.mark.parametrize("part", LAST.values(), ids=LAST)
def test_views_of_a_part_of_a_growing_tensor_take_one_program(part):
    def program(x):
        return x.view(-1, 1), x.view(x.shape) + 1

    dynamotor.reset()
    compiled = dynamotor.compile(program)
    for n in range(4, 9):
        x = part(n)
        for ours, eager in zip(compiled(x), program(x), strict=True):
            torch.testing.assert_close(ours, eager)
            assert ours.stride() == eager.stride()
    assert counters["frames"]["captured"] == 2 and not counters["specialised"]
