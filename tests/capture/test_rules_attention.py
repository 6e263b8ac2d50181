"""`flex_attention` with a mask of blocks that the program makes, and with its further results."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import dynamotor
from dynamotor import counters


def causal(b, h, i, j):
    return i >= j


def documents_of(ids):
    return lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j)


def tensors(length=100, grad=False):
    return [torch.randn(2, 4, length, 16, requires_grad=grad) for _ in range(3)]


def whole(f, *args):
    counters["breaks"].clear()
    got = dynamotor.compile(f, fullgraph=True)(*args)
    assert not counters["breaks"]
    return got


@pytest.mark.parametrize("block", [128, (32, 16)])
def test_a_block_mask_made_inside(block):
    ids = torch.randint(0, 3, (2, 100)).sort().values

    def f(q, k, v, ids):
        made = create_block_mask(documents_of(ids), 2, None, 100, 100, device="cpu", BLOCK_SIZE=block)
        return flex_attention(q, k, v, block_mask=made)

    args = (*tensors(grad=True), ids)
    got, want = whole(f, *args), f(*[a.detach() for a in args])
    torch.testing.assert_close(got, want)
    weights = (args[0] @ args[1].transpose(-2, -1) / 4).masked_fill(
        ~create_mask(documents_of(ids), 2, None, 100, 100, device="cpu"), -torch.inf
    )
    plain = weights.softmax(-1) @ args[2]
    for mine, theirs in zip(
        *[torch.autograd.grad(x.square().sum(), args[:3]) for x in (got, plain)], strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(
    "mask", [causal, lambda b, h, i, j: (i - j).abs() < 20, lambda b, h, i, j: j < (h + 1) * 30]
)
def test_the_blocks_are_those_that_eager_finds(mask, apart):
    names = [
        f"{full}{of}_{what}"
        for full in ("", "full_")
        for of in ("kv", "q")
        for what in ("num_blocks", "indices")
    ]

    more = {} if apart else {"separate_full_blocks": False}  # an argument from PyTorch 2.12 on
    if more.keys() - inspect.signature(create_block_mask).parameters.keys():
        pytest.skip("this PyTorch always keeps full blocks apart")

    def f():
        made = create_block_mask(mask, None, 4, 100, 70, device="cpu", BLOCK_SIZE=32, **more)
        return [getattr(made, name) for name in names], made.seq_lengths, made.BLOCK_SIZE

    got, want = whole(f), f()
    assert got[1:] == want[1:]
    for name, a, b in zip(names, got[0], want[0], strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, msg=name)


def test_a_mask_made_inside_is_eagers():
    def f():
        return create_mask(causal, 1, 2, 5, 7, device="cpu")

    torch.testing.assert_close(whole(f), f())


def test_auxiliary_outputs():
    if not hasattr(flex, "AuxRequest"):
        pytest.skip("this PyTorch has none")

    def f(q, k, v):
        out, auxiliary = flex_attention(q, k, v, return_aux=flex.AuxRequest(lse=True))
        return out * torch.sigmoid(auxiliary.lse)[..., None], auxiliary.max_scores

    args = tensors()
    got, want = whole(f, *args), f(*args)
    torch.testing.assert_close(got[0], want[0])
    assert got[1] is None


@pytest.mark.slow
def test_other_lengths_need_no_break():
    def f(q, k, v):
        n = q.shape[2]
        return flex_attention(q, k, v, block_mask=create_block_mask(causal, None, None, n, n, device="cpu"))

    counters["breaks"].clear()
    g = dynamotor.compile(f)
    for n in (64, 100, 80, 200):
        args = tensors(n)
        torch.testing.assert_close(g(*args), f(*args))
    assert not counters["breaks"]
