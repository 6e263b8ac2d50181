"""Ops on lists of tensors and fused optimizer steps against aten's CPU kernels."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

jax = pytest.importorskip("jax", reason="the XLA rules need jax")

from lowering_harness import spec_of, to_jax, to_torch  # noqa: E402

import dynamotor.xla  # noqa: E402, F401
from dynamotor.xla import metrics  # noqa: E402
from dynamotor.xla.lowering import apply, find  # noqa: E402

aten = torch.ops.aten


def tensors(name: str = "") -> list[torch.Tensor]:
    return [torch.rand(3, 3) + 0.5, torch.rand(2, 2) + 0.5] if name == "mm" else [torch.rand(3, 2) + 0.5, torch.rand(4) + 0.5]


def argument(name: str, parameter: torch._C.Argument):
    kind = str(parameter.type)
    if kind == "List[Tensor]":
        return tensors(name)
    if kind == "Tensor":
        return torch.tensor([0.5, 2.0]) if parameter.name == "scalars" else torch.tensor(1.5)
    return [1.5, 2] if "List" in kind else 0.7


def moved(value):
    return value.to("xla") if isinstance(value, torch.Tensor) else value


NAMES = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round rsqrt"
    " sigmoid sign sin sinh sqrt tan tanh trunc add sub mul div pow maximum minimum clamp_max clamp_min lerp addcmul addcdiv"
    " norm max zero copy clone"
)


@pytest.mark.parametrize("name", NAMES.split())
def test_every_overload_for_lists_equals_aten(name: str) -> None:
    packet = getattr(aten, f"_foreach_{name}")
    metrics.clear()
    for overload in packet.overloads():
        func = getattr(packet, overload)
        if not func._schema.is_mutable:
            parameters = [p for p in func._schema.arguments if not p.kwarg_only and p.name not in ("dtype", "non_blocking")]
            args = [argument(name, p) for p in parameters]
            found = func(*[tree_map(moved, arg) if isinstance(arg, list) else arg for arg in args])
            torch.testing.assert_close([t.cpu() for t in found], list(func(*args)), equal_nan=True)
    assert not [key for key in metrics.all_counters() if key.startswith("aten::")]


def test_lists_are_written_in_place() -> None:
    theirs = tensors()
    mine = [t.to("xla") for t in theirs]
    for each in (mine, theirs):
        torch._foreach_mul_(each, 0.3)
        torch._foreach_add_(each, [t * 2 for t in each])
        torch._foreach_sqrt_(each)
    torch.testing.assert_close([t.cpu() for t in mine], theirs)


def same_as_aten(func: torch._ops.OpOverload, *args, **kwargs) -> None:
    jax_args, jax_kwargs = tree_map(to_jax, (args, kwargs))
    want = tree_leaves(func(*args, **kwargs))
    got = jax.jit(lambda: apply(func, find(func), jax_args, jax_kwargs, tuple(spec_of(w) for w in want)))()
    for mine, theirs in zip(got, want):
        torch.testing.assert_close(to_torch(mine, theirs.dtype), theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("op", [aten._fused_adam.default, aten._fused_adamw.default], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_fused_adam_equals_aten(op, amsgrad: bool) -> None:
    scales, infinities = (None, torch.tensor(2.0)), (None, torch.tensor(0.0), torch.tensor(1.0))
    for maximize, scale, found, decay in itertools.product([False, True], scales, infinities, [0.0, 0.1]):
        same_as_aten(op, tensors(), tensors(), tensors(), tensors(), tensors() if amsgrad else [], [torch.tensor(3.0)] * 2, lr=0.1, beta1=0.9, beta2=0.99,
                     weight_decay=decay, eps=1e-8, amsgrad=amsgrad, maximize=maximize, grad_scale=scale, found_inf=found)  # fmt: skip


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fused_sgd_equals_aten(momentum: float) -> None:
    for nesterov, first, maximize in itertools.product([False, True], repeat=3):
        same_as_aten(aten._fused_sgd.default, tensors(), tensors(), tensors() if momentum else [], weight_decay=0.1, momentum=momentum, lr=0.1,
                     dampening=0.0 if nesterov else 0.2, nesterov=nesterov, maximize=maximize, is_first_step=first)  # fmt: skip
