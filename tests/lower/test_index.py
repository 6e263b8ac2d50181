"""Reads at computed positions: embedding, advanced indexing, gather; positions out of range raise as in
eager.
"""

import pytest
import torch
import torch.nn.functional as F
from harness import check, compiled

from dynamotor import config


def test_embedding_fuses_into_layer_norm():
    i, table, p = torch.randint(0, 50, (3, 8)), torch.randn(50, 32), torch.randn(8, 32)
    check(lambda i, t, p: F.layer_norm(F.embedding(i, t) + p, (32,)), i, table, p, kernels=1, tolerance=1e-5)


def test_advanced_indexing():
    x, i, j = torch.randn(6, 7, 20), torch.randint(-6, 6, (4, 3)), torch.randint(-7, 7, (3,))
    check(lambda x, i, j: (x[i], x[i, j], x[:, j], x[:, :, i[:, 0]], x[i[:, :1], :, j] * 2), x, i, j)


def test_gather_and_index_select():
    x, i = torch.randn(5, 40), torch.randint(0, 40, (5, 9))
    check(
        lambda x, i: (
            x.gather(1, i),
            x.index_select(1, i[0]),
            x.gather(1, i).sum(1),
            torch.take_along_dim(x, i, 1),
        ),
        x,
        i,
        tolerance=1e-5,
    )


def test_boolean_masks_are_left_to_aten():
    x, m = torch.randn(9, 4), torch.arange(9) % 2 == 0
    check(lambda x, m: x.index_put((m,), torch.ones(5, 4)) + 1, x, m, fallbacks=["aten.index_put.default"])


@pytest.mark.parametrize("bad", [50, -1])
def test_a_position_out_of_range_raises(bad):
    i, table = torch.tensor([1, 2, 3]), torch.randn(50, 32)
    call, _, _ = compiled(lambda i, t: (F.embedding(i, t) * 2,), i, table)
    call(i, table)
    with pytest.raises(IndexError):
        call(torch.tensor([1, bad, 3]), table)
    call(i, table)


@pytest.mark.parametrize("bad", [64, -1])
@pytest.mark.parametrize("place", [0, 13, 37])
def test_a_position_out_of_range_in_any_lane_raises(bad, place):
    x, i = torch.randn(3, 64), torch.randint(0, 64, (3, 40))
    call, _, _ = compiled(lambda x, i: (x.gather(1, i) * 2,), x, i)
    assert torch.equal(call(x, i)[0], x.gather(1, i) * 2)
    i[1, place] = bad
    with pytest.raises(IndexError):
        call(x, i)


def test_negative_positions_in_vectors_count_from_the_end():
    check(lambda x, i: x[:, i] + 1, torch.randn(3, 64), torch.arange(-20, 20))


def test_rows_of_a_transposed_matrix_are_picked_by_aten():
    """Each element of such a row is in a cache line of its own."""
    x, i = torch.randn(40, 50).t(), torch.tensor([3, -1, 7, 7])
    left = [] if config.target == "triton" else ["aten.index.Tensor"]
    check(lambda x, i: x[i] * 2, x, i, fallbacks=left)
    check(lambda x, i: x[:, i] * 2, x, i)
    check(lambda x, i: x[i] * 2, torch.randn(50, 8).t(), i)
