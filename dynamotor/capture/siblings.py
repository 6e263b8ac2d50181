"""Modules of one class that are compiled one by one (regional compilation), and functions of one code, share
their programs.

>>> for block in model.blocks: block.compile()      # one graph, not one for each block

A program that may be shared is captured with its module (or function) as one more argument, behind those of
the call: then everything that it relies on of the module is guarded, and facts that differ are inputs.
Each callable has entries of its own, whose guard program has its module in that argument's place, bound as
always.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import _C
from ..base.config import config
from .attempts import Invocation
from .dispatch import compile_program
from .guards import IdIs
from .source import SlotOf
from .symbolic_inputs import SizePolicy

_compilers: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Sibling]] = weakref.WeakKeyDictionary()
_OF_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.CodeType, type)


@dataclass(frozen=True)
class Program:
    """The parts of an entry besides the function or module that it is bound to."""

    info: Any
    run: Callable[..., Any]
    n_positional: int
    kwnames: tuple[str, ...]
    general: bool


@dataclass(frozen=True, eq=False)
class _Row:
    """One compilation: by which compiler, of what (weak references), and its program if others may take
    it."""

    kin: Any
    compiler: Any
    owner: Any
    program: Program | None


class Shelf:
    """Programs for functions and modules that are compiled anew again and again (a closure, `compile(f)`
    inside a loop): they outlive the dispatchers that they were made for.

    lasting: only programs that hold no object of a call are kept.
    """

    def __init__(self, lasting: bool) -> None:
        self.lasting = lasting
        self._rows: weakref.WeakKeyDictionary[Any, list[_Row]] = (
            weakref.WeakKeyDictionary()
        )  # by code or class

    def add(self, compiler: Sibling, entry: _C.Entry) -> None:
        """Note that such a function or module was compiled, and keep its program if others may take it."""
        if compiler.kin is None or compiler.owner is None:
            return
        data = entry.info.data
        kept = data.for_all and not (self.lasting and _holds_objects(entry))
        program = (
            Program(entry.info, entry.run, entry.n_positional, entry.kwnames, entry.general) if kept else None
        )
        key = _key(compiler)
        others = [
            row
            for row in self._rows.get(key, ())
            if row.program is not None or row.owner() is not compiler.owner
        ]
        row = _Row(compiler.kin, weakref.ref(compiler), weakref.ref(compiler.owner), program)
        self._rows[key] = [row, *others][: config.cache_size_limit]

    def _of(self, compiler: Sibling) -> list[_Row]:
        if compiler.kin is None or compiler.owner is None:
            return []
        return [row for row in self._rows.get(_key(compiler), ()) if row.kin == compiler.kin]

    def programs(self, compiler: Sibling) -> list[Program]:
        """The entries kept for functions of the compiler's code, or modules of its class."""
        return [row.program for row in self._of(compiler) if row.program is not None]

    def is_again(self, compiler: Sibling) -> bool:
        """Whether another dispatcher was made for this function or module, or for a function of its code."""
        function = isinstance(compiler.owner, types.FunctionType)
        return any(
            row.compiler() is not compiler and (function or row.owner() is compiler.owner)
            for row in self._of(compiler)
        )

    def clear(self) -> None:
        """Drop all of them."""
        self._rows.clear()


lasting = Shelf(True)


