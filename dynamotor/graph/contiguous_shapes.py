"""Shape rules for the first capture of an op in a process: contiguous arguments, contiguous results.

PyTorch's meta kernels of these ops are Python, and their first call imports sympy, torch._dynamo and
Triton: seconds. These rules answer for contiguous tensors with elements, on one device, whose sizes are
numbers; where anything else holds, or may be wrong, they pass, and `shape_rules` and the meta kernel answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base.compat import OpOverload
from .result_strides import contiguous_stride, suggests_channels_last
from .shapes import PASS, ShapeRule, contiguous_rules, run_small
from .sizes import Dim, is_symbolic, leaves_in
from .spec import TensorSpec, aten
from .symbolic_rules import symbolic_rules


def _rule(*funcs: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule for arguments that are plain; it takes the op before the op's arguments."""

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        for func in funcs:
            contiguous_rules.add(func, _where_plain(func, rule))
        return rule

    return register


def _where_plain(func: OpOverload, rule: Callable[..., Any]) -> ShapeRule:
    def answer(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in leaves_in((args, kwargs)) if type(leaf) is TensorSpec]
        plain = all(
            not is_symbolic((*t.shape, *t.stride))
            and t.stride == contiguous_stride(t.shape)
            and not suggests_channels_last(t)
            and 0 not in t.shape
            for t in tensors
        )
        if not plain or len({t.device for t in tensors}) != 1:
            return PASS
        return rule(func, *args, **kwargs)

    return answer


def _dense(shape: Any, like: TensorSpec, dtype: torch.dtype | None = None) -> TensorSpec:
    return TensorSpec.dense(tuple(shape), dtype or like.dtype, like.device)


def _is_dim(dim: int, x: TensorSpec) -> bool:
    return -len(x.shape) <= dim < len(x.shape)


@_rule(
    aten.std.correction,
    aten.logsumexp.default,
    aten.all.default,
    aten.any.default,
)
def _reduced(func: OpOverload, *args: Any, **kwargs: Any) -> TensorSpec:
    """The shape as for symbols, the type as for tensors of two elements a dimension."""
    out = run_small(func, 2, args, kwargs)
    return _dense(symbolic_rules[func](*args, **kwargs), args[0], out.dtype)


@_rule(aten.std_mean.correction)
def _std_mean(func: OpOverload, x: TensorSpec, *args: Any, **kwargs: Any) -> Any:
    return (_reduced(aten.std.correction, x, *args, **kwargs),) * 2 if x.dtype.is_floating_point else PASS


@_rule(aten.count_nonzero.default)
def _count(func: OpOverload, x: TensorSpec, dim: int | None = None) -> Any:
    return _dense((), x, torch.int64) if dim is None else PASS


@_rule(aten.aminmax.default)
def _extremes(func: OpOverload, x: TensorSpec, *, dim: int | None = None, keepdim: bool = False) -> Any:
    if x.dtype.is_complex or dim is not None and not _is_dim(dim, x):
        return PASS
    shape = list[Dim](x.shape)
    if dim is None:
        shape = [1] * len(shape) if keepdim else []
    elif shape:
        shape[dim : dim % len(shape) + 1] = [1] if keepdim else []
    return (_dense(shape, x),) * 2


@_rule(aten.sort.default, aten.sort.stable)
def _sorted(func: OpOverload, x: TensorSpec, *args: Any, dim: int = -1, **kwargs: Any) -> Any:
    dim = args[0] if args else dim
    known = not kwargs.keys() - {"stable", "descending"}
    if not known or type(dim) is not int or not _is_dim(dim, x) or x.dtype.is_complex:
        return PASS
    return _dense(x.shape, x), _dense(x.shape, x, torch.int64)


@_rule(aten.topk.default)
def _largest(func: OpOverload, x: TensorSpec, k: int, dim: int = -1, *args: Any) -> Any:
    if not _is_dim(dim, x) or not 0 < k <= x.shape[dim] or x.dtype.is_complex or x.dtype is torch.bool:
        return PASS
    shape = list(x.shape)
    shape[dim] = k
    return _dense(shape, x), _dense(shape, x, torch.int64)


@_rule(aten.searchsorted.Tensor)
def _places(func: OpOverload, edges: TensorSpec, x: TensorSpec, **kwargs: Any) -> Any:
    plain = len(edges.shape) == 1 and edges.dtype is x.dtype and kwargs.get("sorter") is None
    known = kwargs.keys() <= {"out_int32", "right", "side", "sorter"} and kwargs.get("side") is None
    if not plain or not known or x.dtype.is_complex:
        return PASS
    return _dense(x.shape, x, torch.int32 if kwargs.get("out_int32") else torch.int64)


@_rule(aten.roll.default)
def _rolled(func: OpOverload, x: TensorSpec, shifts: Any, dims: Any = ()) -> Any:
    alike = not dims and len(shifts) == 1 or len(dims) == len(shifts)
    return _dense(x.shape, x) if alike and x.shape and all(_is_dim(d, x) for d in dims) else PASS


