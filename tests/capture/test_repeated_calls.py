"""Calls of C functions with tensors of the same kinds: the first one in a trace shows the results of the others.
Programs in which equal calls differ by something else, each compared with eager.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import dynamotor
from dynamotor.capture.values import tensor as tensor_values


def layers(x, w):
    for _ in range(5):
        x = F.linear(x, w).relu() + x
    return x


def test_layers_of_one_kind_try_each_call_once(monkeypatch):
    tried, trial = [], tensor_values.trial
    monkeypatch.setattr(tensor_values, "trial", lambda *args: tried.append(args[1]) or trial(*args))
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    compiled = dynamotor.compile(layers, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, w), layers(x, w))
    assert len(tried) == 3


def aliases(x, w):
    a = x.contiguous()
    b = x.t().contiguous()
    c = b.contiguous()
    a.add_(1)
    c.mul_(2)
    d, e = x.to(x.dtype), x.to(x.dtype, copy=True)
    d.sub_(3)
    return x + 0, a + 0, b + 0, c + 0, d, e


def views(x, w):
    parts = [x.reshape(-1), x.t().reshape(-1), x.reshape(-1), x.t().reshape(-1)]
    for i, part in enumerate(parts):
        part.add_(i)
    return *parts, x + 0


def conjugates(x, w):
    z = torch.complex(x, w[: x.shape[0]])
    lazy, plain = z.conj(), z.conj().clone()
    first, second = lazy.resolve_conj(), plain.resolve_conj()
    third, fourth = lazy.imag.resolve_neg(), plain.imag.resolve_neg()
    plain.mul_(2)
    return first, second, third, fourth, lazy.is_conj(), plain.is_conj()


def histories(x, w):
    y = x.detach().clone().requires_grad_()
    a = x.sin() * 2
    b = y.sin() * 2
    with torch.no_grad():
        c = y.sin() * 2
    return a.requires_grad, b.requires_grad, c.requires_grad, torch.autograd.grad(b.sum(), y)[0] + c + a


def regions(x, w):
    out = [x @ w]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out.append(x @ w)
    out.append(x @ w)
    return [o.dtype for o in out], [o.float() for o in out]


def default_dtypes(x, w):
    n = torch.ones(3, dtype=torch.long)
    out = [n / 2]
    torch.set_default_dtype(torch.float64)
    out.append(n / 2)
    torch.set_default_dtype(torch.float32)
    return [o.dtype for o in out], out[0] + out[1]


def written_results(x, w):
    a, out = x.exp(), torch.empty_like(x)
    torch.add(x, a, out=out)
    b = x.exp()
    a.zero_()
    torch.add(x, b, out=out)
    c = x.exp().add_(1)
    return a, b, c, out, x.exp()


def numbers(x, w):
    n = torch.arange(6).reshape(2, 3)
    return (
        n * 2,
        n * 2.0,
        n * True,
        n.sum(0, True),
        n.sum(0, False),
        n.clamp(min=1),
        n.clamp(min=1.5),
        n.float().clamp(1),
    )


def random_numbers(x, w):
    torch.manual_seed(3)
    a = F.dropout(x, 0.5), F.dropout(x, 0.5), torch.rand_like(x), torch.rand_like(x)
    return [t + 0 for t in a]


def statistics(x, w):
    mean, var = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    out = [
        torch.batch_norm(x, None, None, mean, var, flag, 0.1, 1e-5, False)
        for flag in (False, True, False, True)
    ]
    return *out, mean, var


def mapped(x, w):
    a = x * 2
    return torch.vmap(lambda row: row * 2 + 1)(x) + a + torch.vmap(lambda row: row * 2 + 1)(x)


@pytest.mark.parametrize(
    "fn",
    [
        layers, aliases, views, conjugates, histories, regions, default_dtypes, written_results, numbers, random_numbers,
        statistics, mapped,
    ],
)  # fmt: skip
@pytest.mark.parametrize("inference", [False, True])
def test_calls_that_look_alike(fn, inference):
    if inference and fn is histories:
        pytest.skip("gradients of tensors of inference mode")
    compiled = dynamotor.compile(fn, backend="eager")
    for _ in range(2):
        found = []
        with torch.inference_mode(inference):
            inputs = torch.randn(4, 4), torch.randn(4, 4)
            for run in (compiled, fn):
                x, w = [t.clone() for t in inputs]
                found.append((run(x, w), x, w))
        assert str(found[0]) == str(found[1])


def refused_later(x, w):
    a = x + w
    b = x + w.t()
    return a + b, x @ w, x @ w[:2]


def test_a_call_of_another_kind_is_refused():
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    for run in (dynamotor.compile(refused_later, backend="eager"), refused_later):
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
            run(x, w)
