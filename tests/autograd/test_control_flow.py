"""Control flow and `flex_attention` through the compiler: values and gradients against the same thing in plain Python,
and what other people's backends see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops import associative_scan, map as over, scan, while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dynamotor
from dynamotor import counters

W = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).requires_grad_()
B = torch.linspace(0, 1, 4, dtype=torch.float64).requires_grad_()


def operators(x: torch.Tensor) -> torch.Tensor:
    y = x * 2 + 1
    a = torch.cond(y.sum() > 0, lambda t: t.sin() @ W, lambda t: t.cos() * B, (y,))
    total, rows = scan(lambda c, r: ((c @ W + r).tanh(), c * r), a[0] * 0, a * 1.5)
    each = over(lambda r, b: (r * b).sum() + r.exp(), rows.cos(), B)
    summed = associative_scan(lambda p, q: p + q, each * 2, dim=0, combine_mode="generic")
    return summed.sum(0) + total


def plainly(x: torch.Tensor) -> torch.Tensor:
    y = x * 2 + 1
    a = y.sin() @ W if y.sum() > 0 else y.cos() * B
    total, rows = a[0] * 0, []
    for r in a * 1.5:
        rows.append(total * r)
        total = (total @ W + r).tanh()
    each = torch.stack([(r * B).sum() + r.exp() for r in torch.stack(rows).cos()])
    return (each * 2).cumsum(0).sum(0) + total


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_values_and_gradients_are_those_of_plain_python(backend: str) -> None:
    compiled = dynamotor.compile(operators, backend=backend, fullgraph=True)
    counters.clear()
    for sign in (1, -1, 1):
        torch.manual_seed(0)
        x = (torch.rand(3, 4, dtype=torch.float64) * sign - int(sign < 0)).requires_grad_()
        got, expected = compiled(x), plainly(x)
        torch.testing.assert_close(got, expected)
        for mine, theirs in zip(
            torch.autograd.grad(got.sin().sum(), (x, W, B)),
            torch.autograd.grad(expected.sin().sum(), (x, W, B)),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs)
    assert counters["capture"]["graphs"] == 1
    assert not [code for code in counters["fallback"] if code.startswith("aot.")]


def test_an_input_of_the_branch_that_was_not_taken_gets_zeros() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: t * W[0], lambda t: t * B, (x,))

    out = dynamotor.compile(f, backend="eager", fullgraph=True)(torch.ones(4, dtype=torch.float64))
    to_w, to_b = torch.autograd.grad(out.sum(), (W, B))
    assert to_w.any() and not to_b.any()


def test_a_loop_runs_as_often_as_its_data_says() -> None:
    def f(n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return while_loop(lambda i, a: i < n, lambda i, a: (i + 1, (a + x).sin()), (n * 0, x * 1))[1] * 2

    compiled = dynamotor.compile(f, fullgraph=True)
    x = torch.randn(5, 7)
    for n in (0, 1, 6):
        expected = x * 1
        for _ in range(n):
            expected = (expected + x).sin()
        torch.testing.assert_close(compiled(torch.tensor(n), x), expected * 2)


@pytest.mark.slow
def test_other_backends_see_the_operators_of_pytorch() -> None:
    seen: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        seen.extend("body" for node in gm.graph.nodes if node.op == "get_attr")
        return gm.forward

    def f(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda t: t + B, lambda t: t * W[0], (x,))
        return while_loop(lambda i, a: i < n, lambda i, a: (i + 1, a * B), (n * 0, y.detach()))[1] + 1

    x = torch.full((4,), 2.0, dtype=torch.float64)
    got = dynamotor.compile(f, backend=backend, fullgraph=True)(x, torch.tensor(2))
    torch.testing.assert_close(got, ((x + B) * B * B + 1).detach())
    assert {"cond", "while_loop"} <= set(seen) and seen.count("body") == 4


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Causal attention with a bias for each head and distance."""
    at = torch.arange(q.size(2))
    scores = q @ k.mT * 0.5 + bias[:, at[:, None] - at + 8]
    return scores.masked_fill(at[:, None] < at, -torch.inf).softmax(-1) @ v


def test_flex_attention_is_one_graph_with_gradients() -> None:
    torch.manual_seed(0)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device="cpu")

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, i - j + 8], mask, scale=0.5)

    given = [torch.randn(2, 3, 8, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    given.append(torch.randn(3, 17, dtype=torch.float64, requires_grad=True))
    compiled = dynamotor.compile(f, fullgraph=True)
    got, expected = compiled(*given), _attention(*given)
    torch.testing.assert_close(got, expected)
    for mine, theirs in zip(
        torch.autograd.grad(got.sin().sum(), given),
        torch.autograd.grad(expected.sin().sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("shapes", [[(3, 3), (4, 3), (5, 2)], [(4, 3), (2, 5)]])
@pytest.mark.slow
def test_a_loop_over_other_layouts_at_other_sizes(shapes: list[tuple[int, int]]) -> None:
    """Strides that were captured are expressions then: comparing them with those that came out asked a
    question after the guards were made (DM919)."""

    def swaps(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return while_loop(
            lambda i, a, b: i < 3, lambda i, a, b: (i + 1, b * 1, a + 1), (torch.tensor(0), x, x * 2)
        )

    def scans(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return scan(lambda c, row: (c + row, (c * row).t().contiguous().t()), x, torch.stack([x, x + 1]))

    loops, goes_through = dynamotor.compile(swaps), dynamotor.compile(scans)
    for shape in shapes:
        for x in (torch.randn(shape), torch.randn(shape[::-1]).t()):
            _, a, b = loops(x)
            torch.testing.assert_close((a, b), (x * 2 + 1, x + 2))
            carried, rows = goes_through(x)
            torch.testing.assert_close((carried, rows[1]), (x * 3 + 1, x * 2 * (x + 1)))
