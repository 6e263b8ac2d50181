"""Custom autograd functions in the graph: one node that calls `apply`, whose parts are recorded when it is
differentiated; and checkpoints, whose calls are marked so that the backward runs them again.

Forward and backward are interpreted once beforehand (`rehearse`), which installs the guards of their reads
and refuses code that a recording would not see: effects, breaks, writes into arguments.

A backward runs later than the guards of the call are checked. One that depends on more than its arguments and the
constants of its context (a global, an attribute, a random number) is not recorded: its node is live (`live_calls`),
so that PyTorch calls it and the rest of the graph is compiled around it. A hook of this kind breaks the graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import types
from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch.utils.hooks import RemovableHandle

from ..base import compat
from ..graph.custom_function import Apply, own_apply
from ..graph.modes import preserved_modes
from ..graph.save_policy import SavePolicy
from ..graph.shape_tensor import ShapeTensor
from ..graph.spec import TensorSpec
from ..graph.subgraphs import GRADIENT, Hook
from .bodies import Rehearsal, interpret, versions
from .breaks import Unsupported, unsupported, unsupported_if
from .guards import ConstEquals, is_constant
from .marks import is_allowed
from .op_state import check_functions, reads_late
from .polyfills import autograd_function as polyfills
from .protocol import trusted_class
from .rules_wrappers import WrapperValue
from .selective_checkpoints import selective_policy
from .source import trusted_module
from .values.base import MISSING, Iterator, Raised, Trace, Value, builtin_rule, builtin_rules
from .values.constant import Constant, is_none
from .values.containers import DictValue, ListValue, SequenceValue, SetValue, TupleValue
from .values.context import ModeEffect
from .values.function import FunctionValue
from .values.klass import Builtin, ClassValue, EnumConstant, PythonModule
from .values.number import FloatValue
from .values.number_inputs import number_tensor
from .values.size import SizeValue
from .values.tensor import TensorValue, function_name, live_calls, torch_call, version
from .values.user_object import UserObject

_own_setup = vars(compat.SingleLevelFunction).get("setup_context")


@builtin_rule(getattr(own_apply, "__func__", own_apply))
def _apply(trace: Trace, cls: Value, /, *args: Value, **kwargs: Value) -> Value:
    if not isinstance(cls, ClassValue) or kwargs:
        raise _refused(cls, "its arguments are not tensors and constants")
    if cls.value in builtin_rules or is_allowed(cls.value):  # `allow_in_graph`: it is not looked into
        return _applied(trace, cls, [*args])
    forward = [trace.type_attr(cls.value, name) for name in ("forward", "setup_context")]
    check_functions(trace, f"{cls.describe()}.apply", *forward)
    tensors: list[TensorValue] = []
    if not all(_is_plain(a, tensors) for a in args):
        return _without_gradient(trace, cls, [*args])
    for tensor in tensors:
        _ = tensor.node  # makes its placeholder
    ModeEffect.of(trace)  # so that a rehearsal's `no_grad` is no effect that is new
    given = _with_tensors_of_numbers(trace, cls, [*args])
    why, _ = _rehearsed(trace, cls, given)
    if why and any(map(_is_shared, given)):
        raise _refused(cls, "its backward may see changes of a container that it was given")
    with live_calls(trace, why and f"the backward of {cls.value.__qualname__} {why}"):
        found = _applied(trace, cls, given)
    _name_written(trace, given, found)
    return found


def _applied(trace: Trace, cls: ClassValue, args: list[Value]) -> Value:
    """The node of a call; its target holds the records among the arguments."""
    held = [(i, record_of(trace, a)) for i, a in enumerate(args) if isinstance(a, UserObject)]
    found = tuple([pair for pair in held if pair[1] is not MISSING])
    given = [
        a.tensor if isinstance(a, WrapperValue) else a for i, a in enumerate(args) if i not in dict(found)
    ]
    return torch_call(trace, Apply(cls.value, found), given, {})


def record_of(trace: Trace, value: Value) -> Any:
    """The record from outside behind a value, behind guards of its contents; MISSING for others."""
    if not isinstance(value, UserObject) or value.obj is MISSING or not is_record(value.obj):
        return MISSING
    if is_constant(value.obj):
        trace.reader.guard(ConstEquals(value.source, value.obj))
    else:
        for field in dataclasses.fields(value.cls):
            record_of(trace, value.getattr(trace, field.name))
    return value.obj


def is_record(obj: Any) -> bool:
    """Whether an object stays as it is: a constant, a named tuple of such, or a frozen dataclass of such."""
    options = getattr(type(obj), "__dataclass_params__", None)
    if options is None or not options.frozen:
        return is_constant(obj)
    return all(is_record(getattr(obj, field.name)) for field in dataclasses.fields(obj))


def _is_plain(value: Value, tensors: list[TensorValue]) -> bool:
    """Whether an argument is a tensor, a constant, a record, or a list or tuple of such; its tensors are appended to
    `tensors`."""
    if isinstance(value, TensorValue):
        tensors.append(value)
        return True
    if type(value) in (ListValue, TupleValue) and isinstance(value, SequenceValue):
        return all(_is_plain(item, tensors) for item in value.items)
    return value.is_constant() or (
        isinstance(value, UserObject) and value.obj is not MISSING and is_record(value.obj)
    )


def _name_written(trace: Trace, args: list[Value], found: Value) -> None:
    """Later uses of an argument that was written and given back are uses of the result."""
    node = next(n for n in reversed(trace.graph.graph.nodes) if isinstance(n.target, Apply))
    for i, part in enumerate(_parts(found)):
        if isinstance(part, TensorValue) and part in args:
            spec = part.example.spec
            alone = not isinstance(found, SequenceValue)
            part.put(node if alone else trace.graph.call_function(operator.getitem, (node, i), {}, spec))


def _rehearsed(trace: Trace, cls: ClassValue, args: list[Value]) -> tuple[str, list[Any]]:
    """Why the backward is to run live, and the calls that forward and backward make."""
    tensors: list[TensorValue] = []
    for arg in args:
        _is_plain(arg, tensors)
    given = {value.node for value in tensors}
    rehearsal, n_inputs = Rehearsal(trace, functools.partial(_refused, cls)), len(trace.graph.inputs)
    rehearsal.begin()
    try:
        with preserved_modes():
            graded = torch.is_grad_enabled()
            compat.set_grad_enabled(False)
            why = rehearse(trace, cls, args, graded, rehearsal)
        rehearsal.check()
        if len(trace.graph.inputs) != n_inputs:
            raise _refused(cls, "it reads a tensor that is no argument")
        new = [n for n in trace.graph.graph.nodes if n not in rehearsal.known and n.op.startswith("call")]
        used = {used for n in new for used in n.all_input_nodes}.intersection(rehearsal.known) - given
        if any(
            type(node.meta.get("val")) is TensorSpec for node in used
        ):  # a later call may have another tensor there
            raise _refused(cls, "it reads a tensor that is no argument")
        return why, [(function_name(node.target), node.meta["val"]) for node in new]
    finally:
        rehearsal.forget()


def _with_tensors_of_numbers(trace: Trace, cls: ClassValue, args: list[Value]) -> list[Value]:
    """The arguments with inputs of the graph for floats that differ between calls, where a custom function makes the
    same calls of tensors with them as with numbers."""
    numbers = [a for a in args if type(a) is FloatValue]
    if not numbers or trace.sizes.in_body or not all(number.is_exact for number in numbers):
        return args
    given: list[Value] = [number_tensor(trace, a) if type(a) is FloatValue else a for a in args]
    for value in given:
        _ = value.node if isinstance(value, TensorValue) else None
    plain = [Constant(a.at_this_call) if type(a) is FloatValue else a for a in args]
    made = _makes(trace, cls, given)
    return given if made is not None and made == _makes(trace, cls, plain) else args


def _makes(trace: Trace, cls: ClassValue, args: list[Value]) -> list[Any] | None:
    """The calls that a custom function makes of such arguments, but for arithmetic of numbers alone; None where it
    refuses them."""
    try:
        why, steps = _rehearsed(trace, cls, args)
    except Unsupported:
        return None
    return None if why else [step for step in steps if not _is_number(step[1])]


def _is_number(spec: Any) -> bool:
    return isinstance(spec, TensorSpec) and not spec.shape and spec.dtype is torch.float64


def _without_gradient(trace: Trace, cls: ClassValue, args: list[Value]) -> Value:
    """The forward alone, inlined with whatever it does, where autograd records no call of the backward."""
    tensors = [a for a in args if isinstance(a, TensorValue)]
    graded = torch.is_grad_enabled() and any(a.example.requires_grad for a in tensors)
    if graded or trace.sizes.in_body:
        raise _refused(cls, "its arguments are not tensors and constants")
    needs = [Constant(isinstance(a, TensorValue) and a.example.requires_grad) for a in args]
    ctx = trace.call_python(polyfills.context, [TupleValue(needs)])
    outputs = trace.call_python(polyfills.plain_forward, [_forward_of(trace, cls), cls, ctx, *args])
    if {_owner(o) for o in _parts(outputs) if isinstance(o, TensorValue)} & {*map(_owner, tensors)}:
        raise _refused(cls, "it returns an argument or a view of one")  # apply() gives another view
    return outputs


def _forward_of(trace: Trace, cls: ClassValue) -> Value:
    old = trace.type_attr(cls.value, "setup_context") is _own_setup
    return trace.make(polyfills.forward if old else polyfills.forward_and_setup)


def rehearse(trace: Trace, cls: ClassValue, args: list[Value], graded: bool, rehearsal: Rehearsal) -> str:
    """Interpret forward and backward; the guards stay. Gives the reason why the backward is to run live; then only
    the forward is interpreted, as where nothing is graded.
    """
    needs = [Constant(isinstance(a, TensorValue) and a.example.requires_grad) for a in args]
    ctx = trace.call_python(polyfills.context, [TupleValue(needs)])
    with trace.function_reads.inside(pending=False) if graded else contextlib.nullcontext():
        outputs = _parts(trace.call(_forward_of(trace, cls), [cls, ctx, *args]))
    tensors = [value for value in outputs if isinstance(value, TensorValue)]
    dirty = ctx.getattr(trace, "dirty").unpack(trace)
    if any(not _may_be_written(trace, value, outputs, rehearsal) for value in dirty):
        raise _refused(cls, "it marks an argument as written that others may see")
    rehearsal.versions = [(value, version) for value, version in rehearsal.versions if value not in dirty]
    if not graded or not any(need.value for need in needs):
        return ""
    if len(tensors) > 1 and ctx.getattr(trace, "as_none").as_constant():
        return "sees which outputs have no gradient"
    trace.type_attr(cls.value, "backward")  # guarded
    why = reads_late(cls.value.backward) or _late_in_context(trace, ctx)
    if why:
        return why
    trace.late_code.note(cls.value.backward)
    grads = [
        torch_call(trace, torch.zeros_like, [out], {}) if isinstance(out, TensorValue) else Constant(None)
        for out in outputs
    ]
    begun, (draws, trace.calls.draws) = trace.effects.begin(), (trace.calls.draws, False)
    try:
        trace.call_python(polyfills.backward, [cls, ctx, *grads])
        changes, random = trace.effects.changed_older(begun), trace.calls.draws
    except Raised as raised:
        raise _refused(cls, f"its backward raises {raised.value.describe()}") from None
    finally:
        trace.calls.draws = trace.calls.draws or draws
    return "draws random numbers" if random else "changes its context" if changes else ""


def _may_be_written(trace: Trace, value: Value, outputs: list[Value], rehearsal: Rehearsal) -> bool:
    """Whether a custom function may write an argument that it gives back: the trace has made it, for this call alone."""
    if not isinstance(value, TensorValue) or value.obj is not MISSING or value not in outputs:
        return False
    plain = type(value.example) is ShapeTensor and not value.example._is_view() and value.data_of is None
    others = [
        v for v in trace.tensors.by_example.values() if v is not value and type(v.example) is ShapeTensor
    ]
    used = any(user in rehearsal.known for user in value.node.users)
    return plain and not used and all(v.example.memory is not value.example.memory for v in others)


def _late_in_context(trace: Trace, ctx: Value) -> str:
    """Why a backward may find its context changed, in words."""
    assert isinstance(ctx, UserObject)
    table = ctx.dict(trace)
    held = [] if table is None else [value for _, value in table.load().values()]
    return next(("reads an object that may change" for value in held if not _is_settled(value)), "")


def _is_shared(value: Value) -> bool:
    """Whether a value is a container from outside, which others may change, or holds one."""
    if type(value) is TupleValue:
        return any(map(_is_shared, value.items))
    return isinstance(value, SequenceValue | DictValue | SetValue) and value.source is not None


def _is_settled(value: Value) -> bool:
    """Whether a value stays the same until a backward reads it: a tensor, a number, a container made here."""
    if isinstance(value, TensorValue | SizeValue | FloatValue):
        return True
    if isinstance(value, UserObject):
        return value.obj is not MISSING and is_record(value.obj)
    if isinstance(value, FunctionValue):
        return value.fn is not MISSING and not reads_late(value.fn)
    if isinstance(value, SequenceValue):
        return (value.source is None or type(value) is TupleValue) and all(map(_is_settled, value.items))
    if isinstance(value, ClassValue):
        return trusted_class(value.value)
    if isinstance(value, PythonModule):
        return trusted_module(vars(value.value).get("__name__"))
    return isinstance(value, Constant) and (not isinstance(value, EnumConstant) or value.is_plain)


def _owner(value: TensorValue) -> int:
    return id(value.example._base if value.example._is_view() else value.example)


def _refused(cls: Value, cause: str) -> Unsupported:
    return unsupported(
        "autograd",
        f"{cls.describe()}.apply is called",
        cause,
        cure="write it with torch functions, or leave it outside the compiled function",
    )


# Checkpoints ------------------------------------------------------------------------------------------------
@builtin_rule(checkpointing.checkpoint)
def _checkpoint(trace: Trace, function: Value, /, *args: Value, **kwargs: Value) -> Value:
    """The function is inlined. Eager repeats its side effects in the backward: then it
    breaks the graph.
    """
    given = kwargs
    contexts = given.pop("context_fn", None)
    policy = None if contexts is None else selective_policy(trace, contexts)
    options = {
        name: given.pop(name).as_constant() if name in given else default
        for name, default in _DEFAULTS.items()
    }
    reentrant = options["use_reentrant"] is True
    _check_options(options, reentrant and (policy is not None or bool(given)))
    if not torch.is_grad_enabled():
        return trace.call(function, [*args], given)
    _check_call(trace, args, reentrant)
    before = versions(trace)
    with _recomputed(trace, policy) as facts:
        result = trace.call(function, [*args], given)
    unsupported_if(
        not facts.asked.isdisjoint(_ASKED_ANEW | (_OF_GRADIENTS if reentrant else set())),
        "autograd",
        "a checkpointed function asks for a setting of PyTorch",
        "its recomputation may find another one",
        "pass the setting as an argument",
    )
    _check_repeatable(trace, before, facts.has_effects)
    unsupported_if(
        facts.draws and not options["preserve_rng_state"],
        "autograd",
        "a checkpoint draws random numbers and does not preserve the generator's state",
        "its recomputation draws others",
        "preserve_rng_state=True",
    )
    unsupported_if(
        reentrant and any(part in args or _lacks_gradient(part) for part in _parts(result)),
        "autograd",
        "a reentrant checkpoint returns an argument or a tensor without a gradient: eager gives both a gradient",
    )
    return result


_DEFAULTS: dict[str, Any] = {
    "use_reentrant": None,
    "determinism_check": "default",
    "debug": False,
    "early_stop": True,
    "preserve_rng_state": True,
}
_HARMLESS = frozenset(("use_reentrant", "determinism_check", "early_stop", "preserve_rng_state"))
# Settings that no recomputation puts back, and questions whose answers differ in a reentrant checkpoint's forward.
_ASKED_ANEW = {"get_default_dtype", "get_default_device", "are_deterministic_algorithms_enabled"}
_OF_GRADIENTS = {"is_grad_enabled", "requires_grad", "is_leaf", "grad_fn"}


def _check_options(options: dict[str, Any], for_another_kind: bool) -> None:
    """Break at options that change the recomputation. for_another_kind: some are for checkpoints that are not
    reentrant."""
    unusual = {
        name for name, default in _DEFAULTS.items() if name not in _HARMLESS and options[name] is not default
    }
    unsupported_if(
        unusual or for_another_kind or options["use_reentrant"] is None,
        "autograd",
        "a checkpoint has options of its own",
        ", ".join(sorted(unusual)) or "use_reentrant is not given",
        "call it with use_reentrant=False alone",
    )


def _check_call(trace: Trace, args: Sequence[Value], reentrant: bool) -> None:
    """Break at functions that a recomputation could run in another way."""
    unsupported_if(
        reentrant and not any(isinstance(a, TensorValue) and a.example.requires_grad for a in args),
        "autograd",
        "a reentrant checkpoint has no argument that requires a gradient",
        "its result has none then",
        "use_reentrant=False",
    )
    unsupported_if(
        not trace.sizes.policy.checkpoints,
        "autograd",
        "a checkpoint is called",
        "the program writes a tensor that a checkpointed function has read: its recomputation finds the new contents",
        "write the tensor before the checkpoint, or give it a clone",
    )


@dataclasses.dataclass
class _Recomputed:
    """Facts of a function that the backward runs again."""

    draws: bool = False
    has_effects: bool = False
    asked: set[str] = dataclasses.field(default_factory=set)  # settings, and facts of histories


@contextlib.contextmanager
def _recomputed(trace: Trace, policy: SavePolicy | None) -> Generator[_Recomputed]:
    """Calls of the graph that are made again in the backward; their facts are known when the region ends."""
    effects, facts, n_calls = trace.effects, _Recomputed(), len(trace.effects.calls)
    pending = effects.changes_objects
    touched, effects.touched, begun = effects.touched, {}, effects.begin()
    outer, trace.graph.recompute = trace.graph.recompute, trace.graph.recompute or policy or True
    draws, trace.calls.draws = trace.calls.draws, False
    asked, trace.calls.asked = trace.calls.asked, facts.asked
    try:
        with trace.checkpoint_reads.inside(pending):
            yield facts
    finally:
        trace.graph.recompute = outer
        facts.draws, trace.calls.draws = trace.calls.draws, trace.calls.draws or draws
        trace.calls.asked = asked | facts.asked
        inside, effects.touched = effects.touched, {**touched, **effects.touched}
        changed = any(not isinstance(value, ModeEffect) for value in inside)
        facts.has_effects = effects.changed_older(begun) or changed or len(effects.calls) > n_calls


def _check_repeatable(trace: Trace, before: list[tuple[TensorValue, Any]], has_effects: bool) -> None:
    unsupported_if(
        has_effects,
        "autograd",
        "a checkpointed function has side effects",
        "its recomputation has them again",
    )
    known = dict(before)
    unsupported_if(
        any(
            version != known.get(value, value.first_version if value.source else version)
            for value, version in versions(trace)
        ),
        "autograd",
        "a checkpointed function writes a tensor from outside",
        "its recomputation writes it again",
    )


def _parts(result: Value) -> list[Value]:
    return result.items if isinstance(result, SequenceValue) else [result]


def _lacks_gradient(part: Value) -> bool:
    """Whether a result could have a gradient and has none."""
    return (
        isinstance(part, TensorValue)
        and not part.example.requires_grad
        and (part.example.is_floating_point() or part.example.is_complex())
    )


# Gradients inside the forward -------------------------------------------------------------------------------
@builtin_rule(torch.autograd.grad)
def _grad(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """One node: PyTorch's engine runs it in the trial, in the recording and in an eager graph. All that it
    may reach must be in the graph, and there may be no hooks at its border."""
    unsupported_if(
        trace.effects.calls,
        "autograd",
        "torch.autograd.grad is called",
        "a hook may be put on after the graph",
    )
    given = [TupleValue(a.unpack(trace)) if isinstance(a, Iterator) else a for a in args]
    for value in trace.tensors.by_example.values():
        if value.obj is MISSING or not value.example.requires_grad:
            continue
        facts = [
            trace.reader.attribute(value.source, value.obj, name) for name in ("is_leaf", "_backward_hooks")
        ]
        if [fact.as_constant() if fact is not None and fact.is_constant() else fact for fact in facts] != [
            True,
            None,
        ]:
            stop = unsupported(
                "autograd",
                "torch.autograd.grad is called",
                "a tensor from outside has a history or a hook",
                "compile what calculates it too, or call it outside the compiled function",
            )
            stop.whole = _inside_of_graph(trace, given[1] if len(given) > 1 else kwargs.get("inputs"))
            raise stop
    return torch_call(trace, torch.autograd.grad, given, kwargs)


def _inside_of_graph(trace: Trace, wanted: Value | None) -> bool:
    """Whether gradients are asked of what this trace has calculated: once compiled, it is one node of autograd,
    and nothing inside of it can be asked for."""
    if wanted is None or is_none(wanted):
        return False
    parts = [wanted] if isinstance(wanted, TensorValue) else wanted.unpack(trace)
    return any(isinstance(p, TensorValue) and p.obj is MISSING and not p.example.is_leaf for p in parts)


def _refuse_backward(name: str, place: int, trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """The rule of a function whose argument at `place` says what gathers gradients."""
    stop = unsupported("autograd", f"{name} is called", "it changes autograd's state")
    stop.whole = _inside_of_graph(trace, args[place] if len(args) > place else kwargs.get("inputs"))
    raise stop


builtin_rule(torch.Tensor.backward)(functools.partial(_refuse_backward, "Tensor.backward", 4))
builtin_rule(torch.autograd.backward)(functools.partial(_refuse_backward, "torch.autograd.backward", 5))


# Hooks on gradients -----------------------------------------------------------------------------------------
class HandleValue(Value):
    """What `register_hook` gives; nothing is to be done with it in the trace."""

    __slots__ = ()
    kind = RemovableHandle


def _hooked_later(trace: Trace, tensor: Value) -> TensorValue | None:
    """The tensor if a hook may be put on it after the graph."""
    if not isinstance(tensor, TensorValue) or tensor.obj is MISSING or not tensor.example.requires_grad:
        return None
    return None if tensor.written or trace.sizes.in_body or trace.graph.recompute else tensor


def _has_been_used(tensor: Value | None) -> bool:
    """Whether the trace has calculated something from a tensor that it made: a hook that is put on it behind the
    graph would not be told of the gradient from there."""
    return (
        isinstance(tensor, TensorValue)
        and tensor.obj is MISSING
        and tensor.example.requires_grad
        and bool(tensor.node.users)
    )


@builtin_rule(torch.Tensor.retain_grad)
def _retain_grad(trace: Trace, tensor: Value) -> Value:
    stop = unsupported("autograd", "Tensor.retain_grad is called", "it changes autograd's state")
    stop.whole = _has_been_used(tensor)
    raise stop


@builtin_rule(torch.Tensor.register_hook)
def _register_hook(trace: Trace, tensor: Value, hook: Value) -> Value:
    try:
        return _hooked(trace, tensor, hook)
    except Unsupported as stop:
        stop.whole = stop.whole or _has_been_used(tensor)
        raise


def _hooked(trace: Trace, tensor: Value, hook: Value) -> Value:
    """A node that hooks the function's body on to the tensor; autograd calls it in the recording too. A tensor
    from outside gets the program's own function after the graph, which hands the whole gradient to it."""
    late = _hooked_later(trace, tensor)
    if late is not None:
        trace.effects.shown.append((late, version(late.example)))
        trace.effects.calls.append((trace.make(torch.Tensor.register_hook), [tensor, hook], {}))
        return HandleValue()
    if (  # an output that is a view of another one gets its gradient around the compiled graph
        not isinstance(tensor, TensorValue)
        or tensor.obj is not MISSING
        or not tensor.example.requires_grad
        or tensor.example._is_view()
        or trace.sizes.in_body
        or trace.graph.recompute
    ):
        raise unsupported("autograd", "Tensor.register_hook is called", "it changes the tensor's state")
    draws, trace.calls.draws = trace.calls.draws, False
    _refuse_late_hook(_late_in_function(hook))
    if isinstance(hook, FunctionValue):
        trace.late_code.note(_stand_in(hook))
    with preserved_modes():
        compat.set_grad_enabled(False)
        gradient = tensor.example.detach()
        body, free = interpret(trace, hook, (GRADIENT, {}), [gradient], name="register_hook")
    _refuse_late_hook("draws random numbers" if trace.calls.draws else "")
    trace.calls.draws = draws
    results = next(iter(reversed(body.gm.graph.nodes))).meta["val"]
    spec = tensor.spec
    unsupported_if(
        body.result is not None and [(r.shape, r.dtype) for r in results] != [(spec.shape, spec.dtype)],
        "autograd",
        "a hook gives something other than the tensor's gradient",
    )
    torch_call(trace, Hook(body), [tensor, *free], {})
    return HandleValue()


def _refuse_late_hook(why: str) -> None:
    unsupported_if(
        why,
        "autograd",
        "Tensor.register_hook is called",
        f"the hook {why} when the backward runs",
        "pass constants to it, or put it on a tensor outside of the compiled function",
    )


def _late_in_function(hook: Value) -> str:
    """Why a function that is called later may find something else than now, in words."""
    if not isinstance(hook, FunctionValue):
        return "" if isinstance(hook, Builtin) else "reads an object that may change"
    return reads_late(_stand_in(hook))


def _stand_in(function: FunctionValue) -> types.FunctionType:
    """A real function of the same code. Cells whose contents stay hold a module, as a name that is none of state."""
    if function.fn is not MISSING:
        return function.fn
    cells = []
    for cell in function.closure:
        contents = cell.contents if cell.settled else None
        if isinstance(contents, FunctionValue):
            cells.append(types.CellType(_stand_in(contents)))
        else:
            cells.append(
                types.CellType(torch if contents is not None and _is_settled(contents) else object())
            )
    return types.FunctionType(function.code, function.globals.obj, closure=tuple(cells))
