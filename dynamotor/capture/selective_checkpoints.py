"""`create_selective_checkpoint_contexts` in a trace: the policy becomes a real function, which the partition
asks op by op what to save.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as checkpointing

from ..base.compat import OpOverload
from ..graph.save_policy import SavePolicy
from .breaks import unsupported, unsupported_if
from .values.base import MISSING, Trace, Value, builtin_rule
from .values.function import FunctionValue

_WHY = "a checkpoint has options of its own"


class SelectiveContexts(Value):
    """The two context managers that `create_selective_checkpoint_contexts` gives."""

    __slots__ = ("policy",)
    kind = tuple

    def __init__(self, policy: SavePolicy) -> None:
        super().__init__()
        self.policy = policy


@builtin_rule(checkpointing.create_selective_checkpoint_contexts)
def _selective(
    trace: Trace, policy_fn_or_list: Value, allow_cache_entry_mutation: Value | None = None
) -> Value:
    if policy_fn_or_list.python_type() is list:
        return SelectiveContexts(_of_ops([item.as_constant() for item in policy_fn_or_list.unpack(trace)]))
    return SelectiveContexts(SavePolicy(_maker(trace, policy_fn_or_list)))


def _of_ops(ops: list[Any]) -> SavePolicy:
    unsupported_if(
        not all(isinstance(op, OpOverload) for op in ops),
        "unsupported-call",
        "a policy of other things than ops",
    )
    return SavePolicy(lambda: lambda context, op, *args, **kwargs: op in ops)


def _maker(trace: Trace, value: Value) -> Callable[[], Callable[..., Any]]:
    """What makes the real function of a value: of one that the trace made, each time a new one."""
    real = value.real()
    if real is not MISSING:
        return lambda: real
    if type(value) is not FunctionValue:
        raise unsupported("autograd", _WHY, f"the policy is {value.describe()}")
    cells = [cell.load(trace) for cell in value.closure]
    unsupported_if(
        any(cell is None for cell in cells), "autograd", _WHY, "a variable of the policy is not set"
    )
    contents = [_copier(trace, cell) for cell in cells if cell is not None]
    defaults = [item.as_constant() for item in value.defaults]
    named = {name: item.as_constant() for name, item in value.kwdefaults.items()}
    module = value.globals.real()
    unsupported_if(module is MISSING, "autograd", _WHY, "the policy's globals were made in the trace")

    def make() -> Callable[..., Any]:
        closure = tuple(types.CellType(content()) for content in contents)
        made = types.FunctionType(value.code, module, value.code.co_name, tuple(defaults), closure)
        made.__kwdefaults__ = named or None
        return made

    return make


def _copier(trace: Trace, value: Value) -> Callable[[], Any]:
    """What gives the contents of a variable of the policy: those that the trace made are new each time."""
    if type(value) is FunctionValue and value.real() is MISSING:
        return _maker(trace, value)
    constant = value.as_constant()  # read now: at its end the trace lets go of lists from outside
    return lambda: _copied(constant)


def _copied(constant: Any) -> Any:
    """A constant with containers of its own."""
    kind = type(constant)
    if kind is dict:
        return {key: _copied(item) for key, item in constant.items()}
    return kind(map(_copied, constant)) if kind in (list, tuple, set) else constant


def selective_policy(trace: Trace, contexts: Value) -> SavePolicy | None:
    """The policy of a checkpoint's `context_fn`, None where it has none."""
    if contexts.real() is checkpointing.noop_context_fn:
        return None
    made = trace.call(contexts, [])
    if not isinstance(made, SelectiveContexts):
        raise unsupported(
            "autograd", _WHY, "context_fn", "make the contexts with create_selective_checkpoint_contexts"
        )
    return made.policy
