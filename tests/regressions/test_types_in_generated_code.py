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
