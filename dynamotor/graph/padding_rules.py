"""What ops make of padding: one function an op (or several) that masks what the op would see of it.

A rule takes a `Call` and gives the new node, and the axes of its result. See `bucket_padding.py`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..base.config import config
from ..base.registry import register_all
from .bucket_padding import (
    Axes,
    Call,
    CannotPad,
    Run,
    axis_of,
    broadcast,
    is_padded,
    regrouped,
    rule,
    settle,
)
from .nodes import operand, overload
from .size_nodes import is_size
from .sizes import Size
from .symbolic_rules import symbolic_rules

aten = torch.ops.aten


def _dims(dims: Any, n: int) -> list[int]:
    every = range(n) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    return [d % n for d in every] if n else []


_OF_TENSORS = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor
    for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")
}


@rule("pointwise")
def _pointwise(call: Call) -> tuple[fx.Node, Any]:
    writer, target = call.writer, call.node.target
    tensors = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, fx.Node)]
    axes = broadcast([writer.axes[a] for a in tensors])
    if call.symbolic:
        target = _OF_TENSORS.get(target, target)
        spec = tensors[0].meta["val"] if tensors else None
        CannotPad.when(
            target not in _OF_TENSORS.values()
            or not spec
            or not (spec.shape or spec.dtype.is_floating_point),
            f"{target} of a size",
        )
        for place in call.symbolic:
            size = settle(operand(call.node, place).meta["val"])
            if type(size) is Size:
                call.args[place] = writer.actual(Run(size))
    CannotPad.when(
        sum(is_size(a) for a in call.node.all_input_nodes) > len({call.node.args[i] for i in call.symbolic}),
        f"{target} of a size",
    )
    return call.emit(axes, target)


@rule(
    aten.clone.default,
    aten._to_copy.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
)
def _copy(call: Call) -> tuple[fx.Node, Any]:
    return call.emit(call.axes(0))


@rule(aten.copy.default)
def _written(call: Call) -> tuple[fx.Node, Any]:
    CannotPad.when(
        broadcast([call.axes(0), call.axes(1)]) != call.axes(0), "a write of what is padded elsewhere"
    )
    return call.emit(call.axes(0))


@rule(operator.getitem)
def _getitem(call: Call) -> tuple[fx.Node, Any]:
    several, place = call.args
    if isinstance(several, tuple):  # a rule gave one node for each result
        return several[place], call.writer.axes[several[place]]
    return call.emit(call.axes(0)[place])


@rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _view(call: Call) -> tuple[fx.Node, Any]:
    axes = regrouped(call.axes(0), call.shape)
    call.args = [call.args[0], list(call.writer.number(tuple(call.shape)))]
    return call.emit(axes, aten.reshape.default)


@rule(aten.permute.default, aten.transpose.int, aten.t.default, aten.squeeze.dim, aten.squeeze.dims)
def _rearranged(call: Call) -> tuple[fx.Node, Any]:
    """Some of the dimensions in another order: strides say which."""
    axes, spec = call.axes(0), operand(call.node, 0).meta["val"]
    named = replace(spec, stride=tuple(range(len(axes))))
    seen = symbolic_rules[overload(call.node)](named, *call.args[1:])
    return call.emit(tuple([axes[d] for d in seen.stride]))


@rule(aten.unsqueeze.default)
def _unsqueeze(call: Call) -> tuple[fx.Node, Any]:
    axes, d = list(call.axes(0)), call.args[1]
    axes.insert(d if d >= 0 else d + len(axes) + 1, ())
    return call.emit(tuple(axes))


@rule(aten.expand.default)
def _expand(call: Call) -> tuple[fx.Node, Any]:
    axes, shape = call.axes(0), call.shape
    new = len(shape) - len(axes)
    found = [axes[d - new] if d >= new and axes[d - new] else axis_of(n) for d, n in enumerate(shape)]
    call.args = [call.args[0], list(call.writer.number(tuple(shape)))]
    return call.emit(tuple(found))


def _untouched(call: Call, place: int, *dims: int) -> None:
    axes = call.axes(place)
    CannotPad.when(is_padded(*[axes[d] for d in dims]), f"{call.node.target} along a padded dimension")


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.chunk.default)
def _split(call: Call) -> tuple[fx.Node, Any]:
    axes = call.axes(0)
    unbind = call.node.target is aten.unbind.int
    place = 1 if unbind else 2
    d = (call.args[place] if len(call.args) > place else call.kwargs.get("dim", 0)) % len(axes)
    _untouched(call, 0, d)
    return call.emit(
        tuple(
            [
                axes[:d] + axes[d + 1 :] if unbind else (*axes[:d], axis_of(spec.shape[d]), *axes[d + 1 :])
                for spec in call.node.meta["val"]
            ]
        )
    )


@rule(
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)
def _filled(call: Call) -> tuple[fx.Node, Any]:
    name = overload(call.node)._schema.name
    fill = {"aten::full": 1, "aten::full_like": 1, "aten::new_full": 2}.get(name)
    CannotPad.when(fill in call.symbolic, f"{call.node.target} of a size")
    return call.emit(call.axes(0)) if name.endswith("_like") else call.emit(tuple(map(axis_of, call.shape)))


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(call: Call) -> tuple[fx.Node, Any]:
    CannotPad.when(
        call.node.target is not aten.arange.default and 0 in call.symbolic or 2 in call.symbolic,
        "a range that begins at a size",
    )
    size = settle(call.shape[0])
    return call.emit(((Run(size),) if type(size) is Size else axis_of(size),))


# Products
def _contract(call: Call, a: int, b: int, batch: int) -> Axes:
    """Axes of the product of two arguments; what both are summed over is masked."""
    left, right = call.axes(a), call.axes(b)
    CannotPad.when(left[-1] != right[-2], "a product whose padding lies elsewhere")
    outer = broadcast([left[:batch], right[:batch]])
    if is_padded(left[-1]):
        call.mask(a, [len(left) - 1])
        call.mask(b, [len(right) - 2])
    return (*outer, left[-2], right[-1])


register_all(
    rule,
    (
        ((aten.mm.default,), lambda call: call.emit(_contract(call, 0, 1, 0))),
        ((aten.bmm.default,), lambda call: call.emit(_contract(call, 0, 1, 1))),
    ),
)


@rule(aten.addmm.default, aten.baddbmm.default)
def _addmm(call: Call) -> tuple[fx.Node, Any]:
    axes = _contract(call, 1, 2, 0 if call.node.target is aten.addmm.default else 1)
    return call.emit(broadcast([call.axes(0), axes]))


# Reductions
def _least(dtype: torch.dtype) -> Any:
    return -math.inf if dtype.is_floating_point else 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _most(dtype: torch.dtype) -> Any:
    return math.inf if dtype.is_floating_point else 1 if dtype is torch.bool else torch.iinfo(dtype).max


def _reduced(axes: Axes, dims: Sequence[int], keep: bool) -> Axes:
    return tuple([() if d in dims else a for d, a in enumerate(axes) if keep or d not in dims])


def _reduction(
    fill: Callable[[torch.dtype], Any], call: Call, *, single: bool = False, both: bool = False
) -> tuple[fx.Node, Any]:
    """fill: what changes nothing. single: the result is a place in a dimension. both: values and places."""
    axes = call.axes(0)
    args = {a.name: v for a, v in zip(overload(call.node)._schema.arguments, call.args)} | call.kwargs
    dims = _dims(args.get("dim"), len(axes))
    if single or both:
        flat = args.get("dim") is None
        CannotPad.when(
            any(len(axes[d]) > 1 and is_padded(axes[d]) for d in dims) or flat and is_padded(*axes),
            f"{call.node.target} over merged dimensions",
        )
    call.mask(0, dims, fill(call.args[0].meta["val"].dtype))
    found = _reduced(axes, dims, bool(args.get("keepdim", False)))
    return call.emit((found, found) if both else found)


register_all(
    rule,
    (
        (
            (aten.sum.default, aten.sum.dim_IntList, aten.nansum.default),
            functools.partial(_reduction, lambda dtype: 0),
        ),
        ((aten.prod.default, aten.prod.dim_int), functools.partial(_reduction, lambda dtype: 1)),
        ((aten.any.default, aten.any.dim, aten.any.dims), functools.partial(_reduction, lambda dtype: 0)),
        ((aten.all.default, aten.all.dim, aten.all.dims), functools.partial(_reduction, lambda dtype: 1)),
        ((aten.amax.default, aten.max.default), functools.partial(_reduction, _least)),
        ((aten.amin.default, aten.min.default), functools.partial(_reduction, _most)),
        ((aten.argmax.default,), functools.partial(_reduction, _least, single=True)),
        ((aten.argmin.default,), functools.partial(_reduction, _most, single=True)),
        ((aten.max.dim,), functools.partial(_reduction, _least, both=True)),
        ((aten.min.dim,), functools.partial(_reduction, _most, both=True)),
    ),
)


@rule(aten.mean.default, aten.mean.dim)
def _mean(call: Call) -> tuple[fx.Node, Any]:
    """A sum, divided by how many elements are meant."""
    axes, dtype, named, writer = call.axes(0), call.node.meta["val"].dtype, call.named, call.writer
    keep, dims = bool(named.get("keepdim")), _dims(named.get("dim"), len(axes))
    found = _reduced(axes, dims, keep)
    reduced = [axes[d] for d in dims]
    if not is_padded(*reduced):
        return call.emit(found)
    call.mask(0, dims)
    wide = torch.float64 if dtype is torch.float64 else torch.float32  # sums of halves may overflow
    total = writer.op(aten.sum.dim_IntList, call.args[0], dims, keep, dtype=wide)
    mean = writer.op(aten.div.Tensor, total, writer.divisor(reduced, wide))
    call.args, call.kwargs = [mean], {"dtype": dtype}
    return call.emit(found, aten._to_copy.default)


@rule(aten.logsumexp.default)
def _logarithm_of_sum(call: Call) -> tuple[fx.Node, Any]:
    CannotPad.when(
        not call.args[0].meta["val"].dtype.is_floating_point,
        "logsumexp of integers, none of which is nothing",
    )
    return _reduction(_least, call)


@rule(aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim)
def _norm(call: Call) -> tuple[fx.Node, Any]:
    order = call.args[1] if len(call.args) > 1 else call.kwargs.get("ord", call.kwargs.get("p", 2))
    CannotPad.when(order is not None and order <= 0, "a norm that zeros are no part of")
    return _reduction(lambda dtype: 0, call)


def _alike(call: Call, a: int, b: int) -> None:
    """Two arguments are of one type with the digits to sum in it, and of one shape."""
    types = {call.args[place].meta["val"].dtype for place in (a, b)}
    CannotPad.when(
        call.axes(a) != call.axes(b) or not types < {torch.float32, torch.float64},
        f"{call.node.target} of tensors that differ, or of halves",
    )


@rule(aten.mse_loss.default)
def _squares(call: Call) -> tuple[fx.Node, Any]:
    axes, writer = call.axes(0), call.writer
    reduction = call.args[2] if len(call.args) > 2 else call.kwargs.get("reduction", 1)
    _alike(call, 0, 1)
    if reduction == 0:
        return call.emit(axes)
    for place in (0, 1):
        call.mask(place, range(len(axes)))
    call.args, call.kwargs = [*call.args[:2], 2], {}
    if reduction == 2:
        return call.emit(())
    total = writer.op(aten.mse_loss.default, *call.args)
    call.args = [total, writer.divisor(axes, total.meta["val"].dtype)]
    return call.emit((), aten.div.Tensor)


@rule(aten.mse_loss_backward.default)
def _squares_backward(call: Call) -> tuple[fx.Node, Any]:
    axes, writer = call.axes(1), call.writer
    _alike(call, 1, 2)
    if call.args[3] != 1:
        return call.emit(axes)
    call.args[3] = 2
    call.args = [writer.op(aten.mse_loss_backward.default, *call.args), writer.count(axes)]
    return call.emit(axes, aten.div.Tensor)


@rule(aten.sort.default, aten.sort.stable, aten.topk.default)
def _sort(call: Call) -> tuple[fx.Node, Any]:
    axes, named = list(call.axes(0)), call.named
    d = named["dim"] % len(axes) if axes else 0
    _untouched(call, 0, *range(len(axes))[d : d + 1])
    if call.node.target is aten.topk.default and axes:
        axes[d] = axis_of(call.node.meta["val"][0].shape[d])
    return call.emit((tuple(axes), tuple(axes)))


@rule(aten.native_dropout.default)
def _dropout(call: Call) -> tuple[fx.Node, Any]:
    """Each element by itself; another shape draws other numbers."""
    CannotPad.when(config.fallback_random, "random numbers that are to be those of each size")
    return call.emit((call.axes(0), call.axes(0)))


@rule(aten.cumsum.default, aten.cumprod.default)
def _scan(call: Call) -> tuple[fx.Node, Any]:
    """What comes before the padding knows nothing of it."""
    axes = call.axes(0)
    CannotPad.when(
        len(axes[call.args[1]]) > 1 and is_padded(axes[call.args[1]]),
        f"{call.node.target} over merged dimensions",
    )
    return call.emit(axes)


@rule(aten.tril.default, aten.triu.default)
def _triangle(call: Call) -> tuple[fx.Node, Any]:
    axes = call.axes(0)
    CannotPad.when(
        any(len(axis) > 1 and is_padded(axis) for axis in axes[-2:]),
        f"{call.node.target} over merged dimensions",
    )
    return call.emit(axes)


@rule(aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default)
def _softmax(call: Call) -> tuple[fx.Node, Any]:
    axes, d = call.axes(0), call.args[1] % len(call.axes(0))
    call.mask(0, [d], -math.inf)
    return call.emit(axes)


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(call: Call) -> tuple[fx.Node, Any]:
    axes = broadcast([call.axes(0), call.axes(1)])
    for place in (0, 1):
        call.mask(place, [call.args[2] % len(axes)])
    return call.emit(axes)


@rule(aten.native_layer_norm.default)
def _layer_norm(call: Call) -> tuple[fx.Node, Any]:
    axes, n = call.axes(0), len(call.args[1])
    _untouched(call, 0, *range(len(axes) - n, len(axes)))
    rows = axes[: len(axes) - n] + ((),) * n
    return call.emit((axes, rows, rows))


@rule(aten.native_layer_norm_backward.default)
def _layer_norm_backward(call: Call) -> tuple[fx.Node, Any]:
    axes, n = broadcast([call.axes(0), call.axes(1)]), len(call.args[2])
    _untouched(call, 1, *range(len(axes) - n, len(axes)))
    for place in (0, 1, 3, 4):
        call.mask(place, range(len(axes) - n))
    own = axes[len(axes) - n :]
    wanted = zip((axes, own, own), call.args[7], strict=True)
    return call.emit(tuple([found if want else () for found, want in wanted]))


@rule(aten.embedding.default)
def _embedding(call: Call) -> tuple[fx.Node, Any]:
    weight, places = call.axes(0), call.axes(1)
    _untouched(call, 0, 0, 1)
    call.mask(1, range(len(places)))
    return call.emit((*places, weight[1]))


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(call: Call) -> tuple[fx.Node, Any]:
    places = call.axes(1)
    call.mask(0, range(len(places)))
    call.mask(1, range(len(places)))
    return call.emit(tuple(map(axis_of, call.shape)))


@rule(aten.nll_loss_forward.default)
def _nll_loss(call: Call) -> tuple[fx.Node, Any]:
    """Rows of padding are such as the loss ignores."""
    axes = call.axes(0)
    _untouched(call, 0, len(axes) - 1)
    call.mask(0, range(len(axes)))
    call.mask(1, [0], call.args[4])
    return call.emit((axes[:1] if call.args[3] == 0 else (), ()))


@rule(aten.nll_loss_backward.default)
def _nll_loss_backward(call: Call) -> tuple[fx.Node, Any]:
    axes = call.axes(1)
    _untouched(call, 1, len(axes) - 1)
    call.mask(1, range(len(axes)))
    call.mask(2, [0], call.args[5])
    if call.axes(0):
        call.mask(0, [0])
    return call.emit(axes)


# Attention
@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(call: Call) -> tuple[fx.Node, Any]:
    q, k, v = (call.axes(i) for i in range(3))
    _no_dropout(call, 3)
    lead = broadcast([q[:2], k[:2], v[:2]])
    _mask_keys(call, (1, 2), q, k, 4)
    return call.emit(((*lead, q[2], v[3]), (*lead, q[2])))


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_backward(call: Call) -> tuple[fx.Node, Any]:
    q, k, v = (call.axes(i) for i in (1, 2, 3))
    _no_dropout(call, 6)
    for place in (0, 1, 4, 5):  # rows of padding give no gradient
        call.mask(place, [2])
    _mask_keys(call, (2, 3), q, k, 7)
    return call.emit((q, k, v))


def _no_dropout(call: Call, place: int) -> None:
    dropout = call.args[place] if len(call.args) > place else call.kwargs.get("dropout_p", 0.0)
    CannotPad.when(dropout, "attention with dropout")


def _mask_keys(call: Call, places: tuple[int, int], q: Axes, k: Axes, causal: int) -> None:
    """No query attends padding: where each sees only what lies before it, that is so."""
    for place in places:
        call.mask(place, [2])
    axis = k[2]
    is_causal = call.args[causal] if len(call.args) > causal else call.kwargs.get("is_causal", False)
    if not is_padded(axis) or is_causal and q[2] == axis:
        return
    CannotPad.when(is_causal, "causal attention to other positions")
    writer, dtype = call.writer, call.args[places[0]].meta["val"].dtype
    rows, keys = (call.args[place].meta["val"].shape[2] for place in (places[0] - 1, places[0]))
    given = call.kwargs.get("attn_mask")
    if given is None:
        given = writer.full([1, 1, rows, keys], 0.0, dtype)
    least = writer.full([], -math.inf, dtype)
    found = writer.op(aten.where.self, writer.along(writer.valid(axis), 3, 4), given, least)
    call.kwargs["attn_mask"] = call.keep(found, ())
