"""Programs of a GPU as plain data, and back: the launches with their kernels' text, whose built code the disk
cache keeps by that text.

>>> # None on another GPU, and where the driver refuses a kernel
>>> again = restored("graph0", listing, constants, kernels(call), gpu(call.device))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..base.errors import BuildError
from ..graph.plain import NotPlain, decode, encode, plain
from ..runtime import triton_build
from .externs import Callee
from .gpu_program import GpuProgram, Launch
from .program import Listing
from .triton_kernel import TritonFunction

plain(TritonFunction)
Constants = Mapping[str, Any]  # each a Callee or an Expected


def gpu(device: torch.device) -> tuple[Any, ...]:
    """What the plan of kernels depends on: the device (the interpreter's is a CPU) and the triton that builds
    for it.
    """
    on_gpu = device.type == "cuda"
    return device, torch.cuda.get_device_name(device) if on_gpu else "", triton_build.triton_version()


def kernels(call: GpuProgram) -> Any:
    """The launches of a program. NotPlain where another program has to stand by for other settings."""
    if call.rounds:
        raise NotPlain("a program with matrix products in TF32")
    return {name: encode(launch) for name, launch in call.launches().items()}


def restored(
    name: str, listing: Listing, constants: Constants, launches: Mapping[str, Any], made_for: tuple[Any, ...]
) -> GpuProgram | None:
    """The program again; None on another GPU, and where its kernels cannot be built or loaded (the caller
    compiles the graph, which knows what to do then).
    """
    device = made_for[0]
    if device.type == "cuda" and device.index >= torch.cuda.device_count() or made_for != gpu(device):
        return None
    call = StoredGpuProgram(name, listing, constants, launches, device)
    try:
        call.prepare()
    except BuildError:
        return None
    return call


def globals_of(constants: Constants) -> dict[str, Any]:
    """What the constants of a stored program stand for in its text."""
    return {
        name: value.function if type(value) is Callee else value.sized(value.spec.shape, value.spec.stride)
        for name, value in constants.items()
    }


class StoredGpuProgram(GpuProgram):
    """A GPU's program whose text was there already."""

    def __init__(
        self,
        name: str,
        listing: Listing,
        constants: Constants,
        launches: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self.device, self.rounds = device, False
        self._stored = constants
        self._launches_stored: dict[str, Launch] = {k: decode(row) for k, row in launches.items()}
        self.builds: dict[str, Any] = {}
        for function, _, _ in self._launches_stored.values():
            self._start(function)
        self._set_up(name, listing)

    def launches(self) -> Mapping[str, Launch]:
        return self._launches_stored

    def _chosen(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        return {}  # its sizes are fixed

    def _constants(self) -> dict[str, Any]:
        return globals_of(self._stored)

    def _on_build_error(self, error: BuildError) -> Any:  # an attribute elsewhere
        raise error
