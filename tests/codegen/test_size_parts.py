"""Graphs in which few calls see sizes that change: the others are parts of fixed sizes, recorded once."""

from __future__ import annotations

import pytest
import torch

import dynamotor
from dynamotor import backends
from dynamotor.codegen import compile_aten
from dynamotor.codegen.size_parts import split
from dynamotor.graph.size_nodes import is_size


@pytest.fixture
def parts(monkeypatch):
    """The parts of each graph with changing sizes that was compiled, as (fixed, targets of its calls)."""
    found = []

    def compiled(gm, info, cuda_graphs=False):
        parts = split(gm, info)
        if parts is None:
            if any(is_size(node) for node in gm.graph.nodes):
                found.append(None)
            return compile_aten(gm, info)
        row = []
        for part, fixed, _ in parts.parts:
            nodes = list(part.gm.graph.nodes)
            assert not (fixed and any(map(is_size, nodes)))
            row.append((fixed, [str(n.target) for n in nodes if n.op == "call_function" and not is_size(n)]))
        found.append(row)
        return parts.around(lambda gm, info, fixed: compile_aten(gm, info))

    monkeypatch.setattr(backends, "compile_aten", compiled)
    return found


def deep(x, w):
    for _ in range(12):
        x = torch.tanh(x @ w) * 0.5 + x
    return x


def step(ids, cache, table, w, ends):
    hidden = deep(table[ids[:, -1:]], w)
    cache.index_copy_(1, torch.tensor([1]), hidden)
    token = (hidden @ table.t() + cache.sum()).argmax(-1)
    ids = torch.cat([ids, token], 1)
    done = torch.isin(ids[:, -1], ends)
    return ids, done, token.float() / ids.shape[1]


def run(function, others, lengths=(5, 6, 7, 9), batch=2):
    torch.manual_seed(0)
    compiled = dynamotor.compile(function, mode="reduce-overhead")  # sizes that stay are numbers
    ours, theirs = [o.clone() for o in others], [o.clone() for o in others]
    for n in lengths:
        ids = torch.randint(0, 10, (batch, n))
        got, want = compiled(ids, *ours), function(ids, *theirs)
        for a, b in zip([*got, *ours], [*want, *theirs], strict=True):
            torch.testing.assert_close(a, b)
            assert a.shape == b.shape and a.stride() == b.stride()


def test_a_decoding_step_is_one_part_of_fixed_sizes_between_two_small_ones(parts):
    run(step, [torch.zeros(2, 4, 8), torch.randn(10, 8), torch.randn(8, 8), torch.tensor([3, 4])])
    (row,) = parts
    assert [fixed for fixed, _ in row] == [False, True, False]
    assert row[0][1] == ["aten.slice.Tensor", "aten.clone.default"]
    assert len(row[1][1]) > 40 and "aten.copy_.default" in row[1][1]
    assert sorted(row[2][1]) == ["aten.cat.default", "aten.div.Tensor"]


def test_the_last_element_of_a_single_row_is_not_copied(parts):
    run(step, [torch.zeros(1, 4, 8), torch.randn(10, 8), torch.randn(8, 8), torch.tensor([3])], batch=1)
    assert parts[0][0][1] == ["aten.slice.Tensor", "aten.view.default"]


def laid_out_alike(ids, w):
    last = ids[:, -1:]
    ids = torch.cat([ids, deep(deep(w[last], w), w).argmax(-1)], 1)
    return ids, last.clone(), last.float(), torch.zeros_like(last), last * 2, last.contiguous()


@pytest.mark.parametrize("batch", [1, 2])
def test_results_that_take_the_strides_of_a_growing_row_keep_them(parts, batch):
    run(laid_out_alike, [torch.randn(10, 10)], batch=batch)
    assert parts[0] is not None


def penalised(ids, table, w):
    hidden = deep(table[ids[:, -1]], w)
    scores = hidden @ table.t()
    seen = torch.gather(scores, 1, ids)
    scores = scores.scatter(1, ids, torch.where(seen < 0, seen * 2, seen / 2))
    token = deep(scores.softmax(-1), torch.ones(10, 10)).argmax(-1)
    return torch.cat([ids, token[:, None]], 1), scores


def test_a_penalty_on_seen_tokens_is_between_two_parts_of_fixed_sizes(parts):
    run(penalised, [torch.randn(10, 8), torch.randn(8, 8)])
    assert [fixed for fixed, _ in parts[0]] == [False, True, False, True, False]


def read_then_written(ids, cache, w):
    hidden = deep(cache, w)
    before = ids.float().mean() * cache.sum()  # reads the value before the write
    cache.copy_(hidden)
    return ids + before.long(), hidden


def test_a_write_waits_for_calls_on_changing_sizes_that_read_the_value_before(parts):
    run(read_then_written, [torch.randn(8, 8), torch.randn(8, 8)])


def test_a_graph_of_changing_sizes_is_left_whole(parts):
    run(lambda ids, w: (deep(w[ids], w),), [torch.randn(10, 10)])
    assert parts == [None]
