"""Normalisations: layer, group and batch norm, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...base.compat import OpOverload
from ..bucket_padding import (
    Call,
    CannotPad,
    Padded,
    Padder,
    axis_of,
    broadcast_axes,
    is_padded,
    untouched,
)
from ..layouts import (
    dense,
)
from ..op_definition import (
    Shape,
    TakesOp,
    define,
    layout,
    padding,
    require,
    require_channels,
    require_equal,
    requires,
    shape,
    shapes_of,
)
from ..result_strides import (
    is_channels_last_contiguous,
    packed_stride,
    suggested_stride,
    suggests_channels_last,
)
from ..shapes import (
    infer_by_meta_kernel,
)
from ..sizes import Dim, Dims, equal
from ..spec import CPU, TensorSpec, aten
from .reduce import moments, widened, with_dtype

# Layer norm -------------------------------------------------------------------------------------------------


@shape(aten.native_layer_norm.default)
def _layer_norm_shape(x: TensorSpec, shape: Any, *args: Any) -> list[Shape]:
    kept = len(x.shape) - len(shape)
    require(all(a == b for a, b in zip(x.shape[kept:], shape)))
    statistics = (*x.shape[:kept], *[1] * len(shape))
    return [x.shape, statistics, statistics]


@requires(aten.native_layer_norm.default)
def _layer_norm_requires(x: TensorSpec, shape: Sequence[Any], *parameters: Any) -> None:
    for one in parameters[:2]:
        if type(one) is TensorSpec:
            require_equal(one.shape, shape)


def _fits_layer_norm(
    x: TensorSpec, shape: Sequence[Dim], weight: TensorSpec | None = None, bias: TensorSpec | None = None
) -> bool:
    """Whether a layer norm is over the last dimensions of its input; the meta kernel has the words for what
    it is otherwise.
    """
    parts = [
        x.shape[len(x.shape) - len(shape) :] if len(x.shape) >= len(shape) else (),
        *(p.shape for p in (weight, bias) if p),
    ]
    return len(shape) > 0 and all(equal(part, tuple(shape)) for part in parts)


@padding(aten.native_layer_norm.default)
def _layer_norm_padding(call: Call) -> Padded:
    axes, n = call.axes(0), len(call.args[1])
    untouched(call, 0, *range(len(axes) - n, len(axes)))
    rows = axes[: len(axes) - n] + ((),) * n
    return call.emit((axes, rows, rows))


@layout(
    aten.native_layer_norm_backward.default,
    shape=lambda grad, x, shape, *args: [x.shape, tuple(shape), tuple(shape)],
)
def _layer_norm_backward_layout(
    grad: TensorSpec,
    x: TensorSpec,
    shape: Any,
    mean: TensorSpec,
    rstd: TensorSpec,
    weight: TensorSpec | None,
    bias: TensorSpec | None,
    mask: Any,
) -> Any:
    kept = [TensorSpec.dense(x.shape, x.dtype, x.device), weight, bias]
    return tuple(
        [
            spec and TensorSpec.dense(spec.shape, spec.dtype, spec.device) if wanted else None
            for spec, wanted in zip(kept, mask, strict=True)
        ]
    )


@padding(aten.native_layer_norm_backward.default)
def _layer_norm_backward_padding(call: Call) -> Padded:
    axes, n = broadcast_axes([call.axes(0), call.axes(1)]), len(call.args[2])
    untouched(call, 1, *range(len(axes) - n, len(axes)))
    for place in (0, 1, 3, 4):
        call.mask(place, range(len(axes) - n))
    own = axes[len(axes) - n :]
    wanted = zip((axes, own, own), call.args[7], strict=True)
    return call.emit(tuple([found if want else () for found, want in wanted]))


# Group norm -------------------------------------------------------------------------------------------------
define(
    aten.native_group_norm.default,
    shape=lambda x, weight, bias, n, c, area, groups, eps: [x.shape, (n, groups), (n, groups)],
    requires=lambda x, weight, bias, n, c, area, groups, eps: require_channels(c, weight, bias),
)


def _fits_group_norm(
    x: TensorSpec,
    weight: TensorSpec | None,
    bias: TensorSpec | None,
    n: int,
    c: int,
    area: int,
    groups: int,
    eps: float,
) -> bool:
    """Whether a group norm is over groups of channels of a row-major float32 or float64 tensor."""
    fits = (
        groups > 0
        and len(x.shape) >= 2
        and equal(x.shape[:2], (n, c))
        and c % groups == 0
        and x.numel == n * c * area
        and 0 not in x.shape
    )
    alike = all(p is None or (equal(p.shape, (c,)) and p.dtype is x.dtype) for p in (weight, bias))
    return (
        fits
        and alike
        and x.dtype.is_floating_point
        and x.is_contiguous
        and not suggests_channels_last(x)
        and x.dtype.itemsize >= 4
    )


def _in_suggested_format(x: TensorSpec, found: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
    """The first in the format that x suggests, as on a CPU: strides where sizes are 1 say which."""
    first, *others = found
    return [first.with_stride(suggested_stride(x, x.shape)) if x.device.type == "cpu" else first, *others]


@layout(
    aten.native_group_norm_backward.default,
    shape=lambda grad, x, mean, rstd, weight, n, c, *args: [x.shape, (c,), (c,)],
)
def _group_norm_backward_layout(
    grad: TensorSpec,
    x: TensorSpec,
    mean: TensorSpec,
    rstd: TensorSpec,
    weight: TensorSpec | None,
    n: int,
    c: int,
    *args: Any,
) -> tuple[Any, ...]:
    """The gradient of a half-precision input is one too, also where the weight is float32."""
    area, groups, mask = args
    if _fits_group_norm(x, weight, None, n, c, area, groups, 0.0) and equal(grad.shape, x.shape):
        found: Sequence[Any] = [dense(x.shape, x), *[dense((c,), x)] * 2]
        return tuple(spec if wanted else None for spec, wanted in zip(found, mask))
    op = aten.native_group_norm_backward.default
    found = infer_by_meta_kernel(op, (grad, x, mean, rstd, weight, n, c, *args), {})
    dx, *others = _in_suggested_format(x, found) if mask[0] else found
    return dx and replace(dx, dtype=x.dtype), *others


# Batch norm -------------------------------------------------------------------------------------------------


@shape(aten.native_batch_norm.default, aten._native_batch_norm_legit_functional.default)
def _batch_norm_shape(
    x: TensorSpec,
    weight: TensorSpec | None,
    bias: TensorSpec | None,
    mean: TensorSpec,
    var: Any,
    training: bool,
    *args: Any,
) -> list[Shape]:
    evaluates_on_cpu = not training and x.device.type == "cpu"  # then there are no statistics
    return [x.shape, *[(0,) if evaluates_on_cpu else (x.shape[1],)] * 2, *[(x.shape[1],)] * 2]


define(
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_no_update.default,
    shape=lambda x, *args: [x.shape, *[(0,) if x.device.type == "cpu" else (x.shape[1],)] * 2, (0,)],
)
define(
    aten._native_batch_norm_legit.no_stats,
    shape=lambda x, *args: [x.shape, *[(x.shape[1],)] * 2],
    requires=lambda x, weight, bias, *args: require_channels(x.shape[1], weight, bias),
)
define(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_no_update.default,
    aten._native_batch_norm_legit_no_training.default,
    aten.cudnn_batch_norm.default,
    requires=lambda x, weight, bias, mean, var, *args: require_channels(x.shape[1], weight, bias, mean, var),
)


_TRAINING_IS_SAID = {
    aten.native_batch_norm.default, aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit_functional.default,
}  # fmt: skip


def _evaluates(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether a batch norm uses its running statistics. args: those behind the input."""
    if func in _TRAINING_IS_SAID:
        return not args[4]
    return func in (aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default)


