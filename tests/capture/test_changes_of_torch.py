"""Facts of PyTorch that a program can read, each changed between two calls: every call gives what eager
gives.
"""

from __future__ import annotations

import contextlib
import functools
import math
import types

import pytest
import torch
import torch.distributed as dist
from test_changes import Plain, X, check, outcome, same
from torch import nn
from torch.overrides import TorchFunctionMode

import dynamotor
from dynamotor.capture.guards import Answer
from dynamotor.capture.trace import Trace
from dynamotor.capture.values.tensor import trial
from dynamotor.graph.shape_tensor import ShapeTensor
from dynamotor.graph.spec import TensorSpec

FACTS = {}


def fact(make):
    FACTS[make.__name__] = make
    return make


def _reset_torch():
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    torch.set_warn_always(False)
    torch.autograd.set_detect_anomaly(False)


SETTINGS = {
    "default dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "finfo": (lambda: torch.finfo().bits, lambda: torch.set_default_dtype(torch.float64)),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        lambda: torch.use_deterministic_algorithms(True),
    ),
    "deterministic warn only": (
        torch.is_deterministic_algorithms_warn_only_enabled,
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    ),
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(2)),
    "matmul precision": (
        torch.get_float32_matmul_precision,
        lambda: torch.set_float32_matmul_precision("high"),
    ),
    "warn always": (torch.is_warn_always_enabled, lambda: torch.set_warn_always(True)),
    "anomaly": (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
    "grad mode": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
    "autocast of another device": (
        lambda: torch.is_autocast_enabled("xpu"),
        lambda: torch.set_autocast_enabled("xpu", True),
    ),
    "autocast dtype": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
    ),
    "autocast's dtype by default": (
        lambda: torch.autocast("cpu").fast_dtype,
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
    ),
    "autocast cache": (torch.is_autocast_cache_enabled, lambda: torch.set_autocast_cache_enabled(False)),
    "matmul tf32": (
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    ),
    "cudnn enabled": (
        lambda: torch.backends.cudnn.enabled,
        lambda: setattr(torch.backends.cudnn, "enabled", False),
    ),
    "cudnn benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
    ),
    "cudnn deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda: setattr(torch.backends.cudnn, "deterministic", True),
    ),
    "cudnn tf32": (
        lambda: torch.backends.cudnn.allow_tf32,
        lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    ),
    "mkldnn enabled": (
        lambda: torch.backends.mkldnn.enabled,
        lambda: setattr(torch.backends.mkldnn, "enabled", False),
    ),
    "flash attention": (
        torch.backends.cuda.flash_sdp_enabled,
        lambda: torch.backends.cuda.enable_flash_sdp(False),
    ),
    "math attention": (
        torch.backends.cuda.math_sdp_enabled,
        lambda: torch.backends.cuda.enable_math_sdp(False),
    ),
    "fast path": (
        torch.backends.mha.get_fastpath_enabled,
        lambda: torch.backends.mha.set_fastpath_enabled(False),
    ),
    "opt_einsum": (
        lambda: torch.backends.opt_einsum.enabled,
        lambda: setattr(torch.backends.opt_einsum, "enabled", False),
    ),
    "opt_einsum strategy": (
        lambda: torch.backends.opt_einsum.strategy,
        lambda: setattr(torch.backends.opt_einsum, "strategy", "greedy"),
    ),
    "nnpack": (lambda: torch.backends.nnpack.enabled(), lambda: torch.backends.nnpack.set_flags(False)),
}
_UNDO = {
    "matmul tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False),
    "cudnn enabled": lambda: setattr(torch.backends.cudnn, "enabled", True),
    "cudnn benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", False),
    "cudnn deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", False),
    "cudnn tf32": lambda: setattr(torch.backends.cudnn, "allow_tf32", True),
    "mkldnn enabled": lambda: setattr(torch.backends.mkldnn, "enabled", True),
    "flash attention": lambda: torch.backends.cuda.enable_flash_sdp(True),
    "math attention": lambda: torch.backends.cuda.enable_math_sdp(True),
    "fast path": lambda: torch.backends.mha.set_fastpath_enabled(True),
    "opt_einsum": lambda: setattr(torch.backends.opt_einsum, "enabled", True),
    "opt_einsum strategy": lambda: setattr(torch.backends.opt_einsum, "strategy", "auto"),
    "nnpack": lambda: torch.backends.nnpack.set_flags(True),
    "grad mode": lambda: torch.set_grad_enabled(True),
    "autocast": lambda: torch.set_autocast_enabled("cpu", False),
    "autocast of another device": lambda: torch.set_autocast_enabled("xpu", False),
    "autocast dtype": lambda: torch.set_autocast_dtype("cpu", torch.bfloat16),
    "autocast's dtype by default": lambda: torch.set_autocast_dtype("cpu", torch.bfloat16),
    "autocast cache": lambda: torch.set_autocast_cache_enabled(True),
}


