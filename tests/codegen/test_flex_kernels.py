"""`flex_attention` in a GPU's kernels (in Triton's interpreter) gives the results of the matrix of scores: outputs, sums,
gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dynamotor
from bench.triton_interpret import available
from dynamotor.base.config import config
from dynamotor.base.events import counters
from dynamotor.codegen.flex_attention import Kernels

pytestmark = pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1")

slopes = torch.rand(4)
documents = torch.randint(0, 3, (2, 128)).sort().values
bias = torch.randn(300)

SCORES: dict[str, Any] = {
    "none": None,
    "same": lambda s, b, h, i, j: s,
    "alibi": lambda s, b, h, i, j: s + slopes[h] * (j - i),
    "softcap": lambda s, b, h, i, j: 2 * torch.tanh(s / 2),
    "relative": lambda s, b, h, i, j: s + bias[i - j + 128] * 0.5,
    "relative from the end": lambda s, b, h, i, j: s * slopes[h - 1] + bias[i - j],
    "parts of places": lambda s, b, h, i, j: (
        s + bias[(i // 2) * 2 + j % 100] + slopes[torch.maximum(h - 1, h * 0)]
    ),
    "causal": lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
    "branches": lambda s, b, h, i, j: torch.where(
        (i - j < 8) & (i >= j) | (j < 4), (s.abs() + 0.1).sqrt() + (i % 3 == 0), torch.exp(-s) * 0.2
    ),
    "products of places": lambda s, b, h, i, j: s + (i * j % 7) * 0.1,
}
MASKS: dict[str, Any] = {
    "all": None,
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j < 16),
    "documents": lambda b, h, i, j: documents[b, i] == documents[b, j],
    "by head": lambda b, h, i, j: (i >= j) | (j < (h + 1) * 3),
    "rows of nothing": lambda b, h, i, j: (i > 50) & (i >= j),
}


def attention(
    target: str, score: Any, block: Any, given: list[torch.Tensor], grads: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The output, the sums and the gradients."""

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flex_attention(
            q, k, v, score_mod=score, block_mask=block, enable_gqa=q.shape[1] != k.shape[1], return_lse=True
        )

    inputs = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in given]
    with config.patch(**({"target": target} if target else {})):
        out, sums = dynamotor.compile(f, backend="native" if target else "eager")(*inputs)
        finite = torch.where(torch.isfinite(sums), sums * grads[1], 0.0)
        ((out * grads[0]).float().sum() + finite.sum()).backward()
    return [out.detach(), sums.detach(), *[t.grad for t in inputs if t.grad is not None]]


CASES = [
    # score, mask, queries, keys, width, width of values, heads of keys, type, block
    ("none", "all", 1, 70, 16, 16, 4, torch.float32, 0),
    ("same", "causal", 100, 100, 20, 24, 2, torch.float32, (16, 32)),
    ("alibi", "by head", 64, 70, 16, 16, 1, torch.bfloat16, (128, 128)),
    ("softcap", "window", 33, 128, 32, 16, 4, torch.float16, (32, 16)),
    ("relative", "documents", 100, 100, 16, 16, 2, torch.float32, (32, 64)),
    ("relative from the end", "all", 100, 100, 16, 16, 4, torch.float32, 0),
    ("parts of places", "documents", 100, 100, 16, 16, 4, torch.float32, (32, 64)),
    ("causal", "all", 70, 16, 16, 16, 4, torch.float32, 0),
    ("branches", "rows of nothing", 128, 100, 16, 20, 4, torch.float32, (32, 32)),
    ("products of places", "causal", 40, 40, 16, 16, 4, torch.float32, (128, 128)),
]


