"""A device's kind and number from its text."""

from __future__ import annotations

import torch

from ..core.xla_model import xla_device_hw


def parse_xla_device(device: str) -> tuple[str, int]:
    """("CPU", 0) of "CPU:0" or "xla:0"."""
    kind, _, number = str(device).partition(":")
    if kind.lower() == "xla":
        kind = xla_device_hw(torch.device(device))
    return kind.upper(), int(number or 0)
