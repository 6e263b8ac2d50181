"""Graph breaks inside comprehensions and inside `iter`."""

from __future__ import annotations

import pytest
import torch

import dynamotor


def eager_backend(gm, example_inputs):
    return gm.forward


@pytest.mark.regression
def test_a_comprehension_cut_in_the_middle_keeps_its_items():
    """Backward hooks: the list of a resumed comprehension lost items appended after the break."""

    def f(x):
        return [t for t in (x, x + 1, x + 2) if t.sum() > 0]

    compiled = dynamotor.compile(f, backend=eager_backend)
    for x in (torch.ones(2), torch.ones(2) * -1.5):
        assert len(compiled(x)) == len(f(x))


@pytest.mark.regression
def test_a_break_inside_iter_does_not_stand_for_the_call():
    """The frame of `__iter__`, entered by the rule of `enumerate`, was resumed as if its result were the
    call's.
    """

    class Rows:
        def __init__(self, rows):
            self.rows = rows

        def __iter__(self):
            print(end="")
            return iter(self.rows)

    def f(x, rows):
        return [x + i + v for i, v in enumerate(rows)]

    compiled, x = dynamotor.compile(f, backend=eager_backend), torch.ones(2)
    for _ in range(2):
        assert all(
            torch.equal(a, b) for a, b in zip(compiled(x, Rows([1, 2])), f(x, Rows([1, 2])), strict=True)
        )