class Sibling:
    """A callable that is compiled, as others of its kind know it.

    owner: the module of a bound method, or a function; None: nothing may be in its place. kin: what siblings have in
    common (backend and options); None: it has no siblings. policy: which sizes are symbols.
    """

    def __init__(self, fn: Callable[..., Any], policy: SizePolicy) -> None:
        self.fn, self.policy = fn, policy
        owner = getattr(fn, "__self__", None)
        module = isinstance(owner, torch.nn.Module)
        self.owner: Any = owner if module else fn if type(fn) is types.FunctionType else None
        self.kin: Any = None
        self.shelf = lasting
        self.own_dispatcher: Any = None  # a weak reference to the callable that replaces the original

    def entries(self) -> Any:
        """The compiled entries."""
        dispatcher = self.own_dispatcher()
        return () if dispatcher is None else dispatcher.entries

    def flat(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values from which sources of this callable's programs are fetched."""
        return args if self.owner is None else (*args, self.owner)


def forget() -> None:
    """Callables that are compiled from now on share nothing with those before."""
    _compilers.clear()
    lasting.clear()


def _holds_objects(entry: _C.Entry) -> bool:
    """Whether keeping a program keeps objects alive that its first call had."""
    return entry.info.data.reason is not None or any(
        type(row) is IdIs and not row.source.is_held and not _lasts(row) for row in entry.info.guards
    )


def _lasts(row: IdIs) -> bool:
    if type(row.source) is SlotOf and row.source.key == "__globals__":
        return True
    return isinstance(row.obj, _OF_CODE) and getattr(row.obj, "__closure__", None) is None


def _key(compiler: Sibling) -> Any:
    return _kind(compiler)[0]


def _kind(compiler: Sibling) -> tuple[Any, Any]:
    """What siblings have, by identity: a module's class and the function of the method, or a function's
    code."""
    owner, fn = compiler.owner, compiler.fn
    return (type(owner), fn.__func__) if isinstance(fn, types.MethodType) else (owner.__code__, None)


def enter(compiler: Sibling) -> None:
    """From now on this one is a sibling of others."""
    if compiler.owner is not None and compiler.kin is not None:
        _compilers.setdefault(_kind(compiler)[0], weakref.WeakSet()).add(compiler)


def _siblings(compiler: Sibling) -> list[Sibling]:
    """Those that compile the same method of other modules of the class, or other functions of the same code,
    with equal options.
    """
    if compiler.kin is None or compiler.owner is None:
        return []
    kind = _kind(compiler)
    return [
        other
        for other in list(_compilers.get(kind[0], ()))
        if other.owner is not compiler.owner
        and all(map(operator.is_, _kind(other), kind))
        and other.kin == compiler.kin
    ]


def is_for_all(compiler: Sibling) -> bool:
    """Whether the next program is made for any module of the class: where gradients are recorded and there
    are several. Without gradients parameters are constants, which are folded and reordered, so each has
    programs of its own while they are few.
    """
    siblings = _siblings(compiler)
    if compiler.shelf.is_again(compiler):  # and so it will be the next time
        return not _may_reduce(compiler.owner)
    if torch.is_grad_enabled() or not siblings:
        return bool(siblings) and not _may_reduce(compiler.owner)
    programs = {id(entry.run) for each in siblings for entry in each.entries()}
    return 2 * len(programs) >= config.cache_size_limit


def _may_reduce(owner: Any) -> bool:
    """Whether DDP may be inside: its plan is for the parameters of one module."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    parts = owner.modules() if isinstance(owner, torch.nn.Module) else [None]
    return any(part is None or isinstance(part, DistributedDataParallel) for part in parts)


def shared(compiler: Sibling, call: Invocation) -> tuple[Any, Any] | None:
    """An entry for a call whose program was made for a sibling and fits this module, with its inputs."""
    for entry in _programs(compiler, call):
        made = bind(entry, compiler.owner, len(call.args))
        tensors = made.program.check(call.args)
        if tensors is not None:
            return made, tensors
    return None


def learn(compiler: Sibling, call: Invocation) -> None:
    """Note which sizes and numbers differ from those of such programs: the next program takes them as
    inputs."""
    flat = compiler.flat(call.args)
    for program in _programs(compiler, call):
        compiler.policy.learn(program.info.guards, flat)


def _programs(compiler: Sibling, call: Invocation) -> Iterator[Any]:
    """Entries of siblings that such a call may take, each program once, those of fixed sizes first."""
    found = {}
    there = [entry for each in _siblings(compiler) for entry in each.entries()]
    for entry in (*there, *compiler.shelf.programs(compiler)):
        captured = entry.info.data
        if call.fits(entry) and captured.for_all and captured.settings == config.snapshot():
            found[id(entry.run)] = entry
    return iter(sorted(found.values(), key=lambda entry: entry.general)[: config.cache_size_limit])


def bind(entry: _C.Entry, owner: Any, place: int) -> Any:
    """The entry of a program that has its module as the argument of this number, for one module."""
    info = entry.info
    program = compile_program(info.guards, info.inputs, {place: owner})
    finish = _with_module(info.data.finish, owner)
    made = _C.Entry(program, entry.run, finish, entry.n_positional, entry.kwnames, info)
    made.general = entry.general
    return made


def _with_module(finish: Callable[..., Any], owner: Any) -> Callable[..., Any]:
    if finish is _C.first_result:
        return finish
    return lambda outs, args: finish(outs, (*args, owner))
