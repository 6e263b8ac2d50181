"""Graph passes: each keeps the graph's meaning, and has its effect."""

import pytest
import torch
from aten_graphs import aten_graph, module_graph
from harness import check
from torch import nn

from dynamotor.base.config import config
from dynamotor.graph.spec import GraphInfo
from dynamotor.lower.passes import optimise


def run(optimised, inputs):
    with torch.no_grad():
        constants = optimised.fold.gm(*[inputs[i] for i in optimised.fold.sources]) if optimised.fold else ()
        return optimised.gm(*inputs, *constants)


def inference(module, *inputs):
    gm, tensors = module_graph(module.eval(), *inputs)
    return optimise(gm, GraphInfo("inference", "g", frozenset(range(len(tensors))))), [*tensors, *inputs]


def targets(gm):
    return [
        str(n.target).split(".")[1]
        for n in gm.graph.nodes
        if n.op == "call_function" and "getitem" not in str(n.target)
    ]


class Block(nn.Module):
    def __init__(self, inner=8, groups=1, bias=False, act=torch.relu):
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(8, inner, 3, padding=1, bias=bias, groups=groups),
            nn.BatchNorm2d(inner),
        )
        self.conv2, self.bn2 = nn.Conv2d(inner, 8, 1), nn.BatchNorm2d(8, affine=bias)
        self.act = act
        for bn in (self.bn1, self.bn2):
            bn.running_mean.uniform_(-1, 1)
            bn.running_var.uniform_(0.5, 2)
            if bn.affine:
                nn.init.uniform_(bn.weight)
                nn.init.uniform_(bn.bias)

    def forward(self, x):
        y = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        return torch.relu(x + y)


@pytest.mark.parametrize(
    "settings", [{}, {"bias": True}, {"groups": 4}, {"inner": 8, "groups": 8, "bias": True}, {"inner": 16}]
)
def test_a_residual_block_becomes_two_fused_convolutions(settings):
    block, x = Block(**settings), torch.randn(2, 8, 9, 11)
    optimised, inputs = inference(block, x)
    with torch.no_grad():
        expected = block(x)
    (result,) = run(optimised, inputs)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert result.stride() == expected.stride()
    assert targets(optimised.gm) == ["clone", "_convolution_pointwise", "_convolution_pointwise", "clone"]


@pytest.mark.parametrize(
    "act",
    [
        torch.relu,
        torch.sigmoid,
        torch.tanh,
        nn.functional.silu,
        nn.functional.hardswish,
        nn.functional.relu6,
        nn.functional.hardsigmoid,
        lambda x: nn.functional.leaky_relu(x, 0.3),
        nn.functional.gelu,
    ],
)
def test_activations_after_a_convolution(act):
    block, x = Block(act=act), torch.randn(2, 8, 5, 5) * 4
    optimised, inputs = inference(block, x)
    with torch.no_grad():
        torch.testing.assert_close(run(optimised, inputs)[0], block(x), rtol=1e-4, atol=1e-5)


def test_double_precision_is_folded_and_not_prepacked():
    block, x = Block(bias=True).double(), torch.randn(2, 8, 5, 5, dtype=torch.float64)
    optimised, inputs = inference(block, x)
    with torch.no_grad():
        torch.testing.assert_close(run(optimised, inputs)[0], block(x))
    assert targets(optimised.gm) == ["convolution", "relu", "convolution", "add", "relu"]


def test_a_convolution_with_two_readers_keeps_its_batch_norm():
    class Two(Block):
        def forward(self, x):
            y = self.conv1(x)
            return self.bn1(y), y

    block, x = Two(), torch.randn(2, 8, 5, 5)
    optimised, inputs = inference(block, x)
    with torch.no_grad():
        for got, want in zip(run(optimised, inputs), block(x)):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            assert got.stride() == want.stride()


def test_a_transposed_convolution_keeps_its_batch_norm():
    module, x = (
        nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 3)),
        torch.randn(1, 4, 6, 6),
    )
    optimised, inputs = inference(module, x)
    with torch.no_grad():
        torch.testing.assert_close(run(optimised, inputs)[0], module(x), rtol=1e-4, atol=1e-5)


def test_weights_that_are_no_parameters_are_not_folded():
    def f(x, w):
        return torch.relu(torch.conv2d(x, w))

    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    optimised = optimise(aten_graph(f, x, w), GraphInfo("inference", "g"))
    assert optimised.fold is None and targets(optimised.gm) == [
        "clone",
        "clone",
        "convolution",
        "relu",
        "clone",
    ]
    torch.testing.assert_close(run(optimised, [x, w])[0], f(x, w), rtol=1e-4, atol=1e-5)


def test_pooling_and_flattening_between_channels_last_and_the_head():
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3, dilation=2),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, 5),
    )
    x = torch.randn(2, 3, 43, 43)
    optimised, inputs = inference(module, x)
    with torch.no_grad():
        torch.testing.assert_close(run(optimised, inputs)[0], module(x), rtol=1e-4, atol=1e-5)


