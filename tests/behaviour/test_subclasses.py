"""`__torch_function__`: objects and tensor subclasses that take calls of PyTorch over, in one graph."""

from __future__ import annotations

import pytest

from .harness import Theme

PRELUDE = r"""
import functools, torch
import torch.nn as nn, torch.nn.functional as F
class Sub(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})
class Plain(torch.Tensor):
    def twice(self): return self + self
    @property
    def half(self): return self.shape[0] // 2
class Meta(torch.Tensor):
    @staticmethod
    def __new__(cls, t, meta=None): return t.as_subclass(cls)
    def __init__(self, t, meta=None): self.meta = meta or {}
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Meta): out.meta = next((dict(a.meta) for a in args if isinstance(a, Meta)), {})
        return out
class Log:
    names = []
    def __init__(self, t): self.t = t
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.names.append(func.__name__)
        bare = lambda a: a.t if isinstance(a, Log) else [bare(b) for b in a] if isinstance(a, list) else a
        out = func(*[bare(a) for a in args], **(kwargs or {}))
        return Log(out) if isinstance(out, torch.Tensor) else out
    def __add__(self, other): return torch.add(self, other)
class Minus(torch.Tensor):
    def __radd__(self, other): return "own"
class Base(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.add: return NotImplemented
        return super().__torch_function__(func, types, args, kwargs or {})
class Derived(Base):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "derived" if func is torch.Tensor.add else super().__torch_function__(func, types, args, kwargs or {})
class Odd(torch.Tensor):
    @property
    def shape(self): return "odd"
    def sum(self): return 3
class Asking(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == torch.sin: func = torch.cos
        if func != torch.add and func == torch.Tensor.ndim.__get__: return 7
        return super().__torch_function__(func, types, args, kwargs or {})
class Param(nn.Parameter): pass
torch.manual_seed(5)
asking = torch.randn(3).as_subclass(Asking)
s, p, m, odd = (torch.randn(3, 4).as_subclass(c) for c in (Sub, Plain, Sub, Odd)); met = Meta(torch.randn(3, 4), {"k": 3}); log = Log(torch.randn(3, 4))
own, base, derived = (torch.randn(3, 4).as_subclass(c) for c in (Minus, Base, Derived)); par = Param(torch.ones(4))
"""

TABLE = r"""
s + x, x + s, 1 - s, s @ x.T, x @ s.T, s > 0, -s, 2 ** s, s == x, abs(s), s / x, s[0], s[:, 1], s.T, s.sum(), s.view(-1), s.max(0), s.split(2), s.unbind(0), s.shape, s.dtype, len(s), s.size(0), s.dim(), s.detach(), s.clone(), s.data
F.relu(s), F.softmax(s, -1), torch.cat([s, x]), torch.stack([x, s]), torch.where(s > 0, s, x), F.layer_norm(s, (4,)), torch.einsum("ij,kj->ik", s, x), torch.zeros_like(s), s.new_ones(3), torch.ops.aten.sin(s), [r.sum() for r in s], nn.functional.linear(s, x)
s.contiguous() is s, s.to(torch.float32) is s, isinstance(s, Sub), isinstance(s, torch.Tensor), type(s) is Sub, type(s + 1) is Sub, torch.is_tensor(s), {s: 1}[s], {"a": s, "b": [s * 2]}
p.twice(), p.half, p.twice().half, met.meta, (met * 2).meta, (met.view(-1) + 1).meta["k"], Meta(x, {"a": 1}), Meta(x, {"a": 1}) + 1, odd.shape, odd.sum(), (odd + x).t()
x.as_subclass(Sub), x.as_subclass(Sub) + 1, x.as_subclass(Sub).as_subclass(torch.Tensor), s.as_subclass(torch.Tensor) * 2, x.as_subclass(Sub).add_(1)
(log + x).t, torch.sin(log).t, torch.cat([log, x]).t, F.gelu(log + x).t, torch.sum(log).t #2
torch.sin(asking), asking.ndim, torch.sin == torch.cos, torch.sin != torch.sin, len == len, None != torch.add, torch.Tensor.ndim.__get__ == torch.Tensor.shape.__get__
x + own, own + x, base + derived, derived + base, base - x
torch.add(input=s, other=x), base + x, x + log, par * x, s.is_leaf, x * 2 if s.sum() > 0 else x, s.tolist()[0][0] #4

    with torch._C.DisableTorchFunctionSubclass():
        with torch._C.DisableTorchFunctionSubclass():
            y = x + 1
        return torch._C._is_torch_function_enabled(), y

    with torch._C.DisableTorchFunctionSubclass():
        inner = torch._C._is_torch_function_enabled()
    return inner, torch._C._is_torch_function_enabled(), x + 1

    Log.names.clear()
    F.relu(torch.cat([log, x]))
    return list(Log.names) #2

    y = x.clone().as_subclass(Sub)
    y.add_(1); y[0] = 5.; y *= 2
    return y, y.sum()

    y = s + 1; y.k = [3]
    return y, y.k

    with torch._C.DisableTorchFunctionSubclass(): y = s + 1
    return y

    with torch._C.DisableTorchFunctionSubclass():
        y = s + 1; print("x")
        return y * 2 #4

    y = s * 2; print("x")
    return y + x #2

    y = x.as_subclass(Sub); y.t_()
    return y + 1 #3
"""

theme = Theme(PRELUDE, TABLE)


@pytest.mark.parametrize("at", range(len(theme.cases)))
def test_as_in_eager(at: int) -> None:
    theme.check(at)
