"""Shapes of results where sizes differ between calls. One row an op: the result's shape from the arguments'
specs.

The meta kernel runs at the hints and tells the rest: number of results, dtypes, and the order in which the
dimensions of a new tensor lie. Views give whole specs. What a kernel demands of its arguments (equal sizes)
is asked here, so that it becomes a guard. Ops without a row are tried on PyTorch's meta kernel as they are,
else their sizes are specialised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base.compat import OpOverload
from ..base.registry import Registry, register_all
from .result_strides import dense_in_order, suggests_channels_last, viewed_stride
from .sizes import Dim, Size, hint, is_symbolic, minimum
from .spec import TensorSpec, aten, contiguous_stride

Shape = tuple[Any, ...]
# (arguments of the op) -> a shape for each result (one shape, or a tuple of them), or whole specs for views.
symbolic_rules: Registry[OpOverload, Callable[..., Any]] = Registry("symbolic shape")
symbolic_rule = symbolic_rules.register


class Unknown(Exception):
    """The rule has no answer for these arguments."""


def completed(shapes: Any, like: Any) -> Any:
    """Specs (and numbers) from what a rule gives and what is inferred at the hints; Unknown where they
    disagree.
    """
    if isinstance(like, tuple):
        several = isinstance(shapes, list)
        return tuple(
            [
                None if spec is None else completed(shapes[k] if several else shapes, spec)
                for k, spec in enumerate(like)
            ]
        )
    if type(like) is int:
        require(hint(shapes) == like)
        return shapes
    spec = shapes if type(shapes) is TensorSpec else laid_out(tuple(shapes), like)
    if spec.hinted() != like:
        raise Unknown
    if any(
        type(n) is Size and n.hint < 2 for n in spec.shape
    ):  # 0 and 1 are programs of their own, computed sizes too
        return replace(spec, shape=tuple([int(n) if hint(n) < 2 else n for n in spec.shape]))
    return spec


def laid_out(shape: Shape, like: TensorSpec) -> TensorSpec:
    """A new tensor of this shape whose dimensions lie in the order that `like` has."""
    if like.is_contiguous and like.stride == contiguous_stride(like.shape):
        return TensorSpec.dense(shape, like.dtype, like.device)
    order = sorted(range(len(shape)), key=lambda d: (like.stride[d], like.shape[d], -d))
    return TensorSpec(shape, dense_in_order(order, shape), like.dtype, like.device)


def require(condition: bool) -> None:
    """What holds at the hints, since the meta kernel ran; asking made it a guard."""
    if not condition:
        raise Unknown


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape that these shapes are expanded to."""
    result = []
    for sizes in itertools.zip_longest(*[reversed(shape) for shape in shapes], fillvalue=1):
        found: Any = 1
        for size in sizes:
            if type(found) is int and found == 1:
                found = size
            elif not (type(size) is int and size == 1):
                require(size == found)
                found = found if type(found) is int else size
        result.append(found)
    return tuple(reversed(result))


def operands(args: Any) -> list[Shape]:
    """The shapes of the tensors among the arguments."""
    return [arg.shape for arg in args if type(arg) is TensorSpec]


# Results shaped like an argument ----------------------------------------------------------------------------
_SHAPED_LIKE: dict[int, tuple[OpOverload, ...]] = {
    0: (aten._softmax.default, aten._log_softmax.default, aten._softmax_backward_data.default,
        aten.native_dropout.default,
        aten._log_softmax_backward_data.default, aten.cumsum.default, aten.cumprod.default,
        aten.tril.default, aten.triu.default,
        aten.flip.default, aten.sort.default, aten.sort.stable, aten.copy.default, aten.bernoulli.p,
        aten.index_put.default, aten._unsafe_index_put.default,
        aten.index_add.default, aten.index_copy.default, aten.index_fill.int_Scalar,
        aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two,
        aten.masked_scatter.default,
        aten.logcumsumexp.default, aten.channel_shuffle.default,
        aten.native_dropout_backward.default, aten.cummax.default, aten.cummin.default,
        aten._safe_softmax.default),
    1: (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default,
        aten._adaptive_avg_pool2d_backward.default,
        aten.avg_pool2d_backward.default, aten.max_pool2d_with_indices_backward.default,
        aten.mse_loss_backward.default,
        aten.huber_loss_backward.default, aten.binary_cross_entropy_backward.default),
}  # fmt: skip
for _position, _funcs in _SHAPED_LIKE.items():
    for _func in _funcs:
        symbolic_rules.add(_func, lambda *args, _position=_position, **kwargs: args[_position].shape)


