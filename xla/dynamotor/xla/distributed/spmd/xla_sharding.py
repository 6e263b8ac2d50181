"""One program on several devices of a process: a mesh of devices, and the layouts of tensors over it. XLA
divides the work accordingly.

>>> xr.use_spmd()
>>> mesh = Mesh(range(4), (2, 2), ("data", "model"))
>>> mark_sharding(x, mesh, ("data", None))          # rows over the first axis, columns on each device
>>> mark_sharding(linear.weight, mesh, ("model", None))

Values are those of the same program on one device. Shardings are jax's NamedShardings; unmarked tensors are
on all devices, or where XLA finds it best.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding, PartitionSpec

from dynamotor.extension_api import user_line, warn_once

from ... import device as _devices, placement, replication
from ...errors import require
from ...ir import record
from ...lowering import op
from ...tensor import XLATensor, is_xla, node_of, write
from ...transfer import data_of

Spec = Sequence[Any]

_library = torch.library.Library("dynamotor_xla", "FRAGMENT")
_library.define("sharding_constraint(Tensor input, int which) -> Tensor")
_library.impl("sharding_constraint", lambda input, which: torch.empty_like(input), "Meta")
_shardings: list[NamedSharding] = []


@op(torch.ops.dynamotor_xla.sharding_constraint)
def _sharding_constraint(input, which):
    return jax.lax.with_sharding_constraint(input, _shardings[which])


def _require(holds: Any, what: str, cure: str) -> None:
    require(holds, "DM649", what, cure=cure)


class Mesh:
    """Devices in a grid. device_ids: numbers of devices, row by row; mesh_shape: sizes of the axes;
    axis_names: theirs.
    """

    def __init__(
        self, device_ids: Sequence[int], mesh_shape: Sequence[int], axis_names: Sequence[str] | None = None
    ) -> None:
        self.device_ids = np.array(list(device_ids), dtype=np.int64)
        self.mesh_shape = tuple(int(n) for n in mesh_shape)
        names = (
            tuple(axis_names)
            if axis_names is not None
            else tuple(f"axis{i}" for i in range(len(self.mesh_shape)))
        )
        _require(
            math.prod(self.mesh_shape) == len(self.device_ids)
            and len(set(self.device_ids.tolist())) == len(self.device_ids),
            f"{len(self.device_ids)} device ids do not fill a mesh of {self.mesh_shape}",
            "name each device of it once",
        )
        _require(
            len(names) == len(self.mesh_shape) and len(set(names)) == len(names),
            f"axis names {names} do not fit a mesh of {self.mesh_shape}",
            "give each axis a name of its own",
        )
        self.axis_names = names
        self._made: jax.sharding.Mesh | None = None

    def size(self) -> int:
        """The number of devices."""
        return len(self.device_ids)

    def shape(self) -> OrderedDict[str, int]:
        """Sizes by axis name."""
        return OrderedDict(zip(self.axis_names, self.mesh_shape))

    def get_logical_mesh(self) -> np.ndarray:
        """The device ids as a grid."""
        return self.device_ids.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int | None:
        """The number of an axis."""
        return self.axis_names.index(name) if name in self.axis_names else None

    def jax_mesh(self) -> jax.sharding.Mesh:
        """The same as jax's mesh. DM649 when there are not so many devices."""
        if self._made is None:
            found = {d.id: d for d in _devices.local_devices()}
            missing = [i for i in self.device_ids.tolist() if i not in found]
            _require(
                not missing,
                f"there are no devices {missing}, only {sorted(found)}",
                "XLA_FLAGS=--xla_force_host_platform_device_count=N",
            )
            grid = np.array([found[i] for i in self.device_ids.tolist()], dtype=object).reshape(
                self.mesh_shape
            )
            self._made = jax.sharding.Mesh(grid, self.axis_names)
        return self._made

    def sharding(self, spec: Spec) -> NamedSharding:
        """jax's sharding for a partition spec: an axis (name or number), several, or None for each
        dimension.
        """
        named = [
            tuple(self._name(a) for a in axes) if isinstance(axes, (tuple, list)) else self._name(axes)
            for axes in spec
        ]
        used = [a for axes in named for a in (axes if isinstance(axes, tuple) else (axes,)) if a is not None]
        _require(
            len(set(used)) == len(used),
            f"partition spec {tuple(spec)} uses an axis twice",
            "an axis can divide one dimension",
        )
        return NamedSharding(self.jax_mesh(), PartitionSpec(*named))

    def _name(self, axis: Any) -> str | None:
        if isinstance(axis, int) and not isinstance(axis, bool) and 0 <= axis < len(self.axis_names):
            return self.axis_names[axis]
        named = axis is None or axis in self.axis_names
        _require(named, f"the mesh has no axis {axis!r}", f"axes are {self.axis_names}")
        return axis

    def __repr__(self) -> str:
        return (
            f"Mesh(device_ids={self.device_ids.tolist()}, mesh_shape={self.mesh_shape}, "
            f"axis_names={self.axis_names})"
        )


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


