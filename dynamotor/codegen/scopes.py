"""Shared by the C++ and Triton emitters: scopes that remember values, names, the error for an operation
without text.

>>> outer = ValueScope(None); inner = ValueScope(outer)
>>> outer.values[e] = "v1"; inner.find(e)
'v1'
"""

from __future__ import annotations

from collections.abc import Iterable
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


class Rereads:
    """The buffers that a kernel reads after it has stored them. An expression that reads one is computed
    where it is asked for: a scope around may come before the store, where the memory holds anything.
    """

    def __init__(self, exprs: Iterable[Expr]) -> None:
        self.loaded = {e.args[0] for e in exprs if e.op == "load"}
        self.stored: set[str] = set()
        self.known: dict[Expr, bool] = {}

    def store(self, buffer: str) -> None:
        """A store of the buffer has been emitted."""
        if buffer in self.loaded and buffer not in self.stored:
            self.stored.add(buffer)
            self.known.clear()

    def stays(self, e: Expr) -> bool:
        """Whether an expression reads such a buffer."""
        if not self.stored:
            return False
        found = self.known.get(e)
        if found is None:
            found = e.op == "load" and e.args[0] in self.stored or any(map(self.stays, e.children))
            self.known[e] = found
        return found


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
