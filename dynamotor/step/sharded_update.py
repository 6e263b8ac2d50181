"""Adam's update of sharded parameters on a GPU: each group's as soon as its own gradients are reduced, on a
stream beside the rest of the backward, which the host has queued by then.

>>> with updated_behind_reductions(optimizer):
...     optimizer.step()                 # finds no gradients of theirs
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.optim.optimizer

from ..distributed.shard_group import reductions

optim = sys.modules["torch.optim.optimizer"]  # torch.optim hides it behind a name of its own
_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_KINDS = (
    torch.optim.Adam,
    torch.optim.AdamW,
)  # they treat each element alone, and write their state in place


@contextlib.contextmanager
def updated_behind_reductions(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Update parameters that the last backward reduced; inside, they have no gradients."""
    done: list[tuple[torch.Tensor, torch.Tensor]] = []
    if reductions.arrived and _is_plain(optimizer):
        done = _update(optimizer, reductions.arrived)
    reductions.arrived = None
    try:
        yield
    finally:
        for param, grad in done:
            param.grad = grad


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is PyTorch's, that of each parameter for itself, without hooks."""
    step = vars(optimizer).get("step")
    names = [f"_optimizer_step_{when}_hooks" for when in ("pre", "post")]
    hooks = [vars(optimizer).get(name) for name in names] + [vars(optim).get(name) for name in _GLOBAL_HOOKS]
    return type(optimizer) in _KINDS and not any(hooks) and (step is None or _is_counted(step))


def _is_counted(step: Any) -> bool:
    """Whether a scheduler counts calls."""
    return getattr(step, "_wrapped_by_lr_sched", False)


def _update(
    optimizer: torch.optim.Optimizer, arrived: Sequence[tuple[Sequence[Any], Any]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    known = {p for group in optimizer.param_groups for p in group["params"] if optimizer.state.get(p)}
    last = {p: k for k, (params, _) in enumerate(arrived) for p in params}  # a module may run twice
    done: list[tuple[torch.Tensor, torch.Tensor]] = []
    for k, (params, event) in enumerate(arrived):
        mine = [p for p in params if p in known and last[p] == k and p.grad is not None]
        with _beside(event):
            _step_alone(optimizer, mine)
        for param in mine:
            done.append((param, param.grad))
            param.grad = None
    if arrived[0][1] is not None:
        torch.cuda.current_stream().wait_stream(_stream(torch.cuda.current_device()))
    return done


@contextlib.contextmanager
def _beside(event: Any) -> Iterator[None]:
    """On the stream of updates, behind the event; where there is none, as things are."""
    if event is None:
        yield
        return
    stream = _stream(torch.cuda.current_device())
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        yield


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _step_alone(optimizer: torch.optim.Optimizer, params: Sequence[Any]) -> None:
    """The optimizer's step of these parameters, on their local tensors: DTensors take the host half a
    millisecond.
    """
    local = {p: p._local_tensor for p in params}
    part: Any = object.__new__(type(optimizer))
    vars(part).update(vars(optimizer))
    vars(part).pop("step", None)
    part.param_groups = [
        {**group, "params": [local[p] for p in group["params"] if p in local]}
        for group in optimizer.param_groups
    ]
    state = {p: optimizer.state[p].items() for p in params}
    part.state = {local[p]: {key: _local(value) for key, value in items} for p, items in state.items()}
    for param in params:
        local[param].grad = param.grad._local_tensor
    try:
        type(optimizer).step(part)
    finally:
        for tensor in local.values():
            tensor.grad = None
    torch.autograd.graph.increment_version(params)


def _local(value: Any) -> Any:
    return getattr(value, "_local_tensor", value)
