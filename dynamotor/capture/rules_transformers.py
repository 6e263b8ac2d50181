"""Call rules of a few transformers functions by name: checks that only warn, and bookkeeping that is the same
at every call. transformers itself is never imported here.
"""

from __future__ import annotations

from typing import Any

from .values.base import Trace, Value, named_rule
from .values.constant import Constant, is_none


@named_rule("transformers.utils.generic:_register_model_output_pytree_node")
def _run_once(fn: Any, trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """Idempotent registrations of classes: done while tracing."""
    fn(*[a.as_constant() for a in args], **{name: v.as_constant() for name, v in kwargs.items()})
    return Constant(None)


@named_rule("transformers.modeling_utils:PreTrainedModel.warn_if_padding_and_no_attention_mask")
def _run_after(fn: Any, trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """Functions that look at data to warn about it: called after the graph, where the data is."""
    trace.effects.later(trace.make(fn), args[:1], args[1:], kwargs)
    return Constant(None)


@named_rule("transformers.utils.import_utils:is_tracing")
def _traced(fn: Any, trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """`is_tracing(tensor)` stands before shortcuts that look at data and do not change the result: not to be
    taken.

    Without a tensor (no mask was given) there is no data to look at.
    """
    return Constant(not all(map(is_none, (*args, *kwargs.values()))))
