"""Loads of every second or further element in vectors, and stores of halves that need no rounding."""

import pytest
import torch

import dynamotor
from dynamotor.lower.ir import F32, Index, compare, const, fits, load, op, select

BF16 = torch.bfloat16


@pytest.mark.parametrize("step", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.int64, torch.uint8, torch.bool])
def test_steps_read_no_element_beyond_the_last(step, dtype):
    # The last row ends where the memory does: a vector of neighbours would be read from behind it.
    x = torch.randint(0, 2, (9, 39 * step)).to(dtype).flatten()[: 9 * 39 * step - step + 1]
    view = x.as_strided((9, 39), (39 * step, step))
    compiled = dynamotor.compile(lambda x: (x.clone(memory_format=torch.contiguous_format), x.sum(1)))
    for got, want in zip(compiled(view), (view.contiguous(), view.sum(1)), strict=True):
        torch.testing.assert_close(got, want)


def test_sums_go_along_the_shortest_step():
    lowered = dynamotor.lower(lambda x: x.sum(1), torch.randn(64, 128)[:, ::2])
    assert "ldg2<" in str(lowered.code)


def test_moved_and_chosen_halves_fit():
    x, y = (load(name, Index({}, 0), BF16) for name in "xy")
    moved = select(compare("lt", x, y), op("neg", x), op("max", y, const(0.5, F32)))
    assert fits(moved, BF16)
    assert not fits(op("add", x, y), BF16) and not fits(const(0.3, F32), BF16)
    assert not fits(x, torch.float16) and not fits(load("z", Index({}, 0), F32), BF16)


def test_bits_of_moved_halves_are_kept():
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("eager without vectors gives one NaN for all")
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    moved = dynamotor.compile(lambda x: (torch.cat([x, x]), -x, x.abs(), x.flip(0)))(bits)
    for got, want in zip(moved, (torch.cat([bits, bits]), -bits, bits.abs(), bits.flip(0)), strict=True):
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize(("group", "whole"), [(16, True), (64, True), (24, False), (8, False)])
@pytest.mark.parametrize("offset", [0, 3])
def test_a_number_of_a_group_is_loaded_once_for_a_vector_inside_of_it(group, whole, offset):
    """A vector that begins at a multiple of its lanes is in one group where the lanes divide the group."""
    columns = 6 * group - offset
    x, s = torch.randn(40, columns), torch.randn(40, 6, 1)

    def f(x, s):
        return (x * s.expand(40, 6, group).reshape(40, 6 * group)[:, offset:]).relu()

    text = str(dynamotor.lower(f, x, s).code)
    if whole and not offset:
        assert "else" not in text and "ldg" not in text
    torch.testing.assert_close(dynamotor.compile(f)(x, s), f(x, s), rtol=0, atol=0)