@_rule(aten.renorm.default)
def _renormalised(func: OpOverload, x: TensorSpec, p: Any, dim: int, largest: Any) -> Any:
    plain = x.dtype.is_floating_point and len(x.shape) > 1 and _is_dim(dim, x) and p > 0 and largest >= 0
    return _dense(x.shape, x) if plain else PASS


@_rule(aten.glu.default)
def _gated(func: OpOverload, x: TensorSpec, dim: int = -1) -> Any:
    if not x.dtype.is_floating_point or not x.shape or not _is_dim(dim, x) or x.shape[dim] % 2:
        return PASS
    shape = list(x.shape)
    shape[dim] //= 2
    return _dense(shape, x)


@_rule(aten.glu_backward.default)
def _gated_backward(func: OpOverload, grad: TensorSpec, x: TensorSpec, dim: int) -> Any:
    fits = x.shape and _is_dim(dim, x) and x.dtype.is_floating_point and grad.dtype is x.dtype
    half = [n // 2 if d == dim % len(x.shape) else n for d, n in enumerate(x.shape)] if fits else []
    return _dense(x.shape, x) if fits and list(grad.shape) == half else PASS


@_rule(aten._prelu_kernel_backward.default)
def _leaky_backward(func: OpOverload, grad: TensorSpec, x: TensorSpec, weight: TensorSpec) -> Any:
    fits = grad.shape == x.shape and grad.dtype is x.dtype
    return (_dense(x.shape, x),) * 2 if fits and _leaky(func, x, weight) is not PASS else PASS


@_rule(aten._prelu_kernel.default)
def _leaky(func: OpOverload, x: TensorSpec, weight: TensorSpec) -> Any:
    fits = len(x.shape) == len(weight.shape) and all(w in (1, n) for w, n in zip(weight.shape, x.shape))
    return _dense(x.shape, x) if fits and x.dtype is weight.dtype and x.dtype.is_floating_point else PASS


@_rule(aten.complex.default)
def _complex(func: OpOverload, real: TensorSpec, imaginary: TensorSpec) -> Any:
    if real.shape != imaginary.shape or real.dtype is not imaginary.dtype:
        return PASS
    return _dense(real.shape, real, run_small(func, 1, (real, imaginary), {}).dtype)


@_rule(aten.binary_cross_entropy_with_logits.default)
def _cross_entropy(
    func: OpOverload,
    x: TensorSpec,
    target: TensorSpec,
    weight: Any = None,
    pos: Any = None,
    reduction: int = 1,
) -> Any:
    alike = x.shape == target.shape and x.dtype is target.dtype and x.dtype.is_floating_point
    if not alike or weight is not None or pos is not None or reduction not in (0, 1, 2):
        return PASS
    return _dense(() if reduction else x.shape, x)


@_rule(aten.pixel_shuffle.default)
def _shuffled(func: OpOverload, x: TensorSpec, factor: int) -> Any:
    if len(x.shape) < 3 or factor < 1 or x.shape[-3] % factor**2:
        return PASS
    *batch, c, h, w = x.shape
    return _dense((*batch, c // factor**2, h * factor, w * factor), x)


@_rule(aten.pixel_unshuffle.default)
def _unshuffled(func: OpOverload, x: TensorSpec, factor: int) -> Any:
    if len(x.shape) < 3 or factor < 1 or x.shape[-2] % factor or x.shape[-1] % factor:
        return PASS
    *batch, c, h, w = x.shape
    return _dense((*batch, c * factor**2, h // factor, w // factor), x)


@_rule(aten.grid_sampler_2d.default)
def _sampled(func: OpOverload, x: TensorSpec, grid: TensorSpec, *how: Any) -> Any:
    fits = len(x.shape) == len(grid.shape) == 4 and x.shape[0] == grid.shape[0] and grid.shape[3] == 2
    plain = fits and x.dtype is grid.dtype and x.dtype.is_floating_point and x.device.type == "cpu"
    return _dense((*x.shape[:2], *grid.shape[1:3]), x) if plain else PASS


@_rule(aten._cdist_backward.default)
def _distances_backward(func: OpOverload, grad: TensorSpec, a: TensorSpec, *args: Any) -> Any:
    return _dense(a.shape, a) if len(a.shape) == 2 else PASS


@_rule(aten._cdist_forward.default)
def _distances(func: OpOverload, a: TensorSpec, b: TensorSpec, p: Any, mode: Any) -> Any:
    alike = a.dtype is b.dtype and a.dtype.is_floating_point and a.dtype.itemsize >= 4 and p >= 0
    fits = len(a.shape) == len(b.shape) >= 2 and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-1]
    return _dense((*a.shape[:-1], b.shape[-2]), a) if alike and fits else PASS
