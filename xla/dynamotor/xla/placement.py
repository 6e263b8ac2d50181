"""Placement: on which devices the values of a program are. `xla:i` is one device of jax's; in SPMD mode
`xla:0` stands for a mesh of devices, and each value has a sharding over it.

The lazy flush, the bridge and whole steps ask this module, so that one rule decides where their inputs go.
An executable fits the settings and the placement it was compiled for: `settings()` are in its key, and
`signature` tells its inputs' shardings apart.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .device import jax_device, local_devices
from .dtypes import PRECISION_SETTINGS

Grid = jax.sharding.Mesh | jax.sharding.AbstractMesh
_WANTED = os.environ.get("XLA_USE_SPMD", "0") not in (
    "0",
    "",
)  # read once: each call of a program asks `spmd`
_home: list[NamedSharding] = []


def spmd() -> NamedSharding | None:
    """The sharding that keeps a value whole on each device of the mesh; None outside of SPMD mode. The
    variable XLA_USE_SPMD=1 turns the mode on at the first use."""
    if _WANTED and not _home:
        spread_over_all()
    return _home[0] if _home else None


def spread_over_all() -> None:
    """Turn SPMD mode on over all devices of the process, in a row."""
    devices = local_devices()
    spread(jax.sharding.Mesh(np.array(devices, dtype=object), ("axis0",)))


def spread(mesh: jax.sharding.Mesh) -> None:
    """Turn SPMD mode on: from now on values are on all devices of this mesh, in its order. Of two meshes over
    the same devices the one whose axes divide the other's stays: it has a name for every part."""
    current = _home[0].mesh if _home else None
    if (
        current is None
        or _order(current) != _order(mesh)
        or _spans(mesh, current) is None
        and _spans(current, mesh) is not None
    ):
        _home[:] = [NamedSharding(mesh, PartitionSpec())]


def _order(mesh: Grid) -> list[jax.Device]:
    return list(mesh.devices.flat)  # arrays have devices


@functools.cache
def _spans(coarse: Grid, fine: Grid) -> dict[str, tuple[str, ...]] | None:
    """For each axis of one mesh the axes of another that it consists of; None where they do not fit. Both
    have the same devices in the same order."""
    rest = [(name, size) for name, size in fine.shape.items() if size > 1]
    spans = {}
    for name, size in coarse.shape.items():
        parts: list[str] = []
        while size > 1:
            part, count = rest.pop(0)
            if size % count:
                return None
            parts.append(part)
            size //= count
        spans[name] = tuple(parts)
    return spans


def _renamed(sharding: NamedSharding, mesh: Grid) -> NamedSharding | None:
    """The same layout in terms of another mesh, or None where that has no axes for it."""
    if _order(sharding.mesh) != _order(mesh):
        return None
    spans = _spans(sharding.mesh, mesh)
    if spans is None:
        return None
    dims = [() if axes is None else axes if isinstance(axes, tuple) else (axes,) for axes in sharding.spec]
    spec = [tuple(part for axis in axes for part in spans[axis]) or None for axes in dims]
    return NamedSharding(mesh, PartitionSpec(*[s[0] if s is not None and len(s) == 1 else s for s in spec]))


def home(device: Any) -> jax.Device | NamedSharding:
    """Where values from the host go: jax's device behind `xla:i`, or in SPMD mode a sharding over the
    mesh."""
    return spmd() or jax_device(device)


# All that decides how a graph is compiled, beside its inputs: part of every key of an executable.
SETTINGS: tuple[Callable[[], Any], ...] = (*PRECISION_SETTINGS, spmd)


def settings() -> tuple:
    """The settings as they are now."""
    return tuple([setting() for setting in SETTINGS])


def settle(array: jax.Array) -> jax.Array:
    """The array with a sharding over the mesh of SPMD mode; one that has it already is returned as it is. XLA
    programs have one order of devices, and jax names the results' shardings after one mesh."""
    if not _home or (type(array.sharding) is NamedSharding and array.sharding.mesh is _home[0].mesh):
        return array
    if array.sharding.is_fully_replicated or not isinstance(array.sharding, NamedSharding):
        return jax.device_put(array, _home[0])
    return jax.device_put(array, _renamed(array.sharding, _home[0].mesh) or _home[0])


def signature(arrays: Sequence[jax.Array]) -> tuple:
    """The part of an executable's key that says how its inputs are laid out; empty outside of SPMD mode."""
    return tuple([array.sharding for array in arrays]) if _home else ()