# Reductions -------------------------------------------------------------------------------------------------
@symbolic_rule(
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.any.dim,
    aten.all.dim,
    aten.prod.dim_int,
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.logsumexp.default,
    aten.any.dims,
    aten.all.dims,
)
def _reduced(x: TensorSpec, dims: Any = None, keepdim: bool = False, **kwargs: Any) -> Shape:
    rank = len(x.shape)
    chosen = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    gone = {d % rank for d in chosen} if rank else set()
    return tuple([1 if d in gone else n for d, n in enumerate(x.shape) if keepdim or d not in gone])


@symbolic_rule(aten.roll.default)
def _roll(x: TensorSpec, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """Whether it moves something decides how images are laid out: asking makes that a guard."""
    if suggests_channels_last(x):
        for shift, dim in zip(shifts, dims):
            bool(shift % x.shape[dim] == 0)
    return x.shape


@symbolic_rule(aten.topk.default)
def _topk(x: TensorSpec, k: Any, dim: int = -1, *args: Any) -> Shape:
    dim %= len(x.shape)
    require(x.shape[dim] >= k)
    return (*x.shape[:dim], k, *x.shape[dim + 1 :])


# Products ---------------------------------------------------------------------------------------------------
@symbolic_rule(aten.mm.default, aten.bmm.default)
def _product(a: TensorSpec, b: TensorSpec) -> Shape:
    require(a.shape[-1] == b.shape[-2] and all(x == y for x, y in zip(a.shape[:-2], b.shape[:-2])))
    return (*a.shape[:-1], b.shape[-1])


@symbolic_rule(aten.mv.default)
def _matrix_vector(a: TensorSpec, b: TensorSpec) -> Shape:
    require(a.shape[1] == b.shape[0])
    return a.shape[:1]


# Normalisation, attention, losses ---------------------------------------------------------------------------
@symbolic_rule(aten.native_layer_norm.default)
def _layer_norm(x: TensorSpec, shape: Any, *args: Any) -> list[Shape]:
    kept = len(x.shape) - len(shape)
    require(all(a == b for a, b in zip(x.shape[kept:], shape)))
    statistics = (*x.shape[:kept], *[1] * len(shape))
    return [x.shape, statistics, statistics]


@symbolic_rule(aten.native_batch_norm.default, aten._native_batch_norm_legit_functional.default)
def _batch_norm(
    x: TensorSpec, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *args: Any
) -> list[Shape]:
    evaluates_on_cpu = not training and x.device.type == "cpu"  # then there are no statistics
    return [x.shape, *[(0,) if evaluates_on_cpu else (x.shape[1],)] * 2, *[(x.shape[1],)] * 2]


def _same_heads(q: TensorSpec, k: TensorSpec, v: TensorSpec) -> None:
    require(
        all(a == b for a, b in zip(q.shape[:2], k.shape[:2]))
        and all(a == b for a, b in zip(k.shape[:3], v.shape[:3]))
    )


@symbolic_rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(q: TensorSpec, k: TensorSpec, v: TensorSpec, *args: Any, **kwargs: Any) -> list[Shape]:
    _same_heads(q, k, v)
    return [q.shape, (q.shape[0], q.shape[1], q.shape[2])]


@symbolic_rule(aten._scaled_dot_product_efficient_attention.default)
def _efficient_attention(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, bias: Any, sums: bool, *args: Any, **kwargs: Any
) -> list[Shape]:
    """The logarithms of sums have room for a multiple of 32 positions; then two random seeds."""
    _same_heads(q, k, v)
    length = (q.shape[2] + 31) // 32 * 32 if sums else 0
    return [(*q.shape[:3], v.shape[3]), (*q.shape[:2], length), (), ()]


def _in_steps(x: TensorSpec, step: int) -> TensorSpec:
    """As a new tensor whose rows start at multiples of so many elements."""
    row = (x.shape[-1] + step - 1) // step * step
    return TensorSpec(x.shape, contiguous_stride((*x.shape[:-1], row)), x.dtype, x.device)


@symbolic_rule(aten._scaled_dot_product_flash_attention.default)
def _flash_attention(q: TensorSpec, k: TensorSpec, v: TensorSpec, *args: Any, **kwargs: Any) -> list[Any]:
    """Result, logarithms of sums, the lengths, two seeds, and what debugging would show."""
    _same_heads(q, k, v)
    return [q.shape, q.shape[:3], None, None, q.shape[2], k.shape[2], (2,), (), (0,)]


@symbolic_rule(aten._scaled_dot_product_cudnn_attention.default)
def _cudnn_attention(q: TensorSpec, k: TensorSpec, v: TensorSpec, *args: Any, **kwargs: Any) -> list[Any]:
    """As flash attention gives them, without what debugging would show; two seeds of one number."""
    _same_heads(q, k, v)
    lengths = (q.shape[2], k.shape[2])
    return [(*q.shape[:3], v.shape[3]), (*q.shape[:3], 1), None, None, *lengths, (), (), None]


@symbolic_rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(x: TensorSpec, target: TensorSpec, weight: Any, reduction: int, *args: Any) -> list[Shape]:
    require(
        all(
            a == b
            for a, b in zip((x.shape[:1] if len(x.shape) == 2 else (x.shape[0], *x.shape[2:])), target.shape)
        )
    )
    return [target.shape if reduction == 0 else (), ()]


@symbolic_rule(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)
def _loss(x: TensorSpec, target: TensorSpec, reduction: int = 1, *args: Any) -> Shape:
    shape = broadcast([x.shape, target.shape])
    return shape if reduction == 0 else ()


# Images -----------------------------------------------------------------------------------------------------
@symbolic_rule(aten.convolution.default)
def _convolution(
    x: TensorSpec,
    weight: TensorSpec,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Shape:
    rank = len(weight.shape) - 2
    if not is_symbolic(x.shape[:1]) and x.shape[0] == 1:
        require(
            x.numel > 20480 or x.numel <= 20480
        )  # PyTorch takes another kernel, with another layout, for small images
    stride, padding, dilation, more = (
        [*v] * rank if len(v) == 1 else [*v] for v in (stride, padding, dilation, output_padding)
    )
    spatial = []
    for d in range(rank):
        window = dilation[d] * (weight.shape[2 + d] - 1)
        n = x.shape[len(x.shape) - rank + d]
        spatial.append(
            (n - 1) * stride[d] - 2 * padding[d] + window + more[d] + 1
            if transposed
            else (n + 2 * padding[d] - window - 1) // stride[d] + 1
        )
    return (x.shape[0], weight.shape[1] * groups if transposed else weight.shape[0], *spatial)


@symbolic_rule(aten.max_pool2d_with_indices.default)
def _pool(
    x: TensorSpec,
    kernel: Any,
    stride: Any = (),
    padding: Any = (0,),
    dilation: Any = (1,),
    ceil: bool = False,
) -> Shape:
    kernel, padding, dilation = ([*v] * 2 if len(v) == 1 else [*v] for v in (kernel, padding, dilation))
    stride = kernel if not stride else [*stride] * 2 if len(stride) == 1 else [*stride]
    sizes = []
    for n, k, s, p, d in zip(x.shape[-2:], kernel, stride, padding, dilation):
        last = (n + 2 * p - d * (k - 1) - 1 + (s - 1 if ceil else 0)) // s
        beyond = ceil and p + s - 2 >= d * (k - 1) and last * s >= n + p  # it would begin behind the image
        sizes.append(last if beyond else last + 1)
    return (*x.shape[:-2], *sizes)


@symbolic_rule(aten.im2col.default)
def _im2col(x: TensorSpec, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Shape:
    rows, columns = _pool(x, kernel, stride, padding, dilation)[-2:]
    return (*x.shape[:-3], x.shape[-3] * kernel[0] * kernel[1], rows * columns)


@symbolic_rule(aten.constant_pad_nd.default)
def _pad(x: TensorSpec, pad: Any, value: Any = 0) -> Shape:
    if not x.is_contiguous:
        any(n > 0 for n in pad)  # else it is a clone, laid out as x is: asking makes that a guard
    shape = list(x.shape)
    for k in range(len(pad) // 2):
        shape[-1 - k] = shape[-1 - k] + pad[2 * k] + pad[2 * k + 1]
    return tuple(shape)


# Transforms of Fourier --------------------------------------------------------------------------------------
def _transformed(x: TensorSpec, dims: Sequence[int], n: Any) -> Shape:
    """The last of `dims` gets the size n. Kernels lay results out by the order of the argument's strides:
    asking makes that order a guard.
    """
    for a, b in itertools.combinations(x.stride, 2):
        bool(a >= b) and bool(b >= a)
    last = dims[-1] % len(x.shape)
    return (*x.shape[:last], n, *x.shape[last + 1 :])


@symbolic_rule(aten._fft_c2c.default)
def _complex_transform(x: TensorSpec, dims: Sequence[int], *args: Any) -> Shape:
    return _transformed(x, dims, x.shape[dims[-1]]) if dims else x.shape


@symbolic_rule(aten._fft_r2c.default)
def _transform_of_reals(x: TensorSpec, dims: Sequence[int], norm: int, onesided: bool) -> Shape:
    n = x.shape[dims[-1]]
    return _transformed(x, dims, n // 2 + 1 if onesided else n)


@symbolic_rule(aten._fft_c2r.default)
def _transform_to_reals(x: TensorSpec, dims: Sequence[int], norm: int, n: Any) -> Shape:
    require(x.shape[dims[-1]] == n // 2 + 1)
    return _transformed(x, dims, n)


# New tensors ------------------------------------------------------------------------------------------------
@symbolic_rule(aten.arange.start, aten.arange.start_step)
def _arange_from(start: Any, end: Any, step: Any = 1, **kwargs: Any) -> Shape:
    if any(isinstance(v, float) for v in (start, end, step)):
        raise Unknown
    return (-((start - end) // step),)


@symbolic_rule(aten.cat.default)
def _cat(parts: Sequence[TensorSpec], dim: int = 0) -> Shape:
    parts = [p for p in parts if not (len(p.shape) == 1 and type(p.shape[0]) is int and p.shape[0] == 0)]
    dim %= len(parts[0].shape)
    for part in parts[1:]:
        require(all(a == b for d, (a, b) in enumerate(zip(part.shape, parts[0].shape)) if d != dim))
    return (*parts[0].shape[:dim], sum([p.shape[dim] for p in parts]), *parts[0].shape[dim + 1 :])


@symbolic_rule(aten.stack.default)
def _stack(parts: Sequence[TensorSpec], dim: int = 0) -> Shape:
    require(all(a == b for p in parts[1:] for a, b in zip(p.shape, parts[0].shape)))
    dim %= len(parts[0].shape) + 1
    return (*parts[0].shape[:dim], len(parts), *parts[0].shape[dim:])


@symbolic_rule(aten.index_select.default)
def _index_select(x: TensorSpec, dim: int, index: TensorSpec) -> Shape:
    dim %= len(x.shape)
    return (*x.shape[:dim], index.shape[0] if index.shape else 1, *x.shape[dim + 1 :])


@symbolic_rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(x: TensorSpec, indices: Sequence[TensorSpec | None]) -> Shape:
    places = [d for d, index in enumerate(indices) if index is not None]
    if any(indices[d].dtype in (torch.bool, torch.uint8) for d in places):  # type: ignore[union-attr]
        raise Unknown
    picked = broadcast([indices[d].shape for d in places])  # type: ignore[union-attr]
    first = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    before = [n for d, n in enumerate(x.shape) if d not in places and d < first]
    return (*before, *picked, *[n for d, n in enumerate(x.shape) if d not in places and d >= first])


@symbolic_rule(aten.repeat.default)
def _repeat(x: TensorSpec, repeats: Any) -> Shape:
    shape = (*[1] * (len(repeats) - len(x.shape)), *x.shape)
    return tuple([n * k for n, k in zip(shape, repeats)])


# Views: whole specs -----------------------------------------------------------------------------------------
def _look(x: TensorSpec, shape: Sequence[Any], stride: Sequence[Any], offset: Any = None) -> TensorSpec:
    return TensorSpec(tuple(shape), tuple(stride), x.dtype, x.device, x.offset if offset is None else offset)


@symbolic_rule(aten.view.default, aten._unsafe_view.default)
def _view(x: TensorSpec, shape: Sequence[Any]) -> TensorSpec:
    shape = _without_free(x, shape)
    if x.is_contiguous:
        return _look(x, shape, contiguous_stride(shape))
    stride = viewed_stride(x.shape, x.stride, shape)
    if stride is None:
        raise Unknown
    return _look(x, shape, stride)


@symbolic_rule(aten.reshape.default)
def _reshape(x: TensorSpec, shape: Sequence[Any]) -> TensorSpec:
    """Passes make these of views that another layout forbids."""
    shape = _without_free(x, shape)
    try:
        return _view(x, shape)
    except Unknown:
        return TensorSpec.dense(tuple(shape), x.dtype, x.device)


def _without_free(x: TensorSpec, shape: Sequence[Any]) -> Sequence[Any]:
    """The shape with the size that is meant where it says -1."""
    free = [d for d, n in enumerate(shape) if type(n) is int and n == -1]
    if free:
        rest = math.prod([n for d, n in enumerate(shape) if d not in free])
        require(x.numel % rest == 0)
        shape = [x.numel // rest if d in free else n for d, n in enumerate(shape)]
    require(math.prod(shape) == x.numel)
    return shape


@symbolic_rule(aten.expand.default)
def _expand(x: TensorSpec, shape: Sequence[Any], **kwargs: Any) -> TensorSpec:
    sizes: list[Dim] = []
    strides: list[Dim] = []
    for k, n in enumerate(reversed(shape), 1):
        if k <= len(x.shape):
            have, stride = x.shape[-k], x.stride[-k]
        else:
            have, stride = 1, sizes[0] * strides[0] if sizes else 0
        n = have if type(n) is int and n == -1 else n
        keeps = n == have
        require(keeps or have == 1)
        sizes, strides = [n, *sizes], [stride if keeps else 0, *strides]
    return _look(x, sizes, strides)


@symbolic_rule(aten.permute.default)
def _permute(x: TensorSpec, dims: Sequence[int]) -> TensorSpec:
    return _look(x, [x.shape[d] for d in dims], [x.stride[d] for d in dims])


@symbolic_rule(aten.transpose.int)
def _transpose(x: TensorSpec, a: int, b: int) -> TensorSpec:
    dims = list(range(len(x.shape)))
    dims[a], dims[b] = dims[b], dims[a]
    return _permute(x, dims)


@symbolic_rule(aten.unsqueeze.default)
def _unsqueeze(x: TensorSpec, dim: int) -> TensorSpec:
    dim %= len(x.shape) + 1
    stride = x.shape[dim] * x.stride[dim] if dim < len(x.shape) else 1
    return _look(x, (*x.shape[:dim], 1, *x.shape[dim:]), (*x.stride[:dim], stride, *x.stride[dim:]))


@symbolic_rule(aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(x: TensorSpec, dims: Any) -> TensorSpec:
    chosen = {d % len(x.shape) for d in ([dims] if isinstance(dims, int) else dims)} if x.shape else set()
    kept = [d for d, n in enumerate(x.shape) if d not in chosen or n != 1]
    return _permute(x, kept)


@symbolic_rule(aten.select.int)
def _select(x: TensorSpec, dim: int, index: Any) -> TensorSpec:
    dim %= len(x.shape)
    index = index if index >= 0 else index + x.shape[dim]
    require(index >= 0 and x.shape[dim] > index)
    kept = [d for d in range(len(x.shape)) if d != dim]
    return _look(x, [x.shape[d] for d in kept], [x.stride[d] for d in kept], x.offset + index * x.stride[dim])


@symbolic_rule(aten.diagonal.default)
def _diagonal(x: TensorSpec, offset: Any = 0, dim1: int = 0, dim2: int = 1) -> TensorSpec:
    dim1, dim2 = dim1 % len(x.shape), dim2 % len(x.shape)
    rows, columns = x.shape[dim1] + min(offset, 0), x.shape[dim2] - max(offset, 0)
    env = next((n.env for n in (rows, columns) if type(n) is Size), None)
    length = min(rows, columns) if env is None else minimum(env, rows, columns)
    kept = [d for d in range(len(x.shape)) if d not in (dim1, dim2)]
    first = x.offset + (offset * x.stride[dim2] if offset >= 0 else -offset * x.stride[dim1])
    strides = (*[x.stride[d] for d in kept], x.stride[dim1] + x.stride[dim2])
    return _look(x, (*[x.shape[d] for d in kept], length), strides, first)


@symbolic_rule(aten.slice.Tensor)
def _slice(x: TensorSpec, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> TensorSpec:
    dim %= len(x.shape)
    n = x.shape[dim]
    first, last = _clamped(0 if start is None else start, n), n if end is None else _clamped(end, n)
    length = (last - first + step - 1) // step if last >= first else 0
    shape, stride = list(x.shape), list(x.stride)
    shape[dim], stride[dim] = length, stride[dim] * step
    return _look(x, shape, stride, x.offset + first * x.stride[dim])


def _clamped(position: Any, n: Any) -> Any:
    """A slice's bound as Python counts it, in 0 .. n."""
    if type(position) is int and position >= 1 << 62:
        return n
    if position < 0:
        position = position + n
        return position if position >= 0 else 0
    return position if n >= position else n


@symbolic_rule(aten.unfold.default)
def _unfold(x: TensorSpec, dim: int, size: int, step: int) -> TensorSpec:
    dim %= len(x.shape)
    require(x.shape[dim] >= size)
    shape, stride = list(x.shape), list(x.stride)
    shape[dim], stride[dim] = (x.shape[dim] - size) // step + 1, x.stride[dim] * step
    return _look(x, [*shape, size], [*stride, x.stride[dim]])


@symbolic_rule(aten.split.Tensor)
def _split(x: TensorSpec, size: Any, dim: int = 0) -> list[TensorSpec]:
    dim %= len(x.shape)
    n = x.shape[dim]
    count = (n + size - 1) // size
    starts = [k * size for k in range(max(int(count), 1))]
    return [
        _slice(x, dim, at, minimum(n.env, at + size, n) if type(n) is Size else min(at + size, n))
        for at in starts
    ]


@symbolic_rule(aten.split_with_sizes.default)
def _split_with_sizes(x: TensorSpec, sizes: Sequence[Any], dim: int = 0) -> list[TensorSpec]:
    dim %= len(x.shape)
    require(sum(sizes) == x.shape[dim])
    ends = list(itertools.accumulate(sizes))
    return [_slice(x, dim, end - n, end) for end, n in zip(ends, sizes)]


register_all(
    symbolic_rule,
    (
        (
            (aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, aten.floor_divide.default),
            lambda *args: broadcast(operands(args)),
        ),
        (
            (aten.gather.default, aten.take.default),
            lambda x, *args, **kwargs: next(a for a in args if type(a) is TensorSpec).shape,
        ),
        (
            (aten.var.correction, aten.std.correction, aten.var_mean.correction),
            lambda x, dims=None, *, correction=None, keepdim=False: _reduced(x, dims, keepdim),
        ),
        (
            (
                aten.sum.default,
                aten.mean.default,
                aten.max.default,
                aten.min.default,
                aten.any.default,
                aten.all.default,
                aten.prod.default,
            ),
            lambda x, **kwargs: (),
        ),
        (
            (aten.addmm.default, aten.baddbmm.default),
            lambda x, a, b, **kwargs: broadcast([x.shape, _product(a, b)]),
        ),
        ((aten.diagonal_copy.default,), lambda x, *args: _diagonal(x, *args).shape),
        ((aten.addbmm.default,), lambda x, a, b, **kwargs: broadcast([x.shape, _product(a, b)[1:]])),
        ((aten.addmv.default,), lambda x, a, b, **kwargs: broadcast([x.shape, _matrix_vector(a, b)])),
        ((aten.addr.default,), lambda x, a, b, **kwargs: broadcast([x.shape, (*a.shape, *b.shape)])),
        (
            (aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default),
            lambda x, *args, **kwargs: x,  # with its holes
        ),
        (
            (aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default),
            lambda *args: broadcast(operands(args)) if args[-1] == 0 else (),
        ),
        (
            (aten.native_layer_norm_backward.default,),
            lambda grad, x, shape, *args: [x.shape, tuple(shape), tuple(shape)],
        ),
        (
            (aten.native_group_norm.default,),
            lambda x, weight, bias, n, c, area, groups, eps: [x.shape, (n, groups), (n, groups)],
        ),
        (
            (aten.native_group_norm_backward.default,),
            lambda grad, x, mean, rstd, weight, n, c, *args: [x.shape, (c,), (c,)],
        ),
        (
            (aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default),
            lambda x, *args: [x.shape, *[(0,) if x.device.type == "cpu" else (x.shape[1],)] * 2, (0,)],
        ),
        ((aten._native_batch_norm_legit.no_stats,), lambda x, *args: [x.shape, *[(x.shape[1],)] * 2]),
        ((aten.cudnn_batch_norm.default,), lambda x, *args: [x.shape, *[(x.shape[1],)] * 2, (0,)]),
        (
            (aten.native_batch_norm_backward.default,),
            lambda grad, x, *args: [x.shape, (x.shape[1],), (x.shape[1],)],
        ),
        (
            (aten._scaled_dot_product_efficient_attention_backward.default,),
            lambda grad, q, k, v, bias, *args, **kwargs: (
                [q.shape, k.shape, v.shape, _in_steps(bias, 16) if type(bias) is TensorSpec else ()]
            ),
        ),
        (
            (
                aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
                aten._scaled_dot_product_flash_attention_backward.default,
                aten._scaled_dot_product_cudnn_attention_backward.default,
            ),
            lambda grad, q, k, v, *args, **kwargs: [q.shape, k.shape, v.shape],
        ),
        (
            (aten.convolution_backward.default,),
            lambda grad, x, weight, bias, *args: [x.shape, weight.shape, grad.shape[1:2]],
        ),
        ((aten._adaptive_avg_pool2d.default,), lambda x, size: (*x.shape[:-2], *size)),
        (
            (aten.avg_pool2d.default,),
            lambda x, kernel, stride=(), padding=(0,), ceil=False, *args: _pool(
                x, kernel, stride, padding, (1,), ceil
            ),
        ),
        (
            (aten.col2im.default,),
            lambda x, size, kernel, *args: (*x.shape[:-2], x.shape[-2] // (kernel[0] * kernel[1]), *size),
        ),
        (
            (aten.pixel_unshuffle.default,),
            lambda x, n: (*x.shape[:-3], x.shape[-3] * n * n, x.shape[-2] // n, x.shape[-1] // n),
        ),
        ((aten.diagonal_backward.default,), lambda grad, size, *args: tuple(size)),
        (
            (
                aten.upsample_nearest1d.default,
                aten.upsample_nearest2d.default,
                aten.upsample_nearest3d.default,
                aten._upsample_nearest_exact1d.default,
                aten._upsample_nearest_exact2d.default,
                aten._upsample_nearest_exact3d.default,
                aten.upsample_linear1d.default,
                aten.upsample_bilinear2d.default,
                aten.upsample_trilinear3d.default,
                aten.upsample_bicubic2d.default,
            ),
            lambda x, size, *args: (*x.shape[:2], *size),
        ),
        (
            (
                aten.upsample_nearest1d_backward.default,
                aten.upsample_nearest2d_backward.default,
                aten.upsample_nearest3d_backward.default,
                aten._upsample_nearest_exact1d_backward.default,
                aten._upsample_nearest_exact2d_backward.default,
                aten._upsample_nearest_exact3d_backward.default,
                aten.upsample_linear1d_backward.default,
                aten.upsample_bilinear2d_backward.default,
                aten.upsample_trilinear3d_backward.default,
                aten.upsample_bicubic2d_backward.default,
            ),
            lambda grad, size, input_size, *args: tuple(input_size),
        ),
        (
            (aten.grid_sampler_2d.default, aten.grid_sampler_3d.default),
            lambda x, grid, *how: (*x.shape[:2], *grid.shape[1:-1]),
        ),
        (
            (aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default),
            lambda grad, x, grid, *how: [x.shape, grid.shape],
        ),
        (
            (
                aten.full.default,
                aten.empty.memory_format,
                aten.zeros.default,
                aten.ones.default,
                aten.rand.default,
                aten.randn.default,
            ),
            lambda size, *args, **kwargs: tuple(size),
        ),
        (
            (aten.new_empty.default, aten.new_zeros.default, aten.new_full.default, aten.new_ones.default),
            lambda x, size, *args, **kwargs: tuple(size),
        ),
        ((aten.arange.default,), lambda end, **kwargs: _arange_from(0, end)),
        ((aten.embedding.default,), lambda weight, index, *args: (*index.shape, *weight.shape[1:])),
        ((aten.embedding_dense_backward.default,), lambda grad, index, rows, *args: (rows, grad.shape[-1])),
        ((aten.t.default,), lambda x: _permute(x, list(range(len(x.shape)))[::-1])),
        ((aten.squeeze.default,), lambda x: _permute(x, [d for d, n in enumerate(x.shape) if n != 1])),
        ((aten.unbind.int,), lambda x, dim=0: [_select(x, dim, k) for k in range(int(x.shape[dim]))]),
    ),
)
