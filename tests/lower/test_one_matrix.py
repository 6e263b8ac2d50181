"""Batched products with one matrix for all batches are one product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dynamotor
from dynamotor.base.events import collect

X, W, BATCH = torch.randn(3, 7, 16), torch.randn(16, 24), torch.randn(1, 16, 24)
CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], bool]] = {
    "the last row of each": (lambda x, w: x[:, -1:] @ w, (X, W), True),
    "the last row of one": (lambda x, w: x[:1, -1:] @ w, (X, W), True),
    "rows with gaps of one": (lambda x, w: x[:1, ::2] @ w, (X, W), True),
    "one batch": (lambda x, w: torch.bmm(x[:1], w), (X, BATCH), True),
    "a transposed matrix": (lambda x, w: x[:, -1:] @ w.t(), (X, W.t().contiguous()), True),
    "several rows of each": (lambda x, w: torch.bmm(x, w.expand(3, 16, 24)), (X, W), False),
    "a matrix of each": (lambda x, w: torch.bmm(x[:, :1], w.expand(3, 16, 24) * 2), (X, W), False),
    "vectors as matrices": (lambda x, w: torch.bmm(x, w[:, :, None].expand(3, 16, 2)), (X, X[:, 0]), False),
}


@pytest.mark.parametrize("what", CASES)
def test_one_product_has_eagers_values(what: str) -> None:
    function, args, rewritten = CASES[what]
    with collect("pass") as passes:
        result = dynamotor.compile(function, dynamic=False)(*args)
    torch.testing.assert_close(result, function(*args))
    assert result.stride() == function(*args).stride()
    (texts,) = [event.data for event in passes if event.data["name"] == "multiply by one matrix"]
    assert ("aten.bmm" not in texts["after"]) == rewritten


def test_rows_that_differ_between_calls_and_gradients() -> None:
    def last(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x[:, -1:] @ w

    compiled = dynamotor.compile(last, dynamic=True)
    for batch, length in ((1, 5), (4, 3), (2, 1), (1, 9)):
        ours = [t.clone().requires_grad_() for t in (torch.randn(batch, length, 16), W)]
        theirs = [t.detach().clone().requires_grad_() for t in ours]
        torch.testing.assert_close(compiled(*ours), expected := last(*theirs))
        compiled(*ours).sum().backward()
        expected.sum().backward()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


def test_the_last_row_reads_weights_in_bytes_as_they_are() -> None:
    weights = torch.randint(-128, 127, (512, 256), dtype=torch.int8)
    x = torch.randn(1, 5, 256)

    def head(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x[:, -1:] @ w.to(x.dtype).t()

    with torch.no_grad(), collect("fallback") as fallbacks:
        torch.testing.assert_close(
            dynamotor.compile(head)(x, weights), head(x, weights), rtol=1e-4, atol=1e-3
        )
    assert not fallbacks