# Batch norms that are answered here; types of their results behind the statistics, or the argument behind
# the input that has it.
_RUNNING: dict[OpOverload, tuple[Any, ...]] = {
    aten.native_batch_norm.default: (), aten._native_batch_norm_legit.no_stats: (),
    aten._native_batch_norm_legit_functional.default: (2, 3),
    aten._native_batch_norm_legit_no_training.default: (),
    aten._batch_norm_no_update.default: (torch.uint8,),
}  # fmt: skip


def _fits_batch_norm(func: OpOverload, x: TensorSpec, args: tuple[Any, ...]) -> bool:
    """Whether a batch norm has parameters of one type, one number a channel, and both statistics or none."""
    if func not in _RUNNING or not x.dtype.is_floating_point or len(x.shape) < 2 or 0 in x.shape:
        return False
    statistics = [] if func is aten._native_batch_norm_legit.no_stats else [*args[2:4]]
    if statistics == [None, None] and func is aten.native_batch_norm.default and args[4]:
        statistics = []
    parameters = [*(a for a in args[:2] if a is not None), *statistics]
    if None in statistics or not all(equal(p.shape, x.shape[1:2]) for p in parameters):
        return False
    kinds = {p.dtype for p in parameters}
    return kinds <= {x.dtype} or kinds <= {torch.float32} and x.dtype.itemsize < 4


def _of_channels(writer: Padder, x: fx.Node | None, rank: int) -> fx.Node | None:
    """A number a channel, as it is expanded over images."""
    return None if x is None else writer.along(x, 1, rank)


@padding(
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten.native_batch_norm.default,
)
def _batch_norm_padding(call: Call) -> Padded:
    writer, axes, named = call.writer, call.axes(0), call.named
    specs = call.node.meta["val"]
    dims = [d for d in range(len(axes)) if d != 1]
    rest = [tuple(map(axis_of, spec.shape)) for spec in specs[1:]]
    CannotPad.when(is_padded(axes[1]), "a batch norm of padded channels")
    if not named.get("training") or not is_padded(*[axes[d] for d in dims]):
        return call.emit((axes, *rest))
    mean, squares, count = moments(writer, call.args[0], axes, dims)
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
    return tuple([call.keep(with_dtype(writer, one, spec.dtype), own) for one, spec, own in kept]), (
        axes,
        *rest,
    )


