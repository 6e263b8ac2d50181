"""NumPy on plain numbers and shapes: ufuncs and functions that give a scalar run at trace time.

>>> np.sqrt(2.0), np.prod(x.shape)      # constants of the trace; arrays break the graph
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import numpy as np
except ImportError:  # PyTorch works without it
    np = None  # type: ignore[assignment]

from .breaks import Unsupported, unsupported
from .guards import TypeIs
from .values.base import CallRule, Value, call_finder, wrap_held, wrap_rule
from .values.constant import PURE_TYPES, Constant
from .values.klass import Builtin

if TYPE_CHECKING:
    from .trace import Trace

_PLAIN = (int, float, complex, bool, str, type(None))
_SCALARS: tuple[type, ...] = () if np is None else tuple({np.dtype(code).type for code in "?bhilqBHILQefdFD"})
_CALLABLES: tuple[type, ...] = () if np is None else (np.ufunc, type(np.prod))
PURE_TYPES.update(base for scalar in _SCALARS for base in scalar.__mro__ if base is not object)


@wrap_rule(*_SCALARS)
def _wrap_scalar(trace: Trace, source: Any, obj: Any) -> Value:
    trace.reader.guard(TypeIs(source, type(obj)))
    trace.reader.ask(source, obj, "its bytes", lambda now: now.tobytes())
    return Constant(obj, source)


wrap_held(Builtin, *_CALLABLES)


def _is_plain(obj: Any) -> bool:
    return (
        all(map(_is_plain, obj))
        if isinstance(obj, tuple | list)
        else isinstance(obj, _PLAIN + _SCALARS) or obj in _SCALARS or isinstance(obj, type) and obj in _PLAIN
    )


@call_finder
def _find_numpy(fn: Any) -> CallRule | None:
    if type(fn) not in _CALLABLES and not (isinstance(fn, type) and fn in _SCALARS):
        return None

    def rule(trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
        values = [*args, *kwargs.values()]
        plain = all(v.is_constant() for v in values) and _is_plain([v.as_constant() for v in values])
        if fn.__name__.startswith("save") or not plain:
            raise _refused(fn, "only plain numbers are computed at trace time")
        real, named = [a.as_constant() for a in args], {name: v.as_constant() for name, v in kwargs.items()}
        try:
            result = fn(*real, **named)
        except Exception as error:
            raise trace.real_error(error) from None
        if not _is_plain(result):
            raise _refused(fn, f"it gives a {type(result).__name__}")
        return trace.fresh(result)

    return rule


def _refused(fn: Any, cause: str) -> Unsupported:
    return unsupported(
        "unsupported-call", f"numpy.{fn.__name__} is called", cause, cure="use torch's function"
    )
