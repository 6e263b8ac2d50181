"""A function of an update, read instruction by instruction, for its look-ups outside of its arguments."""

from __future__ import annotations

import builtins
import dis
import inspect
import types
from typing import Any, NoReturn, Protocol

import torch

from .._C import is_plain_access
from ..capture.guards import Absent, Guard, IdIs, TypeIs, is_constant
from ..capture.source import (
    Const,
    DictItem,
    InstanceDict,
    Missing,
    SeqItem,
    SlotOf,
    Source,
    TypeAttr,
    lookup_type_attr,
)
from .pure_functions import is_of_scheduler, traced_names

_SKIPPED = frozenset(
    """CACHE PUSH_NULL EXTENDED_ARG PRECALL RESUME NOP COPY_FREE_VARS MAKE_CELL NOT_TAKEN KW_NAMES
    """.split()  # noqa: SIM905
)
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_CLOSURE = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
# Instructions that change something outside, or that run later than the function that has them.
_REFUSED = {
    **dict.fromkeys(("STORE_GLOBAL", "DELETE_GLOBAL"), "sets a global"),
    **dict.fromkeys(("STORE_ATTR", "DELETE_ATTR"), "sets an attribute"),
    **dict.fromkeys(("IMPORT_NAME", "IMPORT_FROM", "IMPORT_STAR"), "imports"),
    **dict.fromkeys(("LOAD_BUILD_CLASS", "LOAD_NAME", "LOAD_LOCALS"), "makes a class"),
    **dict.fromkeys(("MATCH_CLASS", "CHECK_EG_MATCH"), "matches types"),
    **dict.fromkeys(("GET_AWAITABLE", "GET_ANEXT", "SEND", "ASYNC_GEN_WRAP"), "waits"),
}
# Exceptions that Python's numbers and dicts raise, in a trace too.
_ERRORS = frozenset({"ZeroDivisionError", "OverflowError", "KeyError"})


class Reading(Protocol):
    """A collector of look-ups."""

    optimizer: torch.optim.Optimizer
    root: Const
    codes: set[types.CodeType]

    def guard(self, guard: Guard) -> None:
        """One more fact."""

    def value(self, source: Source, value: Any) -> None:
        """A value from outside that a function uses as it is."""

    def member(self, name: str) -> bool:
        """An attribute of the optimizer; False where it has none."""

    def refuse(self, what: str) -> NoReturn:
        """The function cannot be part of a program."""


