"""Positions of extremes: accumulators of lanes are joined in vectors, and hold the extreme itself."""

import pytest
import torch

import dynamotor
from dynamotor.codegen import cpp

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.uint8]
SHAPES = [(5, 3), (64, 64), (7, 203), (3, 5000)]
PROGRAMS = {
    "rows": lambda x: (x.max(1), x.min(1)),
    "columns": lambda x: (x.max(0), x.min(0)),
    "whole": lambda x: (x.argmax(), x.t().argmin()),
    "turned": lambda x: (x.flip(1).max(1), x.flip(1).argmin(1)),
    "part": lambda x: x[:, 1:].max(1),
    "beside": lambda x: (x.max(1), x.amax(1), x.amin(1), x.argmin(1), x.argmax(1)),
}


def tables(shape, dtype):
    """Ties, numbers at the start of each accumulator or beyond it, and NaN."""
    yield torch.randint(0, 4, shape).to(dtype)
    if not dtype.is_floating_point:
        yield torch.full(shape, torch.iinfo(dtype).min, dtype=dtype)
        yield torch.full(shape, torch.iinfo(dtype).max, dtype=dtype)
        return
    sparse = torch.randn(shape).to(dtype)
    sparse[torch.rand(shape) < 0.05] = float("nan")
    yield sparse
    for number in ("nan", "inf", "-inf"):
        yield torch.full(shape, float(number), dtype=dtype)
    late = torch.full(shape, -float("inf"), dtype=dtype)
    late[1:, 1:] = float("inf")
    yield late


def laid_out(x, layout):
    if layout == "transposed":
        return x.t().contiguous().t()
    return torch.stack([x, x.flip(0)], -1).flatten(1)[:, ::2] if layout == "strided" else x


@pytest.mark.parametrize("layout", ["dense", "transposed", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_of_equal_extremes_counts_and_nan_is_beyond_all(name, dtype, layout):
    torch.manual_seed(0)
    function = PROGRAMS[name]
    compiled = dynamotor.compile(function, dynamic=False)
    for shape in SHAPES:
        for table in tables(shape, dtype):
            x = laid_out(table, layout)
            torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0, equal_nan=True)


def test_the_extreme_beside_its_position_is_not_computed_twice():
    cpp._memo.clear()
    dynamotor.compile(lambda x: x.max(1), dynamic=False)(torch.rand(64, 64))
    (kernel,) = (function.source for function in cpp._memo.values())
    assert "more_next_(" in kernel and "more_across_(" in kernel and "hmax(" not in kernel
