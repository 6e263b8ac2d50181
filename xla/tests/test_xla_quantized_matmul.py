"""Products with weights of 8 bits are those of the weights that they stand for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("jax")
import dynamotor.xla  # noqa: E402, F401
from dynamotor.xla.core.xla_builder import dot_general  # noqa: E402
from dynamotor.xla.experimental.xla_quantized_matmul import XlaQuantizedLinear  # noqa: E402


def _case(block_size: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """Activations, a weight with its scale and zero point, and the plain weight [outputs, inputs]."""
    torch.manual_seed(0)
    if block_size == -1:
        w, scale, zero = torch.randint(-128, 127, (8, 6)).to(torch.int8), torch.rand(8), torch.rand(8)
        return torch.randn(2, 3, 6), (w, scale, zero), w * scale[:, None] - zero[:, None]
    w = torch.randint(-8, 7, (2, 3, 8)).to(torch.int8)
    scale, zero = torch.rand(2, 8), torch.rand(2, 8)
    return torch.randn(2, 3, 6), (w, scale, zero), (w * scale[:, None] - zero[:, None]).reshape(6, 8).t()


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize(("block_size", "rounded"), [(-1, False), (-1, True), (3, False)])
def test_a_quantized_layer_is_a_linear_layer(device: str, block_size: int, rounded: bool) -> None:
    x, parts, plain = _case(block_size)
    layer = XlaQuantizedLinear(6, 8, block_size=block_size, quantize_activation=rounded)
    layer.load_quantized_weight(*parts)
    found = layer.to(device)(x.to(device)).cpu()
    expected = torch.nn.functional.linear(x, plain)
    torch.testing.assert_close(found, expected, rtol=0, atol=3.0 if rounded else 1e-3)


def test_shapes_that_do_not_fit_are_refused() -> None:
    layer = XlaQuantizedLinear(6, 8, is_symmetric=True)
    with pytest.raises(ValueError, match="DM671"):
        layer.load_quantized_weight(torch.zeros(6, 8, dtype=torch.int8), torch.ones(8))


def test_rows_of_zeros_stay_zero() -> None:
    layer = XlaQuantizedLinear(6, 8, is_symmetric=True, quantize_activation=True).to("xla")
    assert layer(torch.zeros(2, 6, device="xla")).tolist() == torch.zeros(2, 8).tolist()


def test_dot_general_sums_over_pairs_of_dimensions() -> None:
    a, b = torch.randint(-15, 15, (4, 3, 2)), torch.randint(-15, 15, (4, 2, 5))
    given = [t.to(torch.int8).to("xla") for t in (a, b)]
    found = dot_general(*given, (([-1], [1]), ([0], [0])), preferred_element_type=torch.int32)
    assert torch.equal(found.cpu(), (a @ b).to(torch.int32))
