"""The public functions: arguments, results and refusals."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from children import run_forked
from torch import nn

import dynamotor
from dynamotor import BackendError, CaptureError, UsageError, backends
from dynamotor.base.config import config


def function(x, y=1.0):
    return torch.relu(x) * y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, *, scale=1.0):
        return self.norm(self.linear(x)).relu() * scale


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native", lambda gm, inputs: gm.forward])
def test_every_kind_of_backend_gives_eagers_result(backend):
    x = torch.randn(3, 4)
    torch.testing.assert_close(dynamotor.compile(function, backend=backend)(x, y=2.0), function(x, 2.0))


def test_decorator_with_and_without_arguments():
    @dynamotor.compile
    def one(x):
        """Doc."""
        return x + 1

    @dynamotor.compile(backend="eager", fullgraph=True)
    def two(x):
        return x + 2

    x = torch.randn(3)
    torch.testing.assert_close(one(x), x + 1)
    torch.testing.assert_close(two(x), x + 2)
    assert one.__name__ == "one" and one.__doc__ == "Doc." and one.__wrapped__(x).shape == x.shape


def test_a_compiled_function_works_as_a_method():
    class Thing:
        factor = 3.0

        @dynamotor.compile
        def scaled(self, x):
            return x * self.factor

    thing = Thing()
    x = torch.randn(3)
    torch.testing.assert_close(thing.scaled(x), x * 3)
    thing.factor = 4.0
    torch.testing.assert_close(thing.scaled(x), x * 4)


def test_a_compiled_module_is_the_module():
    model = Net()
    compiled = dynamotor.compile(model)
    assert isinstance(compiled, Net)
    assert compiled.state_dict().keys() == model.state_dict().keys()
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(compiled.parameters(), model.parameters()))
    x = torch.randn(5, 4)
    torch.testing.assert_close(compiled(x, scale=2.0), copy.deepcopy(model)(x, scale=2.0))
    compiled.eval()
    assert not model.training
    compiled.load_state_dict(Net().state_dict())
    torch.testing.assert_close(compiled(x), model(x))
    nn.Sequential(compiled, nn.ReLU()).state_dict()[
        "0.linear.weight"
    ]  # keys stay unprefixed inside other modules


def test_the_signature_of_a_compiled_module_is_the_modules():
    class Called(torch.nn.Linear):
        def __call__(self, input, *, scale=1.0):
            return super().__call__(input) * scale

    for model in (torch.nn.Linear(2, 3), Called(2, 3)):
        compiled = dynamotor.compile(model)
        for part in (lambda m: m, lambda m: m.__call__, lambda m: m.forward, type):
            assert inspect.signature(part(compiled)) == inspect.signature(part(model))


def test_copies_of_a_compiled_module_are_independent():
    compiled = dynamotor.compile(Net()).eval()
    x = torch.randn(5, 4)
    before = compiled(x)
    twin = copy.deepcopy(compiled)
    with torch.no_grad():
        twin.linear.weight.zero_()
        twin.linear.bias.zero_()
    torch.testing.assert_close(compiled(x), before)
    assert not torch.equal(twin(x), before)
    plain = pickle.loads(pickle.dumps(compiled))
    assert type(plain) is Net
    torch.testing.assert_close(plain(x), before)


def test_compiling_twice_and_compiling_what_is_compiled():
    model = Net().eval()
    once = dynamotor.compile(model)
    again = dynamotor.compile(once)
    x = torch.randn(2, 4)
    torch.testing.assert_close(again(x), model(x))
    f = dynamotor.compile(dynamotor.compile(function))
    torch.testing.assert_close(f(x), function(x))


def test_a_dead_module_is_freed():
    import gc
    import weakref

    model = Net()
    compiled = dynamotor.compile(model)
    compiled(torch.randn(2, 4)).sum().backward()
    gone = weakref.ref(model.linear.weight)
    del model, compiled
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("bad", [3, "model", None.__class__, torch.ones(2)])
def test_what_is_not_callable_is_refused(bad):
    if callable(bad):
        return
    with pytest.raises(UsageError, match="(?s)DM100.*what to do"):
        dynamotor.compile(bad)


BAD_ARGUMENTS = {
    "DM102": {"fullgraph": "yes"},
    "DM103": {"dynamic": "maybe"},
    "DM104": {"mode": "warp"},
    "DM105": {"options": {"warp": 9}},
    "DM106": {"backend": "no_such_backend"},
    "DM107": {"backend": 3},
}


@pytest.mark.parametrize("code", BAD_ARGUMENTS)
def test_bad_arguments_are_coded_errors(code):
    with pytest.raises(UsageError, match=f"(?s){code}.*what to do"):
        dynamotor.compile(function, **BAD_ARGUMENTS[code])


def test_disable_argument_gives_the_function_back():
    assert dynamotor.compile(function, disable=True) is function


def test_a_backend_that_raises_is_a_coded_error_with_the_users_line():
    def broken(gm, inputs):
        raise KeyError("inside the backend")

    with pytest.raises(BackendError, match="DM401") as caught:
        dynamotor.compile(function, backend=broken)(torch.randn(3))
    assert "test_api.py" in str(caught.value) and "inside the backend" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_backend_that_returns_no_callable_is_a_coded_error():
    with pytest.raises(BackendError, match="DM402"):
        dynamotor.compile(function, backend=lambda gm, inputs: 3)(torch.randn(3))


def test_registered_backends_are_found_by_name():
    seen = []

    @dynamotor.register_backend(name="test_api_backend")
    def backend(gm, inputs):
        seen.append(gm)
        return gm.forward

    x = torch.randn(3)
    torch.testing.assert_close(dynamotor.compile(function, backend="test_api_backend")(x), function(x))
    assert seen and "test_api_backend" in dynamotor.list_backends() and "native" in dynamotor.list_backends()
    with pytest.raises(KeyError):
        dynamotor.register_backend(backend, "native")


def test_backends_of_torch_compile_run_under_our_capture():
    x = torch.randn(3, 4)
    torch.testing.assert_close(dynamotor.compile(function, backend="eager_noexcept")(x), function(x))


@pytest.mark.slow
def test_our_backend_runs_under_torch_compile():
    """In a process of its own: torch.compile installs a frame hook."""
    program = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
compiled = torch.compile(model, backend="dynamotor")
x = torch.randn(3, 4)
torch.testing.assert_close(compiled(x), model(x))
compiled(x).sum().backward()
ours = model[0].weight.grad.clone()
model.zero_grad()
model(x).sum().backward()
torch.testing.assert_close(ours, model[0].weight.grad)
import dynamotor
print(dynamotor.counters["fallback"])
"""
    done = run_forked(program)
    assert done.returncode == 0, done.stderr


