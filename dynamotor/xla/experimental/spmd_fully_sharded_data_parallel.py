"""FSDP by sharding: each parameter lies in parts on the devices of a mesh, and XLA gathers it where it is
used.

>>> mesh = xs.Mesh(range(4), (4,), ("fsdp",))
>>> model = SpmdFullyShardedDataParallel(model.to("xla"), mesh=mesh)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...base.compat import tree_leaves
from ..distributed.spmd import Mesh, get_global_mesh, mark_sharding
from ..errors import require
from ..tensor import is_xla


def _over_first(output: Any, mesh: Mesh) -> None:
    """Results lie as the batch does: their first dimension over the axis, where it divides."""
    for t in tree_leaves(output):
        if is_xla(t) and t.dim() and t.shape[0] % mesh.shape()["fsdp"] == 0:
            mark_sharding(t, mesh, ("fsdp", *[None] * (t.dim() - 1)))


class SpmdFullyShardedDataParallel(torch.nn.Module):
    """A module whose parameters are divided over the mesh's axis "fsdp", as are gradients and optimizer state
    made from them.

    module: on the device. mesh: one with an axis "fsdp"; the global one where not given. shard_output:
    `(output, mesh) -> None` that marks the results; by default their first dimension. A parameter is divided
    along its longest dimension that the axis divides, and stays whole where there is none. Other options of
    torch_xla's class are accepted. DM649 without such a mesh.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        mesh: Mesh | None = None,
        shard_output: Callable[[Any, Mesh], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        found: Any = mesh or get_global_mesh()
        require(
            found is not None and "fsdp" in found.axis_names,
            "DM649",
            "FSDP needs a mesh with an axis named 'fsdp'",
            cure="pass mesh=, or set_global_mesh(mesh)",
        )
        self.mesh, self._shard_output, self._orig_module = found, shard_output or _over_first, module
        size = found.shape()["fsdp"]
        for p in module.parameters():
            dims = [d for d in sorted(range(p.dim()), key=lambda d: -p.shape[d]) if p.shape[d] % size == 0]
            mark_sharding(p, found, ["fsdp" if dims[:1] == [d] else None for d in range(p.dim())])

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        return self._orig_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._orig_module(*args, **kwargs)
        self._shard_output(output, self.mesh)
        return output
