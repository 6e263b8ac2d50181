"""Programs of booleans and bytes whose C++ did not build: signs in a row, comparisons of `int` and `long`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dynamotor
from dynamotor import config
from dynamotor.base.errors import InternalError
from dynamotor.lower.ir import I32, I64, compare, const, select

pytestmark = pytest.mark.regression


@pytest.mark.parametrize("fn", [torch.exp2, torch.sin, torch.square, torch.reciprocal, torch.sigmoid])
@config.patch(strict=True)
def test_a_boolean_that_was_filled(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = dynamotor.compile(lambda x: fn(x.fill_(1)))(torch.zeros(19, dtype=torch.bool))
    torch.testing.assert_close(found, fn(torch.ones(19, dtype=torch.bool)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_classes_of_other_types(dtype: torch.dtype, capfd: pytest.CaptureFixture[str]) -> None:
    x, y = torch.randn(3, 4), torch.tensor([0, 3, 2], dtype=dtype)
    try:
        wanted = F.cross_entropy(x, y)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)):
            dynamotor.compile(F.cross_entropy)(x, y)
    else:
        torch.testing.assert_close(dynamotor.compile(F.cross_entropy)(x, y), wanted)
    assert "DM302" not in capfd.readouterr().err


def test_operands_of_two_types_are_refused_where_they_are_made() -> None:
    for make in (lambda a, b: compare("ne", a, b), lambda a, b: select(const(True, torch.bool), a, b)):
        with pytest.raises(InternalError, match="DM913"):
            make(const(1, I32), const(2, I64))


def test_large_doubles_become_bytes_by_64_bits() -> None:
    """As eager's: -2147483649. is 255 as a byte, and was 0."""
    x = torch.tensor([-2147483649.0, 4294967299.0, 300.0, -1.0, 1e12, 2.0**40 + 7])

    def bytes_of(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.byte(), (x + 1).to(torch.uint8), torch.ones(6, dtype=torch.uint8).copy_(x)]

    x = x.double() + torch.tensor([0.0, 3.0, 0.0, 0.0, 0.0, 7.0], dtype=torch.float64)
    for got, expected in zip(dynamotor.compile(bytes_of)(x), bytes_of(x), strict=True):
        assert torch.equal(got, expected)
