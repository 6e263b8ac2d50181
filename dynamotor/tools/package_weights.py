"""The tensors of a package: shared by its programs, as safetensors at a place in the file that a page can be
mapped from.

>>> weights = Weights()
>>> weights.add(model.weight), weights.add(model.weight), weights.add(model.bias)
(0, 0, 1)

Tensors that a program writes are the package's state: each loaded package has its own copy of them.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..capture.guards import are_apart
from ..graph.spec import TensorSpec, copy_as
from .entry import refused

FILE = "weights.safetensors"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass
class Weights:
    """The tensors that programs hold: one that several programs hold is there once. state: those that a
    program writes, and their names.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    state: dict[int, str] = field(default_factory=dict)
    _known: dict[Any, int] = field(default_factory=dict)
    _constants: int = 0

    def add(self, tensor: torch.Tensor) -> int:
        """The number of a tensor. Raises UsageError (DM114) for a type that safetensors has not."""
        if tensor.dtype not in _NAMES:
            raise refused(f"a weight of type {tensor.dtype}", "safetensors has no such type")
        key = tensor.data_ptr(), tensor.untyped_storage()._cdata, TensorSpec.of(tensor)
        if key not in self._known:
            self._known[key] = len(self.tensors)
            self.tensors.append(tensor.detach())
        return self._known[key]

    def write(self, k: int, name: str | None) -> None:
        """Note that a program writes a tensor; name: the model's, None where it has none."""
        if k not in self.state:
            self.state[k] = name or f"constant_{k}"

    def stored(self) -> list[torch.Tensor]:
        """The tensors as they are in the file: state in the order of its memory, so that it can be written
        there. Raises UsageError (DM114) for state that is not dense, or shares memory with another tensor.
        """
        for k, name in self.state.items():
            others = [t for i, t in enumerate(self.tensors) if i != k]
            if not are_apart([self.tensors[k], *others], 1):
                raise refused(
                    f"{name}, which it writes, shares memory with another tensor that it holds",
                    "a file holds each tensor by itself",
                    "hold one tensor, and take views of it in the program",
                )
        return [
            _in_memory_order(t, self.state[k]) if k in self.state else t for k, t in enumerate(self.tensors)
        ]


def _in_memory_order(tensor: torch.Tensor, name: str) -> torch.Tensor:
    dims = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride()[d], -tensor.shape[d]))
    found = tensor.permute(dims)
    if not found.is_contiguous():
        raise refused(f"{name}, which it writes, has gaps in its memory", "a file has none", "clone() it")
    return found


def laid_out(tensor: torch.Tensor, spec: TensorSpec, is_state: bool) -> torch.Tensor:
    """A tensor of the file as a program takes it: state is the memory of the file itself."""
    if is_state and tensor.numel() == math.prod(map(int, spec.shape)) and tensor.dtype == spec.dtype:
        return tensor.as_strided(tuple(map(int, spec.shape)), tuple(map(int, spec.stride)))
    if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
        raise ValueError(f"a weight of shape {list(tensor.shape)} in the place of {spec}")
    return tensor if tensor.stride() == spec.stride else copy_as(tensor, [*map(int, spec.stride)])


# -- safetensors ---------------------------------------------------------------------------------------------
def offsets_of(weights: Sequence[torch.Tensor]) -> list[int]:
    """Where each begins. Large elements come first, so that each starts at a multiple of its elements'
    size.
    """
    order = sorted(range(len(weights)), key=lambda k: -weights[k].itemsize)
    starts = itertools.accumulate((weights[k].nbytes for k in order), initial=0)
    found = dict(zip(order, starts, strict=False))
    return [found[k] for k in range(len(weights))]


def write_weights(archive: zipfile.ZipFile, weights: Sequence[torch.Tensor]) -> None:
    offsets = offsets_of(weights)
    order = sorted(range(len(weights)), key=offsets.__getitem__)
    header = {
        str(k): {
            "dtype": _NAMES[weights[k].dtype],
            "shape": list(weights[k].shape),
            "data_offsets": [offsets[k], offsets[k] + weights[k].nbytes],
        }
        for k in order
    }
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    info = zipfile.ZipInfo(FILE)
    pad = -(30 + len(FILE) + 20 + 4) % 64  # the member begins behind its name, zip64's numbers (20) and this
    info.extra = struct.pack("<HH", 0xD935, pad) + bytes(pad)
    with archive.open(info, "w", force_zip64=True) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for k in order:
            file.write(weights[k].contiguous().reshape(-1).view(torch.uint8).numpy().data)


def map_weights(path: Path, info: zipfile.ZipInfo) -> list[torch.Tensor]:
    """The weights, in memory that the system reads from the file as it is touched; writes stay in this
    process.
    """
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        name, extra = struct.unpack("<HH", file.read(30)[26:30])
        start = info.header_offset + 30 + name + extra
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    (length,) = struct.unpack_from("<Q", mapped, start)
    header = json.loads(mapped[start + 8 : start + 8 + length])
    tensors = []
    for k in range(len(header)):
        row = header[str(k)]
        dtype, shape = _DTYPES[row["dtype"]], row["shape"]
        first, last = row["data_offsets"]
        count = math.prod(shape)
        if last - first != count * dtype.itemsize or 8 + length + last > info.file_size or info.compress_type:
            raise ValueError(f"the weight {k} is not whole")
        at = start + 8 + length + first
        flat = (
            torch.frombuffer(mapped, dtype=dtype, count=count, offset=at)
            if count
            else torch.empty(0, dtype=dtype)
        )
        tensors.append(flat.view(shape))
    return tensors
