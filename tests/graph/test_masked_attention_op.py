"""The op `dynamotor::masked_attention`: PyTorch's attention with the mask that its formula says, and gradients."""

import pytest
import torch
import torch.nn.functional as F

from dynamotor.graph import masked_attention_op
from dynamotor.graph.mask_blocks import mask_blocks, shown
from dynamotor.graph.spec import TensorSpec

SHAPES = ((2, 4, 20, 8), (2, 2, 30, 8), (2, 2, 30, 6))
IDS = torch.randint(0, 3, (2, 30)).sort().values
MASKS = {"causal": "q-k>=0", "documents": "(q-k>=0)&(r0[b,k]-r0[b,q]==0)", "rows of nothing": "q-k-4>=0"}


def operands(grad=False):
    torch.manual_seed(0)
    return [torch.randn(b, n, h, w).transpose(1, 2).requires_grad_(grad) for b, h, n, w in SHAPES]


def attend(q, k, v, mask, sinks=None):
    blocks = mask_blocks(mask, (2, 4, 20, 30), q.device, IDS)
    more = [IDS], list(blocks), mask, 0.3, (480, 6, 24, 1), sinks
    return torch.ops.dynamotor.masked_attention(q, k, v, *more)


def exact(q, k, v, sinks=None, *, mask):
    visible = shown(mask, [IDS], (2, 4, 20, 30), torch.device("cpu"))
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, visible, scale=0.3, enable_gqa=True)
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = (q @ k.mT * 0.3).masked_fill(~visible, -torch.inf)
    column = sinks[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -2.0, 3.0, 0.0])])
@pytest.mark.parametrize("name", MASKS)
def test_the_op_is_attention_under_its_mask(name, sinks):
    mask, given = MASKS[name], operands(grad=True)
    given += [] if sinks is None else [sinks.clone().requires_grad_()]
    out, sums = attend(*given[:3], mask, *given[3:])
    wide = [t.detach().double().requires_grad_() for t in given]
    want = exact(*wide, mask=mask)
    assert out.stride() == (480, 6, 24, 1) and not sums.requires_grad
    grad = torch.randn(out.shape)
    found, gradients = torch.autograd.grad(out, given, grad), torch.autograd.grad(want, wide, grad.double())
    for a, b in zip((out, *found), (want, *gradients), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    assert [t.stride() for t in found] == [t.stride() for t in given]


def test_the_rules_foretell_the_results():
    given, mask = operands(), MASKS["documents"]
    out, sums = attend(*given, mask)
    specs = [TensorSpec.of(t) for t in given]
    assert masked_attention_op._masked_attention_layout(*specs, [], [], mask, 0.3, out.stride()) == (
        TensorSpec.of(out),
        TensorSpec.of(sums),
    )
    found = torch.ops.dynamotor.masked_attention_backward(out, *given, out, sums, [IDS], [], mask, 0.3)
    assert masked_attention_op._masked_attention_backward_layout(None, *specs) == tuple(
        map(TensorSpec.of, found)
    )


@pytest.mark.parametrize("sinks", [None, torch.randn(4)])
def test_second_gradients_are_those_of_plain_products(sinks):
    def penalty(attend, *given):
        first = torch.autograd.grad(attend(*given).square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(t.square().sum() for t in first), given)

    mask, given = "q-k-4>=0", operands(grad=True)
    given += [] if sinks is None else [sinks.clone().requires_grad_()]
    wide = [t.detach().double().requires_grad_() for t in given]
    found = penalty(lambda q, k, v, s=None: attend(q, k, v, mask, s)[0], *given)
    wanted = penalty(lambda *t: exact(*t, mask=mask), *wide)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
