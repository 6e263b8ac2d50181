"""Expressions are made when a value is read, which may be when another node is lowered: functions inside of rules
may not ask the lowering which node that is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import dynamotor

Function = ast.FunctionDef | ast.Lambda


def _takes_ctx(function: Function) -> bool:
    return any(argument.arg == "ctx" for argument in (*function.args.args, *function.args.kwonlyargs))


def _deferred(tree: ast.Module) -> Iterator[Function]:
    for rule in ast.walk(tree):
        if isinstance(rule, ast.FunctionDef) and _takes_ctx(rule):
            for inner in ast.walk(rule):
                if inner is not rule and isinstance(inner, Function) and not _takes_ctx(inner):
                    yield inner


def _late_reads(text: str) -> list[int]:
    """Lines of `ctx.spec` and `ctx.node` in bodies of deferred functions (defaults are evaluated at once)."""
    bodies = (f.body if isinstance(f.body, list) else [f.body] for f in _deferred(ast.parse(text)))
    nodes = (node for body in bodies for statement in body for node in ast.walk(statement))
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr in ("spec", "node")
        and ast.unparse(node.value) == "ctx"
    ]


def test_no_deferred_function_asks_for_the_current_node() -> None:
    folder = Path(dynamotor.__file__).parent / "lower"
    late = {path.name: lines for path in folder.glob("*.py") if (lines := _late_reads(path.read_text()))}
    assert not late


def test_a_late_read_is_found() -> None:
    assert _late_reads("def rule(ctx, x):\n    return ctx.pointwise(lambda a: f(a, ctx.spec.dtype), x)") == [
        2
    ]
