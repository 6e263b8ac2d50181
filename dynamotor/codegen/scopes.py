"""Shared by the C++ and Triton emitters: scopes that remember values, names, the error for an operation
without text.

>>> outer = ValueScope(None); inner = ValueScope(outer)
>>> outer.values[e] = "v1"; inner.find(e)
'v1'
"""

from __future__ import annotations

from typing import Generic, TypeVar

from ..base.errors import InternalError
from ..lower.ir import Expr, Kernel, Reduce, ScanStatement, roots, walk

Known = TypeVar("Known")


class ValueScope(Generic[Known]):
    """A block of generated text that sees values of its own and of the blocks around it."""

    def __init__(self, parent: ValueScope[Known] | None) -> None:
        self.parent = parent
        self.values: dict[Expr, Known] = {}

    def find(self, e: Expr) -> Known | None:
        """A value that is already there; each scope around answers for itself, for some show values in
        another form.
        """
        found = self.values.get(e)
        return self.parent.find(e) if found is None and self.parent is not None else found


_UNSAID = frozenset(
    ("load", "const", "index", "acc", "scratch", "scan", "cast", "round_to", "select", "masked", "wrap_index")
    + ("and", "or", "not", "lt", "le", "gt", "ge", "eq", "ne")
)
_MOST_WORDS = 5


def title(kernel: Kernel) -> str:
    """A kernel's name for profiles: `dm_mul_max_sub_exp_sum`. Equal for kernels that share a
    function.
    """
    words: dict[str, None] = {}
    for s in kernel.statements():
        words |= dict.fromkeys(e.op for e in walk(*roots(s)) if e.op not in _UNSAID)
        words |= dict.fromkeys([s.kind] if isinstance(s, Reduce | ScanStatement) else [])
    return "_".join(["dm", *list(words)[:_MOST_WORDS]] if words else ["dm", "copy"])


def no_text(operation: str, language: str, table: str) -> InternalError:
    """The error for an operation of the loop IR that a target's table lacks."""
    return InternalError(
        "DM920",
        f"no {language} text for the operation {operation}",
        why=f"a lowering uses an op that codegen/{table} lacks",
        cure="report it; backend='aot_eager' runs without the native compiler",
    )
