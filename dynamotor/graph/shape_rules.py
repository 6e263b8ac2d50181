"""Shape rules of our own: ops whose meta kernel gives other strides than the CPU kernel does.

Pointwise ops need no row: `shapes.py` gives every op that carries the pointwise tag TensorIterator's strides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base import compat
from ..base.compat import OpOverload
from ..base.registry import register_all
from .result_strides import (
    dense_in_order,
    iterated_stride,
    preserved_stride,
    suggested_stride,
)
from .shapes import (
    PASS,
    ShapeRule,
    UnsupportedOp,
    has_symbols,
    infer_by_meta_kernel,
    infer_spec,
    iterated_operands,
    meta_tensor,
    shape_rule,
    shape_rules,
)
from .sizes import Dims, equal
from .spec import (
    CPU,
    TensorSpec,
    aten,
    channels_last_stride,
    contiguous_stride,
    device_with_index,
)
from .symbolic_rules import Unknown, broadcast, symbolic_rules


def _convolved(x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, *args: Any) -> TensorSpec:
    """A row-major result; where something may be wrong with the arguments, the meta kernel says it."""
    transposed, groups = args[3], args[5]
    if weight.shape and weight.shape[0] < groups:  # the meta kernel says nothing
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be at least {groups} at dimension 0, "
            f"but got weight of size {list(weight.shape)} instead"
        )
    channels = weight.shape[0] if transposed else weight.shape[1] * groups
    if (
        len(x.shape) == len(weight.shape) >= 3
        and x.shape[1] == channels
        and len({(t.dtype, t.device) for t in (x, weight, bias or x)}) == 1
        and weight.shape[0] % groups == 0
        and 0 not in x.shape + weight.shape
    ):
        shape = symbolic_rules[aten.convolution.default](x, weight, bias, *args)
        if all(n > 0 for n in shape) and (bias is None or bias.shape == shape[1:2]):
            return TensorSpec.dense(shape, x.dtype, x.device)
    return infer_by_meta_kernel(aten.convolution.default, (x, weight, bias, *args), {})


@shape_rule(aten.convolution.default)
def _convolution(
    x: TensorSpec,
    weight: TensorSpec,
    bias: TensorSpec | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> TensorSpec:
    """PyTorch says which kernel it would take and which memory format that kernel works in."""
    out = _convolved(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    if 0 in out.shape:
        return out
    inputs = x.empty(), weight.empty()  # PyTorch looks at the metadata only
    backend = compat.select_conv_backend(
        *inputs,
        None if bias is None else bias.empty(),
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
    )
    if len(out.shape) == 3:  # one row of an image; the input is made row-major first, the weight is not
        row_major = inputs[0] if x.is_contiguous else TensorSpec.dense(x.shape, x.dtype, x.device).empty()
        layout = compat.conv_memory_format(row_major.unsqueeze(2), inputs[1].unsqueeze(2), backend)
        shape = (*out.shape[:2], 1, out.shape[2])
        stride4 = (channels_last_stride if layout is torch.channels_last else contiguous_stride)(shape)
        return out.with_stride(stride4[:2] + stride4[3:])
    layout = compat.conv_memory_format(*inputs, backend)
    if layout in (torch.channels_last, torch.channels_last_3d):
        return out.with_stride(channels_last_stride(out.shape))
    return TensorSpec.dense(out.shape, out.dtype, out.device)


@shape_rule(aten.index_select.default)
def _index_select(x: TensorSpec, dim: int, index: TensorSpec) -> Any:
    """Nothing can be picked where nothing is, even if what is picked has no elements."""
    if x.shape and x.shape[dim] == 0 and index.numel:
        raise RuntimeError("index_select(): self indexing axis dim should be positive")
    return PASS


@shape_rule(aten.embedding.default)
def _embedding(weight: TensorSpec, index: TensorSpec, *args: Any) -> Any:
    if len(weight.shape) != 2 or index.dtype not in (torch.int64, torch.int32):
        return PASS
    _index_select(weight, 0, index)
    return TensorSpec.dense((*index.shape, *weight.shape[1:]), weight.dtype, weight.device)


def _first_laid_out(
    func: OpOverload, layout: Callable[[tuple, TensorSpec], Dims], /, *args: Any, **kwargs: Any
) -> Any:
    """The meta kernel's answer, its (first) result with the strides that `layout(arguments, result)`
    gives.
    """
    out = infer_by_meta_kernel(func, args, kwargs)
    if type(out) is not tuple:
        return out.with_stride(layout(args, out))
    return out if out[0] is None else (out[0].with_stride(layout(args, out[0])), *out[1:])


def _as_argument(position: int) -> Callable[[tuple, TensorSpec], Dims]:
    """Strides in the memory format, channels-last or row-major, that an argument suggests."""
    return lambda args, out: suggested_stride(args[position], out.shape)


def _row_major(args: tuple, out: TensorSpec) -> Dims:
    return contiguous_stride(out.shape)


def _reversed(args: tuple, out: TensorSpec) -> Dims:
    return iterated_stride(iterated_operands(aten.sub.Tensor, (args[1], args[0]), out.dtype), out.shape)


_LAYOUTS: dict[Callable[[tuple, TensorSpec], Dims], tuple[OpOverload, ...]] = {
    _as_argument(0): (
        aten.pixel_shuffle.default,
        aten.reflection_pad2d.default,
        aten.reflection_pad3d.default,
        aten.replication_pad2d.default,
        aten.replication_pad3d.default,
        aten.channel_shuffle.default,
        aten.max_unpool2d.default,
    ),
    _as_argument(1): (
        aten.reflection_pad2d_backward.default,
        aten.reflection_pad3d_backward.default,
        aten.replication_pad2d_backward.default,
        aten.replication_pad3d_backward.default,
    ),
    _row_major: (
        aten.pow.Scalar,
        aten.glu_backward.default,
        aten.mvlgamma.default,
        aten.huber_loss_backward.default,
        aten.normal.Tensor_Tensor,
        aten.normal.Tensor_float,
        aten.poisson.default,
        aten.isin.Tensor_Tensor,
        aten.nonzero_static.default,
        aten.nll_loss2d_forward.default,
    ),
    _reversed: (aten.rsub.Tensor, aten.leaky_relu_backward.default),
    lambda args, out: preserved_stride(args[0]): (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor),
    lambda args, out: preserved_stride(args[1]): (aten.binary_cross_entropy_backward.default,),
}
for _layout, _funcs in _LAYOUTS.items():
    for _func in _funcs:
        shape_rules.add(_func, functools.partial(_first_laid_out, _func, _layout))


@shape_rule(aten.sort.default, aten.sort.stable)
def _sort(x: TensorSpec, *args: Any, **kwargs: Any) -> tuple[TensorSpec, ...]:
    """Both results lie as the tensor does."""
    found = infer_by_meta_kernel(
        aten.sort.stable if "stable" in kwargs else aten.sort.default, (x, *args), kwargs
    )
    return tuple([spec.with_stride(preserved_stride(x)) for spec in found])


def _ask_eager(func: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
    """For small arguments, run the op on zeros and look: for kernels whose strides follow no simple rule."""
    tensors = [a for a in args if type(a) is TensorSpec]
    if any(t.device != CPU or t.numel > 1 << 20 for t in tensors):
        return PASS
    real = [a.empty().zero_() if type(a) is TensorSpec else a for a in args]
    with torch.no_grad():
        out = func(*real, **kwargs)
    return tuple(map(TensorSpec.of, out)) if isinstance(out, (tuple, list)) else TensorSpec.of(out)


for _func in (
    aten._fft_c2r.default,
    aten._fft_r2c.default,
    aten._fft_c2c.default,
    aten._linalg_svd.default,
    aten.linalg_eig.default,
    aten.linalg_inv_ex.default,
    aten.geqrf.default,
    aten.ldexp.Tensor,
):
    shape_rules.add(_func, functools.partial(_ask_eager, _func))


def _of_operand(func: OpOverload, at: int) -> ShapeRule:
    """The type of that operand, also beside a wider one: the kernels compute in place."""
    return lambda *args, **kwargs: replace(infer_by_meta_kernel(func, args, kwargs), dtype=args[at].dtype)


for _func, _at in (
    (aten.huber_loss.default, 0),
    (aten.soft_margin_loss.default, 0),
    (aten.binary_cross_entropy_with_logits.default, 1),
):
    shape_rules.add(_func, _of_operand(_func, _at))


@shape_rule(aten.pixel_unshuffle.default)
def _pixel_unshuffle(x: TensorSpec, factor: int) -> TensorSpec:
    """A tensor without elements comes back as it is."""
    if 0 in x.shape:
        return TensorSpec.dense(x.shape, x.dtype, x.device)
    out = infer_by_meta_kernel(aten.pixel_unshuffle.default, (x, factor), {})
    return out.with_stride(suggested_stride(x, out.shape))


@shape_rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(x: TensorSpec, indices: Sequence[TensorSpec | None]) -> TensorSpec:
    """TensorIterator goes over the positions and the rest of `x`, which does not move along the positions'
    dimensions.
    """
    picks = [i for i in indices if i is not None]
    plain = len(indices) <= len(x.shape) and all(i.dtype is torch.int64 for i in picks) and 0 not in x.shape
    try:
        if picks and plain:
            found = symbolic_rules[aten.index.Tensor](x, indices)
            out: Any = TensorSpec.dense(found, x.dtype, x.device)
        else:
            out = infer_by_meta_kernel(aten.index.Tensor, (x, indices), {})
    except (Unknown, RuntimeError) as error:  # eager's class and words
        if type(error) is not Unknown and "broadcast" not in str(error):
            raise
        shapes = ", ".join([str(list(i.shape)) for i in picks])
        what = f"shape mismatch: indexing tensors could not be broadcast together with shapes {shapes}"
        raise IndexError(what) from None
    at = [d for d, index in enumerate(indices) if index is not None]
    whole = (torch.int64, torch.int32)
    if any(not n and i is not None and i.dtype in whole and i.numel for n, i in zip(x.shape, indices)):
        raise IndexError("index is out of bounds for dimension with size 0")
    rest = [stride for d, stride in enumerate(x.stride) if d not in at]
    before = (
        at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    )  # dimensions of the result before the positions'
    after, count = len(rest) - before, len(out.shape) - len(rest)
    source = replace(x, shape=out.shape, stride=(*rest[:before], *[0] * count, *rest[before:]))
    shape = out.shape[before : before + count]
    positions = [
        TensorSpec.of(meta_tensor(i).expand(shape).reshape((*[1] * before, *shape, *[1] * after)))
        for i in indices
        if i is not None
    ]
    return out.with_stride(iterated_stride([source, *positions], out.shape))


@shape_rule(aten._unsafe_masked_index.default)
def _unsafe_masked_index(x: TensorSpec, *args: Any) -> TensorSpec:
    """Of a tensor without elements, its kernel gives none along the dimensions without positions."""
    out, behind = (
        infer_by_meta_kernel(aten._unsafe_masked_index.default, (x, *args), {}),
        len(x.shape) - len(args[1]),
    )
    return (
        TensorSpec.dense((*out.shape[: len(out.shape) - behind], *[0] * behind), x.dtype, x.device)
        if 0 in x.shape
        else out
    )


@shape_rule(aten.log_sigmoid_forward.default)
def _log_sigmoid(x: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    dense = TensorSpec.dense(x.shape, x.dtype, x.device)
    return dense, TensorSpec.dense((0,), x.dtype, x.device) if x.device.type == "cuda" else dense


@shape_rule(aten.linalg_vector_norm.default)
def _vector_norm(x: TensorSpec, ord: Any = 2, dims: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """PyTorch 2.11's meta kernel keeps a dimension of one element that is reduced."""
    shape = symbolic_rules[aten.sum.dim_IntList](x, dims, keepdim)
    rank = len(x.shape)
    within = dims is None or all(-rank <= dim < rank for dim in dims)
    if within and x.dtype.is_floating_point and not kwargs and 0 not in x.shape:
        return TensorSpec.dense(shape, x.dtype, x.device)
    out = infer_by_meta_kernel(aten.linalg_vector_norm.default, (x, ord, dims, keepdim), kwargs)
    return out if out.shape == shape else TensorSpec.dense(shape, out.dtype, out.device)


