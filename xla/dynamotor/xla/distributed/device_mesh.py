"""PyTorch's `DeviceMesh` over replicas: one process a device, with process groups, so that DTensor and
parallel plans are PyTorch's own, on local xla tensors.

PyTorch makes a mesh of type "xla" without process groups, for torch_xla's SPMD mode, where one process has
all devices. Where a process group is initialised and SPMD is off, a mesh has groups as on any device.

>>> dist.init_process_group("xla", init_method="xla://")
>>> parallelize_module(model, init_device_mesh("xla", (2,)), plan)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .spmd.xla_sharding import is_spmd


class _LikeAnyDevice(str):
    """The name "xla" while PyTorch asks whether a mesh is torch_xla's."""

    def __eq__(self, other: object) -> bool:
        return type(other) is _LikeAnyDevice

    def __ne__(self, other: object) -> bool:
        return type(other) is not _LikeAnyDevice

    __hash__ = str.__hash__


class _UntilAsked(_LikeAnyDevice):
    """The same for a mesh, which has its name back once PyTorch has asked: the device is looked up by it."""

    mesh: DeviceMesh

    def __new__(cls, mesh: DeviceMesh) -> _UntilAsked:
        name = super().__new__(cls, "xla")
        name.mesh = mesh
        return name

    def __eq__(self, other: object) -> bool:
        self.mesh._device_type = "xla"
        return super().__eq__(other)

    __hash__ = str.__hash__


def has_groups(mesh: DeviceMesh) -> bool:
    """Whether a mesh of this device is one of processes."""
    return hasattr(mesh, "_rank")


def as_any_device(
    function: Callable[..., Any], given: Any, mesh: DeviceMesh, *args: Any, **kwargs: Any
) -> Any:
    """Call `distribute_tensor` or `distribute_module` of PyTorch, which hand a mesh of "xla" to torch_xla."""
    mesh._device_type = _UntilAsked(mesh)
    try:
        return function(given, mesh, *args, **kwargs)
    finally:
        mesh._device_type = "xla"


def _with_groups(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def start(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        of_processes = device_type == "xla" and not is_spmd() and dist.is_initialized()
        init(self, _LikeAnyDevice(device_type) if of_processes else device_type, *args, **kwargs)
        if of_processes:
            self._device_type = device_type

    return start


DeviceMesh.__init__ = _with_groups(DeviceMesh.__init__)  # type: ignore[method-assign]  # PyTorch has no hook for it
