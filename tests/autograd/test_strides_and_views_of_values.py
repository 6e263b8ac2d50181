"""Strides of a gradient whose other part never arrives, and values that the user writes in place behind a
graph break.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dynamotor

pytestmark = pytest.mark.regression


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_a_sum_with_an_absent_gradient_keeps_its_strides(backend):
    """ProphetNetForConditionalGeneration: the loss reads transposed logits, and nothing the logits that are
    returned.
    """

    def fn(x, weight):
        scores = F.linear(x, weight)
        return (
            F.log_softmax(scores.transpose(0, 1).contiguous().view(-1, 9), dim=-1).square().sum(-1),
            scores[:, 0],
            scores[:, 1:],
        )

    grads = []
    for call in (fn, dynamotor.compile(fn, backend=backend, fullgraph=True)):
        torch.manual_seed(0)
        x, weight = torch.randn(2, 2, 5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
        call(x, weight)[0].mean().backward()
        grads.append((x.grad, weight.grad))
    torch.testing.assert_close(grads[1], grads[0])
    assert [g.stride() for g in grads[1]] == [g.stride() for g in grads[0]]


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
@pytest.mark.parametrize(
    "last",
    [
        lambda t: t.transpose(0, 1),
        lambda t: t.unflatten(-1, (2, 3)),
        lambda t: t.cumsum(-1).view(-1),
    ],
)
def test_values_that_end_in_a_view_may_be_written_in_place(last, backend):
    """Wav2Vec2ForCTC with a padding mask: masked positions are set to zero after a graph break."""

    def fn(x, weight):
        return last(x @ weight.t())

    grads = []
    for call in (fn, dynamotor.compile(fn, backend=backend, fullgraph=True)):
        torch.manual_seed(0)
        x, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
        out = call(x, weight)
        out[out > 0] = 0
        out.square().sum().backward()
        grads.append((x.grad, weight.grad))
    torch.testing.assert_close(grads[1], grads[0])
    with torch.no_grad():
        value = dynamotor.compile(fn, backend=backend)(x, weight)
    value.mul_(2)


@pytest.mark.parametrize("value", [1.0, torch.tensor(1.0)])
def test_a_filled_copy_lies_as_its_source_does_without_holes(value: float | torch.Tensor) -> None:
    def fn(x, index):
        return x[::2].index_fill(-1, index, value)

    for x in (torch.randn(3, 3).t(), torch.randn(2, 3, 4).permute(2, 0, 1), torch.randn(4, 6)):
        found, wanted = (f(x, torch.tensor([1])) for f in (dynamotor.compile(fn), fn))
        assert (found.stride(), found.tolist()) == (wanted.stride(), wanted.tolist())


@pytest.mark.parametrize("isa", ["", "portable"])
def test_an_expanded_result_of_planned_memory_lies_as_eagers(isa):
    """Found by the fusion fuzzer, 61001:49331: an op that aten runs into planned memory, its result expanded by the
    backward of a sum. `copy_` refuses to write expanded memory."""

    def fn(x):
        return F.mish(x.sum(1))

    grads = []
    with dynamotor.config.patch(isa=isa):
        for call in (fn, dynamotor.compile(fn)):
            torch.manual_seed(0)
            x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
            grads += torch.autograd.grad(call(x), x, torch.arange(7.0, dtype=torch.float64))
    torch.testing.assert_close(grads[1], grads[0])
    assert grads[1].stride() == grads[0].stride() == (1, 0)


def test_zeros_like_one_row_of_an_expanded_tensor_lie_as_it_does() -> None:
    """96002:11845: a dimension of one element keeps the stride that it has."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.zeros_like(x[:1]), torch.ones_like(x.narrow(0, 1, 1))

    x = torch.ones(4).expand(3, 4)
    found = dynamotor.compile(function, backend="aot_eager")(x)
    assert [t.stride() for t in found] == [t.stride() for t in function(x)] == [(0, 1)] * 2


def _outside(x):
    """Elements of the memory that the view whose `as_strided` is called has not: their gradients are lost."""
    return (x * 2).chunk(2, -1)[-1].as_strided((4, 2), (1, 1))


def _of_a_row(x):
    memory = x * 2
    return memory[1].as_strided((2, 3), (7, 1), 0)[1].as_strided((2, 2), (3, 1)), memory


def _written(x):
    memory = x * 2
    view = memory[1].as_strided((2, 3), (7, 1), 0)
    view.mul_(3)
    return view, memory


@pytest.mark.parametrize("fn", [_outside, _of_a_row, _written])
def test_gradients_of_views_beyond_the_view_they_are_made_of(fn):
    grads = []
    for call in (fn, dynamotor.compile(fn, backend="aot_eager", fullgraph=True)):
        x = torch.arange(21.0).view(3, 7).requires_grad_()
        outs = call(x)
        outs = outs if isinstance(outs, tuple) else (outs,)
        weights = [torch.arange(out.numel()).view(out.shape).float() for out in outs]
        grads.append([*torch.autograd.grad(outs, x, weights), *outs])
    torch.testing.assert_close(grads[1], grads[0])