def set_global_mesh(mesh: Mesh) -> None:
    """Remember a mesh for `get_global_mesh`."""
    _global_mesh[:] = [mesh]


def get_global_mesh() -> Mesh | None:
    """The mesh of `set_global_mesh`, or None."""
    return _global_mesh[0] if _global_mesh else None


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """All devices in a row."""
    ids = [d.id for d in _devices.local_devices()]
    return Mesh(ids, (len(ids),), None if axis_name is None else (axis_name,))


def _spread(mesh: jax.sharding.Mesh) -> None:
    _require(
        replication.size() <= 1, "SPMD mode in several processes", "use one process that drives all devices"
    )
    placement.spread(mesh)


def use_spmd() -> None:
    """Let `xla:0` stand for all devices of the process: unmarked values are on all of them."""
    if placement.spmd() is None:
        _spread(get_1d_mesh().jax_mesh())
    os.environ["XLA_USE_SPMD"] = "1"  # for the processes that this one starts, as torch_xla does


def is_spmd() -> bool:
    """Whether SPMD mode is on: `use_spmd` was called, or something was marked."""
    return placement.spmd() is not None


def mark_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: Spec) -> torch.Tensor:
    """Lay a tensor out over a mesh, in place; the tensor is returned. Its value stays the same.

    partition_spec: for each dimension the axis of the mesh (name or number) that divides it, several of them,
    or None. Data is moved at once; a value that is yet to be computed is laid out so when it is. DM649 when
    the spec does not fit.
    """
    _require(is_xla(t), f"mark_sharding needs an XLA tensor, got {t.device}", 'move it with .to("xla")')
    _require(
        len(partition_spec) == t.dim(),
        f"partition spec {tuple(partition_spec)} for a tensor of {t.dim()} dimensions",
        "name an axis or None for each",
    )
    sharding = _fitting(t, mesh.sharding(partition_spec))
    _spread(mesh.jax_mesh())
    return lay_out(t, sharding)


def lay_out(t: torch.Tensor, sharding: NamedSharding) -> torch.Tensor:
    alias, node = t._alias, node_of(t)  # type: ignore[attr-defined,arg-type]
    if alias.parent is None and node.data is not None:
        node.data = jax.device_put(node.data, sharding)
        return t
    if sharding not in _shardings:
        _shardings.append(sharding)
    # Not an in-place op: the value is the same, and autograd need not know.
    write(
        alias, record(torch.ops.dynamotor_xla.sharding_constraint.default, (node, _shardings.index(sharding)))
    )
    return t


