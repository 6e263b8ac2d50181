"""Calls that a C function refuses, which its rule need not know: the function raises in its own words.

>>> fitted(len, args=[], kwargs={})
Unsupported: len() is called with 0 arguments
"""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import itertools
import logging
import math
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from ...base.narrowing import checked
from ..breaks import unsupported

_MANY = math.inf
_FROM_C = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)
_CONTAINERS = dict, collections.OrderedDict, collections.defaultdict, set, frozenset, list, collections.deque
# Methods that take nothing, and those that take one object.
_ALONE = "copy clear keys values items reverse popleft"
_OF_ONE = (
    "__getitem__ __contains__ append appendleft extend extendleft count remove discard "
    "issubset issuperset isdisjoint symmetric_difference symmetric_difference_update"
)


def _methods(names: str) -> list[Any]:
    found = [getattr(kind, name, None) for kind in _CONTAINERS for name in names.split()]
    return [method for method in found if isinstance(method, _FROM_C)]


_WITHOUT_SIGNATURE: dict[Any, tuple[float, float]] = {
    **dict.fromkeys(_methods(_ALONE), (1, 1)),
    **dict.fromkeys(_methods(_OF_ONE), (2, 2)),
    **dict.fromkeys((max, min, operator.itemgetter, operator.attrgetter, functools.partial), (1, _MANY)),
    **dict.fromkeys((bool, dict, set, frozenset, vars, dir, collections.OrderedDict), (0, 1)),
    **dict.fromkeys((int, super, collections.deque), (0, 2)),
    **dict.fromkeys((iter, next, dict.update), (1, 2)),
    **dict.fromkeys((range, slice, type), (1, 3)),
    **dict.fromkeys((getattr, functools.reduce, dict.pop), (2, 3)),
    map: (2, _MANY),
    filter: (2, 2),
    set.add: (2, 2),
    str: (0, 3),
    itertools.islice: (2, 4),
    zip: (0, _MANY),
}
# The names that these take; the others take none. None: any name.
_NAMES: dict[Any, frozenset[str] | None] = {
    **dict.fromkeys((dict, collections.OrderedDict, dict.update, functools.partial, type)),
    **dict.fromkeys((max, min), frozenset(("key", "default"))),
    collections.deque: frozenset(("iterable", "maxlen")),
    int: frozenset(("base",)),
    str: frozenset(("object", "encoding", "errors")),
    **dict.fromkeys((zip, *([map] if sys.version_info >= (3, 14) else [])), frozenset(("strict",))),
    **({functools.reduce: frozenset(("initial",))} if sys.version_info >= (3, 14) else {}),
}
_OF_PYTHON = frozenset((copy.copy, copy.deepcopy, torch._assert, logging.Logger.isEnabledFor))
_MODULES = frozenset(("builtins", "_operator", "operator", "functools", "itertools", "collections", "math"))


def fitted(
    fn: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, those given by name in their places where they have one: rules look for them there.

    Breaks the graph where `fn` is written in C and takes no such number of arguments or no such names.
    """
    signature = _signature(fn) if type(fn) is not types.FunctionType or fn in _OF_PYTHON else None
    if isinstance(signature, inspect.Signature) and not kwargs:
        fits = _takes(fn, len(args))
    elif isinstance(signature, inspect.Signature):
        try:
            bound = signature.bind(*args, **kwargs)
            return list(bound.args), bound.kwargs
        except TypeError:
            fits = False
    else:
        names = _NAMES.get(fn, frozenset()) if kwargs and signature is not None else None
        names = frozenset() if fn is type and len(args) == 1 else names  # a class may take any
        fits = signature is None or bool(kwargs) or signature[0] <= len(args) <= signature[1]
        fits = fits and (names is None or kwargs.keys() <= names)
    if not fits:  # a callable need not have a name
        named = f" and {', '.join(kwargs)}" if kwargs else ""
        raise unsupported("unsupported-call", f"{fn.__name__}() is called with {len(args)} arguments{named}")
    return args, kwargs


@functools.cache
def _takes(fn: Callable[..., Any], count: int) -> bool:
    """Whether so many arguments without names fit a function's signature."""
    try:
        checked(inspect.Signature, _signature(fn)).bind(*range(count))
    except TypeError:
        return False
    return True


@functools.cache
def _signature(fn: Callable[..., Any]) -> inspect.Signature | tuple[float, float] | None:
    if fn in _WITHOUT_SIGNATURE:
        return _WITHOUT_SIGNATURE[fn]
    if fn in _OF_PYTHON:
        return inspect.signature(fn)
    of_c = isinstance(fn, _FROM_C) or isinstance(fn, type) and fn.__module__ in _MODULES
    if not of_c or getattr(fn, "__module__", None) not in (None, *_MODULES):
        return None
    try:
        return inspect.signature(fn)
    except (ValueError, TypeError):
        return None
