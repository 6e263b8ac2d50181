"""Values that the forward saves: never more than eager, nothing that is cheap to compute again, no matrix product
twice.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from support import Compiled, graph_of

from dynamotor.autograd.joint import trace_joint
from dynamotor.autograd.maxflow import FlowNetwork
from dynamotor.autograd.partition import partition
from dynamotor.autograd.simplify import PASSES
from dynamotor.graph.pass_manager import run_passes
from dynamotor.graph.spec import TensorSpec


def split(fn, *inputs, static=()):
    joint = trace_joint(
        graph_of(fn, len(inputs), 1),
        [TensorSpec.of(t) for t in inputs],
        [t.requires_grad for t in inputs],
        list(range(len(inputs))),
        {},
    )
    run_passes(joint.gm, PASSES, stage="joint")
    return partition(joint, frozenset(static))


def test_a_pointwise_chain_saves_its_input_only():
    x = torch.randn(100, 100, requires_grad=True)
    chosen = split(lambda x: ((x.sin() * 2).exp().tanh() + 1,), x)
    assert chosen.saved_bytes == 0 and chosen.eager_bytes > 0


def test_results_of_an_input_that_may_change_are_saved_and_what_follows_runs_again():
    x, w = torch.randn(100, 100), torch.randn(100, 100, requires_grad=True)
    for static, saved in (((), 1), ((0,), 0)):
        chosen = split(lambda x, w: ((x * 2).exp().tanh() * w,), x, w, static=static)
        assert chosen.saved_bytes == saved * 40_000 and chosen.eager_bytes == 40_000


def test_matrix_products_run_once():
    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    compiled = Compiled(lambda x, w: (((x @ w).relu() @ w).tanh() @ w,), [x, w], 1)
    compiled.run(x, w)[0].sum().backward()
    assert compiled.ops("forward").count("aten.mm.default") == 3
    assert compiled.ops("backward").count("aten.mm.default") == 5


def test_dropout_mask_is_not_saved():
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    with_dropout = split(lambda x, w: (F.dropout(F.linear(x, w), 0.1).sum(),), x, w)
    assert with_dropout.saved_bytes == 8


def test_layer_norm_block_saves_no_more_than_eager():
    def f(x, w, g, b):
        h = x
        for _ in range(3):
            h = h + F.gelu(F.linear(F.layer_norm(h, (32,), g, b), w))
        return (h,)

    args = [
        torch.randn(4, 32),
        torch.randn(32, 32, requires_grad=True),
        torch.ones(32, requires_grad=True),
        torch.zeros(32, requires_grad=True),
    ]
    chosen = split(f, *args)
    assert 0 < chosen.saved_bytes <= chosen.eager_bytes


@pytest.mark.parametrize("seed", range(20))
def test_maximum_flow_is_the_minimum_cut(seed):
    rng = random.Random(seed)
    n = 6
    edges = [(a, b, rng.randint(1, 9)) for a in range(n) for b in range(n) if a != b and rng.random() < 0.5]
    net = FlowNetwork(n)
    for edge in edges:
        net.edge(*edge)
    flow = net.max_flow(0, n - 1)
    cuts = [
        sum(c for a, b, c in edges if side >> a & 1 and not side >> b & 1)
        for side in range(1 << n)
        if side & 1 and not side >> (n - 1) & 1
    ]
    assert flow == min(cuts)
    side = net.reachable(0)
    assert sum(c for a, b, c in edges if side[a] and not side[b]) == flow
