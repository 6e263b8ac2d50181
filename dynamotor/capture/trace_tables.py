"""Facts that a trace collects, by subject: tensors, numbers, modules, objects, calls of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .interpreter import Frame
from .source import Source
from .values.base import Value
from .values.tensor import TensorValue


@dataclass
class TensorTable:
    """The tensors of a trace. Memories are the storages of their ShapeTensors."""

    by_example: dict[int, TensorValue] = field(default_factory=dict)  # by the ids of their ShapeTensors
    outside: list[TensorValue] = field(default_factory=list)  # those that have a real tensor
    # By memory: arguments of calls whose results have a history.
    recorded: dict[Any, list[Any]] = field(default_factory=dict)
    new_leaves: list[TensorValue] = field(
        default_factory=list
    )  # outside tensors that the program makes leaves
    given_away: set[Any] = field(default_factory=set)  # memories that parameters made in the trace took over
    read_only: set[Any] = field(default_factory=set)  # memories of NumPy's read-only arrays
    nested: dict[int | str, tuple[Any, int]] = field(
        default_factory=dict
    )  # by the numbers of jagged sizes: a tensor that has it, and the dimension
    asked: set[str] = field(default_factory=set)  # "requires_grad", "strides": the program looks at them
    results: dict[Any, Any] = field(default_factory=dict)  # specs of calls' results: `repeated_calls.py`
    views: set[Any] = field(default_factory=set)  # functions that gave a view


@dataclass
class NumberTable:
    """Floats that differ between calls, and numbers that are held: read only by code outside the trace."""

    floats: dict[str, Any] = field(default_factory=dict)  # their sources, by the sources' texts
    types: dict[str, Any] = field(default_factory=dict)  # questions for the types of floats, by their texts
    read_at: dict[int, Any] = field(default_factory=dict)  # where held numbers were read, by ids of values


@dataclass
class ModuleTable:
    """Modules: those of arguments, and hooks for all of them."""

    owner: Source | None = None  # of the module, where the program is for all modules of its class
    repeated: set[Source] = field(default_factory=set)  # modules that come as arguments, one after the other
    global_hooks: list[Value | None] = field(default_factory=list)  # tables of hooks, once they are read
    whole: list[Any] = field(default_factory=list)  # states of sharded modules whose parameters are whole now


@dataclass
class ObjectTable:
    """Objects that the trace made and that bind it."""

    cached: dict[Any, Value] = field(default_factory=dict)  # results of functions under `lru_cache` for them
    must_stay: dict[Value, str] = field(default_factory=dict)  # those that cannot leave the trace, and why
    locals_taken: dict[int, Frame] = field(
        default_factory=dict
    )  # frames of which `locals()` was called, by id


@dataclass
class TorchCalls:
    """Calls of PyTorch: the grad mode at the start, and how calls are made now."""

    graded: bool = field(default_factory=torch.is_grad_enabled)
    draws: bool = False  # a call takes random numbers
    asked: set[str] = field(
        default_factory=set
    )  # names of settings, and facts of tensors, that are asked for
    may_raise: bool = False  # a call raises where its data are out of range
    asks_shapes: bool = True  # the last one depends on nothing else
    modes: list[Any] = field(
        default_factory=list
    )  # values of the function modes that are entered, innermost last
    plain: int = 0  # open regions in which no `__torch_function__` is asked
