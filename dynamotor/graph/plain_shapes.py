"""Shape rules of what most programs do, without a meta kernel: shapes as for symbols, types and layouts as
eager's kernels have them.

PyTorch's meta kernels of these ops are Python: at first they import sympy and torch._dynamo, seconds of a
first call. Where something may be wrong with the arguments the meta kernel is asked, which has the words.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base.compat import OpOverload
from .result_strides import (
    is_channels_last_contiguous,
    packed_stride,
    preserved_stride,
    suggested_stride,
    suggests_channels_last,
)
from .shapes import (
    PASS,
    device_of_result,
    infer_by_meta_kernel,
    infer_spec,
    run_small,
    shape_rule,
    shape_rules,
)
from .sizes import Dim, Dims, equal, leaves_in
from .spec import CPU, TensorSpec, aten, channels_last_stride
from .symbolic_demands import demands
from .symbolic_rules import require, symbolic_rules


def _dense(shape: Sequence[Dim], like: TensorSpec) -> TensorSpec:
    return TensorSpec.dense(shape, like.dtype, like.device)


# Row-major results ------------------------------------------------------------------------------------------
def _row_major(func: OpOverload, of_contiguous: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Row-major results of the types that the op gives for tensors of two elements a dimension (of one, a
    variance is warned about); of another layout than a contiguous tensor's where not `of_contiguous`.
    """
    tensors = [leaf for leaf in leaves_in(args) if type(leaf) is TensorSpec]
    first = tensors[0]
    if any(0 in t.shape or t.device != first.device for t in tensors):
        return PASS
    if of_contiguous and not first.is_contiguous:
        return PASS
    out = run_small(func, 2, args, kwargs)
    if func in demands:
        demands[func](*args, **kwargs)
    shapes = symbolic_rules[func](*args, **kwargs)
    results = [
        TensorSpec.dense(shapes[k] if type(shapes) is list else shapes, o.dtype, first.device)
        for k, o in enumerate(out if isinstance(out, tuple) else (out,))
    ]
    return tuple(results) if isinstance(out, tuple) else results[0]


for _of_contiguous, _funcs in (
    (
        False,
        (
            aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
            aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.prod.dim_int,
            aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.argmax.default,
            aten.argmin.default, aten.any.dim, aten.all.dim, aten.var.correction, aten.var_mean.correction,
            aten.nll_loss_forward.default, aten._softmax.default, aten._log_softmax.default,
            aten._safe_softmax.default, aten.cumsum.default, aten.cumprod.default, aten.tril.default,
            aten.triu.default, aten.gather.default, aten.scatter_add.default, aten.scatter.src,
            aten.scatter.value,
        ),
    ),
    (True, (aten.index_put.default, aten._unsafe_index_put.default)),
):  # fmt: skip
    for _func in _funcs:
        shape_rules.add(_func, functools.partial(_row_major, _func, _of_contiguous))


def _joined(func: OpOverload, parts: Any, dim: int = 0) -> Any:
    """Parts of one type; those that all lie channels-last are joined so."""
    last = [suggests_channels_last(p) for p in parts]
    if func is aten.cat.default and len({p.dtype for p in parts}) == 1:  # these have no elements to join
        parts = [p for p in parts if p.shape != (0,)] or parts
    first = parts[0]
    rank = len(first.shape)
    if (
        not rank
        or any(0 in p.shape for p in parts)
        or len({(p.dtype, p.device, len(p.shape)) for p in parts}) > 1
    ):
        return PASS
    stacked = func is aten.stack.default
    if stacked and rank > 2 and not all(p.is_contiguous and not is_last for p, is_last in zip(parts, last)):
        return PASS  # a view of joined parts, or of parts with one dimension more
    require(-rank - stacked <= dim < rank + stacked)
    joined = _dense(symbolic_rules[func](parts, dim), first)
    return joined.with_stride(channels_last_stride(joined.shape)) if all(last) else joined


for _func in (aten.cat.default, aten.stack.default):
    shape_rules.add(_func, functools.partial(_joined, _func))


# Normalisations ---------------------------------------------------------------------------------------------
# Normalisations that return statistics behind their output; True where the output takes the input's memory
# format.
STATISTICS = {
    aten.native_layer_norm.default: False, aten.native_group_norm.default: False,
    aten.native_batch_norm.default: True,
    aten._native_batch_norm_legit_functional.default: True, aten._native_batch_norm_legit.no_stats: True,
    aten._native_batch_norm_legit_no_training.default: True, aten._batch_norm_no_update.default: True,
    aten._native_batch_norm_legit.default: True, aten._batch_norm_with_update.default: True,
}  # fmt: skip


_TRAINING_IS_SAID = {
    aten.native_batch_norm.default, aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit_functional.default,
}  # fmt: skip