def _batch_norm_gradient_stride(grad: TensorSpec, x: TensorSpec) -> Dims:
    """Where gradient and input have one format the kernel asks for the suggested one, which sizes of 1
    leave open.
    """
    alike = (
        grad.is_contiguous
        if x.is_contiguous
        else is_channels_last_contiguous(grad) and not grad.is_contiguous
    )
    return suggested_stride(x, x.shape) if alike else packed_stride(x, x.shape)


@layout(
    aten.native_batch_norm_backward.default,
    shape=lambda grad, x, *args: [x.shape, (x.shape[1],), (x.shape[1],)],
)
def _batch_norm_backward_layout(
    grad: TensorSpec, x: TensorSpec, weight: TensorSpec | None, *args: Any
) -> Any:
    if len(x.shape) < 2 or 0 in x.shape or not equal(grad.shape, x.shape):
        dx, *others = infer_by_meta_kernel(
            aten.native_batch_norm_backward.default, (grad, x, weight, *args), {}
        )
    else:
        channels = dense(x.shape[1:2], weight or x)
        dx, others = dense(x.shape, x), [channels if wanted else None for wanted in args[-1][1:]]
    return dx.with_stride(_batch_norm_gradient_stride(grad, x)), *others


@padding(aten.native_batch_norm_backward.default)
def _batch_norm_backward_padding(call: Call) -> Padded:
    writer, named = call.writer, call.named
    axes, specs = broadcast_axes([call.axes(0), call.axes(1)]), call.node.meta["val"]
    dims, rank = [d for d in range(len(axes)) if d != 1], len(axes)
    CannotPad.when(
        is_padded(axes[1]) or not named["train"],
        "the gradient of a batch norm of padded channels, or in evaluation",
    )
    gradient, x = (widened(writer, call.args[place], axes, dims) for place in (0, 1))
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
        [
            None if spec is None else call.keep(with_dtype(writer, one, spec.dtype), own)
            for one, spec, own in kept
        ]
    ), wanted


@layout(aten.batch_norm_elemt.default)
def _batch_norm_elemt_layout(x: TensorSpec, *args: Any) -> TensorSpec:
    """A batch norm's result from its input and statistics, in the batch norm's layout."""
    return x.with_stride(packed_stride(x, x.shape))


define(
    aten.batch_norm_update_stats.default,
    layout=lambda x, mean, *rest: (dense(x.shape[1:2], x, (mean or x).dtype),) * 2,
)
# Layouts of all forward normalisations ----------------------------------------------------------------------


def _normalised(
    func: OpOverload, x: TensorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[TensorSpec]:
    """Row-major results; those of a GPU's statistics have their type."""
    if (
        func is aten.native_layer_norm.default
        and _fits_layer_norm(x, *args[:3])
        or func is aten.native_group_norm.default
        and _fits_group_norm(x, *args)
    ):
        return [dense(shape, x) for shape in shapes_of(func, x, *args)]
    if not _fits_batch_norm(func, x, args):
        found = infer_by_meta_kernel(func, (x, *args), kwargs)
        return _in_suggested_format(x, found) if func is aten.native_group_norm.default else found
    wide = torch.float32 if x.dtype.itemsize < 4 else x.dtype
    behind = (one if type(one) is torch.dtype else args[one].dtype for one in _RUNNING[func])
    return [
        TensorSpec.dense(shape, dtype, x.device)
        for shape, dtype in zip(shapes_of(func, x, *args), (x.dtype, wide, wide, *behind))
    ]


def _normalisation(
    suggests: bool, func: OpOverload, x: TensorSpec, /, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """A CPU's statistics have the input's type, or float32 where a weight or running statistic has; a GPU's
    are never halves.

    Batch norm in evaluation has none on a CPU.
    """
    out, mean, rstd, *rest = _normalised(func, x, args, kwargs)
    out = out.with_stride(packed_stride(x, out.shape)) if suggests else out
    if x.device.type != "cuda":
        single = x.dtype.itemsize < 4 and any(
            type(a) is TensorSpec and a.dtype is torch.float32 for a in args
        )
        mean, rstd = (replace(s, dtype=torch.float32 if single else x.dtype) for s in (mean, rstd))
    if x.device == CPU and _evaluates(func, args):
        mean, rstd = (TensorSpec.dense((0,), s.dtype) for s in (mean, rstd))
    return out, mean, rstd, *rest


define(
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    layout=TakesOp(functools.partial(_normalisation, False)),
)
define(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_no_update.default,
    aten._native_batch_norm_legit.default,
    aten._batch_norm_with_update.default,
    layout=TakesOp(functools.partial(_normalisation, True)),
)


@layout(aten.cudnn_batch_norm.default, shape=lambda x, *args: [x.shape, *[(x.shape[1],)] * 2, (0,)])
def _cudnn_batch_norm_layout(x: TensorSpec, *args: Any) -> tuple[TensorSpec, ...]:
    """As the native one, and what only its own backward reads."""
    reserve = TensorSpec.dense((0,), torch.uint8, x.device)
    return *_normalisation(True, aten.native_batch_norm.default, x, *args), reserve
