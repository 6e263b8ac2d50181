"""`unsafe_split` gives views that its schema does not own up to: their memory was planned as free while they
were read.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.utils import rnn

import dynamotor

pytestmark = pytest.mark.regression


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


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.RNN, torch.nn.LSTM])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_packed_sequences_of_other_lengths(kind: type[torch.nn.RNNBase], backend: str) -> None:
    """PyTorch read the batch sizes of a tensor without memory, and the process ended."""
    net = kind(3, 4)

    def run(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return rnn.pad_packed_sequence(net(packed)[0])[0]

    compiled = dynamotor.compile(run, backend=backend)
    for lengths in ([3, 2], [1, 3], [2, 2], [2, 1]):
        x, given = torch.randn(max(lengths), 2, 3), torch.tensor(lengths)
        torch.testing.assert_close(compiled(x, given), run(x, given))


def test_weights_that_are_packed_in_other_sizes() -> None:
    compiled = dynamotor.compile(
        lambda x: torch._saturate_weight_to_fp16(x * 1e6), backend="eager", dynamic=True
    )
    for rows in (2, 3):
        assert compiled(torch.ones(rows, 4)).tolist() == [[65504.0] * 4] * rows