@shape_rule(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    grad: TensorSpec, x: TensorSpec, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: Any
) -> Any:
    kept = [TensorSpec.dense(x.shape, x.dtype, x.device), weight, bias]
    return tuple(
        [
            spec and TensorSpec.dense(spec.shape, spec.dtype, spec.device) if wanted else None
            for spec, wanted in zip(kept, mask, strict=True)
        ]
    )


@shape_rule(aten.view.default, aten._unsafe_view.default)
def _view_of_row_major(x: TensorSpec, shape: Any) -> Any:
    exactly = equal(
        x.stride, contiguous_stride(x.shape)
    )  # a dimension of size 1 may have any other stride, and keeps it
    return (
        symbolic_rules[aten.view.default](x, shape)
        if exactly and 0 not in x.shape and 0 not in shape
        else PASS
    )


@shape_rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _flash_attention(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, *args: Any, **kwargs: Any
) -> tuple[TensorSpec, TensorSpec]:
    """The result is laid out as the query, the logarithms of sums with heads innermost."""
    batch, heads, length, _ = q.shape
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    sums = TensorSpec((batch, heads, length), (length * heads, 1, heads), wide, q.device)
    return TensorSpec(q.shape, preserved_stride(q), q.dtype, q.device), sums


@shape_rule(aten.multilabel_margin_loss_forward.default)
def _multilabel_margin_loss(
    x: TensorSpec, target: TensorSpec, reduction: int
) -> tuple[TensorSpec, TensorSpec]:
    shape = x.shape[:-1] if reduction == 0 else ()
    return TensorSpec.dense(shape, x.dtype, x.device), TensorSpec.dense(target.shape, x.dtype, x.device)


