"""What FSDP2's policy of mixed precision does to inputs and outputs."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

_MANY = (list, tuple, set)


def cast_floats(dtype: torch.dtype, value: Any) -> Any:
    """The value with its floating tensors in this type, also those in containers and data classes."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = dataclasses.replace(value)
        for field in dataclasses.fields(made):
            setattr(made, field.name, cast_floats(dtype, getattr(made, field.name)))
        return made
    if isinstance(value, PackedSequence):
        return value
    if isinstance(value, OrderedDict):
        ordered = value.__class__()
        for key, item in value.items():
            ordered[key] = cast_floats(dtype, item)
        return ordered
    if isinstance(value, dict):
        return {key: cast_floats(dtype, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[cast_floats(dtype, item) for item in value])
    if isinstance(value, _MANY):
        return type(value)([cast_floats(dtype, item) for item in value])
    return value