def _evaluates(func: OpOverload, args: tuple) -> bool:
    """Whether a batch norm uses its running statistics. args: those behind the input."""
    if func in _TRAINING_IS_SAID:
        return not args[4]
    return func in (aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default)


# Batch norms that are answered here; types of what they return behind the statistics, or the argument behind
# the input that has it.
_RUNNING: dict[OpOverload, tuple[Any, ...]] = {
    aten.native_batch_norm.default: (), aten._native_batch_norm_legit.no_stats: (),
    aten._native_batch_norm_legit_functional.default: (2, 3),
    aten._native_batch_norm_legit_no_training.default: (),
    aten._batch_norm_no_update.default: (torch.uint8,),
}  # fmt: skip


def _fits(
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


def _is_grouped(
    x: TensorSpec, weight: Any, bias: Any, n: int, c: int, area: int, groups: int, eps: float
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


def _normalised(func: OpOverload, x: TensorSpec, args: tuple, kwargs: dict[str, Any]) -> Sequence[TensorSpec]:
    """Row-major results; those of a GPU's statistics have their type."""
    if (
        func is aten.native_layer_norm.default
        and _fits(x, *args[:3])
        or func is aten.native_group_norm.default
        and _is_grouped(x, *args)
    ):
        return [_dense(shape, x) for shape in symbolic_rules[func](x, *args)]
    if not _is_by_channel(func, x, args):
        found = infer_by_meta_kernel(func, (x, *args), kwargs)
        return _grouped(x, found) if func is aten.native_group_norm.default else found
    wide = torch.float32 if x.dtype.itemsize < 4 else x.dtype
    behind = (one if type(one) is torch.dtype else args[one].dtype for one in _RUNNING[func])
    return [
        TensorSpec.dense(shape, dtype, x.device)
        for shape, dtype in zip(symbolic_rules[func](x, *args), (x.dtype, wide, wide, *behind))
    ]


def _is_by_channel(func: OpOverload, x: TensorSpec, args: tuple) -> bool:
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


def _normalisation(func: OpOverload, suggests: bool, x: TensorSpec, /, *args: Any, **kwargs: Any) -> tuple:
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


for _func, _suggests in STATISTICS.items():
    shape_rules.add(_func, functools.partial(_normalisation, _func, _suggests))


@shape_rule(aten.batch_norm_elemt.default)
def _batch_norm_elements(x: TensorSpec, *args: Any) -> TensorSpec:
    """What a batch norm makes of its input and statistics: it lies as the batch norm's result does."""
    return x.with_stride(packed_stride(x, x.shape))


@shape_rule(aten.cudnn_batch_norm.default)
def _cudnn_batch_norm(x: TensorSpec, *args: Any) -> tuple[TensorSpec, ...]:
    """As the native one, and what only its own backward reads."""
    reserve = TensorSpec.dense((0,), torch.uint8, x.device)
    return *shape_rules[aten.native_batch_norm.default](x, *args), reserve


def _batch_norm_gradient(grad: TensorSpec, x: TensorSpec) -> Dims:
    """Where gradient and input lie in one format the kernel asks for the suggested one, which sizes of 1
    leave open.
    """
    alike = (
        grad.is_contiguous
        if x.is_contiguous
        else is_channels_last_contiguous(grad) and not grad.is_contiguous
    )
    return suggested_stride(x, x.shape) if alike else packed_stride(x, x.shape)


@shape_rule(aten.native_batch_norm_backward.default)
def _batch_norm_backward(grad: TensorSpec, x: TensorSpec, weight: TensorSpec | None, *args: Any) -> Any:
    if len(x.shape) < 2 or 0 in x.shape or not equal(grad.shape, x.shape):
        dx, *others = infer_by_meta_kernel(
            aten.native_batch_norm_backward.default, (grad, x, weight, *args), {}
        )
    else:
        channels = _dense(x.shape[1:2], weight or x)
        dx, others = _dense(x.shape, x), [channels if wanted else None for wanted in args[-1][1:]]
    return dx.with_stride(_batch_norm_gradient(grad, x)), *others


@shape_rule(aten.native_group_norm_backward.default)
def _group_norm_backward(
    grad: TensorSpec, x: TensorSpec, mean: Any, rstd: Any, weight: Any, n: int, c: int, *args: Any
) -> tuple:
    """The gradient of a half-precision input is one too, also where the weight is float32."""
    area, groups, mask = args
    if _is_grouped(x, weight, None, n, c, area, groups, 0.0) and equal(grad.shape, x.shape):
        found: Sequence[Any] = [_dense(x.shape, x), *[_dense((c,), x)] * 2]
        return tuple(spec if wanted else None for spec, wanted in zip(found, mask))
    op = aten.native_group_norm_backward.default
    found = infer_by_meta_kernel(op, (grad, x, mean, rstd, weight, n, c, *args), {})
    dx, *others = _grouped(x, found) if mask[0] else found
    return dx and replace(dx, dtype=x.dtype), *others


def _grouped(x: TensorSpec, found: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
    """The first in the format that x suggests, as on a CPU: strides where sizes are 1 say which."""
    first, *others = found
    return [first.with_stride(suggested_stride(x, x.shape)) if x.device.type == "cpu" else first, *others]


# Images -----------------------------------------------------------------------------------------------------
@shape_rule(aten.convolution_backward.default)
def _convolution_backward(
    grad: TensorSpec, x: TensorSpec, weight: TensorSpec, bias: Sequence[int] | None, *args: Any
) -> tuple[TensorSpec | None, ...]:
    """Both gradients are channels-last if the input or the weight is.

    Where oneDNN has no kernels of halves for the processor, PyTorch's own lay a weight's gradient out row by
    row if sizes of 1 leave open which format it is in.
    """
    last = suggests_channels_last(x) or suggests_channels_last(weight)
    dx, dw = (
        spec.with_stride(channels_last_stride(spec.shape)) if last else spec
        for spec in (_dense(x.shape, grad), _dense(weight.shape, grad))
    )
    half = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(grad.dtype)
    if half and dw.is_contiguous and not getattr(torch.ops.mkldnn, f"_is_mkldnn_{half}_supported")():
        dw = _dense(dw.shape, dw)
    wanted = args[-1]
    return (
        dx if wanted[0] else None,
        dw if wanted[1] else None,
        _dense(bias, grad) if wanted[2] and bias is not None else None,
    )


def _pooled(
    x: TensorSpec, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> TensorSpec | None:
    """Pooled images in the memory format that the images suggest; None where something may be wrong with the
    arguments.
    """
    numbers = (*kernel, *stride, *dilation)
    if (
        len(x.shape) not in (3, 4)
        or 0 in x.shape
        or not x.dtype.is_floating_point
        or not all(type(n) is int and n > 0 for n in numbers)
        or not all(0 <= 2 * p <= k for p, k in zip([*padding] * 2, [*kernel] * 2))
    ):
        return None
    shape: Any = symbolic_rules[aten.max_pool2d_with_indices.default](
        x, kernel, stride, padding, dilation, ceil
    )
    return TensorSpec(shape, suggested_stride(x, shape), x.dtype, x.device) if min(shape) > 0 else None


@shape_rule(aten.max_pool2d_with_indices.default)
def _max_pool(
    x: TensorSpec,
    kernel: Any,
    stride: Any = (),
    padding: Any = (0,),
    dilation: Any = (1,),
    ceil: bool = False,
) -> Any:
    out = _pooled(x, kernel, stride, padding, dilation, ceil)
    return PASS if out is None else (out, replace(out, dtype=torch.int64))


@shape_rule(aten.avg_pool2d.default)
def _avg_pool(
    x: TensorSpec,
    kernel: Any,
    stride: Any = (),
    padding: Any = (0,),
    ceil: bool = False,
    counts_padding: bool = True,
    divisor: int | None = None,
) -> Any:
    out = _pooled(x, kernel, stride, padding, (1,), ceil) if divisor is None else None
    return PASS if out is None else out


def _pool_backward(func: OpOverload, grad: TensorSpec, x: TensorSpec, *args: Any) -> Any:
    pooled = infer_spec(func, (x, *[a for a in args if type(a) is not TensorSpec]), {})
    pooled = pooled[0] if type(pooled) is tuple else pooled
    if not equal(grad.shape, pooled.shape) or grad.dtype is not x.dtype:
        return PASS
    return _dense(x.shape, x).with_stride(suggested_stride(x, x.shape))


shape_rules.add(
    aten.max_pool2d_with_indices_backward.default,
    functools.partial(_pool_backward, aten.max_pool2d_with_indices.default),
)
shape_rules.add(aten.avg_pool2d_backward.default, functools.partial(_pool_backward, aten.avg_pool2d.default))


@shape_rule(aten._adaptive_avg_pool2d.default)
def _adaptive_pool(x: TensorSpec, size: Sequence[int]) -> Any:
    if len(x.shape) not in (3, 4) or 0 in x.shape or len(size) != 2 or min(size) < 1:
        return PASS
    shape = (*x.shape[:-2], *size)
    return TensorSpec(shape, suggested_stride(x, shape), x.dtype, x.device)


@shape_rule(aten._adaptive_avg_pool2d_backward.default)
def _adaptive_pool_backward(grad: TensorSpec, x: TensorSpec) -> Any:
    plain = _is_plain_image(x) and len(grad.shape) == 4 and equal(grad.shape[:2], x.shape[:2])
    return _dense(x.shape, x) if plain and grad.dtype is x.dtype and 0 not in grad.shape else PASS


def _is_plain_image(x: TensorSpec) -> bool:
    return len(x.shape) == 4 and x.is_contiguous and not suggests_channels_last(x) and 0 not in x.shape


@shape_rule(aten.upsample_nearest2d.default, aten.upsample_bilinear2d.default)
def _upsample(x: TensorSpec, size: Sequence[int], *more: Any) -> Any:
    plain = _is_plain_image(x) and len(size) == 2 and min(size) > 0
    return _dense((*x.shape[:2], *size), x) if plain else PASS


@shape_rule(aten.upsample_nearest2d_backward.default, aten.upsample_bilinear2d_backward.default)
def _upsample_backward(grad: TensorSpec, size: Sequence[int], shape: Sequence[int], *more: Any) -> Any:
    plain = _is_plain_image(grad) and equal(grad.shape, (*shape[:2], *size)) and min(shape) > 0
    return _dense(tuple(shape), grad) if plain else PASS


@shape_rule(aten.constant_pad_nd.default)
def _pad(x: TensorSpec, pad: Sequence[int], value: Any = 0) -> Any:
    if (
        not x.is_contiguous
        or suggests_channels_last(x)
        or len(pad) % 2
        or len(pad) > 2 * len(x.shape)
        or not any(pad)
    ):
        return PASS
    shape = [*x.shape]
    for at, (before, after) in enumerate(zip(pad[::2], pad[1::2])):
        if shape[-1 - at] + min(before, 0) + min(after, 0) <= 0:
            return PASS
        shape[-1 - at] += before + after
    return _dense(shape, x) if 0 not in shape else PASS


# New tensors, and parts of others ---------------------------------------------------------------------------
@shape_rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(*args: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
    start, end, step = (0, *args, 1)[-3:] if len(args) == 1 else (*args, 1)[:3]
    whole = all(type(n) is int for n in (start, end, step))
    if (
        not whole
        or dtype not in (None, torch.int64)
        or options.get("layout")
        or step * (end - start) < 0
        or not step
    ):
        return PASS
    return TensorSpec.dense((-((start - end) // step),), torch.int64, device_of_result((), options))


@shape_rule(aten.eye.default, aten.eye.m)
def _eye(n: int, m: int | None = None, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    shape = (n, n if m is None else m)
    if any(type(size) is not int or size < 0 for size in shape) or options.get("layout"):
        return PASS
    return TensorSpec.dense(shape, dtype or torch.get_default_dtype(), device_of_result((), options))


@shape_rule(aten.masked_fill_.Scalar)
def _masked_fill(x: TensorSpec, mask: TensorSpec, value: Any) -> Any:
    fits = len(mask.shape) <= len(x.shape) and all(
        m == 1 or m == n for m, n in zip(reversed(mask.shape), reversed(x.shape))
    )
    return x if fits and mask.dtype is torch.bool and mask.device == x.device else PASS


@shape_rule(aten.native_dropout.default)
def _dropout(x: TensorSpec, p: float, train: bool | None) -> Any:
    if not train or not 0 < p < 1 or not x.is_contiguous or not x.dtype.is_floating_point:
        return PASS
    return _dense(x.shape, x), TensorSpec.dense(x.shape, torch.bool, x.device)


@shape_rule(aten.flip.default)
def _flip(x: TensorSpec, dims: Sequence[int]) -> Any:
    rank = len(x.shape)
    plain = all(-rank <= d < rank for d in dims) and len({d % rank for d in dims}) == len(dims)
    return replace(x, stride=preserved_stride(x), offset=0) if plain and 0 not in x.shape else PASS


# Losses of one number ---------------------------------------------------------------------------------------
@shape_rule(aten.mse_loss.default, aten.smooth_l1_loss.default)
def _loss(x: TensorSpec, target: TensorSpec, reduction: int = 1, *args: Any) -> Any:
    alike = equal(x.shape, target.shape) and x.dtype is target.dtype and x.dtype.is_floating_point
    return _dense((), x) if alike and reduction in (1, 2) else PASS


@shape_rule(aten.mse_loss_backward.default)
def _loss_backward(grad: TensorSpec, x: TensorSpec, target: TensorSpec, reduction: int) -> TensorSpec:
    alike = equal(x.shape, target.shape) and (not grad.shape or equal(grad.shape, x.shape))
    if alike and {grad.dtype, target.dtype} == {x.dtype} and x.dtype.is_floating_point:
        return _dense(x.shape, x)
    out = infer_by_meta_kernel(aten.mse_loss_backward.default, (grad, x, target, reduction), {})
    return TensorSpec.dense(out.shape, out.dtype, out.device)