def _setting(name):
    ask, change = SETTINGS[name]

    def undo():
        _UNDO.get(name, lambda: None)()
        _reset_torch()

    return lambda x: (x * 2, ask()), [change], undo


for _name in SETTINGS:
    FACTS[f"torch {_name}"] = functools.partial(_setting, _name)


@fact
def dist_is_initialized():
    def start():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    return (lambda x: x + 1 if dist.is_initialized() else x - 1), [start, dist.destroy_process_group]


@fact
def the_default_device():
    stack = contextlib.ExitStack()
    return lambda x: (x + 1, str(torch.get_default_device())), [
        lambda: stack.enter_context(torch.device("meta")),
        stack.close,
    ]


LIBRARY = """
flag, constant = False, 1.0

def turn_on():
    global flag
    flag = True

def is_on():
    return constant if flag else 2.0
"""


@fact
def a_global_that_a_function_of_a_library_sets():
    module = types.ModuleType("torch.made_up")
    exec(LIBRARY, vars(module))
    return lambda x: (x * module.is_on(), module.flag), [module.turn_on]


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in (torch.sin,) else out


@fact
def the_active_function_mode():
    stack = contextlib.ExitStack()
    stack.enter_context(torch.device("cpu"))

    def other():
        stack.close()
        stack.enter_context(Doubling())

    return lambda x: torch.sin(x), [other], stack.close


@fact
def a_training_flag():
    module = nn.Dropout(1.0)
    return lambda x: module(x), [module.eval, module.train]


def replaced(owner, name, other):
    """Something of PyTorch's or the standard library's under another's name, until it is put back."""
    own = vars(owner).get(name)

    def undo():
        if own is not None:
            setattr(owner, name, own)
        elif name in vars(owner):
            delattr(owner, name)

    return [lambda: setattr(owner, name, other), undo], undo


@fact
def a_function_of_torch():
    return lambda x: torch.sin(x), *replaced(torch, "sin", torch.cos)


@fact
def a_function_of_torch_in_a_module():
    relu = nn.ReLU()
    return lambda x: relu(x - 2), *replaced(nn.functional, "relu", torch.cos)


@fact
def a_method_of_tensors():
    return lambda x: x.sin(), *replaced(torch.Tensor, "sin", torch.Tensor.cos)


@fact
def an_operator_of_tensors():
    return lambda x: x + x, *replaced(torch.Tensor, "__add__", lambda a, b: 5)


@fact
def a_function_and_a_number_of_the_standard_library():
    changes, undo = replaced(math, "sqrt", lambda v: 7)
    more, undo_more = replaced(math, "pi", 3)
    return lambda x: x * math.sqrt(4) + math.pi, [changes[0], more[0], undo, undo_more]


@fact
def an_attribute_of_a_parameter():
    p = nn.Parameter(torch.ones(3))
    return lambda x: x + (2 if getattr(p, "seen", False) else 3), [lambda: setattr(p, "seen", True)]


@fact
def a_tensor_that_says_it_is_a_parameter():
    t = torch.ones(3)
    return lambda x: x + 1 if isinstance(t, nn.Parameter) else x - 1, [lambda: setattr(t, "_is_param", True)]


@fact
def is_tensor_like():
    class Thing:
        pass

    thing = Thing()
    return lambda x: x + 1 if torch.overrides.is_tensor_like(thing) else x - 1, [
        lambda: setattr(Thing, "__torch_function__", classmethod(lambda *a: None))
    ]


@fact
def typename_of_an_object():
    thing = Plain()
    return lambda x: (x + 1, torch.typename(thing)), [lambda: setattr(Plain, "__qualname__", "Plain")]


@pytest.fixture
def flags_may_be_set(monkeypatch):
    """Importing PyTorch's own test tools anywhere freezes the flags of `torch.backends` for the process."""
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)


@pytest.mark.sweep(6)
@pytest.mark.usefixtures("flags_may_be_set")
@pytest.mark.parametrize("name", FACTS)
def test_a_changed_fact_is_seen(name):
    check(*FACTS[name]())


class SharedBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        for name in "abc":
            self.register_buffer(name, torch.ones(3))

    def forward(self, x):
        self.a.add_(1)
        return x * self.b


@pytest.mark.parametrize(
    "share",
    [
        lambda net: setattr(net.b, "data", net.a.data),
        lambda net: setattr(net.a, "data", net.b.data),
        lambda net: net.b.set_(net.a),
        lambda net: setattr(net.c, "data", net.a.data),
    ],
)
def test_buffers_made_to_share_memory(share):
    nets = SharedBuffers(), SharedBuffers()
    compiled = dynamotor.compile(nets[1])
    for _ in range(3):
        for _ in range(2):
            assert torch.equal(compiled(X), nets[0](X)) and torch.equal(nets[0].a, nets[1].a)
        for net in nets:
            share(net)
    for net in nets:
        net.a.data = torch.zeros(3)
    assert torch.equal(compiled(X), nets[0](X)) and torch.equal(nets[0].b, nets[1].b)


