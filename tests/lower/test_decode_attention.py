"""Attention of a few queries over many keys: which calls become `dynamotor::attend`, and whether it is right."""

import math
import operator

import pytest
import torch
import torch.nn.functional as F

import dynamotor
from dynamotor import config
from dynamotor.graph.spec import GraphInfo, TensorSpec
from dynamotor.lower.decode_attention import attend_few_queries

attention = F.scaled_dot_product_attention
BATCH, HEADS = 2, 3


def tensors(rows, length, widths=(64, 64), dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    query = random(BATCH, rows, HEADS, widths[0]).transpose(1, 2)
    return (
        query,
        random(BATCH, HEADS, length, widths[0]),
        random(BATCH, length, HEADS, widths[1]).transpose(1, 2),
    )


def mask_of(kind, rows, length, dtype=torch.float32):
    """A mask; "nothing": no key counts for the first row."""
    generator = torch.Generator().manual_seed(1)
    if kind == "booleans":
        return torch.rand(BATCH, 1, rows, length, generator=generator) > 0.4
    if kind == "numbers":
        return torch.randn(1, HEADS, rows, length, generator=generator).to(dtype)
    if kind == "filled":
        return (torch.arange(length) <= length // 3)[None, None, None]
    if kind == "nothing":
        return torch.arange(rows)[:, None].expand(BATCH, 1, rows, length) > 0
    return None


def exact(query, key, value, mask):
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    return attention(query.double(), key.double(), value.double(), mask)


def is_own(function, *inputs):
    return "attend" in str(dynamotor.lower(function, *inputs).call_program)


@pytest.mark.parametrize("kind", ["", "booleans", "numbers", "filled", "nothing"])
@pytest.mark.parametrize("rows, length", [(1, 1), (1, 700), (4, 63), (7, 130)])
def test_attention_of_few_rows_is_right(rows, length, kind):
    inputs = *tensors(rows, length), mask_of(kind, rows, length)
    compiled = dynamotor.compile(attention)
    with torch.no_grad():
        found, eager = compiled(*inputs), attention(*inputs)
    torch.testing.assert_close(found.double(), exact(*inputs), rtol=1e-5, atol=1e-5)
    assert found.stride() == eager.stride()
    with torch.no_grad():
        assert is_own(attention, *inputs)


@pytest.mark.parametrize("widths", [(128, 128), (40, 24), (8, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_halves_and_heads_of_any_width_are_right(dtype, widths):
    inputs = *tensors(3, 150, widths, dtype), mask_of("numbers", 3, 150, dtype)
    with torch.no_grad():
        found = dynamotor.compile(attention)(*inputs).double()
        error, theirs = ((x.double() - exact(*inputs)).abs().max() for x in (found, attention(*inputs)))
    assert error <= 2 * theirs + 1e-6


def test_sizes_may_differ_between_calls():
    compiled = dynamotor.compile(attention, dynamic=True)
    with torch.no_grad():
        for length in (5, 64, 333):
            inputs = *tensors(2, length), mask_of("booleans", 2, length)
            torch.testing.assert_close(compiled(*inputs).double(), exact(*inputs), rtol=1e-5, atol=1e-5)


def test_views_and_offsets_of_a_cache_are_read_where_they_are():
    query, key, value = tensors(1, 200)

    def last(query, cache):
        return attention(query[:, 1:2], cache[0][:, 1:2, 50:], cache[1][:, 1:2, 50:], scale=0.3)

    cache = torch.stack([key, value])
    with torch.no_grad():
        torch.testing.assert_close(dynamotor.compile(last)(query, cache), last(query, cache))


def test_keys_that_the_mask_excludes_are_not_read():
    query, key, value = tensors(1, 300)
    key[:, :, 128:], value[:, :, 128:] = math.nan, math.nan
    mask = (torch.arange(300) < 120)[None, None, None]
    with torch.no_grad(), config.patch(check=False):  # eager's result is NaN
        found = dynamotor.compile(attention)(query, key, value, mask)
    torch.testing.assert_close(found, attention(query, key[:, :, :120], value[:, :, :120]))


def test_a_written_cache_is_read_after_the_write():
    query, key, value = tensors(1, 100)

    def step(query, key, value, new, position):
        key.index_copy_(2, position, new)
        value.index_copy_(2, position, new)
        return attention(query, key, value, (torch.arange(100) <= position)[None, None, None])

    new, position = torch.randn(BATCH, HEADS, 1, 64), torch.tensor([40])
    want = step(query, key.clone(), value.clone(), new, position)
    with torch.no_grad():
        torch.testing.assert_close(dynamotor.compile(step)(query, key, value, new, position), want)
    assert torch.equal(key[:, :, 40:41], new)


@pytest.mark.parametrize("case", ["many rows", "causal", "gradients", "exact", "float64"])
def test_other_attention_stays_aten_s(case):
    query, key, value = tensors(20 if case == "many rows" else 4, 64)
    if case == "float64":
        query, key, value = query.double(), key.double(), value.double()
    if case == "gradients":
        query.requires_grad_()

    def f(query, key, value):
        return attention(query, key, value, is_causal=case == "causal")

    with config.patch(exact=case == "exact"), torch.set_grad_enabled(case == "gradients"):
        assert not is_own(f, query, key, value)
        torch.testing.assert_close(dynamotor.compile(f)(query, key, value), f(query, key, value))


@pytest.mark.parametrize(
    "heads, rows, own", [(6, 1, True), (3, 1, True), (3, 4, True), (6, 2, False), (4, 1, False)]
)
@pytest.mark.parametrize("op", ["cudnn", "efficient", "flash"])
def test_kernels_of_gpus_become_attend_with_grouped_heads_too(op, heads, rows, own):
    """As cuDNN's kernel is called: a head of keys serves several heads of queries."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, rows, heads, 16, generator=generator).transpose(1, 2)
    key, value = (torch.randn(BATCH, 3, 40, 16, generator=generator) for _ in range(2))
    bias = torch.randn(1, 1, rows, 40, generator=generator)
    given = {"query": query, "key": key, "value": value, **({} if op == "flash" else {"bias": bias})}
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in given]
    for node, tensor in zip(nodes, given.values(), strict=True):
        node.meta["val"] = TensorSpec.of(tensor)
    target = getattr(torch.ops.aten, f"_scaled_dot_product_{op}_attention").default
    call = graph.call_function(target, (*nodes, *([] if op == "flash" else [False])), {"scale": 0.5})
    result = graph.call_function(operator.getitem, (call, 0))
    result.meta["val"] = TensorSpec.of(query)
    graph.output((result,))
    gm = torch.fx.GraphModule({}, graph)
    attend_few_queries(gm, GraphInfo("inference", "graph"))
    if op == "flash" and (heads, rows) == (3, 1):
        own = False  # PyTorch's kernel shares a head's keys itself
    assert (target not in {node.target for node in gm.graph.nodes}) is own
    if own:
        gm.recompile()
        (found,) = gm(*given.values())
        want = attention(query, key, value, given.get("bias"), scale=0.5, enable_gqa=True)
        torch.testing.assert_close(found, want)
        assert found.stride()[:2] == query.stride()[:2]
