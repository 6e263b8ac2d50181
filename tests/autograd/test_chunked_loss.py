"""The cross-entropy of a linear layer in chunks: eager's losses and gradients, and no logits in memory."""

from __future__ import annotations

import pytest
import torch

import dynamotor
from dynamotor import counters
from dynamotor.base.config import config
from dynamotor.base.events import collect
from dynamotor.graph.spec import TensorSpec

F = torch.nn.functional
BATCH, LENGTH, WIDTH, CLASSES = 2, 9, 16, 50
SMALL = 0.002  # megabytes: chunks of a few rows


def plain(h, w, b, labels):
    return F.cross_entropy(F.linear(h, w, b).view(-1, CLASSES), labels.view(-1))


def shifted(h, w, b, labels):
    logits = F.linear(h, w, b)[..., :-1, :].contiguous()
    return F.cross_entropy(
        logits.view(-1, CLASSES).float().to(h.dtype), labels[..., 1:].contiguous().view(-1)
    )


def padded(h, w, b, labels):
    following = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(F.linear(h, w).view(-1, CLASSES), following.view(-1), ignore_index=-100)


def summed(h, w, b, labels):
    logits = (h @ w.t()).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten().clamp(min=0), ignore_index=3, reduction="sum") / 7


def two_losses(h, w, b, labels):
    return plain(h, w, b, labels) + 0.1 * summed(h.sin(), w, b, labels)


def given(dtype=torch.float64):
    torch.manual_seed(0)
    h = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
    w = torch.randn(CLASSES, WIDTH, dtype=dtype, requires_grad=True)
    b = torch.randn(CLASSES, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, CLASSES, (BATCH, LENGTH))
    labels[0, 3] = -100
    return h, w, b, labels


def gradients(f, args, scale=1.0):
    leaves = [t for t in args if t.requires_grad]
    loss = f(*args)
    return loss.detach(), *torch.autograd.grad(loss * scale, leaves, allow_unused=True)


def chunked(f, args, backend="native", expected=True, **settings):
    counters["losses"].clear()
    with config.patch(chunk_logits_from=SMALL, **settings):
        found = gradients(dynamotor.compile(f, backend=backend, fullgraph=True), args, 0.5)
    assert bool(counters["losses"]["in chunks"]) is expected
    return found


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
@pytest.mark.parametrize("f", [plain, shifted, padded, summed, two_losses])
def test_losses_and_gradients_are_those_of_eager(f, backend):
    if backend == "native" and f is shifted:
        pytest.skip("conversions to float32 round")
    args = given(torch.float32 if f is shifted else torch.float64)
    torch.testing.assert_close(chunked(f, args, backend), gradients(f, args, 0.5))


def test_no_logits_are_in_memory():
    args = given()
    with collect("joint") as events, config.patch(chunk_logits_from=SMALL):
        gradients(dynamotor.compile(plain, backend="aot_eager"), args)
    specs = [
        node.meta.get("val") for node in events[0].data["graph"].graph.nodes if node.op == "call_function"
    ]
    largest = max(spec.nbytes for spec in specs if isinstance(spec, TensorSpec))
    assert largest < BATCH * LENGTH * CLASSES * 8


def _products_of_classes(args):
    """The matrix products of a loss whose result has the classes as columns, so many as there are chunks."""
    dynamotor.reset()
    with collect("joint") as events, config.patch(chunk_logits_from=SMALL):
        dynamotor.compile(plain, backend="aot_eager")(*args)
    nodes = [node for node in events[0].data["graph"].graph.nodes if "mm" in str(node.target)]
    return sum(node.meta["val"].shape[-1] == CLASSES for node in nodes)


def test_chunks_are_few_where_each_has_a_gradient_as_large_as_the_weight():
    h, w, b, labels = given()
    assert _products_of_classes((h, w, b, labels)) == 2  # the root of 4 * 18 rows / 16 columns
    assert _products_of_classes((h, w.detach(), b, labels)) == BATCH * LENGTH
    many = torch.randn(BATCH, 128, WIDTH, dtype=h.dtype, requires_grad=True)
    found = _products_of_classes((many, w, b, labels.repeat(1, 15)[:, :128].contiguous()))
    assert found == 8  # the root of 4 * 256 / 16


@pytest.mark.slow
def test_second_derivatives_are_those_of_eager():
    args = given()
    found = []
    with config.patch(chunk_logits_from=SMALL):
        for f in (dynamotor.compile(plain), plain):
            (first,) = torch.autograd.grad(f(*args), [args[0]], create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), args[:3]))
    torch.testing.assert_close(*found)


def test_a_frozen_layer_and_labels_that_are_all_ignored():
    h, w, b, labels = given()
    args = (h, w.detach(), b.detach(), labels)
    torch.testing.assert_close(chunked(plain, args), gradients(plain, args, 0.5))
    args = (h, w, b, torch.full_like(labels, -100))
    torch.testing.assert_close(chunked(plain, args), gradients(plain, args, 0.5), equal_nan=True)


def test_autocast():
    args = given(torch.float32)

    def f(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(*args)

    for mine, theirs in zip(chunked(f, args), gradients(f, args, 0.5), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=3e-2, atol=3e-2 * float(theirs.abs().max()))


def with_logits(h, w, b, labels):
    logits = F.linear(h, w, b).view(-1, CLASSES)
    return F.cross_entropy(logits, labels.view(-1)) + logits.mean()


def smoothed(h, w, b, labels):
    return F.cross_entropy(F.linear(h, w, b).view(-1, CLASSES), labels.view(-1), label_smoothing=0.1)


def of_columns(h, w, b, labels):
    return F.cross_entropy(F.linear(h, w, b)[..., :40].reshape(-1, 40), labels.view(-1) % 40)


@pytest.mark.parametrize("f", [with_logits, smoothed, of_columns])
def test_other_losses_stay(f):
    args = given()
    torch.testing.assert_close(chunked(f, args, expected=False), gradients(f, args, 0.5))


def test_nothing_changes_where_no_gradient_is_asked_for():
    args = [t.detach() for t in given()]
    with config.patch(chunk_logits_from=SMALL), collect("joint") as events:
        torch.testing.assert_close(dynamotor.compile(plain)(*args), plain(*args))
    assert "nll_loss_backward" not in str(events[0].data["graph"].graph)


def test_a_label_out_of_range_raises():
    h, w, b, labels = given()
    labels[0, 0] = CLASSES
    with config.patch(chunk_logits_from=SMALL), pytest.raises((IndexError, RuntimeError)):
        dynamotor.compile(plain)(h, w, b, labels)
