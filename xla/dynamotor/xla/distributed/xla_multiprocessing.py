"""One process a device: what training scripts call `xmp`.

>>> def train(index, epochs): ...
>>> xmp.spawn(train, args=(5,))
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from jax._src import xla_bridge  # jax has no public way to ask whether it has started

from dynamotor.extension_api import XlaError

from .. import replication
from ..errors import require

T = TypeVar("T")
_CAUSE_SECONDS = 3.0  # for how long a replica that fails with its peer lets the peer be seen failing
_stores: list[dist.Store] = []  # served by this process to the replicas that it has spawned


def _device_count() -> int:
    """The number of devices of this machine, without starting XLA: CPU_NUM_DEVICES or 1 on CPUs, the visible
    GPUs otherwise.
    """
    kind = os.environ.get("PJRT_DEVICE", "").upper()
    gpus = 0 if kind == "CPU" else _gpu_count()
    require(
        kind not in ("CUDA", "GPU") or gpus != 0,
        "DM645",
        f"PJRT_DEVICE={kind}, but this machine shows no GPU",
        cure="see CUDA_VISIBLE_DEVICES and GPU_NUM_DEVICES",
    )
    return gpus or int(os.environ.get("CPU_NUM_DEVICES", "1"))


def _gpu_count() -> int:
    """GPUs that a new process would use: none where jax has no GPU plugin or JAX_PLATFORMS leaves them
    out.
    """
    chosen = os.environ.get("JAX_PLATFORMS", "")
    if chosen and not {"cuda", "gpu"} & set(chosen.split(",")):
        return 0
    if "GPU_NUM_DEVICES" in os.environ:
        return int(os.environ["GPU_NUM_DEVICES"])
    if "cuda" not in _plugins():
        return 0
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len(
            [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")]
        )
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0


def _plugins() -> set[str]:
    """The accelerators that jax has plugins for."""
    return {"cuda" for entry in entry_points(group="jax_plugins") if "cuda" in entry.name}


def _replica(index: int, fn: Callable[..., Any], args: tuple, size: int, port: int) -> None:
    """A child: take the place described by the parent, run `fn`, leave in good order."""
    os.environ.update(replication.Place(index, size, index, size, "127.0.0.1", port).to_environment())
    try:
        replication.start()
        fn(index, *args)
    except BaseException as error:
        replication.abandon()
        if isinstance(error, XlaError) and error.code == "DM640":
            # A consequence: the parent raises the failure that it sees first and ends the others, so that
            # the peer that is the cause is given the time to be seen.
            time.sleep(_CAUSE_SECONDS)
        raise
    replication.stop()


def spawn(
    fn: Callable[..., Any],
    args: tuple = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Any:
    """Run `fn(index, *args)` in one process a device, which are replicas of each other.

    nprocs: how many; None: as many as there are devices; 1: `fn` is called in this process. On CPUs any
    number will do, on GPUs at most one a device. join: wait for them; otherwise a torch.multiprocessing
    context is returned. daemon, start_method ("spawn", "fork" or "forkserver"): as Python's multiprocessing
    has them. An exception in one of them ends the others and is raised here
    (torch.multiprocessing.ProcessRaisedException). DM645 for a wrong nprocs, DM646 when XLA has started here
    and the children are forks.
    """
    devices = _device_count()
    size = devices if nprocs is None else nprocs
    require(
        size >= 1 and (size <= devices or not _gpu_count()),
        "DM645",
        f"nprocs={nprocs} does not fit {devices} device(s)",
        cure="leave nprocs out: one process a device",
    )
    if size == 1:
        fn(0, *args)
        return None
    require(
        start_method != "fork" or not xla_bridge.backends_are_initialized(),
        "DM646",
        "XLA has started in this process, so that it cannot be forked",
        why="its threads and devices would not be in the children",
        cure='use the device only inside of the spawned function, or start_method="spawn"',
    )
    # The store lives here, so that it outlives each replica.
    store = dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=replication.timeout_seconds()),
    )
    _stores.append(store)
    try:
        return mp.start_processes(_replica, (fn, args, size, store.port), size, join, daemon, start_method)
    finally:
        if join:
            _stores.remove(store)


class MpModelWrapper:
    """A model made once at global scope and shared by forked replicas, each of which moves it to its device,
    one after the other.

    >>> WRAPPED = xmp.MpModelWrapper(Network())
    >>> def train(index):
    ...     model = WRAPPED.to(xm.xla_device())
    >>> xmp.spawn(train, start_method="fork")
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._lock = mp.get_context("fork").Lock()

    def to(self, device: torch.device | str) -> torch.nn.Module:
        """The model on a device; replicas of one machine take turns, so that host memory holds few copies at
        a time.
        """
        with self._lock:
            return self._model.to(device)

    def __reduce__(self) -> Any:
        return MpModelWrapper, (self._model,)


class MpSerialExecutor:
    """Runs a function in one replica of the machine at a time: the first may download files that the others
    then find.

    >>> SERIAL = xmp.MpSerialExecutor()
    >>> def train(index):
    ...     dataset = SERIAL.run(lambda: load_dataset("/tmp/mnist"))
    """

    _made = 0

    def __init__(self) -> None:
        # All replicas make theirs in the same order, so that a number names the same one in each.
        MpSerialExecutor._made += 1
        self._name = f"serial/{MpSerialExecutor._made}"

    def run(self, fn: Callable[[], T]) -> T:
        """`fn()`, when it is this replica's turn. All replicas must come here. The next one has its turn even
        when `fn` raises."""
        world = replication.start()
        me = world.place.rank
        first = me - world.place.local_rank
        if me > first:
            replication.meet(world, f"{self._name}/{me}", b"", [me - 1, me])
        try:
            return fn()
        finally:
            if me + 1 < first + world.place.local_size:
                replication.meet(world, f"{self._name}/{me + 1}", b"", [me, me + 1])
