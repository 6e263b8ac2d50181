"""Graphs whose sizes differ between calls: traced, differentiated and cut once, right for every size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dynamotor.autograd.aot import aot_compile
from dynamotor.graph.sizes import ShapeEnv, Size
from dynamotor.graph.spec import TensorSpec, contiguous_stride


def symbolic_graph(
    fn: Callable[..., Any], shapes: Sequence[Sequence[Any]], sizes: dict[str, int]
) -> tuple[Any, ShapeEnv]:
    """The torch graph of `fn` over tensors of these shapes, in which names stand for symbols; symbols come
    last.
    """
    env = ShapeEnv()
    symbols = {name: env.symbol(n, name=name) for name, n in sizes.items()}
    gm = torch.fx.symbolic_trace(fn)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, shape in zip(placeholders, shapes, strict=True):
        shape = tuple(symbols.get(n, n) for n in shape)
        node.meta["val"] = TensorSpec(shape, contiguous_stride(shape), torch.float64)
    with gm.graph.inserting_after(placeholders[-1]):
        for name, symbol in reversed(symbols.items()):
            gm.graph.placeholder(name).meta["val"] = symbol
    for node in gm.graph.nodes:
        if node.op == "output" and not isinstance(node.args[0], tuple):
            node.args = ((node.args[0],),)
    gm.meta["shape_env"] = env
    gm.recompile()
    return gm, env


def tensors(shapes: Sequence[Sequence[Any]], sizes: dict[str, int]) -> list[torch.Tensor]:
    return [
        torch.randn([sizes.get(n, n) for n in shape], dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]


def _views(x: Any, w: Any) -> Any:
    y = F.linear(x, w).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
    return y.reshape(x.size(0) * 2, -1, 4), y


def _attention(x: Any, w: Any) -> Any:
    q = F.linear(x, w).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
    out = (
        F.scaled_dot_product_attention(q, q * 2, q + 1, is_causal=True)
        .transpose(1, 2)
        .reshape(x.shape[0], -1, 8)
    )
    return F.layer_norm(out + x, (8,)).softmax(-1)


def _sizes_as_numbers(x: Any, w: Any) -> Any:
    n = x.shape[1]
    return x.sum((0, 1)) / 2 + torch.zeros(8, dtype=x.dtype) + n * (x.shape[0] // 2 + n % 3), x[
        :, : n // 2
    ].cumsum(1)


def _cat_and_slices(x: Any, w: Any) -> Any:
    longer = torch.cat([x, x[:, 1:], x.flip(1)], 1)
    return longer[:, 2 : x.shape[1]].exp(), longer.sum(1, keepdim=True) @ w, F.pad(x, (0, 0, 1, 2)).amax(1)


def _mutations(x: Any, w: Any) -> Any:
    y = x * 2
    y[:, 1:].add_(x[:, :-1])
    y.view(-1, 8)[0].fill_(3.0)
    return y, y.transpose(0, 1)


def _loss(x: Any, w: Any) -> Any:
    logits = F.gelu(F.linear(x, w)).reshape(-1, 8)
    target = torch.arange(x.shape[0] * x.shape[1]) % 8
    return F.cross_entropy(logits, target), logits.amax(0), x.expand(3, -1, -1, -1).sum(0)


PROGRAMS = [_views, _attention, _sizes_as_numbers, _cat_and_slices, _mutations, _loss]
SHAPES = [("b", "s", 8), (8, 8)]


def run_op_by_op(gm: torch.fx.GraphModule, info: Any) -> Callable[..., Any]:
    return gm.forward


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__.strip("_"))
def test_one_graph_is_right_for_every_size(fn: Callable[..., Any]) -> None:
    sizes = {"b": 4, "s": 16}
    gm, env = symbolic_graph(fn, SHAPES, sizes)
    compiled = aot_compile(gm, [*tensors(SHAPES, sizes), *sizes.values()], run_op_by_op)
    admitted = 0
    for sizes in (
        {"b": 4, "s": 16},
        {"b": 2, "s": 3},
        {"b": 7, "s": 9},
        {"b": 3, "s": 2},
        {"b": 5, "s": 64},
        {"b": 16, "s": 4},
    ):
        if not env.admits({s: sizes[s.name] for s in env.symbols}):
            continue
        admitted += 1
        inputs = tensors(SHAPES, sizes)
        twins = [t.detach().clone().requires_grad_() for t in inputs]
        got, expected = compiled(*inputs, *sizes.values()), fn(*twins)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
            assert a.stride() == b.stride()
        weights = [torch.randn_like(t) for t in expected]
        for results in (got, expected):
            torch.autograd.backward([(r * k).sum() for r, k in zip(results, weights)])
        for a, b in zip(inputs, twins):
            assert (a.grad is None) is (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)
    assert admitted >= 4, env.guards
    assert not any(g.kind == "==" for g in env.guards), env.guards


def test_a_backward_that_assumes_more_runs_op_by_op_where_that_does_not_hold() -> None:
    sizes, seen = {"b": 4, "s": 16}, []

    def curious(gm: torch.fx.GraphModule, info: Any) -> Callable[..., Any]:
        if info.kind == "backward":
            symbol = next(n.meta["val"] for n in gm.graph.nodes if type(n.meta.get("val")) is Size)
            assert symbol > 3 or symbol <= 3  # a code generator should not ask this
            return lambda *args: seen.append(1) or gm(*args)
        return gm.forward

    gm, env = symbolic_graph(lambda x, w: ((x @ w).exp(), x @ w), SHAPES, sizes)
    compiled = aot_compile(gm, [*tensors(SHAPES, sizes), *sizes.values()], curious)
    for used in (0, 1):  # a backward each: the second asks for itself
        seen.clear()
        for b, ran in ((4, 1), (2, 1), (9, 2)):
            x, w = tensors(SHAPES, {"b": b, "s": 16})
            compiled(x, w, b, 16)[used].sum().backward()
            torch.testing.assert_close(
                x.grad, ((x @ w).exp() if used == 0 else torch.ones(b, 16, 8, dtype=x.dtype)) @ w.T
            )
            assert len(seen) == ran
    assert env.guards == []
