"""Autograd comes from an output of a compiled function to what eager's graph leads to, and to nothing
else.
"""

from __future__ import annotations

import pytest
import torch

import dynamotor
from dynamotor.base.errors import BackendError

backends = pytest.mark.parametrize("backend", ["aot_eager", "native"])


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()


class Noisy(torch.autograd.Function):
    """Counts its backwards; gives ones more than arrives."""

    runs = 0

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Noisy.runs += 1
        return grad * 2 + 1


def same(a, b) -> bool:
    return (a is None) == (b is None) and (a is None or torch.allclose(a, b))


@backends
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_hooks_on_outputs_are_called_when_their_gradient_comes(backend, used):
    def both(x):
        return x.sin(), x.exp()

    def calls(f):
        x, seen = leaf(3), []
        outs = f(x)
        for k, out in enumerate(outs):
            out.register_hook(lambda grad, k=k: seen.append((k, grad.clone())))
            out.retain_grad()
        sum(outs[k].sum() for k in used).backward()
        return sorted(k for k, _ in seen), [out.grad for out in outs], x.grad

    expected = calls(both)
    compiled = dynamotor.compile(both, backend=backend)
    for _ in range(2):
        seen, kept, grad = calls(compiled)
        assert seen == expected[0] and torch.allclose(grad, expected[2])
        assert all(same(a, b) for a, b in zip(kept, expected[1], strict=True))


@backends
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_what_lies_between_two_compiled_functions_is_visited_as_in_eager(backend, used):
    def first(x, y):
        return (x * y).tanh(), y.cos()

    def second(a, b, c):
        mixed = a.sin() * b
        return a.exp(), b.sigmoid().square(), mixed * c

    def run(first, second):
        x, y, c, Noisy.runs, seen = leaf(4), leaf(4), leaf(4), 0, []
        for t in (x, y, c):
            t.register_hook(lambda grad: seen.append(None if grad is None else grad.sum()))
            t.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.sum()))
        p, q = first(x, y)
        p.register_hook(lambda grad: seen.append(grad.sum()))
        noisy = Noisy.apply(p)
        noisy.register_hook(lambda grad: seen.append(grad.sum()))
        quiet = q * 3
        quiet.register_hook(lambda grad: seen.append(grad.sum()))
        outs = second(noisy, quiet, c)
        sum(outs[k].sum() for k in used).backward()
        return [x.grad, y.grad, c.grad], Noisy.runs, sorted(map(float, seen))

    grads, runs, seen = run(first, second)
    ours = [dynamotor.compile(f, backend=backend) for f in (first, second)]
    for _ in range(2):
        got, times, hooks = run(*ours)
        assert times == runs and len(hooks) == len(seen)
        assert all(same(a, b) for a, b in zip(got, grads, strict=True))
        assert torch.allclose(torch.tensor(hooks), torch.tensor(seen))


@backends
def test_a_compiled_function_without_any_gradient_gives_none(backend):
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return None

    x = leaf(3)
    Stops.apply(dynamotor.compile(lambda x: x.sin() * 2, backend=backend)(x)).sum().backward()
    assert x.grad is None


@backends
def test_a_break_with_a_custom_function_inside(backend):
    def f(x, w):
        a = (x @ w).relu()
        b = Noisy.apply(x * w.sum())  # a break: custom functions run in eager
        return a.sin() + x, b.cos() * a.detach(), a * 2

    def run(f):
        x, w, Noisy.runs = leaf(3, 3), leaf(3, 3), 0
        outs = f(x, w)
        outs[0].sum().backward(retain_graph=True)
        first = Noisy.runs
        outs[1].sum().backward()
        return first, Noisy.runs, x.grad, w.grad

    expected = run(f)
    compiled = dynamotor.compile(f, backend=backend)
    for _ in range(2):
        got = run(compiled)
        assert got[:2] == expected[:2] == (0, 1)
        assert torch.allclose(got[2], expected[2]) and torch.allclose(got[3], expected[3])


