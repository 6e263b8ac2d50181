"""The check mode: faults planted one at a time into what runs compiled graphs, each caught by a verifier or
beside eager.
"""

import dataclasses
import types

import pytest
import torch

import dynamotor
from dynamotor.base import cache
from dynamotor.base.config import config
from dynamotor.base.errors import BackendError, InternalError
from dynamotor.base.events import counters
from dynamotor.codegen import call_program, checked, cpp, cpp_prelude, folded
from dynamotor.lower import outputs, passes
from dynamotor.lower.program import ExternStep
from dynamotor.runtime import memory

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _check_mode():
    with config.patch(check=True, verify=True):
        yield


def step(x, w):
    """Kernels before and after a product, a pooled result, an intermediate that others follow."""
    hidden = (x * 2).relu() @ w
    return hidden.sigmoid() * 3, (hidden - 1).softmax(-1)


def inputs():
    torch.manual_seed(0)
    return torch.randn(130, 130), torch.randn(130, 130)


def caught(code, fn=step, args=None, calls=1):
    fast = dynamotor.compile(fn, fullgraph=True)
    with pytest.raises((InternalError, BackendError), match=code) as error:
        held = [fast(*(args or inputs())) for _ in range(calls)]
        del held
    return str(error.value)


def test_nothing_planted():
    before = counters["check"]["calls"]
    fast = dynamotor.compile(step)
    for _ in range(3):
        torch.testing.assert_close(fast(*inputs()), step(*inputs()))
    assert counters["check"]["calls"] == before + 3


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float64},
        {"shape": (129, 130)},
        {"shape": (130, 131), "stride": (131, 1)},
        {"device": torch.device("meta")},
    ],
    ids=str,
)
def test_a_wrong_spec_of_an_aten_call(monkeypatch, change):
    real = call_program.Writer._expected

    def wrong(self, name, step):
        buffer = self.program.buffers[name]
        device = change.get("device", self.device)
        self.program.buffers[name] = dataclasses.replace(
            buffer, spec=dataclasses.replace(buffer.spec, **change)
        )
        kept, self.device = self.device, device
        try:
            return real(self, name, step)
        finally:
            self.program.buffers[name], self.device = buffer, kept

    monkeypatch.setattr(call_program.Writer, "_expected", wrong)
    assert "aten" in caught("DM404")


def test_a_pool_that_hands_out_live_memory(monkeypatch):
    monkeypatch.setattr(memory, "_use_count", lambda handle: 7)
    monkeypatch.setattr(memory, "sys", types.SimpleNamespace(getrefcount=lambda storage: 7))
    caught(
        "DM924", args=(torch.randn(190, 190), torch.randn(190, 190)), calls=12
    )  # smaller ones are not kept


def test_buffers_planned_into_the_same_memory(monkeypatch):
    monkeypatch.setattr(
        memory,
        "plan_offsets",
        lambda lives, inplace: (dict.fromkeys([one.name for one in lives], 0), 1 << 20),
    )
    caught("DM923", lambda x, w: torch.addmm(w @ x, x @ w, (x * 2).relu() @ w))


def test_buffers_in_the_same_memory_without_the_verifier(monkeypatch):
    monkeypatch.setattr(
        memory,
        "plan_offsets",
        lambda lives, inplace: (dict.fromkeys([one.name for one in lives], 0), 1 << 20),
    )
    with config.patch(verify=False):
        caught("DM92[12]", lambda x, w: torch.addmm(w @ x, x @ w, (x * 2).relu() @ w))


def test_a_buffer_that_ends_too_early(monkeypatch):
    real = call_program.Writer._plan

    def short(self):
        real(self)
        for name in self.plan.last:
            self.plan.last[name] = self.plan.first.get(name, 0)

    monkeypatch.setattr(call_program.Writer, "_plan", short)
    caught("DM922", lambda x, w: ((h := x @ w).relu() @ x) @ h)


def test_an_output_swapped_with_another(monkeypatch):
    real = call_program.Writer.write

    def swapped(self):
        self.program.outputs = self.program.outputs[::-1]
        return real(self)

    monkeypatch.setattr(call_program.Writer, "write", swapped)
    assert "each step alone" in caught("DM922")


def edited(monkeypatch, edit):
    """Every generated kernel with its text changed."""
    real = cpp.emit_kernel

    def emit(kernel):
        function = real(kernel)
        return dataclasses.replace(
            function,
            name=function.name + "x",
            source=edit(function.source.replace(function.name, function.name + "x")),
        )

    monkeypatch.setattr(cpp, "emit_kernel", emit)


def test_a_kernel_that_stores_nothing(monkeypatch):
    edited(monkeypatch, lambda text: text.replace("{", "{return;", 1))
    text = caught("DM922")
    assert "nan" in text and "test_runtime_faults.py" in text and "(x * 2).relu()" in text, (
        text
    )  # the first that differs, by its line


