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

import ast
import os
from typing import Any

import torch

from ... import device as _devices, placement
from ...compat import tree_flatten, tree_unflatten
from ...jax_call import call_jax
from .device_grid import HybridMesh, Mesh, get_1d_mesh, get_global_mesh, set_global_mesh  # noqa: F401
from .marks import Spec, lay_out, mark, require_layout, spread
from .patched_linear import (  # noqa: F401
    XLAPatchedLinear,
    apply_xla_patch_to_nn_linear,
    xla_patched_nn_linear_forward,
)
from .shard_alike import shard_alike
from .xla_sharded_tensor import (  # noqa: F401
    ShardingType,
    XLAShard,
    XLAShardedTensor,
    unwrap_sharded_tensor,
    wrap_as_sharded_tensor,
    wrap_if_sharded,
)


def use_spmd() -> None:
    """Let `xla:0` stand for all devices of the process: unmarked values are on all of them."""
    if placement.spmd() is None:
        spread(get_1d_mesh().jax_mesh())
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
    return mark(t, mesh, partition_spec)


_library = torch.library.Library("xla", "FRAGMENT")
_library.define(
    "dynamo_mark_sharding(Tensor input, int[] device_ids, int[] mesh_shape, str axis_names, "
    "str partition_spec) -> Tensor"
)


def _mark_by_words(
    t: torch.Tensor, device_ids: list[int], mesh_shape: list[int], axis_names: str, partition_spec: str
) -> torch.Tensor:
    mesh = Mesh(device_ids, mesh_shape, ast.literal_eval(axis_names))
    return mark_sharding(t, mesh, ast.literal_eval(partition_spec))


_library.impl("dynamo_mark_sharding", _mark_by_words, "CompositeImplicitAutograd")


def annotate_custom_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: Spec) -> torch.Tensor:
    """As `mark_sharding`, but data that is on the devices is not moved now: the next graph gives the tensor
    its new layout. The tensor is returned."""
    return mark(t, mesh, partition_spec, move=False)


def shard_as(a: Any, b: Any) -> tuple[Any, Any]:
    """Two nested containers of tensors, laid out alike, however XLA chooses: copies of the two."""
    ours, tree = tree_flatten(a)
    theirs, other = tree_flatten(b)
    require_layout(tree == other, f"{tree} and {other} are different containers", "give two of one structure")
    pairs = [(x, y) if x is None else call_jax(shard_alike, (x, y)) for x, y in zip(ours, theirs)]
    return tree_unflatten([x for x, _ in pairs], tree), tree_unflatten([y for _, y in pairs], tree)


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Put a tensor whole on every device again; it is returned."""
    t.__dict__["_mark"] = None
    home = placement.spmd()
    return t if home is None else lay_out(t, home)


class MarkShardingFunction(torch.autograd.Function):
    """`mark_sharding_with_gradients` as a function of autograd."""

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
    return MarkShardingFunction.apply(t, mesh, partition_spec)


class ShardingSpec:
    """How a loader lays its batches out: `apply` marks those tensors that have as many dimensions as the
    spec.

    minibatch: accepted where the devices divide the batch; DM649, a RuntimeError, where they do not.

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
            require_layout(
                not self.minibatch or t.shape[0] % _devices.device_count() == 0,
                "When minibatch is configured, the per-host batch size must be divisible by local runtime "
                f"device count. Per host input data shape {tuple(t.shape)}",
                "pad the batch, or drop the last one",
            )
            mark_sharding(t, self.mesh, self.partition_spec)
