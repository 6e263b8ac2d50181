"""The agreement of the ranks before any gradient moves: through the group's store, so that no collective
can be
mismatched.

>>> answers = tell_all(group, "ddp/0", {"mode": "ingraph", "plan": plan.digest})
>>> [note["mode"] for note in answers]           # one a rank
['ingraph', 'ingraph']
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ..base import compat
from ..base.errors import DistributedError, user_line
from .wrapper import group_timeout

_count: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def next_number(group: dist.ProcessGroup) -> int:
    """A number for the next module of this group; ranks that run the same program count alike."""
    number = _count.get(group, 0)
    _count[group] = number + 1
    return number


def tell_all(group: dist.ProcessGroup, topic: str, note: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tell the other ranks of the group a note and read theirs, in rank order.

    Raises DistributedError DM702 when a rank does not tell within the group's timeout.
    """
    size, rank = group.size(), group.rank()
    if size == 1 or dist.get_backend(group) == "fake":
        return [dict(note)] * size
    store = compat.group_store(group)
    store.set(f"dynamotor/{topic}/{rank}", json.dumps(note))
    return [dict(note) if other == rank else _read(store, topic, other, group) for other in range(size)]


def _read(store: Any, topic: str, rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    key = f"dynamotor/{topic}/{rank}"
    try:
        store.wait([key], group_timeout(group))
        return json.loads(store.get(key))
    except RuntimeError as error:  # a timeout, or the store's own process is gone
        raise DistributedError(
            "DM702",
            f"rank {rank} did not say how it reduces its gradients",
            why=f"nothing under {topic!r} within {group_timeout(group).total_seconds():.0f} s "
            f"({type(error).__name__})",
            cure="every rank must compile the same model with the same options and reach this step; "
            "see that rank's own error",
            where=user_line(),
        ) from error
