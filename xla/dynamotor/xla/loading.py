"""`torch.load(path, map_location="xla")`: PyTorch makes each tensor as a part of a storage on the device.
Here that is a CPU storage which says "xla" and is uploaded once, so that tensors that share memory in the
file share it on the device.

>>> torch.load("model.pt", map_location="xla")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dynamotor.extension_api import TensorSpec, is_dense

from . import compat
from .device import lane_of
from .dispatch import specials
from .errors import require
from .storage import strided_view
from .tensor import XLATensor, aten, is_xla


class _Storage(torch.UntypedStorage):
    """Its bytes are on the CPU; `first` is the tensor that holds them on the device."""

    place: torch.device
    first: XLATensor | None
    device = property(lambda self: self.place)


def _restore(storage: Any, location: str) -> Any:
    if not location.startswith("xla"):
        return None
    storage.__class__ = _Storage
    storage.place, storage.first = lane_of(location).device, None
    return storage


torch.serialization.register_package(30, lambda storage: None, _restore)
_set_metadata = compat.tensor_metadata_setter.get()


def _set_lazy_bits(tensor: torch.Tensor, metadata: dict[str, bool]) -> None:
    """Conjugates and negatives are views here, PyTorch would set a bit that is never read."""
    if not is_xla(tensor):
        return _set_metadata(tensor, metadata)
    for bit, view in (("conj", torch.conj), ("neg", torch._neg_view)):
        if metadata.get(bit):
            tensor.data = view(tensor)


compat.tensor_metadata_setter.set(_set_lazy_bits)


@specials.register(
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.default,
    aten.set_.source_Tensor_storage_offset,
)
def _set_storage(func: Callable[..., Any], args: tuple, kwargs: Any) -> Any:
    target, source, offset, size, stride = (*args, None, None, None, ())[:5]
    require(
        type(source) is _Storage and size is not None,
        "DM616",
        "XLA tensors have no storage",
        why="their memory layout is opaque",
        cure="use copy_(), or move the tensor to the CPU",
    )
    stride, held = stride or (), source.first  # () is left out
    if held is None or held.dtype is not target.dtype:
        part = torch.empty(0, dtype=target.dtype, device="cpu").set_(source, offset, size, stride)
        count = source.nbytes() // part.itemsize
        if part.numel() != count or not is_dense(TensorSpec.of(part)):
            part.set_(source, 0, [count], [1])
        source.first = held = part.to(source.place)
    same = (held.shape, held.stride(), 0) == (torch.Size(size), tuple(stride), offset)
    target.data = held if same else strided_view(held._alias, size, stride, offset)
    return target
