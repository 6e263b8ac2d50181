"""Scratch memory of call programs on a GPU: blocks of PyTorch's caching allocator, kept apart by device and
stream.

Calls on one stream follow each other on the GPU, so they may share a block although the host runs ahead;
another stream gets other blocks.

>>> arena = arena_of(torch.device("cuda", 0)); block = arena.acquire(1 << 20)
"""

from __future__ import annotations

import torch

from ..base import compat
from ..base.errors import DynamotorError
from .memory import ALIGNMENT, Arena, Block


class OutOfDeviceMemory(DynamotorError, torch.OutOfMemoryError):
    """DM306: a compiled graph found no memory on the GPU. Also what PyTorch raises, so that handlers for that
    catch it.
    """

    def __init__(self, name: str, device: torch.device, why: str) -> None:
        super().__init__(
            "DM306",
            f"out of memory on {device} in {name}",
            why=why,
            cure='a smaller batch; mode="reduce-overhead" keeps results of several calls; '
            "dynamotor.reset() frees kept memory",
        )


class DeviceBlock(Block):
    """Scratch memory on a device."""

    __slots__ = ()

    def __init__(self, nbytes: int, device: torch.device, stream: int) -> None:
        self.stream = stream
        with torch.inference_mode(False):
            self.bytes = torch.empty(max(nbytes, ALIGNMENT), dtype=torch.uint8, device=device)


class DeviceArena(Arena):
    """The blocks of one device that no call uses at the moment, by stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._by_stream: dict[int, list[Block]] = {}

    def stream(self) -> int:
        """The current stream of the device, as a number."""
        return int(compat.current_raw_stream(self.device.index))

    def acquire(self, nbytes: int) -> Block:
        """A block of at least `nbytes` that belongs to the caller until `release`."""
        stream = self.stream()
        idle = self._by_stream.get(stream)
        if idle is None:
            idle = self._by_stream[stream] = []
        try:
            block = idle.pop()
        except IndexError:
            return self._new(nbytes, stream)
        return block if block.bytes.nbytes >= nbytes else self._new(nbytes, stream)

    def _new(self, nbytes: int, stream: int) -> DeviceBlock:
        try:
            return DeviceBlock(nbytes, self.device, stream)
        except torch.OutOfMemoryError:  # what idle blocks hold may be enough
            self.clear()
            torch.cuda.empty_cache()
            return DeviceBlock(nbytes, self.device, stream)

    def release(self, block: Block) -> None:
        """Give a block back to the stream it was taken for."""
        self._by_stream.setdefault(block.stream, []).append(block)

    def idle(self, stream: int) -> tuple[Block, ...]:
        """The blocks that are kept for a stream."""
        return tuple(self._by_stream.get(stream, ()))

    def forget(self, stream: int) -> None:
        """Free the idle blocks of a stream."""
        self._by_stream.pop(stream, None)

    def clear(self) -> None:
        """Free the idle blocks."""
        with self._lock:
            self._by_stream.clear()

    def nbytes(self) -> int:
        """Bytes held in idle blocks."""
        return sum(block.bytes.nbytes for blocks in self._by_stream.values() for block in blocks)


_arenas: dict[torch.device, DeviceArena] = {}


def arena_of(device: torch.device) -> DeviceArena:
    """The arena of a device (with an index)."""
    found = _arenas.get(device)
    if found is None:
        found = _arenas.setdefault(device, DeviceArena(device))
    return found


def release_all() -> None:
    """Free memory kept between calls."""
    for arena in list(_arenas.values()):
        arena.clear()
