"""PyTorch's names for tensors and modules over a mesh of devices, said of xla's: placements become a
partition spec.

>>> mesh = DeviceMesh("xla", list(range(4)))
>>> weight = xla_distribute_tensor(weight, mesh, [Shard(0)])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ...errors import require
from .xla_sharding import Mesh, XLAShardedTensor, mark_sharding, wrap_as_sharded_tensor


def convert_to_xla_mesh(dt_mesh: DeviceMesh) -> Mesh:
    """The `Mesh` with the same devices, sizes and names of axes."""
    names = dt_mesh.mesh_dim_names
    return Mesh(dt_mesh.mesh.flatten().tolist(), tuple(dt_mesh.mesh.shape), tuple(names) if names else None)


def convert_to_xla_partition_spec(
    tensor: torch.Tensor, placement_spec: Sequence[Placement]
) -> tuple[int | None, ...]:
    """For each dimension the axis of the mesh over which it is divided, or None. DM649 for partial sums."""
    spec: list[int | None] = [None] * tensor.dim()
    for axis, placement in enumerate(placement_spec):
        if isinstance(placement, Shard):
            spec[placement.dim] = axis
        else:
            what = f"a tensor cannot be laid out as {placement}"
            require(isinstance(placement, Replicate), "DM649", what, cure="use Shard or Replicate")
    return tuple(spec)


def xla_distribute_tensor(
    tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement] | None = None
) -> XLAShardedTensor:
    """Lay a tensor out over a mesh; one placement an axis (by default all are `Replicate`)."""
    device_tensor = tensor if tensor.device.type == "xla" else tensor.to("xla")
    spec = convert_to_xla_partition_spec(tensor, placements or [Replicate()] * device_mesh.mesh.dim())
    return wrap_as_sharded_tensor(mark_sharding(device_tensor, convert_to_xla_mesh(device_mesh), spec))


def xla_distribute_module(
    module: torch.nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, torch.nn.Module, Any], None] | None = None,
    **options: Any,
) -> torch.nn.Module:
    """Call `partition_fn(name, submodule, mesh)` for each submodule, which lays its parameters out; the
    module is returned.
    """
    for name, part in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, part, device_mesh)
    return module
