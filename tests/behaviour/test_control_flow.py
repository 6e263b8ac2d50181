"""Control flow over tensors: `cond`, `while_loop`, `scan`, `map`, `associative_scan`; `flex_attention`. One graph each,
and PyTorch's own errors.
"""

from __future__ import annotations

import pytest

from .harness import Theme

PRELUDE = r"""
import torch, torch.nn as nn, warnings
from torch._higher_order_ops import associative_scan, map as over, scan, while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
W = torch.randn(4, 4); lin = nn.Linear(4, 4).requires_grad_(False); slopes = torch.rand(2); doc = torch.arange(12) // 5
rows = torch.randn(2, 2, 12, 4)
with warnings.catch_warnings(record=True): flex_attention(rows, rows, rows)  # warns once that it is slow
causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 12, 12, device="cpu")
same = create_block_mask(lambda b, h, q, k: doc[q] == doc[k], None, None, 12, 12, device="cpu")
late = create_block_mask(lambda b, h, q, k: (q >= k) & (q > 3), None, None, 12, 12, device="cpu")
"""

TABLE = r"""
torch.cond(x.shape[0] > 2, lambda a: a + 1, lambda a: a - 1, (x,)), torch.cond(True, lambda: x * 2, lambda: x, ())

    one = torch.cond(x.sum() > 0, lambda a: a.sin() * 2, lambda a: a.cos() @ W, (x,))
    two = torch.cond(one.sum() < 0, lambda: x.sin() * 2, lambda: lin(x))
    return one + two

    r = torch.cond(x[0, 0] > 0, lambda a, b: {"u": a + b, "v": (a * 2,)}, lambda a, b: {"u": a - b, "v": (a * 3,)}, (x, W[0]))
    return r["u"] + r["v"][0]

    return torch.cond(x.sum() > 0, lambda a, b: a + b, lambda a, b: a - b, (x, x[0])) #3

    def inner(a): return torch.cond(a[0, 0] > 0, lambda b: b + 1, lambda b: b * 2, (a,))
    return torch.cond(x.sum() > 0, inner, lambda a: a.exp(), (x,))

    return torch.cond(x.sum() > 0, lambda a: a.sum(), lambda a: a.sum(0), (x,)) #3

    S.append(torch.cond(x.sum() > 0, lambda a: S.append(1) or a + 1, lambda a: a + 2, (x,)).shape)
    return S #3

    n, a = while_loop(lambda i, a: i < 5, lambda i, a: (i + 1, a * 1.1 + W[:3]), (torch.tensor(0), x))
    return n, a * 2

    return while_loop(lambda i, a: i < 0, lambda i, a: (i + 1, a * 2), (torch.tensor(0), x))

    return while_loop(lambda i, a: (i < 3) & (a["s"].sum() < 9), lambda i, a: (i + 1, {"s": a["s"].exp()}), (torch.tensor(0), {"s": x}))

    return while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, a[:1]), (torch.tensor(0), x)) #3

    return scan(lambda c, a: (c + a.sin(), (c * a).tanh()), x[0] * 0, x)

    return scan(lambda c, a: (c + a["k"], {"o": c * a["k"]}), torch.zeros(3), {"k": x}, dim=1, reverse=True)

    return scan(lambda c, a: ((c @ lin.weight + a).tanh(), c * 1), torch.zeros(4), x)

    return scan(lambda c, a: (c + a.sum(), c), x[0], x) #3

    return over(lambda a, b: {"p": a * b, "q": (a + lin.bias).sum()}, x, W[0])

    return over(lambda a: a.sum(), x[:0]) #3

    return associative_scan(lambda a, b: a + b, x, dim=0, combine_mode="generic"), associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (x, x + 1), dim=1, reverse=True, combine_mode="generic")

    return associative_scan(lambda a, b: a + b, x, dim=0) #3

flex_attention(rows, rows * 2, rows + 1), flex_attention(rows, rows, rows, score_mod=lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), block_mask=causal), flex_attention(rows, rows, rows, block_mask=late, return_lse=True), flex_attention(rows, rows[:, :1], rows[:, 1:], block_mask=same, enable_gqa=True, scale=0.3), flex_attention(rows[:, :, :8], rows, rows, score_mod=lambda s, b, h, q, k: torch.where(q >= k, torch.tanh(s), -float("inf"))), flex_attention(rows.double(), rows.double(), rows.double())
flex_attention(rows, rows[:, :1], rows), flex_attention(rows[:, :, :8], rows, rows, block_mask=causal), flex_attention(x, x, x) #3
"""

theme = Theme(PRELUDE, TABLE)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("at", range(len(theme.cases)))
def test_as_in_eager(at: int) -> None:
    theme.check(at)
