"""Small helpers for training scripts: synthetic data, containers that know how to reach the device,
environment values.

>>> batch = torch.zeros(32, 1, 28, 28), torch.zeros(32, dtype=torch.int64)
>>> loader = SampleGenerator(data=batch, sample_count=100)
>>> for data, target in loader: ...
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
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

    func: what computes the target from the data. gen_tensor: called with (batch_size, *dims), makes the data
    (`torch.randn`).
    """

    def __init__(
        self,
        func: Callable[[Any], Any],
        batch_size: int,
        gen_tensor: Callable[..., Any],
        dims: Any = None,
        count: int = 1,
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
    """Base class for data structures of a program's own, so that a loader can send the tensors inside them to
    the device.

    The loader calls `get_tensors`, moves each tensor, and calls `from_tensors` with the moved ones in the
    same order. As it is, the tensors are the instance's attributes; a subclass that keeps them elsewhere
    defines both methods.

    >>> class Graph(DataWrapper):
    ...     def __init__(self, nodes, edges): self.nodes, self.edges = nodes, edges
    """

    def get_tensors(self) -> list[torch.Tensor]:
        """The tensors to be sent, in a fixed order: those among the attributes."""
        return [value for value in vars(self).values() if isinstance(value, torch.Tensor)]

    def from_tensors(self, tensors: list[torch.Tensor]) -> Any:
        """The same structure around other tensors, given in the order of `get_tensors`: a copy with these
        attributes.
        """
        result, values = copy.copy(self), iter(tensors)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(result, name, next(values))
        return result


def getenv_as(name: str, type: Callable[[str], Any], defval: Any = None) -> Any:
    """An environment variable as `type`; `defval` where it is not set. With `bool`, "0" and "false" are
    False.
    """
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


def for_each_instance(value: Any, select_fn: Callable[[Any], bool], fn: Callable[[Any], Any]) -> None:
    """Call `fn` on every object inside nested dicts, lists, tuples, sets and objects that `select_fn`
    picks.
    """

    for_each_instance_rewrite(value, select_fn, lambda found: (fn(found), found)[1])


def for_each_instance_rewrite(value: Any, select_fn: Callable[[Any], bool], fn: Callable[[Any], Any]) -> Any:
    """A copy of nested data where every object that `select_fn` picks is replaced by `fn(object)`, once for
    each object.

    Containers keep their types (named tuples and ordered dicts too). Other objects are looked into through
    their attributes: those that hold something picked come back as shallow copies (a module, a dataclass),
    all others as they are.
    """
    return _Rewriter(select_fn, fn).rewrite(value)


class _Rewriter:
    """One walk; what occurs twice, or contains itself, is rewritten once."""

    _LEAVES = (
        torch.Tensor,
        type,
        ModuleType,
        FunctionType,
        BuiltinFunctionType,
        MethodType,
        str,
        bytes,
        int,
        float,
    )

    def __init__(self, select_fn: Callable[[Any], bool], fn: Callable[[Any], Any]) -> None:
        self._select, self._fn = select_fn, fn
        self._done: dict[int, Any] = {}

    def rewrite(self, value: Any) -> Any:
        if id(value) in self._done:
            return self._done[id(value)]
        if self._select(value):
            self._done[id(value)] = self._fn(value)
        elif isinstance(value, DataWrapper):
            self._done[id(value)] = value.from_tensors([self.rewrite(t) for t in value.get_tensors()])
        elif isinstance(value, dict):
            self._done[id(value)] = new = {} if type(value) is dict else value.copy()
            new.clear()
            new.update((self.rewrite(k), self.rewrite(v)) for k, v in value.items())
        elif isinstance(value, list):
            self._done[id(value)] = items = [] if type(value) is list else copy.copy(value)
            items[:] = [self.rewrite(v) for v in value]
        elif isinstance(value, (tuple, set, frozenset)):
            items = [self.rewrite(v) for v in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        elif hasattr(value, "__dict__") and not isinstance(value, self._LEAVES):
            return self._attributes(value)
        else:
            return value
        return self._done[id(value)]

    def _attributes(self, value: Any) -> Any:
        self._done[id(value)] = value  # for an object that contains itself
        old = vars(value)
        new = {name: self.rewrite(v) for name, v in old.items() if self._holds(v)}
        if not new:
            return value
        result = self._done[id(value)] = copy.copy(value)
        vars(result).update(new)
        return result

    def _holds(self, value: Any, seen: set[int] | None = None) -> bool:
        """Whether something picked is inside."""
        seen = set() if seen is None else seen
        if id(value) in seen:
            return False
        seen.add(id(value))
        if isinstance(value, DataWrapper):
            items: Any = value.get_tensors()
        elif isinstance(value, dict):
            items = [*value, *value.values()]
        else:
            plain = isinstance(value, self._LEAVES) or not hasattr(value, "__dict__")
            items = (
                value
                if isinstance(value, (list, tuple, set, frozenset))
                else ()
                if plain
                else vars(value).values()
            )
        return self._select(value) or any(self._holds(v, seen) for v in items)


def shape(inputs: Any) -> Any:
    """The shape of a tensor, or of each in nested lists."""
    return [shape(item) for item in inputs] if isinstance(inputs, (list, tuple)) else list(inputs.shape)


def flatten_nested_tuple(inputs: Any) -> tuple[Any, ...]:
    """The items of nested tuples and lists, in order."""
    if not isinstance(inputs, (list, tuple)):
        return (inputs,)
    return tuple(leaf for item in inputs for leaf in flatten_nested_tuple(item))


def list_copy_append(ilist: list[Any], item: Any) -> list[Any]:
    """A new list with one item more."""
    return [*ilist, item]


def eprint(*args: Any, **kwargs: Any) -> None:
    """Print to the standard error."""
    print(*args, file=sys.stderr, **kwargs)


class TimedScope:
    """A `with` block whose seconds are printed (`printfn` None: nowhere)."""

    def __init__(self, msg: str = "", printfn: Callable[..., None] | None = eprint) -> None:
        self._msg, self._print = msg, printfn

    def __enter__(self) -> TimedScope:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._print is not None:
            self._print(f"{self._msg}{time.perf_counter() - self._start:.3f}sec")


def timed(fn: Callable[[], Any], msg: str = "", printfn: Callable[..., None] | None = eprint) -> Any:
    """`fn()`, and its seconds printed."""
    with TimedScope(msg, printfn):
        return fn()


def get_free_tcp_ports(n: int = 1) -> list[int]:
    """Ports that are free at the moment."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("", 0))) for _ in range(n)]
        return [s.getsockname()[1] for s in sockets]


def parallel_work(num_workers: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn` of the items of each iterable, on threads; the results in order."""
    with futures.ThreadPoolExecutor(num_workers) as workers:
        return list(workers.map(fn, *args))


class TmpFolder(tempfile.TemporaryDirectory[str]):
    """A folder for the life of the object; `name` is its path."""


class LazyProperty:
    """A value that is made when it is first read."""

    def __init__(self, gen_fn: Callable[[], Any]) -> None:
        self._gen_fn = gen_fn

    @functools.cached_property
    def value(self) -> Any:
        """The value."""
        return self._gen_fn()
