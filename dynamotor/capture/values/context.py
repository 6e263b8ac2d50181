"""Grad mode and autocast in a trace: the regions are nodes of the graph, and the trial runs are under the
same real modes.

`torch.no_grad` and its kin are plain Python above `_set_grad_enabled`, so only that call and autocast have
rules of their own. A trace that ends inside a region leaves the mode to the run-time `finish` (see
`ModeEffect`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.autograd.profiler import record_function

from ...base import compat
from ...base.narrowing import checked
from ...graph.modes import AUTOCAST_DEVICES, autocast_state
from ...graph.spec import device_with_index
from ..breaks import unsupported, unsupported_if
from ..source import Const
from .base import ResultEmitter, Trace, Value, builtin_rule
from .constant import Constant, is_none
from .user_object import UserObject


def foreign_modes() -> bool:
    """Whether another tool watches each op: torch.jit.trace, torch.fx, forward-mode differentiation, a
    user's mode (`with torch.device(...)` is none)."""
    if (
        compat.count_dispatch_modes()
        or compat.forward_level.get() >= 0
        or (compat.tracing_state() is not None or compat.fx_is_tracing())
    ):
        return True
    return bool(compat.count_function_modes()) and any(
        not isinstance(mode, compat.DeviceContext) for mode in compat.function_mode_stack()
    )


class Standing(Value):
    """An effect of which a trace has one at most: the final write of a state of the thread, behind the graph."""

    __slots__ = ()

    def __init__(self, trace: Trace) -> None:
        super().__init__()

    @classmethod
    def known(cls, trace: Trace) -> Self | None:
        """The one of a trace that has one."""
        found = trace.effects.standing.get(cls)
        return None if found is None else checked(cls, found)

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """The one of a trace, noted as an effect."""
        found = cls.known(trace)
        if found is None:
            found = cls(trace)
            trace.effects.standing[cls] = found
        trace.effects.touch(found)
        return found

    def python_type(self) -> type:
        return type(self)

    def real(self) -> Any:
        return self


class ModeEffect(Standing):
    """The modes at the end of the trace, set after the graph when they are not those of the beginning."""

    __slots__ = ("grad", "autocast", "regions")

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.grad = trace.calls.graded
        self.autocast = autocast_state()
        self.regions: dict[Value, tuple[Any, torch.autocast]] = {}  # autocast value -> node, real region

    def replay(self, emitter: ResultEmitter) -> None:
        """Close the regions that a break left open inside the graph, and open them again after it."""
        graph = emitter.trace.graph
        for value, (_, region) in self.regions.items():
            emitter.statement(f"{emitter.constant(torch.autocast_increment_nesting)}()")
            for name in ("prev_cache_enabled", "prev", "prev_fastdtype"):  # restored by the real __exit__
                emitter.statement(f"{emitter.emit(value)}.{name} = {emitter.constant(getattr(region, name))}")
        for node, _ in reversed(self.regions.values()):
            graph.call_function(compat.exit_autocast, (node,), {})
        for device, (enabled, dtype) in autocast_state().items():
            if (enabled, dtype) != self.autocast[device]:
                emitter.statement(f"{emitter.constant(torch.set_autocast_enabled)}({device!r}, {enabled})")
                emitter.statement(
                    f"{emitter.constant(torch.set_autocast_dtype)}({device!r}, {emitter.constant(dtype)})"
                )
        if torch.is_grad_enabled() != self.grad:
            graph.call_function(compat.set_grad_enabled, (self.grad,), {})
            emitter.statement(f"{emitter.constant(compat.set_grad_enabled)}({torch.is_grad_enabled()})")


@builtin_rule(compat.set_grad_enabled)
def _set_grad_enabled(trace: Trace, flag: Value) -> Value:
    unsupported_if(
        flag.python_type() is not bool,
        "unsupported-call",
        "set_grad_enabled() is called without a bool",
    )
    enabled = flag.as_constant()
    ModeEffect.of(trace)
    if enabled != torch.is_grad_enabled():
        trace.graph.call_function(compat.set_grad_enabled, (enabled,), {})
        compat.set_grad_enabled(enabled)
    return Constant(None)


