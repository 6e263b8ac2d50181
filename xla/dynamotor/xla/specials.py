"""Ops that the general rules of dispatch do not describe: copies, reads of data, aliases without an op, batch
norm's hidden writes, results whose length is read at a sync while the data stay on the device.

>>> @specials.register(aten.detach.default)
... def _detach(func, args, kwargs):
...     return wrap(args[0]._alias)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dynamotor.extension_api import TensorSpec, infer_spec, slices_of

from . import dispatch, fallback, layout, transfer
from .checks import check_count, check_solvers
from .compat import OpOverload
from .conversion import mark
from .device import lane_of
from .dispatch import specials, to_nodes
from .dtypes import TORCH_TO_JAX
from .errors import require
from .ir import Node, Refused, record, unpack
from .lowering import aten, decomposition, rows
from .tensor import Alias, XLATensor, check_views, new_root, value, wrap, wrap_view, write

rows(
    specials.register,
    {
        (
            aten.alias.default,
            aten.detach.default,
            aten.lift_fresh.default,
            aten.lift.default,
            aten._to_dense.default,
        ): lambda func, args, kwargs: wrap_view(args[0]._alias, args[0]),
        aten._linalg_check_errors.default: check_solvers,
        aten._local_scalar_dense.default: lambda func, args, kwargs: transfer.to_cpu(args[0], "item").item(),
        torch.ops.prims.item.default: lambda func, args, kwargs: transfer.to_cpu(args[0], "item").item(),
        aten.is_pinned.default: lambda func, args, kwargs: False,
        aten.nonzero.default: lambda func, args, kwargs: torch.nonzero_static(
            args[0], size=int(torch.count_nonzero(args[0]))
        ),
        aten.record_stream.default: lambda func, args, kwargs: None,
    },
)


@specials.register(aten.clone.default)
def _clone(func: Callable[..., Any], args: tuple, kwargs: Any) -> XLATensor:
    """Values never change: a copy is another root with the same value."""
    alias = args[0]._alias
    return wrap(new_root(value(alias), _copied(alias, (kwargs or {}).get("memory_format"))))


def _copied(alias: Alias, memory_format: torch.memory_format | None) -> layout.Stride:
    """The strides of a copy."""
    if memory_format is None or memory_format is torch.preserve_format:
        return layout.preserved(alias)
    asked = {"memory_format": memory_format}
    return layout.short(infer_spec(aten.clone.default, (layout.spec_of(alias),), asked))


@specials.register(aten._to_copy.default)
def _to_copy(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> torch.Tensor:
    kwargs = kwargs or {}
    source, device = args[0], kwargs.get("device")
    dtype = kwargs.get("dtype") or source.dtype
    if type(source) is not XLATensor:
        return to_device(source, dtype, device, kwargs.get("memory_format"))
    if device is None or (torch.device(device).type == "xla" and lane_of(device) is source._alias.lane):
        return wrap(
            new_root(cast(value(source._alias), dtype), _copied(source._alias, kwargs.get("memory_format")))
        )
    host = transfer.to_cpu(source)
    if torch.device(device).type == "xla":
        return to_device(host, dtype, device, kwargs.get("memory_format"))
    return mark(source, aten._to_copy.default(host, **{**kwargs, "dtype": dtype}))


def to_device(source: torch.Tensor, dtype: torch.dtype, device: Any, memory_format: Any = None) -> XLATensor:
    """A CPU tensor as a new xla tensor."""
    require(
        not torch.nn.parameter.is_lazy(source),
        "DM609",
        "XLA has no tensors without a shape",
        why="a lazy module's parameters get theirs at its first call",
        cure="call the module once on the CPU, then move it",
    )
    lane = lane_of(device)
    source = source.to("cpu", dtype, memory_format=memory_format or torch.preserve_format)
    return wrap(new_root(transfer.from_cpu(source, lane), layout.of_tensor(source)))


def cast(node: Node, dtype: torch.dtype) -> Node:
    """A node as a dtype. XlaError DM609 for a dtype that XLA has not."""
    require(dtype in TORCH_TO_JAX, "DM609", f"XLA has no type for {dtype}", cure="use another dtype")
    return node if node.meta.dtype is dtype else record(aten._to_copy.default, (node,), {"dtype": dtype})


@specials.register(aten.copy_.default)
def _copy_(func: Callable[..., Any], args: tuple, kwargs: Any) -> torch.Tensor:
    target, source = args[:2]
    if type(target) is not XLATensor:
        return target.copy_(transfer.to_cpu(source).to(target.dtype))
    lane = target._alias.lane
    if type(source) is not XLATensor or source._alias.lane is not lane:
        host = transfer.to_cpu(source)
        node = transfer.from_cpu(host.to(target.dtype), lane)
    else:
        node = value(source._alias)
    if node.meta.shape != target.shape:
        torch.empty(node.meta.shape, device="meta").expand(target.shape)  # raises aten's error
    write(target._alias, node)
    check_views(target._alias, args)
    return target


specials.register(aten._copy_from.default)(lambda func, args, kwargs: _copy_(func, (args[1], args[0]), None))


@specials.register(aten.copy.default)
def _copy(func: Callable[..., Any], args: tuple, kwargs: Any) -> XLATensor:
    target, source = args[:2]
    result = wrap(new_root(value(target._alias), layout.preserved(target._alias)))
    _copy_(aten.copy_.default, (result, source), None)
    return result


@specials.register(aten.equal.default)
def _equal(func: Callable[..., Any], args: tuple, kwargs: Any) -> bool:
    one, other = args
    return False if one.shape != other.shape else bool(torch.all(torch.eq(one, other)).item())


@specials.register(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
def _views_at_once(func: Callable[..., Any], args: tuple, kwargs: Any) -> list[XLATensor]:
    source, *given = args
    steps = _steps(func, source.shape, *[tuple(arg) if type(arg) is list else arg for arg in given])
    return [dispatch.view(one, (source, *where), None) for one, where in steps]


@functools.lru_cache(maxsize=4096)
def _steps(func: OpOverload, shape: torch.Size, *given: Any) -> list[tuple[Any, tuple]]:
    """The views that an op makes at once. Which there are says the op itself, which refuses invalid ones."""
    whole = torch.empty(shape, device="meta")
    parts = tuple([TensorSpec.of(part) for part in func(whole, *given)])
    return slices_of(func, TensorSpec.of(whole), given, {}, parts)


@specials.register(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def _batch_norm(func: OpOverload, args: tuple, kwargs: dict[str, Any] | None) -> tuple:
    """The schema of native_batch_norm hides that training writes the running statistics: the functional op
    returns them.
    """
    bound = bind(func, args, kwargs)
    mean, variance = bound["running_mean"], bound["running_var"]
    inputs = [
        bound[name]
        for name in ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    ]
    if mean is None or variance is None:
        return aten._native_batch_norm_legit.no_stats(*inputs[:3], *inputs[5:])
    if not bound["training"]:
        inputs.pop(5)
        out = aten._native_batch_norm_legit_no_training.default(*inputs)[0]
        nothing = torch.empty(0, dtype=mean.dtype, device=out.device)
        return out, nothing, nothing.clone()
    try:
        return _normalised(inputs, mean, variance)
    except Refused as refused:
        return fallback.run_on_cpu(aten._native_batch_norm_legit.default, tuple(inputs), None, str(refused))


def _normalised(inputs: list[Any], mean: XLATensor, variance: XLATensor) -> tuple:
    """Batch norm in training: (output, saved mean, saved 1/deviation); the running statistics are written."""
    func = aten._native_batch_norm_legit_functional.default
    node = record(func, to_nodes(inputs))
    strides = layout.of_result(func, node.instruction, tuple(inputs), None) or [None] * 3
    items: list[Any] = unpack(node)
    for statistic, new in zip((mean, variance), items[3:]):
        write(statistic._alias, new)
    return tuple([wrap(new_root(item, stride)) for item, stride in zip(items[:3], strides)])


@specials.register(aten._batch_norm_with_update.default)
def _batch_norm_with_update(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> tuple:
    bound = bind(func, args, kwargs)
    inputs = [bound[name] for name in ("input", "weight", "bias", "running_mean", "running_var")]
    reserve = torch.empty(0, dtype=torch.uint8, device=args[0].device)
    return *_normalised([*inputs, True, bound["momentum"], bound["eps"]], inputs[3], inputs[4]), reserve


def bind(func: Any, args: tuple, kwargs: dict[str, Any] | None) -> dict[str, Any]:
    names = [a.name for a in func._schema.arguments]
    return {
        **dict.fromkeys(names),  # in the schema's order
        **{a.name: a.default_value for a in func._schema.arguments if a.has_default_value()},
        **dict(zip(names, args)),
        **(kwargs or {}),
    }


@specials.register(aten.index.Tensor, aten.index_put.default)
def _index(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> XLATensor:
    indices = _on_lane_of(args[0], args[1])
    if func is aten.index.Tensor:
        indices = _without_masks(args[0], indices)
    else:
        _check_count(args[0], indices, args[2])
    return dispatch.plain(func, (args[0], indices, *args[2:]), kwargs)


def _without_masks(x: torch.Tensor, indices: list[Any]) -> list[Any]:
    """A mask as the positions that it picks, whose number is known at a sync."""
    found: list[Any] = []
    for i in indices:
        torch._check_index(
            i is None or i.dtype in (torch.int64, torch.int32, torch.uint8, torch.bool),
            lambda: "tensors used as indices must be long, int, byte or bool tensors",
        )
        if i is None or i.dtype not in (torch.bool, torch.uint8) or not i.dim():
            found.append(i)
        elif i.shape != x.shape[len(found) : len(found) + i.dim()]:
            raise IndexError(
                f"The shape of the mask {list(i.shape)} does not match the shape of the tensor "
                f"{list(x.shape)}"
            )
        else:
            found += i.nonzero().unbind(1)
    return found


@specials.register(aten.index_put_.default, aten._index_put_impl_.default)
def _index_put_(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> XLATensor:
    dispatch.functionals[id(func)] = (
        aten.index_put.default if func is aten.index_put_.default else aten._index_put_impl.default
    )
    indices = _on_lane_of(args[0], args[1])
    _check_count(args[0], indices, args[2])
    return dispatch.in_place(func, (args[0], indices, *args[2:]), kwargs)


def _check_count(x: torch.Tensor, indices: list[Any], values: torch.Tensor) -> None:
    """Whether a mask picks as many elements as there are values is known at the barrier."""
    lead, *others = [at for at, i in enumerate(indices) if i is not None]
    mask = indices[lead]
    if others or mask.dtype not in (torch.bool, torch.uint8):
        return
    trailing = x.dim() - lead - mask.dim()
    if values.dim() > trailing and (count := values.shape[-1 - trailing]) != 1:
        check_count(mask, count)


def _on_lane_of(tensor: torch.Tensor, indices: list[Any]) -> list[Any]:
    """Indices may be on the CPU, as for every other device."""
    return [
        to_device(i, i.dtype, tensor.device) if isinstance(i, torch.Tensor) and i.device.type == "cpu" else i
        for i in indices
    ]


@specials.register(aten.set_.source_Tensor)
def _set_(func: Callable[..., Any], args: tuple, kwargs: Any) -> XLATensor:
    args[0].data = args[1]
    return args[0]


@specials.register(aten._pack_padded_sequence.default)
def _pack_padded_sequence(
    func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None
) -> tuple[XLATensor, torch.Tensor]:
    """Rows of the sequences that are long enough, step by step; the lengths, and how many go on at each step,
    are CPU tensors.
    """
    rows, lengths, batch_first = bind(func, args, kwargs).values()
    rows = rows.transpose(0, 1) if batch_first else rows
    steps = [int((lengths.cpu() > step).sum()) for step in range(int(lengths[0]))]
    packed: Any = torch.cat([rows[step, :count] for step, count in enumerate(steps)])
    return packed, torch.tensor(steps, dtype=torch.int64, device="cpu")


@specials.register(aten.repeat_interleave.Tensor)
def _repeat_interleave(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> XLATensor:
    """How long the result is must be known: a sync where it is not told."""
    size = (kwargs or {}).get("output_size")
    if size is None:
        repeats = transfer.to_cpu(args[0], "repeat_interleave")
        torch._check(not repeats.numel() or bool(repeats.min() >= 0), lambda: "repeats can not be negative")
        size = int(repeats.sum())
    return dispatch.plain(func, args, {"output_size": size})


@specials.register(aten.t.default)
def _t(func: Callable[..., Any], args: tuple, kwargs: Any) -> XLATensor:
    """A transposed transposed tensor is the original: autograd makes one of each weight's gradient."""
    alias = args[0]._alias
    return wrap_view(alias.parent, args[0]) if alias.func is func else dispatch.view(func, args, kwargs)


