"""Saved values of selective checkpoints: the program's policy, asked for each op that a trace records.

>>> policy = SavePolicy(make)
>>> run = policy.started()  # one for each trace: a policy may count its calls
>>> run.saves(torch.ops.aten.mm.default, (a, b), {}, result)
True
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

# Since PyTorch 2.12.
_TAKES_OUTPUT = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters
_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


# Ops of ours by name, and those of PyTorch that a policy knows in their place.
_STANDS_FOR = {
    "dynamotor::masked_attention": torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


class SavePolicy:
    """The policy of one checkpointed call; `make` gives the function that PyTorch would ask there."""

    def __init__(self, make: Callable[[], Callable[..., Any]]) -> None:
        self._make = make

    def started(self) -> PolicyRun:
        """The policy from its start."""
        return PolicyRun(self._make())


class PolicyRun:
    """A policy while a call is traced. It decides about memory alone: results are the same either way."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def saves(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Whether the op's result is saved rather than computed again; True and False are older answers."""
        op = _STANDS_FOR.get(op.name(), op)
        output = {"op_output": result} if _TAKES_OUTPUT else {}
        context = SelectiveCheckpointContext(is_recompute=False, **output)
        answer = self._ask(context, op, *args, **kwargs)
        return answer if isinstance(answer, bool) else answer not in _RECOMPUTED
