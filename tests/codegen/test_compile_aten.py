"""The native compiler as a whole: aten graphs made by our own autograd, against eager."""

import copy
import gc

import pytest
import torch
from torch import fx, nn
from warned import text_of

from dynamotor.autograd.aot import aot_compile
from dynamotor.base.config import config
from dynamotor.base.errors import BuildError
from dynamotor.base.events import collect, counters, forget_warnings
from dynamotor.codegen import compile_aten
from dynamotor.codegen.call_program import CallProgram
from dynamotor.graph.spec import GraphInfo, TensorSpec
from dynamotor.runtime import cpp_build


def compile_module(module, *inputs, compile_graph=compile_aten):
    """The module compiled natively: a function of the inputs that reads the live parameters and buffers."""
    names = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    traced = fx.symbolic_trace(module)
    graph = fx.Graph()
    holders = {name: graph.placeholder("p_" + name.replace(".", "_")) for name in names}
    data = [graph.placeholder(f"input{i}") for i in range(len(inputs))]
    env, arguments = {}, iter(data)

    def get(prefix, name):
        return holders.get(f"{prefix}.{name}")

    for node in traced.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(arguments)
        elif node.op == "get_attr":
            env[node] = holders[node.target]
        elif node.op == "call_module":
            env[node] = _inline(graph, traced.get_submodule(node.target), node.target, env[node.args[0]], get)
        elif node.op == "output":
            result = fx.map_arg(node.args[0], lambda n: env[n])
            graph.output(result if isinstance(result, tuple) else (result,))
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
    gm = fx.GraphModule(nn.Module(), graph)
    tensors = lambda: [dict([*module.named_parameters(), *module.named_buffers()])[name] for name in names]  # noqa: E731
    call = aot_compile(gm, [*tensors(), *inputs], compile_graph, static_inputs=frozenset(range(len(names))))
    return lambda *args: call(*tensors(), *args)


def _inline(graph, m, name, x, get):
    f = nn.functional
    if isinstance(m, nn.Conv2d):
        place = m.stride, m.padding, m.dilation, m.groups
        return graph.call_function(f.conv2d, (x, get(name, "weight"), get(name, "bias"), *place))
    if isinstance(m, nn.BatchNorm2d):
        args = (
            x,
            get(name, "running_mean"),
            get(name, "running_var"),
            get(name, "weight"),
            get(name, "bias"),
            m.training,
        )
        return graph.call_function(f.batch_norm, (*args, m.momentum, m.eps))
    if isinstance(m, nn.Linear):
        return graph.call_function(f.linear, (x, get(name, "weight"), get(name, "bias")))
    if isinstance(m, nn.ReLU):
        return graph.call_function(f.relu, (x,))
    assert isinstance(m, nn.MaxPool2d)
    return graph.call_function(f.max_pool2d, (x, m.kernel_size, m.stride, m.padding))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = (
            nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv3, self.bn3 = nn.Conv2d(16, 32, 1, stride=2, bias=False), nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.pool(self.relu(self.bn1(self.conv1(x))))
        x = self.relu(self.bn2(self.conv2(x)) + x)
        x = self.relu(self.bn3(self.conv3(x)))
        return self.head(x.mean((2, 3))), x


@pytest.fixture(autouse=True)
def _own_cache(tmp_path):
    forget_warnings()
    with config.patch(cache_dir=str(tmp_path)):
        yield


def check(got, want, **tolerance):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **{"rtol": 2e-4, "atol": 2e-5, **tolerance})
        assert a.stride() == b.stride()


def test_a_convolutional_network_at_inference():
    net, x = Net().eval(), torch.randn(2, 3, 33, 37)
    with torch.no_grad():
        call = compile_module(net, x)
        check(call(x), net(x))
        check(call(x + 1), net(x + 1))


def test_channels_last_inputs_give_eager_strides():
    net, x = Net().eval(), torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    with torch.no_grad():
        check(compile_module(net, x)(x), net(x))


def changes():
    def step(net):
        with torch.enable_grad():
            net(torch.randn(2, 3, 16, 16))[0].sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()

    def write_data(net):
        for p in net.parameters():
            p.data.mul_(1.5)

    def numpy_write(net):
        net.conv2.weight.detach().numpy()[0, 0, 0, 0] += 5

    return {
        "p.data.mul_": write_data,
        "load_state_dict": lambda net: net.load_state_dict(Net().state_dict()),
        "optimizer": step,
        "statistics": lambda net: net.bn1.running_mean.add_(1),
        "one element through numpy": numpy_write,
        "p.data =": lambda net: setattr(net.conv3.weight, "data", torch.randn(32, 16, 1, 1)),
        "head": lambda net: net.head.weight.data.neg_(),
    }


@pytest.mark.parametrize("name", list(changes()))
def test_folded_weights_follow_the_parameters(name):
    net, x = Net().eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        call = compile_module(net, x)
        before = call(x)[0].clone()
    counters["fold"].clear()
    changes()[name](net)
    with torch.no_grad():
        check(call(x), net(x))
        assert not torch.allclose(call(x)[0], before)
    assert counters["fold"]["computed"] == (0 if name == "head" else 1)


