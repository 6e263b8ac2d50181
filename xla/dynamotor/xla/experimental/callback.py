"""Calls when a tensor's value has been computed.

>>> on_ready_event(loss).wait()
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ..tensor import XLATensor
from ..transfer import data_of


def on_ready_callback(tensor: XLATensor, callback: Callable[[torch.Tensor], None]) -> None:
    """Call `callback(tensor)` on a thread when its value is there; pending work is sent to the device
    first.
    """
    array = data_of(tensor, "callback")

    def wait() -> None:
        array.block_until_ready()
        callback(tensor)

    threading.Thread(target=wait, name="xla callback").start()


def on_ready_event(tensor: XLATensor) -> threading.Event:
    """An event that is set when the tensor's value is there."""
    event = threading.Event()
    on_ready_callback(tensor, lambda _: event.set())
    return event
