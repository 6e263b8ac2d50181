"""Modules of one class that are compiled one by one (regional compilation), and functions of one code, share what
is compiled for them.

>>> for block in model.blocks: block.compile()      # one graph, not one for each block

A program that may be shared is captured with its module (or function) as one more argument, behind those of the
call: then everything that it relies on of the module is guarded, and what is no fact of all is an input. Each callable
has entries of its own, whose guard program has its module in that argument's place, bound as always.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import _C
from ..base.config import config
from .dispatch import compile_program

if TYPE_CHECKING:
    from .frontend import Compiler

_compilers: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Compiler]] = weakref.WeakKeyDictionary()


def _kind(compiler: Compiler) -> tuple[Any, Any]:
    """What siblings have, by identity: a module's class and the function of the method, or a function's code."""
    owner, fn = compiler.owner, compiler.fn
    return (type(owner), fn.__func__) if isinstance(fn, types.MethodType) else (owner.__code__, None)


def enter(compiler: Compiler) -> None:
    """From now on this one is a sibling of others."""
    if compiler.owner is not None and compiler.kin is not None:
        _compilers.setdefault(_kind(compiler)[0], weakref.WeakSet()).add(compiler)


def _siblings(compiler: Compiler) -> list[Compiler]:
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


def is_for_all(compiler: Compiler) -> bool:
    """Whether the next program is made for any module of the class: where gradients are recorded and there
    are several. Without gradients parameters are constants, which are folded and reordered, so each has
    programs of its own while they are few.
    """
    siblings = _siblings(compiler)
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


def shared(
    compiler: Compiler, args: tuple[Any, ...], n_positional: int, kwnames: tuple[str, ...]
) -> tuple[Any, Any] | None:
    """An entry for a call whose program was made for a sibling and fits this module, and what it takes."""
    for entry in _programs(compiler, n_positional, kwnames):
        made = bind(entry, compiler.owner, len(args))
        tensors = made.program.check(args)
        if tensors is not None:
            return made, tensors
    return None


def _programs(compiler: Compiler, n_positional: int, kwnames: tuple[str, ...]) -> Iterator[Any]:
    """Entries of siblings that such a call may take, each program once, those of fixed sizes first."""
    found = {}
    for each in _siblings(compiler):
        for entry in each.entries():
            captured = entry.info.data
            fits = entry.n_positional == n_positional and entry.kwnames == kwnames
            if fits and captured.for_all and captured.settings == config.snapshot():
                found[id(entry.run)] = entry
    return iter(sorted(found.values(), key=lambda entry: entry.general)[: config.cache_size_limit])


def bind(entry: Any, owner: Any, place: int) -> Any:
    """The entry of a program that has its module as the argument of this number, for one module."""
    info = entry.info
    program = compile_program(info.guards, info.inputs, {place: owner})
    finish = _with_module(info.data.finish, owner)
    made = _C.Entry(program, entry.run, finish, entry.n_positional, entry.kwnames, info)
    made.general = entry.general
    return made


def _with_module(finish: Callable[..., Any], owner: Any) -> Callable[..., Any]:
    return lambda outs, args: finish(outs, (*args, owner))
