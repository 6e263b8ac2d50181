"""Copies between tensors and a message of ranks' parts: on a GPU one kernel for all of them, which casts too.

PyTorch's own kernels for this send a table of pointers to the device at each call, and keep half of the
memory's rate where they cast.

>>> layout = Layout(parts, total=bucket.numel, world=2)
>>> copied(layout, True, grads, message)      # False: there is no kernel for it
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base import compat
from ..codegen.gpu_kernels import launch
from ..codegen.triton_kernel import TritonFunction
from ..codegen.triton_ops import POINTER
from ..runtime.triton_build import triton_version

BLOCK = 4096  # elements that one program copies
WARPS = 8
MOST_PARTS = 64  # one launch knows so many pointers; the kernel tests each of them
Copies = Callable[[Sequence[torch.Tensor], torch.Tensor], None]

_COPY = """
@triton.jit
def dm_copy_part(tensor, message, at, packs: tl.constexpr, numel: tl.constexpr, part: tl.constexpr,
                 total: tl.constexpr, ragged: tl.constexpr, block: tl.constexpr):
    blocks: tl.constexpr = (part + block - 1) // block
    rank = (at // blocks).to(tl.int64)
    place = (at % blocks) * block + tl.arange(0, block)
    inside = place < part
    if ragged:
        known = inside & (rank * part + place < numel)
    else:
        known = inside
    if packs:
        value = tl.load(tensor + (rank * part + place), mask=known, other=0)
        tl.store(message + (rank * total + place), value.to(message.dtype.element_ty), mask=inside)
    else:
        value = tl.load(message + (rank * total + place), mask=known, other=0)
        tl.store(tensor + (rank * part + place), value.to(tensor.dtype.element_ty), mask=known)
"""


@dataclass(frozen=True)
class Layout:
    """A message: for each of `world` ranks `total` elements; parts: of each tensor, how many elements it has,
    how many of them belong to one rank (padded), and where they begin in a rank's part.
    """

    parts: tuple[tuple[int, int, int], ...]
    total: int
    world: int
    block: int = BLOCK
    kernels: dict[Any, Copies | None] = field(default_factory=dict, compare=False)

    def function(self, packs: bool, tensors: torch.dtype, message: torch.dtype) -> TritonFunction:
        """The kernel's text: each program copies a block of one rank's part of one tensor."""
        name = "dm_pack_shards" if packs else "dm_unpack_shards"
        pointers = ", ".join(f"t{i}" for i in range(len(self.parts)))
        lines = [_COPY, "@triton.jit", f"def {name}({pointers}, message):", "    pid = tl.program_id(0)"]
        end = 0
        for i, (numel, part, offset) in enumerate(self.parts):
            start, end = end, end + self.world * -(-part // self.block)
            facts = f"{packs}, {numel}, {part}, {self.total}, {numel < self.world * part}, {self.block}"
            lines.append(f"    if (pid >= {start}) & (pid < {end}):")
            lines.append(f"        dm_copy_part(t{i}, message + {offset}, pid - {start}, {facts})")
        signature = (*[POINTER[tensors]] * len(self.parts), POINTER[message])
        return TritonFunction(name, "\n".join(lines) + "\n", signature, end, WARPS)


def copied(layout: Layout, packs: bool, tensors: Sequence[torch.Tensor], message: torch.Tensor) -> bool:
    """Pack tensors into a message, or unpack it, by one kernel; False where there is none."""
    dtype = tensors[0].dtype
    key = packs, dtype, message.dtype
    if key not in layout.kernels:
        layout.kernels[key] = _kernel(layout, *key, message.device)
    kernel = layout.kernels[key]
    if kernel is None or not all(t.dtype is dtype and t.is_contiguous() for t in tensors):
        return False
    kernel(tensors, message)
    return True


@functools.cache  # groups of equal shapes share it
def _kernel(
    layout: Layout, packs: bool, tensors: torch.dtype, message: torch.dtype, device: torch.device
) -> Copies | None:
    if not _has_kernels(device) or len(layout.parts) > MOST_PARTS or not {tensors, message} <= POINTER.keys():
        return None
    kernel = launch(device, layout.function(packs, tensors, message), len(layout.parts) + 1, ())
    if device.type != "cuda":  # Triton's interpreter
        return lambda given, flat: kernel(*given, flat)
    stream, index = compat.current_raw_stream, device.index
    return lambda given, flat: kernel(*given, flat, stream(index))


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None and bool(triton_version())
