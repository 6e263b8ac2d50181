"""The Python of an update, read before it runs once over stand-ins: may that run stand for all later ones?

Uses of parameters, gradients, state and options of groups become the program. What else this Python looks
up must be guarded, and it must change nothing else: each function of the user's is read instruction by
instruction, constants become guards, functions that it names are read too, anything else is refused.
PyTorch's own functions look up nothing else. A frame hook refuses others during the trace.

>>> reads = Reads(optimizer)
>>> reads.update(optimizer.step, clip)         # raises NotWhole
>>> reads.watch(run_update)                    # raises NotWhole at a function that was not read
>>> reads.lookups().hold()
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from .. import _C
from ..capture.dispatch import compile_program
from ..capture.guards import Absent, ConstEquals, DictKeys, Guard, IdIs, first_failure, is_constant
from ..capture.source import (
    Attr,
    Const,
    DictItem,
    InstanceDict,
    Missing,
    SlotOf,
    Source,
    TypeAttr,
    lookup_type_attr,
)
from .instructions import CodeReader, named
from .pure_functions import OPTIMIZERS, is_harmless, is_of_scheduler, is_trusted
from .step_trace import NotWhole

# Methods that PyTorch gives every optimizer, which look up nothing.
_OF_ALL = frozenset({"step", "_cuda_graph_capture_health_check", "_optimizer_step_code"})


@dataclass(frozen=True)
class Lookups:
    """The look-ups of one traced update's Python."""

    guards: tuple[Guard, ...]
    program: _C.GuardProgram

    def hold(self) -> bool:
        """Whether it would look up the same again."""
        return self.program.check(()) is not None

    def changed(self) -> str:
        """Why it would not, for people."""
        failed = first_failure(self.guards, ())
        return "" if failed is None else failed.reason(())