def _bags(op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
    """The bookkeeping follows the kernel that is taken: a CPU's runs, with one row of the weight, zeros.
    Sparse gradients are left to eager.
    """
    last = any(args[7:8])
    if (
        kwargs
        or args[0].device != CPU
        or 0 in args[0].shape + args[2].shape
        or has_symbols(args)
        or any(args[5:6])
        or last
        and args[2].shape == (1,)  # no bags
    ):
        raise UnsupportedOp(
            "DM243",
            "embedding_bag's bookkeeping tensors follow the kernel that is taken at run time",
            cure="use embedding and a sum",
        )
    specs = (replace(args[0], shape=(1, *args[0].shape[1:])), *args[1:])
    zeros = [s.empty().zero_() if type(s) is TensorSpec else s for s in specs]
    return tuple(map(TensorSpec.of, op(*zeros)))


for _op in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default):
    shape_rules.add(_op, functools.partial(_bags, _op))


@shape_rule(
    aten.clone.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten._to_copy.default,
    aten.rand_like.default,
    aten.randn_like.default,
)
def _like(
    x: TensorSpec, value: Any = None, *, memory_format: torch.memory_format | None = None, **options: Any
) -> Any:
    """Copies and `*_like` factories keep the order of dimensions when no memory format is asked for."""
    if memory_format not in (None, torch.preserve_format):
        stride = {
            torch.channels_last: channels_last_stride,
            torch.channels_last_3d: channels_last_stride,
            torch.contiguous_format: contiguous_stride,
        }[memory_format](x.shape)
    else:
        stride = preserved_stride(x)
    return TensorSpec(
        x.shape, stride, options.get("dtype") or x.dtype, device_with_index(options.get("device") or x.device)
    )


