"""Wrapper subclasses for tests: a pair of tensors that computes everything twice, and quantised weights."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class Pair(torch.Tensor):
    """Two tensors of one shape; each op runs on both."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(
            cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device
        )

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        results = []
        for name in ("a", "b"):

            def part(value, name=name):
                return getattr(value, name) if isinstance(value, Pair) else value

            results.append(func(*tree_map(part, args), **tree_map(part, kwargs or {})))
        if func._schema.is_mutable:
            return args[0]

        def pair(a, b):
            if isinstance(a, list | tuple):
                return type(a)(map(pair, a, b))
            return cls(a, b) if isinstance(a, torch.Tensor) else a

        return pair(*results)


class Quantised(torch.Tensor):
    """Whole numbers with a scale for each row, and a note that is part of the context. Gradients are plain."""

    @staticmethod
    def __new__(cls, values, scale, note="", requires_grad=False):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=scale.dtype, requires_grad=requires_grad
        )

    def __init__(self, values, scale, note="", requires_grad=False):
        self.values_, self.scale, self.note = values, scale, note

    @classmethod
    def of(cls, tensor, note=""):
        scale = tensor.abs().amax(1, keepdim=True) / 127
        return cls((tensor / scale).round().to(torch.int8), scale, note)

    def plain(self):
        factor = 2 if self.note == "twice" else 1
        return self.values_.to(self.scale.dtype) * (self.scale * factor)

    def __tensor_flatten__(self):
        return ["values_", "scale"], {"note": self.note}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["values_"], inner["scale"], context["note"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].values_, args[0].scale, args[0].note)
        if func is aten.copy_.default:
            args[0].values_.copy_(args[1].values_)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        return func(*tree_map(lambda v: v.plain() if isinstance(v, cls) else v, args), **(kwargs or {}))


def parts(value):
    """The plain tensors in a value."""
    if not isinstance(value, Pair | Quantised):
        return [value]
    return [leaf for name in value.__tensor_flatten__()[0] for leaf in parts(getattr(value, name))]


class Unwrapped(torch.Tensor):
    """A wrapper whose ops give plain tensors."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held):
        self.held = held

    def __tensor_flatten__(self):
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].held)
        return func(*(a.held * 2 if isinstance(a, cls) else a for a in args), **(kwargs or {}))
