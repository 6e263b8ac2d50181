"""Tensors without data in inference mode, which has no autograd above them that splits composite ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dynamotor
from dynamotor.base.events import collect

_WEIGHT, _TABLE = torch.randn(8, 8), torch.randn(10, 8)
_LAYER = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)

COMPOSITES: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
    ("linear", lambda x: F.linear(x, _WEIGHT)),
    ("layer norm", lambda x: F.layer_norm(x, (8,))),
    ("rms norm", lambda x: F.rms_norm(x, (8,))),
    ("einsum", lambda x: torch.einsum("bnd,de->bne", x, _WEIGHT)),
    ("attention", lambda x: F.scaled_dot_product_attention(x, x, x)),
    ("embedding", lambda x: F.embedding((x[..., 0] > 0).long(), _TABLE)),
    ("chunk", lambda x: torch.cat(x.chunk(2, -1))),
    ("cast", lambda x: x.to(torch.float64)),
    ("one hot", lambda x: F.one_hot((x[..., 0] > 0).long(), 3)),
    ("entropy", lambda x: F.cross_entropy(x[0], torch.zeros(x.shape[1], dtype=torch.long))),
    ("a layer", lambda x: _LAYER(x)),
    ("an empty literal", lambda x: torch.cat([torch.tensor([]), x.flatten()])),
    ("a literal", lambda x: x + torch.tensor([1.0, 2.0] * 4)),
    ("a view that is written", lambda x: (x * 2).reshape(-1).add_(1)),
]


@pytest.mark.regression
@pytest.mark.parametrize("inside", [True, False], ids=["in the mode", "a tensor of the mode"])
@pytest.mark.parametrize("fn", [row[1] for row in COMPOSITES], ids=[row[0] for row in COMPOSITES])
def test_composite_ops_of_inference_mode_take_any_size(
    fn: Callable[[torch.Tensor], torch.Tensor], inside: bool
) -> None:
    dynamotor.reset()
    compiled = dynamotor.compile(fn)
    with collect("capture", "break") as events, torch.no_grad():
        for size in (4, 5, 6, 7):
            with torch.inference_mode():
                x = torch.randn(2, size, 8)
            with torch.inference_mode(inside):
                torch.testing.assert_close(compiled(x), fn(x))
    assert [event.kind for event in events] == ["capture", "capture"]
