"""Attention with masks that the graph computes: which kernel each formula chooses, and eager's results."""

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters
from dynamotor.graph.attention_masks import simplify_attention
from dynamotor.graph.index_formulas import Position, affine, at_least, both, either, is_zero, negated

F = torch.nn.functional
B, H, Q, K, D = 2, 4, 12, 12, 8


def tensors(rows=Q, columns=K, heads=H, dtype=torch.float64, grad=False):
    torch.manual_seed(rows + columns)
    shapes = ((B, H, rows, D), (B, heads, columns, D), (B, heads, columns, D))
    return [torch.randn(s, dtype=dtype, requires_grad=grad) for s in shapes]


def places(rows, columns):
    return torch.arange(rows)[:, None], torch.arange(columns)[None, :]


def additive(mask, hidden=-torch.inf, dtype=torch.float64):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)


def compiled(f, *args, dynamic=None, **options):
    counters["attention masks"].clear()
    with dynamotor.config.patch(check=True):
        got = dynamotor.compile(f, fullgraph=True, dynamic=dynamic, **options)(*args)
    return got, dict(counters["attention masks"])


MASKS = {
    "causal": (lambda q, k: k <= q, "causal"),
    "causal, the other way": (lambda q, k: ~(q < k), "causal"),
    "causal by a difference": (lambda q, k: q - k > -1, "causal"),
    "causal of doubles": (lambda q, k: 2 * k <= 2 * q + 1, "causal"),
    "strictly causal": (lambda q, k: k < q, "kept"),
    "causal but for the first key": (lambda q, k: (k <= q) & (k > 0), "kept"),
    "window beyond all keys": (lambda q, k: (k <= q) & (q - k < 64), "causal"),
    "window": (lambda q, k: (k <= q) & (q - k < 5), "kept"),
    "both sides": (lambda q, k: (q - k).abs() <= 3, "kept"),
    "both sides, wide": (lambda q, k: (q - k).abs() <= 30, "full"),
    "one chunk": (lambda q, k: (k <= q) & (q // 16 == k // 16), "causal"),
    "chunks": (lambda q, k: (k <= q) & (q // 4 == k // 4), "kept"),
    "prefix": (lambda q, k: (k <= q) | (k < 3), "kept"),
    "prefix of nothing": (lambda q, k: (k <= q) | (k < 0), "causal"),
    "all": (lambda q, k: (q >= 0) & (k < 100), "full"),
    "equal or before": (lambda q, k: (k == q) | (k < q), "kept"),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_formula_of_a_mask_chooses_the_kernel(name):
    rule, kind = MASKS[name]

    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=rule(*places(Q, K)))

    args = tensors()
    got, kinds = compiled(f, *args)
    torch.testing.assert_close(got, f(*args), equal_nan=True)
    assert kinds == {kind: 1}


WAYS = {
    "tril": lambda: torch.ones(Q, K, dtype=torch.bool).tril(),
    "triu": lambda: ~torch.ones(Q, K).triu(diagonal=1).bool(),
    "infinite": lambda: torch.full((Q, K), -torch.inf, dtype=torch.float64).triu(1),
    "least": lambda: additive(places(Q, K)[1] <= places(Q, K)[0], torch.finfo(torch.float64).min),
    "filled": lambda: additive(places(Q, K)[1] <= places(Q, K)[0]),
    "product": lambda: (1.0 - (places(Q, K)[1] <= places(Q, K)[0]).double()) * torch.finfo(torch.float64).min,
    "where": lambda: torch.where(
        places(Q, K)[1] <= places(Q, K)[0], torch.zeros((), dtype=torch.float64), -1e300
    ),
    "views": lambda: (
        torch.arange(Q * K).view(Q, K) % K <= torch.arange(Q).repeat_interleave(K).reshape(Q, K)
    )[None, None].expand(B, 1, Q, K),
    "gathered": lambda: torch.arange(K)[places(Q, K)[1]] <= torch.arange(2 * Q)[places(Q, K)[0]],
    "of rows": lambda: torch.arange(K).repeat(B, 1)[:, None, None, :] <= torch.arange(Q).view(1, 1, Q, 1),
    "documents": lambda: (
        (
            torch.diff(torch.arange(Q)[None], prepend=torch.full((1, 1), -1), dim=-1)
            .ne(1)
            .cumsum(-1)[:, :, None]
            == torch.zeros(1, 1, K, dtype=torch.int64)
        )
        & (places(Q, K)[1] <= places(Q, K)[0])
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_writing_a_causal_mask(way):
    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=WAYS[way]())

    args = tensors()
    got, kinds = compiled(f, *args)
    torch.testing.assert_close(got, f(*args))
    assert kinds == {"causal": 1}


def test_a_finite_bias_and_a_number_that_weighs_something_stay():
    def bias(q, k, v):
        places_of = places(Q, K)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(places_of[0] - places_of[1]).double() * 0.1)

    def small(q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=additive(places(Q, K)[1] <= places(Q, K)[0], -5.0)
        )

    for f in (bias, small):
        args = tensors()
        got, kinds = compiled(f, *args)
        torch.testing.assert_close(got, f(*args))
        assert kinds == {}


def test_the_least_number_hides_nothing_of_rows_that_see_no_key():
    def f(q, k, v):
        seen = places(Q, K)[1] < places(Q, K)[0]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=additive(seen, torch.finfo(torch.float64).min)
        )

    args = tensors()
    got, kinds = compiled(f, *args)
    torch.testing.assert_close(got, f(*args))
    assert kinds == {}


@pytest.mark.parametrize(("rows", "columns"), [(5, 12), (12, 5), (1, 12), (1, 1)])
def test_causal_masks_count_from_the_first_key(rows, columns):
    def f(q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=places(rows, columns)[1] <= places(rows, columns)[0]
        )

    def behind(q, k, v):
        q_at, k_at = places(rows, columns)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=k_at <= q_at + columns - rows)

    for g in (f, behind):
        args = tensors(rows, columns)
        got, _ = compiled(g, *args)
        torch.testing.assert_close(got, g(*args), equal_nan=True)


def test_a_mask_that_is_written_into_stays():
    def f(q, k, v):
        mask = torch.ones(Q, K, dtype=torch.bool).tril()
        mask[:, 0] = False
        mask[0, 0] = True
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def part(q, k, v):
        row = torch.arange(K)
        mask = row[None, :] <= torch.arange(Q)[:, None]
        row.zero_()
        mask.logical_not_()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask | (row[None, :] == 1))

    for g in (f, part):
        args = tensors()
        got, kinds = compiled(g, *args)
        torch.testing.assert_close(got, g(*args))
        assert "causal" not in kinds and "full" not in kinds


def test_padding_and_documents_are_data():
    def padding(q, k, v, keep):
        mask = (places(Q, K)[1] <= places(Q, K)[0]) & keep[:, None, None, :].bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def documents(q, k, v, ids):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=ids[:, None, :, None] == ids[:, None, None, :]
        )

    keep = torch.ones(B, K, dtype=torch.int64)
    keep[1, :4] = 0
    for f, data in ((padding, keep), (documents, torch.arange(K).div(5, rounding_mode="floor").repeat(B, 1))):
        args = (*tensors(), data)
        got, kinds = compiled(f, *args)
        torch.testing.assert_close(got, f(*args), equal_nan=True)
        assert kinds == {"kept": 1}