class Reads:
    """The look-ups of one update's Python. `guards`: under which their answers stay the same; `codes`: what
    was read.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.root = optimizer, Const(optimizer, "optimizer")
        self.cls = Const(type(optimizer), type(optimizer).__name__)
        self.guards: dict[Guard, None] = {}
        self.codes: set[types.CodeType] = set()
        self.refusal: NotWhole | None = None
        self._known: set[tuple[int, bool]] = set()

    def guard(self, guard: Guard) -> None:
        """One more fact."""
        self.guards[guard] = None

    def refuse(self, what: str) -> NoReturn:
        """The update is not for a program; remembered, since the Python that runs may catch the exception."""
        self.refusal = NotWhole("DM510", what)
        raise self.refusal

    def lookups(self) -> Lookups:
        """All of it, as guards that C checks."""
        return Lookups(tuple(self.guards), compile_program(self.guards, []))

    # -- where reading begins --------------------------------------------------------------------------------
    def update(self, step: Callable[[], Any] | None, clip: Callable[..., Any] | None) -> None:
        """Read `clip` and the optimizer's `step` (None: the one that it has at each step)."""
        if any(cls.__module__.startswith("torch.distributed") for cls in type(self.optimizer).__mro__):
            self.refuse(f"{type(self.optimizer).__name__} works on the optimizers of several processes")
        if clip is not None:
            self._callable(Const(clip, "clip"), clip)
        if step is None:
            self.member("step")
        else:
            self._callable(Const(step, "step"), step)

    def _callable(self, source: Source, value: Any) -> None:
        """A callable from outside: a function, a method of the optimizer, a `partial` of a function."""
        if type(value) is functools.partial:
            keywords = Attr(source, "keywords")
            self.guard(DictKeys(keywords, tuple(value.keywords)))
            for key, held in value.keywords.items():
                self.value(DictItem(keywords, key), held)
            for k, held in enumerate(value.args):
                self.value(Const(held, f"{source}.args[{k}]"), held)
            return self._callable(Const(value.func, f"{source}.func"), value.func)
        if is_of_scheduler(value):
            return self.function(value, True)
        self.value(source, value)

    def watch(self, run: Callable[[], None]) -> None:
        """Run the update over its stand-ins; NotWhole at the first function that was not read."""
        _C.FrameHook(self._entered).call(run)
        if self.refusal is not None:
            raise self.refusal

    def _entered(self, code: types.CodeType, function: types.FunctionType) -> bool | None:
        module = function.__globals__.get("__name__")
        if str(module).startswith("importlib."):
            return False  # finders of modules are none of the update
        if code.co_varnames[:1] == ("event",) and code.co_argcount == 2:
            return False  # an audit hook (sys.addaudithook), which libraries such as filelock set
        if code not in self.codes and not is_trusted(module):
            self.refuse(f"{named(code)} runs inside of the update, where nothing names it")
        if str(module).startswith((*OPTIMIZERS, "torch.nn.utils.")):
            self._of_torch(code, function)
        return None

    def _of_torch(self, code: types.CodeType, function: types.FunctionType) -> None:
        """A function of an update of PyTorch's: that it is still that one."""
        space = function.__globals__
        if getattr(space.get(code.co_name), "__code__", None) is code:
            self.guard(IdIs(DictItem(Const(space, space["__name__"]), code.co_name), space[code.co_name]))
        for name in code.co_names:
            if name in vars(self.optimizer):
                self._attribute(name)

    def _attribute(self, name: str) -> None:
        """An attribute of the optimizer that PyTorch's own code may read."""
        value = vars(self.optimizer)[name]
        if name not in ("param_groups", "state", "_opt_called") and is_constant(value):
            self.guard(ConstEquals(DictItem(InstanceDict(self.root), name), value))

    # -- values ----------------------------------------------------------------------------------------------
    def value(self, source: Source, value: Any) -> None:
        """A value from outside that a function uses as it is."""
        if is_constant(value):
            return self.guard(ConstEquals(source, value))
        if isinstance(value, types.MethodType) and value.__self__ is self.optimizer:
            self.guard(IdIs(source, value))
            held: Any = value.__func__
            return self.function(held, True)
        if value is self.optimizer or is_harmless(value, self.optimizer):
            return self.guard(IdIs(source, value))
        if type(value) is types.FunctionType:
            self.guard(IdIs(source, value))
            return self.function(value, False)
        self.refuse(f"{source} is read, {_kind(value)}, of which a program cannot see whether it changes")

    def function(self, function: types.FunctionType, is_method: bool) -> None:
        """Read a function and its callees. `is_method`: its first argument is the optimizer."""
        if (id(function), is_method) in self._known:
            return
        self._known.add((id(function), is_method))
        held, code = Const(function, function.__qualname__), function.__code__
        self.guard(IdIs(SlotOf(held, "__code__"), code))
        module = function.__globals__.get("__name__")
        if is_trusted(module) and module != __package__:  # ours are read as the user's are
            return self._wrapper(function, held, is_method)
        self._defaults(function, held)
        CodeReader(self, function, held, is_method).read()

    def _wrapper(self, function: types.FunctionType, held: Source, is_method: bool) -> None:
        """A function of PyTorch's around others (a hook, `no_grad`): those are in its closure."""
        name = str(function.__globals__.get("__name__"))
        if not name.startswith((*OPTIMIZERS, "torch.utils._contextlib", "torch.nn.utils.clip_grad")):
            self.refuse(f"{name}.{function.__qualname__} is called, which a program cannot follow")
        for cell in function.__closure__ or ():
            inner = cell.cell_contents
            if type(inner) is types.FunctionType:
                own = inner.__globals__.get("__name__")
                if not is_trusted(own) or inner.__closure__ or str(own).startswith(OPTIMIZERS):
                    self.function(inner, is_method)
                continue
            owner = inner.__self__ if type(inner) is types.MethodType else inner
            kind = type(owner).__module__.partition(".")[0]
            if not (is_constant(owner) or kind == "torch" or isinstance(owner, (type, weakref.ref))):
                self.refuse(f"{held} holds {_kind(owner)}")

    def _defaults(self, function: types.FunctionType, held: Source) -> None:
        if not is_constant(function.__defaults__):
            self.refuse(f"the defaults of {held} can change in place")
        self.guard(ConstEquals(SlotOf(held, "__defaults__"), function.__defaults__))
        if not function.__kwdefaults__:
            return self.guard(IdIs(SlotOf(held, "__kwdefaults__"), function.__kwdefaults__))
        for key, value in function.__kwdefaults__.items():
            self.value(DictItem(SlotOf(held, "__kwdefaults__"), key), value)

    # -- the optimizer's own ---------------------------------------------------------------------------------
    def member(self, name: str) -> bool:
        """An attribute of the optimizer that is used as it is: a constant or a method. False: it has none."""
        own, inherited = DictItem(InstanceDict(self.root), name), TypeAttr(self.cls, name)
        if name in vars(self.optimizer):
            found = vars(self.optimizer)[name]
            if is_of_scheduler(found):
                self.guard(IdIs(own, found))
                self.function(found, True)
                self._inherited(name)
            else:
                self.value(own, found)
            return True
        self.guard(Absent(own))
        try:
            found = lookup_type_attr(type(self.optimizer), name)
        except Missing:
            return False
        if type(found) in (staticmethod, classmethod):
            self.guard(IdIs(inherited, found))
            self.function(found.__func__, False)
        elif type(found) is types.FunctionType:
            self.guard(IdIs(inherited, found))
            self._inherited(name)
        else:
            self.value(inherited, found)
        return True

    def _inherited(self, name: str) -> None:
        """A method, and those behind it that `super()` leads to."""
        for cls in type(self.optimizer).__mro__:
            found = vars(cls).get(name)
            if found is not None and cls is torch.optim.Optimizer and name not in _OF_ALL:
                self.refuse(f"the update calls {name} of the optimizer")
            if type(found) is types.FunctionType and cls is not torch.optim.Optimizer:
                self.guard(IdIs(TypeAttr(Const(cls, cls.__name__), name), found))
                self.function(found, True)


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of {type(value).__name__}"
