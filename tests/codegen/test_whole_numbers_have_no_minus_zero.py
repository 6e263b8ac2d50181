"""GCC took a number that was made whole and a float again for a truncation, which keeps the sign of zero."""

import pytest
import torch

import dynamotor
from dynamotor.codegen import cpp_kernel

pytestmark = pytest.mark.regression

X = torch.tensor([-0.3, 0.3, -1.5, -0.0, 2.5, -0.9] * 5)
PROGRAMS = {
    "copysign": lambda x, to: torch.copysign(x, x.to(to)),
    "there and back": lambda x, to: 1 / x.to(to).to(x.dtype),
    "signbit": lambda x, to: torch.signbit(x.to(to).double()),
    "product": lambda x, to: x.to(to) * -1.0,
}


def everything(x):
    return [f(x, to) for f in PROGRAMS.values() for to in (torch.int64, torch.int32, torch.int16)]


@pytest.mark.parametrize("isa", cpp_kernel.ISAS)
def test_zeros_are_eagers(isa):
    if not cpp_kernel.ISAS[isa].is_here:
        pytest.skip("not on this machine")
    for source in (torch.float32, torch.float64, torch.bfloat16):
        x = X.to(source)
        with dynamotor.config.patch(isa=isa):
            got = dynamotor.compile(everything)(x)
        want = everything(x)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b) and torch.equal(torch.signbit(a), torch.signbit(b))