def test_a_training_graph_saves_channels_last_and_returns_eager_strides():
    def f(x, w):
        y = torch.conv2d(x, w)
        return torch.relu(y), y

    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    gm = optimise(aten_graph(f, x, w), GraphInfo("forward", "g", frozenset({1}), n_outputs=1)).gm
    out, saved = gm(x, w)
    assert out.is_contiguous() and saved.is_contiguous(memory_format=torch.channels_last)
    outputs = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    assert outputs[0].meta["val"].stride == out.stride() and outputs[1].meta["val"].stride == saved.stride()


def test_the_gradient_of_a_mean_stays_channels_last():
    def f(g, y, x, w):
        g = torch.ops.aten.threshold_backward(g.view(2, 4, 1, 1).expand(2, 4, 6, 6) / 36, y, 0)
        return torch.ops.aten.convolution_backward(
            g, x, w, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
        )[:2]

    y = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    inputs = torch.randn(2, 4), y, torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    optimised = optimise(aten_graph(f, *inputs), GraphInfo("backward", "g"))
    assert "threshold_backward" in targets(optimised.gm)
    node = next(n for n in optimised.gm.graph.nodes if "threshold_backward" in str(n.target))
    assert node.meta["val"].stride == y.stride()
    check(f, *inputs, tolerance=1e-5)


def test_constants_are_split_off_only_where_reading_their_sources_pays():
    def f(x, table, scale):
        positions = torch.nn.functional.embedding(torch.arange(4), table)
        return x * (scale * 2).exp() + positions[:, :3]

    x, table, scale = torch.randn(4, 3), torch.randn(5000, 8), torch.randn(3)
    optimised = optimise(aten_graph(f, x, table, scale), GraphInfo("inference", "g", frozenset({1, 2})))
    assert optimised.fold.sources == (2,) and optimised.info.static_inputs == {1, 2, 3}
    torch.testing.assert_close(run(optimised, [x, table, scale])[0], f(x, table, scale))


def test_a_buffer_that_the_graph_writes_is_no_constant():
    def f(x, count):
        new = count + 1
        result = x * new
        torch.ops.aten.copy_.default(count, new)
        return result

    x, count = torch.randn(4), torch.zeros(4)
    optimised = optimise(aten_graph(f, x, count), GraphInfo("inference", "g", frozenset({1})))
    assert optimised.fold is None


def test_settings_switch_the_passes_off():
    block, x = Block(), torch.randn(2, 8, 5, 5)
    with config.patch(layout_opt=False, fold_constants=False):
        optimised, inputs = inference(block, x)
    assert optimised.fold is None and not {"_convolution_pointwise", "clone"} & set(targets(optimised.gm))
    with torch.no_grad():
        torch.testing.assert_close(run(optimised, inputs)[0], block(x))


def test_a_bias_is_split_off_only_where_a_kernel_follows():
    def fused(x, w, b):
        return (torch.nn.functional.gelu(torch.addmm(b, x, w).view(2, 3, 5)),)

    def returned(x, w, b):
        y = torch.addmm(b, x, w)
        return y, y + 1

    def product(x, w, b):
        return (torch.addmm(b, x, w).mm(w.t()),)

    inputs = torch.randn(6, 4), torch.randn(4, 5), torch.randn(5)
    for f, first in ((fused, "mm"), (returned, "addmm"), (product, "addmm")):
        optimised = optimise(aten_graph(f, *inputs), GraphInfo("inference", "g"))
        assert [t for t in targets(optimised.gm) if t.endswith("mm")][0] == first
        for got, want in zip(run(optimised, inputs), f(*inputs)):
            torch.testing.assert_close(got, want)
    halves = [x.bfloat16() for x in inputs]  # the product would be rounded before the bias is added
    assert "addmm" in targets(optimise(aten_graph(fused, *halves), GraphInfo("inference", "g")).gm)


@pytest.mark.parametrize("padding", [-1, 2])
def test_an_embedding_gradient_is_added_to_the_dense_one(padding):
    def tied(g, a, b, i):
        rows = torch.ops.aten.embedding_dense_backward(g, i, 7, padding, False)
        return torch.mm(a, b) + rows, torch.ops.aten.embedding_dense_backward(g * 2, i, 9, padding, False)

    inputs = torch.randn(2, 5, 4), torch.randn(7, 3), torch.randn(3, 4), torch.randint(0, 7, (2, 5))
    optimised = optimise(aten_graph(tied, *inputs), GraphInfo("backward", "g"))
    assert targets(optimised.gm).count("index_add") == 2 and "add" not in targets(optimised.gm)
    for got, want in zip(run(optimised, inputs), tied(*inputs)):
        torch.testing.assert_close(got, want)
    check(tied, *inputs, tolerance=1e-5)


def test_on_a_gpu_an_embedding_gradient_is_added_to_whatever_it_meets():
    def f(g, a, i):
        return a * 2 + torch.ops.aten.embedding_dense_backward(g, i, 7, 2, False)

    def alone(g, a, i):
        return torch.ops.aten.embedding_dense_backward(g, i, 7, 2, False)

    inputs = torch.randn(2, 5, 4), torch.randn(7, 4), torch.randint(0, 7, (2, 5))
    optimised = optimise(aten_graph(f, *inputs), GraphInfo("backward", "g"), on_gpu=True)
    assert "index_add" in targets(optimised.gm) and "add" not in targets(optimised.gm)
    torch.testing.assert_close(run(optimised, inputs)[0], f(*inputs))
    assert "index_add" not in targets(
        optimise(aten_graph(alone, *inputs), GraphInfo("backward", "g"), on_gpu=True).gm
    )


