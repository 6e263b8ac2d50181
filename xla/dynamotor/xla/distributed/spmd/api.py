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
from torch.distributed.tensor import distribute_module, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement, Replicate

from ..device_mesh import as_any_device, has_groups
from .xla_sharded_tensor import convert_to_xla_mesh, convert_to_xla_partition_spec
from .xla_sharding import mark_sharding


def xla_distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = None,
) -> torch.Tensor:
    """A tensor of the device, laid out over a mesh; one placement an axis (by default all are `Replicate`).

    Over a mesh of processes it is PyTorch's DTensor. In SPMD mode it is the whole tensor, as every xla tensor
    is then: it can become a parameter, and `XLAShardedTensor(t)` tells how it is laid out. src_data_rank: in
    SPMD mode one process has all data.
    """
    if has_groups(device_mesh):
        how = {"src_data_rank": 0 if src_data_rank is None else src_data_rank}
        return as_any_device(distribute_tensor, tensor, device_mesh, placements, **how)
    device_tensor = tensor if tensor.device.type == "xla" else tensor.to("xla")
    spec = convert_to_xla_partition_spec(tensor, placements or [Replicate()] * device_mesh.mesh.dim())
    return mark_sharding(device_tensor, convert_to_xla_mesh(device_mesh), spec)


def xla_distribute_module(
    module: torch.nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, torch.nn.Module, Any], None] | None = None,
    input_fn: Callable[[torch.nn.Module, Any, Any], Any] | None = None,
    output_fn: Callable[[torch.nn.Module, Any, Any], Any] | None = None,
) -> torch.nn.Module:
    """Call `partition_fn(name, submodule, mesh)` for each submodule, which lays its parameters out, and let
    `input_fn` and `output_fn` change inputs and outputs of the module; the module is returned.

    The functions of PyTorch's parallel styles (`ColwiseParallel`, ...) turn local parts into DTensors and
    back; xla tensors are whole in SPMD mode, so those are left out, and XLA moves data as the parameters ask
    for.
    """
    if device_mesh is not None and has_groups(device_mesh):
        return as_any_device(distribute_module, module, device_mesh, partition_fn, input_fn, output_fn)
    for name, part in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, part, device_mesh)
    if input_fn is not None and not _is_of_a_style(input_fn):
        module.register_forward_pre_hook(lambda m, inputs: input_fn(m, inputs, device_mesh))
    if output_fn is not None and not _is_of_a_style(output_fn):
        module.register_forward_hook(lambda m, inputs, outputs: output_fn(m, outputs, device_mesh))
    return module


def _is_of_a_style(function: Callable[..., Any]) -> bool:
    return getattr(getattr(function, "func", function), "__module__", "") == ParallelStyle.__module__
