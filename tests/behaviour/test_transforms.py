"""Function transforms of torch.func: one graph each, values and errors as in eager."""

from __future__ import annotations

import pytest
import torch

from .harness import Theme

PRELUDE = r"""
import functools, torch
import torch.nn as nn, torch.nn.functional as F
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
W = torch.randn(3, 4); lin = nn.Linear(4, 3); seen = []
def f(a): return (a.sin() * W[0]).sum()
def loss(p, a, b): return (functional_call(lin, p, (a,)) - b).pow(2).mean()
def quiet(a):
    with torch.no_grad(): b = a ** 2
    return (a * b).sum()
def writes(a):
    b = a.clone(); b[0] = 5.; b[1:] *= 2
    return b
def keeps(a):
    seen.append(a)
    return a.sum()
grad_f = grad(f); jac = jacrev(lambda a: (W @ a).tanh()); rows = vmap(f)
class Gate(nn.Module):
    def forward(self, a): return a.relu() + 1
"""

TABLE = r"""
vmap(f)(x), rows(x), torch.vmap(torch.dot)(x, x), vmap(lambda a, b: a @ b, in_dims=(0, None), out_dims=1)(x, W.T), vmap(vmap(lambda a: a * 2 + 1))(x), vmap(vmap(lambda a: torch.where(a > 0, a, 2.) * 3))(x), vmap(f, chunk_size=2)(x), vmap(f, in_dims=1)(torch.randn(4, 5).mul(0)), vmap(lambda a, *, k: a * k)(x, k=x), vmap(Gate())(x), vmap(lin)(x), vmap(writes)(x), functools.partial(vmap(f))(x), vmap(lambda a: torch.softmax(a, 0).cumsum(0))(x), vmap(lambda a: (a, {"s": a.sum()}))(x), vmap(lambda d: {"a": d["a"] + 1, "b": (d["b"][0],)}, in_dims=({"a": 0, "b": 0},))({"a": x, "b": [x]}), vmap(lambda a: torch.full((2,), 3.))(x), vmap(lambda a, n: a * n, in_dims=(0, None))(x, 3)
grad(f)(x[0]), grad_f(x[1]) + 1, grad(lambda a, b: (a * b).sum(), argnums=(0, 1))(x, x + 1), grad(lambda a: ((a**2).sum(), a.cos()), has_aux=True)(x), grad(lambda a: (a.sum()**2, {"o": a, "n": (a * 2,)}), has_aux=True)(x), grad_and_value(f)(x[0]), grad(lambda a: grad(lambda t: (t**3).sum())(a).sum())(x[0]), grad(quiet)(x[0]), grad(lambda a: (a.detach() * a).sum())(x), vmap(grad(f))(x), vmap(grad(loss), in_dims=(None, 0, 0))(dict(lin.named_parameters()), x, x[:, :3]), grad(loss)(dict(lin.named_parameters()), x, x[:, :3]), grad(lambda a, *, k: (a * k).sum())(x, k=2.)
vjp(torch.sin, x)[1](x), vjp(lambda a: a.sin() * 2, x)[1](x), vjp(lambda a: (a * 2, a.cos()), x, has_aux=True)[1](x), jvp(lambda a: a.sin() * a, (x,), (x * 2,)), jvp(lambda a, b: {"v": a * b}, (x, x + 1), (x, x)), vmap(lambda t: jvp(lambda a: a.tanh(), (x[0],), (t,))[1])(torch.eye(4))
jacrev(lambda a: (W @ a).tanh())(x[0]), jac(x[0]), jacfwd(lambda a: (W @ a).tanh())(x[0]), hessian(f)(x[0]), vmap(hessian(f))(x), jacrev(lambda a: (W @ a).tanh(), chunk_size=2)(x[0]), jacrev(lambda a: (a**2, a.sum()), has_aux=True)(x[0]), jacrev(lambda a, b: {"p": a * b, "q": (a.sum(),)}, argnums=(0, 1))(x[0], x[1]), jacfwd(lambda a, b: a * b, argnums=1)(x[0], x[1]), jacrev(jacfwd(f))(x[0])
vmap(f)(x.sum()), vmap(lambda a: 3)(x), vmap(f, in_dims=5)(x), grad(lambda a: a)(x), grad(lambda a: a.sum(), argnums=3)(x), vmap(lambda a: a.item())(x[0]), vmap(lambda a: a if a.sum() > 0 else -a)(x), vmap(lambda a: a + torch.rand(4))(x), jvp(f, (x,), (x[0],)), jvp(f, x, x), vjp(lambda a: 3, x), vmap(lambda a: a.add_(1))(W[:, 0] > 0), linearize(f, x[0])[1](x[0]) #3

    out, pull = vjp(lambda a, b: (a * b, b.exp()), x, x + 1)
    return out, pull((x, x)), pull((x * 2, x))

    out, pull = vjp(lambda a: a.sin(), x[0])
    return vmap(pull)(torch.eye(4))

    k = x.sum()
    def inner(a): return a * k + S[0]
    return vmap(inner)(x)

    total = vmap(lambda a: vmap(lambda b: (a * b).sum())(x))(x)
    return total.diagonal()

    y = x.clone()
    return vmap(lambda a: a.add_(1))(y), y #3

    def shift(a):
        nonlocal y
        y = a * 2
        return a
    y = None
    return vmap(shift)(x).sum(), y is None #3

    count = []
    r = grad(lambda a: (count.append(a.shape), a.sum())[1])(x)
    return r, count

    return vmap(keeps)(x).shape, len(seen), seen.clear() #3

    torch.manual_seed(3)
    return vmap(lambda a: F.dropout(a, 0.5), randomness="different")(x).shape #3

    out, pull = vjp(lambda a: F.dropout(a, 0.5), x)
    return (pull(x)[0] != 0).equal(out != 0) #4

    try: return vmap(lambda a: a.view(7))(x)
    except RuntimeError: return "no" #3

    with torch.no_grad():
        return grad(f)(x[0]), vmap(f)(x), jacrev(f)(x[0])

    x.requires_grad_()
    return vmap(grad(f))(x) #2
"""

theme = Theme(PRELUDE, TABLE)


@pytest.mark.parametrize("at", range(len(theme.cases)))
def test_as_in_eager(at: int) -> None:
    body, graphs = theme.cases[at]
    if 'jacrev(lambda a, b: {"p"' in body and torch.__version__ < "2.13":
        theme.cases[at] = body, graphs + 1  # this PyTorch reads places of the Jacobian from a tensor
    theme.check(at)