_VIEWS_IN_PLACE = {
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.as_strided_.default: aten.as_strided.default,
}


@specials.register(*_VIEWS_IN_PLACE)
def _view_in_place(func: OpOverload, args: tuple, kwargs: dict[str, Any] | None) -> XLATensor:
    """`x.squeeze_()`: the tensor becomes a view of its former self."""
    x = args[0]
    root = x._alias.root or x._alias
    viewed, root.turned = root.viewed, root.turned or root.viewed
    if viewed and (root.version or not x._is_view()):  # autograd counts it as a write of what views show
        check_views(root, args)
    x.data = dispatch.handler_of(_VIEWS_IN_PLACE[func])(_VIEWS_IN_PLACE[func], args, kwargs)
    root.viewed = viewed
    return x


@specials.register(aten.bernoulli_.float)
def _bernoulli_(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> XLATensor:
    """The only in-place op whose argument has a default that its functional twin has not."""
    bound = bind(func, args, kwargs)
    dispatch.functionals[id(func)] = aten.bernoulli.p
    return dispatch.in_place(
        func, (args[0], bound["p"]), {"generator": bound["generator"]} if bound["generator"] else None
    )


# -- results as long as the data say -------------------------------------------------------------------------


@specials.register(aten.masked_select.default)
def _masked_select(func: Callable[..., Any], args: tuple, kwargs: Any) -> torch.Tensor:
    x, mask = torch.broadcast_tensors(*args)
    torch._check(mask.dtype is torch.bool, lambda: "masked_select: expected BoolTensor for mask")
    return aten.take(x, mask.reshape(-1).nonzero()[:, 0])


@specials.register(aten.bincount.default)
def _bincount(func: Callable[..., Any], args: tuple, kwargs: Any) -> torch.Tensor:
    x, weights, shortest = bind(func, args, kwargs).values()
    torch._check(
        x.dim() == 1 and not x.dtype.is_floating_point and (not x.numel() or int(x.min()) >= 0),
        lambda: "bincount only supports 1-d non-negative integral inputs.",
    )
    size = max(int(x.max()) + 1 if x.numel() else 0, shortest)
    each = torch.ones_like(x, dtype=torch.int64) if weights is None else weights
    each = each if each.dtype in (torch.int64, torch.float32) else each.double()
    return torch.zeros(size, dtype=each.dtype, device=x.device).index_add(0, x.long(), each)


@specials.register(aten._unique2.default)
def _unique(func: Callable[..., Any], args: tuple, kwargs: Any) -> tuple[torch.Tensor, ...]:
    """By a sort: sorted, whatever is asked; positions and counts come with it."""
    x = args[0]
    values, order = x.reshape(-1).sort(stable=True)
    places, run, counts = _runs(values)
    return values[places], torch.empty_like(order).scatter(0, order, run).reshape(x.shape), counts


@specials.register(aten.unique_consecutive.default)
def _unique_consecutive(func: Callable[..., Any], args: tuple, kwargs: Any) -> tuple[torch.Tensor, ...]:
    x, inverse, counted, dim = bind(func, args, kwargs).values()
    rows = x.reshape(-1) if dim is None else x.movedim(dim, 0).flatten(1) if x.numel() else x
    places, run, counts = _runs(rows)
    values = rows[places] if dim is None else x.index_select(dim, places)
    run, nothing = run if dim is not None else run.reshape(x.shape), places.new_empty(0)
    return values, run if inverse else nothing, counts if counted else nothing


def _runs(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of runs of equal rows: where each begins, which one a row is in, how long each is."""
    differs = rows[1:] != rows[:-1]
    first = torch.ones_like(rows[:, 0] if rows.dim() > 1 else rows, dtype=torch.bool)
    first[1:] = differs.any(1) if rows.dim() > 1 else differs
    places = first.nonzero()[:, 0]
    return places, first.cumsum(0) - 1, torch.diff(places, append=places.new_full((1,), len(rows)))


@specials.register("torchvision::nms")
def _nms(func: Callable[..., Any], args: tuple, kwargs: Any) -> torch.Tensor:
    """torchvision's: the boxes that are kept, from the highest score down."""
    boxes, scores, overlap = bind(func, args, kwargs).values()
    order = scores.sort(dim=0, descending=True, stable=True).indices
    rank = torch.arange(len(boxes), 0, -1, device=boxes.device).double()
    limits = [torch.tensor(limit, device=boxes.device, dtype=torch.float64) for limit in (0.0, overlap)]
    kept, count = torch.ops.dynamotor_xla.nms(boxes[order], rank, *limits, len(boxes))
    return order[kept[: int(count)]]


@decomposition(aten.histogram.bin_ct)
def _histogram(x, bins, *, range=None, weight=None, density=False):  # noqa: A002 - aten's name
    low, high = (
        (x.new_tensor(end) for end in range) if range else x.aminmax() if x.numel() else x.new_tensor([0, 1])
    )
    low, high = torch.where(low == high, low - 0.5, low), torch.where(low == high, high + 0.5, high)
    return _counted(x, torch.linspace(low, high, bins + 1, dtype=x.dtype), weight=weight, density=density)


@decomposition(aten.histogram.bins_tensor)
def _counted(x, bins, *, weight=None, density=False):
    """(the intervals between edges, the last one included; the edges)."""
    x, each = x.reshape(-1), torch.ones_like(x) if weight is None else weight
    inside = (x >= bins[0]) & (x <= bins[-1])
    place = torch.searchsorted(bins, x, right=True).clamp(1, len(bins) - 1) - 1
    counts = torch.zeros_like(bins[1:]).index_add(0, place, torch.where(inside, each.reshape(-1), 0))
    return counts / (counts.sum() * bins.diff()) if density else counts, bins
