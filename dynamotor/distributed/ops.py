"""The graph's own ops: `dynamotor::bucket_start(grads, after, averager, bucket)` packs a bucket and starts
its all-reduce, `dynamotor::bucket_wait(flat, after, averager, bucket)` gives its averages.

`after` is the previous bucket's result, so that no pass can reorder collectives among themselves, and of a
wait the last bucket's, so that nothing waits before all have started. The result of a start is the flat
bucket, which holds the averages once a caller has waited for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..lower.lowering import lowerings


class Starts(Protocol):
    """What stands behind the number in a graph."""

    def start(self, bucket: int, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pack the gradients and start the bucket's all-reduce; gives the flat bucket."""

    def finish(self, bucket: int) -> list[torch.Tensor]:
        """Wait for the bucket's all-reduce; gives the averages."""


_library = torch.library.Library("dynamotor", "FRAGMENT")
_library.define("bucket_start(Tensor[] grads, Tensor? after, int averager, int bucket) -> Tensor")
_library.define("bucket_wait(Tensor flat, Tensor after, int averager, int bucket) -> Tensor[]")
_averagers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def number_of(averager: Starts) -> int:
    """A number that stands for the averager in graphs of this process."""
    number = id(averager)
    _averagers[number] = averager
    return number


def _bucket_start(
    grads: Sequence[torch.Tensor], after: torch.Tensor | None, averager: int, bucket: int
) -> torch.Tensor:
    return _averagers[averager].start(bucket, grads)


def _flat(grads: Sequence[torch.Tensor], *_: Any) -> torch.Tensor:
    """For passes that ask again: gradients may have other strides then."""
    return grads[0].new_empty(sum(g.numel() for g in grads))


def _bucket_wait(flat: torch.Tensor, after: torch.Tensor, averager: int, bucket: int) -> list[torch.Tensor]:
    return _averagers[averager].finish(bucket)


_library.impl("bucket_start", _bucket_start, "CompositeExplicitAutograd")
_library.impl("bucket_start", _flat, "Meta")
_library.impl("bucket_wait", _bucket_wait, "CompositeExplicitAutograd")
bucket_start, bucket_wait = torch.ops.dynamotor.bucket_start.default, torch.ops.dynamotor.bucket_wait.default
for _op in (bucket_start, bucket_wait):
    lowerings.add(_op, lambda ctx, *args, op=_op: ctx.extern(op, args, {}, agnostic=True))
