"""Padding to buckets: the same results as without, whatever lies in the padding, or a refusal with its reason."""

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
from dynamotor.graph import buckets
from dynamotor.graph.buckets import Bucketed, bucket_of
from dynamotor.graph.padding import CannotPad, Run, axis_of, regrouped

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
    "picked": lambda x: (x.index_select(1, torch.tensor([1, 0, 2][:2])), x.gather(2, (x > 0).long())),
}


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], 4, 6).transpose(1, 2)


def _flat(found: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]


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


# Where a gradient meets an op without a rule, its graph is compiled for each size.
REFUSED_BACKWARD = {"extremes", "product", "convolution", "strided convolution", "running sums", "slices"}


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
    if name not in REFUSED_BACKWARD:
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
    "var": (lambda x: x.var(1), "aten.var"),
    "sort": (lambda x: x.sort(1)[0], "aten.sort"),
    "flip": (lambda x: x.flip(1), "aten.flip"),
    "joined along lengths": (lambda x: torch.cat([x, x], 1), "aten.cat along a padded dimension"),
    "last rows": (lambda x: x[:, -3:].sum(1), "a slice"),
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


@pytest.mark.parametrize("name", [*ON_THE_DEVICE, "norms", "squares", "products over lengths", "split"])
def test_on_the_device(name):
    fn = FUNCTIONS[name]
    call = dynamotor.compile(fn, backend="xla", options={"pad": 8})
    for b, n in SIZES[:5]:
        x = R(b, n, 24)
        for want, got in zip(_flat(fn(x)), _flat(call(x.to("xla"))), strict=True):
            torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
    assert not counters["fallback"], dict(counters["fallback"])
    assert counters["frames"]["captured"] == 2 and counters["xla"]["buckets"] <= 3