def _part_written(view: OpOverload, x: TensorSpec, source: TensorSpec, *where: Any) -> Any:
    """PyTorch's meta kernels write what fits and what does not, and PyTorch 2.11's let expanded stay so."""
    have, wanted = list(source.shape), list(infer_spec(view, (x, *where), {}).shape)
    if have != wanted:
        raise RuntimeError(
            "expected src to have a size equal to the slice of self. "
            f"src size = {have}, slice size = {wanted}"
        )
    if any(not step and n != 1 for n, step in zip(x.shape, x.stride, strict=True)):
        return _like(x)
    row_major = equal(x.stride, contiguous_stride(x.shape)) and x.dtype is source.dtype
    return TensorSpec.dense(x.shape, x.dtype, x.device) if row_major and 0 not in x.shape else PASS


shape_rules.add(aten.select_scatter.default, functools.partial(_part_written, aten.select.int))
shape_rules.add(aten.slice_scatter.default, functools.partial(_part_written, aten.slice.Tensor))
shape_rules.add(aten.diagonal_scatter.default, functools.partial(_part_written, aten.diagonal.default))


@shape_rule(aten.roll.default)
def _roll(x: TensorSpec, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """Eager joins two slices along each dimension, and that keeps channels-last, unless one is empty."""
    if (
        x.numel == 0
        or len(shifts) != len(dims)
        or not all(-len(x.shape) <= dim < len(x.shape) for dim in dims)
    ):
        return PASS
    for shift, dim in zip(shifts, dims):
        x = x.with_stride(
            suggested_stride(x, x.shape) if shift % x.shape[dim] else contiguous_stride(x.shape)
        )
    return x


@shape_rule(aten._grouped_mm.default)
def _grouped_mm(
    x: TensorSpec,
    weight: TensorSpec,
    offs: TensorSpec | None = None,
    bias: TensorSpec | None = None,
    out_dtype: torch.dtype | None = None,
) -> TensorSpec:
    """Rows of the result start at multiples of 16 bytes."""
    dtype = out_dtype or x.dtype
    shape: Dims = (x.shape[-2], weight.shape[-1])
    if len(x.shape) == len(weight.shape):
        shape = (x.shape[0] if len(x.shape) == 3 else offs.shape[0] if offs is not None else 0, *shape)
    step = 16 // dtype.itemsize
    row = -(-shape[-1] // step) * step
    return TensorSpec(shape, (shape[-2] * row, row, 1)[-len(shape) :], dtype, x.device)


register_all(
    shape_rule,
    (
        (
            (aten.smooth_l1_loss_backward.default, aten.soft_margin_loss_backward.default),
            lambda grad, x, *args: TensorSpec.dense(x.shape, x.dtype, x.device),
        ),
        (
            (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default),
            lambda grad, out, dim, dtype: (
                TensorSpec.dense(grad.shape, dtype, grad.device) if grad.dtype is dtype else PASS
            ),
        ),
        (
            (aten.nll_loss_backward.default,),
            lambda grad, x, *args: TensorSpec.dense(x.shape, x.dtype, x.device),
        ),
        (
            (aten.embedding_dense_backward.default,),
            lambda grad, index, rows, *args: TensorSpec.dense(
                (rows, grad.shape[-1]), grad.dtype, grad.device
            ),
        ),
        # Gradients lie in the order batch, position, head, channel.
        (
            (aten._scaled_dot_product_flash_attention_for_cpu_backward.default,),
            lambda grad, *inputs, **kwargs: tuple(
                [
                    TensorSpec(x.shape, dense_in_order([3, 1, 2, 0], x.shape), x.dtype, x.device)
                    for x in inputs[:3]
                ]
            ),
        ),
        # Backwards without a meta kernel, whose gradient is a new row-major tensor of the input's shape.
        (
            (
                aten.multi_margin_loss_backward.default,
                aten.multilabel_margin_loss_backward.default,
                aten.fractional_max_pool3d_backward.default,
            ),
            lambda grad, x, *rest, **kwargs: TensorSpec.dense(x.shape, x.dtype, x.device),
        ),
        # Without a meta kernel, like their first argument.
        (
            (
                aten.binomial.default,
                aten._standard_gamma_grad.default,
                aten._sample_dirichlet.default,
                aten._masked_softmax.default,
                aten._masked_softmax_backward.default,
            ),
            lambda x, *rest, **kwargs: TensorSpec.dense(x.shape, x.dtype, x.device),
        ),
        (
            (aten.batch_norm_update_stats.default,),
            lambda x, mean, *rest: (TensorSpec.dense(x.shape[1:2], (mean or x).dtype, x.device),) * 2,
        ),
        # Eager fills a row-major copy.
        (
            (aten.masked_fill.Scalar, aten.masked_fill.Tensor),
            lambda x, mask, value: TensorSpec.dense(broadcast([x.shape, mask.shape]), x.dtype, x.device),
        ),
    ),
)
