"""A product is rounded before it is added, wherever it stands: a value that kernels calculate twice is the same twice.

Compilers of C++ and of PTX round `a * b + c` once where nothing else reads the product, unless they are told not to.
"""

from __future__ import annotations

import pytest
import torch

import dynamotor
from dynamotor import config
from dynamotor.codegen.cpp_kernel import ISAS

SUMS = {
    "a sum": lambda x, y, z: (x * y, x * y + z),
    "a difference": lambda x, y, z: (x * y, z - x * y),
    "of two products": lambda x, y, z: (x * y, x * y + z * x),
    "of an opposite": lambda x, y, z: (x * y, z + -(x * y)),
    "doubles": lambda x, y, z: (x.double() * y, x.double() * y + z),
    "in a function": lambda x, y, z: (x * y, (x * y).abs().log1p() + z),
}
FOUND = {
    "equal": lambda s: s == s.amax(-1, keepdim=True),
    "a difference": lambda s: s - s.amax(-1, keepdim=True) == 0,
    "of columns": lambda s: s == s.amax(0, keepdim=True),
}


@pytest.mark.parametrize("isa", [name for name in ("", "avx512", "avx2") if not name or ISAS[name].is_here])
@pytest.mark.parametrize("found", FOUND)
@pytest.mark.parametrize("name", SUMS)
def test_a_maximum_is_among_the_numbers_it_was_taken_from(name, found, isa):
    def fn(x, y, z):
        product, total = SUMS[name](x, y, z)
        return product, FOUND[found](total).sum(0 if found == "of columns" else -1)

    torch.manual_seed(0)
    inputs = [torch.randn(40, 33), torch.randn(40, 33), torch.randn(33)]
    with config.patch(isa=isa):
        product, count = dynamotor.compile(fn)(*inputs)
    assert torch.equal(product, fn(*inputs)[0]) and bool((count == 1).all())


@pytest.mark.parametrize("size", [3, 40, 300])
def test_the_gradient_of_a_maximum_finds_it(size):
    """It was 0 / 0: the backward looked for the maximum among sums that it had rounded otherwise."""

    def fn(x, y, z):
        product = x * y
        return (product + z).amax(-1, keepdim=True), product

    torch.manual_seed(0)
    x, y, z = torch.randn(20, size), torch.randn(20, size, requires_grad=True), torch.randn(size)
    (want,) = torch.autograd.grad(fn(x, y, z)[0].sum(), y)
    (got,) = torch.autograd.grad(dynamotor.compile(fn)(x, y, z)[0].sum(), y)
    assert torch.equal(got, want)


def test_sums_have_eagers_bits():
    def fn(x, y, z):
        return x * y + z, x * 0.3 - y, x * y - z * x

    torch.manual_seed(0)
    inputs = [torch.randn(7, 33) for _ in range(3)]
    for got, want in zip(dynamotor.compile(fn)(*inputs), fn(*inputs), strict=True):
        assert torch.equal(got, want)


FUSED = {
    "alpha": lambda x, y, z: (
        torch.add(x, y, alpha=0.3),
        torch.sub(x, y, alpha=0.3),
        torch.rsub(x, y, alpha=2),
    ),
    "an addend of minus one": lambda x, y, z: torch.sub(x, y, alpha=-1),
    "lerp": lambda x, y, z: (torch.lerp(x, y, 0.3), torch.lerp(x, y, 0.7), torch.lerp(x, y, 3.3)),
    "addcmul": lambda x, y, z: (torch.addcmul(x, y, z), torch.addcmul(x, y, z, value=0.3)),
    "beside the product": lambda x, y, z: (y * z, torch.addcmul(x, y, z), x + y * z),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", FUSED)
def test_ops_that_are_one_multiply_add_have_eagers_bits(name, dtype):
    """Rows are whole vectors: eager rounds the last elements of other rows of halves twice."""
    if dtype is torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("eager without vectors rounds products of halves twice")
    torch.manual_seed(0)
    inputs = [torch.randn(8, 64).to(dtype) for _ in range(3)]
    want, got = FUSED[name](*inputs), dynamotor.compile(FUSED[name])(*inputs)
    for one, other in zip(*((r if isinstance(r, tuple) else (r,)) for r in (want, got)), strict=True):
        assert torch.equal(one, other)
