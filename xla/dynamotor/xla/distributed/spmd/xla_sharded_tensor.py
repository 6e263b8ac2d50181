"""Tensors over a mesh: their parts, their layout in XLA's words and in PyTorch's.

An xla tensor is the whole tensor wherever its parts are, so `XLAShardedTensor` is no wrapper: it is the name
of those xla tensors that were marked or are divided, and each xla tensor has its attributes.

>>> xs.mark_sharding(x, mesh, ("data", None)).sharding_spec
'{devices=[4,1]0,1,2,3}'
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import compat
from ...tensor import XLATensor, is_xla
from ...transfer import data_of
from .device_grid import Mesh
from .marks import (
    Mark,
    Spec,
    UnsupportedLayout,
    layout_of,
    mark,
    mark_of,
    parts_of,
    put,
    require_layout,
    whole_of,
    words,
)

ShardingType = StrEnum("ShardingType", {"REPLICATED": "REPLICATED", "TILED": "TILED", "PARTIAL": "PARTIAL"})


@dataclass
class XLAShard:
    """The part of a tensor on one device, as it was when it was asked for.

    data: a CPU tensor. indices: which part of the whole, a slice for each dimension; `...` for all of it.
    shard_device: where it is. replica_id: which of the devices with this part it is.
    """

    data: torch.Tensor
    indices: Any
    shard_device: str
    replica_id: int = 0

    # There is no padding: a dimension that its devices do not divide stays whole.
    unpadded_data = property(lambda shard: shard.data, lambda shard, t: shard.data.copy_(t))


class _Named(type):
    def __instancecheck__(cls, t: Any) -> bool:
        return is_xla(t) and (
            mark_of(t) is not None or words(layout_of(t), t.dim()) not in ("", "{replicated}")
        )


class XLAShardedTensor(metaclass=_Named):
    """An xla tensor that was marked, or is divided over devices (`isinstance` tells). Its attributes are
    those of every xla tensor; called, it gives the tensor back.

    >>> XLAShardedTensor(x).local_shards[0].indices
    [slice(0, 2, 1), slice(0, 4, 1)]
    """

    def __new__(
        cls,
        elem: Any,
        mesh_shape: Any = None,
        partition_spec: Spec | None = None,
        *,
        requires_grad: bool = False,
    ) -> Any:
        require_layout(is_xla(elem), f"{type(elem).__name__} is not an XLA tensor", 'move it with .to("xla")')
        if partition_spec is not None:
            mesh = (
                mesh_shape if isinstance(mesh_shape, Mesh) else Mesh(range(math.prod(mesh_shape)), mesh_shape)
            )
            mark(elem, mesh, partition_spec)
        return elem.detach().requires_grad_() if requires_grad else elem

    @property
    def global_tensor(self: Any) -> Any:
        """The tensor itself."""
        return self

    @property
    def mesh_shape(self: Any) -> tuple[int, ...] | None:
        """Sizes of the mesh that it was marked with; None where it was not."""
        said = mark_of(self)
        return None if said is None else said.mesh.mesh_shape

    @property
    def partition_spec(self: Any) -> tuple[Any, ...]:
        """The axis or axes of each dimension, None for whole ones: as it was marked, else as XLA has it."""
        said, sharding = mark_of(self), layout_of(self)
        if said is not None:
            return said.partition_spec
        spec = () if sharding is None else tuple(sharding.spec)
        return spec + (None,) * (len(self.shape) - len(spec))

    @property
    def sharding_spec(self: Any) -> str:
        """Its layout in XLA's words: "{devices=[4,1]0,1,2,3}", "{replicated}"; "" where it has none yet."""
        return words(layout_of(self), len(self.shape))

    @property
    def sharding_type(self: Any) -> Any:
        """REPLICATED, TILED or PARTIAL (divided along some axes and repeated along others), as a
        `ShardingType`."""
        sharding, shape = data_of(self).sharding, tuple(self.shape)
        parts = math.prod(a // b for a, b in zip(shape, sharding.shard_shape(shape)) if b)
        name = "REPLICATED" if parts == 1 else "TILED" if parts == len(sharding.device_set) else "PARTIAL"
        return ShardingType(name)

    @property
    def local_shards(self: Any) -> list[XLAShard]:
        """The parts on the devices of this process."""
        return [XLAShard(*part) for part in parts_of(self)]

    def load_local_shards_(self: Any, shards: Sequence[XLAShard]) -> None:
        """Give the tensor the data of its parts, one a device. DM649 where some are missing, have another
        shape, or the tensor is whole on each device."""
        sharding: Any = layout_of(self)
        divided = sharding is not None and not sharding.is_fully_replicated
        require_layout(divided, "a tensor that is whole on each device has no parts", "use copy_")
        by_device = {shard.shard_device: shard.data for shard in shards}
        ordered = [by_device[name] for _, _, name, _ in parts_of(self) if name in by_device]
        put(self, whole_of(ordered, sharding, self.shape), sharding)

    @property
    def _cached_spec(self: Any) -> Any:
        said = mark_of(self)
        return None if said is None else said.dtensor_spec

    def invalidate_spec_cache(self: Any) -> None:
        """Let `_spec` be made anew."""
        if (said := mark_of(self)) is not None:
            said.dtensor_spec = None

    @property
    def _spec(self: Any) -> Any:
        """PyTorch's DTensorSpec of the mark."""
        said: Any = mark_of(self)
        require_layout(
            said is not None, "the tensor was not marked, XLA chooses its layout", "use mark_sharding"
        )
        if said.dtensor_spec is None:
            meta = compat.dtensor_meta()(self.shape, self.stride(), self.dtype)
            said.dtensor_spec = compat.dtensor_spec()(_device_mesh(said.mesh), _placements(said), meta)
        return said.dtensor_spec

    @property
    def placements(self: Any) -> tuple[Placement, ...]:
        """PyTorch's placement for each axis of the mesh. DM649, a ValueError, for a tensor that was not
        marked."""
        return self._spec.placements

    def redistribute(
        self: Any, device_mesh: Any, placements: Sequence[Placement], *, async_op: bool = False
    ) -> Any:
        """Give the tensor another layout, by one placement for each axis of the mesh (`Mesh` or PyTorch's
        `DeviceMesh`); it is returned, or with async_op a copy that is laid out so."""
        mesh = device_mesh if isinstance(device_mesh, Mesh) else convert_to_xla_mesh(device_mesh)
        spec = convert_to_xla_partition_spec(self, placements)
        axes = len(mesh.mesh_shape)
        require_layout(
            len(placements) == axes,
            f"{len(placements)} placements for a mesh of {axes} axes",
            "give one an axis",
        )
        return mark(self.clone() if async_op else self, mesh, spec)


def convert_to_xla_mesh(dt_mesh: DeviceMesh) -> Mesh:
    """The `Mesh` with the same devices, sizes and names of axes."""
    names = dt_mesh.mesh_dim_names
    return Mesh(dt_mesh.mesh.flatten().tolist(), tuple(dt_mesh.mesh.shape), tuple(names) if names else None)


def _device_mesh(mesh: Mesh) -> DeviceMesh:
    return DeviceMesh("xla", torch.from_numpy(mesh.get_logical_mesh()), mesh_dim_names=mesh.axis_names)


def convert_to_xla_partition_spec(
    tensor: torch.Tensor, placement_spec: Sequence[Placement]
) -> tuple[int | None, ...]:
    """For each dimension the axis of the mesh over which it is divided, or None. DM649 for partial sums."""
    spec: list[int | None] = [None] * tensor.dim()
    for axis, placement in enumerate(placement_spec):
        if isinstance(placement, Shard):
            spec[placement.dim] = axis
        else:
            what, cure = f"a tensor cannot be laid out as {placement}", "use Shard or Replicate"
            require_layout(isinstance(placement, Replicate), what, cure, UnsupportedLayout)
    return tuple(spec)


def _placements(said: Mark) -> tuple[Placement, ...]:
    by_axis: dict[Any, Placement] = {}
    for dim, axes in enumerate(said.partition_spec):
        for axis in axes if isinstance(axes, tuple) else (axes,):
            by_axis[said.mesh.get_axis_name_idx(axis) if isinstance(axis, str) else axis] = Shard(dim)
    return tuple([by_axis.get(axis, Replicate()) for axis in range(len(said.mesh.mesh_shape))])


# Every xla tensor has these.
for _name, _fact in vars(XLAShardedTensor).items():
    if not _name.startswith("__"):
        setattr(XLATensor, _name, _fact)


def wrap_as_sharded_tensor(t: Any, mesh_shape: Any = None, partition_spec: Spec | None = None) -> Any:
    """The tensor, which is marked first where a partition spec is given. mesh_shape: sizes of a mesh of all
    devices, or a `Mesh`."""
    return XLAShardedTensor(t, mesh_shape, partition_spec)


def unwrap_sharded_tensor(t: Any) -> Any:
    """The tensor itself: an `XLAShardedTensor` is no wrapper."""
    return t


def wrap_if_sharded(t: Any) -> Any:
    """The tensor itself, which is an `XLAShardedTensor` where it is marked or divided over devices."""
    return t
