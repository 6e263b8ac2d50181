"""Products, convolutions, normalisation, pooling, softmax, losses, interpolation, attention: values and
gradients beside aten's.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("jax", reason="jax is not installed")

from lowering_harness import check, company, gather  # noqa: E402

from dynamotor.xla import (  # noqa: E402, F401
    ops_conv,
    ops_decomposed,
    ops_linalg,
    ops_loss,
    ops_reduce,
    ops_upsample,
)

aten = torch.ops.aten
DOUBLE = torch.float64


def rand(*shape, dtype=DOUBLE):
    return torch.randn(shape, dtype=dtype, requires_grad=dtype.is_floating_point)


def forward_and_backward(fn, look=check):
    """Run with gradients for all floating outputs; every op that has a rule is compared (`look=gather`:
    later).
    """

    def run():
        outputs = [
            t
            for t in torch.utils._pytree.tree_leaves(fn())
            if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        torch.autograd.backward(outputs, [torch.randn_like(t) for t in outputs])

    return look(run)


def lowered(mode, *names):
    assert {f"aten.{name}" for name in names} <= mode.right, (mode.right, mode.refused, mode.missing)


# -- products ------------------------------------------------------------------------------------------------

PRODUCTS = {
    "mm": lambda r: torch.mm(r(3, 4), r(4, 5)),
    "bmm": lambda r: torch.bmm(r(2, 3, 4), r(2, 4, 5)),
    "mv": lambda r: torch.mv(r(3, 4), r(4)),
    "dot": lambda r: torch.dot(r(7), r(7)),
    "addmm": lambda r: torch.addmm(r(5), r(3, 4), r(4, 5), beta=2, alpha=3),
    "addmv": lambda r: torch.addmv(r(3), r(3, 4), r(4)),
    "baddbmm": lambda r: torch.baddbmm(r(2, 3, 5), r(2, 3, 4), r(2, 4, 5), alpha=2),
    "addbmm": lambda r: torch.addbmm(r(3, 5), r(2, 3, 4), r(2, 4, 5)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(request, name):
    mode = company(request, lambda name: forward_and_backward(lambda: PRODUCTS[name](rand), gather))
    lowered(mode, f"{name}.default")


@pytest.mark.parametrize("name", PRODUCTS)
def test_integer_products_wrap(request, name):
    def integers(*shape):
        return torch.randint(-(2**31), 2**31, shape).to(torch.int32)

    company(request, lambda name: gather(PRODUCTS[name], integers))


def test_low_precision_products_round_once():
    x, y = torch.randn(64, 300).bfloat16(), torch.randn(300, 64).bfloat16()
    check(lambda: x @ y)


def test_beta_zero_does_not_read_the_base():
    base = torch.full((3, 5), float("nan"))
    check(lambda: torch.addmm(base, torch.randn(3, 4), torch.randn(4, 5), beta=0))


def test_empty_products_are_zero():
    check(
        lambda: (
            torch.mm(torch.randn(3, 0), torch.randn(0, 2)),
            torch.bmm(torch.randn(0, 2, 3), torch.randn(0, 3, 2)),
        )
    )


# -- convolutions --------------------------------------------------------------------------------------------

CONVOLUTIONS = [
    # channels in, out, spatial, kernel, options
    (3, 4, (9,), (3,), {"stride": 2, "padding": 1}),
    (4, 6, (8, 7), (3, 3), {"padding": 1}),
    (32, 20, (4, 4), (3, 3), {"padding": 1}),  # by offset
    (32, 20, (12, 11), (3, 3), {"stride": 2, "padding": 1}),
    (4, 8, (9, 9), (3, 2), {"stride": (2, 3), "dilation": (2, 1)}),
    (6, 6, (7, 7), (3, 3), {"groups": 6, "padding": 1}),
    (6, 12, (7, 7), (3, 3), {"groups": 6, "stride": 2}),
    (6, 4, (7, 7), (3, 3), {"groups": 2}),
    (3, 5, (6, 6), (1, 1), {"stride": 2}),
    (2, 3, (5, 6, 7), (2, 3, 2), {"padding": 1}),
]


@pytest.mark.parametrize("row", CONVOLUTIONS, ids=str)
def test_convolutions(request, row):
    def collect(row):
        inputs, outputs, spatial, kernel, options = row
        weight, x = rand(outputs, inputs // options.get("groups", 1), *kernel), rand(2, inputs, *spatial)
        function = (F.conv1d, F.conv2d, F.conv3d)[len(spatial) - 1]
        return forward_and_backward(lambda: function(x, weight, rand(outputs), **options), gather)

    lowered(company(request, collect), "convolution.default", "convolution_backward.default")


TRANSPOSED = [
    (4, 6, (8,), (3,), {"stride": 2, "output_padding": 1}),
    (4, 6, (5, 6), (3, 3), {"stride": 2, "padding": 1, "output_padding": (1, 0)}),
    (4, 6, (5, 6), (3, 2), {"dilation": 3, "output_padding": 2}),
    (4, 6, (5, 5), (3, 3), {"groups": 2, "stride": 3}),
    (32, 20, (3, 3), (2, 2), {"stride": 2}),
    (2, 3, (4, 3, 3), (2, 2, 2), {"stride": 2}),
]


@pytest.mark.parametrize("row", TRANSPOSED, ids=str)
def test_transposed_convolutions(request, row):
    def collect(row):
        inputs, outputs, spatial, kernel, options = row
        weight, x = rand(inputs, outputs // options.get("groups", 1), *kernel), rand(2, inputs, *spatial)
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(spatial) - 1]
        return forward_and_backward(lambda: function(x, weight, rand(outputs), **options), gather)

    lowered(company(request, collect), "convolution.default", "convolution_backward.default")


def test_both_ways_to_convolve_agree():
    x, weight = torch.randn(2, 24, 6, 5, dtype=DOUBLE), torch.randn(8, 24, 3, 3, dtype=DOUBLE)
    window = ops_conv.Window((2, 1), (1, 1), (1, 2), 1)
    one, other = (ops_conv._forward(x.numpy(), weight.numpy(), window, way) for way in (True, False))
    torch.testing.assert_close(
        torch.from_numpy(one.__array__().copy()), torch.from_numpy(other.__array__().copy())
    )


def test_an_empty_batch_convolves():
    check(lambda: F.conv2d(torch.randn(0, 3, 5, 5), torch.randn(2, 3, 3, 3)))


# -- normalisation and softmax -------------------------------------------------------------------------------

NORMS = {
    "layer": lambda d: F.layer_norm(rand(4, 5, 6, dtype=d), (5, 6), rand(5, 6, dtype=d), rand(5, 6, dtype=d)),
    "layer without weights": lambda d: F.layer_norm(rand(4, 6, dtype=d), (6,)),
    "group": lambda d: F.group_norm(rand(2, 6, 5, dtype=d), 3, rand(6, dtype=d), rand(6, dtype=d)),
    "instance": lambda d: F.instance_norm(
        rand(2, 3, 5, 4, dtype=d), weight=rand(3, dtype=d), bias=rand(3, dtype=d)
    ),
    "rms": lambda d: F.rms_norm(rand(4, 6, dtype=d), (6,), rand(6, dtype=d)),
    "local response": lambda d: F.local_response_norm(rand(2, 7, 4, 4, dtype=d), 3),
    "softmax": lambda d: F.softmax(rand(3, 4, 5, dtype=d), 1),
    "log_softmax": lambda d: F.log_softmax(rand(3, 5, dtype=d), -1),
    "softmax of 0-d": lambda d: F.softmax(rand(dtype=d), 0),
}


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
@pytest.mark.parametrize("name", NORMS)
def test_norms(request, name, dtype):
    company(request, lambda name, dtype: forward_and_backward(lambda: NORMS[name](dtype), gather))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5, 5)])
def test_batch_norm(training, shape):
    mean, variance = torch.randn(3, dtype=DOUBLE), torch.rand(3, dtype=DOUBLE)
    run = aten._native_batch_norm_legit_functional
    weight, bias, x = (
        torch.randn(3, dtype=DOUBLE),
        torch.randn(3, dtype=DOUBLE),
        torch.randn(shape, dtype=DOUBLE),
    )
    lowered(
        check(lambda: run(x, weight, bias, mean, variance, training, 0.1, 1e-5)),
        "_native_batch_norm_legit_functional.default",
    )
    _, save_mean, save_rstd = run(x, weight, bias, mean, variance, training, 0.1, 1e-5)[:3]
    backward = aten.native_batch_norm_backward
    check(
        lambda: backward(
            torch.randn_like(x), x, weight, mean, variance, save_mean, save_rstd, training, 1e-5, [True] * 3
        )
    )


def test_softmax_of_rows_that_are_hidden():
    x = torch.tensor([[1.0, -float("inf")], [-float("inf"), -float("inf")]])
    check(lambda: (torch.softmax(x, -1), torch.log_softmax(x, -1), aten._safe_softmax(x, -1)))
    check(lambda: torch.softmax(torch.randn(3, 0), 1))


# -- pooling -------------------------------------------------------------------------------------------------

POOLS = {
    "max": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)[0],
    "max, dilated, rounded up": lambda x: F.max_pool2d(
        x, 2, 3, 1, dilation=2, ceil_mode=True, return_indices=True
    )[0],
    "max 1d": lambda x: F.max_pool1d(x[0], 3, 2),
    "max 3d": lambda x: F.max_pool3d(x, 2, 1, return_indices=True)[0],
    "average": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "average, rounded up": lambda x: F.avg_pool2d(x, (3, 2), 2, 1, ceil_mode=True, count_include_pad=False),
    "average, own divisor": lambda x: F.avg_pool2d(x, 3, divisor_override=5),
    "average 1d": lambda x: F.avg_pool1d(x[0], 3),
    "average 3d": lambda x: F.avg_pool3d(x, 2),
    "adaptive average": lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
    "global average": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive average 3d": lambda x: F.adaptive_avg_pool3d(x, (2, 3, 4)),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (3, 5)),
    "lp": lambda x: F.lp_pool2d(x, 2, 3),
    "unpool": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, 2, return_indices=True), 2),
}


@pytest.mark.parametrize("name", POOLS)
def test_pools(request, name):
    mode = company(request, lambda name: forward_and_backward(lambda: POOLS[name](rand(2, 3, 7, 8)), gather))
    assert not {m for m in mode.missing if "pool" in m}


def test_max_pool_of_equals_nan_and_infinities():
    x = torch.tensor([float("nan"), 1, 1, -float("inf")])[torch.randint(0, 4, (2, 3, 9, 9))]
    check(lambda: F.max_pool2d(x, 3, 2, 1, return_indices=True))
    check(lambda: F.adaptive_max_pool2d(x, 4, return_indices=True))
    check(lambda: F.max_pool2d(torch.full((1, 1, 4, 4), -float("inf")), 3, 2, 1, return_indices=True))


def test_integer_pools():
    x = torch.randint(-50, 50, (2, 3, 8, 8))
    check(lambda: (F.avg_pool2d(x, 3, 2, 1), F.max_pool2d(x, 2, return_indices=True)))


# -- losses --------------------------------------------------------------------------------------------------

LOSSES = {
    "mse": lambda r: F.mse_loss(rand(4, 5), rand(4, 5), reduction=r),
    "cross entropy": lambda r: F.cross_entropy(
        rand(6, 5), torch.tensor([0, 4, -100, 2, 2, 1]), torch.rand(5, dtype=DOUBLE), reduction=r
    ),
    "cross entropy of one": lambda r: F.cross_entropy(rand(5), torch.tensor(3), reduction=r),
    "cross entropy 2d": lambda r: F.cross_entropy(
        rand(2, 4, 3, 3), torch.randint(0, 4, (2, 3, 3)), ignore_index=1, reduction=r
    ),
    "kl": lambda r: F.kl_div(rand(4, 5).log_softmax(-1), torch.rand(4, 5, dtype=DOUBLE), reduction=r),
    "multilabel margin": lambda r: F.multilabel_margin_loss(
        rand(3, 4), torch.tensor([[3, 0, -1, 1], [1, 2, 3, 0], [-1, 0, 1, 2]]), reduction=r
    ),
}


@pytest.mark.parametrize("name, reduction", itertools.product(LOSSES, ["none", "mean", "sum"]))
def test_losses(request, name, reduction):
    mode = company(
        request, lambda name, reduction: forward_and_backward(lambda: LOSSES[name](reduction), gather)
    )
    assert not {m for m in mode.missing if "loss" in m or "entropy" in m}


# -- interpolation and grids ---------------------------------------------------------------------------------

SIZES = [{"size": (5, 11)}, {"scale_factor": 2}, {"scale_factor": (0.6, 1.7)}, {"size": (3, 2)}]
MODES = [
    ("nearest", {}),
    ("nearest-exact", {}),
    ("bilinear", {}),
    ("bilinear", {"align_corners": True}),
    ("bicubic", {}),
    ("bicubic", {"align_corners": True}),
    ("bilinear", {"antialias": True}),
    ("bicubic", {"antialias": True}),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_interpolation(request, size, mode):
    def collect(size, mode):
        x = rand(2, 3, 6, 7)
        return forward_and_backward(lambda: F.interpolate(x, mode=mode[0], **mode[1], **size), gather)

    found = company(request, collect)
    assert not {m for m in found.missing if "upsample" in m}


def test_interpolation_in_one_and_three_dimensions():
    forward_and_backward(lambda: F.interpolate(rand(2, 3, 6), size=9, mode="linear"))
    forward_and_backward(lambda: F.interpolate(rand(1, 2, 3, 4, 5), size=(5, 3, 8), mode="trilinear"))
    forward_and_backward(lambda: F.interpolate(rand(1, 2, 3, 4, 5), scale_factor=1.4, mode="nearest"))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("align", [True, False])
@pytest.mark.slow
def test_grid_sample(request, mode, padding, align):
    def collect(mode, padding, align):
        grid = (torch.rand(2, 4, 5, 2, dtype=DOUBLE) * 3 - 1.5).requires_grad_()
        x = rand(2, 3, 6, 7)
        return forward_and_backward(lambda: F.grid_sample(x, grid, mode, padding, align), gather)

    found = company(request, collect)
    assert not {m for m in found.missing if "grid" in m}


# -- attention, distances, Fourier ---------------------------------------------------------------------------

ATTENTION = [
    {},
    {"is_causal": True},
    {"scale": 0.3},
    {"attn_mask": torch.randn(5, 6)},
    {"attn_mask": torch.rand(2, 1, 5, 6) > 0.7},
]


@pytest.mark.parametrize("options", ATTENTION, ids=lambda o: " ".join(o))
def test_attention(options):
    query, key, value = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 6, 6))
    mode = forward_and_backward(lambda: F.scaled_dot_product_attention(query, key, value, **options))
    lowered(
        mode,
        "_scaled_dot_product_flash_attention_for_cpu.default",
        "_scaled_dot_product_flash_attention_for_cpu_backward.default",
    )


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")])
def test_distances(request, p):
    def collect(p):
        x, y = rand(2, 4, 3), rand(2, 5, 3)
        return forward_and_backward(lambda: torch.cdist(x, y, p), gather)

    lowered(company(request, collect), "_cdist_forward.default", "_cdist_backward.default")


def test_distances_of_many_rows():
    check(lambda: torch.cdist(torch.randn(30, 4, dtype=DOUBLE), torch.randn(3, 4, dtype=DOUBLE)))


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_fourier_transforms(norm):
    x, z = torch.randn(3, 6, 5, dtype=DOUBLE), torch.randn(3, 6, 5, dtype=torch.complex128)
    mode = check(
        lambda: (
            torch.fft.rfft2(x, norm=norm),
            torch.fft.fft2(x, norm=norm),
            torch.fft.ifftn(z, norm=norm),
            torch.fft.irfft2(z, norm=norm),
            torch.fft.irfft(z, n=9, norm=norm),
            torch.fft.fft(z, dim=0, norm=norm),
        )
    )
    lowered(mode, "_fft_r2c.default", "_fft_c2c.default", "_fft_c2r.default")
