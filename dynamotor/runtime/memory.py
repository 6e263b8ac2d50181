"""Memory of call programs: a plan of offsets, a scratch block kept between calls, and recycled result
storages.

Fresh buffers of 10-100 MB cost a page fault every 4 kB, which is what makes small CPU kernels slow.
Intermediates therefore live in one block that all programs share (only one runs at a time on a thread; a
second thread gets a second block), and results come from a pool that takes a storage back when only the
pool holds it.

>>> offsets, size = plan_offsets([Lifetime("a", 100, 0, 1), Lifetime("b", 100, 2, 3)])
>>> offsets, size
({'a': 0, 'b': 0}, 128)
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import _C
from ..base import compat
from ..base.errors import InternalError
from ..graph.sizes import Size, divides, equal, hint, known

ALIGNMENT = 64
# Below this the C allocator recycles faster than we could (1 µs), and touches no page for the first time:
# glibc maps only larger memory anew.
SMALL = 128 * 1024
_PROBES = 8
_KINDS = 16  # sizes of results for which storages are kept, where they differ between calls
GUARD = ALIGNMENT  # bytes behind each planned buffer that must stay unwritten, in check mode

reinterpret: Callable[..., torch.Tensor] = compat.reinterpret_tensor  # not in the stub
_use_count = compat.storage_use_count
new_tensor: Callable[..., torch.Tensor] = compat.empty_strided_cpu  # not in the stub


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fresh memory filled with ones: NaN, -1, or a bool that is neither 0 nor 1."""
    if tensor.numel():
        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).fill_(0xFF)
    return tensor


_HUGE = 2 << 20  # bytes of a huge page on x86-64
_MADV_HUGEPAGE = 14
_madvise = getattr(ctypes.CDLL(None), "madvise", None)
# Processor seconds for the first touch of a huge page: 0.1 ms where the memory is there, and 0.7 ms of small
# pages. A virtual machine whose host has taken its free memory back pays 2 ms and more, once for each.
_QUICK = 0.7e-3
_huge_pages_are_slow = False


def ask_for_huge_pages(tensor: torch.Tensor) -> None:
    """Let the kernel back the inside of a fresh large tensor with huge pages: fewer faults and TLB misses.
    Only a hint, and not given again once such a page was slow to come.
    """
    global _huge_pages_are_slow
    start = -(-tensor.data_ptr() // _HUGE) * _HUGE
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE
    if _madvise is None or end <= start or _huge_pages_are_slow:
        return
    for first, last in ((start, start + _HUGE), (start + _HUGE, end)):
        if first < last and not _huge_pages_are_slow:
            _madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_HUGEPAGE)
            began = time.thread_time()
            ctypes.memset(first, 0, 1)
            _huge_pages_are_slow = time.thread_time() - began > _QUICK


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of `nbytes` that is first written in step `start` and last touched in step `end` (both
    inclusive).
    """

    name: str
    nbytes: int | Size
    start: int
    end: int


def _aligned(nbytes: int | Size) -> int | Size:
    if type(nbytes) is Size:
        return nbytes if divides(ALIGNMENT, nbytes) else (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return max(ALIGNMENT, (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)


class _FreeList:
    """Free ranges of an address space that grows at its end; best fit, neighbours merge."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []  # (offset, size), sorted by offset
        self.top = 0

    def take(self, size: int) -> int:
        best = min(((s, o) for o, s in self.ranges if s >= size), default=None)
        if best is None:
            if self.ranges and sum(self.ranges[-1]) == self.top:
                offset, _ = self.ranges.pop()
                self.top = offset + size
                return offset
            offset, self.top = self.top, self.top + size
            return offset
        found, offset = best
        self.ranges.remove((offset, found))
        if found > size:
            insort(self.ranges, (offset + size, found - size))
        return offset

    def give(self, offset: int, size: int) -> None:
        insort(self.ranges, (offset, size))
        at = self.ranges.index((offset, size))
        if at + 1 < len(self.ranges) and offset + size == self.ranges[at + 1][0]:
            size += self.ranges.pop(at + 1)[1]
            self.ranges[at] = (offset, size)
        if at > 0 and sum(self.ranges[at - 1]) == offset:
            before = self.ranges[at - 1]
            self.ranges[at - 1 : at + 1] = [(before[0], before[1] + size)]


