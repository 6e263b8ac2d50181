"""Ops of users that write into their arguments, as ops that give what would be written.

>>> # mylib::put(Tensor(a!) dst, Tensor src) -> Tensor
>>> functional_op(torch.ops.mylib.put.default)
<OpOverload(op='dynamotor_functional.mylib_put_0', overload='default')>     # -> (Tensor, Tensor)
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload

from ..graph.op_facts import facts, written_names
from ..graph.shapes import UnsupportedOp
from ..graph.spec import copy_as

NAMESPACE = "dynamotor_functional"
_SERIAL = itertools.count()
_ALIAS = re.compile(r"\(\w+!?\)")  # the (a!) of Tensor(a!)
_DEFAULT = re.compile(r"=(\[[^]]*\]|\"[^\"]*\"|'[^']*'|[^,]*)")
_library = torch.library.Library(NAMESPACE, "DEF")


@functools.cache
def functional_op(func: OpOverload) -> OpOverload:
    """The op that runs `func` on copies of what it writes: it returns the new results of `func`, then the
    copies. Raises UnsupportedOp where something else than single tensors is written, and where the op gives
    something else than tensors (the work of a collective, which goes on writing).
    """
    schema, written = func._schema, written_names(func)
    types = {argument.name: str(argument.type) for argument in schema.arguments}
    given = [str(value.type) for value in schema.returns]
    UnsupportedOp.when(
        any(types[name] != "Tensor" for name in written) or not {"Tensor", "List[Tensor]"}.issuperset(given),
        "DM236",
        f"{func} writes, or gives, more than single tensors",
        cure="use an out-of-place op",
    )
    name = f"{schema.name.replace('::', '_')}_{next(_SERIAL)}"  # a library may go, and come again
    _library.define(f"{name}{_signature(func, written)}")
    run = functools.partial(_run_on_copies, func, written)
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, run, "Meta")  # the op's own rule, on meta tensors
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _signature(func: OpOverload, written: list[str]) -> str:
    """The op's arguments, all by position and none written, and what the functional op returns."""
    text = str(func._schema)
    arguments, _, returns = text[text.index("(") + 1 :].rpartition(") -> ")
    values = [value for value in returns.strip("()").split(", ") if value]
    new = [value for value, place in zip(values, facts(func).returns, strict=True) if place is None]
    plain = _DEFAULT.sub("", _ALIAS.sub("", arguments)).replace("*, ", "")
    return f"({plain}) -> ({', '.join(new + ['Tensor'] * len(written))})"


def _run_on_copies(func: OpOverload, written: list[str], *args: Any) -> Any:
    given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=True))
    copies = {name: copy_as(given[name], given[name].stride()) for name in written}
    keywords = {argument.name for argument in func._schema.arguments if argument.kwarg_only}
    given |= copies
    result = func(
        *[value for name, value in given.items() if name not in keywords],
        **{name: given[name] for name in keywords},
    )
    new = _new_results(func, result)
    made = (*new, *copies.values())
    return made[0] if len(made) == 1 else made


def _new_results(func: OpOverload, result: Any) -> list[Any]:
    values: Iterable[Any] = result if len(func._schema.returns) > 1 else [result][: len(func._schema.returns)]
    return [value for value, place in zip(values, facts(func).returns) if place is None]


def all_arguments(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument by name, those that a call leaves out by their defaults."""
    arguments = func._schema.arguments
    given = dict(zip([argument.name for argument in arguments], args)) | kwargs
    return {a.name: given.get(a.name, a.default_value) for a in arguments}


def with_written(func: OpOverload, new: list[Any], given: dict[str, Any]) -> Any:
    """What `func` returns, given its new results: written arguments are returned themselves."""
    fresh, names = iter(new), [argument.name for argument in func._schema.arguments]
    values = [
        next(fresh) if place is None else given[names[place] if isinstance(place, int) else place]
        for place in facts(func).returns
    ]
    return tuple(values) if len(values) > 1 else next(iter(values), None)
