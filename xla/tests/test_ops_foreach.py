"""Ops on lists of tensors against aten's CPU kernels."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map

pytest.importorskip("jax", reason="the XLA rules need jax")

import dynamotor.xla  # noqa: E402, F401
from dynamotor.xla import metrics  # noqa: E402

aten = torch.ops.aten


def tensors(name: str = "") -> list[torch.Tensor]:
    return (
        [torch.rand(3, 3) + 0.5, torch.rand(2, 2) + 0.5]
        if name == "mm"
        else [torch.rand(3, 2) + 0.5, torch.rand(4) + 0.5]
    )


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
    if name == "clone" and torch.__version__ < "2.13":
        pytest.skip("this PyTorch has no such op")
    packet = getattr(aten, f"_foreach_{name}")
    metrics.clear()
    for overload in packet.overloads():
        func = getattr(packet, overload)
        if not func._schema.is_mutable:
            parameters = [
                p
                for p in func._schema.arguments
                if not p.kwarg_only and p.name not in ("dtype", "non_blocking")
            ]
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
