"""Call rules of a few transformers functions by name: checks that only warn, and bookkeeping that is the same
at every call.

transformers itself is never imported here. A function that moves or changes its name is inlined like any
other code.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from .values.base import CallRule, Trace, Value, call_finder
from .values.constant import Constant, is_none


def _run_once(fn: Any, trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """Idempotent registrations of classes: done while tracing."""
    fn(*[a.as_constant() for a in args], **{name: v.as_constant() for name, v in kwargs.items()})
    return Constant(None)


def _run_after(fn: Any, trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """Functions that look at data to warn about it: called after the graph, where the data is."""
    trace.effects.later(trace.make(fn), args[:1], args[1:], kwargs)
    return Constant(None)


def _traced(fn: Any, trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """`is_tracing(tensor)` stands before shortcuts that look at data and do not change the result: not to be
    taken.

    Without a tensor (no mask was given) there is no data to look at.
    """
    return Constant(not all(map(is_none, (*args, *kwargs.values()))))


_RULES = {
    ("transformers.utils.import_utils", "is_tracing"): _traced,
    ("transformers.utils.generic", "_register_model_output_pytree_node"): _run_once,
    ("transformers.modeling_utils", "PreTrainedModel.warn_if_padding_and_no_attention_mask"): _run_after,
}


@call_finder
def _find_transformers(fn: Any) -> CallRule | None:
    if not isinstance(fn, types.FunctionType):
        return None
    rule = _RULES.get((fn.__module__, fn.__qualname__))
    return None if rule is None else functools.partial(rule, fn)
