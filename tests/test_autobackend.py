"""backend="auto" measures each graph, takes the quickest right one, and keeps the decision."""

import copy

import pytest
import torch

import dynamotor
from dynamotor import autobackend
from dynamotor.base.config import config
from dynamotor.base.events import collect


@pytest.fixture(autouse=True)
def _few(tmp_path):
    with config.patch(
        auto_seconds=0.0,
        auto_backends="eager,native",
        cache_dir=str(tmp_path),
        disk_cache=True,
        check=False,
        verify=False,
    ):
        yield


def candidates(monkeypatch, **rows):
    """Only these, each a function of (gm, inputs)."""
    for name, backend in rows.items():
        monkeypatch.setitem(autobackend.ROWS, name, autobackend.Row(backend))
    return {"backend": "auto", "options": {"auto_backends": ",".join(["eager", *rows])}}


@pytest.fixture
def slowly(monkeypatch):
    """A backend whose calls take time by autobackend's clock, which stands still otherwise."""
    seconds = [0.0]
    monkeypatch.setattr(autobackend, "_now", lambda: seconds[0])

    def backend(gm, inputs):
        def call(*given):
            seconds[0] += 1.0
            return gm.forward(*given)

        return call

    return backend


def chosen(events):
    return [event.data["chosen"] for event in events]


def test_the_quickest_is_taken_and_the_next_process_knows(monkeypatch, slowly):
    how = candidates(monkeypatch, slow=slowly)
    monkeypatch.setitem(autobackend.ROWS, "eager", autobackend.Row(slowly, ours=True))
    monkeypatch.setitem(autobackend.ROWS, "slow", autobackend.Row(lambda gm, inputs: gm.forward))
    x = torch.randn(8)
    for measured in (1, 0):
        with collect("auto", "phase") as events:
            torch.testing.assert_close(dynamotor.compile(lambda x: x.sin() + 1, **how)(x), x.sin() + 1)
        assert chosen([e for e in events if e.kind == "auto"]) == ["slow"]
        assert sum(e.kind == "phase" and e.data["name"] == "auto" for e in events) == measured


@pytest.mark.parametrize(
    "wrong",
    [
        lambda gm, inputs: lambda *given: [t * 1.01 for t in gm.forward(*given)],
        lambda gm, inputs: lambda *given: [t.clone() for t in gm.forward(*given)],  # not the input itself
        lambda gm, inputs: lambda *given: [t.detach() for t in gm.forward(*given)],
        lambda gm, inputs: 1 / 0,
    ],
)
def test_what_is_not_eagers_result_is_out(monkeypatch, slowly, wrong):
    how = candidates(monkeypatch, wrong=wrong)
    monkeypatch.setitem(autobackend.ROWS, "eager", autobackend.Row(slowly, ours=True))
    x = torch.randn(8, requires_grad=True)
    with collect("auto") as events:
        dynamotor.compile(lambda x: (x.sin(), x.view(2, 4)), **how)(x)
    assert chosen(events) == ["eager"] and events[0].data["times"][1].out


def test_measuring_has_no_effect_and_training_is_right():
    torch.manual_seed(0)
    mine = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    theirs, x = copy.deepcopy(mine), torch.randn(5, 6, requires_grad=True)
    state = torch.get_rng_state()
    fast = dynamotor.compile(mine, backend="auto", options={"auto_backends": "eager,native"})
    explained = dynamotor.explain(fast)(x)
    assert torch.equal(torch.get_rng_state(), state) and x.grad is None
    assert "native: " in str(explained) and "backward" in str(explained)
    assert "the quickest is" in str(dynamotor.explain(fast)(x))  # of earlier compilations, too
    for _ in range(2):
        theirs(x)
    assert all(one.out == "" for one in explained.choices[0]["times"])
    torch.testing.assert_close(dict(mine.named_buffers()), dict(theirs.named_buffers()))
    fast(x).square().sum().backward(), theirs(x).square().sum().backward()
    for ours, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_written_inputs_views_dropout_and_breaks():
    def f(x, y):
        x.mul_(2)
        print(end="")
        return torch.nn.functional.dropout(x + y, 0.5), y[1:]

    how = {"backend": "auto", "options": {"auto_backends": "eager,native,aot_eager"}}
    x, y = torch.ones(6), torch.ones(6)
    with collect("auto") as events:
        out, view = dynamotor.compile(f, **how)(x, y)
    assert x.tolist() == [2] * 6 and set(out.tolist()) <= {0.0, 6.0}
    assert view.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    assert len(events) == 2  # a decision for each part
    assert "random" in {one.name: one.out for one in events[1].data["times"]}["aot_eager"]


def test_sizes_that_differ_have_one_program():
    fast = dynamotor.compile(lambda x: (x * 2).sum(0), mode="max-autotune")
    for n in (3, 4, 5, 6):
        x = torch.randn(n, 4)
        torch.testing.assert_close(fast(x), (x * 2).sum(0))
    assert len(dynamotor.api.dispatcher_of(fast).entries) == 2


def test_what_must_not_run_twice_is_not_measured():
    generator = torch.Generator().manual_seed(1)
    fast = dynamotor.compile(lambda x: x + torch.rand(3, generator=generator), backend="auto")
    other = torch.Generator().manual_seed(1)
    torch.testing.assert_close(fast(torch.zeros(3)), torch.rand(3, generator=other))
    assert torch.equal(other.get_state(), generator.get_state())
