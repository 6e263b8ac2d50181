"""Which devices and replicas there are: what users of torch_xla call `xr`.

>>> import dynamotor.xla.runtime as xr
>>> xr.device_type(), xr.world_size(), xr.global_ordinal()
('CPU', 1, 0)
"""

from __future__ import annotations

import os
from typing import Any

import jax
import torch

from . import device as _devices, environment, metrics, replication
from .device import platform as device_type
from .distributed.spmd import xla_sharding
from .distributed.spmd.xla_sharding import is_spmd
from .errors import require
from .persistent_cache import initialize_cache
from .replication import rank as global_ordinal, size as world_size

__all__ = [
    "addressable_device_count",
    "addressable_runtime_device_count",
    "device_type",
    "get_master_ip",
    "get_num_cached_compilation_graph",
    "global_device_count",
    "global_ordinal",
    "global_runtime_device_attributes",
    "global_runtime_device_count",
    "host_index",
    "initialize_cache",
    "is_bf16_supported",
    "is_spmd",
    "local_device_count",
    "local_ordinal",
    "local_process_count",
    "process_count",
    "process_index",
    "runtime_device_attributes",
    "set_device_type",
    "use_spmd",
    "using_pjrt",
    "world_size",
    "xla_device",
]


def set_device_type(pjrt_device: str) -> None:
    """Say which device type is used: "CPU", "CUDA" or "TPU". Once XLA has started, only the type in use can
    be named (DM658 otherwise)."""
    names, started = environment.platforms(pjrt_device), _devices.has_started()
    wanted = {"GPU": "CUDA"}.get(pjrt_device.upper(), pjrt_device.upper())
    require(
        not started or wanted == device_type(),
        "DM658",
        f"the device type cannot become {pjrt_device} any more",
        why="XLA has started in this process",
        cure=f"set PJRT_DEVICE={pjrt_device} in the environment",
    )
    if not started:
        jax.config.update("jax_platforms", names)
    os.environ["PJRT_DEVICE"] = pjrt_device


def using_pjrt() -> bool:
    """Always True: there is no other runtime."""
    return True


def is_bf16_supported() -> bool:
    """Whether torch.bfloat16 can be used on the devices: True on all that XLA has."""
    return True


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """Device number `n` of this process, or the current one. `devkind` is accepted: a process has one kind of
    device.
    """
    return torch.device("xla", _devices.current_device() if n is None else n)


def local_ordinal() -> int:
    """This process's ordinal among the replicas of its host."""
    return replication.place().local_rank


process_index, process_count = global_ordinal, world_size  # one replica is one process


def local_process_count() -> int:
    """The number of processes on this host."""
    return replication.place().local_size


def host_index() -> int:
    """The index of this host, where all hosts run equally many processes."""
    return replication.rank() // local_process_count()


def addressable_device_count() -> int:
    """The number of devices that programs of this process see: one in SPMD mode, where `xla:0` stands for all
    of them.
    """
    return 1 if is_spmd() else len(jax.local_devices())


def local_device_count() -> int:
    """The number of devices that programs of this host see."""
    return local_process_count() * addressable_device_count()


def global_device_count() -> int:
    """The number of devices that programs of all processes see: one a process in SPMD mode."""
    return world_size() if is_spmd() else len(jax.devices())


def addressable_runtime_device_count() -> int:
    """The number of physical devices of this process."""
    return len(jax.local_devices())


def global_runtime_device_count() -> int:
    """The number of physical devices of all processes."""
    return len(jax.devices())


def runtime_device_attributes(device: str) -> dict[str, Any]:
    """The runtime's description of a physical device ("CPU:0" or "xla:0"): name, kind, process and, on TPUs,
    coordinates.
    """
    index = int(device.rpartition(":")[2] or 0)
    return _attributes(_devices.jax_device(torch.device("xla", index)))


def global_runtime_device_attributes() -> list[dict[str, Any]]:
    """`runtime_device_attributes` of every device of every process."""
    return [_attributes(device) for device in jax.devices()]


def _attributes(device: jax.Device) -> dict[str, Any]:
    names = [n for n in ("process_index", "coords", "core_on_chip", "num_cores") if hasattr(device, n)]
    found = {"name": f"{device_type()}:{device.id}", "kind": device.device_kind}
    return found | {name: getattr(device, name) for name in names}


def use_spmd(auto: bool | None = False) -> None:
    """Switch SPMD mode on: `xla:0` stands for all devices, and `mark_sharding` lays tensors out over them.

    auto: let XLA choose the shardings itself; not available (DM665): say them with mark_sharding.
    """
    require(
        not auto,
        "DM665",
        "automatic sharding is not available",
        why="jax has no such mode",
        cure="use mark_sharding",
    )
    xla_sharding.use_spmd()


def get_master_ip() -> str:
    """The address of the machine where replica 0 runs."""
    return replication.place().address


def get_num_cached_compilation_graph() -> int:
    """How many XLA programs this process has compiled or loaded."""
    return metrics.counters["UncachedCompile"]
