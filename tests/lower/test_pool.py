"""Pooling and its gradients as loops: windows, padding, ceil mode, dilation, NaN, channels-last, half
precisions.
"""

import pytest
import torch
import torch.nn.functional as F
from every_backend import BACKENDS, same
from harness import check

from dynamotor.base.config import config

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _on_both_targets():
    with config.patch(aten_windows=False):
        yield


def image(dtype=torch.float32, shape=(2, 3, 11, 14)):
    return torch.randn(shape).to(dtype)


MAX = [
    (3, 2, 1, 1, False),
    (2, 2, 0, 1, True),
    ((3, 2), (2, 1), (1, 0), (2, 3), False),
    (3, 1, 1, 1, False),
    (2, 3, 0, 1, False),
]


@pytest.mark.parametrize("window", MAX)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_maxima_with_their_positions_and_gradient(window, layout):
    x = image().to(memory_format=layout)
    y, i = aten.max_pool2d_with_indices(x, *window)
    check(lambda x: aten.max_pool2d_with_indices(x, *window), x, fallbacks=(), tolerance=0)
    g = torch.randn_like(y)
    check(
        lambda g, x, i: aten.max_pool2d_with_indices_backward(g, x, *window, i),
        g,
        x,
        i,
        fallbacks=(),
        tolerance=1e-6,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_maxima_of_other_dtypes(dtype):
    x = image(dtype)
    y, i = aten.max_pool2d_with_indices(x, 3, 2, 1)
    check(lambda x: aten.max_pool2d_with_indices(x, 3, 2, 1), x, fallbacks=(), tolerance=0)
    check(
        lambda g, x, i: aten.max_pool2d_with_indices_backward(g, x, 3, 2, 1, 1, False, i),
        y,
        x,
        i,
        fallbacks=(),
    )


def test_ties_infinities_and_nan_are_eagers():
    x = torch.randint(0, 3, (2, 2, 8, 8)).float()
    x[0, 0, 2, 3] = x[0, 0, 2, 4] = x[1, 0, 0, 0] = float("nan")
    x[0, 1] = -float("inf")
    x[1, 1, 3] = float("inf")
    check(lambda x: aten.max_pool2d_with_indices(x, 3, 2, 1), x, fallbacks=(), tolerance=0)
    check(lambda x: F.max_pool2d(x.relu() + 1, 2) * 2, x[1:], fallbacks=())
    check(lambda x: F.max_pool2d(x[0], 2), x, fallbacks=())


AVERAGES = [
    (3, 2, 1, False, True, None),
    (3, 2, 1, True, False, None),
    (2, 2, 0, True, True, None),
    ((2, 3), 1, (1, 0), False, False, 5),
    (2, 3, 0, False, True, None),
    (3, 2, 1, True, True, None),
]


@pytest.mark.parametrize("window", AVERAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_and_their_gradient(window, dtype):
    x = image(dtype)
    y = aten.avg_pool2d(x, *window)
    check(lambda x: aten.avg_pool2d(x, *window), x, fallbacks=())
    check(lambda x: aten.avg_pool2d(x, *window), x.to(memory_format=torch.channels_last), fallbacks=())
    g = torch.randn_like(y)
    check(lambda g, x: aten.avg_pool2d_backward(g, x, *window), g, x, fallbacks=())


@pytest.mark.parametrize("out", [(1, 1), (2, 7), (4, 14)])
def test_averages_over_whole_windows(out):
    x = image(shape=(2, 3, 8, 14))
    check(lambda x: aten._adaptive_avg_pool2d(x, out), x, fallbacks=(), tolerance=1e-5)
    g = torch.randn(2, 3, *out)
    check(lambda g, x: aten._adaptive_avg_pool2d_backward(g, x), g, x, fallbacks=(), tolerance=1e-6)


def test_what_is_left_to_aten(monkeypatch):
    x = image()
    check(lambda x: aten._adaptive_avg_pool2d(x, (4, 5)), x, fallbacks=["aten._adaptive_avg_pool2d.default"])
    check(lambda x: aten.avg_pool2d(x, 7), x, fallbacks=["aten.avg_pool2d.default"])


@pytest.mark.regression
@pytest.mark.parametrize("backend", BACKENDS)
def test_adaptive_pooling_of_channels_last_inputs(backend):
    """convnext: PyTorch restrides the mean in place."""
    x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
    same(lambda t: F.adaptive_avg_pool2d(t, 1) * 2, x, backend=backend)