@backends
def test_several_nodes_share_values_with_views_writes_and_plain_outputs(backend):
    def f(a, b, state):
        state.add_(1)
        both = a * b
        return both, both[0], a.exp(), (b * 2).detach(), state * 2, 5

    def run(f):
        a, b, state = leaf(3, 3), leaf(3, 3), torch.zeros(3)
        x, y = a * 1, b * 1
        outs = f(x, y, state)
        (outs[1].sum() + outs[2].sum()).backward()
        return [out if isinstance(out, int) else out.detach() for out in outs], state, a.grad, b.grad

    expected, got = run(f), run(dynamotor.compile(f, backend=backend))
    torch.testing.assert_close(got, expected)


@backends
def test_a_write_to_an_output_that_is_saved_is_noticed(backend):
    def f(a, b):
        both = a.exp()
        return both, both * b

    x, y = leaf(3), leaf(3)
    outs = dynamotor.compile(f, backend=backend)(x * 1, y * 1)
    with torch.no_grad():
        outs[0].mul_(2)
        outs[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (outs[0] + outs[1]).sum().backward()


@backends
def test_hooks_behind_an_accumulated_gradient_wait_for_the_next_one(backend):
    class Heads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.a(x), self.b(x)

    def run(compiled):
        model, seen = Heads(), []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
        call = dynamotor.compile(model, backend=backend) if compiled else model
        for k in (0, 1, 0, 0, 1):  # gradients stay, so that a hook cannot tell by them whether one has come
            call(torch.ones(4, 3))[k].sum().backward()
            seen.append(k)
        return [sorted(seen[i : i + 2]) + seen[i + 2 : i + 3] for i in range(0, len(seen), 3)]

    assert run(compiled=True) == run(compiled=False)


@backends
def test_an_output_with_a_kept_gradient_is_written_in_place(backend):
    out = dynamotor.compile(lambda x: (torch.zeros(2), x * 3), backend=backend)(leaf(3))[1]
    out.retain_grad()
    out.mul_(2)
    out.sum().backward()
    assert torch.equal(out.grad, torch.ones_like(out))


@backends
@pytest.mark.parametrize("between", [False, True])
def test_hooks_on_an_output_that_another_is_computed_from_are_refused(backend, between):
    def f(x, y):
        hidden = x.sin()
        return hidden, hidden[0], hidden.exp() * 2, y * 2

    def outputs():
        x, y = leaf(3, 3), leaf(3, 3)
        return dynamotor.compile(f, backend=backend)(*((x * 1, y * 1) if between else (x, y)))

    for hang in (lambda t: t.retain_grad(), lambda t: t.register_hook(lambda grad: grad * 2)):
        outs = outputs()
        hang(outs[0])
        with pytest.raises(BackendError, match="DM403"):
            (outs[0].sum() + outs[2].sum()).backward()
        outs = outputs()
        hang(outs[0])
        hang(outs[1])
        hang(outs[2])
        hang(outs[3])
        (outs[0].sum() + outs[1].sum() + outs[3].sum()).backward()  # all of the gradient comes from outside
        assert not outs[0].retains_grad or torch.equal(
            outs[0].grad[1:], torch.ones(2, 3, dtype=torch.float64)
        )


def through_a_layer(layer, x, memory):
    keys = layer[0](memory)
    return layer[1](x) * keys, keys


@backends
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_parameters_of_a_module_that_is_an_argument_need_no_nodes_of_their_own(backend, used):
    compiled = dynamotor.compile(through_a_layer, backend=backend)
    grads, visits, parts = [], [], []
    for f in (through_a_layer, compiled, compiled):
        layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).double()
        for p in layer.parameters():
            torch.nn.init.constant_(p, 0.5)
        x, memory = Noisy.apply(leaf(3)), leaf(3)
        Noisy.runs = 0
        outs = f(layer, x, memory * 1.5)
        todo, seen = [out.grad_fn for out in outs], set()
        while todo:
            if (node := todo.pop()) is not None and node not in seen:
                seen.add(node)
                todo += [following for following, _ in node.next_functions]
        sum(outs[k].sum() for k in used).backward()
        parts.append(sum(node.name().startswith("Compiled") for node in seen))
        visits.append(Noisy.runs)
        grads.append([memory.grad, *(p.grad for p in layer.parameters())])
    for found in grads[1:]:
        assert all(map(same, found, grads[0]))
    assert visits == visits[:1] * 3
    assert parts[1:] == [2, 2]  # for `x`, which `keys` does not lead to, and for the rest