REPEATS = {
    "expand": lambda x: x[:, :, None].expand(B, 2, 2, x.shape[2], D).reshape(B, 4, x.shape[2], D),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "flatten": lambda x: x.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2),
}


@pytest.mark.parametrize("way", REPEATS)
@pytest.mark.parametrize("grad", [False, True])
def test_repeated_heads_become_groups(way, grad):
    seen = []

    def f(q, k, v):
        repeat = REPEATS[way]
        return F.scaled_dot_product_attention(
            q, repeat(k * 2), repeat(v), attn_mask=places(Q, K)[1] <= places(Q, K)[0]
        )

    def rewritten_attention(gm, inputs):
        simplify_attention(gm, inputs)
        seen.extend(n.kwargs for n in gm.graph.nodes if "scaled_dot" in str(n.target))
        return gm.forward

    args = tensors(heads=2, grad=grad)
    want = f(*args)
    torch.testing.assert_close(dynamotor.compile(f, backend=rewritten_attention)(*args), want)
    assert [(k["is_causal"], k["enable_gqa"]) for k in seen] == [(True, True)]
    got = dynamotor.compile(f)(*args)
    torch.testing.assert_close(got, want)
    if grad:
        other = torch.autograd.grad(want.square().sum(), args)
        torch.testing.assert_close(torch.autograd.grad(got.square().sum(), args), other)


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float64).min, -1e30])
def test_gradients_of_one_head_of_keys_where_rows_see_no_key(hidden):
    """Eager broadcasts the head and takes plain products, whose gradients there are others than its kernel's."""

    def f(q, kv, bias):
        k, v = (x[:, :, None].transpose(1, 2).reshape(B, 1, K, D) for x in kv.split(D, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    q, kv = tensors(grad=True)[0], torch.randn(B, K, 2 * D, dtype=torch.float64, requires_grad=True)
    at, keys = places(Q, K)
    bias = additive((keys <= at) & (keys >= torch.tensor([3, 0])[:, None, None, None]), hidden)
    got, want = (run(q, kv, bias) for run in (dynamotor.compile(f), f))
    torch.testing.assert_close(got, want)
    other = torch.autograd.grad(want.square().sum(), (q, kv))
    torch.testing.assert_close(torch.autograd.grad(got.square().sum(), (q, kv)), other)


def test_heads_in_another_order_are_no_groups():
    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))

    args = tensors(heads=2)
    torch.testing.assert_close(compiled(f, *args)[0], f(*args))


def test_lengths_that_differ_and_autocast():
    def f(q, k, v):
        n = q.shape[2]
        mask = torch.arange(n)[None, :] <= torch.arange(n)[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None].expand(q.shape[0], 1, n, n))

    counters["attention masks"].clear()
    g = dynamotor.compile(f, dynamic=True)
    for n in (9, 14, 5):
        args = tensors(n, n)
        torch.testing.assert_close(g(*args), f(*args))
    assert dict(counters["attention masks"]) == {"causal": 1}
    with torch.autocast("cpu", torch.bfloat16):
        args = tensors(dtype=torch.float32)
        torch.testing.assert_close(compiled(f, *args)[0], f(*args), atol=2e-2, rtol=2e-2)


def test_conditions_are_decided_by_intervals():
    q, k = (affine(Position(name, 8)) for name in "qk")
    assert at_least(q) is True and at_least(-q - 1) is False and is_zero(q + 1) is False
    assert at_least((q - k).times(3) + 2) == at_least(q - k)
    assert is_zero((q - k).times(2) + 1) is False
    assert both(at_least(q - k), at_least(q - k + 3)) == at_least(q - k)
    assert either(at_least(q - k), at_least(q - k + 3)) == at_least(q - k + 3)
    assert both(at_least(q - k), negated(at_least(q - k))) is False
    assert q.divided(8)[0] == affine(0) and (q.times(8) + k).divided(8) == (q, k)
