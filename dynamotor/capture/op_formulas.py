"""Python that PyTorch runs for an operator while a graph is made: `register_fake`, and `register_vmap` in transforms.

What such a function reads by name is guarded: the answer to a question about its globals and closures, plain
containers and objects included. One that reads anything else breaks the graph, so that eager runs it at each call.

>>> guard_formulas(trace, torch.ops.mine.pad.default)  # guards N of `lambda x: x.new_empty(N)`
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from ..base import compat
from ..base.compat import OpOverload
from .breaks import unsupported_if
from .guards import is_constant
from .op_state import held_by, op_of_others
from .source import Const
from .values.base import Trace

_DEEP = 4  # containers in containers
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def guard_formulas(trace: Trace, called: Any) -> None:
    """Guard the values that the formulas of a called operator read; Unsupported where no guard can."""
    target = op_of_others(called)
    if target is None:
        return
    for kind, fn in _formulas(target, trace.sizes.in_body):
        answer = _state_of(fn)
        unsupported_if(
            answer is None,
            "side-effect",
            f"the {kind} of {target} reads objects that no guard can follow",
            "it runs once for all calls, while the graph is made",
            "let it depend on its arguments and on constants, or accept the break",
        )
        if answer:
            name = getattr(fn, "__qualname__", kind)
            trace.reader.ask(Const(fn, f"{target} {kind}"), fn, f"what {name} reads", _state_of)


def _formulas(target: OpOverload, transformed: bool) -> Iterator[tuple[str, Any]]:
    name = target._schema.name
    definition = compat.custom_op_definitions.get(name)
    fakes = [] if definition is None else [definition._abstract_fn]
    known = compat.fake_implementations.find(name)
    kernel = None if known is None else getattr(known.fake_impl, "kernel", None)
    if definition is None and kernel is not None:
        fakes.append(kernel.func)
    yield from (("register_fake", fn) for fn in fakes if isinstance(fn, types.FunctionType))
    rule = None if definition is None else definition._vmap_fn
    if transformed and isinstance(rule, types.FunctionType):
        yield "register_vmap", rule


def _state_of(fn: Callable[..., Any]) -> tuple[Any, ...] | None:
    """The values that a function reads by name now, as constants; None where something is no plain data."""
    try:
        return tuple([_plain(value, _DEEP) for value in held_by(fn)])
    except _NotPlain:
        return None


class _NotPlain(Exception):
    """A value that may change in ways that no comparison of constants shows."""


def _plain(value: Any, deep: int) -> Any:
    kind = type(value)
    if is_constant(value):
        return kind.__name__, value
    if not deep:
        raise _NotPlain
    if kind in (list, tuple, set, frozenset):
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        return kind.__name__, *(_plain(item, deep - 1) for item in items)
    if kind in (dict, types.MappingProxyType):
        pairs = ((key, item) for key, item in value.items() if is_constant(key) or _refuse())
        return kind.__name__, *((key, _plain(item, deep - 1)) for key, item in pairs)
    if kind is types.SimpleNamespace or _is_of_python(kind):
        return f"{kind.__module__}.{kind.__qualname__}", _plain(vars(value), deep - 1)
    raise _NotPlain


def _is_of_python(cls: type) -> bool:
    """Whether instances are their `__dict__`: a class of the program's that has no base written in C."""
    own = all(c is object or c.__flags__ & _HEAP_TYPE for c in cls.__mro__)
    return own and cls.__dictoffset__ != 0


def _refuse() -> bool:
    raise _NotPlain
