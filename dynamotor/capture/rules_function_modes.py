"""`TorchFunctionMode` regions that begin and end in a trace: the mode's `__torch_function__` is interpreted for each
call that it takes over. A trace that stops inside of such a region is made again and breaks where the region begins.

>>> with Doubles():
...     torch.sin(x)      # Doubles.__torch_function__(mode, torch.sin, (), (x,)) is interpreted
"""

from __future__ import annotations

import operator
import types
from typing import Any

from torch.overrides import TorchFunctionMode

from ..base import compat
from .breaks import unsupported_if
from .rules_overrides import Asked, StandIns, is_overridable
from .torch_rules import is_query
from .values.base import Trace, Value, builtin_rule, find_rule, under_modes
from .values.constant import Constant
from .values.containers import TupleValue
from .values.instances import inline_function
from .values.tensor import TensorValue
from .values.user_object import UserObject

_CURE = "enter the mode around the compiled function"


@builtin_rule(compat.push_function_mode)
def _push(trace: Trace, mode: Value) -> Value:
    unsupported_if(
        not trace.sizes.policy.function_modes
        or trace.sizes.in_body
        or trace.graph.recompute
        or not isinstance(mode, UserObject)
        or issubclass(mode.cls, compat.DeviceContext)
        or not isinstance(trace.type_attr(mode.cls, "__torch_function__"), types.FunctionType),
        "modes",
        "a TorchFunctionMode is entered",
        "it is left in another place, or the graph breaks inside of it",
        _CURE,
    )
    trace.calls.modes.append(mode)
    return Constant(None)


@builtin_rule(compat.pop_function_mode)
def _pop(trace: Trace) -> Value:
    unsupported_if(
        not trace.calls.modes, "modes", "a TorchFunctionMode that was entered outside is left", "", _CURE
    )
    return trace.calls.modes.pop()


@under_modes.define
def _under_modes(trace: Trace, fn: Any, args: list[Value], kwargs: dict[str, Value]) -> Value | None:
    """The result of the innermost mode; None for a function that asks no mode."""
    on_tensors = _is_operator(fn) and any(isinstance(a, TensorValue) for a in args)
    if is_overridable(fn) or on_tensors or fn is compat.set_grad_enabled or _is_plain_query(fn):
        return _taken_over(trace, fn, args, kwargs)
    unsupported_if(
        _has_rule_of_torch(fn) and fn not in (compat.push_function_mode, compat.pop_function_mode),
        "modes",
        f"{getattr(fn, '__qualname__', fn)} is called inside of a TorchFunctionMode",
        "whether it asks the mode is not known",
        _CURE,
    )
    return None


def _is_operator(fn: Any) -> bool:
    return isinstance(fn, types.BuiltinFunctionType) and fn.__module__ == operator.add.__module__


def _is_plain_query(fn: Any) -> bool:
    """Whether a call only answers; some ask the mode. `has_torch_function` answers for the mode itself."""
    return is_query(fn) and "has_torch_function" not in getattr(fn, "__name__", "")


def _has_rule_of_torch(fn: Any) -> bool:
    """Whether a callable is a function of PyTorch's that is not interpreted."""
    module = getattr(fn, "__module__", None) or getattr(getattr(fn, "__objclass__", None), "__module__", None)
    opaque = not isinstance(fn, type) and (
        not isinstance(fn, types.FunctionType) or find_rule(fn) is not None
    )
    return str(module).partition(".")[0] == "torch" and opaque


class _Asking(TorchFunctionMode):
    """Raises the arguments of its call."""

    def __torch_function__(self, *given: Any) -> Any:
        raise Asked(*given)


def _taken_over(trace: Trace, fn: Any, args: list[Value], kwargs: dict[str, Value]) -> Value | None:
    stand_ins = StandIns(trace)
    given = [stand_ins.of(a) for a in args]
    named = {name: stand_ins.of(v) for name, v in kwargs.items()}
    unsupported_if(
        stand_ins.classes,
        "modes",
        "a tensor subclass meets a TorchFunctionMode",
        "both take the call over",
        _CURE,
    )
    try:
        with _Asking():
            _ = fn(*given, **named) if named else fn(*given)  # modes see whether there are keywords
    except Asked as asked:
        function, kinds, *rest = asked.args
    else:
        unsupported_if(not is_query(fn), "modes", f"{fn} asks no TorchFunctionMode")
        return None
    if isinstance(fn, types.FunctionType) and function is not fn:  # its callee asks
        return inline_function(trace, fn, args, kwargs)
    modes = trace.calls.modes
    *trace.calls.modes, mode = modes
    try:
        method = mode.getattr(trace, "__torch_function__")
        types_of = TupleValue([trace.make(kind) for kind in kinds])
        found = trace.call(method, [stand_ins.back(function), types_of, *map(stand_ins.back, rest)])
    finally:
        trace.calls.modes = modes
    unsupported_if(
        isinstance(found, Constant) and found.value is NotImplemented,
        "modes",
        "a TorchFunctionMode answers NotImplemented",
    )
    return found
