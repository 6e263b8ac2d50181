"""NumPy's numbers keep their types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dynamotor


@pytest.mark.regression
@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("number", [np.float64(1.5), np.float16(1.5), np.int8(3), np.complex64(1j)])
def test_tensors_of_numpys_numbers_keep_their_types(number: Any) -> None:
    def function(x: torch.Tensor) -> Any:
        return torch.tensor(number), torch.tensor([number, 1]), torch.as_tensor([[number]]), x * number

    for a, b in zip(function(torch.ones(2)), dynamotor.compile(function)(torch.ones(2))):
        torch.testing.assert_close(b, a, rtol=0, atol=0)


@pytest.mark.regression
@pytest.mark.parametrize("at", [0, slice(2)])
@pytest.mark.parametrize("number", [np.float32(2), np.float64(2), np.int64(2)])
def test_numbers_of_numpy_that_eager_refuses(number: Any, at: Any) -> None:
    """`x[i] = numpy.float32(2)` is a TypeError, of `split` too for other objects than Python integers."""

    def function(x: torch.Tensor) -> Any:
        seen = []
        for write in (lambda: x.__setitem__(at, number), lambda: seen.append(x.split(number))):
            try:
                write()
            except TypeError as error:
                seen.append(str(error))
        return x * 1, seen

    want, got = (run(torch.arange(4.0)) for run in (function, dynamotor.compile(function, backend="eager")))
    torch.testing.assert_close(got[0], want[0])
    assert str(got[1]) == str(want[1])
