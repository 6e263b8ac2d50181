"""dynamotor::rand inside kernels gives the same bits as the eager op, in any shape and fusion."""

import pytest
import torch
from harness import check

rand = torch.ops.dynamotor.rand


@pytest.mark.parametrize("shape", [(7,), (64,), (5, 33), (3, 4, 17), (2, 9000), (4, 128, 16), (40000,)])
@pytest.mark.parametrize("seed", [3, -(1 << 40) + 12345])
def test_random_numbers_are_bit_equal(shape, seed):
    key = torch.tensor([seed])
    check(lambda key: rand(key, 5, list(shape), dtype=torch.float32), key, tolerance=0, kernels=1)


def test_dropout_after_softmax_is_one_kernel():
    key, x = torch.tensor([77]), torch.randn(2, 3, 16, 48)

    def fn(key, x):
        y = torch.softmax(x, -1)
        keep = rand(key, 1, [2, 3, 16, 48], dtype=torch.float32) >= 0.1
        return y * keep * (1 / 0.9)

    check(fn, key, x, kernels=1, tolerance=1e-5)


def test_transposed_random_numbers():
    key = torch.tensor([5])
    check(lambda key: rand(key, 2, [6, 35], dtype=torch.float32).t() * 2, key, tolerance=0)
