"""The layouts of tensors over a mesh, and their marks: the part of SPMD below meshes and
loaders.

A tensor's mark is the mesh and the spec that `mark_sharding` was given; its layout is the sharding of its
data, which XLA chooses where nothing was said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from dynamotor.extension_api import XlaError, user_line, warn_once

from ... import placement, replication
from ...ir import Node, record
from ...lowering import op
from ...tensor import XLATensor, is_xla, node_of, write
from ...transfer import data_of, download, upload

Spec = Sequence[Any]

_library = torch.library.Library("dynamotor_xla", "FRAGMENT")
_library.define("sharding_constraint(Tensor input, int which) -> Tensor")
_library.impl("sharding_constraint", lambda input, which: torch.empty_like(input), "Meta")
# Where a graph is captured; the gradient is laid out as XLA finds best.
torch.library.register_autograd("dynamotor_xla::sharding_constraint", lambda ctx, grad: (grad, None))
_constraint = torch.ops.dynamotor_xla.sharding_constraint.default
_shardings: list[NamedSharding] = []


@op(torch.ops.dynamotor_xla.sharding_constraint)
def _sharding_constraint(input, which):
    return jax.lax.with_sharding_constraint(input, _shardings[which])


class LayoutError(XlaError, AssertionError, ValueError):
    """DM649, of the types that programs for torch_xla expect, which asserts or raises a ValueError."""


class UnsupportedLayout(LayoutError, NotImplementedError):
    """DM649 for a placement that a tensor over a mesh cannot have."""


def require_layout(holds: Any, what: str, cure: str, kind: type[LayoutError] = LayoutError) -> None:
    """Raise DM649 unless it holds."""
    if not holds:
        raise kind("DM649", what, cure=cure, where=user_line())


class Mark:
    """The words of the program on a tensor's layout: a mesh (`xla_sharding.Mesh`) and a partition spec."""

    __slots__ = ("mesh", "partition_spec", "dtensor_spec")

    def __init__(self, mesh: Any, partition_spec: Spec) -> None:
        self.mesh, self.partition_spec = mesh, tuple(partition_spec)
        self.dtensor_spec: Any = None  # made when it is first asked for


def mark_of(t: torch.Tensor) -> Mark | None:
    """The mark of a tensor, or None."""
    return t.__dict__.get("_mark")


def spread(mesh: Any) -> None:
    """Turn SPMD mode on over a mesh of jax's."""
    require_layout(
        replication.size() <= 1, "SPMD mode in several processes", "use one process that drives all devices"
    )
    placement.spread(mesh)


def mark(t: torch.Tensor, mesh: Any, partition_spec: Spec, move: bool = True) -> torch.Tensor:
    """Give a tensor a layout over a mesh, and remember the mark. Without `move`, data that is on the devices
    stays where it is until the graph runs. Of a tensor that stands for one while a graph is captured, a copy
    with this layout is returned."""
    require_layout(
        t.device.type == "xla",
        f"mark_sharding needs an XLA tensor, got {t.device}",
        'move it with .to("xla")',
    )
    require_layout(
        len(partition_spec) == t.dim(),
        f"partition spec {tuple(partition_spec)} for a tensor of {t.dim()} dimensions",
        "name an axis or None for each",
    )
    sharding = fitting(t.shape, mesh.sharding(partition_spec))
    spread(mesh.jax_mesh())
    if not is_xla(t):
        return _constraint(t, _number(sharding))
    kept = [axes if left is not None else None for axes, left in zip(partition_spec, sharding.spec)]
    t.__dict__["_mark"] = Mark(mesh, kept)
    return lay_out(t, sharding) if move else _constrain(t, sharding)


def lay_out(t: torch.Tensor, sharding: NamedSharding) -> torch.Tensor:
    """Give a tensor a layout, in place; the tensor is returned. A value that is yet to be computed is laid
    out when it is."""
    assert is_xla(t)
    alias, node = t._alias, node_of(t)
    if alias.parent is not None or node.data is None:
        return _constrain(t, sharding)
    data = jax.device_put(node.data, sharding)
    if node.owners > 1:  # a copy shares its node, and keeps its layout
        write(alias, alias.lane.leaf(data, alias.meta))
    else:
        node.data = data
    return t


def _number(sharding: NamedSharding) -> int:
    if sharding not in _shardings:
        _shardings.append(sharding)
    return _shardings.index(sharding)


def _constrain(t: torch.Tensor, sharding: NamedSharding) -> torch.Tensor:
    # Not an in-place op: the value is the same, and autograd need not know.
    assert is_xla(t)
    write(t._alias, record(_constraint, (node_of(t), _number(sharding))))
    return t


