"""Written inputs that are views of one buffer: apart by their bytes, or together."""

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters
from dynamotor.graph.spec import memory_groups

KINDS = {
    "apart": lambda b: (b[0], b[1]),
    "reversed": lambda b: (b[2], b[0]),
    "overlapping": lambda b: (b[:3], b[1:]),
    "same": lambda b: (b[0], b[0]),
    "interleaved": lambda b: (b[:, 0], b[:, 1]),
    "inside": lambda b: (b, b[1]),
    "empty": lambda b: (b[:0], b[1]),
}


def test_groups_are_of_bytes():
    b, other = torch.zeros(6, 4), torch.zeros(3)
    assert memory_groups([b[0], 7, b[2:4], other, b[3], b[0, 2:], b[5]]) == [0, 1, 2, 3, 2, 0, 6]
    b.requires_grad_()
    assert memory_groups([b[0], b[1], other]) == [0, 0, 2]


def caches(k, v, x):
    k.mul_(2).add_(x)
    before = v * 2
    v.add_(k.sum())
    return before.sum() + k.sum() * x


def with_gradient(k, v, x):
    x = x.clone().requires_grad_()
    k.add_(1.5)
    y = (x * v.sum()).sum()
    v.add_(1)
    return y + k.sum()


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize("fn", [caches, with_gradient], ids=lambda fn: fn.__name__)
def test_views_of_one_buffer_are_written(fn, backend):
    dynamotor.reset()
    compiled = dynamotor.compile(fn, backend=backend)
    for kind in ("apart", "overlapping", "apart", *KINDS, "apart"):
        ours, eager = torch.ones(4, 4, 8), torch.ones(4, 4, 8)
        for _ in range(2):
            results = [f(*KINDS[kind](b), torch.tensor(1.25)) for f, b in ((compiled, ours), (fn, eager))]
            torch.testing.assert_close(*results)
            torch.testing.assert_close(ours, eager)


def test_caches_in_one_buffer_are_compiled():
    dynamotor.reset()
    buffer, fallbacks = torch.zeros(2, 4, 8), counters["fallback"].total()
    compiled = dynamotor.compile(caches)
    for _ in range(3):
        compiled(buffer[0], buffer[1], torch.tensor(2.0))
    assert counters["fallback"].total() == fallbacks
