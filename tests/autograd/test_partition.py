"""Values that the forward saves: never more than eager, nothing that is cheap to compute again, no matrix product
twice.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from support import Compiled, check, graph_of

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


def _gated(x, gate, up, down):
    return (F.silu(x @ gate) * (x @ up) @ down,)


def _weights(width, inner):
    sizes = [(64, width), (width, inner), (width, inner), (inner, width)]
    return [torch.randn(size, requires_grad=True) for size in sizes]


def test_a_product_that_a_kernel_of_the_backward_can_make_beside_its_gradients_is_not_saved():
    large, small = split(_gated, *_weights(16, 4096)), split(_gated, *_weights(16, 256))
    assert large.saved_bytes == 2 * 64 * 4096 * 4  # gate and value, and not their product
    assert small.saved_bytes == 3 * 64 * 256 * 4  # too small to be worth a write


def test_a_value_made_again_for_a_product_is_made_behind_its_gradient_and_is_eagers():
    compiled = check(_gated, *[t.detach().double().requires_grad_() for t in _weights(16, 4096)])
    ops = compiled.ops("backward")
    assert ops.index("aten.mm.default") < ops.index("aten.silu.default") < len(ops) - 1
    assert ops.count("aten.mm.default") == 6


def test_a_value_of_other_sources_than_the_backward_reads_is_saved_for_a_product():
    def f(x, a, b):
        return ((x + x.flip(0)).cos() @ a @ b,)

    x, a, b = (torch.randn(size, requires_grad=True) for size in ((512, 1024), (1024, 16), (16, 16)))
    assert split(f, x, a, b).saved_bytes >= 512 * 1024 * 4


def test_parts_of_one_product_keep_the_value_made_of_them():
    def f(x, both, down):
        gate, up = (x @ both).chunk(2, -1)
        return (F.silu(gate) * up @ down,)

    sizes = (64, 16), (16, 8192), (4096, 16)
    chosen = split(f, *(torch.randn(size, requires_grad=True) for size in sizes))
    assert chosen.saved_bytes == 3 * 64 * 4096 * 4


def test_operands_of_convolutions_are_saved():
    def f(x, a, b):
        return (F.conv2d(F.gelu(F.conv2d(x, a)), b),)

    x, a, b = (
        torch.randn(size, requires_grad=True) for size in ((4, 3, 64, 64), (64, 3, 1, 1), (3, 64, 1, 1))
    )
    assert split(f, x, a, b).saved_bytes == 2 * 4 * 64 * 64 * 64 * 4


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
