"""Meshes: devices in a grid, whose axes have names.

>>> Mesh(range(4), (2, 2), ("data", "model")).shape()
OrderedDict([('data', 2), ('model', 2)])
"""

from __future__ import annotations

import ast
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding, PartitionSpec

from ... import device as _devices
from .marks import Spec, require_layout


class Mesh:
    """Devices in a grid. device_ids: numbers of devices, row by row; mesh_shape: sizes of the axes;
    axis_names: theirs.
    """

    def __init__(
        self, device_ids: Sequence[int], mesh_shape: Sequence[int], axis_names: Sequence[str] | None = None
    ) -> None:
        self.device_ids = np.array(list(device_ids), dtype=np.int64)
        self.mesh_shape = tuple(int(n) for n in mesh_shape)
        self.axis_names = None if axis_names is None else tuple(axis_names)
        names = [f"axis{i}" for i in range(len(self.mesh_shape))] if axis_names is None else list(axis_names)
        count, wanted = len(self.device_ids), math.prod(self.mesh_shape)
        require_layout(
            count == wanted,
            f"Number of device IDs ({count}) must match mesh size ({wanted})",
            "name each device once",
        )
        require_layout(
            len(set(self.device_ids.tolist())) == count,
            f"Device IDs must be unique, got {self.device_ids.tolist()}",
            "name each device once",
        )
        require_layout(
            len(names) == len(self.mesh_shape),
            f"Number of axis names ({len(names)}) must match mesh dimensions ({len(self.mesh_shape)})",
            "give each axis a name",
        )
        require_layout(
            len(set(names)) == len(names),
            f"Axis names must be unique, got {names}",
            "give each axis a name of its own",
        )
        self._names = names  # jax's axes have names
        self._made: jax.sharding.Mesh | None = None

    def size(self) -> int:
        """The number of devices."""
        return len(self.device_ids)

    def shape(self) -> OrderedDict[Any, int]:
        """Sizes by axis name, or by the axes' numbers where they have no names."""
        axes = range(len(self.mesh_shape)) if self.axis_names is None else self.axis_names
        return OrderedDict(zip(axes, self.mesh_shape))

    def get_logical_mesh(self) -> np.ndarray:
        """The device ids as a grid."""
        return self.device_ids.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int | None:
        """The number of an axis."""
        return self._names.index(name) if name in self._names else None

    def jax_mesh(self) -> jax.sharding.Mesh:
        """The same as jax's mesh. DM649 when there are not so many devices."""
        if self._made is None:
            found = {d.id: d for d in _devices.local_devices()}
            missing = [i for i in self.device_ids.tolist() if i not in found]
            require_layout(
                not missing,
                f"there are no devices {missing}, only {sorted(found)}",
                "XLA_FLAGS=--xla_force_host_platform_device_count=N",
            )
            grid = np.array([found[i] for i in self.device_ids.tolist()], dtype=object).reshape(
                self.mesh_shape
            )
            self._made = jax.sharding.Mesh(grid, self._names)
        return self._made

    get_jax_mesh = jax_mesh

    def sharding(self, spec: Spec) -> NamedSharding:
        """jax's sharding for a partition spec: an axis (name or number), several, or None for each
        dimension.
        """
        named = [
            tuple(self._name(a) for a in axes) if isinstance(axes, (tuple, list)) else self._name(axes)
            for axes in spec
        ]
        used = [a for axes in named for a in (axes if isinstance(axes, tuple) else (axes,)) if a is not None]
        require_layout(
            len(set(used)) == len(used),
            f"partition spec {tuple(spec)} uses an axis twice",
            "an axis can divide one dimension",
        )
        return NamedSharding(self.jax_mesh(), PartitionSpec(*named))

    def get_op_sharding(self, partition_spec: Spec) -> NamedSharding:
        """Return `sharding(partition_spec)`: jax's sharding takes the place of XLA's `OpSharding`."""
        return self.sharding(partition_spec)

    def _name(self, axis: Any) -> str | None:
        if isinstance(axis, int) and not isinstance(axis, bool) and 0 <= axis < len(self._names):
            return self._names[axis]
        named = axis is None or axis in self._names
        require_layout(named, f"the mesh has no axis {axis!r}", f"axes are {self._names}")
        return axis

    def __str__(self) -> str:
        """A dictionary in words, of which `from_str` makes a mesh."""
        names = {"device_ids": self.device_ids.tolist(), "mesh_shape": self.mesh_shape}
        return str({**names, "axis_names": self.axis_names})

    def __repr__(self) -> str:
        return f"Mesh(**{self})"

    @classmethod
    def from_str(cls, mesh_str: str) -> Mesh | None:
        """The mesh of which this is the `str`; None for other text."""
        try:
            return cls(**ast.literal_eval(mesh_str))
        except (ValueError, SyntaxError, TypeError):
            return None


class HybridMesh(Mesh):
    """A mesh of hosts (`dcn_mesh_shape`) times one inside of each (`ici_mesh_shape`), in the order that jax
    finds best.
    """

    def __init__(
        self,
        *,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> None:
        outer, devices = dcn_mesh_shape or [1] * len(ici_mesh_shape), _devices.local_devices()
        if math.prod(outer) > 1:
            grid = mesh_utils.create_hybrid_device_mesh(ici_mesh_shape, outer, devices)
        else:
            grid = mesh_utils.create_device_mesh(ici_mesh_shape, devices)
        super().__init__(
            [d.id for d in grid.flat], [a * b for a, b in zip(ici_mesh_shape, outer)], axis_names
        )


_global_mesh: list[Mesh] = []


def set_global_mesh(mesh: Mesh | None) -> None:
    """Remember a mesh for `get_global_mesh`."""
    _global_mesh[:] = [] if mesh is None else [mesh]


def get_global_mesh() -> Mesh | None:
    """The mesh of `set_global_mesh`, or None."""
    return _global_mesh[0] if _global_mesh else None


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """All devices in a row."""
    ids = [d.id for d in _devices.local_devices()]
    return Mesh(ids, (len(ids),), None if axis_name is None else (axis_name,))
