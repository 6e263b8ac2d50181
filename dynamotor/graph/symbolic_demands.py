"""What kernels demand of sizes that differ between calls, beside what their result's shape says; asked, it is
a guard.

A program is right only where eager does not refuse the sizes: a kernel of ours would read beyond a tensor.
One row an op.

>>> demands[aten.gather.default](x, 0, index)     # index.shape[1] <= x.shape[1]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base.compat import OpOverload
from ..base.registry import Registry, register_all
from .sizes import Size, hint
from .spec import TensorSpec, aten
from .symbolic_rules import Shape, broadcast, require, symbolic_rules

demands: Registry[OpOverload, Callable[..., None]] = Registry("demand of sizes")
demand = demands.register


def _equal(a: Sequence[Any], b: Sequence[Any]) -> None:
    require(len(a) == len(b) and all(m == n for m, n in zip(a, b)))


def _fits(shape: Shape, into: Shape) -> None:
    """`shape` is expanded to `into`."""
    _equal(broadcast([shape, into]), into)


def _channels(n: Any, *parameters: Any) -> None:
    """Weights, biases and statistics have one number a channel."""
    for one in parameters:
        if type(one) is TensorSpec:
            _equal(one.shape, (n,))


# Positions --------------------------------------------------------------------------------------------------


@demand(
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
)
def _scatter(x: TensorSpec, dim: int, index: TensorSpec, source: Any, *args: Any, **kwargs: Any) -> None:
    _within(index.shape, x.shape, dim)
    if type(source) is TensorSpec:
        _within(index.shape, source.shape, None)


def _within(index: Shape, shape: Shape, dim: int | None) -> None:
    """No dimension of the positions is larger, but for `dim`."""
    if shape and index and 0 not in [n for n in index if type(n) is int]:
        dim = None if dim is None else dim % len(shape)
        require(
            len(index) == len(shape) and all(m <= n for d, (m, n) in enumerate(zip(index, shape)) if d != dim)
        )


@demand(aten.index_add.default, aten.index_copy.default, aten.index_reduce.default)
def _index_add(
    x: TensorSpec, dim: int, index: TensorSpec, source: TensorSpec, *args: Any, **kwargs: Any
) -> None:
    if x.shape and source.shape:
        dim %= len(x.shape)
        count = index.shape[0] if index.shape else 1
        _equal(source.shape, (*x.shape[:dim], count, *x.shape[dim + 1 :]))


@demand(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(x: TensorSpec, indices: Sequence[TensorSpec | None], values: TensorSpec, *args: Any) -> None:
    masks, at = 0, 0
    for index in indices:
        rank = 1
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            rank, masks = len(index.shape), masks + 1
            _equal(index.shape, x.shape[at : at + rank])
        at += rank
    if not masks:
        _fits(values.shape, symbolic_rules[aten.index.Tensor](x, indices))


# Writes of a part -------------------------------------------------------------------------------------------
# Layers -----------------------------------------------------------------------------------------------------
@demand(aten.convolution.default)
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
) -> None:
    rank = len(weight.shape) - 2
    require(x.shape[-rank - 1] == (weight.shape[0] if transposed else weight.shape[1] * groups))
    require(weight.shape[0] % groups == 0)
    _channels(weight.shape[1] * groups if transposed else weight.shape[0], bias)
    if not transposed:
        padding, dilation = ([*v] * rank if len(v) == 1 else [*v] for v in (padding, dilation))
        for n, k, p, d in zip(x.shape[-rank:], weight.shape[2:], padding, dilation):
            require(n + 2 * p >= d * (k - 1) + 1)


@demand(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def _grid_sampler(x: TensorSpec, grid: TensorSpec, *how: Any) -> None:
    _equal((x.shape[0], len(x.shape) - 2), (grid.shape[0], grid.shape[-1]))
    require(all(n > 0 for n in x.shape[2:]))


@demand(aten.native_layer_norm.default)
def _layer_norm(x: TensorSpec, shape: Sequence[Any], *parameters: Any) -> None:
    for one in parameters[:2]:
        if type(one) is TensorSpec:
            _equal(one.shape, shape)


def _attends(q: TensorSpec, k: TensorSpec, attn_mask: Any) -> None:
    require(q.shape[-1] == k.shape[-1])
    if type(attn_mask) is TensorSpec:
        _fits(attn_mask.shape, (*q.shape[:3], k.shape[2]))


@demand(aten.as_strided.default)
def _as_strided(x: TensorSpec, size: Sequence[Any], stride: Sequence[Any], offset: Any = None) -> None:
    """Within the memory that the tensor shows; what goes beyond it is for these sizes alone."""
    last = (x.offset if offset is None else offset) + sum([(n - 1) * step for n, step in zip(size, stride)])
    end = x.offset + sum([(n - 1) * step for n, step in zip(x.shape, x.stride)])
    if hint(last) <= hint(end):
        require(last <= end)
    else:
        _numbers(x, *[n for n in (*size, *stride) if type(n) is Size])


# What no shape function of PyTorch's asks -------------------------------------------------------------------
@demand(
    aten.as_strided_scatter.default,
    aten.lu_unpack.default,
    aten.linalg_lu_solve.default,
    aten.ormqr.default,
    aten.fractional_max_pool2d.default,
    aten.fractional_max_pool3d.default,
    aten.multilabel_margin_loss_forward.default,
    aten.segment_reduce.default,
)
def _numbers(*args: Any, **kwargs: Any) -> None:
    """Sizes become numbers."""
    for one in args:
        for n in (*one.shape, *one.stride) if type(one) is TensorSpec else [one] if type(one) is Size else ():
            int(n)


register_all(
    demand,
    (
        ((aten.gather.default,), lambda x, dim, index, **kwargs: _within(index.shape, x.shape, dim)),
        (
            (aten.pixel_unshuffle.default,),
            lambda x, n: _equal((x.shape[-2] % n, x.shape[-1] % n), (0, 0)),
        ),
        ((aten.channel_shuffle.default,), lambda x, groups: _equal((x.shape[1] % groups,), (0,))),
        (
            (aten.im2col.default,),
            lambda *args: require(all(n >= 1 for n in symbolic_rules[aten.im2col.default](*args))),
        ),
        (
            (aten.col2im.default,),
            lambda x, size, *args: _equal(
                symbolic_rules[aten.im2col.default](
                    replace(x, shape=(*symbolic_rules[aten.col2im.default](x, size, *args),)), *args
                ),
                x.shape,
            ),
        ),
        ((aten.masked_scatter.default,), lambda x, mask, source: broadcast([x.shape, mask.shape])),
        (
            (aten.diagonal_scatter.default,),
            lambda x, source, *args: _equal(
                source.shape, symbolic_rules[aten.diagonal.default](x, *args).shape
            ),
        ),
        (
            (aten.slice_scatter.default,),
            lambda x, source, *args: _equal(source.shape, symbolic_rules[aten.slice.Tensor](x, *args).shape),
        ),
        (
            (aten.select_scatter.default,),
            lambda x, source, dim, index: _equal(
                source.shape, symbolic_rules[aten.select.int](x, dim, index).shape
            ),
        ),
        (
            (aten.native_group_norm.default,),
            lambda x, weight, bias, n, c, area, groups, eps: _channels(c, weight, bias),
        ),
        (
            (
                aten.native_batch_norm.default,
                aten._native_batch_norm_legit_functional.default,
                aten._batch_norm_no_update.default,
                aten._native_batch_norm_legit_no_training.default,
                aten.cudnn_batch_norm.default,
            ),
            lambda x, weight, bias, mean, var, *args: _channels(x.shape[1], weight, bias, mean, var),
        ),
        (
            (aten._native_batch_norm_legit.no_stats,),
            lambda x, weight, bias, *args: _channels(x.shape[1], weight, bias),
        ),
        (
            (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default),
            lambda grad, output, *args: _equal(grad.shape, output.shape),
        ),
        (
            (aten._scaled_dot_product_flash_attention_for_cpu.default,),
            lambda q, k, v, *args, attn_mask=None, **kwargs: _attends(q, k, attn_mask),
        ),
        (
            (
                aten._scaled_dot_product_efficient_attention.default,
                aten._scaled_dot_product_cudnn_attention.default,
            ),
            lambda q, k, v, bias, *args, **kwargs: _attends(q, k, bias),
        ),
        (
            (aten._scaled_dot_product_flash_attention.default,),
            lambda q, k, v, *args, **kwargs: _attends(q, k, None),
        ),
        (
            (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default),
            lambda x, target, weight, *args: _channels(
                x.shape[0] if len(x.shape) == 1 else x.shape[1], weight
            ),
        ),
        (
            (aten.normal.Tensor_Tensor,),
            lambda mean, deviation, **kwargs: broadcast([mean.shape, deviation.shape]),
        ),
    ),
)
