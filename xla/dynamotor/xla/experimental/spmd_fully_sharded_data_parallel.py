"""FSDP by sharding: each parameter is divided over the devices of a mesh, and XLA gathers it where it is
used.

>>> mesh = xs.Mesh(range(4), (4,), ("fsdp",))
>>> model = SpmdFullyShardedDataParallel(model.to("xla"), mesh=mesh)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..compat import tree_leaves
from ..distributed.spmd import Mesh, get_global_mesh, mark_sharding
from ..distributed.spmd.marks import mark_of, require_layout
from ..tensor import is_xla


def _over_first(output: Any, mesh: Mesh, axes: Any = "fsdp") -> None:
    """Lay results out as the batch is: their first dimension over the axes."""
    for t in tree_leaves(output):
        if is_xla(t) and t.dim():
            mark_sharding(t, mesh, (axes, *[None] * (t.dim() - 1)))


def _wrap_children(
    module: torch.nn.Module, policy: Callable[..., Any], wrap: Callable[..., torch.nn.Module]
) -> int:
    """Wrap the submodules that a policy chooses, from the inside; gives how many numbers they have."""
    wrapped = 0
    for name, child in module.named_children():
        left = sum([p.numel() for p in child.parameters()])
        if policy(module=child, recurse=True, nonwrapped_numel=left):
            inside = _wrap_children(child, policy, wrap)
            if policy(module=child, recurse=False, nonwrapped_numel=left - inside):
                setattr(module, name, wrap(child))
                inside = left
            wrapped += inside
    return wrapped


class SpmdFullyShardedDataParallel(torch.nn.Module):
    """A module whose parameters are divided over the mesh's axis "fsdp", as are gradients and optimizer state
    made from them. Attributes that it does not have are the wrapped module's.

    module: moved to the device if it is not there. mesh: one with an axis "fsdp"; the global one where not
    given. shard_output: `(output, mesh) -> None` that marks the results; by default their first dimension,
    over `extra_data_axis` and "fsdp". auto_wrap_policy: which submodules are wrapped, too (see
    distributed.fsdp.wrap), so that their results are laid out; auto_wrapper_callable: wraps them in the place
    of this class. A parameter is divided along its longest dimension that the axis divides, and stays whole
    where there is none; one that was marked stays so. DM649, a ValueError, without such a mesh.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        mesh: Mesh | None = None,
        shard_output: Callable[[Any, Mesh], None] | None = None,
        auto_wrap_policy: Callable[..., Any] | None = None,
        auto_wrapper_callable: Callable[..., Any] | None = None,
        extra_data_axis: str | None = None,
    ) -> None:
        super().__init__()
        found: Any = mesh or get_global_mesh()
        require_layout(found is not None, "FSDP without a mesh", "pass mesh=, or set_global_mesh(mesh)")
        for axis in ("fsdp", extra_data_axis):
            known = axis is None or found.get_axis_name_idx(axis) is not None
            require_layout(
                known, f"The provided {axis} axis is not in the mesh: {found}", "give an axis this name"
            )
        axes: Any = "fsdp" if extra_data_axis is None else (extra_data_axis, "fsdp")
        self.mesh = self._mesh = found
        self._shard_output = shard_output or functools.partial(_over_first, axes=axes)
        if auto_wrap_policy is not None:
            wrap = functools.partial(
                auto_wrapper_callable or SpmdFullyShardedDataParallel, mesh=found, shard_output=shard_output
            )
            _wrap_children(module, auto_wrap_policy, wrap)
        self._orig_module = module.to("xla")
        size = found.shape()["fsdp"]
        for p in module.parameters():
            dims = [d for d in sorted(range(p.dim()), key=lambda d: -p.shape[d]) if p.shape[d] % size == 0]
            if mark_of(p) is None:
                mark_sharding(p, found, ["fsdp" if dims[:1] == [d] else None for d in range(p.dim())])

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        return self._orig_module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_module"), name)

    def __getitem__(self, key: int) -> Any:
        return self._orig_module[key]  # type: ignore[index]  # a Sequential, or a list of modules

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._orig_module(*args, **kwargs)
        self._shard_output(output, self.mesh)
        return output
