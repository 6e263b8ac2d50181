"""Sharded checkpoints through `torch.distributed.checkpoint`: each part of a tensor is written from its
place, any mesh can read it.

>>> torch.distributed.checkpoint.save(state, checkpoint_id=folder, planner=SPMDSavePlanner())
>>> # in place, laid out as it was
>>> torch.distributed.checkpoint.load(state, checkpoint_id=folder, planner=SPMDLoadPlanner())
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ...compat import tree_map
from ...distributed.spmd.xla_sharding import lay_out
from ...tensor import is_xla
from ...transfer import data_of, download


def _parts(t: Any) -> dict[torch.Size, tuple[int, Any]]:
    """The different parts of a tensor in this process, by where they begin: (the number of a device that has
    it, the data)."""
    found: dict[torch.Size, tuple[int, Any]] = {}
    for number, shard in enumerate(sorted(data_of(t).addressable_shards, key=lambda shard: shard.device.id)):
        begin = torch.Size([at.indices(n)[0] for at, n in zip(shard.index, t.shape)])
        found.setdefault(begin, (number, shard.data))
    return found


def _is_divided(t: Any) -> bool:
    return is_xla(t) and len(_parts(t)) > 1


class _Sorted:
    """The state dict in two, as torch_xla's planners have it."""

    state_dict: dict[str, Any]

    @property
    def sharded_state_dict(self) -> dict[str, Any]:
        """Tensors that are divided over devices, by their flat names."""
        return {name: t for name, t in self._whole().items() if _is_divided(t)}

    @property
    def unsharded_state_dict(self) -> dict[str, Any]:
        """All else."""
        return {name: t for name, t in self._whole().items() if not _is_divided(t)}

    def _whole(self) -> dict[str, Any]:
        return self.state_dict


class SPMDSavePlanner(_Sorted, DefaultSavePlanner):
    """Writes each part of a tensor that is divided over devices by itself."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[part for item in plan.items for part in self._divided(item)])
        return self.plan

    def _divided(self, item: WriteItem) -> list[WriteItem]:
        t = self.state_dict[item.index.fqn]
        if item.tensor_data is None or not _is_divided(t):
            return [item]
        chunks = [
            (number, ChunkStorageMetadata(at, torch.Size(part.shape)))
            for at, (number, part) in _parts(t).items()
        ]
        return [
            replace(
                item,
                index=MetadataIndex(item.index.fqn, chunk.offsets, number),
                type=WriteItemType.SHARD,
                tensor_data=replace(item.tensor_data, chunk=chunk),
            )
            for number, chunk in chunks
        ]

    def lookup_object(self, index: MetadataIndex) -> Any:
        t = self.state_dict[index.fqn]
        return download(_parts(t)[index.offset][1], t.dtype) if is_xla(t) and index.offset is not None else t


class SPMDLoadPlanner(_Sorted, DefaultLoadPlanner):
    """Reads on the CPU, each part of a divided tensor by itself; a tensor that is complete goes to its
    devices, divided as it was."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._targets = {name: t for name, t in self.state_dict.items() if is_xla(t)}
        self.state_dict |= {
            name: torch.empty(t.shape, dtype=t.dtype, device="cpu") for name, t in self._targets.items()
        }

    def _whole(self) -> dict[str, Any]:
        return {**self.state_dict, **self._targets}

    def create_local_plan(self) -> LoadPlan:
        plan, divided = super().create_local_plan(), self.sharded_state_dict
        items = [item for item in plan.items if item.dest_index.fqn not in divided]
        for name, t in divided.items():
            saved: Any = self.metadata.state_dict_metadata[name]
            chunks = [ChunkStorageMetadata(at, torch.Size(part.shape)) for at, (_, part) in _parts(t).items()]
            items += create_read_items_for_chunk_list(name, saved, chunks)
        self._left = Counter([item.dest_index.fqn for item in items])
        return replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        whole = self.state_dict[index.fqn]
        if index.offset is None or index.fqn not in self._targets:
            return super().lookup_tensor(index)
        shape = _parts(self._targets[index.fqn])[index.offset][1].shape
        return whole[tuple(slice(at, at + size) for at, size in zip(index.offset, shape))]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        name = read_item.dest_index.fqn
        self._left[name] -= 1
        if name in self._targets and not self._left[name]:
            target: Any = self._targets[name].detach()
            sharding: Any = data_of(target).sharding
            lay_out(target.copy_(self.state_dict[name]), sharding)


class CheckpointManager:
    """Checkpoints by step in the folders of `path` (local, or what fsspec knows: "gs://...").

    save_interval: `save` and `save_async` do something at multiples of it. max_to_keep: those written first
    are removed beyond so many (0: none). Other options of torch_xla's class are accepted; a checkpoint at
    preemption is the program's own affair.
    """

    def __init__(self, path: str, save_interval: int, max_to_keep: int = 0, **options: Any) -> None:
        self.path, self.save_interval, self.max_to_keep = str(path).rstrip("/"), save_interval, max_to_keep
        self._thread = ThreadPoolExecutor(1)
        self._pending: list[Any] = []

    def all_steps(self) -> list[int]:
        """The steps of which there is a complete checkpoint, ascending."""
        fs, root = url_to_fs(self.path)
        return sorted([int(found.split("/")[-2]) for found in fs.glob(f"{root}/*/.metadata")])

    def should_save(self, step: int) -> bool:
        """Whether `save` would save at this step."""
        return step % self.save_interval == 0

    def save(self, step: int, state_dict: Any, force: bool = False) -> bool:
        """Save, if it is a step for it; whether it was."""
        if not (force or self.should_save(step)):
            return False
        self._save(step, state_dict)
        return True

    def _save(self, step: int, state_dict: Any) -> None:
        dcp.save(state_dict, checkpoint_id=f"{self.path}/{step}", planner=SPMDSavePlanner())
        fs, root = url_to_fs(self.path)
        ages = sorted(self.all_steps(), key=lambda saved: fs.modified(f"{root}/{saved}/.metadata"))
        for old in ages[: -self.max_to_keep or None] if self.max_to_keep else ():
            fs.rm(f"{root}/{old}", recursive=True)

    def save_async(self, step: int, state_dict: Any, force: bool = False) -> bool:
        """`save` on a thread, of a copy on the CPU that is made at once."""
        if not (force or self.should_save(step)):
            return False
        copied = tree_map(lambda leaf: leaf.cpu() if is_xla(leaf) else leaf, state_dict)
        self._pending.append(self._thread.submit(self._save, step, copied))
        return True

    def join(self) -> None:
        """Wait for the end of `save_async`, and raise its exception."""
        while self._pending:
            self._pending.pop(0).result()

    def restore(self, step: int, state_dict: Any) -> None:
        """Load a checkpoint into the tensors of a state dict, in place."""
        dcp.load(state_dict, checkpoint_id=f"{self.path}/{step}", planner=SPMDLoadPlanner())


def prime_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make the state that an optimizer makes at its first step, without changing parameters; it is
    returned.
    """
    fresh = [p for group in optimizer.param_groups for p in group["params"] if not optimizer.state[p]]
    saved = [(p, p.detach().clone(), p.grad) for p in fresh]
    rates = [group["lr"] for group in optimizer.param_groups]
    for p, _, _ in saved:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    with torch.no_grad():
        for p, value, grad in saved:
            p.copy_(value)
            p.grad = grad
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
    return optimizer
