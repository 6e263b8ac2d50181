"""`compiled.warm_up(*args)` builds the programs of a call and its backward, and nothing of the program happens."""

import copy

import pytest
import torch

import dynamotor
from dynamotor.base.events import collect, counters

LOG: list[str] = []


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)
    )


def state(module, *tensors):
    values = [*module.state_dict().values(), *tensors]
    return [v.clone() for v in values], [v._version for v in values], torch.get_rng_state()


def nothing_is_built(call):
    counters.clear()
    with collect("code", "capture") as events:
        result = call()
    assert not events and not counters["build"]["compiled"]
    return result


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("train", [True, False])
def test_a_warm_model_builds_nothing_more_and_nothing_has_happened(train, backend):
    module = model().train(train)
    theirs = copy.deepcopy(module)
    fast = dynamotor.compile(module, backend=backend, options={"fallback_random": True})
    x = torch.randn(5, 6, requires_grad=True)
    before = state(module, x)
    with torch.set_grad_enabled(train):
        assert fast.warm_up(x) == []
        torch.testing.assert_close(state(module, x), before, rtol=0, atol=0)
        assert x.grad is None and all(p.grad is None for p in module.parameters())

        def step():
            torch.manual_seed(3)
            loss = fast(x).square().sum()
            if train:
                loss.backward()
            return loss

        found = nothing_is_built(step)
        torch.manual_seed(3)
        expected = theirs(x).square().sum()
        torch.testing.assert_close(found, expected)
    if train:
        grads = [p.grad for p in module.parameters()]
        expected.backward()
        torch.testing.assert_close(grads, [p.grad for p in theirs.parameters()])
        torch.testing.assert_close(dict(module.named_buffers()), dict(theirs.named_buffers()))


def test_written_inputs_lists_and_globals_stay_and_keywords_are_taken():
    def f(x, found, *, scale):
        LOG.append("ran")
        found.append(1)
        x.mul_(scale)
        return x + torch.rand_like(x)

    LOG.clear()
    x, found, generator = torch.ones(4), [], torch.get_rng_state()
    fast = dynamotor.compile(f)
    assert fast.warm_up(x, found, scale=2.0) == []
    assert x.tolist() == [1] * 4 and x._version == 0 and not found and not LOG
    assert torch.equal(torch.get_rng_state(), generator)
    nothing_is_built(lambda: fast(x, found, scale=2.0))
    assert x.tolist() == [2] * 4 and found == [1] and LOG == ["ran"]


def test_what_a_break_leaves_is_told_and_does_not_happen(capsys):
    def f(x):
        y = x.sin()
        print("seen")
        return y.cos()

    fast = dynamotor.compile(f)
    (left,) = fast.warm_up(torch.randn(3))
    assert "print" in left and "seen" not in capsys.readouterr().out
    x = torch.randn(3)
    torch.testing.assert_close(fast(x), x.sin().cos())


def test_a_module_keeps_a_method_of_that_name():
    class Own(torch.nn.Linear):
        def warm_up(self):
            return "mine"

    assert dynamotor.compile(Own(2, 2)).warm_up() == "mine"


def test_a_warm_backward_is_built_for_a_call_that_was_made_before():
    fast = dynamotor.compile(lambda x: (x.sin(), x.exp().sum()))
    x = torch.randn(4, requires_grad=True)
    out = fast(x)
    assert fast.warm_up(x) == []
    nothing_is_built(lambda: torch.autograd.grad(out[0].sum() + out[1], x))