@pytest.mark.parametrize(
    "settings", [((3, 3), [1, 1], [1, 1]), ((3, 2), [2, 1], [0, 1]), ((1, 3), [2, 2], [2, 0])]
)
def test_weight_gradients_of_few_pixels_are_products(settings):
    size, stride, padding = settings

    def f(g, x, w):
        return torch.ops.aten.convolution_backward(
            g, x, w, [64], stride, padding, [1, 1], False, [0, 0], 1, [True, True, True]
        )

    x, w = torch.randn(2, 8, 4, 4), torch.randn(64, 8, *size)
    g = torch.randn_like(torch.conv2d(x, w, None, stride, padding))
    optimised = optimise(aten_graph(f, g, x, w), GraphInfo("backward", "g"))
    assert "mm" in targets(optimised.gm)
    for got, want in zip(run(optimised, (g, x, w)), f(g, x, w)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert got.stride() == want.stride()
    check(f, g, x, w, tolerance=1e-4)


def test_index_add_does_not_write_what_others_read():
    def f(x, i, s):
        y = x.mm(x)
        return (
            torch.index_add(y, 0, i, s),
            y + 1,
            torch.index_add(x, 0, i, s),
            x.index_add(1, i, s.t(), alpha=2),
        )

    check(f, torch.randn(4, 4), torch.tensor([1, 1, 3]), torch.randn(3, 4), tolerance=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_on_a_gpu_a_bias_is_added_by_the_kernel_behind_the_convolution(transposed):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    gm, tensors = module_graph(
        nn.Sequential(kind(4, 6, 3), nn.GELU(), kind(6, 4, 1)), torch.randn(2, 4, 9, 11)
    )
    inputs = [*tensors, torch.randn(2, 4, 9, 11)]
    with torch.no_grad():
        (expected,) = gm(*inputs)
    optimised = optimise(gm, GraphInfo("inference", "g", frozenset()), on_gpu=True)
    first, second = (n for n in gm.graph.nodes if n.target is torch.ops.aten.convolution.default)
    assert first.args[2] is None and second.args[2] is not None  # nothing of ours follows the second one
    (result,) = run(optimised, inputs)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()


@pytest.mark.parametrize("mask", [(True, True, True), (False, False, True)])
def test_on_a_gpu_the_gradient_of_a_bias_is_a_sum_of_its_own(mask):
    backward = torch.ops.aten.convolution_backward

    def fn(g, x, w):
        results = backward(g * 2, x, w, [6], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask)
        return [y for y, wanted in zip(results, mask, strict=True) if wanted]

    inputs = torch.randn(2, 6, 7, 9), torch.randn(2, 4, 9, 11), torch.randn(6, 4, 3, 3)
    gm = aten_graph(fn, *inputs)
    optimised = optimise(gm, GraphInfo("inference", "g", frozenset()), on_gpu=True)
    assert "sum" in targets(gm) and ("convolution_backward" in targets(gm)) is mask[0]
    for a, b in zip(run(optimised, inputs), fn(*inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_on_a_gpu_matrices_that_lie_transposed_are_copied_as_they_lie():
    def scores(qkv):
        q, k, v = qkv.view(2, 7, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return torch.softmax(q @ k.transpose(-2, -1), -1) @ v

    qkv = torch.randn(2, 7, 96)
    gm = aten_graph(scores, qkv)
    optimised = optimise(gm, GraphInfo("inference", "g", frozenset()), on_gpu=True)
    keys = [n for n in gm.graph.nodes if n.target is torch.ops.aten.bmm.default][0].args[1]
    assert keys.meta["val"].shape == (8, 8, 7) and keys.meta["val"].stride == (56, 1, 8)
    (result,) = run(optimised, [qkv])
    torch.testing.assert_close(result, scores(qkv))
    check(scores, qkv)


def test_copies_that_others_read_too_stay():
    def fn(x):
        y = x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        return x @ y, y.sum(0)

    gm = aten_graph(fn, torch.randn(3, 8, 7))
    before = targets(gm)
    optimise(gm, GraphInfo("inference", "g", frozenset()), on_gpu=True)
    assert targets(gm) == before and "clone" in before


class LateStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("deviation", torch.rand(8) + 0.5)

    def forward(self, x):
        y = self.conv(x)
        return torch.nn.functional.batch_norm(y, self.mean, self.deviation * self.deviation)


def test_statistics_that_are_computed_behind_the_convolution_are_folded():
    module, x = LateStatistics(), torch.randn(2, 3, 6, 6)
    optimised, inputs = inference(module, x)
    assert not any("batch_norm" in name for name in targets(optimised.gm))
    torch.testing.assert_close(run(optimised, inputs)[0], module(x), rtol=1e-4, atol=1e-4)
