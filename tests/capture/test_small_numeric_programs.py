"""Small numeric programs give eager's results."""

import pytest
import torch

import dynamotor

MASK = torch.tensor([[True, False], [False, True], [True, True]])


PROGRAMS = {
    "bounds of booleans": lambda: (lambda x, y: (x.clamp(min=y), x.clamp(max=y)), MASK, MASK.roll(1)),
    "a single number flipped": lambda: (lambda x: x.cumsum(0).flip(0), torch.tensor(7)),
    "a constant position of one": lambda: (
        lambda x: x.index_fill_(-1, torch.tensor([0]), 1),
        torch.tensor([5]),
    ),
    "a constant position of several": lambda: (
        lambda x: x.index_fill(0, torch.tensor([3]), 1) * 2,
        torch.arange(10),
    ),
    "a constant position twice": lambda: (
        lambda x: x.index_put((torch.tensor([1, 1]),), x[:2], True),
        torch.arange(9.0),
    ),
}


@pytest.mark.regression
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_eagers(program):
    fn, *inputs = PROGRAMS[program]()
    ours, eager = ([x.clone() for x in inputs] for _ in range(2))
    torch.testing.assert_close(dynamotor.compile(fn)(*ours), fn(*eager))
    torch.testing.assert_close(ours, eager)
