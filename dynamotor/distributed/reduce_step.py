"""One backward pass over a bucket plan: start an all-reduce a bucket, wait once, hand the averages out.

>>> step = ReduceStep(plan, parameters, group)
>>> flat = step.start(0, grads)          # as soon as bucket 0's gradients are written
>>> averages = step.wait()               # name -> gradient, all of them slots of the buckets' memory
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..base.config import config
from ..base.errors import DistributedError
from ..base.events import emit, listening
from ..runtime.memory import ResultPool
from .plan import Bucket, BucketPlan, GradientSlot


class ReduceStep:
    """The all-reduces of one backward pass; `flats[i]` is bucket i's memory once it has started."""

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        pool: ResultPool | None = None,
    ) -> None:
        self.plan, self.parameters, self.group, self.pool = plan, parameters, group, pool
        self.flats: list[torch.Tensor] = []
        self._works: list[Any] = []
        self._scale = 1.0 / group.size()

    def start(self, bucket: int, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Pack the bucket, divided by the number of ranks, and start its all-reduce.

        Gradients that a parameter holds already (of steps under `no_sync`) are averaged with the new ones, as
        in DDP; None counts as zeros.
        """
        about = self.plan.buckets[bucket]
        if len(self.flats) != bucket:
            raise AssertionError(f"bucket {bucket} starts after {len(self.flats)} others")
        flat = self.memory(about)
        held = [self.parameters[slot.name].grad for slot in about.slots]
        parts = [slot.of(flat) for slot in about.slots]
        if flat.is_cuda:  # a few kernels, not a few a parameter
            self._pack_all(parts, grads, held)
            flat.mul_(self._scale)
        else:
            for part, grad, before in zip(parts, grads, held, strict=True):
                self._pack(part, grad, before)
        return self.send(flat)

    def memory(self, bucket: Bucket) -> torch.Tensor:
        """Uninitialised memory of a bucket; on a CPU what an earlier step's gradients have left, if nobody
        holds it any more.
        """
        if self.pool is None or bucket.device.type != "cpu" or not config.reuse_memory:
            return torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        return self.pool.take((bucket.nbytes, bucket.dtype), (bucket.numel,), (1,))

    @staticmethod
    def _pack_all(
        parts: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        held: Sequence[torch.Tensor | None],
    ) -> None:
        first = [(part, h if g is None else g) for part, g, h in zip(parts, grads, held, strict=True)]
        second = [
            (part, h)
            for part, g, h in zip(parts, grads, held, strict=True)
            if g is not None and h is not None
        ]
        for part, source in first:
            if source is None:
                part.zero_()
        for copy_or_add, pairs in (
            (torch._foreach_copy_, [(part, source) for part, source in first if source is not None]),
            (torch._foreach_add_, second),
        ):
            if pairs:
                copy_or_add([part for part, _ in pairs], [source for _, source in pairs])

    def _pack(self, into: torch.Tensor, grad: torch.Tensor | None, held: torch.Tensor | None) -> None:
        if grad is not None and held is not None:
            torch.add(held, grad, out=into).mul_(self._scale)
            return
        only = held if grad is None else grad
        if only is None:
            into.zero_()
        else:
            torch.mul(only, self._scale, out=into)

    def send(self, flat: torch.Tensor) -> torch.Tensor:
        """Start the all-reduce of a packed bucket."""
        bucket = len(self.flats)
        self.flats.append(flat)
        if listening("bucket"):
            emit("bucket", bucket=bucket, what="ready", nbytes=flat.nbytes)
        with self.errors(bucket):
            self._works.append(dist.all_reduce(flat, group=self.group, async_op=True))
        return flat

    def wait(self) -> dict[str, torch.Tensor]:
        """Wait for all buckets; the average gradient of each parameter."""
        for bucket in range(len(self._works)):
            self.finish(bucket)
        return {slot.name: slot.of(flat) for slot, flat in self.slots()}

    def finish(self, bucket: int) -> list[torch.Tensor]:
        """Wait for one bucket; its averages."""
        with self.errors(bucket):
            self._works[bucket].wait()
        flat = self.flats[bucket]
        if listening("bucket"):
            emit("bucket", bucket=bucket, what="done", nbytes=flat.nbytes)
        return [slot.of(flat) for slot in self.plan.buckets[bucket].slots]

    def slots(self) -> Iterator[tuple[GradientSlot, torch.Tensor]]:
        """Each slot of the plan with its bucket's memory."""
        for bucket, flat in zip(self.plan.buckets, self.flats, strict=True):
            for slot in bucket.slots:
                yield slot, flat

    @contextlib.contextmanager
    def errors(self, bucket: int) -> Iterator[None]:
        """Turn a process group's error for a missing or late rank into DM703."""
        began = time.monotonic()
        try:
            yield
        except DistributedError:
            raise
        except RuntimeError as error:
            raise DistributedError(
                "DM703",
                f"the all-reduce of gradient bucket {bucket} of {len(self.plan.buckets)} failed on rank "
                f"{self.group.rank()}",
                why=f"after {time.monotonic() - began:.1f} s: {str(error).splitlines()[0]}",
                cure="another rank died or stopped before this step; see its own error. This step is lost: "
                "go on from the last checkpoint",
            ) from error