def test_a_kernel_that_leaves_out_the_last_elements(monkeypatch):
    edited(monkeypatch, lambda text: text.replace("<130;", "<129;"))
    caught("DM922", lambda x, w: (x * 2).softmax(-1) @ w)


def test_a_kernel_that_writes_beyond_its_buffer(monkeypatch):
    edited(monkeypatch, lambda text: text.rstrip()[:-1] + "p1[130*130+3]=1;}\n")
    caught("DM921", lambda x, w: (x * 2).relu() @ w)


def test_a_kernel_with_another_constant(monkeypatch):
    edited(monkeypatch, lambda text: text.replace("2.0f", "2.5f"))
    assert "(x * 2).relu()" in caught("DM922")


def test_the_last_of_equal_maxima(monkeypatch):
    name = next(name for name in cpp_prelude._SECTIONS if name.startswith("more_ less_"))
    compares = cpp_prelude._SECTIONS[name].replace("here<at", "here>at")
    assert compares != cpp_prelude._SECTIONS[name]
    monkeypatch.setitem(cpp_prelude._SECTIONS, name, compares)
    caught("DM922", lambda x: x.argmax(1), (torch.ones(3, 45),))


def test_a_stale_constant(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.BatchNorm2d(8)).eval()
    monkeypatch.setattr(folded.FoldedCall, "_key", lambda self, sources: (0, b""))
    fast, x = dynamotor.compile(model), torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        fast(x)
        model[0].weight.neg_()
        with pytest.raises(InternalError, match="DM922"):
            fast(x)


def test_a_missing_mutation(monkeypatch):
    monkeypatch.setattr(outputs, "write_inputs", lambda ctx, copies, env, targets: None)
    caught("DM922", lambda x, w: x.add_(w).sum())


def test_a_pass_that_changes_what_is_computed(monkeypatch):
    real = passes.pipeline

    def drop(gm, info):
        for node in [n for n in gm.graph.nodes if n.target is aten.relu.default]:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)

    monkeypatch.setattr(
        passes, "pipeline", lambda info, on_gpu=False: [*real(info, on_gpu), ("drop relu", drop)]
    )
    assert "each step alone" in caught("DM922")


def test_operands_swapped(monkeypatch):
    real = call_program.Writer.extern

    def swapped(self, step: ExternStep):
        if step.target is aten.mm.default:
            step = dataclasses.replace(step, args=step.args[::-1])
        return real(self, step)

    monkeypatch.setattr(call_program.Writer, "extern", swapped)
    assert "aten.mm" in caught("DM922")


def test_a_view_with_another_offset(monkeypatch):
    real = call_program.make_view
    monkeypatch.setattr(
        call_program,
        "make_view",
        lambda t, ref, spec: real(t, dataclasses.replace(ref, offset=ref.offset + 1), spec),
    )
    layer = torch.nn.Linear(130, 130)
    with torch.no_grad():
        caught("DM922", lambda x: layer(x[:, :129] @ x[:129].exp()[:, :130]), (torch.randn(130, 130),))


def test_eager_raises_and_the_graph_does_not(monkeypatch):
    edited(monkeypatch, lambda text: text.replace("__atomic_store_n(outside", "0&&(outside"))
    monkeypatch.setattr(
        cpp,
        "prelude",
        lambda *args, real=cpp.prelude: real(*args).replace("__atomic_store_n(outside,1,0);", ""),
    )
    caught("DM922", lambda x, w: x[torch.arange(200)] + 1)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-7], lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:]]
)
def test_a_damaged_cache_entry(damage, tmp_path):
    with config.patch(cache_dir=str(tmp_path)):
        cache.store("build", "ab" * 32, b"x" * 100)
        path = cache.entry_path("build", "ab" * 32)
        path.write_bytes(damage(path.read_bytes()))
        assert cache.load("build", "ab" * 32) is None


def test_randomness_mutation_and_aliasing_raise_no_alarm():
    def fn(x, w):
        y = torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)
        x.add_(1)
        return y, y.t(), x[1:], w.relu_()

    for fallback_random in (False, True):
        with config.patch(fallback_random=fallback_random):
            fast = dynamotor.compile(fn)
            for _ in range(2):
                fast(*inputs())
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    torch.testing.assert_close(
        dynamotor.compile(lambda: torch.rand(2), options={"fallback_random": True})(), expected
    )


def test_rounding_alone_is_no_difference():
    x = torch.randn(4096)
    assert checked.difference(x, x * (1 + 1e-6)) is None
    assert "1 of 4096" in checked.difference(x, x.index_fill(0, torch.tensor([7]), 9.0))
    assert checked.difference(torch.tensor([float("nan")]), torch.tensor([0.0])) is not None
    assert checked.difference(torch.tensor([1, 2]), torch.tensor([1, 3])) is not None
    assert checked.difference(torch.zeros(2), torch.zeros(2, dtype=torch.float64)) is not None