@pytest.mark.sweep(12)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}, {c[1]}")
def test_kernels_give_what_the_matrix_gives(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    score, mask, length, width, e, f, heads, dtype, size = case
    ran: list[str] = []
    run = Kernels.__call__
    monkeypatch.setattr(
        Kernels, "__call__", lambda self, what, *tensors: (ran.append(what), run(self, what, *tensors))
    )
    shapes = [(2, length, 4, e), (2, width, heads, e), (2, width, heads, f)]
    given = [torch.randn(shape, dtype=dtype).transpose(1, 2) for shape in shapes]
    grads = [torch.randn(2, 4, length, f, dtype=dtype), torch.randn(2, 4, length)]
    block = MASKS[mask] and create_block_mask(MASKS[mask], 2, 4, length, width, device="cpu", BLOCK_SIZE=size)
    wanted = attention("", SCORES[score], block, given, grads)
    assert not ran
    found = attention("triton", SCORES[score], block, given, grads)
    assert ran[0] in ("forward", "partial") and ran[1:] == ["delta", "queries", "keys"]
    bound = 3e-5 if dtype == torch.float32 else 4e-2
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            a.float(), b.float(), rtol=bound, atol=bound * float(b.nan_to_num(0, 0, 0).abs().max())
        )


def test_the_numbers_of_blocks_may_be_apart_in_memory() -> None:
    given = [torch.randn(1, 4, 100, 16) for _ in range(3)]
    grads = [torch.randn(1, 4, 100, 16), torch.zeros(1, 4, 100)]
    block = create_block_mask(MASKS["causal"], 1, 1, 100, 100, device="cpu", BLOCK_SIZE=(32, 32))
    names = [f"{name}_indices" for name in ("kv", "full_kv", "q", "full_q")]
    for name in names:
        indices = getattr(block, name)
        setattr(block, name, indices.mT.contiguous().mT)
        assert getattr(block, name).stride(-1) != 1
    wanted = attention("", None, block, given, grads)
    for a, b in zip(attention("triton", None, block, given, grads), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-5, atol=3e-5 * float(b.abs().max()))


@pytest.mark.slow
def test_what_has_no_kernels_is_a_matrix() -> None:
    learnt = torch.randn(4, requires_grad=True)
    unknown = {
        "a gradient of a tensor that it reads": lambda s, b, h, i, j: s + learnt[h],
        "an op without a form": lambda s, b, h, i, j: s + torch.special.i0(s),
    }
    given = [torch.randn(1, 4, 20, 16) for _ in range(3)]
    grads = [torch.randn(1, 4, 20, 16), torch.zeros(1, 4, 20)]
    for score in unknown.values():
        wanted = attention("", score, None, given, grads)
        theirs, learnt.grad = learnt.grad, None
        for a, b in zip(attention("triton", score, None, given, grads), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        if theirs is not None:
            torch.testing.assert_close(learnt.grad, theirs, rtol=1e-4, atol=1e-5)
        learnt.grad = None
    assert counters["fallback"]["flex_attention"]


def test_what_the_function_reads_may_change() -> None:
    table = torch.zeros(4)

    def f(q: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + table[h] * j)  # type: ignore[return-value]

    q = torch.randn(1, 4, 20, 16)
    with config.patch(target="triton"):
        call = dynamotor.compile(f)
        for slope in (0.0, 0.5, -1.0):
            table.fill_(slope)
            torch.testing.assert_close(call(q), f(q), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_second_length_has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int]] = []
    run = Kernels.__call__
    monkeypatch.setattr(
        Kernels,
        "__call__",
        lambda self, what, *tensors: (ran.append((what, tensors[0].shape[2])), run(self, what, *tensors)),
    )

    def f(q: torch.Tensor) -> torch.Tensor:
        n = q.shape[2]
        block = create_block_mask(MASKS["causal"], None, None, n, n, device="cpu", BLOCK_SIZE=16)
        return flex_attention(q, q, q, block_mask=block)  # type: ignore[return-value]

    with config.patch(target="triton"):
        call = dynamotor.compile(f)
        for n in (32, 48, 64, 48, 80, 112):  # the last two share kernels
            q = torch.randn(1, 2, n, 16)
            torch.testing.assert_close(call(q), f(q), rtol=1e-4, atol=1e-5)
    assert [length for _, length in ran] == [32, 48, 64, 48, 80, 112]
