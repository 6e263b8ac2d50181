"""What training scripts call `xm`: devices, steps, saving, random state; the calls between replicas come from
`collectives`.

>>> import dynamotor.xla.core.xla_model as xm
>>> model = MNIST().to(xm.xla_device())
>>> xm.optimizer_step(optimizer)
>>> xm.mark_step()
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import jax
import torch

from dynamotor.extension_api import XlaError

from .. import device as _devices, placement, rng as _rng, stablehlo as _stablehlo, sync as _sync
from ..collectives import (
    REDUCE_AND,
    REDUCE_MAX,
    REDUCE_MIN,
    REDUCE_MUL,
    REDUCE_OR,
    REDUCE_SUM,
    all_gather,
    all_reduce,
    all_reduce_bucketized_gradients,
    all_to_all,
    broadcast_master_param,
    collective_broadcast,
    collective_permute,
    do_on_ordinals,
    mesh_reduce,
    optimizer_step,
    reduce_gradients,
    reduce_scatter,
    rendezvous,
)
from ..jax_call import call_jax
from ..replication import place, rank, size
from ..sync import add_step_closure
from ..tensor import is_xla
from ..transfer import to_cpu
from ..utils.utils import for_each_instance, for_each_instance_rewrite

__all__ = [
    "REDUCE_AND",
    "REDUCE_MAX",
    "REDUCE_MIN",
    "REDUCE_MUL",
    "REDUCE_OR",
    "REDUCE_SUM",
    "RateTracker",
    "add_step_closure",
    "all_gather",
    "all_reduce",
    "all_reduce_bucketized_gradients",
    "all_to_all",
    "broadcast_master_param",
    "collective_broadcast",
    "collective_permute",
    "do_on_ordinals",
    "fork_rng",
    "get_local_ordinal",
    "get_memory_info",
    "get_ordinal",
    "get_rng_state",
    "get_stablehlo",
    "get_stablehlo_bytecode",
    "get_xla_supported_devices",
    "is_master_ordinal",
    "is_xla_tensor",
    "mark_step",
    "master_print",
    "mesh_reduce",
    "optimizer_step",
    "reduce_gradients",
    "reduce_scatter",
    "rendezvous",
    "save",
    "send_cpu_data_to_device",
    "set_rng_state",
    "unlazy",
    "wait_device_ops",
    "xla_device",
    "xla_device_hw",
    "xla_real_devices",
    "xrt_world_size",
]

_HARDWARE = {"CUDA": "GPU"}  # jax's platform -> the hardware's name


# ---- devices


class NoDevice(XlaError, IndexError):
    """DM660, as torch_xla's programs expect it."""


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """A device of this process: number `n` of those of kind `devkind`, or the current one.

    n: ordinal of the device. devkind: "TPU", "GPU" or "CPU". DM660 where there is no such device.
    """
    if n is None and devkind is None:
        return torch.device("xla", _devices.current_device())
    found = get_xla_supported_devices(devkind)
    if not found or not 0 <= (n or 0) < len(found):
        kind = f" of kind {devkind}" if devkind else ""
        raise NoDevice(
            "DM660",
            f"there is no XLA device {n or 0}{kind}",
            why=f"this process has {', '.join(xla_real_devices())}",
        )
    return torch.device(found[n or 0])


def get_xla_supported_devices(devkind: str | None = None, max_devices: int | None = None) -> list[str]:
    """The names of this process's devices ("xla:0", ...), of kind "TPU", "GPU" or "CPU" only, at most
    `max_devices`. In SPMD mode it is "xla:0", which stands for all of them.
    """
    if devkind is not None and _kind(devkind) != _kind(_devices.platform()):
        return []
    names = [str(device) for device in _devices.xla_devices()]
    return (names[:1] if placement.spmd() else names)[:max_devices]


def xla_real_devices(devices: Sequence[Any] | None = None) -> list[str]:
    """The hardware behind devices (all of this process, where none are given), as "CPU:0", "CUDA:1"."""
    chosen = devices or _devices.xla_devices()
    return [f"{_devices.platform()}:{_devices.jax_device(torch.device(d)).id}" for d in chosen]


def xla_replication_devices(local_devices: Sequence[Any] | None = None) -> list[str]:
    """The hardware of all replicas, as "CPU:0": a replica has one device, which in SPMD mode stands for all
    of its process.
    """
    [local] = {name.partition(":")[0] for name in xla_real_devices(local_devices)}
    return [f"{local}:{ordinal}" for ordinal in range(size())]


def xla_device_hw(device: str | torch.device) -> str:
    """The kind of hardware behind an XLA device: "CPU", "TPU" or "GPU"."""
    _devices.jax_device(torch.device(device))
    return _kind(_devices.platform())


def _kind(name: str) -> str:
    return _HARDWARE.get(name.upper(), name.upper())