def test_the_tangent_of_an_input_is_kept():
    def read(x):
        return x.sin() * 2

    compiled = dynamotor.compile(read)
    compiled(X)
    for fn in (read, compiled):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(X, torch.ones(3))
            assert torch.allclose(torch.autograd.forward_ad.unpack_dual(fn(dual)).tangent, X.cos() * 2)
    assert torch.allclose(torch.func.jvp(compiled, (X,), (torch.ones(3),))[1], X.cos() * 2)


def test_autograd_does_not_see_writes_into_data():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.ones(3))

        def forward(self, x):
            y = (x * self.p).sin()
            self.p.data.mul_(2)
            return (y * self.p).sum()

    nets = Net(), Net()
    compiled = dynamotor.compile(nets[1])
    for _ in range(2):
        for net, call in zip(nets, (nets[0], compiled), strict=True):
            net.p.grad = None
            call(X).backward()
        assert torch.equal(nets[0].p, nets[1].p) and torch.allclose(nets[0].p.grad, nets[1].p.grad)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.as_strided((2,), (1,), 1),
        lambda x: torch.as_strided(x, (2,), (1,), 2),
        lambda x: x[1:].as_strided((2,), (1,), 3),
        lambda x: torch.as_strided_copy(x, (2,), (1,), 2),
        lambda x: x.clone().as_strided((2,), (1,), 1),
        lambda x: torch.ops.aten.as_strided.default(x, [2], [1], 2),
    ],
)
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_addresses_in_a_storage_follow_the_view(call, backend):
    compiled = dynamotor.compile(lambda x: call(x) + 1, backend=backend)
    memory = torch.arange(8.0)
    for x in (memory[:4], memory[1:5], memory[4:], memory[:4].clone(), memory[2:6]):
        assert same(outcome(compiled, x), outcome(lambda x: call(x) + 1, x))


def test_a_leaf_in_the_place_of_a_result_may_not_be_written():
    compiled = dynamotor.compile(lambda x: x.mul_(2))
    for make in (lambda p: p * 1, lambda p: p, lambda p: p * 1):
        p = X.clone().requires_grad_()
        try:
            want = make(p).mul_(2)
        except RuntimeError:
            with pytest.raises(RuntimeError, match="leaf"):
                compiled(make(p))
        else:
            assert torch.equal(compiled(make(p)), want)


def attention_that_has_no_kernel():
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)


@pytest.mark.parametrize(
    "setting", [attention_that_has_no_kernel, lambda: torch.backends.mkldnn.flags(enabled=False)]
)
def test_settings_that_choose_kernels(setting):
    conv = nn.Conv2d(2, 2, 3)

    def read(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x) + conv(x).mean()

    compiled, x = dynamotor.compile(read), torch.randn(1, 2, 8, 8)
    for within in (contextlib.nullcontext, setting, contextlib.nullcontext):
        with within():
            got, want = outcome(compiled, x), outcome(read, x)
            assert got is want if isinstance(want, type) else torch.allclose(got, want, atol=1e-6)


def test_products_on_a_gpu_follow_tf32():
    trace = Trace()
    x = ShapeTensor.make(TensorSpec.dense((2, 2), torch.float32, torch.device("cuda", 0)))
    trial(trace, torch.mm, torch.mm, [x, x], {})
    guard = next(g for g in trace.reader.guards if isinstance(g, Answer))
    assert guard.check(())
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert not guard.check(())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("device", [None, 0, "cuda:0", torch.device("cuda", 0)], ids=str)
def test_what_a_gpu_can_is_asked_at_each_call(monkeypatch, device):
    """A model of experts asks it, in C: the graph broke there."""
    gpu = types.SimpleNamespace(major=9, minor=0, name="H")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: gpu)

    def f(x):
        return x + torch.cuda.get_device_capability(device)[0] * len(torch.cuda.get_device_name(device))

    compiled = dynamotor.compile(f, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), f(X))
    gpu.major = 10
    assert torch.equal(compiled(X), X + 10)
    gpu.name = "GB"
    assert torch.equal(compiled(X), X + 20)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a missing device")
def test_what_a_gpu_can_is_an_error_without_one():
    def f(x):
        try:
            return x + torch.cuda.get_device_capability()[0]
        except (RuntimeError, AssertionError) as error:
            return x, str(error)

    got, wanted = dynamotor.compile(f, backend="eager")(X), f(X)
    assert torch.equal(got[0], wanted[0]) and got[1] == wanted[1]
