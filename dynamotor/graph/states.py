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
    """Seed all generators: the CPU's alone where the devices were told this number already, because telling
    them takes 0.1 ms (PyTorch notes the stack for each).
    """
    if _devices_know(number):
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def _devices_know(number: int) -> bool:
    """Whether no device has begun and each will begin with this seed."""
    if torch.backends.mps.is_built() or hasattr(torch, compat.custom_device_name()):
        return False
    return all(
        tracker is not None and not device.is_initialized() and _was_told(tracker, number)
        for device, tracker in (
            (torch.cuda, compat.cuda_seeds),
            (torch.xpu, compat.xpu_seeds),
            (torch.mtia, compat.mtia_seeds),
        )
    )


def _was_told(tracker: Any, number: int) -> bool:
    """Whether the last that a device was told is this seed, for all of its generators."""
    if not tracker.call_order or tracker.call_order[-1] is not tracker.manual_seed_all_cb:
        return False
    callback = tracker.manual_seed_all_cb[0]
    return callback.__code__.co_freevars == ("seed",) and callback.__closure__[0].cell_contents == number


STATE_CALLS = frozenset((enter_inference, leave_inference, random_state, restore_random_state, seed))


def is_state_call(node: fx.Node) -> bool:
    """Whether a node reads or sets a state."""
    return node.target in STATE_CALLS
