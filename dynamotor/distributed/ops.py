"""The graph's own op: `dynamotor::bucket_start(grads, after, averager, bucket)` packs a bucket and starts its
all-reduce.

`after` is the previous bucket's result, so that no pass can reorder collectives among themselves. The result
is the flat bucket, which holds the sums once the step has waited for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..lower.lowering import Lowering, lowerings


class Starts(Protocol):
    """What stands behind the number in a graph."""

    def start(self, bucket: int, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pack the gradients and start the bucket's all-reduce; gives the flat bucket."""


_library = torch.library.Library("dynamotor", "FRAGMENT")
_library.define("bucket_start(Tensor[] grads, Tensor? after, int averager, int bucket) -> Tensor")
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


_library.impl("bucket_start", _bucket_start, "CompositeExplicitAutograd")
bucket_start = torch.ops.dynamotor.bucket_start.default


def _lower(ctx: Lowering, *args: Any) -> Any:
    return ctx.extern(bucket_start, args, {}, agnostic=True)


lowerings.add(bucket_start, _lower)
