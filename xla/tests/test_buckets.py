"""Padding to buckets: the same results as without, whatever the padding holds, or a refusal with its reason."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dynamotor
import dynamotor.xla
from dynamotor.autograd.aot import aot_compile
from dynamotor.backends import backends, static_inputs
from dynamotor.base.events import collect, counters
from dynamotor.graph.bucket_padding import CannotPad, Run, axis_of, regrouped
from dynamotor.xla import buckets
from dynamotor.xla.buckets import Bucketed, bucket_of

SIZES = ((4, 6), (3, 7), (2, 5), (5, 8), (9, 11), (8, 16), (6, 17))
R = torch.randn


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    dynamotor.reset()
    counters.clear()
    yield


def poison(x: torch.Tensor, more: list[int]) -> torch.Tensor:
    """What must never show in a result."""
    return F.pad(
        x, more, value=float("nan") if x.is_floating_point() else False if x.dtype is torch.bool else -7
    )


def padded(fn: Callable[..., Any], pad: Any = 8, **options: Any) -> Callable[..., Any]:
    """The function in buckets, its graphs run by eager PyTorch on the CPU with poison in the padding."""

    def run_graph(gm: torch.fx.GraphModule, info: Any) -> Callable[..., Any]:
        def forward(graph: torch.fx.GraphModule) -> Callable[..., Any]:
            def call(*inputs: Any) -> Any:
                with torch._C._AutoDispatchBelowADInplaceOrView():
                    return graph.forward(*inputs)

            return call

        if "shape_env" not in gm.meta:  # the first call, whose sizes are numbers
            return forward(gm)
        return Bucketed(gm, forward, pad, torch.device("cpu"), info.name)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return aot_compile(gm, list(inputs), run_graph, static_inputs=static_inputs(gm))

    backend.__module__ = "dynamotor.test"  # one of ours: symbols are not PyTorch's
    with mock.patch.dict(backends._rules, {"aot_eager": backend}):
        compiled = dynamotor.compile(fn, backend="aot_eager", **options)

    def call(*args: Any) -> Any:
        with mock.patch.object(buckets, "zeros_behind", poison):
            return compiled(*args)

    return call


_weights = [R(40, 24), R(24, 24), R(24), R(24), R(24, 24, 3), R(6, 24)]
W, SQUARE, A, B, CONV, QUERIES = _weights
FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "pointwise": lambda x: F.gelu(x * 2 + A) / (x.square() + 1),
    "size": lambda x: x * x.shape[0] / x.shape[1] + x.numel(),
    "sum": lambda x: (x.sum(), x.sum(0), x.sum(1), x.sum((0, 1)), x.sum((0, 1), keepdim=True)),
    "mean": lambda x: (
        x.mean(),
        x.mean(0),
        x.mean(1),
        x.mean((0, 1)),
        x.mean(2),
        x.mean((1, 2), keepdim=True),
    ),
    "extremes": lambda x: (x.amax(0), x.amin(1), x.max(), x.min(), x.max(1), x.min(0)[1]),
    "places": lambda x: (x.argmax(1), x.argmin(0), x.argmax(2)),
    "truth": lambda x: ((x > 0).any(1), (x > -9).all(0), (x > 9).any(), (x > -9).all()),
    "product": lambda x: (x / 4).cos().prod(1),
    "softmax": lambda x: (x.softmax(1), x.log_softmax(0), x.softmax(2)),
    "layer norm": lambda x: F.layer_norm(x, (24,), A, B),
    "linear": lambda x: F.linear(x, SQUARE, A).relu() @ SQUARE,
    "products over lengths": lambda x: (x.transpose(1, 2) @ x, x @ x.transpose(1, 2)),
    "attention by hand": lambda x: (x @ x.transpose(1, 2) / 5).softmax(-1) @ x,
    "attention": lambda x: F.scaled_dot_product_attention(*[_heads(x)] * 3),
    "causal attention": lambda x: F.scaled_dot_product_attention(*[_heads(x)] * 3, is_causal=True),
    "attention with a mask": lambda x: F.scaled_dot_product_attention(
        *[_heads(x)] * 3, attn_mask=torch.ones(x.shape[1], x.shape[1]).tril().log()
    ),
    "attention of few queries": lambda x: F.scaled_dot_product_attention(
        QUERIES[None].expand(x.shape[0], -1, -1), x, x
    ),
    "norms": lambda x: (x.norm(), x.norm(dim=1), x.norm(1, 0), x.norm(float("inf"), (0, 1))),
    "logarithms of sums": lambda x: (x.logsumexp(1), x.logsumexp((0, 1)), x.nansum(1)),
    "squares": lambda x: [F.mse_loss(x, x.tanh(), reduction=r) for r in ("mean", "sum", "none")],
    "running sums": lambda x: (x.cumsum(0), x.cumsum(1)),
    "merged": lambda x: (x.reshape(-1, 24).sum(0), x.view(-1), x.flatten().sum(), x.reshape(-1, 6).mean(0)),
    "merged and cut": lambda x: (
        (x.reshape(-1, 24) @ SQUARE).view(x.shape[0], x.shape[1], 4, 6).transpose(1, 2)
    ),
    "transposed": lambda x: (x.transpose(0, 1), x.permute(2, 0, 1).contiguous(), x[:, :, 3].t()),
    "elements": lambda x: (x[0], x[-1], x[:, -1], x[:, 0], x[:, -2].sum(0), x[..., -1]),
    "slices": lambda x: (x[1:], x[:, 1:].sum(1), x[:, :-1].mean(1), x[:2], x[:, :, 2:5].sum(1)),
    "joined": lambda x: torch.cat([x, x * 2], 2).sum(1),
    "split": lambda x: [part.mean(1) for part in x.split(6, 2)] + [part.sum() for part in x.chunk(2, 2)],
    "masks": lambda x: x.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool()[:, :1], -1.0).sum(1),
    "positions": lambda x: (x + torch.arange(x.shape[1])[:, None]).sum(1),
    "made": lambda x: (torch.zeros_like(x) + 1).sum() + torch.full((x.shape[0], 3), 2.0).sum(),
    "expanded": lambda x: (x[:, :, None].expand(-1, -1, 3, -1).sum(1), A.expand(x.shape[0], 24).sum(0)),
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), CONV, A, padding=1).relu().sum(2),
    "strided convolution": lambda x: F.conv1d(x.transpose(1, 2), CONV, padding=2, stride=2),
    "transposed convolution": lambda x: F.conv_transpose1d(x.transpose(1, 2), CONV, padding=1, stride=2),
    "flipped": lambda x: (x.flip(1), x.flip(0, 2).sum(1)),
    "joined along lengths": lambda x: (
        torch.cat([x, x * 2], 1),
        torch.cat([x[:, :1], x, x.cos()], 1).cumsum(1),
        torch.cat([x, QUERIES.expand(x.shape[0], 6, 24), x], 1).sum(1),
        torch.cat([x[:, 1:], x[:, :1]], 1),
        torch.cat([x, x.sin()], 0),
    ),
    "rolled": lambda x: (x.roll(1, 1), x.roll((-2, 3), (0, 2)).sum(1), x.roll(5, 0).cumsum(0)),
    "stacked": lambda x: (torch.stack([x, x.flip(1)], 1).sum((0, 2)), torch.stack([x, x.cos()], -1)),
    "last rows": lambda x: (x[:, -2:], x[:, -2:].sum(1), x[-2:].mean(0), x[:, 1:-1].mean(1)),
    "every second": lambda x: (x[:, ::2], x[:, 1::2].cumsum(1), x[1::3].sum(0)),
    "positions from both ends": lambda x: (
        x[:, torch.tensor([0, -1, 1, -2], device=x.device)],
        x[torch.tensor([1, -1], device=x.device)],
        x[torch.arange(x.shape[0], device=x.device)[:, None], x.argmax(1)[:, :5]].sum(1),
    ),
    "scattered": lambda x: (
        x.scatter(2, (x > 0).long(), x * 2),
        x.scatter_add(1, (x > 0).long(), x.cos()),
        x.scatter(2, (x > 0).long(), 3.0).sum(1),
    ),
    "wider": lambda x: (
        F.pad(x, (0, 0, 1, 2)),
        F.pad(x, (2, 1, 1, 2), value=3.0).sum(1),
        F.pad(x, (0, 0, -1, -1)),
    ),
    "variance": lambda x: (
        x.var(1),
        x.std((0, 1), correction=0),
        x.var(),
        *torch.var_mean(x, 1, keepdim=True),
        x.var(2),
    ),
    "statistics of a batch": lambda x: F.batch_norm(x.transpose(1, 2), None, None, A, B, training=True),
    "sorted rows": lambda x: (x.sort(2)[0], x.topk(3, 2)[0].sum(1)),
    "picked": lambda x: (x.index_select(1, torch.tensor([1, 0, 2][:2])), x.gather(2, (x > 0).long())),
}


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], 4, 6).transpose(1, 2)


def _flat(found: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_padding_never_shows(name):
    fn = FUNCTIONS[name]
    call = padded(fn)
    for b, n in SIZES:
        x = R(b, n, 24)
        for want, got in zip(_flat(fn(x)), _flat(call(x)), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            assert got.stride() == want.stride() or got.numel() < 2
    assert not counters["fallback"], dict(counters["fallback"])
    assert counters["xla"]["buckets"] <= 7


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"places", "truth", "made", "picked"}))
def test_gradients(name):
    fn = FUNCTIONS[name]
    call = padded(fn)
    for b, n in SIZES:
        found = []
        for run in (fn, call):
            x = R(b, n, 24, generator=torch.Generator().manual_seed(b)).requires_grad_()
            outs = [out for out in _flat(run(x)) if out.is_floating_point()]
            sum((out * (k + 1)).sin().sum() for k, out in enumerate(outs)).backward()
            found.append(x.grad)
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
    assert not counters["fallback"], dict(counters["fallback"])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_training_with_labels(reduction):
    torch.manual_seed(0)

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.out = nn.Embedding(50, 24), nn.LayerNorm(24), nn.Linear(24, 11)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            hidden = self.norm(self.embed(ids)).relu()
            return F.cross_entropy(self.out(hidden).view(-1, 11), labels.view(-1), reduction=reduction)

    model = Tagger()
    call = padded(model)
    for b, n in SIZES:
        ids, labels = torch.randint(0, 50, (b, n)), torch.randint(0, 11, (b, n))
        labels[0, 0] = -100
        found = []
        for run in (model, call):
            loss = run(ids, labels)
            loss.sum().backward()
            found.append([loss.detach(), *[p.grad for p in model.parameters()]])
            model.zero_grad(set_to_none=True)
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert not counters["fallback"], dict(counters["fallback"])


REFUSALS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "sort": (lambda x: x.sort(1)[0], "aten.sort"),
    "flipped and merged": (lambda x: x.reshape(-1, 4).flip(0), "aten.flip.default along merged dimensions"),
    "random": (lambda x: x + torch.rand_like(x) * 0, "rand"),
    "written": (lambda x: x.add_(1), "the graph writes its inputs"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_has_no_rule_is_compiled_for_each_size_and_says_so(name):
    fn, reason = REFUSALS[name]
    call = padded(fn)
    with collect("fallback") as events:
        for b, n in SIZES[:3]:
            x = R(b, n, 24)
            own = x.clone()
            torch.testing.assert_close(call(own), fn(x))
            torch.testing.assert_close(own, x)
    assert [e.data["code"] for e in events] == ["DM679"] and reason in events[0].data["reason"]


def test_buckets():
    assert [bucket_of(n, 16) for n in (2, 16, 17)] == [16, 16, 32]
    assert [bucket_of(n, "powers") for n in (2, 3, 8, 9)] == [2, 4, 8, 16]
    assert [bucket_of(n, (4, 32)) for n in (2, 4, 5, 33)] == [4, 4, 32, 33]
    for pad, most in ((32, 1), ("powers", 4), ((8, 64), 2)):
        counters.clear()
        call = padded(lambda x: x.sum(1), pad)
        for n in (3, 5, 9, 17, 30):
            x = R(40, n)
            torch.testing.assert_close(call(x), x.sum(1))
        assert counters["xla"]["buckets"] <= most


def test_sizes_beyond_a_mark_are_not_padded_to():
    call = padded(lambda x: x.sum(1), 16)
    for n in (10, 9):
        x = R(4, n)
        dynamotor.mark_dynamic(x, 1, max=12)
        torch.testing.assert_close(call(x), x.sum(1))


def test_axes():
    env = dynamotor.graph.sizes.ShapeEnv()
    b, s = env.symbol(3), env.symbol(7)
    assert axis_of(b * s * 4) == (Run(b), Run(s), 4) and axis_of(1) == () and axis_of(s + 1) == (Run(s + 1),)
    whole = ((Run(b),), (Run(s),), (24,))
    assert regrouped(whole, (b * s, 24)) == ((Run(b), Run(s)), (24,))
    assert regrouped(((Run(b), Run(s)), (24,)), (b, s, 4, 6)) == ((Run(b),), (Run(s),), (4,), (6,))
    assert regrouped(whole, (b, s * 4, 6)) == ((Run(b),), (Run(s), 4), (6,))
    with pytest.raises(CannotPad):
        regrouped(whole, (s, b, 24))
    with pytest.raises(CannotPad):
        regrouped(((Run(b), Run(s)),), (s, b))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("train", [False, True])
def test_a_transformer_on_the_device(train):
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 32)
            self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.layer(self.embed(ids) + self.embed(torch.arange(ids.shape[1], device=ids.device)))
            return y[:, -1], y.mean(1), y

    cpu = Model().train(train)
    model = copy.deepcopy(cpu).to("xla")
    call = dynamotor.compile(model, backend="xla", options={"pad": 8})
    for b, n in ((3, 7), (2, 5), (5, 8), (7, 11), (8, 16)):
        ids = torch.randint(0, 100, (b, n))
        with torch.set_grad_enabled(train):
            wanted, found = cpu(ids), call(ids.to("xla"))
        for want, got in zip(wanted, found, strict=True):
            assert want.stride() == got.stride()
            torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
        if train:
            for outs in (wanted, found):
                sum(out.square().mean() for out in outs).backward()
            for own, other in zip(cpu.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(other.grad.cpu(), own.grad, rtol=1e-3, atol=1e-5)
            cpu.zero_grad()
            model.zero_grad()
    assert not counters["fallback"]["xla.pad"] and counters["frames"]["captured"] == 2


ON_THE_DEVICE = (
    "mean",
    "extremes",
    "places",
    "attention",
    "causal attention",
    "merged",
    "elements",
    "slices",
)


MOVES = ("flipped", "joined along lengths", "last rows", "positions from both ends", "wider", "scattered")


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    "name",
    [
        *ON_THE_DEVICE,
        *MOVES,
        "norms",
        "squares",
        "products over lengths",
        "split",
        "variance",
    ],
)
def test_on_the_device(name):
    fn = FUNCTIONS[name]
    call = dynamotor.compile(fn, backend="xla", options={"pad": 8})
    for b, n in SIZES[:5]:
        x = R(b, n, 24)
        for want, got in zip(_flat(fn(x)), _flat(call(x.to("xla"))), strict=True):
            torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
    assert not counters["fallback"], dict(counters["fallback"])
    assert counters["frames"]["captured"] == 2 and counters["xla"]["buckets"] <= 3


class _Images(nn.Module):
    """Of any size, or (`pools`) of one size in batches of any size."""

    def __init__(self, pools: bool) -> None:
        super().__init__()
        pool = [nn.MaxPool2d(2), nn.AvgPool2d(2)] if pools else [nn.Conv2d(6, 6, 3, 2, 1)]
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            *pool,
            nn.Conv2d(6, 6, 3, 1, 2, 2),
        )
        self.norm, self.last = nn.BatchNorm2d(6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.layers(x)).relu().mean((2, 3)))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize("where", ["cpu", "xla"])
def test_training_on_images_with_statistics_of_batches(where, pools):
    torch.manual_seed(0)
    own = _Images(pools)
    other = copy.deepcopy(own).to(where)
    call = padded(other, 4) if where == "cpu" else dynamotor.compile(other, backend="xla", options={"pad": 4})
    sizes = [(b, 8, 8) for b in (5, 3, 6, 2, 9)] if pools else [(5, 8, 8), (3, 7, 9), (6, 9, 12), (2, 6, 5)]
    for b, h, w in sizes:
        x = R(b, 3, h, w)
        for model, run in ((own, own), (other, call)):
            model.zero_grad()
            run(x.to(next(model.parameters()).device)).sin().sum().backward()
        pairs = zip(own.named_parameters(), other.named_parameters(), strict=True)
        for (name, p), (_, q) in pairs:
            torch.testing.assert_close(
                q.grad.cpu(), p.grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
        for (name, p), (_, q) in zip(own.named_buffers(), other.named_buffers(), strict=True):
            torch.testing.assert_close(q.cpu(), p, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert not counters["fallback"]["xla.pad"], dict(counters["fallback"])
    assert counters["frames"]["captured"] == 2


def test_dropout_on_the_device():
    call = dynamotor.compile(lambda x: F.dropout(x, 0.25) * 3, backend="xla", options={"pad": 32})
    for n in (900, 1000, 1011, 700):
        x = (R(n, 24).abs() + 1).to("xla").requires_grad_()
        y = call(x)
        y.sum().backward()
        y, scale = y.detach().cpu(), x.grad.cpu()
        torch.testing.assert_close(y, x.detach().cpu() * scale)
        assert set(scale.unique().tolist()) == {0.0, 4.0} and 0.22 < (y == 0).float().mean() < 0.28
    assert not counters["fallback"]["xla.pad"] and counters["frames"]["captured"] == 2
