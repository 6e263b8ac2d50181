"""Custom autograd functions in the graph: one node that calls `apply`, whose parts are recorded when it is differentiated.

Forward and backward are interpreted once beforehand (`rehearse`), which installs the guards of what they read and refuses what
a recording would not see: effects, breaks, writes into arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..graph.modes import preserved_modes
from .breaks import Unsupported, unsupported
from .polyfills import autograd_function as polyfills
from .values.base import Raised, Value, builtin_rule
from .values.constant import Constant
from .values.containers import SequenceValue, TupleValue
from .values.context import ModeEffect
from .values.klass import ClassValue
from .values.tensor import TensorValue, tensor_values, torch_call

if TYPE_CHECKING:
    from .trace import Trace

_own_setup = vars(torch.autograd.function._SingleLevelFunction)["setup_context"]


@builtin_rule(torch.autograd.Function.apply.__func__)  # type: ignore[attr-defined]
def _apply(trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
    cls, args = args[0], args[1:]
    if not isinstance(cls, ClassValue) or kwargs or not all(isinstance(a, TensorValue) or a.is_constant() for a in args):
        raise _refused(cls, "its arguments are not tensors and constants")
    for arg in args:
        _ = arg.node if isinstance(arg, TensorValue) else None  # makes its placeholder
    ModeEffect.of(trace)  # so that a rehearsal's `no_grad` is no effect that is new
    state = _State(trace)
    with preserved_modes():
        torch._C._set_grad_enabled(False)
        rehearse(trace, cls, args)
    state.check_and_forget(cls, args)
    trace.type_attr(cls.value, "apply")  # guarded: it is what the node calls
    return torch_call(trace, cls.value.apply, args, {})


def rehearse(trace: Trace, cls: ClassValue, args: list[Value]) -> None:
    """Interpret forward and backward; the guards stay."""
    needs = [isinstance(a, TensorValue) and a.example.requires_grad for a in args]
    ctx = trace.call_python(polyfills.context, [TupleValue([Constant(need) for need in needs])])
    two = trace.type_attr(cls.value, "setup_context") is not _own_setup
    run = polyfills.forward_and_setup if two else polyfills.forward
    result = trace.call_python(run, [cls, ctx, *args])
    outputs = result.items if isinstance(result, SequenceValue) else [result]
    if any(out is a for out in outputs for a in args if isinstance(a, TensorValue)):
        raise _refused(cls, "it returns an argument")
    if any(needs):
        grads = [torch_call(trace, torch.zeros_like, [out], {}) if isinstance(out, TensorValue) else Constant(None)
                 for out in outputs]
        try:
            trace.call_python(polyfills.backward, [cls, ctx, *grads])
        except Raised as raised:
            raise _refused(cls, f"its backward raises {raised.value.describe()}") from None


class _State:
    """What a rehearsal may not change, and the place in the graph behind which its nodes go."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.n_calls, self.n_inputs = trace.graph.n_calls, len(trace.graph.inputs)
        self.known = set(trace.graph.graph.nodes)
        self.effects = dict(trace.effects.touched), len(trace.effects.calls)
        self.versions = self._versions()

    def _versions(self) -> list[tuple[Any, Any]]:
        return [(v, v.example._version) for v in tensor_values(self.trace).values() if not v.example.is_inference()]

    def check_and_forget(self, cls: ClassValue, args: list[Value]) -> None:
        trace = self.trace
        if (dict(trace.effects.touched), len(trace.effects.calls)) != self.effects:
            raise _refused(cls, "it has side effects")
        if len(trace.graph.inputs) != self.n_inputs:
            raise _refused(cls, "it reads a tensor that is no argument")
        if any(value.example._version != version for value, version in self.versions):
            raise _refused(cls, "it writes a tensor in place")
        for node in reversed([node for node in trace.graph.graph.nodes if node not in self.known]):
            trace.graph.graph.erase_node(node)
        trace.graph.n_calls = self.n_calls


def _refused(cls: Value, cause: str) -> Unsupported:
    return unsupported("autograd", f"{cls.describe()}.apply is called", cause,
                       cure="write it with torch functions, or leave it outside the compiled function")
