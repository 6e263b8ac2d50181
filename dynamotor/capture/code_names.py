"""The names in a function's code, and the objects that they lead to.

>>> names_of(fn.__code__).loaded
(('torch', 'nn', 'functional', 'relu'), ('scale',))
>>> led_to(('scale',), (cells_of(fn), fn.__globals__))
2.0
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .bytecode import by_code, decode


class Names(NamedTuple):
    """The uses of names in a function's code, with the functions in it."""

    opcodes: frozenset[str]
    # Global and closure names, each with the attributes taken of it at once.
    loaded: tuple[tuple[str, ...], ...]
    attributes: frozenset[str]
    rebound: frozenset[str]  # global and closure names that are set
    imported: frozenset[str]  # modules


@by_code
def names_of(code: types.CodeType) -> Names:
    opcodes, loaded, attributes, rebound, imported = set(), [], set(), set(), set()
    chain: list[str] = []
    for instr in decode(code).instrs:
        opcodes.add(instr.op)
        if instr.op in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF"):
            chain = [instr.argval]
            loaded.append(chain)
        elif instr.op in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(instr.argval)
            chain.append(instr.argval)
        elif instr.op == "IMPORT_NAME":
            imported.add(instr.argval)
        else:
            chain = []
        if instr.op.startswith(("STORE_", "DELETE_")) and (
            instr.op.endswith("_GLOBAL") or instr.op.endswith("_DEREF") and instr.argval in code.co_freevars
        ):
            rebound.add(instr.argval)
    names = [tuple(chain) for chain in loaded]
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more = names_of(inner)
            opcodes |= more.opcodes
            names += more.loaded
            attributes |= more.attributes
            rebound |= more.rebound - set(code.co_cellvars)
            imported |= more.imported
    others = (frozenset(found) for found in (attributes, rebound, imported))
    return Names(frozenset(opcodes), tuple(names), *others)


def cells_of(fn: types.FunctionType) -> dict[str, Any]:
    """The closure of a function by name; None for an empty cell."""
    return dict(zip(fn.__code__.co_freevars, map(contents_of_cell, fn.__closure__ or ())))


def contents_of_cell(cell: types.CellType) -> Any:
    """The object in a cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def led_to(
    names: tuple[str, ...],
    namespaces: Iterable[Mapping[str, Any]],
    enters: Callable[[types.ModuleType], bool] = lambda module: True,
) -> Any:
    """The object of a name in the first namespace that has it, and of modules that are entered the one at the end of
    the attributes; None where there is none.
    """
    first, *rest = names
    value = next((known[first] for known in namespaces if first in known), None)
    while isinstance(value, types.ModuleType) and rest and enters(value):
        value = getattr(value, rest.pop(0), None)
    return value
