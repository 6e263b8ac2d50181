"""Ops that address a tensor's storage: `as_strided`, `empty_strided`, `resize_`. XLA tensors have none; a
storage is the elements of the root of their views, in the order that its strides give. Ops that make tensors
from nothing reach PyTorch's XLA dispatch key, where one boxed kernel records them.

>>> torch.arange(6, device="xla").view(2, 3).t().as_strided((2,), (2,), 1)
tensor([1, 3], device='xla:0')
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dynamotor.extension_api import CPU, TensorSpec, contiguous_stride, is_dense

from . import compat, layout, metrics, tensor
from .conversion import mark
from .device import lane_of
from .dispatch import make, specials
from .errors import require
from .ir import Lane, Node, lock, record
from .lowering import aten, rows
from .specials import to_device
from .tensor import Alias, Overlap, XLATensor, new_root, node_of, value, wrap, write
from .transfer import to_cpu

# Views whose elements are not those of the viewed tensor: they count in other units.
_OTHER_UNITS = frozenset(
    (
        aten.view.dtype,
        aten.view_as_real.default,
        aten.view_as_complex.default,
        aten._conj.default,
        aten._neg_view.default,
    )
)


def storage_of(alias: Alias) -> Alias:
    """The memory of an alias in storage order: row-major strides count in it. XlaError DM619 where it has
    holes.
    """
    while alias.parent is not None and alias.func not in _OTHER_UNITS:
        alias = alias.parent
    if alias.stride is None:
        return alias
    require(
        is_dense(layout.spec_of(alias)),
        "DM619",
        "this tensor's storage cannot be addressed on the XLA device",
        why="its base has holes between its elements",
        cure="use select, slice or view in the place of as_strided, or clone() the tensor first",
    )
    stride, shape = alias.stride, alias.meta.shape
    order = sorted(range(len(stride)), key=lambda d: (-stride[d], shape[d]))
    node = record(aten.permute.default, (value(alias), order))
    return Alias(node, alias, aten.permute.default, (order,), None, None, alias.offset)


@tensor.write_through.define
def _write_through(alias: Alias, node: Node) -> None:
    """A part of an expanded (or unfolded) tensor is written in its place."""
    spec = layout.spec_of(alias)
    if layout.overlaps_itself(spec):
        raise Overlap(
            "DM611",
            "unsupported operation: more than one element of the written-to tensor refers to a single memory "
            "location",
            why="the tensor was expanded or unfolded, and an in-place operation writes it",
            where=metrics.user_line(),
            cure="clone() the tensor before the operation",
        )
    memory = storage_of(alias)
    place = (list(spec.shape), list(spec.stride), alias.offset - memory.offset)
    write(memory, record(aten.as_strided_scatter.default, (value(memory), node, *place)))


def _length(alias: Alias) -> int:
    """Elements of the storage that an alias is in."""
    memory = storage_of(alias)
    return memory.offset + torch.Size(memory.meta.shape).numel()


rows(
    specials.register,
    {
        aten._has_same_storage_numel.default: lambda func, args, kwargs: (
            _length(args[0]._alias) == _length(args[1]._alias)
        ),
        aten.as_strided.default: lambda func, args, kwargs: strided_view(
            args[0]._alias, *args[1:], **(kwargs or {})
        ),
    },
)


@specials.register(aten._new_zeros_with_same_feature_meta.default)
def _new_zeros_with_same_feature_meta(
    func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None
) -> XLATensor:
    """Zeros with the layout of another tensor, once for each element of the leading batch
    dimensions: the tangents needed where views are differentiated forward."""
    like, alias = args[0], args[1]._alias
    batch = list(like.shape[: (kwargs or {}).get("self_num_batch_dims", 0)])
    whole = [*batch, _length(alias)]
    zeros = make(aten.zeros.default, ([torch.Size(whole).numel()],), {"dtype": like.dtype}, like._alias.lane)
    stride = [*contiguous_stride(whole)[: len(batch)], *layout.spec_of(alias).stride]
    return strided_view(zeros._alias, [*batch, *alias.meta.shape], stride, alias.offset)


def strided_view(alias: Alias, size: Any, stride: Any, storage_offset: int | None = None) -> XLATensor:
    """`as_strided`: a part of the memory of an alias."""
    offset = alias.offset if storage_offset is None else storage_offset
    size, stride = list(size), list(stride)
    memory = storage_of(alias)
    spec = TensorSpec(tuple(size), tuple(stride), alias.meta.dtype, CPU, offset)
    length = _length(memory)
    torch._check(
        not spec.numel or (offset >= memory.offset and offset + spec.extent <= length),
        lambda: (
            f"setStorage: sizes {size}, strides {stride}, storage offset {offset}, and itemsize "
            f"{spec.dtype.itemsize} requiring "
            f"a storage size of {(offset + spec.extent) * spec.dtype.itemsize} are out of bounds for storage "
            "of size "
            f"{length * spec.dtype.itemsize}"
        ),
    )
    own = layout.spec_of(alias, alias.offset)
    inside = is_dense(own) and own.offset <= offset and offset + spec.extent <= own.offset + own.extent
    if alias.root is not None and not inside:
        alias.root.turned = True
    place = (size, stride, offset - memory.offset)
    node = record(aten.as_strided.default, (value(memory), *place))
    return wrap(Alias(node, memory, aten.as_strided.default, place, None, layout.short(spec), offset))


def memory_of(size: Any, stride: Any, options: dict[str, Any], lane: Lane) -> XLATensor:
    """A new tensor with these strides: where they leave holes, or elements share a place, a view of more or
    less memory.
    """
    spec = TensorSpec(tuple(size), tuple(stride), torch.float32)
    if is_dense(spec):
        made = make(aten.empty.memory_format, (list(size),), options, lane)
        return made if layout.short(spec) is None else wrap(new_root(value(made._alias), spec.stride))
    return strided_view(make(aten.empty.memory_format, ([spec.extent],), options, lane)._alias, size, stride)


@specials.register(aten.new_empty_strided.default)
def _new_empty_strided(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> XLATensor:
    given = {name: option for name, option in (kwargs or {}).items() if option is not None}
    return memory_of(args[1], args[2], {"dtype": args[0].dtype, **given}, args[0]._alias.lane)


@specials.register(aten.is_set_to.default)
def _is_set_to(func: Callable[..., Any], args: tuple, kwargs: Any) -> bool:
    """Whether two tensors are the same part of the same memory."""
    parts = [(t._memory_token(), t.shape, t.stride(), t.storage_offset()) for t in args]
    return parts[0] == parts[1]


@specials.register(aten.resize_.default, aten.resize_as_.default)
def _resize_(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> XLATensor:
    """Keeps the first elements of the storage, as aten does; new ones are zero."""
    resized, like = args[0], args[1] if isinstance(args[1], torch.Tensor) else None
    size, order = list(args[1] if like is None else like.shape), (kwargs or {}).get("memory_format")
    if order is torch.preserve_format and like is not None:
        order = compat.suggest_memory_format(like)
    if list(resized.shape) == size and order is None:
        return resized
    require(
        resized._alias.root is None,
        "DM615",
        "a view cannot be resized on the XLA device",
        cure="resize its base, or clone() it first",
    )
    wanted = torch.Size(size).numel()
    flat: Any = wrap(new_root(value(storage_of(resized._alias)))).view(-1)
    flat = (
        flat[:wanted] if wanted <= flat.numel() else torch.nn.functional.pad(flat, (0, wanted - flat.numel()))
    )
    if order is None:
        resized.data = flat.reshape(size).clone()
    else:
        stride = torch.empty(size, device="meta", memory_format=order).stride()
        resized.data = wrap(new_root(node_of(flat.as_strided(size, stride)), stride))
    return resized


# -- tensors made from nothing -------------------------------------------------------------------------------


_library = torch.library.Library("_", "IMPL")
_aten = torch.library.Library("aten", "IMPL")


def _factory(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The kernel of every op whose arguments hold no xla tensor but whose result shall be one."""
    device = kwargs.pop("device", None)
    with lock:
        lane = lane_of(device if device is not None else "xla")
        if func is aten.empty_strided.default:
            return memory_of(args[0], args[1], kwargs, lane)
        return make(func, args, kwargs, lane)


def _to_copy(
    tensor: torch.Tensor, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> torch.Tensor:
    with lock:
        return mark(tensor, to_device(tensor, dtype or tensor.dtype, device))


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    with lock:
        return specials[aten.copy_.default](aten.copy_.default, (target, source), None)


def install() -> None:
    """Register the kernels. `torch.tensor(..., device="xla")` copies, and reads tensors among its numbers,
    with Python dispatch switched off, so these need kernels of their own."""
    _library.fallback(_factory, "XLA")
    # Composed of `empty` and `fill_` it would refuse numbers that the CPU's takes (infinities of halves).
    _aten.impl("scalar_tensor", functools.partial(_factory, aten.scalar_tensor.default), "XLA")
    _aten.impl("_to_copy", _to_copy, "XLA")
    _aten.impl("copy_", _copy_, "XLA")
    _aten.impl("_local_scalar_dense", lambda tensor: to_cpu(tensor, "item").item(), "XLA")
