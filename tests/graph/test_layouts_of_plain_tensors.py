"""PyTorch takes other kernels for plain tensors than for subclasses, which trials run on: results are laid out as
eager's all the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dynamotor
import fuzz.shapes
from fuzz.compare import differences, observe

pytestmark = pytest.mark.regression

aten = torch.ops.aten


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0)])
@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("pool", [torch.max_pool1d, torch.nn.functional.max_pool1d])
def test_pools_without_a_gradient_are_row_major(
    pool: Any, backend: str, wants: bool, order: tuple[int, ...]
) -> None:
    def inputs() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.randn(5, 6, 4).permute(order).detach().requires_grad_(wants)]

    def pooled(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (pool(x, 2),)

    compiled = dynamotor.compile(pooled, backend=backend)
    assert differences(observe(pooled, inputs(), (0,)), observe(compiled, inputs(), (0,))) == []
    with torch.no_grad():
        assert compiled(*inputs())[0].stride() == pooled(*inputs())[0].stride()


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_without_gradients_is_row_major(norm_first: bool) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first).eval()
    compiled = dynamotor.compile(layer)
    for size in (4, 5, 6):
        x = torch.randn(2, 8, size).mT
        with torch.no_grad():
            ours, eager = compiled(x), layer(x)
        torch.testing.assert_close(ours, eager)
        assert ours.stride() == eager.stride()


IMAGE, UNSQUEEZED = (48, 1, 12, 3), (3, 1, 12, 3)  # the second one is no channels-last to PyTorch


@pytest.mark.parametrize("stride", [IMAGE, UNSQUEEZED], ids=["image", "permuted and unsqueezed"])
def test_strides_of_one_image_say_in_which_format_what_follows_lies(stride: tuple[int, ...]) -> None:
    """A max_pool2d behind a group norm of one channels-last image was row-major."""

    def each(x: torch.Tensor) -> list[torch.Tensor]:
        found = [
            *(F.group_norm(x, 3), x.flip(1), x.sort(1)[0], F.relu6(x), x.nan_to_num(), torch.deg2rad(x)),
            *(torch.xlogy(x, 2.0), torch.poisson(x), torch.normal(x, 1.0), torch.isin(x, x[0, 0, 0]).float()),
        ]
        return [*found, *(F.max_pool2d(y, 2) for y in found)]

    x = torch.rand(1, 3, 4, 4).as_strided((1, 3, 4, 4), stride)
    with fuzz.shapes.Foretold() as seen:
        expected = each(x)
    assert not seen.wrong
    got = dynamotor.compile(each)(x)
    assert [y.stride() for y in got] == [y.stride() for y in expected]


@pytest.mark.parametrize("training", [False, True])
def test_batch_norms_that_write_statistics(training: bool) -> None:
    def legit(x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple:
        return aten._native_batch_norm_legit(x, w, w, mean, var, training, 0.1, 1e-5)

    def updated(x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple:
        return aten._batch_norm_with_update(x, w, w, mean, var, 0.1, 1e-5)

    def inputs() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.randn(5, 3, 4).permute(2, 1, 0), torch.randn(3), torch.randn(3), torch.rand(3)]

    for norm in (legit, updated):
        eager = observe(norm, inputs(), ())
        assert differences(eager, observe(dynamotor.compile(norm), inputs(), ())) == []


BESIDE_A_NUMBER = {
    "rounded quotients": lambda x: (x.div(0.3, rounding_mode="floor"), x.div(2, rounding_mode="trunc")),
    "whole quotients": lambda x: (x // 0.3, torch.floor_divide(x, 2), x % 0.3),
    "sums": lambda x: (x + 1, 1 - x, x * 0.3, x / 3, torch.rsub(x, 2)),
    "remainders": lambda x: (torch.fmod(x, 0.3), torch.remainder(x, 2), torch.special.zeta(x, 2.0)),
    "shifts": lambda x: (x.int() << 1, x.int() >> 1, x.int() & 3),
}


@pytest.mark.parametrize("stride", [(1, 2, 2), (1, 2, 4), (2, 1, 1), (1, 1, 1)])
@pytest.mark.parametrize("name", BESIDE_A_NUMBER)
def test_a_number_beside_a_tensor_takes_part_in_the_layout(name: str, stride: tuple[int, ...]) -> None:
    """PyTorch wraps it as a tensor without dimensions, so that strides of dimensions of size 1 count."""
    x = torch.empty_strided((2, 1, 1), stride).fill_(1.5)
    index = torch.zeros(2, dtype=torch.int64)

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [part for y in BESIDE_A_NUMBER[name](x) for part in (y, y[:, index])]

    assert [t.stride() for t in dynamotor.compile(fn)(x)] == [t.stride() for t in fn(x)]