class CodeReader:
    """Reads the instructions of one function, and of those that it makes: every look-up with the attributes
    and constant keys that follow it is one value from outside.
    """

    def __init__(self, reads: Reading, function: types.FunctionType, held: Source, is_method: bool) -> None:
        self.reads, self.function, self.held, self.code = reads, function, held, function.__code__
        arguments = self.code.co_varnames[: self.code.co_argcount]
        self.me = arguments[0] if is_method and arguments else ""
        self.instructions: list[dis.Instruction] = []
        self.at = 0

    def read(self) -> None:
        """Read it all; NotWhole at instructions that a program cannot replace."""
        if self.code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            self.reads.refuse(f"{named(self.code)} is a generator")
        self._tree(self.code)

    def _tree(self, code: types.CodeType) -> None:
        self.reads.codes.add(code)
        self.instructions = [i for i in dis.get_instructions(code) if i.opname not in _SKIPPED]
        self.at = 0
        while self.at < len(self.instructions):
            self._next(code)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._tree(inner)

    def _next(self, code: types.CodeType) -> None:
        found = self.instructions[self.at]
        self.at += 1
        name, op = found.argval, found.opname
        if op in _REFUSED:
            self.reads.refuse(f"{named(self.code)} {_REFUSED[op]}: {name}")
        elif op == "LOAD_GLOBAL":
            self._follow(*self._global(name))
        elif op in _CLOSURE and name in self.code.co_freevars:
            self._follow(*self._cell(name))
        elif op in ("STORE_DEREF", "DELETE_DEREF") and name in self.code.co_freevars:
            self.reads.refuse(f"{named(self.code)} sets {name} of the function around it")
        elif op in _CLOSURE or op.startswith("LOAD_FAST") and code is self.code:
            if self.me and (name[-1] if isinstance(name, tuple) else name) == self.me:
                self._follow(self.reads.root, self.reads.optimizer)
        elif op.startswith("STORE_FAST") and self.me in (name if isinstance(name, tuple) else (name,)):
            self.me = self.reads.refuse(f"{named(self.code)} sets {name}")
        elif op in ("IS_OP", "CHECK_EXC_MATCH", "PUSH_EXC_INFO"):
            self._compared(op)
        elif op in _ATTRIBUTES or op == "LOAD_SUPER_ATTR":
            self._attribute(name if isinstance(name, str) else name[-1])

    def _compared(self, op: str) -> None:
        """Identities of numbers are not those of their stand-ins, and an exception of the trace is not one of
        the step's.
        """
        before, after = self.instructions[max(self.at - 2, 0)], self.instructions[self.at]
        of_constant = before.opname == "LOAD_CONST" and isinstance(before.argval, (bool, type(None)))
        if op == "IS_OP" and not of_constant:
            self.reads.refuse(f"{named(self.code)} asks whether two values are one object")
        if op == "CHECK_EXC_MATCH" and before.argval not in _ERRORS:
            self.reads.refuse(f"{named(self.code)} catches {before.argval}")
        if op == "PUSH_EXC_INFO" and after.opname == "POP_TOP":
            self.reads.refuse(f"{named(self.code)} catches all exceptions")

    def _attribute(self, name: str) -> None:
        """An attribute of a value that is a stand-in, or was computed from some."""
        reads = self.reads
        if name in ("param_groups", "state"):
            return
        own = vars(reads.optimizer).get(name)
        if own is not None and not is_of_scheduler(own):
            reads.refuse(f"{named(self.code)} reads .{name}, which may be the optimizer's or a tensor's")
        if not reads.member(name) and name not in traced_names():
            reads.refuse(f"{named(self.code)} reads .{name}, which no guard can name")

    def _global(self, name: str) -> tuple[Source, Any]:
        space = self.function.__globals__
        source: Source = DictItem(Const(space, str(space.get("__name__"))), name)
        if name in space:
            return source, space[name]
        self.reads.guard(Absent(source))
        built_in = vars(builtins)
        if name not in built_in:
            self.reads.refuse(f"{named(self.code)} reads {name}, which is not there")
        return DictItem(Const(built_in, "builtins"), name), built_in[name]

    def _cell(self, name: str) -> tuple[Source, Any]:
        k = self.code.co_freevars.index(name)
        source = SlotOf(SeqItem(SlotOf(self.held, "__closure__"), k), "cell_contents")
        try:
            return source, source.fetch(())
        except Missing:
            self.reads.refuse(f"{named(self.code)} reads {name}, which is not there")

    def _follow(self, source: Source, value: Any) -> None:
        """A value from outside, and the attributes and keys that are taken of it."""
        while True:
            if value is self.reads.optimizer and source is not self.reads.root:
                self.reads.guard(IdIs(source, value))
                source = self.reads.root
            step = self._step(source, value)
            if step is None:
                break
            source, value = step
        if value is not self.reads.optimizer:
            self.reads.value(source, value)

    def _step(self, source: Source, value: Any) -> tuple[Source, Any] | None:
        """One attribute or constant key on, where the value is something to look into; None at its end."""
        following = self.instructions[self.at : self.at + 2]
        if not following or following[0].is_jump_target:
            return None
        name = following[0].argval
        if following[0].opname in _ATTRIBUTES:
            found = self._inside(source, value, name)
            self.at += found is not None
            return found
        if len(following) == 2 and following[1].argrepr != "[]" and following[1].opname != "BINARY_SUBSCR":
            return None
        if type(value) is dict and is_constant(name) and name in value:
            self.at += 2
            return DictItem(source, name), value[name]
        if type(value) in (list, tuple) and type(name) is int and name < len(value):
            self.at += 2
            return SeqItem(source, name), value[name]
        return None

    def _inside(self, source: Source, value: Any, name: str) -> tuple[Source, Any] | None:
        if value is self.reads.optimizer:
            return self._of_optimizer(name)
        if type(value) is types.ModuleType and name in vars(value):
            return DictItem(InstanceDict(source), name), vars(value)[name]
        if type(value) is type and name in _names_of(value):
            return TypeAttr(source, name), lookup_type_attr(value, name)
        if _is_plain(value) and name in vars(value) and name not in _names_of(type(value)):
            self.reads.guard(TypeIs(source, type(value)))
            return DictItem(InstanceDict(source), name), vars(value)[name]
        return None

    def _of_optimizer(self, name: str) -> tuple[Source, Any] | None:
        own = vars(self.reads.optimizer)
        if name in own and name not in ("param_groups", "state"):
            return DictItem(InstanceDict(self.reads.root), name), own[name]
        return None  # `_attribute` reads it next


def _names_of(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in vars(base)}


def _is_plain(value: Any) -> bool:
    """Whether attributes of an object are what its `__dict__` holds."""
    cls = type(value)
    plain = is_plain_access(cls.__getattribute__) and not hasattr(cls, "__getattr__")
    return (
        plain
        and not isinstance(value, (type, types.FunctionType, torch.Tensor, torch.nn.Module))
        and hasattr(value, "__dict__")
    )


def named(code: types.CodeType) -> str:
    """A function's name and place."""
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
