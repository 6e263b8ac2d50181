"""Which values get memory: on a GPU one whose readers see different parts of it, so that it would be a launch of
its own, is computed in each of them where that reads few bytes.
"""

import pytest
import torch
from harness import check, compiled

from bench.triton_interpret import available
from dynamotor.base.config import config

GENERATOR = torch.Generator().manual_seed(0)


@pytest.fixture
def on_gpu():
    if not available():
        pytest.skip("triton was imported without TRITON_INTERPRET=1")
    with config.patch(target="triton"):
        yield


def randn(*shape):
    return torch.randn(*shape, generator=GENERATOR)


def rotated(parts, cosine, sine):
    """A sum of parts, rounded, and its rotation by halves of a head."""
    x = sum(parts.unbind()).to(torch.bfloat16).unflatten(-1, (-1, 64))
    low, high = x[..., :32], x[..., 32:]
    return x * cosine + torch.cat([-high, low], -1) * sine


def angles():
    return randn(64), randn(64)


def test_a_small_value_of_which_readers_see_parts_is_no_launch_of_its_own(on_gpu):
    check(rotated, randn(8, 8, 512), *angles(), kernels=1)
    check(rotated, randn(5, 3, 192), *angles(), kernels=1)


def test_it_is_one_where_it_reads_more_than_a_launch_takes(on_gpu):
    many = randn(8, 80, 2048)
    assert len(compiled(rotated, many, *angles())[1]) == 2
    check(rotated, randn(33, 2, 64), *angles(), kernels=2)
    check(lambda x: (y := x.exp().sin().tanh().cos().erf() * 2, y[1:] + y[:-1])[1], randn(9, 8))


def test_it_is_one_on_a_cpu():
    check(rotated, randn(8, 8, 512), *angles(), kernels=2)


def test_a_value_that_all_readers_see_whole_is_made_once(on_gpu):
    def stream(parts):
        x = sum(parts.unbind())
        return x.square().mean(-1, keepdim=True), x.amax(-1), x * 2

    (text,) = check(stream, randn(8, 8, 256), kernels=1)
    assert text.count("load") <= 10


def test_differences_of_neighbours_do_not_grow_without_end(on_gpu):
    def steps(x):
        for _ in range(12):
            x = x[:, 1:] * 2 - x[:, :-1]
        return x

    check(steps, randn(4, 100), tolerance=1e-3)
