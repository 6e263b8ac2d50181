"""Ops with every size of every input a symbol, forward and backward: one program, right at the second sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dynamotor
from dynamotor.base.events import counters
from dynamotor.graph.shapes import infer_spec
from dynamotor.graph.sizes import ShapeEnv, Size, evaluate
from dynamotor.graph.spec import TensorSpec

FIRST = {"b": 3, "c": 8, "h": 10, "w": 14, "k": 6, "m": 5, "n": 7}
SECOND = {"b": 5, "c": 12, "h": 13, "w": 9, "k": 9, "m": 4, "n": 10}
ROWS: list[tuple[str, Callable[..., torch.Tensor], str]] = [
    (
        "rounded up",
        lambda x: F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False),
        "bchw",
    ),
    ("pooled", lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), "bchw"),
    ("unfold", lambda x: F.unfold(x, 3, padding=1), "bchw"),
    ("fold", lambda x: F.fold(F.unfold(x, 2), x.shape[2:], 2), "bchw"),
    ("unshuffle", lambda x: F.pixel_unshuffle(x.repeat(1, 1, 2, 2), 2), "bchw"),
    ("channels", lambda x: F.channel_shuffle(x, 4), "bchw"),
    ("circular", lambda x: F.pad(x, (1, 2, 2, 1), mode="circular"), "bchw"),
    ("new dimensions", lambda x, y: x.expand(y.shape[0], 1, -1) * 2, "k b"),
    ("diagonal", lambda x: torch.einsum("bii->bi", x), "bkk"),
    ("off diagonal", lambda x: x.diagonal(-1).sin(), "mk"),
    ("huber", lambda x, y: F.huber_loss(x, y), "mk mk"),
    ("entropy", lambda x, y: F.binary_cross_entropy_with_logits(x, y.detach()), "mk mk"),
    ("matrices", lambda x, a, b: torch.addbmm(x, a, b), "mn bmk bkn"),
    ("whole quotients", lambda x: x + (x.detach() * 9).long() // 2, "mk"),
    ("a vector", lambda x, a, b: torch.addmv(x, a, b), "m mk k"),
    ("transforms", lambda x: torch.fft.fftn(x.transpose(0, 1), dim=(0, 2)).real, "bmn"),
    ("half a transform", lambda x: torch.view_as_real(torch.fft.rfft(x, dim=1)), "bmk"),
    ("transformed back", lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[1:]), "bmn"),
    ("gated", lambda x: F.glu(x, 1), "bchw"),
    ("norms", lambda x: F.normalize(x, dim=1) * torch.linalg.vector_norm(x, dim=(0, 2))[:, None], "bmn"),
    ("counted", lambda x: x * torch.count_nonzero(x.detach() > 0, 1)[:, None], "mk"),
    ("extremes", lambda x: x + torch.stack(torch.aminmax(x.detach(), dim=1)).sum(0)[:, None], "mk"),
    ("a slope per channel", lambda x, w: F.prelu(x, w), "bchw c"),
    ("complex", lambda x, y: torch.complex(x, y).abs(), "mk mk"),
    ("renormalised", lambda x: torch.renorm(x, 2, 0, 1.0), "mk"),
    ("distances", lambda x, y: torch.cdist(x, y), "bmk bnk"),
    ("two vectors", lambda x, a, b: torch.addr(x, a, b), "mk m k"),
    ("an identity", lambda x: x @ torch.eye(x.shape[1]) + torch.eye(x.shape[0], x.shape[1]), "mk"),
    ("a trace", lambda x: x.trace() * x, "mk"),
    ("angles", lambda x, y: torch.polar(x, y).real, "mk mk"),
    ("angles of a complex number", lambda x: torch.view_as_real(torch.polar(x, x) * (1 - 2j)), "mk"),
    ("fake numbers of four bits", lambda x: torch.fake_quantize_per_tensor_affine(x, 0.3, 0, -8, 7), "mk"),
]


@pytest.mark.parametrize(("fn", "shapes"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_one_program(fn: Callable[..., torch.Tensor], shapes: str) -> None:
    dynamotor.reset()
    counters["specialised"].clear()
    captured = counters["frames"]["captured"]
    compiled = dynamotor.compile(fn, dynamic=True, backend="aot_eager")
    for sizes in (FIRST, SECOND):
        args = [torch.randn([sizes[n] for n in shape], requires_grad=True) for shape in shapes.split()]
        found = []
        for call in (fn, compiled):
            out = call(*args)
            out.square().sum().backward()
            found.append([out, *[a.grad for a in args]])
            for a in args:
                a.grad = None
        torch.testing.assert_close(found[1], found[0])
    assert counters["frames"]["captured"] == captured + 1 and not counters["specialised"]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_a_view_that_another_layout_forbids_is_a_copy_of_any_size(order: tuple[int, ...]) -> None:
    """`aten.reshape` stands in graphs where layouts were assigned: a backward ran op by op at other sizes."""
    env = ShapeEnv()
    sizes = [env.symbol(n) for n in (3, 4, 6)]
    x = torch.zeros(3, 4, 6).permute(order)
    shape = tuple([sizes[d] for d in order])
    stride = tuple([[sizes[1] * sizes[2], sizes[2], 1][d] for d in order])
    spec = TensorSpec(shape, stride, x.dtype, x.device)
    counters["specialised"].clear()
    given: list[Size | int] = [shape[0], -1]
    found = infer_spec(torch.ops.aten.reshape.default, (spec, given), {})
    other = dict(zip(env.symbols, (5, 7, 8)))
    want = torch.zeros(5, 7, 8).permute(order).reshape(evaluate(given, other))
    assert env.admits(other) and not counters["specialised"]
    assert evaluate((found.shape, found.stride), other) == (tuple(want.shape), want.stride())
