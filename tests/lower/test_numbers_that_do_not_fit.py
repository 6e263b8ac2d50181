"""Numbers beside tensors of narrow integers wrap as eager's do; those that eager refuses are refused."""

import operator

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression

COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
NUMBERS = (-(2**31) - 1, -129, -1, 44, 128, 256, 300, 65537, 2**31)
DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32)


def _is_taken(number, dtype):
    try:
        torch.zeros(1, dtype=dtype).clamp_max(number)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_comparisons_and_bounds_wrap(dtype):
    info = torch.iinfo(dtype)
    numbers = [number for number in NUMBERS if _is_taken(number, dtype)]

    def program(x):
        compared = [op(x, number) for op in COMPARISONS for number in NUMBERS]
        bounded = [f(number) for f in (x.clamp_min, x.clamp_max) for number in numbers]
        return compared, bounded, x.maximum(torch.tensor(-(2**31)))

    x = torch.tensor([info.min, info.max, 0, 1, 44, 127], dtype=dtype)
    torch.testing.assert_close(dynamotor.compile(program)(x), program(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.full((2,), 1e300),
        lambda x: torch.full((2,), 2**63),
        lambda x: torch.scalar_tensor(1e300),
        lambda x: torch.nn.functional.one_hot(x, 0),
    ],
)
def test_what_eager_refuses(make):
    x = torch.tensor([0])
    with pytest.raises(RuntimeError) as eager:
        make(x)
    with pytest.raises(RuntimeError) as compiled:
        dynamotor.compile(make)(x)
    assert str(compiled.value) == str(eager.value)


def _outcome(f, x, number):
    try:
        return f(x.clone(), number)
    except (RuntimeError, OverflowError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.sweep(9)
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int32, torch.float16, torch.float64, torch.bool], ids=str
)
@pytest.mark.parametrize(
    "program",
    [
        lambda x, n: torch.full_like(x, n),
        lambda x, n: torch.where(x > 1, x, n),
        lambda x, n: n - x,
        lambda x, n: x.add(x, alpha=n),
        lambda x, n: x + n * 2,
        lambda x, n: x + n * n * n,
        lambda x, n: x + 1 if n * n * n > 5 else x - 1,
    ],
)
@pytest.mark.runs_eager
def test_a_number_that_changes_may_stop_fitting(program, dtype):
    x = torch.tensor([0, 1, 2, 3], dtype=dtype)
    compiled = dynamotor.compile(program)
    for number in (2, 3, 4, 300, 2**31, 2**40, 2**62, 5):  # the second is a symbol
        expected, found = (_outcome(f, x, number) for f in (program, compiled))
        if isinstance(expected, str):
            assert found == expected
        else:
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float16, torch.float32], ids=str)
def test_a_tensor_that_fills_is_read_as_a_number(dtype):
    def program(x, value):
        return x.masked_fill(x > 1, value)

    x, compiled = torch.tensor([0, 1, 2, 3], dtype=dtype), dynamotor.compile(program)
    for number in (3.0, 1e300, 5.0) if dtype.is_floating_point else (3, 2**40, 5):
        value = torch.tensor(number, dtype=torch.float64 if dtype.is_floating_point else None)
        expected, found = (_outcome(f, x, value) for f in (program, compiled))
        assert torch.equal(expected, found) if type(expected) is torch.Tensor else expected == found


@pytest.mark.parametrize(
    "dtype, number", [(torch.int8, 256), (torch.int32, 1 << 32), (torch.float32, 1e-300)], ids=str
)
@pytest.mark.parametrize("name", ["logical_xor", "logical_or", "logical_and"])
def test_truth_is_asked_in_the_common_type(name, dtype, number):
    op = getattr(torch, name)

    def program(x, n):
        n = n + 0
        return op(x, n), op(n, x)

    wide = torch.float64 if dtype.is_floating_point else torch.int64
    x, n = torch.tensor([0, 1, 2], dtype=dtype), torch.tensor(number, dtype=wide)
    torch.testing.assert_close(dynamotor.compile(program)(x, n), program(x, n))
