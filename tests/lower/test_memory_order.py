"""Convolutions run channels-last; what addresses memory, or goes through it in its order, sees eager's strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dynamotor

ORDER = (2, 16, 64), (1024, 64, 1)
READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as_strided": lambda y: y.as_strided((2, 16, 4, 4), (1024, 64, 8, 1)) * 2,
    "as_strided behind a view": lambda y: y.flatten(1).as_strided((2, 10), (1024, 3)) * 2,
    "as_strided that is written": lambda y: y.as_strided(*ORDER).add_(1) + y.reshape(2, 16, 64),
    "as_strided_copy": lambda y: torch.as_strided_copy(y, *ORDER),
    "as_strided_scatter": lambda y: torch.as_strided_scatter(y, torch.ones(2, 3), (2, 3), (64, 1)),
    "_reshape_alias": lambda y: torch.ops.aten._reshape_alias(y, *ORDER) * 2,
    "rand_like": lambda y: torch.rand_like(y) + y,
    "randint_like": lambda y: torch.randint_like(y, 10) + y,
    "normal_": lambda y: y.normal_(),
    "exponential_": lambda y: y.exponential_(),
    "native_dropout": lambda y: torch.native_dropout(y, 0.5, True)[0],
}


def convolved(x: torch.Tensor) -> torch.Tensor:
    """Activations (2, 16, 8, 8) that a pass lays out channels-last."""
    return F.conv2d(x, torch.linspace(-0.05, 0.05, 16 * 8 * 9).reshape(16, 8, 3, 3))


@pytest.mark.parametrize("reader", READERS)
def test_readers_of_memory_see_the_strides_of_eager(reader: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return READERS[reader](convolved(x).relu() + 1)

    x = torch.randn(2, 8, 10, 10)
    torch.manual_seed(0)
    expected = function(x)
    compiled = dynamotor.compile(function, fullgraph=True, options={"fallback_random": True})
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.parametrize("view", [lambda y: y, lambda y: y[:, :4], lambda y: y.permute(0, 2, 3, 1)])
def test_custom_ops_see_the_strides_of_eager(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    seen: list[tuple[int, ...]] = []

    with torch.library._scoped_library("memory_order", "DEF") as library:
        library.define("look(Tensor x) -> Tensor")
        library.impl("look", lambda x: seen.append(x.stride()) or x * 2, "CompositeExplicitAutograd")
        library.impl("look", torch.empty_like, "Meta")

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.memory_order.look(view(convolved(x)))

        x = torch.randn(2, 8, 10, 10)
        torch.testing.assert_close(dynamotor.compile(function, fullgraph=True)(x), function(x))
    assert seen[0] == seen[1]


def test_a_backward_reads_saved_values_in_the_memory_order_of_eager() -> None:
    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(y)
            return y.sin()

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
            (y,) = ctx.saved_tensors
            turned = (2, 16, 8, 8), (1024, 1, 128, 16)
            return gradient * y.as_strided(*turned).cos() + gradient.as_strided(*turned)

    def gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = torch.linspace(-1, 1, 2 * 8 * 100).reshape(2, 8, 10, 10).requires_grad_()
        function(x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    def function(x: torch.Tensor) -> torch.Tensor:
        return Turned.apply(convolved(x)) * 2

    torch.testing.assert_close(gradient(dynamotor.compile(function, fullgraph=True)), gradient(function))


@pytest.mark.parametrize("cut", [lambda y: y, lambda y: y[:, :4]])
def test_one_program_for_all_sizes_sees_the_strides_of_eager(
    cut: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = cut(F.conv2d(x, torch.linspace(-0.05, 0.05, 16 * 8 * 9).reshape(16, 8, 3, 3), stride=2))
        return (torch.rand_like(y) + y).sin()

    compiled = dynamotor.compile(function, fullgraph=True, dynamic=True, options={"fallback_random": True})
    for size in (10, 12, 15):
        x = torch.randn(2, 8, size, size, requires_grad=True)
        torch.manual_seed(0)
        expected = function(x)
        torch.manual_seed(0)
        found = compiled(x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x)
        )
