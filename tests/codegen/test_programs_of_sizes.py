"""One program for all sizes, in C++ or Triton: right for sizes around the widths of vectors and tiles, without
an assumption of the compiler's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench import triton_interpret
from dynamotor.autograd.aot import aot_compile
from dynamotor.base.config import config
from dynamotor.base.events import counters
from dynamotor.codegen import compile_aten
from dynamotor.graph.sizes import ShapeEnv
from dynamotor.graph.spec import TensorSpec, contiguous_stride

SIZES = [
    (5, 24),
    (2, 2),
    (3, 7),
    (7, 8),
    (8, 9),
    (9, 15),
    (2, 16),
    (16, 17),
    (4, 33),
    (33, 3),
    (3, 64),
    (2, 90),
]
DTYPES = {"i": torch.int64}  # of arguments, by the first letter of their names


def symbolic_graph(
    fn: Callable[..., Any], shapes: dict[str, tuple[Any, ...]], sizes: dict[str, int]
) -> tuple[Any, ShapeEnv]:
    """The torch graph of `fn` over tensors of these shapes, in which names stand for symbols; symbols come
    last.
    """
    env = ShapeEnv()
    symbols = {name: env.symbol(n, name=name) for name, n in sizes.items()}
    gm = torch.fx.symbolic_trace(fn)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        shape = tuple(symbols.get(n, n) for n in shapes[node.name])
        node.meta["val"] = TensorSpec(
            shape, contiguous_stride(shape), DTYPES.get(node.name[0], torch.float32)
        )
    with gm.graph.inserting_after(placeholders[-1]):
        for name, symbol in reversed(symbols.items()):
            gm.graph.placeholder(name).meta["val"] = symbol
    output = next(node for node in gm.graph.nodes if node.op == "output")
    output.args = (output.args[0] if isinstance(output.args[0], tuple) else (output.args[0],),)
    gm.meta["shape_env"] = env
    gm.recompile()
    return gm, env


def tensors(shapes: dict[str, tuple[Any, ...]], sizes: dict[str, int], rows: int = 2) -> list[torch.Tensor]:
    made = []
    for name, shape in shapes.items():
        shape = [sizes.get(n, n) for n in shape]
        whole = name[0] in DTYPES
        made.append(torch.randint(0, rows, shape) if whole else (torch.randn(shape) / 4).requires_grad_())
    return made


def check(
    fn: Callable[..., Any],
    shapes: dict[str, tuple[Any, ...]],
    at: list[tuple[int, int]] = SIZES,
    needs: tuple[str, ...] = (),
) -> None:
    """The compiled program against eager in float64, forward and backward, at all sizes. needs: the facts that it
    assumes.
    """
    torch.manual_seed(0)
    names = ("b", "s")
    sizes = dict(zip(names, at[0]))
    gm, env = symbolic_graph(fn, shapes, sizes)
    assumed: list[Any] = []

    def compile_graph(graph: Any, info: Any) -> Any:
        before = len(env.guards)
        compiled = compile_aten(graph, info)
        assumed.extend(env.guards[before:])
        return compiled

    compiled = aot_compile(gm, [*tensors(shapes, sizes), *sizes.values()], compile_graph)
    admitted = 0
    for values in at:
        sizes = dict(zip(names, values))
        if not env.admits({s: sizes[s.name] for s in env.symbols}):
            continue
        admitted += 1
        inputs = tensors(shapes, sizes)
        twins = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs]
        got, expected = compiled(*inputs, *values), fn(*twins)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(
                a,
                b.to(a.dtype),
                rtol=2e-4,
                atol=2e-5,
                msg=lambda m, values=values: f"result at {values}: {m}",
            )
            assert a.stride() == b.stride()
        graded = [k for k, r in enumerate(expected) if r.requires_grad]
        weights = {k: torch.randn_like(expected[k]) for k in graded}
        for results in (got, expected):
            torch.autograd.backward([(results[k] * weights[k].to(results[k].dtype)).sum() for k in graded])
        for a, b in zip(inputs, twins):
            if b.is_floating_point() and b.grad is not None:
                torch.testing.assert_close(
                    a.grad.double(),
                    b.grad,
                    rtol=2e-3,
                    atol=2e-4,
                    msg=lambda m, values=values: f"gradient at {values}: {m}",
                )
    assert tuple(map(repr, assumed)) == needs and admitted >= 2 * len(at) // 3, env.guards


def _heads(x: Any) -> Any:
    return x.view(x.shape[0], x.shape[1], 6, 8).transpose(1, 2)


def _bert_layer(x: Any, w: Any, wide: Any, narrow: Any, h: Any, g: Any) -> Any:
    q, k, v = (_heads(F.linear(x, w * n, h)) for n in (1, 2, 3))
    scores = (q @ k.transpose(-1, -2) / 3).softmax(-1) @ v
    x = F.layer_norm(x + F.linear(scores.transpose(1, 2).reshape(x.shape[0], x.shape[1], 48), w), (48,), h, g)
    return F.layer_norm(x + F.linear(F.gelu(F.linear(x, wide)), narrow), (48,), h, g)


def _rotated(x: Any, angle: Any) -> Any:
    return x * angle.cos() + torch.cat([-x[..., 4:], x[..., :4]], -1) * angle.sin()


def _decoder_step(new: Any, keys: Any, values: Any, w: Any, wide: Any, narrow: Any, h: Any) -> Any:
    """A Llama-like layer on one new token, with a cache that grows by it."""
    x = new * (new.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * h
    q, k, v = (_heads(F.linear(x, w * n)) for n in (1, 2, 3))
    angle = torch.arange(keys.shape[2], keys.shape[2] + 1, device=x.device)[:, None] / 7
    keys, values = torch.cat([keys, _rotated(k, angle)], 2), torch.cat([values, v], 2)
    out = (
        F.scaled_dot_product_attention(_rotated(q, angle), keys, values)
        .transpose(1, 2)
        .reshape(x.shape[0], -1, 48)
    )
    x = new + F.linear(out, w)
    return x + F.linear(F.silu(F.linear(x, wide)) * F.linear(x, wide * 2), narrow), keys, values


X, W, H = ("b", "s", 48), (48, 48), (48,)
IDS = ("b", "s")
PROGRAMS: dict[str, tuple[Callable[..., Any], dict[str, tuple[Any, ...]]]] = {
    "pointwise": (lambda x, y: (x * 2 + y).relu(), {"x": ("b", "s"), "y": ("b", "s")}),
    "broadcast": (lambda x, h: (x * h).sigmoid(), {"x": X, "h": H}),
    "sums": (lambda x: (x.sum(-1), x.sum(0), x.sum((0, 1)), x.mean(-1)), {"x": X}),
    "plane_sums": (lambda x: (x.sum(-1), x.sum(0), x.sum(), x.amax(0)), {"x": ("b", "s")}),
    "positions": (lambda x: (x.argmax(-1), x.max(0)[1], x.cumsum(-1)), {"x": ("b", "s")}),
    "softmax": (lambda x: (x.softmax(-1), x.log_softmax(0)), {"x": ("b", "s")}),
    "layer_norm": (lambda x, h, g: F.layer_norm(x, (48,), h, g), {"x": X, "h": H, "g": H}),
    "linear": (lambda x, w, h: F.gelu(F.linear(x, w, h)), {"x": X, "w": W, "h": H}),
    "views": (
        lambda x: (
            (x.reshape(-1, 48) + 1)
            .view(x.shape[0], x.shape[1], 6, 8)
            .transpose(1, 2)
            .reshape(x.shape[0], 6, -1)
        ),
        {"x": X},
    ),
    "transpose": (lambda x: x.transpose(0, 1).contiguous() * 2, {"x": X}),
    "cat": (
        lambda x, y: (torch.cat([x, y], 1) * 2, torch.cat([x, y], -1).exp(), torch.cat([x, y], 0) + 1),
        {"x": X, "y": X},
    ),
    "cat_sizes": (lambda x, y: torch.cat([x, y], 0).tanh(), {"x": ("b", 48), "y": ("s", 48)}),
    "slices": (lambda x: (x[:, :-1].exp(), x[:, -1] * 2, x[:, 1:], x.flip(1)), {"x": X}),
    "flips": (
        lambda x: (x.flip(0).flatten(0, 1).exp(), torch.cat([x.abs().flip(0).flatten(0, 1)] * 2, 0)),
        {"x": ("b", "s")},
    ),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 3)) * 2, {"x": ("b", "s")}),
    "embedding": (lambda w, i: F.embedding(i, w).relu(), {"w": (11, 48), "i": IDS}),
    "gather": (
        lambda x, i: (x.gather(1, i) * 2, x[i[:, 0]], x.scatter_add(1, i, x)),
        {"x": ("b", "s"), "i": IDS},
    ),
    "loss": (
        lambda x, i: (
            F.cross_entropy(x.reshape(-1, 48), i.reshape(-1), reduction="sum"),
            F.mse_loss(x, x.exp(), reduction="none"),
        ),
        {"x": X, "i": IDS},
    ),
    "factories": (
        lambda x: (
            x + torch.arange(x.shape[1], device=x.device),
            x * x.shape[1],
            x.new_ones(x.shape[0]) + x.sum(1),
        ),
        {"x": ("b", "s")},
    ),
    "attention": (
        lambda x: F.scaled_dot_product_attention(
            *[(x * k).view(x.shape[0], -1, 6, 8).transpose(1, 2) for k in (1, 2, 3)], is_causal=True
        ),
        {"x": X},
    ),
    "bert_layer": (_bert_layer, {"x": X, "w": W, "wide": (96, 48), "narrow": (48, 96), "h": H, "g": H}),
    "decoder_step": (
        _decoder_step,
        {
            "new": ("b", 1, 48),
            "keys": ("b", 6, "s", 8),
            "values": ("b", 6, "s", 8),
            "w": W,
            "wide": (96, 48),
            "narrow": (48, 96),
            "h": H,
        },
    ),
    "convolution": (
        lambda x, w, h: F.relu(F.conv2d(x, w, h, padding=1)),
        {"x": ("b", 3, "s", "s"), "w": (8, 3, 3, 3), "h": (8,)},
    ),
    "repeat": (
        lambda x: (x.repeat(2, 3, 1), x.unsqueeze(1).expand(-1, 4, -1, -1).reshape(x.shape[0] * 4, -1, 48)),
        {"x": X},
    ),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_program_is_right_for_all_sizes_and_assumes_nothing(name: str) -> None:
    check(*PROGRAMS[name])


# Sizes that need another tile, another mask or none, other chunks.
OF_TILES = [(5, 24), (2, 2), (3, 7), (2, 16), (16, 17), (4, 33), (2, 130)]
interpreted = pytest.mark.skipif(not triton_interpret.available(), reason="no interpreter")


@pytest.mark.sweep(6)
@interpreted
@pytest.mark.parametrize(
    "name",
    ["pointwise", "plane_sums", "softmax", "views", "cat_sizes", "flips", "pad", "gather", "attention"],
)
def test_triton_variants_are_right_for_all_sizes(name: str) -> None:
    with config.patch(target="triton", strict=True):
        check(*PROGRAMS[name], OF_TILES)


@interpreted
def test_a_kernel_of_sizes_is_written_once_for_a_range_of_them() -> None:
    shapes, sizes = {"x": ("b", "s")}, {"b": 3, "s": 33}
    with config.patch(target="triton", strict=True), torch.no_grad():
        gm, _ = symbolic_graph(lambda x: x.softmax(-1), shapes, sizes)
        compiled = aot_compile(gm, [torch.randn(3, 33), 3, 33], compile_aten)
        made = counters["kernels"]["variants for sizes"]
        for s in (34, 40, 55, 63, 33):
            x = torch.randn(7, s)
            torch.testing.assert_close(compiled(x, 7, s)[0], x.softmax(-1))
        assert counters["kernels"]["variants for sizes"] == made
        for s, more in ((65, 1), (100, 1), (48, 2), (64, 2), (3, 3)):  # a longer row; one that vectors divide
            x = torch.randn(7, s)
            torch.testing.assert_close(compiled(x, 7, s)[0], x.softmax(-1))
            assert counters["kernels"]["variants for sizes"] == made + more


@interpreted
def test_long_rows_are_shared_and_leave_parts_at_any_size() -> None:
    def fn(x: Any) -> Any:
        return x.exp().sum(), x.logsumexp(-1)

    with config.patch(target="triton", strict=True):
        check(fn, {"x": ("b", "s")}, [(2, 17_001), (2, 5)])


@interpreted
def test_random_numbers_and_empty_parts_of_other_sizes() -> None:
    shapes, sizes = {"x": ("b", "s")}, {"b": 3, "s": 6}

    def fn(x: Any) -> Any:
        return F.dropout(x, 0.5), x[2:].exp(), x[2:].sum(0)

    with config.patch(target="triton", strict=True), torch.no_grad():
        gm, env = symbolic_graph(fn, shapes, sizes)
        compiled = aot_compile(gm, [torch.randn(3, 6), 3, 6], compile_aten)
        for b, s in ((3, 6), (40, 33), (2, 5)):
            x = torch.randn(b, s)
            if env.admits(dict(zip(env.symbols, (b, s)))):
                kept, tail, total = compiled(x, b, s)
                assert bool(((kept == 0) | (kept == 2 * x)).all())
                torch.testing.assert_close(tail, x[2:].exp())
                torch.testing.assert_close(total, x[2:].sum(0))
