"""Small helpers for training scripts: synthetic data, containers that know how to reach the device, environment values.

>>> loader = SampleGenerator(data=(torch.zeros(32, 1, 28, 28), torch.zeros(32, dtype=torch.int64)), sample_count=100)
>>> for data, target in loader: ...
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch


class SampleGenerator:
    """Iterates `sample_count` times over one and the same piece of data, in place of a DataLoader.

    data: what each step returns, as it is.
    sample_count: how many steps one pass has.
    """

    def __init__(self, data: Any, sample_count: int) -> None:
        self._data, self._sample_count, self._count = data, sample_count, 0

    def __iter__(self) -> SampleGenerator:
        return SampleGenerator(self._data, self._sample_count)

    def __len__(self) -> int:
        return self._sample_count

    def __next__(self) -> Any:
        if self._count >= self._sample_count:
            raise StopIteration
        self._count += 1
        return self._data

    next = __next__


class FnDataGenerator:
    """Synthetic pairs (data, func(data)), `count` times.

    func: what computes the target from the data. gen_tensor: called with (batch_size, *dims), makes the data (`torch.randn`).
    """

    def __init__(
        self, func: Callable[[Any], Any], batch_size: int, gen_tensor: Callable[..., Any], dims: Any = None, count: int = 1
    ) -> None:
        self._func, self._batch_size, self._gen_tensor = func, batch_size, gen_tensor
        self._dims, self._count = tuple(dims) if dims else (1,), count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for _ in range(self._count):
            data = self._gen_tensor(self._batch_size, *self._dims)
            yield data, self._func(data)


class DataWrapper:
    """Base class for data structures of a program's own, so that a loader can send the tensors inside them to the device.

    The loader calls `get_tensors`, moves each tensor, and calls `from_tensors` with the moved ones in the same order. As it is,
    the tensors are the instance's attributes; a subclass that keeps them elsewhere defines both methods.

    >>> class Graph(DataWrapper):
    ...     def __init__(self, nodes, edges): self.nodes, self.edges = nodes, edges
    """

    def get_tensors(self) -> list[torch.Tensor]:
        """The tensors to be sent, in a fixed order: those among the attributes."""
        return [value for value in vars(self).values() if isinstance(value, torch.Tensor)]

    def from_tensors(self, tensors: list[torch.Tensor]) -> Any:
        """The same structure around other tensors, given in the order of `get_tensors`: a copy with these attributes."""
        result, values = copy.copy(self), iter(tensors)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(result, name, next(values))
        return result


def getenv_as(name: str, type: Callable[[str], Any], defval: Any = None) -> Any:
    """An environment variable as `type`; `defval` where it is not set. With `bool`, "0" and "false" are False."""
    value = os.environ.get(name)
    if value is None:
        return defval
    return value.strip().lower() not in ("", "0", "false") if type is bool else type(value)


def check_env_flag(name: str, default: str = "") -> bool:
    """Whether an environment variable is switched on ("1", "true", "yes", "on")."""
    return os.environ.get(name, default).strip().lower() in ("1", "true", "yes", "y", "on")


def as_list(value: Any) -> Any:
    """The value itself where it is a list or tuple, otherwise a list around it."""
    return value if isinstance(value, (tuple, list)) else [value]


def for_each_instance(value: Any, select_fn: Callable[[Any], bool], fn: Callable[[Any], None]) -> None:
    """Call `fn` on every object inside nested dicts, lists, tuples, sets and objects that `select_fn` picks."""

    def visit(found: Any) -> Any:
        fn(found)
        return found

    for_each_instance_rewrite(value, select_fn, visit)


def for_each_instance_rewrite(value: Any, select_fn: Callable[[Any], bool], fn: Callable[[Any], Any]) -> Any:
    """A copy of nested containers where every object that `select_fn` picks is replaced by `fn(object)`.

    Containers keep their types (named tuples and ordered dicts too); objects that hold nothing picked stay the same objects.
    """
    if select_fn(value):
        return fn(value)
    if isinstance(value, DataWrapper):
        tensors = value.get_tensors()
        return value.from_tensors([for_each_instance_rewrite(t, select_fn, fn) for t in tensors])
    if isinstance(value, dict):
        return _rebuild_dict(value, {k: for_each_instance_rewrite(v, select_fn, fn) for k, v in value.items()})
    if isinstance(value, (list, tuple, set)):
        new = [for_each_instance_rewrite(v, select_fn, fn) for v in value]
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    return value


def _rebuild_dict(old: dict, new: dict) -> dict:
    """`new`'s items in a dict of `old`'s type and attributes (a state dict carries `_metadata`)."""
    if type(old) is dict:
        return new
    result = old.copy()
    result.update(new)
    return result
