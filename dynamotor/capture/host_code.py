"""Code that computes on the host alone: from numbers and small arrays, by functions of Python and NumPy that its names
lead to. A graph break leaves it to CPython: a graph of it would compute nothing that its caller waits for, and its
numbers, drawn or read, differ at each call.

>>> stays_on_host(code, namespace) and are_plain(flat)      # the rest of a function behind np.random.rand(1)
True
"""

from __future__ import annotations

import builtins
import inspect
import types
from typing import Any

import numpy as np
import torch

from .code_names import cells_of, contents_of_cell, led_to, names_of

_MODULES = frozenset(("builtins", "collections", "itertools", "math", "numpy", "operator", "random"))
_REFUSED = frozenset(
    ("__import__", "breakpoint", "compile", "eval", "exec", "globals", "input", "locals", "open", "vars")
)
_PLAIN = frozenset(
    (bool, bytes, complex, float, int, range, slice, str, torch.Size, type(None), types.EllipsisType)
)
_CONTAINERS = frozenset((dict, frozenset, list, set, tuple))
_IMPORTS = frozenset(("IMPORT_NAME", "LOAD_BUILD_CLASS"))
LARGE = 4096  # elements or items: with as many, a compiled program may be worth its call


def stays_on_host(code: types.CodeType, namespace: dict[str, Any]) -> bool:
    """Whether the names of code lead to no tensor, and to nothing that makes one."""
    return _Scan().is_free(code, namespace, {})


def are_plain(values: tuple[Any, ...]) -> bool:
    """Whether values lead to no tensor, and to nothing that makes one."""
    return all(map(_Scan().is_plain, values))


class _Scan:
    """A walk over the functions that code reaches by names."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def is_free(self, code: types.CodeType, namespace: dict[str, Any], closure: dict[str, Any]) -> bool:
        """Whether all names of a function's code lead to the host's functions and plain values."""
        names = names_of(code)
        return not names.opcodes & _IMPORTS and all(
            self._leads_to_host(chain, namespace, closure) for chain in names.loaded
        )

    def _leads_to_host(
        self, chain: tuple[str, ...], namespace: dict[str, Any], closure: dict[str, Any]
    ) -> bool:
        # A name in none of these is a local of the function around: a value that is looked at, or computed from such.
        namespaces = (closure, namespace, vars(builtins))
        return self.is_plain(led_to(chain, namespaces, lambda module: _is_hosts(module.__name__)))

    def is_plain(self, value: Any) -> bool:
        """Whether nothing leads from a value to a tensor."""
        kind = type(value)
        if kind in _PLAIN or isinstance(value, np.generic | np.dtype):
            return True
        if kind in _CONTAINERS:
            items = [*value, *value.values()] if kind is dict else value
            return len(value) <= LARGE and all(map(self.is_plain, items))
        if kind is np.ndarray:
            return value.size <= LARGE and not value.dtype.hasobject
        if kind is types.CellType:
            return self.is_plain(contents_of_cell(value))
        if kind is types.FunctionType:
            return self._is_host_function(value)
        if isinstance(value, types.ModuleType):
            return _is_hosts(value.__name__)
        code = inspect.isroutine(value) or isinstance(value, type | np.ufunc)
        module = getattr(value, "__module__", None) or type(value).__module__
        return code and _is_hosts(module) and getattr(value, "__name__", "") not in _REFUSED

    def _is_host_function(self, function: types.FunctionType) -> bool:
        if id(function) in self.seen or _is_hosts(function.__module__ or ""):
            return True
        self.seen.add(id(function))
        given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        return all(map(self.is_plain, given)) and self.is_free(
            function.__code__, function.__globals__, cells_of(function)
        )


def _is_hosts(module: str) -> bool:
    return module.partition(".")[0] in _MODULES
