"""Parts of graphs with numbers that data decides: eager's kernels are asked about them when a part is compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dynamotor

pytestmark = pytest.mark.regression
PROGRAMS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "masked_fill": lambda x, n: x.masked_fill(x == 0, n),
    "full": lambda x, n: torch.full((2,), n, dtype=x.dtype) + x,
    "clamp": lambda x, n: x.clamp(max=n),
    "alpha": lambda x, n: torch.add(x, x + 1, alpha=n),
    "tensor": lambda x, n: x + torch.tensor([n, 1], dtype=x.dtype),
    "sum": lambda x, n: x + n,
}


def outcome(run: Callable[..., torch.Tensor], x: torch.Tensor, n: torch.Tensor) -> object:
    try:
        return run(x, n).tolist()
    except RuntimeError as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_that_do_not_fit_the_dtype_raise(name: str) -> None:
    def program(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return PROGRAMS[name](x, int(n.item()))

    compiled, x = dynamotor.compile(program), torch.zeros(2, dtype=torch.int8)
    for n in (3, 300, 5, 1 << 20, 7):
        number = torch.tensor(n)
        assert outcome(compiled, x, number) == outcome(program, x, number)


@pytest.mark.parametrize("function", [F.softplus, F.hardshrink, F.leaky_relu])
def test_dtypes_without_a_kernel_raise(function: Callable[..., torch.Tensor]) -> None:
    compiled = dynamotor.compile(lambda x, n: function(x, n.item()))
    for n in (3, 5):
        with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
            compiled(torch.ones(3, dtype=torch.int64), torch.tensor(n))
