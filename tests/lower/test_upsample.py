"""Nearest and bilinear upsampling, their sizes and layouts; nearest's gradient."""

import pytest
import torch
import torch.nn.functional as F
from harness import check

from dynamotor.base.config import config

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _on_both_targets():
    with config.patch(aten_windows=False):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("out", [(10, 12), (15, 6), (7, 9), (3, 2)])
def test_nearest(dtype, out):
    x = torch.randn(2, 3, 5, 6).to(dtype)
    check(lambda x: F.interpolate(x, size=out) * 2, x, fallbacks=())
    check(lambda x: F.interpolate(x + 1, size=out), x.to(memory_format=torch.channels_last), fallbacks=())


@pytest.mark.parametrize("factor", [2, 3, (1, 4)])
def test_nearest_by_a_factor_and_its_gradient(factor):
    x = torch.randn(2, 3, 5, 6)
    check(lambda x: F.interpolate(x, scale_factor=factor), x, fallbacks=())
    y = F.interpolate(x, scale_factor=factor)
    g = torch.randn_like(y)
    check(
        lambda g: aten.upsample_nearest2d_backward(g, y.shape[2:], x.shape), g, fallbacks=(), tolerance=1e-5
    )
    check(
        lambda g: aten.upsample_nearest2d_backward(g, y.shape[2:], x.shape) + 1,
        g.bfloat16(),
        fallbacks=(),
        tolerance=5e-2,
    )


def test_positions_that_eager_rounds_are_left_to_aten():
    x = torch.randn(1, 2, 5, 6)
    check(lambda x: F.interpolate(x, scale_factor=1.7), x, fallbacks=["aten.upsample_nearest2d.default"])


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(
    "size",
    [{"size": (10, 12)}, {"size": (7, 15)}, {"scale_factor": 2.0}, {"scale_factor": 1.7}, {"size": (3, 1)}],
)
def test_bilinear(aligned, size):
    x = torch.randn(2, 3, 5, 6)
    for y in (x, x.double(), x.to(memory_format=torch.channels_last)):
        check(
            lambda x: F.interpolate(x, mode="bilinear", align_corners=aligned, **size),
            y,
            fallbacks=(),
            tolerance=1e-5,
        )
    check(
        lambda x: F.interpolate(x, mode="bilinear", align_corners=aligned, **size),
        x.bfloat16(),
        fallbacks=(),
        tolerance=2e-2,
    )
