"""Loaders that read batches and upload them to the device in the background, while the last step is computed.

>>> import dynamotor.xla.distributed.parallel_loader as pl
>>> for data, target in pl.MpDeviceLoader(train_loader, xm.xla_device()):
...     xm.optimizer_step(optimizer)        # taking the next batch ends the step
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import torch

from .. import placement, sync
from ..transfer import upload, wrap_array
from ..utils.keyd_queue import Queue
from ..utils.utils import for_each_instance_rewrite

Device = torch.device | str


class _Channel(Queue):
    """A queue whose end can be an exception, which is raised where items are taken."""

    _error: BaseException | None = None

    def put(self, item: Any) -> bool:
        """Wait for room; False when the channel has ended."""
        return super().put((item,))

    def get(self) -> tuple[bool, Any]:
        """Wait for an item; (False, None) behind the last one."""
        item = super().get()
        if item is not None:
            return True, item[0]
        error, self._error = self._error, None
        if error is not None:
            raise error
        return False, None

    def end(self, error: BaseException | None = None) -> None:
        """No more items; those inside can still be taken."""
        self._error = self._error or error
        self.close_write()


class PerDeviceLoader:
    """The batches of one device of a ParallelLoader. Taking one ends the step before (every
    `batches_per_execution` batches).
    """

    def __init__(self, loader: ParallelLoader, device: torch.device, owner: bool = False) -> None:
        self._owner, self._loader, self._device = owner, loader, device
        self._since_step = 0

    def __iter__(self) -> PerDeviceLoader:
        return self

    def __len__(self) -> int:
        return self._loader.per_device_samples()

    def __next__(self) -> Any:
        if self._since_step >= self._loader.batches_per_execution:
            self._end_step()
        some, batch = self._loader.next_item(self._device)
        if not some:
            if self._since_step:
                self._end_step()
            raise StopIteration
        self._since_step += 1
        return batch

    next = __next__

    def _end_step(self) -> None:
        self._since_step = 0
        sync.sync()

    def __del__(self) -> None:
        if self._owner:  # a loop that was left early
            self._loader.close()


class ParallelLoader:
    """Reads a loader on one thread and uploads its batches on others; the i-th batch goes to devices[i %
    len(devices)].

    loader: a torch DataLoader or any iterable of nested containers of tensors. devices: where batches go.
    batchdim: accepted. batches_per_execution: how many batches a step has. loader_prefetch_size,
    device_prefetch_size: how many batches may wait to be uploaded, and on each device to be used.
    host_to_device_transfer_threads: threads that upload to one device; more than one may change the order of
    batches. input_sharding: an object with `apply(tensor)` that says how a batch is laid out (see
    distributed.spmd), or a dictionary of them for batches that are dictionaries with the same keys.
    """

    def __init__(
        self,
        loader: Any,
        devices: Sequence[Device],
        batchdim: int = 0,
        batches_per_execution: int = 1,
        loader_prefetch_size: int = 8,
        device_prefetch_size: int = 4,
        host_to_device_transfer_threads: int = 1,
        input_sharding: Any = None,
    ) -> None:
        self.batches_per_execution = max(1, batches_per_execution)
        self._loader, self._sharding = loader, input_sharding
        # A DataLoader forks its workers here: those forked on the reader's thread have crashed in os.fork().
        batches = iter(loader)
        self.devices = [torch.device("xla", torch.device(d).index or 0) for d in devices]
        self._host = {device: _Channel(loader_prefetch_size) for device in self.devices}
        self._ready = {device: _Channel(device_prefetch_size) for device in self.devices}
        # jax's devices are asked for here: XLA starts on the thread of the program.
        targets = [(device, placement.home(device)) for device in self.devices]
        self._start(lambda: self._read(batches), "xla loader")
        for device, target in targets:
            workers = max(1, host_to_device_transfer_threads)
            left = itertools.count(1)
            for _ in range(workers):
                self._start(
                    lambda d=device, t=target, n=left, w=workers: self._upload(d, t, n, w), "xla upload"
                )

    @staticmethod
    def _start(work: Any, name: str) -> None:
        threading.Thread(target=work, daemon=True, name=name).start()

    def _read(self, batches: Iterator[Any]) -> None:
        error: BaseException | None = None
        try:
            for batch, device in zip(batches, itertools.cycle(self.devices)):
                if not self._host[device].put(batch):
                    break
        except BaseException as caught:  # raised where the batches are taken
            error = caught
        for channel in self._host.values():
            channel.end(error)

    def _upload(
        self, device: torch.device, target: jax.Device, finished: Iterator[int], workers: int
    ) -> None:
        error: BaseException | None = None
        try:
            while True:
                some, batch = self._host[device].get()
                if not some or not self._ready[device].put(self._move(batch, target)):
                    break
        except BaseException as caught:  # raised where the batches are taken
            error = caught
        if error is not None or next(finished) == workers:
            self._ready[device].end(error)

    def _move(self, batch: Any, target: jax.Device) -> Any:
        if not isinstance(self._sharding, dict):
            return self._move_all(batch, target, self._sharding)
        torch._check_value(
            isinstance(batch, dict), lambda: f"input_sharding has keys, the batch is a {type(batch).__name__}"
        )
        missing = batch.keys() - self._sharding
        if missing:
            raise KeyError(f"input_sharding has no {sorted(missing)}")
        return {name: self._move_all(part, target, self._sharding[name]) for name, part in batch.items()}

    def _move_all(self, batch: Any, target: jax.Device, sharding: Any) -> Any:
        # Not `.to(device)`: that would record ops, and the trace belongs to the thread of the program.
        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = wrap_array(upload(tensor, target), tensor.dtype).requires_grad_(tensor.requires_grad)
            if sharding is not None:
                sharding.apply(moved)
            return moved

        return for_each_instance_rewrite(
            batch, lambda v: isinstance(v, torch.Tensor) and v.device.type == "cpu", move
        )

    def per_device_loader(self, device: Device) -> PerDeviceLoader:
        """The iterator over one device's batches."""
        return PerDeviceLoader(self, torch.device("xla", torch.device(device).index or 0))

    def per_device_samples(self) -> int:
        """How many batches each device gets: those of the loader, shared out. TypeError when the loader has
        no length.
        """
        return len(self._loader) // len(self.devices)

    def next_item(self, device: torch.device) -> tuple[bool, Any]:
        """(True, the next batch of a device), or (False, None) at the end. Raises the loader's exception."""
        return self._ready[device].get()

    def close(self) -> None:
        """Stop reading and uploading, which otherwise ends with the last batch; prefetched batches are
        dropped.
        """
        for channel in (*self._host.values(), *self._ready.values()):
            channel.close()


class MpDeviceLoader:
    """A loader whose batches are on one device, to be used like the loader that it wraps: each `for` starts a
    new ParallelLoader.

    loader: a torch DataLoader. device: where its batches go. Further arguments are ParallelLoader's.
    """

    def __init__(self, loader: Any, device: Device, **kwargs: Any) -> None:
        self._loader, self._device = loader, device
        self._parallel_loader_kwargs = kwargs  # transformers' Trainer adds an input_sharding to them

    def __iter__(self) -> PerDeviceLoader:
        parallel = ParallelLoader(self._loader, [self._device], **self._parallel_loader_kwargs)
        return PerDeviceLoader(parallel, parallel.devices[0], owner=True)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # batch_size, sampler, dataset and what else a training loop asks of its loader
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)
