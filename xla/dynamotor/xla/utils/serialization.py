"""Checkpoints that stream one tensor at a time through the host's memory: `path` has the structure,
`path.tensors/` the values.

>>> import dynamotor.xla.utils.serialization as xser
>>> xser.save(model.state_dict(), path)
>>> model.load_state_dict(xser.load(path))
"""

from __future__ import annotations

import os
import shutil
import uuid
from typing import Any

import torch

from ..core import xla_model as xm
from ..sync import sync
from ..tensor import is_xla
from ..transfer import to_cpu
from .checked_load import checked_load, damaged, with_checksums
from .utils import for_each_instance_rewrite

_FORMAT = "dynamotor_xser"


class TensorReference:
    """Stands in the saved structure for the tensor in file `tensor_{tid}.pt`."""

    def __init__(self, tid: int) -> None:
        self.tid = tid


def save(data: Any, path: str, master_only: bool = True, global_master: bool = False) -> None:
    """Save nested Python containers with tensors in them; XLA tensors are copied to the CPU one at a time.

    data: lists, tuples, sets, dicts in any nesting. A tensor that occurs twice is saved once; views are saved
    as tensors of their own. path: the checkpoint's file; its tensors go to the folder `path + ".tensors"`.
    Until the new checkpoint is complete the old one at the same path stays whole. master_only: only the
    master ordinal writes; with False, each ordinal must be given its own path. global_master: with
    master_only, only ordinal 0 of all hosts writes, instead of one master a host.
    """
    sync()  # all replicas, also those that do not write: pending work may hold collectives
    if master_only and not xm.is_master_ordinal(local=not global_master):
        return
    path = os.fspath(path)
    save_id = uuid.uuid4().hex[:12]
    folder = os.path.join(_folder(path), save_id)
    os.makedirs(folder)
    references: dict[int, TensorReference] = {}

    def write(tensor: torch.Tensor) -> TensorReference:
        reference = references.get(id(tensor))
        if reference is None:
            reference = references[id(tensor)] = TensorReference(len(references))
            value = to_cpu(tensor.detach()) if is_xla(tensor) else tensor.detach().cpu().clone()
            torch.save(value.requires_grad_(tensor.requires_grad), _file(folder, reference))
        return reference

    with with_checksums():
        structure = for_each_instance_rewrite(data, torch.is_tensor, write)
        temporary = os.path.join(folder, "structure.pt")
        torch.save({_FORMAT: 1, "id": save_id, "tensors": len(references), "data": structure}, temporary)
    os.replace(temporary, path)
    for other in os.listdir(_folder(path)):
        if other != save_id:
            _remove(os.path.join(_folder(path), other))


def load(path: str, weights_only: bool = True) -> Any:
    """Load what `save` wrote to `path`: the same structure with CPU tensors.

    weights_only: unpickle nothing but tensors, numbers, strings and containers (DM655 otherwise); pass False
    for a file you trust. DM654 where a file is damaged, cut off or missing. Checkpoints of torch_xla's own
    `save` can be read too.
    """
    path = os.fspath(path)
    allowed = [TensorReference, (TensorReference, "torch_xla.utils.serialization.TensorReference")]
    saved = checked_load(path, "checkpoint", weights_only, allowed)
    if isinstance(saved, dict) and _FORMAT in saved:
        folder, saved = os.path.join(_folder(path), saved["id"]), saved["data"]
    else:
        folder = _folder(path)
    loaded: dict[int, torch.Tensor] = {}

    def read(reference: TensorReference) -> torch.Tensor:
        if reference.tid not in loaded:
            file = _file(folder, reference)
            if not os.path.exists(file):
                raise damaged(
                    f"the checkpoint {path}",
                    f"its file {file} is missing (copy the folder {_folder(path)} with it)",
                )
            loaded[reference.tid] = checked_load(file, "checkpoint's tensor", weights_only)
        return loaded[reference.tid]

    return for_each_instance_rewrite(saved, lambda v: isinstance(v, TensorReference), read)


def _folder(path: str) -> str:
    return path + ".tensors"


def _file(folder: str, reference: TensorReference) -> str:
    return os.path.join(folder, f"tensor_{reference.tid}.pt")


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.remove(path)
