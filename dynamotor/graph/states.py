"""Calls of a graph that read or set a state of the thread: inference mode, the random numbers of the CPU. A
backend cuts its graph around them, so that the code between them runs under their settings.

>>> enter_inference(True)
>>> torch.is_inference_mode_enabled(), leave_inference(), torch.is_inference_mode_enabled()
(True, None, False)
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import fx

from ..base import compat


class _Open(threading.local):
    """The regions of this thread that are open. What entered them must stay alive until they are left."""

    def __init__(self) -> None:
        self.regions: list[Any] = []


_open = _Open()


def enter_inference(mode: bool) -> None:
    """Begin a region of inference mode, or (False) one outside of it; grad mode goes with it."""
    region = compat.InferenceMode(mode)
    region.__enter__()
    _open.regions.append(region)


def leave_inference() -> None:
    """End the innermost region: all modes are as at its beginning."""
    _open.regions.pop().__exit__(None, None, None)


def open_regions() -> int:
    """How many regions are open."""
    return len(_open.regions)


def leave_to(depth: int) -> None:
    """End regions until this many are open: something raised inside of them."""
    while len(_open.regions) > depth:
        leave_inference()


def random_state() -> torch.Tensor:
    """The state of the CPU's random numbers."""
    return torch.get_rng_state()


def restore_random_state(state: torch.Tensor) -> None:
    """Set the state of the CPU's random numbers."""
    torch.set_rng_state(state)


def seed(number: int) -> None:
    """Seed all generators."""
    torch.manual_seed(number)


STATE_CALLS = frozenset((enter_inference, leave_inference, random_state, restore_random_state, seed))


def is_state_call(node: fx.Node) -> bool:
    """Whether a node reads or sets a state."""
    return node.target in STATE_CALLS
