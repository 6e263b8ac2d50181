"""Running sums, products, extremes with their positions, and ops fused around them."""

import pytest
import torch
from harness import check

import dynamotor
from dynamotor.base.config import config

RUNNING = {
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "logcumsumexp": torch.logcumsumexp,
    "cummax": lambda x, d: tuple(torch.cummax(x, d)),
    "cummin": lambda x, d: tuple(torch.cummin(x, d)),
}


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_running_results_along_each_dimension(name, dim):
    f, x = RUNNING[name], torch.randn(3, 5, 37)
    check(lambda x: f(x, dim), x, fallbacks=(), kernels=1, tolerance=1e-5)
    check(lambda x: f(x, dim), x.permute(2, 0, 1), fallbacks=(), tolerance=1e-5)
    check(lambda x: f(x, dim), x[:, ::2, 3:], fallbacks=(), tolerance=1e-5)


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
def test_running_results_of_other_dtypes(name, dtype):
    if name == "logcumsumexp" and not dtype.is_floating_point:
        return
    x = (
        torch.randn(4, 19).to(dtype)
        if dtype.is_floating_point
        else torch.randint(0, 2 if dtype is torch.bool else 9, (4, 19)).to(dtype)
    )
    f = RUNNING[name]
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 5e-3}.get(dtype, 0)
    check(lambda x: f(x, 1), x, fallbacks=None if dtype is torch.bool else (), tolerance=tolerance)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 0), (4, 1, 2)])
def test_running_results_of_odd_shapes(shape):
    x = torch.randn(shape)
    for f in RUNNING.values():
        for dim in range(max(len(shape), 1)):
            check(lambda x: f(x, dim), x, fallbacks=(), tolerance=1e-6)  # noqa: B023


@pytest.mark.parametrize("name", ["cummax", "cummin", "cumsum", "logcumsumexp"])
def test_ties_nan_and_infinities_are_eagers(name):
    x = torch.randint(0, 4, (6, 40)).float()
    x[1, 7] = x[1, 9] = float("nan")
    x[2] = -float("inf")
    x[3] = float("inf")
    x[4, 3], x[4, 20] = float("inf"), -float("inf")
    check(lambda x: RUNNING[name](x, 1), x, fallbacks=(), tolerance=1e-6)


def test_producers_and_consumers_share_the_kernel():
    x, y = torch.randn(6, 50), torch.randn(6, 50)
    check(lambda x, y: torch.cumsum(x * y, 1) * 2 + y, x, y, kernels=1, tolerance=1e-5)
    check(lambda x, y: torch.cumsum(x, 1) + torch.cumsum(y, 1), x, y, kernels=1, tolerance=1e-5)
    check(lambda x, y: torch.cumsum(torch.cumsum(x, 1), 1) + y, x, y, kernels=1, tolerance=1e-4)


def test_costly_maps_share_no_kernel_with_a_scan_that_has_no_vectors():
    x, apart = torch.randn(6, 50), 1 if config.target == "triton" else 2
    check(lambda x: (x.cumsum(1), x + 1), x, kernels=1, tolerance=1e-5)
    check(lambda x: (x.cumsum(1), x.sin()), x, kernels=apart, tolerance=1e-5)
    check(lambda x: (x.sin(), x.cumsum(1)), x, kernels=apart, tolerance=1e-5)
    check(lambda x: x.cumsum(1).exp(), x, kernels=apart, tolerance=1e-5)
    check(lambda x: x.exp().cumsum(0), x, kernels=apart, tolerance=1e-5)
    check(lambda x: (x.cummax(1)[0], torch.tanh(x), x.abs()), x, kernels=apart, tolerance=1e-5)
    check(lambda x: x.sigmoid().cumsum(1) * x, x.bfloat16(), kernels=apart)


def test_what_does_not_fit_has_a_kernel_of_its_own():
    x = torch.randn(6, 50)
    check(lambda x: torch.cumsum(torch.softmax(x, 1), 1), x, kernels=2, tolerance=1e-5)
    check(lambda x: torch.cumsum(x, 1).sum(1), x, kernels=2, tolerance=1e-4)
    check(lambda x: torch.cumsum(x, 1).flip(1) - x, x, tolerance=1e-5)
    check(lambda x: torch.cumsum(x.flip(1), 1).flip(1), x, tolerance=1e-5)
    check(lambda x: torch.cumsum(x, 0) + torch.cumsum(x, 1), x, kernels=2, tolerance=1e-5)
    check(lambda x: torch.cumsum(x.view(6, 5, 10), 2).view(6, 50) + x, x, tolerance=1e-5)
    check(lambda x: x.view(3, 2, 50).cumsum(0).view(6, 50).cumsum(1) + x, x, tolerance=1e-4)
    check(lambda x: (x * 2, torch.cumsum((x * 2).view(3, 2, 50), 1).sum()), x, tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_running_extremes_with_ties_and_nan_have_their_values_and_positions(dtype):
    x = torch.randint(0, 4, (9, 70)).to(dtype)
    if dtype.is_floating_point:
        x[2, 30] = x[2, 50] = x[5, 0] = torch.nan
        x[3, ::7], x[4] = -0.0, torch.inf
    for dim in (0, 1):
        check(lambda x, dim=dim: (*x.cummax(dim), *x.cummin(dim), x.cummax(dim)[0] + 1), x)


def test_a_running_maximum_of_floats_is_the_value_at_its_position():
    with config.patch(target="cpp"):
        code = str(dynamotor.lower(lambda x: x.cummax(1), torch.randn(9, 70)).code)
    assert "max_(" not in code[code.index('extern "C" void ') :]