def verify_plan(
    lifetimes: Sequence[Lifetime], offsets: Mapping[str, int], inplace: Mapping[str, Sequence[str]]
) -> None:
    """Raise when two buffers of one step share memory, but for one that takes over what ends where it
    begins.
    """
    ordered = sorted(lifetimes, key=lambda one: one.start)
    for k, later in enumerate(ordered):
        for earlier in ordered[:k]:
            together = (
                later.start <= earlier.end
                and offsets[later.name] < offsets[earlier.name] + earlier.nbytes
                and (offsets[earlier.name] < offsets[later.name] + later.nbytes)
            )
            taken_over = (
                earlier.end == later.start
                and earlier.name in inplace.get(later.name, ())
                and (offsets[earlier.name] == offsets[later.name])
            )
            if together and not taken_over:
                raise InternalError(
                    "DM923",
                    f"the buffers {earlier.name} and {later.name} were planned into the same memory",
                    why=f"{earlier} at {offsets[earlier.name]}, {later} at {offsets[later.name]}",
                    cure="report the program; dynamotor.config.reuse_memory does not help here",
                )


def plan_offsets(
    lifetimes: Sequence[Lifetime], inplace: Mapping[str, Sequence[str]] | None = None
) -> tuple[dict[str, int], int]:
    """Byte offsets so that buffers alive in one step never overlap, and the total size.

    inplace[written] lists buffers whose memory `written` may take over when they end in the step where it
    starts.
    """
    inplace = inplace or {}
    free = _FreeList()
    offsets: dict[str, int] = {}
    size_of = {life.name: int(_aligned(life.nbytes)) for life in lifetimes}
    by_name = {life.name: life for life in lifetimes}
    ending: dict[int, list[str]] = {}
    for life in lifetimes:
        ending.setdefault(life.end, []).append(life.name)
    taken_over: set[str] = set()
    clock = None
    for life in sorted(lifetimes, key=lambda one: one.start):
        # Ranges that ended before this step are free in it.
        for step in sorted(s for s in ending if s < life.start) if clock != life.start else ():
            for name in ending.pop(step):
                if name not in taken_over:
                    free.give(offsets[name], size_of[name])
        clock = life.start
        for other in inplace.get(life.name, ()):
            before = by_name.get(other)
            ends_here = before is not None and before.start < before.end == life.start
            if ends_here and other not in taken_over and size_of[other] == size_of[life.name]:
                offsets[life.name] = offsets[other]
                taken_over.add(other)
                break
        else:
            offsets[life.name] = free.take(size_of[life.name])
    return offsets, free.top


def plan_slots(
    lifetimes: Sequence[Lifetime], inplace: Mapping[str, Sequence[str]] | None = None
) -> tuple[dict[str, int | Size], int | Size]:
    """As `plan_offsets`, for sizes that differ between calls: a buffer takes over memory that provably is
    large enough.
    """
    size_of = {life.name: _aligned(life.nbytes) for life in lifetimes}
    by_name = {life.name: life for life in lifetimes}
    slots: list[int | Size] = []
    place: dict[str, int] = {}
    busy: dict[int, int] = {}  # slot -> the last step of its content
    fits: dict[tuple[int | Size, int | Size], bool] = {}

    def is_enough(slot: int, size: int | Size) -> bool:
        key = slots[slot], size
        if key not in fits:
            fits[key] = known(">=", slots[slot] - size)
        return fits[key]

    for life in sorted(lifetimes, key=lambda one: (one.start, -hint(one.nbytes))):
        size = size_of[life.name]
        before = [by_name[other] for other in (inplace or {}).get(life.name, ()) if other in by_name]
        taken = next(
            (
                place[b.name]
                for b in before
                if b.start < b.end == life.start
                and busy[place[b.name]] == b.end
                and equal(size_of[b.name], size)
            ),
            None,
        )
        if taken is None:
            free = [n for n, end in busy.items() if end < life.start and is_enough(n, size)]
            taken = min(free, key=lambda n: hint(slots[n]), default=None)
        if taken is None:
            taken = len(slots)
            slots.append(size)
        place[life.name] = taken
        busy[taken] = life.end
    starts: list[int | Size] = [0]
    for size in slots:
        starts.append(starts[-1] + size)
    return {name: starts[n] for name, n in place.items()}, starts[-1]


