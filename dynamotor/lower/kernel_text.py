"""A fused kernel as a program to read: its loops, and statements in which a value that is used again has a
name.

>>> print(kernel_text(step.kernel))
rows(buf5: float32, buf6: out float32):
    for t0 in parallel(32):
        # phase 0
        for t1 in range(64):
            v0 = buf5[64*t0 + t1]
            sum1 += v0 * v0
        buf6[t0] = rsqrt(sum1 / 64.0)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .index_expr import Var
from .ir import COLS, Expr, Kernel, Reduce, ScanStatement, Scratch, Statement, Store, roots, walk

_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "floordiv": "//",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
    "and": "&",
    "or": "|",
    "xor": "^",
    "shr": ">>",
    "shl": "<<",
}
_LEAVES = ("const", "acc", "scratch", "scan", "index")


def kernel_text(kernel: Kernel) -> str:
    """The kernel's loops as text; sums are named by kind and number."""
    kinds = {s.id: f"{s.kind}{s.id}" for s in kernel.statements() if isinstance(s, Reduce | ScanStatement)}
    params = ", ".join(
        f"{name}: {'out ' if written else ''}{str(memory).removeprefix('torch.')}"
        for name, memory, written in kernel.params
    )
    lines = [f"{kernel.template}({', '.join([params, *(s.name for s in kernel.symbols)]).strip(', ')}):"]
    deep = _nest(lines, kernel.outer, 1, "parallel")
    if kernel.template == COLS:
        deep = _nest(lines, kernel.inner, deep, "vector")
    for n, phase in enumerate(kernel.phases):
        lines.append(f"{'    ' * deep}# phase {n}")
        within = kernel.middle if kernel.template == COLS else kernel.inner
        if phase.inner:
            _block(lines, phase.inner, _nest(lines, within, deep, "range"), kinds)
        _block(lines, phase.row, deep, kinds)
    if kernel.final:
        after = deep if kernel.template == COLS else _nest(lines, kernel.inner, 1, "range")
        _block(lines, kernel.final, after, kinds)
    _block(lines, kernel.final_once, 1, kinds)
    return "\n".join(lines) + "\n"


def _nest(lines: list[str], loops: Sequence[Var], deep: int, kind: str) -> int:
    for v in loops:
        lines.append(f"{'    ' * deep}for {v.name} in {kind}({v.size}):")
        deep += 1
    return deep


def _block(lines: list[str], statements: Sequence[Statement], deep: int, kinds: dict[int, str]) -> None:
    """The statements of one loop body: shared values first get names."""
    found = list(walk(*roots(*statements)))
    uses = Counter(child for e in found for child in e.children)
    uses.update(roots(*statements))
    names: dict[Expr, str] = {}
    for s in statements:
        for e in walk(*roots(s)):
            if (
                e not in names
                and e.op not in _LEAVES
                and (uses[e] > 1 or e.op == "load" and "[" in str(e.args[1]))
            ):
                text = _expr(e, names, kinds)
                names[e] = f"v{len(names)}"
                lines.append(f"{'    ' * deep}{names[e]} = {text}")
        lines.append("    " * deep + _statement(s, names, kinds))


def _statement(s: Statement, names: dict[Expr, str], kinds: dict[int, str]) -> str:
    value = _expr(s.expr, names, kinds)
    if isinstance(s, Store):
        return f"{s.buffer}[{s.index}] {'+=' if s.add else '='} {value}"
    if isinstance(s, Scratch):
        return f"scratch{s.id} = {value}"
    at = "" if s.position is None else f", at={s.position}"
    if isinstance(s, Reduce) and s.kind == "sum":
        return f"{kinds[s.id]} += {value}"
    top = f", top={kinds[s.top]}" if isinstance(s, Reduce) and s.top is not None else ""
    return f"{kinds[s.id]} = {s.kind}({kinds[s.id]}, {value}{at}{top})"


def _expr(e: Any, names: dict[Expr, str], kinds: dict[int, str]) -> str:
    if not isinstance(e, Expr):
        return str(e).removeprefix("torch.")
    if e in names:
        return names[e]
    if e.op == "load":
        return f"{e.args[0]}[{e.args[1]}]"
    if e.op in ("acc", "scan"):
        return kinds.get(e.args[0], f"{e.op}{e.args[0]}")
    if e.op == "scratch":
        return f"scratch{e.args[0]}"
    args = [_expr(a, names, kinds) for a in e.args]
    if e.op in _INFIX and len(args) == 2:
        return f"({args[0]} {_INFIX[e.op]} {args[1]})"
    return (
        args[0]
        if e.op in ("const", "index")
        else f"{str(e.dtype)[6:]}({args[0]})"
        if e.op == "cast"
        else (f"{e.op}({', '.join(args)})")
    )