def _fitting(t: torch.Tensor, sharding: NamedSharding) -> NamedSharding:
    """The sharding, without the axes of those dimensions that the mesh does not divide: jax's arrays have
    equal parts (GSPMD pads inside of a program). Such a dimension stays whole on each device, which a warning
    says."""
    mesh, sizes = sharding.mesh, tuple(t.shape)
    spec = list(sharding.spec)
    for dim, axes in enumerate(spec):
        names = axes if isinstance(axes, tuple) else (axes,) if axes is not None else ()
        parts = math.prod(mesh.shape[name] for name in names)
        if sizes[dim] % parts:
            spec[dim] = None
            warn_once(
                f"xla.sharding.{sizes[dim]}.{parts}",
                f"[DM649] a dimension of {sizes[dim]} is not divisible by {parts} devices: it stays whole on "
                f"each device. Pad it to a multiple of {parts} to divide it\n  at {user_line()}",
            )
    return sharding if spec == list(sharding.spec) else NamedSharding(mesh, PartitionSpec(*spec))


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Put a tensor whole on every device again; it is returned."""
    home = placement.spmd()
    return t if home is None else lay_out(t, home)


class _MarkedWithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, mesh: Mesh, partition_spec: Spec) -> torch.Tensor:
        ctx.layout = mesh, partition_spec
        return mark_sharding(t.clone(), mesh, partition_spec)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return mark_sharding(gradient.clone(), *ctx.layout), None, None


def mark_sharding_with_gradients(t: torch.Tensor, mesh: Mesh, partition_spec: Spec) -> torch.Tensor:
    """A copy of a tensor that is laid out as `mark_sharding` says, as is the gradient that comes back through
    it.
    """
    return _MarkedWithGradients.apply(t, mesh, partition_spec)


def visualize_tensor_sharding(t: torch.Tensor, **options: Any) -> None:
    """Print which device has which part of a tensor of one or two dimensions
    (jax.debug.visualize_array_sharding).
    """
    jax.debug.visualize_array_sharding(data_of(t), **options)  # type: ignore[arg-type]


def visualize_sharding(sharding: str, **options: Any) -> None:
    """Print which device has which part of a tensor of this layout, in XLA's words: "{devices=[2,2]<=[4]}",
    "{devices=[4,1]0,2,1,3}", "{replicated}" (jax.debug.visualize_sharding).
    """
    found = re.match(r"\{devices=\[([\d,]+)\](?:<=\[[\d,]+\]|([\d,]+))", sharding)
    grid = [int(n) for n in found[1].split(",")] if found else [_devices.device_count()]
    ids = [int(n) for n in found[2].split(",")] if found and found[2] else range(math.prod(grid))
    names = [f"axis{i}" for i in range(len(grid))]
    mesh = Mesh(ids, grid, names)
    divided = names[: len(names) - ("last_tile_dim_replicate" in sharding)] if found else []
    shape = [mesh.shape()[name] for name in divided] or [1]
    jax.debug.visualize_sharding(shape, mesh.sharding(divided), **options)


ShardingType = StrEnum("ShardingType", {"REPLICATED": "REPLICATED", "TILED": "TILED", "PARTIAL": "PARTIAL"})


class ShardingSpec:
    """How a loader lays its batches out: `apply` marks those tensors that have as many dimensions as the
    spec.

    >>> MpDeviceLoader(loader, device, input_sharding=ShardingSpec(mesh, ("data", None)))
    """

    def __init__(self, mesh: Mesh, partition_spec: Spec, minibatch: bool = False) -> None:
        self.mesh, self.partition_spec, self.minibatch = mesh, tuple(partition_spec), minibatch

    def can_apply(self, t: torch.Tensor) -> bool:
        """Whether a tensor has as many dimensions as the spec."""
        return t.dim() == len(self.partition_spec)

    def apply(self, t: torch.Tensor) -> None:
        """Mark a tensor, if it fits."""
        if self.can_apply(t):
            mark_sharding(t, self.mesh, self.partition_spec)


class XLAShard:
    """The part of a tensor on one device. data: a CPU tensor; indices: which part of the whole; shard_device:
    where it lies.
    """

    def __init__(self, data: torch.Tensor, indices: tuple[slice, ...], shard_device: str) -> None:
        self.data, self.indices, self.shard_device = data, indices, shard_device


class XLAShardedTensor:
    """Facts about the layout of a tensor over the devices.

    >>> XLAShardedTensor(x).sharding_spec
    "PartitionSpec('data', None) over {'data': 2, 'model': 2}"
    """

    def __init__(self, t: torch.Tensor) -> None:
        _require(
            isinstance(t, XLATensor), f"{type(t).__name__} is not an XLA tensor", 'move it with .to("xla")'
        )
        self.global_tensor: Any = t

    @property
    def _sharding(self) -> Any:
        return data_of(self.global_tensor).sharding

    @property
    def partition_spec(self) -> tuple[Any, ...]:
        """The axis or axes of each dimension, None for whole ones."""
        spec = tuple(self._sharding.spec) if isinstance(self._sharding, NamedSharding) else ()
        return spec + (None,) * (self.global_tensor.dim() - len(spec))

    @property
    def sharding_spec(self) -> str:
        """The same in words; "" for a tensor on one device."""
        sharding = self._sharding
        return (
            f"{sharding.spec} over {dict(sharding.mesh.shape)}" if isinstance(sharding, NamedSharding) else ""
        )

    @property
    def sharding_type(self) -> ShardingType:
        """REPLICATED, TILED or PARTIAL (divided along some axes and repeated along others), as a
        `ShardingType`.
        """
        sharding, shape = self._sharding, tuple(self.global_tensor.shape)
        parts = math.prod(a // b for a, b in zip(shape, sharding.shard_shape(shape)) if b)
        name = "REPLICATED" if parts == 1 else "TILED" if parts == len(sharding.device_set) else "PARTIAL"
        return ShardingType(name)

    @property
    def hlo_sharding(self) -> str:
        """Its layout, in XLA's words: "{devices=[4,1]<=[4]}", "{replicated}"."""
        return str(self._sharding._to_xla_hlo_sharding(self.global_tensor.dim()))

    @property
    def local_shards(self) -> list[XLAShard]:
        """The parts on the devices of this process."""
        whole = self.global_tensor.cpu()
        return [
            XLAShard(whole[shard.index], shard.index, str(shard.device))
            for shard in data_of(self.global_tensor).addressable_shards
        ]


