"""Reading and setting `.grad`, and clipping, inside compiled functions."""

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

import dynamotor


def clip_norm(m, x):
    return x + clip_grad_norm_(m.parameters(), 1.0)


def clip_one_without_foreach(m, x):
    return x * clip_grad_norm_(m.weight, 0.5, norm_type=1, foreach=False)


def clip_value(m, x):
    clip_grad_value_([p for p in m.parameters() if p.grad is not None], 0.3)
    return x * 2


def clip_by_total(m, x):
    total = get_total_norm([p.grad for p in m.parameters() if p.grad is not None])
    clip_grads_with_norm_(m.parameters(), 0.7, total)
    return x * total


def zero_to_none(m, x):
    m.zero_grad()
    return x + sum(p.grad is None for p in m.parameters())


def zero_in_place(m, x):
    m.zero_grad(set_to_none=False)
    return x + m.bias.grad.sum()


def set_alias(m, x):
    g = x.expand(3, 3) * 2.0
    m.weight.grad = g
    g.add_(1)
    m.weight.grad.mul_(3)
    return m.weight.grad.sum() + x


def accumulate(m, x):
    g = (x * 2).expand(3, 3)
    m.weight.grad = g.clone() if m.weight.grad is None else m.weight.grad + g
    return x


def set_aside(m, x):
    g = m.weight.grad
    m.weight.grad = None
    seen = x + (m.weight.grad is None)
    m.weight.grad = g
    return seen


ONE_GRAPH = [
    clip_norm,
    clip_one_without_foreach,
    clip_value,
    clip_by_total,
    zero_to_none,
    zero_in_place,
    set_alias,
    accumulate,
    set_aside,
]


def wrong_shape(m, x):
    try:
        m.weight.grad = torch.zeros(2)
    except RuntimeError:
        return x + 1
    return x


def backward_inside(m, x):
    m(x).sum().backward()
    norm = clip_grad_norm_(m.parameters(), 1.0)
    m.zero_grad()
    return norm + x


def hook_reads_a_gradient(m, x):
    y = x.clone().requires_grad_() * 2
    y.register_hook(lambda g: g if m.weight.grad is None else g * m.weight.grad.sum())
    return y.sum()


def checkpoint_reads_a_gradient(m, x):
    def inside(x):
        return m(x) * (1 if m.weight.grad is None else m.weight.grad.sum())

    return checkpoint(inside, x, use_reentrant=False).sum()


def results(fn):
    torch.manual_seed(0)
    m, found = nn.Linear(3, 3), []
    for call in range(4):
        if call < 3:
            for p in m.parameters():
                p.grad = torch.randn(p.shape)
        else:
            m.weight.grad = None
        result = fn(m, torch.arange(3.0) + call)
        if result.requires_grad:
            m.weight.grad = torch.full((3, 3), 0.5)  # after the forward, before the backward
            result.sum().backward()
        found += [
            result.detach().clone(),
            *(None if p.grad is None else p.grad.clone() for p in m.parameters()),
        ]
    return found


def assert_alike(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("fn", ONE_GRAPH, ids=lambda fn: fn.__name__)
def test_gradients_are_read_and_set_in_one_graph(fn):
    assert_alike(results(dynamotor.compile(fn, fullgraph=True)), results(fn))


@pytest.mark.parametrize(
    "fn",
    [wrong_shape, backward_inside, hook_reads_a_gradient, checkpoint_reads_a_gradient],
    ids=lambda fn: fn.__name__,
)
def test_gradients_around_backwards_are_eagers(fn):
    assert_alike(results(dynamotor.compile(fn)), results(fn))


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"keep_grads": True}], ids=str)
def test_a_loss_of_gradients_in_a_whole_step(options):
    def train(compiled):
        torch.manual_seed(0)
        m = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(m.parameters(), 0.1)

        def loss_fn(y):
            g = m.weight.grad
            return y.square().sum() + (0 if g is None else g.sum() * m.weight.sum())

        step, found = dynamotor.compile_step(m, loss_fn, optimizer, **options), []
        for i in range(5):
            x = torch.ones(2, 3) * (1 + i)
            if compiled:
                found.append(step(x))
                continue
            if options.get("keep_grads"):
                optimizer.zero_grad()
            loss = loss_fn(m(x))
            (loss / options.get("accumulate", 1)).backward()
            if (i + 1) % options.get("accumulate", 1) == 0:
                optimizer.step()
                if not options.get("keep_grads"):
                    optimizer.zero_grad()
            found.append(loss.detach())
        return [*found, m.weight.detach()]

    assert_alike(train(True), train(False))


class Counting(torch.optim.SGD):
    calls = 0

    def zero_grad(self, set_to_none=True):
        self.calls += 1
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize("cls", [torch.optim.SGD, Counting])
def test_optimizers_reset_gradients_in_one_graph(cls, none):
    def run(compiled):
        torch.manual_seed(0)
        m, found = nn.Linear(3, 3), []
        optimizer = cls(m.parameters(), 0.1, foreach=none)

        def fn(x):
            optimizer.zero_grad(set_to_none=none)
            return m(x)

        called = dynamotor.compile(fn, fullgraph=True) if compiled else fn
        for call in range(3):
            for p in m.parameters():
                p.grad = torch.ones_like(p) if call else None
            found += [called(torch.ones(3)).detach(), m.weight.grad, m.bias.grad]
        return [*found, torch.tensor(getattr(optimizer, "calls", 0))]

    assert_alike(run(True), run(False))
