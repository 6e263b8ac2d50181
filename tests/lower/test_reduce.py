"""Reductions, softmax, normalisations and losses against eager, and how they fuse."""

import pytest
import torch
import torch.nn.functional as F
from harness import check

import dynamotor
from dynamotor.base.events import counters

aten = torch.ops.aten
DIMS = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)]


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_and_extremes_over_any_dimensions(dims, dtype):
    x = torch.randn(6, 33, 20, dtype=dtype)
    check(
        lambda x: (x.sum(dims), x.mean(dims, True), x.amax(dims), x.amin(dims, True), (x * x + 1).sum(dims)),
        x,
        tolerance=2e-5,
    )


@pytest.mark.parametrize("dims", DIMS)
def test_statistics(dims):
    x = torch.randn(5, 12, 18, dtype=torch.float64) + 3
    check(lambda x: (x.var(dims), x.std(dims, unbiased=False, keepdim=True), *torch.var_mean(x, dims)), x)


def test_transposed_and_strided_operands_reduce_right():
    x = torch.randn(30, 8, 21, dtype=torch.float64).permute(2, 0, 1)[1:20, ::3]
    check(lambda x: (x.sum(0), x.sum(1), x.sum((0, 2)), x.amax(2)), x)


def test_other_kinds_of_reductions():
    x = torch.randn(7, 50)
    i = torch.randint(-9, 9, (7, 50))
    check(
        lambda x, i: (
            x.argmax(1),
            x.argmin(0),
            x.max(1)[1],
            x.max(1)[0],
            i.sum(1),
            i.amax(0),
            (x > 2).any(1),
            (x > -9).all(),
            x.prod(0),
            i.argmax(),
            x.logsumexp(1),
        ),
        x,
        i,
        tolerance=2e-5,
    )


def test_positions_of_ties_and_nan_are_eagers():
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [float("nan"), 1.0, float("nan"), 0.0], [-float("inf")] * 4])
    check(lambda x: (x.argmax(1), x.argmin(1), x.amax(1), x.amin(1)), x)


def test_the_first_of_several_largest_is_found_whatever_the_loop_order():
    x = torch.tensor([[2.0, 1.0, 2.0], [2.0, 2.0, 0.0]]).t().contiguous().t()
    y = torch.randint(0, 3, (5, 6, 7)).float().permute(2, 0, 1)
    check(lambda x, y: (x.argmax(), x.argmin(), y.argmax(), y.argmax(0), y.argmin(2)), x, y)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_positions_in_a_whole_tensor_count_in_its_order_whatever_that_of_memory(order):
    """Of equal values the first one of the tensor, which memory may have behind another; NaN before all."""
    x = torch.randint(0, 5, (20, 33, 17)).float()
    odd = x.clone()
    odd[3, 30, 2] = odd[17, 1, 16] = torch.nan
    function = lambda x: (x.argmax(), x.argmin(), x.argmax(keepdim=True))  # noqa: E731
    for one in (x, odd, x.to(torch.uint8), x.double()):
        check(function, one.permute(order), kernels=1)
    (node,) = [
        n for n in dynamotor.lower(torch.argmax, x.permute(order)).loops.splitlines() if "argmax(" in n
    ]
    assert "//" not in node and "%" not in node  # goes along the memory


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
)
def test_positions_of_equal_values_and_nan_across_lanes(dtype):
    few = torch.randint(0, 3, (5, 100)).to(dtype)
    inputs = [few, torch.zeros(3, 70, dtype=dtype), torch.randint(0, 100, (2, 7)).to(dtype)]
    if dtype.is_floating_point:
        inputs += [few.masked_fill(few == 2, float("nan")), torch.full((2, 67), float("-inf"), dtype=dtype)]
    for x in inputs:
        check(lambda x: (*x.max(1), *x.min(1), x.argmax(), x.flip(1).argmin(1), x.t().argmax(1)), x)


