"""torch.nn.Module instances: user objects with short cuts for what every module does, calls without hooks and
attribute lookup.

The short cuts read (and guard) exactly what `Module.__call__`, `__getattr__` and `__setattr__` would read.

>>> value.call(trace, [x], {})  # no hooks: goes straight to forward, guarded by the hooks' tables being empty
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import __future__ as future
from torch.nn.modules import module as torch_module

from ...base import compat
from ..breaks import unsupported, unsupported_if
from ..bytecode import decode
from ..guards import TensorIs, TypeIs
from ..lazy_modules import initialise
from ..protocol import is_data_descriptor
from ..source import Const, DictItem, Source
from .base import MISSING, CallRule, Trace, Value, builtin_rule, call_finder, wrap_rule
from .constant import Constant, is_none
from .containers import DictValue, SetValue, contents_of
from .instances import inline_function
from .tensor import TensorValue
from .user_object import UserObject, content_base

Module = torch.nn.Module
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
)
_CALL_CHAIN = {
    "__call__": Module.__dict__["__call__"],
    "_wrapped_call_impl": Module.__dict__["_wrapped_call_impl"],
    "_call_impl": Module.__dict__["_call_impl"],
}


class NNModuleValue(UserObject):
    """An instance of torch.nn.Module or a subclass."""

    __slots__ = ()

    # Calls --------------------------------------------------------------------------------------------------
    def call(self, trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
        plain, graph = self._plain_call(trace), trace.graph
        if not plain:
            initialise(trace, self.cls, self.obj, args, kwargs)
        outer, graph.modules = graph.modules, (*graph.modules, (str(self.source), self.cls))
        try:
            if plain:
                return trace.tail_call(self.getattr(trace, "forward"), args, kwargs)
            return super().call(trace, args, kwargs)
        finally:
            graph.modules = outer

    def _plain_call(self, trace: Trace) -> bool:
        """Whether `module(...)` is `module.forward(...)`: nothing overridden, no hooks, not compiled on its
        own.
        """
        cls = self.cls
        own = any(trace.type_attr(cls, name) is not original for name, original in _CALL_CHAIN.items())
        if own or self.instance_attr(trace, "_call_impl") is not None:
            return False
        self.refuse_disabled(trace)
        return (
            is_none(self.instance_attr(trace, "_compiled_call_impl"))
            and not any(self._filled(trace, name) for name in _HOOKS)
            and not _global_hooks(trace)
        )

    def refuse_disabled(self, trace: Trace) -> None:
        """Break the graph where calls of this module are left alone."""
        mark = self.instance_attr(trace, "_dynamotor_disabled")
        if mark is not None:
            kind = "disabled" if mark.as_constant() else "unsupported-call"
            raise unsupported(kind, f"{self.describe()} is marked with dynamotor.disable")

    def _filled(self, trace: Trace, table: str) -> bool:
        attributes = self.dict(trace)
        if attributes is not None and attributes.holds_empty_dict(table):
            return False
        found = self.instance_attr(trace, table)
        contents = None if found is None else contents_of(found)
        return contents is None or contents.truth(trace)

    # Attributes ---------------------------------------------------------------------------------------------
    def getattr(self, trace: Trace, name: str) -> Value:
        cls = self.cls
        if trace.type_attr(cls, "__getattr__") is not Module.__getattr__ or (
            trace.type_attr(cls, "__getattribute__") is not object.__getattribute__
        ):
            return super().getattr(trace, name)
        raw = trace.type_attr(cls, name)
        if raw is not MISSING and is_data_descriptor(raw):
            return super().getattr(trace, name)
        found = self.instance_attr(trace, name)
        if found is not None:
            return found
        if raw is not MISSING:
            return trace.bind(raw, name, self, cls)
        for table in _TABLES:
            found = self.table(trace, table).lookup(name)
            if found is not None:
                if isinstance(found, TensorValue) and found.pinned and table == "_buffers":
                    _unpin_if_set(trace, name, found)
                return found
        raise trace.error(AttributeError, f"'{cls.__name__}' object has no attribute '{name}'")

    def table(self, trace: Trace, name: str) -> DictValue:
        """The dict `_parameters`, `_buffers` or `_modules` of the instance (an empty one before
        Module.__init__).
        """
        found = self.instance_attr(trace, name)
        contents = None if found is None else contents_of(found)
        return contents if isinstance(contents, DictValue) else DictValue([])

    def setattr(self, trace: Trace, name: str, value: Value) -> None:
        if trace.type_attr(self.cls, "__setattr__") is not Module.__setattr__ or self.obj is MISSING:
            super().setattr(trace, name, value)
            return
        held = any(self.table(trace, t).lookup(name) is not None for t in ("_parameters", "_modules"))
        if held or issubclass(value.python_type(), Module) or _is_registered(trace, value):
            raise unsupported(
                "unsupported-mutation",
                f"a parameter or submodule {name!r} of {self.describe()} is set",
                cure="set parameters and submodules outside the compiled function",
            )
        buffers = self.table(trace, "_buffers")
        old = buffers.lookup(name)
        if old is not None:
            if not isinstance(value, TensorValue) and not is_none(value):
                raise trace.error(
                    TypeError,
                    f"cannot assign '{value.python_type().__name__}' object to buffer '{name}' "
                    "(torch.nn.Buffer, torch.Tensor or None required)",
                )
            if isinstance(old, TensorValue):
                old.unpin(trace)
            buffers.store(trace, name, Constant(name), value)
            return
        trace.object_setattr(self, self.cls, name, value)


def _is_registered(trace: Trace, value: Value) -> bool:
    """Whether a tensor is a parameter or a buffer, which may be an attribute of it and not its class."""
    kinds = trace.make((torch.nn.Parameter, torch.nn.Buffer))
    return issubclass(value.python_type(), torch.Tensor) and trace.truth(
        trace.call(trace.make(isinstance), [value, kinds])
    )


def _unpin_if_set(trace: Trace, name: str, buffer: TensorValue) -> None:
    """A buffer that the reading function also sets is another tensor at the next call, even where a break
    keeps the setting out of this trace.
    """
    if any(i.op == "STORE_ATTR" and i.argval == name for i in decode(trace.stack.frames[-1].code).instrs):
        buffer.unpin(trace)


def _global_hooks(trace: Trace) -> bool:
    """Whether hooks for all modules are registered; guarded."""
    if not trace.modules.global_hooks:
        real = [
            (Const(table := getattr(torch_module, n), f"torch.nn.modules.module.{n}"), table)
            for n in _GLOBAL_HOOKS
        ]
        trace.modules.global_hooks = [contents_of(trace.wrap(*pair)) for pair in real]
    return any(table is None or table.truth(trace) for table in trace.modules.global_hooks)


@wrap_rule(Module, subclasses=True)
def _wrap_module(trace: Trace, source: Source, obj: Module) -> Value:
    if isinstance(obj, compat.LazyGraphModule):
        obj.real_recompile()  # else its `forward` writes its code at the first call
    cls = type(obj)
    trace.reader.guard(TypeIs(source, cls))
    unsupported_if(
        isinstance(obj, torch.jit.ScriptModule), "unsupported-call", f"{cls.__name__} is a TorchScript module"
    )
    _note_if_repeated(trace, source, cls)
    return NNModuleValue(cls, source, obj, content_base(trace, cls, source, obj))


def _note_if_repeated(trace: Trace, source: Source, cls: type) -> None:
    """The rest of a frame is called with one module after the other, where the program has several of the class:
    then its program is for all of them. Not without gradients, where constants are folded and reordered.
    """
    is_repeated = trace.sizes.policy.is_repeated
    inside = isinstance(source.base, DictItem) and source.base.key == "_modules"
    if (
        is_repeated is not None
        and not inside
        and not source.is_held
        and trace.calls.graded
        and is_repeated(cls)
    ):
        trace.modules.repeated.add(source)


@builtin_rule(compat.weights_have_changed)
def _weights_have_changed(trace: Trace, module: Value) -> Value:
    """Compares weights with weak references: asked for real, and the weights are guarded by identity."""
    unsupported_if(
        not isinstance(module, NNModuleValue) or module.obj is MISSING or module.obj._weights_have_changed(),
        "unsupported-call",
        "an RNN's weights were replaced",
    )
    for name in module.obj._flat_weights_names:
        weight = module.getattr(trace, name)
        if isinstance(weight, TensorValue):
            trace.reader.guard(TensorIs.of(weight.source, weight.obj))
    return Constant(False)


# Slices of module containers --------------------------------------------------------------------------------
def _new_container(trace: Trace, cls: type, modules: list[tuple[str, Value]]) -> NNModuleValue:
    """A ModuleList or Sequential made in the trace."""
    instance = NNModuleValue(cls)
    attributes = instance.dict(trace)
    assert attributes is not None
    for name, initial in vars(Module()).items():
        attributes.store(trace, name, Constant(name), _empty(initial))
    table = attributes.lookup("_modules")
    assert isinstance(table, DictValue)
    for name, module in modules:
        table.store(trace, name, Constant(name), module)
    return instance


def _empty(initial: Any) -> Value:
    if isinstance(initial, OrderedDict):
        return UserObject(OrderedDict, base=DictValue([], kind=OrderedDict))
    if isinstance(initial, dict):
        return DictValue([])
    return SetValue({}) if isinstance(initial, set) else Constant(initial)


def _slice_rule(cls: type) -> None:
    function = cls.__dict__["__getitem__"]

    @builtin_rule(function)
    def _getitem(trace: Trace, module: Value, idx: Value) -> Value:
        if not isinstance(module, NNModuleValue) or module.cls is not cls or idx.python_type() is not slice:
            return inline_function(trace, function, [module, idx], {})
        pairs = [(name, m) for name, (_, m) in module.table(trace, "_modules").load().items()][
            idx.as_constant()
        ]
        if cls is torch.nn.ModuleList:
            pairs = [(str(i), m) for i, (_, m) in enumerate(pairs)]
        return _new_container(trace, cls, pairs)


_slice_rule(torch.nn.ModuleList)
_slice_rule(torch.nn.Sequential)


# Methods that change a module's class or parameters run natively -------------------------------------------
def _refuse(name: str, trace: Trace, module: Value, /, *args: Value, **kwargs: Value) -> Value:
    copies = name == "load_state_dict" and _is_false(args[2] if len(args) > 2 else kwargs.get("assign"))
    if isinstance(module, NNModuleValue) and module.obj is not MISSING and not copies:
        wanted = _conversion(name, args, kwargs)
        if wanted is not None and _is_converted(trace, module, *wanted):
            return module
        raise unsupported(
            "unsupported-mutation",
            f"Module.{name}() is called",
            cure="call it outside the compiled function",
        )
    return inline_function(trace, getattr(Module, name), [module, *args], kwargs)


def _is_false(value: Value | None) -> bool:
    return value is None or type(value) is Constant and value.value is False


_DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "cpu": None,
}


def _conversion(name: str, args: Sequence[Value], kwargs: dict[str, Value]) -> tuple[Any, Any] | None:
    """The device and dtype (None: as they are) to which a method brings a module; None where that is not
    plain."""
    if name in _DTYPES and not args and not kwargs:
        return torch.device("cpu") if name == "cpu" else None, _DTYPES[name]
    if name != "to" or not all(a.is_constant() for a in (*args, *kwargs.values())):
        return None
    try:
        device, dtype, _, layout = compat.parse_to(
            *[a.as_constant() for a in args], **{key: a.as_constant() for key, a in kwargs.items()}
        )
    except Exception:  # eager raises it
        return None
    plain = layout is None and (dtype is None or dtype.is_floating_point)
    where_it_is = device is None or device.type == "cpu" or device.index is not None
    return (device, dtype) if plain and where_it_is else None


def _is_converted(trace: Trace, module: NNModuleValue, device: torch.device, dtype: Any) -> bool:
    """Whether a module's tensors are there already, so that bringing them there changes nothing."""
    for setting in (
        future.get_swap_module_params_on_conversion,
        future.get_overwrite_module_params_on_conversion,
    ):
        if trace.reader.ask(Const(setting, setting.__name__), setting, "the setting", lambda ask: ask()):
            return False
    own = any(
        trace.type_attr(module.cls, name) is not getattr(Module, name) or module.instance_attr(trace, name)
        for name in ("_apply", "children", "named_children")
    )
    if own or module.obj is MISSING:
        return False
    for _, value in [
        pair for t in ("_parameters", "_buffers") for pair in module.table(trace, t).load().values()
    ]:
        if is_none(value):
            continue
        if type(value) is not TensorValue or value.obj is MISSING or value.example.is_complex():
            return False
        example = value.example
        wanted = dtype if example.is_floating_point() else None
        is_there = wanted in (None, example.dtype) and device in (None, example.device)
        if not is_there or not trace.reader.ask(value.source, value.obj, "its gradient", _gradient_is_alike):
            return False
    inside = [v for _, v in module.table(trace, "_modules").load().values() if not is_none(v)]
    return all(isinstance(m, NNModuleValue) and _is_converted(trace, m, device, dtype) for m in inside)


def _gradient_is_alike(tensor: torch.Tensor) -> bool:
    grad = tensor.grad if tensor.is_leaf else None
    return grad is None or (grad.dtype, grad.device) == (tensor.dtype, tensor.device)


_REFUSED = (
    "to",
    "cuda",
    "cpu",
    "half",
    "double",
    "float",
    "bfloat16",
    "type",
    "to_empty",
    "_apply",
    "load_state_dict",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "share_memory",
    "compile",
)
_refused_functions = {getattr(Module, name): name for name in _REFUSED}


@call_finder
def _find_refused(fn: Callable[..., Any]) -> CallRule | None:
    try:
        name = _refused_functions.get(fn)
    except TypeError:
        return None
    return None if name is None else functools.partial(_refuse, name)


builtin_rule(compat.log_api_usage)(lambda trace, *names: Constant(None))