def test_a_training_step_updates_gradients_and_statistics_as_eager():
    net = Net().train().double()
    other = copy.deepcopy(net)
    call = None
    for _ in range(3):
        x = torch.randn(4, 3, 20, 20, dtype=torch.float64)
        call = call or compile_module(net, x)
        for model, run in ((net, call), (other, other)):
            model.zero_grad()
            logits, features = run(x)
            (logits.square().sum() + features.sin().sum()).backward()
        for a, b in zip(net.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
            assert a.grad.stride() == b.grad.stride()
        for a, b in zip(net.buffers(), other.buffers(), strict=True):
            if a.is_floating_point():
                torch.testing.assert_close(a, b)


def test_a_channels_last_training_step():
    net = Net().train()
    other, x = copy.deepcopy(net), torch.randn(4, 3, 21, 22)
    call = compile_module(net, x)
    for run in (call, other):
        run(x)[0].square().sum().backward()
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4 * b.grad.abs().max().item())
        assert a.grad.stride() == b.grad.stride()


@pytest.mark.parametrize("train", [False, True])
def test_images_of_one_channel(train):
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU()
    ).train(train)
    other, x = copy.deepcopy(net), torch.randn(3, 1, 8, 8)
    with torch.set_grad_enabled(train):
        got, want = compile_module(net, x)(x)[0], other(x)
    check([got], [want])
    if train:
        (got**2).sum().backward()
        (want**2).sum().backward()
        check([p.grad for p in net.parameters()], [p.grad for p in other.parameters()], rtol=1e-3, atol=1e-3)


def test_gradients_accumulate_over_recycled_memory():
    linear = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 200))
    other = copy.deepcopy(linear)
    call = compile_module(linear, torch.randn(64, 300))
    kept = []
    for step in range(6):
        x = torch.randn(64, 300)
        (call(x)[0] ** 2).sum().backward()
        (other(x) ** 2).sum().backward()
        kept.append((linear[0].weight.grad, linear[0].weight.grad.clone()))
        if step % 2:
            linear.zero_grad()
            other.zero_grad()
        else:
            for a, b in zip(linear.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-2)
    odd = kept[1::2]
    assert all(torch.equal(grad, copied) for grad, copied in odd)


def test_no_compiler_means_aten_kernels_and_one_warning(recwarn):
    net, x = Net().eval(), torch.randn(1, 3, 16, 16)
    cpp_build._libraries.clear()
    with torch.no_grad(), config.patch(cxx="no-such-compiler"), collect("fallback") as events:
        for _ in range(2):
            call = compile_module(net, x)
            check(call(x), net(x))
            check(call(x), net(x))
    assert text_of(recwarn).count("DM301") == 1
    assert any(e.data.get("code") == "DM301" for e in events)
    cpp_build._libraries.clear()


def test_no_compiler_under_strict_is_an_error():
    net, x = Net().eval(), torch.randn(1, 3, 16, 16)
    cpp_build._libraries.clear()
    with (
        torch.no_grad(),
        config.patch(cxx="no-such-compiler", strict=True),
        pytest.raises(BuildError, match="DM301"),
    ):
        compile_module(net, x)(x)
    cpp_build._libraries.clear()


def test_memory_goes_with_the_programs():
    """An arena is emptied with its last program (tests/runtime/test_memory.py); others may be alive here."""

    def programs():
        gc.collect()
        return sum(isinstance(found, CallProgram) for found in gc.get_objects())

    net, x, before = Net().eval(), torch.randn(2, 3, 64, 64), programs()
    with torch.no_grad():
        call = compile_module(net, x)
        call(x)
    assert programs() > before
    del call
    assert programs() <= before


def test_settings_without_layouts_folding_and_reuse():
    net, x = Net().eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad(), config.patch(layout_opt=False, fold_constants=False, reuse_memory=False):
        check(compile_module(net, x)(x), net(x))


@pytest.mark.runs_eager
def test_tensors_on_a_device_without_a_code_generator_run_on_aten_kernels():
    spec = TensorSpec.dense((2, 3), torch.float32, torch.device("meta"))
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.relu.default, (x,))
    graph.output((y,))
    x.meta["val"] = y.meta["val"] = spec
    counters["fallback"].clear()
    call = compile_aten(fx.GraphModule({}, graph), GraphInfo("inference", "g"))
    assert call(torch.empty(2, 3, device="meta"))[0].device.type == "meta"
    assert counters["fallback"]["device.meta"] == 1


def test_strides_of_dimensions_of_size_one_match_eager():
    net = nn.Sequential(
        nn.Conv2d(2, 1, 3, padding=1), nn.ReLU(), nn.Conv2d(1, 3, 1), nn.Conv2d(3, 1, 2)
    ).train()
    other, x = copy.deepcopy(net), torch.randn(2, 2, 6, 7)
    got, want = compile_module(net, x)(x)[0], other(x)
    check([got], [want])
    got.sum().backward()
    want.sum().backward()
    check([p.grad for p in net.parameters()], [p.grad for p in other.parameters()], rtol=1e-3, atol=1e-3)