def roomy(nbytes: int) -> int:
    """A little more than was asked for, so that a size that grows from call to call does not need new memory
    at each.
    """
    step = 1 << max(nbytes.bit_length() - 4, 6)
    return -(-nbytes // step) * step


class Block:
    """Scratch memory. Programs keep weak references to objects built on it."""

    __slots__ = ("bytes", "stream", "__weakref__")

    def __init__(self, nbytes: int) -> None:
        self.stream = 0  # of a GPU, for memory there
        with torch.inference_mode(False):
            self.bytes = torch.empty(max(nbytes, ALIGNMENT), dtype=torch.uint8, device="cpu")
        ask_for_huge_pages(self.bytes)

    def tensor(
        self, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor (no view of another, so without shared version counter) at a byte offset of the block."""
        with torch.inference_mode(False):
            empty = torch.empty(0, dtype=dtype, device=self.bytes.device)
            return empty.set_(self.bytes.untyped_storage(), offset // dtype.itemsize, shape, stride)

    def places(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors (byte offset, shape, stride, dtype) in the block, and the addresses of plain byte
        offsets.
        """
        start = self.bytes.data_ptr()
        bases: dict[torch.dtype, torch.Tensor] = {}
        found: dict[str, Any] = {}
        with torch.inference_mode(False):
            for name, place in wanted.items():
                if type(place) is int:
                    found[name] = start + place
                    continue
                offset, shape, stride, dtype = place
                base = bases.get(dtype)
                if base is None:
                    empty = torch.empty(0, dtype=dtype, device=self.bytes.device)
                    base = bases[dtype] = empty.set_(self.bytes.untyped_storage(), 0, (1,), (1,))
                found[name] = reinterpret(base, shape, stride, offset // dtype.itemsize)
        return found


class Arena:
    """The blocks that no call uses at the moment. `acquire` and `release` rest on list.pop/append being
    atomic.
    """

    def __init__(self) -> None:
        self._idle: list[Block] = []
        self._lock = threading.Lock()
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()

    def register(self, program: Any) -> None:
        """Count `program` as a user; when the last one is gone, the idle blocks are freed."""
        self._users.add(program)
        weakref.finalize(program, self._program_died).atexit = False

    def _program_died(self) -> None:
        if next(iter(self._users), None) is None:
            self.clear()

    def acquire(self, nbytes: int) -> Block:
        """A block of at least `nbytes` that belongs to the caller until `release`."""
        try:
            block = self._idle.pop()
        except IndexError:
            return Block(nbytes)
        return block if block.bytes.nbytes >= nbytes else Block(nbytes)

    def release(self, block: Block) -> None:
        """Give a block back; the next `acquire` takes the one given back last, which is warm in the
        caches.
        """
        self._idle.append(block)

    def clear(self) -> None:
        """Free the idle blocks (those in use go when their call ends and the next `clear` comes)."""
        with self._lock:
            self._idle.clear()

    def nbytes(self) -> int:
        """Bytes held in idle blocks."""
        return sum(block.bytes.nbytes for block in self._idle)


def _lend_nothing(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Lends in C are missing: all go the long way."""


class _Pooled:
    """A storage that is lent out. It is free when its count of owners is that of a storage that only the
    pool held
    it.
    """

    __slots__ = ("tensor", "storage", "handle", "pointer", "nbytes", "owners", "references", "lend")

    def __init__(self, nbytes: int, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):
            self.tensor = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="cpu")
        ask_for_huge_pages(self.tensor)
        self.storage = self.tensor.untyped_storage()
        self.handle = self.storage._cdata
        self.pointer, self.nbytes = self.storage.data_ptr(), self.storage.nbytes()
        self.lend: Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor | None] = _lend_nothing
        if _C.Lender is not None:
            self.lend = lender = _C.Lender(self.tensor, self.storage, self.handle, _use_count)
            lender.settle()
        self.owners = _use_count(self.handle)
        self.references = sys.getrefcount(self.storage)

    def is_free(self) -> bool:
        """No tensor and no Python storage object besides ours: views, numpy arrays and saved tensors all
        count.
        """
        return _use_count(self.handle) == self.owners and sys.getrefcount(self.storage) == self.references

    def is_intact(self) -> bool:
        """Not moved to shared memory and not resized while it was lent out."""
        return self.storage.data_ptr() == self.pointer and self.storage.nbytes() == self.nbytes


class ResultPool:
    """Results of one program: `take` gives a tensor of its own over a storage of which it is the only owner.

    At most `limit` storages of a kind are kept; results beyond that come from the allocator and go back to
    it. Where sizes differ between calls, the kinds of the last sizes are kept, `others` storages of each.
    """

    def __init__(self, limits: Mapping[tuple[int, torch.dtype], int], others: int = 0) -> None:
        self._limits, self._others = dict(limits), others
        self._recent: deque[tuple[int, torch.dtype]] = deque()
        self._kinds: dict[tuple[int, torch.dtype], deque[_Pooled]] = {kind: deque() for kind in limits}
        self._made: dict[tuple[int, torch.dtype], int] = dict.fromkeys(limits, 0)

    def take(
        self, kind: tuple[int, torch.dtype], shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        """A tensor over uninitialised memory; kind = (bytes, dtype)."""
        entries = self._kinds.get(kind)
        try:  # mostly the storage that was lent last
            tensor = entries[0].lend(shape, stride) if entries else None
        except IndexError:  # taken out meanwhile
            tensor = None
        return self._take_another(kind, shape, stride) if tensor is None else tensor

    def _take_another(
        self, kind: tuple[int, torch.dtype], shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        entries = self._kinds.get(kind)
        if entries is None:
            entries = self._add_kind(kind)
        for _ in range(min(_PROBES, len(entries))):
            try:
                entry = entries.popleft()  # private until it is back: safe with threads
            except IndexError:
                break
            if not entry.is_free():
                entries.append(entry)
            elif not entry.is_intact():
                self._made[kind] -= 1
            else:
                tensor = reinterpret(entry.tensor, shape, stride, 0)
                entries.appendleft(entry)  # asked first next time: the caches may still hold it
                return tensor
        if self._made[kind] >= self._limits[kind]:
            return new_tensor(shape, stride, kind[1])
        self._made[kind] += 1
        entry = _Pooled(*kind)
        tensor = reinterpret(entry.tensor, shape, stride, 0)
        entries.appendleft(entry)
        return tensor

    def _add_kind(self, kind: tuple[int, torch.dtype]) -> deque[_Pooled]:
        self._limits[kind], self._made[kind] = self._others, 0
        entries = self._kinds[kind] = deque()
        self._recent.append(kind)
        if len(self._recent) > _KINDS:  # its counters stay: another thread may be using them
            oldest = self._recent.popleft()
            self._kinds.pop(oldest, None)
        return entries

    def clear(self) -> None:
        """Forget all storages; those lent out are freed by their holders."""
        for kind, entries in list(self._kinds.items()):
            entries.clear()
            self._made[kind] = 0

    def nbytes(self) -> int:
        """Bytes of all storages that the pool knows, lent out or not."""
        return sum(entry.nbytes for entries in self._kinds.values() for entry in entries)


arena = Arena()
_pools: weakref.WeakSet[ResultPool] = weakref.WeakSet()


def new_pool(limits: Mapping[tuple[int, torch.dtype], int], others: int = 0) -> ResultPool:
    """A pool that `release_all` knows."""
    pool = ResultPool(limits, others)
    _pools.add(pool)
    return pool


def release_all() -> None:
    """Free memory kept between calls (`dynamotor.reset()` calls it); programs go on working and fill up
    again.
    """
    arena.clear()
    for pool in list(_pools):
        pool.clear()
