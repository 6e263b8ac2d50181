"""Checks of emitted kernels against their IR: InternalError DM914 where a store is missing, misplaced,
unmasked or repeated.

>>> verify_places(kernel, emitter.stores)  # each store was emitted, in the loops that it belongs to
>>> verify_cpp(kernel, "void k(...){...st<float>(p0+n0,v1);...}")
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable
from typing import Any, NoReturn

from ..base.errors import InternalError
from ..lower.index_expr import Var
from ..lower.ir import Kernel, Store
from ..lower.verify_program import levels


def wrong(what: str, text: object) -> NoReturn:
    """Raise InternalError DM914."""
    cure = "this is a bug in dynamotor: please report it"
    raise InternalError("DM914", f"an emitted kernel is wrong: {what}", why=str(text), cure=cure)


def verify_places(
    kernel: Kernel, emitted: Iterable[tuple[Store, Collection[Var]]], around: Collection[Var] = ()
) -> None:
    """The stores that were emitted, each with the variables bound where it stands, are the kernel's in their
    loops.

    around: variables that may be bound where a store does not depend on them, because no loop runs over them.
    """
    left = {
        s: {v for v in loops if not v.single}
        for loops, found in levels(kernel)
        for s in found
        if isinstance(s, Store)
    }
    missing = set(left)
    for s, bound in emitted:
        have = {v for v in bound if not v.single}
        if left.get(s) not in (have, have - set(around)):
            wrong(f"{s} stands in the loops {have}, not {left.get(s)}", kernel)
        missing.discard(s)
    if missing:
        wrong(f"there is no {missing}", kernel)


# -- C++ -----------------------------------------------------------------------------------------------------
_STORED = re.compile(r"(?:\bst[becg]*_?(?:<\w+>)?\(|\bcopy_\(|\*const \w+=)p(\d+)\+")


def verify_cpp(kernel: Kernel, text: str) -> None:
    """Each written pointer of the function is stored to."""
    numbers = {p[0]: n for n, p in enumerate(kernel.params)}
    stored = {numbers[s.buffer] for s in kernel.statements() if isinstance(s, Store)}
    named = set(map(int, _STORED.findall(text)))
    if named != stored:
        wrong(f"it stores to pointers {sorted(named)}, not {sorted(stored)}", text)


# -- Triton --------------------------------------------------------------------------------------------------
def verify_triton(stored: Collection[int], text: str) -> None:
    """The function stores to these pointers, and where positions of an axis may be behind its end, under its
    mask.
    """
    axes: dict[str, set[str]] = {"x": {"x"}, "r": {"r"}}
    masks: dict[str, int] = {}  # those that hold here, with the indentation at which they were made
    named = set()
    for line in text.splitlines():
        code = line.strip()
        indent = len(line) - len(code)
        masks = {mask: depth for mask, depth in masks.items() if depth <= indent}
        name, _, value = code.partition(" = ")
        if name.isidentifier():
            axes[name] = set().union(*(axes.get(word, ()) for word in re.findall(r"\w+", value))) | axes.get(
                name, set()
            )
            masks |= {name: indent} if name in ("x_in", "r_in") else {}
        elif code.startswith(("tl.store(p", "tl.atomic_add(p")):
            call: Any = ast.parse(code, mode="eval").body
            place, _, *mask = call.args
            words = {node.id for node in ast.walk(place) if isinstance(node, ast.Name)}
            spans = set().union(*(axes.get(word, ()) for word in words))
            under = {
                node.id.replace("r_all", "r_in")
                for m in mask
                for node in ast.walk(m)
                if isinstance(node, ast.Name)
            }
            missing = {f"{axis}_in" for axis in spans} & masks.keys() - under
            if missing:
                wrong(f"`{code}` lacks the mask {missing}", text)
            named |= {int(word[1:]) for word in words if re.fullmatch(r"p\d+", word)}
    if named != set(stored):
        wrong(f"it stores to pointers {sorted(named)}, not {sorted(stored)}", text)