def fitting(shape: Sequence[int], sharding: NamedSharding) -> NamedSharding:
    """The sharding, without the axes of those dimensions that the mesh does not divide: jax's arrays have
    equal parts (GSPMD pads inside of a program). Such a dimension stays whole on each device, which a warning
    says."""
    spec = list(sharding.spec)[: len(shape)]
    for dim, (size, parts) in enumerate(zip(shape, counts(sharding, len(shape)))):
        if size % parts:
            spec[dim] = None
            warn_once(
                f"xla.sharding.{size}.{parts}",
                f"[DM649] a dimension of {size} is not divisible by {parts} devices: it stays whole on "
                f"each device. Pad it to a multiple of {parts} to divide it\n  at {user_line()}",
            )
    same = spec == list(sharding.spec)
    return sharding if same else NamedSharding(sharding.mesh, PartitionSpec(*spec))


def counts(sharding: NamedSharding, dims: int) -> list[int]:
    """Into how many parts each dimension is divided."""
    spec = (*sharding.spec, *[None] * (dims - len(sharding.spec)))
    axes = [a if isinstance(a, tuple) else () if a is None else (a,) for a in spec]
    return [math.prod(sharding.mesh.shape[name] for name in names) for names in axes]


def _pending(node: Node) -> NamedSharding | None:
    """How a value that is yet to be computed was said to be laid out."""
    instruction = node.instruction
    if instruction is None or instruction.func is not _constraint:
        return None
    return _shardings[instruction.template[0][1]]


def layout_of(t: torch.Tensor) -> NamedSharding | None:
    """The sharding of a tensor over the mesh. None outside of SPMD mode, and for one that was not marked and
    is yet to be computed, or whose mark was taken away: XLA will choose it."""
    if not is_xla(t):
        return None
    node = node_of(t)
    if "_mark" in t.__dict__ and mark_of(t) is None:
        return None  # cleared
    if node.data is None and (said := _pending(node)) is not None:
        return said
    if node.data is None and mark_of(t) is None:
        return None
    sharding = data_of(t).sharding
    return sharding if isinstance(sharding, NamedSharding) else None


def words(sharding: NamedSharding | None, dims: int) -> str:
    """A layout in XLA's words, which list the devices: "{devices=[2,2]0,1,2,3}", "{replicated}"; "" for
    None."""
    if sharding is None:
        return ""
    said = sharding._to_xla_hlo_sharding(dims)
    if said.is_replicated():
        return "{replicated}"
    devices = list(sharding.mesh.devices.flat)
    ids = ",".join(str(devices[i].id) for i in said.tile_assignment_devices())
    rest = " last_tile_dim_replicate" if said.replicate_on_last_tile_dim() else ""
    return f"{{devices=[{','.join(map(str, said.tile_assignment_dimensions()))}]{ids}{rest}}}"


def parts_of(t: XLATensor) -> list[tuple[torch.Tensor, Any, str, int]]:
    """(copy on the CPU, index, device, number of the replica) of each part on this process's devices, in
    their order."""
    return [
        (
            download(shard.data, t.dtype),
            ...
            if shard.data.shape == tuple(t.shape)
            else [slice(*at.indices(size)) for at, size in zip(shard.index, t.shape)],
            str(shard.device),
            shard.replica_id,
        )
        for shard in sorted(data_of(t).addressable_shards, key=lambda shard: shard.device.id)
    ]


def whole_of(
    parts: Sequence[torch.Tensor], sharding: NamedSharding, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """The CPU tensor of which these are the parts, one a device, in the devices' order; padding behind
    `shape` is cut off. DM649 where they do not fit."""
    devices = sorted(sharding.mesh.devices.flat, key=lambda device: device.id)
    part = tuple(parts[0].shape)
    numbers = counts(sharding, len(part))
    full = tuple(n * size for n, size in zip(numbers, part))
    shape = full if shape is None else tuple(shape)
    fits = len(shape) == len(part) and all(-(-size // n) == p for size, n, p in zip(shape, numbers, part))
    require_layout(
        len(parts) == len(devices) and all(tuple(p.shape) == part for p in parts) and fits,
        f"parts of {[tuple(p.shape) for p in parts]} are no tensor of {shape} on {len(devices)} devices",
        "give one part a device, as `local_shards` does",
    )
    whole = torch.empty(full, dtype=parts[0].dtype)
    for device, index in sharding.devices_indices_map(full).items():
        whole[index] = parts[devices.index(device)]
    return whole[tuple(slice(size) for size in shape)]


def put(t: XLATensor, value: torch.Tensor, sharding: NamedSharding) -> None:
    """Write a CPU tensor into a tensor, laid out so."""
    alias = t._alias
    write(alias, alias.lane.leaf(upload(value, fitting(value.shape, sharding)), alias.meta))


def from_cpu_shards(
    parts: Sequence[torch.Tensor], sharding: NamedSharding, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """The xla tensor of which these are the parts, laid out so."""
    whole = whole_of(parts, sharding, shape)
    spread(sharding.mesh)
    return lay_out(whole.to("xla"), fitting(whole.shape, sharding))
