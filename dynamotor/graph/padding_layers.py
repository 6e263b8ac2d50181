"""What layers make of padding: convolutions, pools and statistics, forward and backward.

See `bucket_padding.py` for what a rule is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .bucket_padding import Axes, Call, CannotPad, Padder, axis_of, broadcast, is_padded, row_of, rule
from .nodes import overload

aten = torch.ops.aten


# Convolutions and pools -------------------------------------------------------------------------------------
def _channels(x: Axes, w: Axes) -> None:
    CannotPad.when(is_padded(*w) or is_padded(x[1]), "a convolution of padded channels")


@rule(aten.convolution.default)
def _convolution(call: Call) -> tuple[fx.Node, Any]:
    """Beyond an image a convolution sees zeros, and one that is transposed makes nothing of zeros."""
    x = call.axes(0)
    _channels(x, call.axes(1))
    call.mask(0, range(2, len(x)))
    return call.emit((x[0], axis_of(call.shape[1]), *map(row_of, call.shape[2:])))


@rule(aten.convolution_backward.default)
def _convolution_backward(call: Call) -> tuple[fx.Node, Any]:
    """Gradients of padding are zeros, and so is the padding of what they are multiplied with."""
    gradient, x, w = (call.axes(place) for place in range(3))
    _channels(x, w)
    for place, axes in ((0, gradient), (1, x)):
        call.mask(place, [0, *range(2, len(axes))])
    return call.emit((x, w, (gradient[1],)))


@rule(
    aten.avg_pool2d.default,
    aten.max_pool2d_with_indices.default,
    aten._adaptive_avg_pool2d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_bilinear2d.default,
    aten.avg_pool2d_backward.default,
    aten.max_pool2d_with_indices_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
)
def _planes(call: Call) -> tuple[fx.Node, Any]:
    """Each image by itself."""
    tensors = [call.writer.axes[a] for a in call.args if isinstance(a, fx.Node)]
    CannotPad.when(any(is_padded(*axes[-2:]) for axes in tensors), f"{call.node.target} of padded images")
    lead = broadcast([axes[:-2] for axes in tensors])
    val = call.node.meta["val"]
    found = [(*lead, *map(row_of, spec.shape[-2:])) for spec in (val if isinstance(val, tuple) else (val,))]
    return call.emit(tuple(found) if isinstance(val, tuple) else found[0])


# Statistics -------------------------------------------------------------------------------------------------
def _wide(writer: Padder, x: fx.Node, axes: Axes, dims: Sequence[int]) -> fx.Node:
    """The tensor with zeros for padding along these dimensions, in a type that sums may be computed in."""
    x = writer.masked(x, axes, dims, 0)
    if x.meta["val"].dtype in (torch.float32, torch.float64):
        return x
    return writer.op(aten._to_copy.default, x, dtype=torch.float32)


def _moments(writer: Padder, x: fx.Node, axes: Axes, dims: Sequence[int]) -> tuple[fx.Node, fx.Node, fx.Node]:
    """(mean, sum of squares around it, number of elements); the first two keep all dimensions."""
    x = _wide(writer, x, axes, dims)
    count = writer.divisor([axes[d] for d in dims], x.meta["val"].dtype)
    mean = writer.op(aten.div.Tensor, writer.op(aten.sum.dim_IntList, x, dims, True), count)
    off = writer.masked(writer.op(aten.sub.Tensor, x, mean), axes, dims, 0)
    return mean, writer.op(aten.sum.dim_IntList, writer.op(aten.mul.Tensor, off, off), dims, True), count


def _typed(writer: Padder, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if x.meta["val"].dtype is dtype else writer.op(aten._to_copy.default, x, dtype=dtype)


@rule(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def _variance(call: Call) -> tuple[fx.Node, Any]:
    writer, axes, named = call.writer, call.axes(0), call.named
    dims = list(range(len(axes))) if not named["dim"] else [d % len(axes) for d in named["dim"]]
    found = tuple([() if d in dims else a for d, a in enumerate(axes) if named["keepdim"] or d not in dims])
    name, dtype = overload(call.node)._schema.name, call.args[0].meta["val"].dtype
    several = name.endswith("_mean")
    if not is_padded(*[axes[d] for d in dims]):
        return call.emit((found, found) if several else found)
    mean, squares, count = _moments(writer, call.args[0], axes, dims)
    correction = 1 if named["correction"] is None else named["correction"]
    free = writer.op(aten.clamp_min.default, writer.op(aten.sub.Tensor, count, correction), 0)
    spread = writer.op(aten.div.Tensor, squares, free)
    if name.startswith("aten::std"):
        spread = writer.op(aten.sqrt.default, spread)
    results = []
    for x in (spread, mean):
        x = x if named["keepdim"] else writer.op(aten.squeeze.dims, x, dims)
        results.append(call.keep(_typed(writer, x, dtype), found))
    return (tuple(results), (found, found)) if several else (results[0], found)  # type: ignore[return-value]


def _of_channels(writer: Padder, x: fx.Node | None, rank: int) -> fx.Node | None:
    """A number a channel, as it is expanded over images."""
    return None if x is None else writer.along(x, 1, rank)


@rule(
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten.native_batch_norm.default,
)
def _batch_norm(call: Call) -> tuple[fx.Node, Any]:
    writer, axes, named = call.writer, call.axes(0), call.named
    specs = call.node.meta["val"]
    dims = [d for d in range(len(axes)) if d != 1]
    rest = [tuple(map(axis_of, spec.shape)) for spec in specs[1:]]
    CannotPad.when(is_padded(axes[1]), "a batch norm of padded channels")
    if not named.get("training") or not is_padded(*[axes[d] for d in dims]):
        return call.emit((axes, *rest))
    mean, squares, count = _moments(writer, call.args[0], axes, dims)
    inverse = writer.op(aten.add.Tensor, writer.op(aten.div.Tensor, squares, count), named["eps"])
    inverse = writer.op(aten.rsqrt.default, inverse)
    x = writer.op(aten.mul.Tensor, writer.op(aten.sub.Tensor, call.args[0], mean), inverse)
    for target, parameter in ((aten.mul.Tensor, named["weight"]), (aten.add.Tensor, named["bias"])):
        if parameter is not None:
            x = writer.op(target, x, _of_channels(writer, parameter, len(axes)))
    results: list[fx.Node] = [x, *[writer.op(aten.view.default, one, [-1]) for one in (mean, inverse)]]
    if len(specs) > 3:
        unbiased = writer.op(aten.div.Tensor, squares, writer.op(aten.sub.Tensor, count, 1))
        for own, new in ((named["running_mean"], mean), (named["running_var"], unbiased)):
            part = writer.op(aten.mul.Tensor, writer.op(aten.view.default, new, [-1]), named["momentum"])
            results.append(
                writer.op(aten.add.Tensor, writer.op(aten.mul.Tensor, own, 1 - named["momentum"]), part)
            )
    kept = zip(results, specs, (axes, *rest), strict=True)
    return tuple([call.keep(_typed(writer, one, spec.dtype), own) for one, spec, own in kept]), (axes, *rest)  # type: ignore[return-value]


@rule(aten.native_batch_norm_backward.default)
def _batch_norm_backward(call: Call) -> tuple[fx.Node, Any]:
    writer, named = call.writer, call.named
    axes, specs = broadcast([call.axes(0), call.axes(1)]), call.node.meta["val"]
    dims, rank = [d for d in range(len(axes)) if d != 1], len(axes)
    CannotPad.when(
        is_padded(axes[1]) or not named["train"],
        "the gradient of a batch norm of padded channels, or in evaluation",
    )
    gradient, x = (_wide(writer, call.args[place], axes, dims) for place in (0, 1))
    mean, inverse, weight = (
        _of_channels(writer, named[n], rank) for n in ("save_mean", "save_invstd", "weight")
    )
    count = writer.divisor([axes[d] for d in dims], gradient.meta["val"].dtype)
    normed = writer.op(aten.mul.Tensor, writer.op(aten.sub.Tensor, x, mean), inverse)
    total = writer.op(aten.sum.dim_IntList, gradient, dims, True)
    scaled = writer.op(aten.sum.dim_IntList, writer.op(aten.mul.Tensor, gradient, normed), dims, True)
    own = writer.op(aten.sub.Tensor, gradient, writer.op(aten.div.Tensor, total, count))
    also = writer.op(aten.mul.Tensor, normed, writer.op(aten.div.Tensor, scaled, count))
    own = writer.op(aten.mul.Tensor, writer.op(aten.sub.Tensor, own, also), inverse)
    own = own if weight is None else writer.op(aten.mul.Tensor, own, weight)
    results = [own, *[writer.op(aten.view.default, one, [-1]) for one in (scaled, total)]]
    wanted = (axes, (axes[1],), (axes[1],))
    kept = zip(results, specs, wanted, strict=True)
    return tuple(
        [None if spec is None else call.keep(_typed(writer, one, spec.dtype), own) for one, spec, own in kept]
    ), wanted  # type: ignore[return-value]