# Autocast ---------------------------------------------------------------------------------------------------
class AutocastValue(UserObject):
    """`torch.autocast(...)` made in the trace: `template` is a real one, never entered, that holds the
    settings. Unless the program `has_dtype`, the region takes the one that is set for the device."""

    __slots__ = ("template", "has_dtype")

    def __init__(self, template: torch.autocast, has_dtype: bool) -> None:
        super().__init__(type(template))
        self.template, self.has_dtype = template, has_dtype

    def instance_attr(self, trace: Trace, name: str) -> Value | None:
        found = super().instance_attr(trace, name)
        if found is None and name in self.template.__dict__:
            if name == "fast_dtype" and not self.has_dtype:
                ask, device = torch.get_autocast_dtype, self.template.device
                trace.reader.ask(
                    Const(ask, ask.__name__), ask, f"the answer to {device!r}", lambda f: f(device)
                )
            return trace.make(self.template.__dict__[name])
        return found

    def reconstruct(self, emitter: ResultEmitter) -> str:
        template, dtype = self.template, self.template.fast_dtype
        name = emitter.new_object(
            self,
            f"{emitter.constant(torch.autocast)}({template.device!r}, dtype={emitter.constant(dtype)}, "
            f"enabled={template._enabled}, cache_enabled={template._cache_enabled})",
        )
        if self._dict is not None:
            for key, value in self._dict.load().values():
                emitter.statement(f"{name}.__dict__[{emitter.emit(key)}] = {emitter.emit(value)}")
        return name


@builtin_rule(torch.autocast)
def _make_autocast(trace: Trace, *args: Value, **kwargs: Value) -> Value:
    real_args = [a.as_constant() for a in args]
    template = torch.autocast(*real_args, **{k: v.as_constant() for k, v in kwargs.items()})
    return AutocastValue(template, len(args) > 1 or "dtype" in kwargs)


def _settings(trace: Trace, value: Any) -> tuple[str, torch.dtype, bool, bool]:
    device, enabled, cache = [
        value.getattr(trace, n).as_constant() for n in ("device", "_enabled", "_cache_enabled")
    ]
    used = enabled or not isinstance(value, AutocastValue)  # a region that is off needs no dtype
    return (
        device,
        value.getattr(trace, "fast_dtype").as_constant() if used else value.template.fast_dtype,
        enabled,
        cache,
    )


@builtin_rule(torch.autocast.__enter__)
def _enter_autocast(trace: Trace, region: Value) -> Value:
    device, dtype, enabled, cache = _settings(trace, region)
    if device not in AUTOCAST_DEVICES:
        raise unsupported("context", f"autocast for device {device!r}")
    node = trace.graph.call_function(compat.enter_autocast, (device, dtype, enabled, cache), {})
    real = torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)
    effect = ModeEffect.of(trace)
    real.__enter__()
    effect.regions[region] = (node, real)
    return region


@builtin_rule(torch.autocast.__exit__)
def _exit_autocast(trace: Trace, region: Value, *error: Value) -> Value:
    entered = ModeEffect.of(trace).regions.pop(region, None)
    if entered is None:
        raise unsupported(
            "context", "an autocast region that was entered outside the captured region is left in it"
        )
    node, real = entered
    trace.graph.call_function(compat.exit_autocast, (node,), {})
    real.__exit__(None, None, None)
    return Constant(False)


# Regions that the graph does not enter ----------------------------------------------------------------------
class OpenRegions(Standing):
    """The `with torch.device(...)` and `record_function(...)` that are open in a trace. None is entered: what
    makes tensors is told the device, as PyTorch's mode tells it. Those that are open where the trace ends are
    entered behind the graph."""

    __slots__ = ("open",)

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.open: list[Value] = []

    def replay(self, emitter: ResultEmitter) -> None:
        for region in self.open:
            emitter.statement(f"{emitter.emit(region)}.__enter__()")


@builtin_rule(torch.device.__enter__, record_function.__enter__)
def _enter_region(trace: Trace, region: Value) -> Value:
    OpenRegions.of(trace).open.append(region)
    return region


@builtin_rule(torch.device.__exit__, record_function.__exit__)
def _exit_region(trace: Trace, region: Value, *error: Value) -> Value:
    regions = OpenRegions.of(trace)
    unsupported_if(
        not regions.open, "context", "a region that was entered outside the captured region is left in it"
    )
    regions.open.pop()
    return Constant(None)


def _device(trace: Trace) -> Value | None:
    """That of the innermost region of a device."""
    regions = OpenRegions.known(trace)
    inner = reversed(regions.open if regions else [])
    return next((one for one in inner if one.python_type() is torch.device), None)


@builtin_rule(torch.get_default_device)
def _default_device(trace: Trace) -> Value:
    device = _device(trace)  # the `Ambient` row compares the one outside
    return Constant(torch.get_default_device() if device is None else device_with_index(device.as_constant()))


def on_device(trace: Trace, fn: Callable[..., Any], kwargs: dict[str, Value]) -> dict[str, Value]:
    """The keywords of a call with the device of the innermost region, where it makes a tensor and names none."""
    device = _device(trace) if OpenRegions in trace.effects.standing else None
    if device is None or fn not in compat.device_constructors() or not is_none(kwargs.get("device")):
        return kwargs
    return kwargs | {"device": device}
