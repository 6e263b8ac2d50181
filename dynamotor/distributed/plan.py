"""The bucket plan: which gradients are reduced together, in the order in which they become ready.

>>> plan = make_plan([("out.weight", w2), ("in.weight", w1)], caps=(1 << 20, 25 << 20))
>>> print(plan)
bucket 0: 1 parameter, 0.8 MB, out.weight
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..base import compat
from ..graph.result_strides import is_dense
from ..graph.sizes import numbers
from ..graph.spec import TensorSpec, contiguous_stride

_reinterpret = compat.reinterpret_tensor


@dataclass(frozen=True, slots=True)
class GradientSlot:
    """A parameter's place in a bucket: shape and strides of its gradient, offset in elements."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The slot's part of a bucket's memory; not a view in autograd's eyes, so that it may become a
        `param.grad`.
        """
        return _reinterpret(flat, self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class Bucket:
    """Gradients of one dtype on one device that are reduced by one call; or a rank's shards of them, or of
    parameters.
    """

    slots: tuple[GradientSlot, ...]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def numels(self) -> list[int]:
        """The number of elements of each slot."""
        return [slot.numel for slot in self.slots]

    @cached_property
    def numel(self) -> int:
        return sum(self.numels)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """All buckets of a module, in the order in which they are reduced."""

    buckets: tuple[Bucket, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters, bucket by bucket."""
        return tuple(slot.name for bucket in self.buckets for slot in bucket.slots)

    @cached_property
    def digest(self) -> str:
        """Equal on ranks that will reduce the same parameters in the same order and layout."""
        rows = [
            (str(b.dtype), b.device.type, [(s.name, s.shape, s.stride) for s in b.slots])
            for b in self.buckets
        ]
        return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]

    @property
    def summary(self) -> str:
        """One line for errors: what another rank can be compared with."""
        return (
            f"{len(self.buckets)} buckets, {len(self.names)} parameters, "
            f"{sum(b.nbytes for b in self.buckets)} bytes, first {self.names[0]}"
        )

    def __str__(self) -> str:
        return "\n".join(_line(i, bucket) for i, bucket in enumerate(self.buckets))


def _line(i: int, bucket: Bucket) -> str:
    names = [slot.name for slot in bucket.slots]
    shown = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
    many = "parameter" if len(names) == 1 else "parameters"
    return f"bucket {i}: {len(names)} {many}, {bucket.nbytes / 2**20:.1f} MB, {shown}"


def make_plan(ready: Iterable[tuple[str, torch.Tensor]], caps: Sequence[int]) -> BucketPlan:
    """Fill buckets with parameters in the order in which their gradients become ready.

    A bucket is closed when it holds at least its cap in bytes: `caps[i]` is the i-th bucket's, the last one
    holds for all that follow. Each (dtype, device) has buckets of its own, as in DDP.
    """
    open_: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = {}
    count: dict[tuple[torch.dtype, torch.device], int] = {}
    closed: list[Bucket] = []
    for name, parameter in ready:
        key = parameter.dtype, parameter.device
        held = open_.setdefault(key, [])
        held.append((name, parameter))
        if sum(p.nbytes for _, p in held) >= caps[min(count.get(key, 0), len(caps) - 1)]:
            closed.append(_bucket(held))
            count[key] = count.get(key, 0) + 1
            open_[key] = []
    return BucketPlan((*closed, *(_bucket(held) for held in open_.values() if held)))


def _bucket(held: Sequence[tuple[str, torch.Tensor]]) -> Bucket:
    return Bucket(tuple(_slots(held)), held[0][1].dtype, held[0][1].device)


def _slots(held: Sequence[tuple[str, torch.Tensor]]) -> Iterator[GradientSlot]:
    offset = 0
    for name, parameter in held:
        spec = TensorSpec.of(parameter)
        # What AccumulateGrad keeps without a copy: the parameter's own strides.
        stride = spec.stride if is_dense(spec) else contiguous_stride(spec.shape)
        yield GradientSlot(name, numbers(spec.shape), numbers(stride), offset)
        offset += parameter.numel()
