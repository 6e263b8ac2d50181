"""Ops of users that write into their arguments, as ops that give the new contents.

>>> # mylib::put(Tensor(a!) dst, Tensor src) -> Tensor
>>> functional_op(torch.ops.mylib.put.default, (1,))
<OpOverload(op='dynamotor_functional.mylib_put_0', overload='default')>     # -> (Tensor, Tensor)
>>> written_by(_)                        # the op that runs, where the arguments may be written in place
(<OpOverload(op='mylib.put', overload='default')>, ['dst'])
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..base.compat import OpOverload
from .op_facts import facts, written_names
from .shapes import UnsupportedOp
from .sizes import leaves_in
from .spec import copy_as

NAMESPACE = "dynamotor_functional"
_SERIAL = itertools.count()
_ALIAS = re.compile(r"\(\w+!?\)")  # the (a!) of Tensor(a!)
_DEFAULT = re.compile(r"=(\[[^]]*\]|\"[^\"]*\"|'[^']*'|[^,]*)")
_WRITABLE = ("Tensor", "Optional[Tensor]", "List[Tensor]")
_library = torch.library.Library(NAMESPACE, "DEF")
_originals: dict[OpOverload, tuple[OpOverload, list[str]]] = {}


def written_by(target: object) -> tuple[OpOverload, list[str]] | None:
    """The op that writes and the arguments that it writes, where `target` is the functional form of one."""
    return _originals.get(target) if isinstance(target, OpOverload) else None


def written_counts(func: OpOverload, given: dict[str, Any]) -> tuple[int, ...]:
    """How many tensors each written argument of a call holds: a list has any number, an option none or
    one.
    """
    return tuple([len(_tensors(given[name])) for name in written_names(func)])


def _tensors(value: Any) -> list[Any]:
    return [leaf for leaf in leaves_in([value]) if leaf is not None]


@functools.cache
def functional_op(func: OpOverload, counts: tuple[int, ...]) -> OpOverload:
    """The op that runs `func` on copies of the tensors that it writes: it returns the new results of `func`,
    then the copies. Raises UnsupportedOp where the op writes or gives something else than tensors (the work
    of a collective, which goes on writing).

    counts: how many tensors each written argument holds.
    """
    schema, written = func._schema, written_names(func)
    types = {argument.name: str(argument.type) for argument in schema.arguments}
    given = [str(value.type) for value in schema.returns]
    UnsupportedOp.when(
        any(types[name] not in _WRITABLE for name in written)
        or not {"Tensor", "List[Tensor]"}.issuperset(given),
        "DM236",
        f"{func} writes, or gives, more than tensors",
        cure="use an out-of-place op",
    )
    name = f"{schema.name.replace('::', '_')}_{next(_SERIAL)}"  # a library may go, and come again
    _library.define(f"{name}{_signature(func, sum(counts))}")
    run = functools.partial(_run_on_copies, func, written)
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, run, "Meta")  # the op's own rule, on meta tensors
    form: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    _originals[form] = func, written
    return form


def _signature(func: OpOverload, count: int) -> str:
    """The op's arguments, all by position and none written, and the functional op's results."""
    text = str(func._schema)
    arguments, _, returns = text[text.index("(") + 1 :].rpartition(") -> ")
    values = [value for value in returns.strip("()").split(", ") if value]
    new = [value for value, place in zip(values, facts(func).returns, strict=True) if place is None]
    plain = _DEFAULT.sub("", _ALIAS.sub("", arguments)).replace("*, ", "")
    return f"({plain}) -> ({', '.join(new + ['Tensor'] * count)})"


def _run_on_copies(func: OpOverload, written: Sequence[str], *args: Any) -> Any:
    given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=True))
    for name in written:
        value = given[name]
        given[name] = [copy_as(t, t.stride()) for t in value] if isinstance(value, list) else _copy(value)
    copies = [t for name in written for t in _tensors(given[name])]
    made = (*new_results(func, call_by_name(func, given)), *copies)
    return made[0] if len(made) == 1 else made


def _copy(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else copy_as(value, value.stride())


def call_by_name(func: OpOverload, given: dict[str, Any]) -> Any:
    """Call an op with all of its arguments."""
    args, kwargs = split_arguments(func, given)
    return func(*args, **kwargs)


def split_arguments(func: OpOverload, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All arguments of an op, as positional ones and those that go by name."""
    named = {argument.name for argument in func._schema.arguments if argument.kwarg_only}
    return (
        tuple([value for name, value in given.items() if name not in named]),
        {name: value for name, value in given.items() if name in named},
    )


def new_results(func: OpOverload, result: Any) -> list[Any]:
    """The results of a call that are no arguments."""
    values: Iterable[Any] = result if len(func._schema.returns) > 1 else [result][: len(func._schema.returns)]
    return [value for value, place in zip(values, facts(func).returns, strict=False) if place is None]
