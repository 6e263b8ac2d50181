"""Rows side by side in memory: reductions along another dimension than the last."""

import pytest
import torch

import dynamotor
from dynamotor.base.config import config
from dynamotor.codegen import cpp, cpp_kernel
from dynamotor.codegen.cpp_vertical import vertical_emitter

PROGRAMS = {
    "argmax": lambda x: x.argmax(1),
    "min": lambda x: x.min(1),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.float().log_softmax(1),
    "norm": lambda x: (x - x.mean(1, True)) * torch.rsqrt(x.var(1, keepdim=True, unbiased=False) + 1),
    "softmax_of_columns": lambda x: x.transpose(1, 2).softmax(2),
    "max_and_its_place_twice": lambda x: (x * 2).max(1).indices + x.max(1).indices,
    "logsumexp": lambda x: torch.logsumexp(x.float(), 1) * 2,
}
SHAPES = [(2, 21, 67), (1, 300, 16), (3, 16, 64, 5), (2, 96, 7, 7), (4, 32, 33)]


@pytest.fixture(autouse=True)
def _vertical(monkeypatch):
    """Whether each kernel in rows had vectors across them."""
    found = []

    def emitter(kernel):
        found.append(vertical_emitter(kernel))
        return found[-1]

    monkeypatch.setattr(cpp, "vertical_emitter", emitter)
    cpp._memo.clear()
    return found


def same(fn, x, isa="", rtol=None, atol=None):
    with config.patch(isa=isa, fold_constants=False), torch.no_grad():
        got = dynamotor.compile(fn, dynamic=False)(x)
    torch.testing.assert_close(got, fn(x), equal_nan=True, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_reductions_across_the_memory_are_as_in_eager(name, shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64).mul(3).to(dtype)
    half = dtype is torch.bfloat16
    same(PROGRAMS[name], x, rtol=2e-2 if half else None, atol=2e-2 if half else None)


def test_the_first_of_equal_values_counts_and_nan_is_beyond_all(_vertical):
    x = torch.randint(0, 3, (40, 130)).float()
    x[7, 5] = x[9, 5] = x[3, 77] = float("nan")
    same(lambda x: (x.argmax(0), x.argmin(0), x.max(0), x.min(0)), x)
    same(lambda x: (x.argmax(0), x.argmin(0)), torch.randint(-3, 3, (40, 130), dtype=torch.int8))
    same(lambda x: (x.expand(9, 130).prod(0), x.expand(9, 130).min(0)), torch.randn(1, 130))
    assert all(_vertical)


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_other_instruction_sets(isa, _vertical):
    if not cpp_kernel.ISAS[isa].is_here:
        pytest.skip(f"this processor has no {isa}")
    same(lambda x: x.argmax(0), torch.randn(33, 71), isa=isa)
    same(lambda x: x.t().softmax(1), torch.randn(64, 70), isa=isa)
    assert any(_vertical)


@pytest.mark.parametrize("isa", ["", "avx2", "portable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8], ids=str)
def test_every_second_element_of_the_memory(isa, dtype, _vertical):
    if isa and isa in cpp_kernel.ISAS and not cpp_kernel.ISAS[isa].is_here:
        pytest.skip("another processor")
    x = torch.randint(0, 90, (33, 150)).to(dtype)[:, ::2]
    same(lambda x: (x.argmax(0), x.min(0)), x, isa)
    assert all(_vertical) or isa == "portable" and dtype is torch.float64  # two lanes are none


def test_rows_whose_own_elements_follow_each_other_keep_their_vectors(_vertical):
    same(lambda x: x.softmax(1), torch.randn(64, 64))
    same(lambda x: x.max(1), torch.randn(64, 64))
    assert _vertical and not any(_vertical)


def test_long_sums_lose_as_little_as_in_other_loops():
    x = torch.full((4096, 32), 0.1).t().contiguous().t()
    total = dynamotor.compile(lambda x: x.t().float().softmax(1).sum(1), dynamic=False)(x)
    torch.testing.assert_close(total, torch.ones(32), rtol=0, atol=2e-6)


def test_what_follows_the_sums_is_not_stored_across_the_memory():
    x = torch.randn(256, 256).t()
    same(lambda x: x.log_softmax(1), x)
    with torch.no_grad():
        code = str(dynamotor.lower(lambda x: x.log_softmax(1), x).code)
    assert "stg<" not in code[code.index('extern "C" void ') :] and "transpose_(" in code