def test_nan_and_infinity_in_sums_and_softmax():
    x = torch.randn(4, 40)
    x[0, 3], x[1, 4], x[2] = float("nan"), float("inf"), -float("inf")
    check(
        lambda x: (x.sum(1), torch.softmax(x, 1), torch.log_softmax(x, 1), x.logsumexp(1)), x, tolerance=1e-5
    )


@pytest.mark.parametrize("dims", [None, *DIMS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_sum_without_nan_skips_it_over_any_dimensions(dims, dtype):
    x = torch.randn(6, 33, 20)
    x[torch.rand(6, 33, 20) < 0.2] = float("nan")
    x[:, 7], x[0, 0, 0] = float("nan"), float("inf")
    check(
        lambda x: (x.nansum(dims), x.nansum(dims, True), (x.exp() / 8).nansum(dims), x.sum(dims)),
        x.to(dtype),
        # Eager stores halves between the sums over two dimensions.
        tolerance={torch.bfloat16: 0.1, torch.float16: 1e-2}.get(dtype, 2e-5),
    )


def test_a_sum_without_nan_of_any_type_and_size():
    x = torch.tensor([[1.0, float("nan"), 3.0], [float("nan")] * 3, [float("inf"), 1.0, -float("inf")]])
    check(lambda x: (x.nansum(1), x.nansum(dtype=torch.float64), x.nansum(0, dtype=torch.bfloat16)), x)
    for of in (torch.int64, torch.uint8, torch.bool):
        i = torch.randint(0, 300, (5, 40)).to(of)
        check(lambda i: (i.nansum(1), i.nansum(dtype=torch.float32), i.nansum(1, dtype=torch.bool)), i)
    check(lambda x: (x.nansum(1), x.nansum(), x.nansum(0)), torch.randn(3, 0))
    check(lambda x: x.nansum(), torch.tensor(float("nan")))
    if torch.__version__ >= "2.13":  # eager has no such kernel before
        check(
            lambda x: x.nansum(1, dtype=torch.int64), x.isfinite() * 2.0, fallbacks=("aten.nansum.default",)
        )


def test_a_sum_without_nan_is_one_kernel_and_its_gradient_skips_nan():
    x = torch.randn(8, 40)
    x[0, ::3] = float("nan")
    check(lambda x: (x * 2).nansum(1).exp(), x, kernels=1, tolerance=2e-5)
    x = x.double().requires_grad_()
    for fn in (lambda x: x.nansum(1), lambda x: x.nanmean(0)):
        counters["fallback"].clear()
        want = torch.autograd.grad(fn(x).square().sum(), x)
        got = torch.autograd.grad(dynamotor.compile(fn, fullgraph=True)(x).square().sum(), x)
        torch.testing.assert_close(got, want)
        assert not counters["fallback"]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_softmax_over_any_dimension(dim):
    x = torch.randn(5, 9, 33, dtype=torch.float64) * 4
    check(lambda x: (torch.softmax(x, dim), torch.log_softmax(x * 2, dim)), x)


def test_softmax_is_one_kernel_with_scale_and_mask():
    check(
        lambda s, m: torch.softmax(s * 0.125 + m, -1),
        torch.randn(3, 16, 64),
        torch.randn(64),
        kernels=1,
        tolerance=1e-5,
    )


def test_softmax_backward_is_one_kernel():
    y = torch.softmax(torch.randn(6, 40), -1)
    check(
        lambda g, y: aten._softmax_backward_data(g, y, -1, torch.float32) * 0.5,
        torch.randn(6, 40),
        y,
        kernels=1,
        tolerance=1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_layer_norm_with_residual_is_one_kernel(dtype):
    x, y = torch.randn(2, 9, 48, dtype=dtype), torch.randn(2, 9, 48, dtype=dtype)
    w, b = torch.randn(48, dtype=dtype), torch.randn(48, dtype=dtype)
    check(
        lambda x, y, w, b: F.layer_norm(x + y, (48,), w, b),
        x,
        y,
        w,
        b,
        kernels=1,
        tolerance={torch.bfloat16: 6e-2, torch.float32: 1e-5}.get(dtype),
    )


def test_layer_norm_backward_is_one_kernel_with_weight_and_bias_gradients():
    x, g, w = (torch.randn(*s, dtype=torch.float64) for s in ((40, 32), (40, 32), (32,)))
    out, mean, rstd = aten.native_layer_norm(x, [32], w, w, 1e-5)
    check(
        lambda g, x, m, r, w: aten.native_layer_norm_backward(g, x, [32], m, r, w, w, [True, True, True]),
        g,
        x,
        mean,
        rstd,
        w,
        kernels=1,
    )


def test_group_norm_forward_and_backward():
    x, g, w = (
        torch.randn(3, 12, 5, 7, dtype=torch.float64),
        torch.randn(3, 12, 5, 7, dtype=torch.float64),
        torch.randn(12, dtype=torch.float64),
    )
    check(lambda x, w: aten.native_group_norm(x, w, w, 3, 12, 35, 4, 1e-5), x, w)
    _, mean, rstd = aten.native_group_norm(x, w, w, 3, 12, 35, 4, 1e-5)
    check(
        lambda g, x, m, r, w: aten.native_group_norm_backward(
            g, x, m, r, w, 3, 12, 35, 4, [True, True, True]
        ),
        g,
        x,
        mean,
        rstd,
        w,
    )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm(layout):
    x, g = (torch.randn(4, 20, 6, 5, dtype=torch.float64).to(memory_format=layout) for _ in range(2))
    w, m, v = (
        torch.randn(20, dtype=torch.float64),
        torch.randn(20, dtype=torch.float64),
        torch.rand(20, dtype=torch.float64),
    )
    functional = aten._native_batch_norm_legit_functional
    check(lambda x, w, m, v: functional(x, w, w, m, v, True, 0.1, 1e-5), x, w, m, v)
    check(lambda x, w, m, v: F.relu(F.batch_norm(x, m, v, w, w, False, 0.1, 1e-5)), x, w, m, v)
    _, mean, rstd, _, _ = functional(x, w, w, m, v, True, 0.1, 1e-5)

    def backward(train):
        return lambda *args: aten.native_batch_norm_backward(*args, train, 1e-5, [True, True, True])

    for train in (True, False):
        check(backward(train), g, x, w, m, v, mean, rstd)


def test_evaluation_batch_norm_gives_empty_statistics():
    x, w = torch.randn(2, 4, 3, 3), torch.rand(4)
    check(
        lambda x, w: aten._native_batch_norm_legit_no_training(x, w, w, w, w, 0.1, 1e-5), x, w, tolerance=1e-5
    )


def test_bias_gradient_fuses_with_the_elementwise_backward():
    g, x = torch.randn(64, 96, dtype=torch.float64), torch.randn(64, 96, dtype=torch.float64)

    def fn(g, x):
        d = aten.gelu_backward(g, x)
        return d, d.sum(0)

    check(fn, g, x, kernels=1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_forward_and_backward(reduction):
    x, t = torch.randn(12, 30, dtype=torch.float64), torch.randint(0, 30, (12,))
    t[3] = -100
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    check(lambda x, t: F.cross_entropy(x, t, reduction=reduction), x, t)
    g = torch.randn(() if number else (12,), dtype=torch.float64)
    log = torch.log_softmax(x, 1)
    weight = aten.nll_loss_forward(log, t, None, number, -100)[1]
    check(lambda g, y, t, w: aten.nll_loss_backward(g, y, t, None, number, -100, w), g, log, t, weight)


def test_large_sums_stay_accurate_and_are_split_over_rows():
    x = torch.rand(50000, 16)
    (text,) = check(lambda x: x.sum(0), x, kernels=1, tolerance=2e-6)
    assert text.startswith("cols")
    check(lambda x: x.sum(), x, kernels=1, tolerance=2e-6)


def test_equal_reductions_are_computed_once():
    x = torch.randn(8, 64)
    (text,) = check(
        lambda x: (x - x.mean(-1, True)) * x.var(-1, unbiased=False, keepdim=True),
        x,
        kernels=1,
        tolerance=1e-5,
    )
    assert text.count(" += ") + text.count("= max") + text.count("= min") == 3  # sum, squares and their rest


def test_safe_softmax_gives_zeros_for_a_masked_row():
    x = torch.randn(6, 40)
    x[1] = float("-inf")
    x[2, :20] = float("-inf")
    x[3, 5] = float("nan")
    x[4, 5] = float("inf")
    check(lambda x: aten._safe_softmax(x * 0.5, -1), x, kernels=1)
    check(lambda x: aten._safe_softmax(x, 0), torch.randn(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_that_a_kernel_does_not_store_is_rounded_before_it_is_compared(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float32).to(dtype)
    check(lambda x: (x.erf() == x.erf().amin(-1, True), x.exp().floor()), x)

    def fn(x):
        return x.erf().amin(-1).sum() + x.exp().max()

    x.requires_grad_()
    got, want = (torch.autograd.grad(f(x), x)[0] for f in (dynamotor.compile(fn), fn))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str
)
def test_what_is_not_zero_is_counted(dtype):
    x = (torch.randn(5, 3, 129) * 1.5).to(dtype)
    if dtype.is_floating_point:
        x.view(-1)[::5], x.view(-1)[1::3], x.view(-1)[2::9] = torch.nan, -0.0, torch.finfo(dtype).tiny
    for dim in (None, 0, -1, [0, 2]):
        fn = torch.count_nonzero if dim is None else lambda x, dim=dim: torch.count_nonzero(x, dim)
        check(fn, x, kernels=1, tolerance=0)
    check(torch.count_nonzero, x[:0], tolerance=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_norm_is_the_root_of_a_sum_of_squares(dtype):
    x = torch.randn(9, 3, 33).to(dtype)
    for dim in (None, 0, -1, (0, 2)):
        check(lambda x, dim=dim: torch.linalg.vector_norm(x, dim=dim), x, kernels=1)
    check(lambda x: F.normalize(x.float(), dim=2) + 1, x, kernels=1)
    of_one = x[:, :1] * 1e30
    check(
        lambda x: torch.linalg.vector_norm(x, dim=1), of_one, fallbacks=("aten.linalg_vector_norm.default",)
    )
    for values in ([torch.nan, 1.0], [torch.inf, 1.0], [0.0, -0.0]):
        check(torch.linalg.vector_norm, torch.tensor(values, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_an_extreme_of_equal_elements_is_one_of_them(dtype):
    x = torch.tensor([[float("nan"), -0.0, 1.5, -float("inf"), 0.0]]).to(dtype).expand(6, 5)
    check(
        lambda x: (x.all(0), x.any(0), x.amax(0, True), x.amin(0) + 1),
        x[:, 1:] if dtype.is_floating_point else x,
    )
    check(lambda x: (x.amax(0), x.amin((0, 1)), x.any(1), x.amax(0).sum()), x, tolerance=0)


@pytest.mark.parametrize("shape", [(5, 7), (300, 17), (0, 4), (3, 0)])
def test_quantifiers_of_bytes_are_bytes(shape):
    x = torch.randint(0, 3, shape, dtype=torch.uint8)
    check(lambda x: (x.all(0), x.any(1), x.any((0, 1), keepdim=True), x.all(1) + 1), x, tolerance=0)
    check(lambda x: (x.all(), x.t().any()), x, tolerance=0)


@pytest.mark.parametrize("share", [0, 0.02, 0.98, 1])
@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2]])
def test_any_and_all_of_bytes_are_their_greatest_and_least(share, layout):
    x = layout((torch.rand(70, 66) < share).to(torch.uint8) * torch.randint(1, 256, (70, 66)).to(torch.uint8))
    check(lambda x: (x.all(1), x.any(0), x.all(), x.any()), x, tolerance=0)
    check(lambda x: ((x + 1).all(0, keepdim=True), (x * x).any(1)), x, tolerance=0)


def test_all_of_no_bytes_holds():
    check(lambda x: (x.all(), x.any(), x.all(0), x.any(1)), torch.zeros(0, 3, dtype=torch.uint8), tolerance=0)