def is_xla_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on an XLA device."""
    return tensor.device.type == "xla"


def get_memory_info(device: str | torch.device | None = None) -> dict[str, int]:
    """A device's memory: `kb_free` and `kb_total` in units of 1,024 bytes, `bytes_used` and `bytes_limit` in
    bytes.

    On a CPU the limit is the machine's memory, free is what the operating system says, used what live tensors
    hold.
    """
    target = _devices.jax_device(torch.device("xla", _devices.current_device()) if device is None else device)
    stats = target.memory_stats()
    if stats and "bytes_limit" in stats:
        used, limit = stats["bytes_in_use"], stats["bytes_limit"]
        free = limit - used
    else:
        used = sum(a.nbytes for a in jax.live_arrays() if target in a.devices() and not a.is_deleted())
        page = os.sysconf("SC_PAGE_SIZE")
        limit, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    return {"kb_free": free // 1024, "kb_total": limit // 1024, "bytes_used": used, "bytes_limit": limit}


# ---- replicas


def get_ordinal(defval: int = 0) -> int:
    """This process's ordinal among the replicas: 0 to xrt_world_size() - 1. `defval` is accepted: 0 without
    replication.
    """
    return rank()


def get_local_ordinal(defval: int = 0) -> int:
    """This process's ordinal among the replicas on its host. `defval` is accepted: 0 without replication."""
    return place().local_rank


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this process is the master: ordinal 0 of its host, or with local=False ordinal 0 of all
    hosts.
    """
    return (place().local_rank if local else rank()) == 0


def xrt_world_size(defval: int = 1) -> int:
    """The number of replicas. `defval` is accepted: 1 without replication."""
    return size()


def master_print(*args: Any, fd: IO[str] | None = None, local: bool = False, flush: bool = False) -> None:
    """Print on the master only (with local=True on each host's master), to `fd` (standard output)."""
    if is_master_ordinal(local=local):
        print(*args, file=fd or sys.stdout, flush=flush)


# ---- steps


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """End a step: everything recorded so far becomes one XLA graph and is run; then the step closures run.

    wait: block until the device is done. reset_scope: accepted, there are no scopes to reset.
    """
    _sync.sync(wait=wait)


def get_stablehlo(tensors: Sequence[torch.Tensor] | None = None) -> str:
    """The text of the program that the next barrier would run: for these tensors, or for all that wait to be
    computed.
    """
    return str(_stablehlo.pending_program(tensors or ()).mlir_module())


def get_stablehlo_bytecode(tensors: Sequence[torch.Tensor] | None = None) -> bytes:
    """The same as `get_stablehlo` in StableHLO's portable bytecode."""
    return _stablehlo.pending_program(tensors or ()).mlir_module_serialized


def wait_device_ops(devices: Sequence[str | torch.device] = ()) -> None:
    """Block until the devices (all of this process, where none are named) have finished the work sent to
    them.
    """
    _sync.wait_device_ops(devices)


def unlazy(tensors: Sequence[torch.Tensor]) -> None:
    """Block until these tensors have their values. For benchmarks."""
    _sync.sync(wait=True)


# ---- data


def set_replication(device: Any, devices: Sequence[Any]) -> None:
    """Programs for torch_xla call this before they train; the replicas of a job are known here from the
    start. `devices`: those that take part. DM641 where this device is not among them."""
    wanted = [torch.device(d) for d in devices]
    if wanted and torch.device(device) not in wanted:
        raise XlaError("DM641", f"{device} is not among the devices {wanted} of this replica")


def _fetch_gradients(optimizer: Any) -> list[torch.Tensor]:
    """The gradients of an optimizer's parameters that have one."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _maybe_convert_to_cpu(data: Any, convert: bool = True) -> Any:
    """Nested containers with CPU copies of the xla tensors in them; without `convert` as they are,
    computed."""
    _sync.sync(wait=not convert)
    return for_each_instance_rewrite(data, is_xla, _detached) if convert else data


def xla_rendezvous(
    payload: bytes, ordinals: Sequence[int] | None = None, tag: str | None = None
) -> list[bytes]:
    """Wait for the replicas (or those of `ordinals`); their payloads, in the order of ordinals."""
    return rendezvous(tag or "xla_rendezvous", payload, list(ordinals or ()))


def save(data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False) -> None:
    """Save nested containers with tensors in them as torch.save does; all XLA tensors are copied to the CPU
    first.

    A following torch.load gives CPU tensors. Views are saved as tensors of their own: recreate them after
    loading. data: lists, tuples, sets, dicts in any nesting. file_or_path: a path, which keeps its old
    content until the new is complete, or an open binary file; without master_only another one for each
    ordinal. master_only: only the master ordinal writes. global_master: then only ordinal 0 of all hosts,
    instead of one master a host.
    """
    _sync.sync()  # all replicas, also those that do not write: pending work may hold collectives
    if master_only and not is_master_ordinal(local=not global_master):
        return
    on_cpu = for_each_instance_rewrite(data, is_xla, _detached)
    if not isinstance(file_or_path, (str, os.PathLike)) or (
        os.path.exists(file_or_path) and not os.path.isfile(file_or_path)
    ):
        torch.save(on_cpu, file_or_path)
        return
    temporary = f"{os.fspath(file_or_path)}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        torch.save(on_cpu, temporary)
        os.replace(temporary, file_or_path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    on_cpu = to_cpu(tensor.detach())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(on_cpu, tensor.requires_grad)
    return on_cpu.requires_grad_(tensor.requires_grad)


def send_cpu_data_to_device(datas: Any, device: str | torch.device, input_sharding: Any = None) -> Any:
    """Nested containers with every CPU tensor in them moved to `device`; a single tensor comes back in a
    list.

    input_sharding: an object with `apply(tensor)` (see distributed.spmd) that shards each moved tensor.
    """
    if isinstance(datas, torch.Tensor):
        datas = [datas]

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(device)
        if input_sharding is not None:
            input_sharding.apply(moved)
        return moved

    return for_each_instance_rewrite(
        datas, lambda v: isinstance(v, torch.Tensor) and v.device.type == "cpu", move
    )


# ---- random state


def set_rng_state(seed: int, device: str | torch.device | None = None) -> None:
    """Set the random state of a device (the current one, where none is named) to an integer."""
    _rng.set_state(seed, device or xla_device())


def get_rng_state(device: str | torch.device | None = None) -> int:
    """The random state of a device (the current one, where none is named), as an integer for
    `set_rng_state`.
    """
    return _rng.get_state(device or xla_device())


@contextlib.contextmanager
def fork_rng(device: str | torch.device | None = None, enabled: bool = True) -> Iterator[None]:
    """Within this, random numbers may be drawn freely: the device's random state is put back at the end.
    `enabled=False`: not.
    """
    before = get_rng_state(device)
    try:
        yield
    finally:
        if enabled:
            set_rng_state(before, device)


class RateTracker:
    """Events a second: of late, smoothed, and since the beginning.

    smooth_factor: how much of the previous rate `rate()` keeps, 0 to 1; $RATE_TRACKER_SMOOTHING or 0.4 where
    not given.

    >>> tracker = RateTracker(); tracker.add(batch_size); tracker.rate(), tracker.global_rate()
    """

    def __init__(self, smooth_factor: float | None = None) -> None:
        self._smooth = (
            float(os.environ.get("RATE_TRACKER_SMOOTHING", 0.4)) if smooth_factor is None else smooth_factor
        )
        self._start = self._last = time.time()
        self._total = self._since = 0.0
        self._rate: float | None = None

    def add(self, count: float) -> None:
        """Count events."""
        self._total += count
        self._since += count

    def rate(self) -> float:
        """Events a second since the last call, smoothed with the rates before."""
        now = time.time()
        if now > self._last:
            rate = self._since / (now - self._last)
            self._rate = rate if self._rate is None else (1 - self._smooth) * rate + self._smooth * self._rate
            self._last, self._since = now, 0.0
        return self._rate or 0.0

    def global_rate(self) -> float:
        """Events a second since the tracker was made."""
        seconds = time.time() - self._start
        return self._total / seconds if seconds > 0 else 0.0


# ---- buckets, barriers


class ToXlaTensorArena:
    """Moves the values in nested containers for which `select_fn` is true by one call of `convert_fn`, which
    takes a list.
    """

    def __init__(
        self, convert_fn: Callable[[list[Any]], Sequence[Any]], select_fn: Callable[[Any], bool]
    ) -> None:
        self._convert_fn, self._select_fn = convert_fn, select_fn

    def transform(self, inputs: Any) -> Any:
        """The containers with what `convert_fn` gave."""
        found: list[Any] = []
        for_each_instance(inputs, self._select_fn, found.append)
        moved = {id(value): new for value, new in zip(found, self._convert_fn(found))}
        return for_each_instance_rewrite(inputs, self._select_fn, lambda value: moved[id(value)])


def all_gather_bucketized(
    input_list: Sequence[torch.Tensor],
    dim: int = 0,
    groups: Any = None,
    output: Sequence[torch.Tensor] | None = None,
    pin_layout: bool = False,
    bucket_cap_mb: int = 160,
) -> list[torch.Tensor]:
    """`all_gather` of each tensor. pin_layout, bucket_cap_mb: accepted, since one graph has all of them."""
    return all_gather(list(input_list), dim, groups, output)


def reduce_scatter_bucketized(
    reduce_type: str,
    input_list: Sequence[torch.Tensor],
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Any = None,
    output: Sequence[torch.Tensor] | None = None,
    pin_layout: bool = False,
    bucket_cap_mb: int = 160,
) -> list[torch.Tensor]:
    """`reduce_scatter` of each tensor. pin_layout, bucket_cap_mb: accepted, since one graph has all of
    them."""
    return reduce_scatter(reduce_type, list(input_list), scale, scatter_dim, shard_count, groups, output)


def optimization_barrier_(tensors: Sequence[torch.Tensor]) -> None:
    """XLA moves nothing over this place of the graph, as far as these tensors go."""
    for tensor, same in zip(tensors, call_jax(jax.lax.optimization_barrier, (list(tensors),))):
        tensor.data.copy_(same)


def xla_device_kind(device: str | torch.device | None = None) -> str:
    """What jax calls the hardware behind a device: "cpu", "NVIDIA H200"."""
    return _devices.jax_device(torch.device(device) if device else xla_device()).device_kind