def test_fullgraph_raises_with_line_cause_and_cure():
    def branches(x):
        if x.sum() > 0:
            return x + 1
        return x - 1

    with pytest.raises(CaptureError) as caught:
        dynamotor.compile(branches, fullgraph=True)(torch.ones(3))
    text = str(caught.value)
    assert "test_api.py" in text and "x.sum() > 0" in text and "DM2" in text
    compiled = dynamotor.compile(branches)
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(compiled(x), branches(x))


def test_explain_names_graphs_breaks_and_fallbacks():
    def program(x):
        y = torch.sin(x)
        print("between")
        return torch.linalg.det(y) + 1

    found = dynamotor.explain(program)(torch.randn(3, 3))
    assert found.graph_count == 2 and found.graph_break_count == 1 and found.op_count >= 3
    assert "test_api.py" in str(found) and "print" in str(found)
    assert any("det" in op for op in found.fallbacks), found.fallbacks
    found.fallbacks["build.DM301"] = 1
    assert "lowering: build" not in str(found) and "left to PyTorch ×1: DM301" in str(found)


def test_explain_says_why_a_lowering_left_a_call_to_aten():
    """Also of a program that the cache on disk keeps."""

    def program(g, x):
        return torch.ops.aten.elu_backward(g, 1, 1, 1, False, x.erfinv())

    for _ in range(2):
        text = str(dynamotor.explain(program)(torch.ones(3), torch.rand(3)))
        assert "aten.erfinv.default ×1" in text and "erfinv.default ×1 (" not in text
        assert "aten.elu_backward.default ×1 (eager differs by place)" in text


