"""`unsafe_split` gives views that its schema does not own up to: their memory was planned as free while they
were read.
"""

from __future__ import annotations

import copy

import pytest
import torch

import dynamotor


@pytest.mark.parametrize("cell", [torch.nn.GRUCell, torch.nn.LSTMCell, torch.nn.RNNCell])
def test_cells_infer_and_train(cell):
    ours = cell(5, 10)
    theirs = copy.deepcopy(ours)
    compiled = dynamotor.compile(ours)
    x = torch.randn(2, 5)
    for _ in range(2):
        outs = [m(x)[0] if cell is torch.nn.LSTMCell else m(x) for m in (compiled, theirs)]
        torch.testing.assert_close(*outs)
        for out in outs:
            out.sin().sum().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    with torch.no_grad():
        a, b = compiled(x), theirs(x)
    torch.testing.assert_close(a, b)