def _fact(name: str) -> property:
    return property(lambda t: getattr(XLAShardedTensor(t), name), doc=getattr(XLAShardedTensor, name).__doc__)


# Programs for torch_xla ask tensors themselves, whose XLAShardedTensor is a tensor.
for _name in ("sharding_spec", "sharding_type", "hlo_sharding", "local_shards"):
    setattr(XLATensor, _name, _fact(_name))
XLATensor.global_tensor = property(lambda t: t, doc="The tensor itself.")  # type: ignore[attr-defined]


def wrap_as_sharded_tensor(
    t: Any, mesh: Mesh | None = None, partition_spec: Spec | None = None
) -> XLAShardedTensor:
    """An XLAShardedTensor around a tensor, which is marked first where a mesh is given."""
    t = unwrap_sharded_tensor(t)
    return XLAShardedTensor(t if mesh is None else mark_sharding(t, mesh, partition_spec or [None] * t.dim()))


def unwrap_sharded_tensor(t: Any) -> Any:
    """The tensor in an XLAShardedTensor; anything else as it is."""
    return t.global_tensor if isinstance(t, XLAShardedTensor) else t


def wrap_if_sharded(t: Any) -> Any:
    """An XLAShardedTensor around a tensor that is divided over devices; anything else as it is."""
    if isinstance(t, XLATensor) and XLAShardedTensor(t).sharding_type != "REPLICATED":
        return XLAShardedTensor(t)
    return t


class XLAPatchedLinear:
    """`torch.nn.functional.linear` without folding the batch dimensions into one, which XLA could not keep
    divided over a mesh: `XLAPatchedLinear.apply(input, weight, bias)`."""

    @staticmethod
    def apply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """input @ weight.T + bias."""
        if torch.is_autocast_enabled("xla"):
            dtype = torch.get_autocast_dtype("xla")
            input, weight = input.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        batch = "abcdefghijkl"[: input.dim() - 1]
        product = torch.ops.dynamotor_xla.contraction(input, weight, f"{batch}n,mn->{batch}m")
        return product if bias is None else product + bias


def xla_patched_nn_linear_forward(m: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The forward pass of an `nn.Linear`, its batch dimensions not folded into one."""
    return XLAPatchedLinear.apply(input, m.weight, m.bias)


def apply_xla_patch_to_nn_linear(
    module: torch.nn.Module,
    patched_function: Callable[[torch.nn.Linear, torch.Tensor], torch.Tensor] = xla_patched_nn_linear_forward,
) -> torch.nn.Module:
    """Let `patched_function(layer, input)` be the forward pass of each `nn.Linear` of a module; the module is
    returned."""
    for part in module.modules():
        if isinstance(part, torch.nn.Linear):
            part.__dict__["forward"] = functools.partial(patched_function, part)
    return module