def test_disabled_functions_run_as_they_are():
    seen = []

    @dynamotor.disable
    def note(x):
        seen.append(float(x.sum()))
        return x * 2

    def program(x):
        return note(x + 1) + 1

    compiled = dynamotor.compile(program)
    x = torch.ones(2)
    torch.testing.assert_close(compiled(x), torch.full((2,), 5.0))
    compiled(x)
    assert seen == [4.0, 4.0]


def test_compile_fx_takes_plain_graphs_and_graphs_with_parameters():
    x = torch.randn(3, 4)
    gm = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    out = dynamotor.compile_fx(gm, [x])(x)
    torch.testing.assert_close(out[0] if isinstance(out, (tuple, list)) else out, gm(x))
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    torch.testing.assert_close(dynamotor.compile_fx(model, [x])(x), model(x))


def test_compile_fx_called_with_other_inputs_than_its_examples():
    gm = torch.fx.symbolic_trace(lambda x, y: (torch.relu(x) + y, x.exp()))
    call = dynamotor.compile_fx(gm, [torch.randn(64, 64), torch.randn(64, 64)])
    for x in (
        torch.randn(64, 64),
        torch.randn(3, 5),
        torch.randn(64, 64).double(),
        torch.randn(64, 64).t(),
        torch.randn(4).relu_(),
    ):
        torch.testing.assert_close(call(x, x + 1), gm(x, x + 1))
    x = torch.randn(5, requires_grad=True)
    call(x, x)[0].sum().backward()
    torch.testing.assert_close(x.grad, (x > 0).float() + 1)


def test_reset_compiles_again():
    calls = []

    def backend(gm, inputs):
        calls.append(gm)
        return gm.forward

    compiled = dynamotor.compile(function, backend=backend)
    x = torch.randn(3)
    compiled(x), compiled(x)
    dynamotor.reset()
    compiled(x)
    assert len(calls) == 2


def test_options_hold_for_one_callable():
    def noisy(x):
        return torch.nn.functional.dropout(x, 0.5, True)

    x = torch.ones(64)
    compiled = dynamotor.compile(noisy, options={"fallback_random": True})
    torch.manual_seed(3)
    ours = compiled(x)
    torch.manual_seed(3)
    torch.testing.assert_close(ours, noisy(x))


def test_options_hold_for_the_parts_around_an_op_that_eager_runs():
    def noisy(x):
        return torch.nn.functional.rrelu(torch.nn.functional.dropout(x, 0.5, True), training=True)

    x = torch.ones(64)
    for dynamic in (False, True):
        compiled = dynamotor.compile(noisy, options={"fallback_random": True}, dynamic=dynamic)
        torch.manual_seed(3)
        ours = compiled(x)
        torch.manual_seed(3)
        torch.testing.assert_close(ours, noisy(x), rtol=0, atol=0)


def test_compiled_dropout_repeats_under_a_seed_and_keeps_the_rate():
    compiled = dynamotor.compile(lambda x: torch.nn.functional.dropout(x, 0.25, True))
    x = torch.ones(200, 500)
    torch.manual_seed(5)
    a, b = compiled(x), compiled(x)
    torch.manual_seed(5)
    torch.testing.assert_close(compiled(x), a)
    assert not torch.equal(a, b)
    assert abs((a == 0).float().mean().item() - 0.25) < 0.01
    torch.testing.assert_close(a[a != 0], torch.full_like(a[a != 0], 1 / 0.75))


def test_options_hold_for_the_backward_too(monkeypatch):
    seen = []

    def spy(graph, info, cuda_graphs=False):
        seen.append((info.kind, config.exact, config.max_autotune, cuda_graphs))
        return graph.forward

    monkeypatch.setattr(backends, "compile_aten", spy)
    x = torch.ones(3, requires_grad=True)
    compiled = dynamotor.compile(
        lambda x: x.sin() * 2, mode="reduce-overhead", options={"exact": True, "max_autotune": True}
    )
    compiled(x).sum().backward()
    assert seen == [("forward", True, True, True), ("backward", True, True, True)]
