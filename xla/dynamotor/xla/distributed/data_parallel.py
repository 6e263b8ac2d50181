"""One thread a device in one process, each with a copy of the module: what programs used before there was one
process a device.

>>> results = DataParallel(Model, device_ids=devices)(train_loop, loader)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..core import xla_model as xm
from .parallel_loader import ParallelLoader


class Context:
    """State that a loop function keeps from call to call on its device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def getattr_or(self, name: str, defval: Any) -> Any:
        """An attribute, which is `defval` (or its result) at first."""
        if not hasattr(self, name):
            setattr(self, name, defval() if callable(defval) else defval)
        return getattr(self, name)


class DataParallel:
    """Copies of a module on devices (None: all of this process); gradients are not shared between them.

    network: a module, or a function that makes one.
    """

    def __init__(self, network: Any, device_ids: Sequence[Any] | None = None, **kwargs: Any) -> None:
        module = network if isinstance(network, torch.nn.Module) else network()
        self._devices = [
            torch.device(d) for d in (xm.get_xla_supported_devices() if device_ids is None else device_ids)
        ]
        self._models = [copy.deepcopy(module).to(d) for d in self._devices or [torch.device("cpu")]]
        self._contexts = [Context(d) for d in self._devices or [torch.device("cpu")]]

    @property
    def devices(self) -> list[torch.device]:
        """The devices."""
        return self._devices

    @property
    def models(self) -> list[torch.nn.Module]:
        """The copies, in the devices' order."""
        return self._models

    def __call__(
        self, loop_fn: Callable[..., Any], loader: Any, batchdim: int = 0, **kwargs: Any
    ) -> list[Any]:
        """`loop_fn(module, its part of the loader, device, context)` for each device, on threads; the results
        in order.
        """
        if not self._devices:
            return [loop_fn(self._models[0], enumerate(loader), torch.device("cpu"), self._contexts[0])]
        parts = ParallelLoader(loader, self._devices, batchdim=batchdim, **kwargs)
        loaders = [parts.per_device_loader(device) for device in self._devices]
        with ThreadPoolExecutor(len(self._devices)) as workers:
            return list(workers.map(loop_fn, self._models, loaders, self._devices, self._contexts))
