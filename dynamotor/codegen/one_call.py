"""Programs that are one call of PyTorch: `_C.OneCall` makes it without a frame of Python.

>>> text = "def call(x):\\n    buf1 = as_buf1(erfinv(x))\\n    return (buf1,)\\n"
>>> one_call(text, {"erfinv": torch.erfinv, "as_buf1": check})
<dynamotor._C.OneCall object at ...>
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Mapping
from typing import Any

from .. import _C

MOST_LINES = 12  # of a text that is looked at
_IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, _C.AtenFunction or types.BuiltinFunctionType)


def one_call(source: str, scope: Mapping[str, Any]) -> Callable[..., tuple[Any, ...]] | None:
    """The function of a program's text, where that is one call and checks of its results; else None."""
    if source.count("\n") > MOST_LINES:
        return None
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    match function.body:
        case [
            ast.Assign(targets=[ast.Name(name)], value=ast.Call(ast.Name(check), [ast.Call() as call], [])),
            ast.Return(ast.Tuple([ast.Name(result)])),
        ] if name == result:
            return _made(call, function, scope, [(check, -1)])
        case [
            ast.Assign(targets=[ast.Tuple(targets)], value=ast.Call() as call),
            *checks,
            ast.Return(ast.Tuple(results)),
        ]:
            found = _checked(targets, checks, results)
            return _made(call, function, scope, found) if found is not None else None
    return None


def _checked(
    targets: list[ast.expr], checks: list[ast.stmt], results: list[ast.expr]
) -> list[tuple[str, int]] | None:
    """For each result the global that checks it, and its place in the results of the call."""
    place = {target.id: i for i, target in enumerate(targets) if isinstance(target, ast.Name)}
    known = {}
    for step in checks:
        match step:
            case ast.Assign(
                targets=[ast.Name(to)], value=ast.Call(ast.Name(check), [ast.Name(value)], [])
            ) if to == value:
                known[to] = check
            case _:
                return None
    names = [result.id for result in results if isinstance(result, ast.Name)]
    if len({*names}) != len(results) or {*names} != known.keys() or not known.keys() <= place.keys():
        return None
    return [(known[name], place[name]) for name in names]


def _made(
    call: ast.Call, function: ast.FunctionDef, scope: Mapping[str, Any], results: list[tuple[str, int]]
) -> Callable[..., tuple[Any, ...]] | None:
    given = [argument.arg for argument in function.args.args]
    target = scope.get(call.func.id) if isinstance(call.func, ast.Name) else None
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    inputs = [given.index(a.id) if isinstance(a, ast.Name) and a.id in given else -1 for a in arguments]
    fixed = [a for a, i in zip(arguments, inputs, strict=True) if i < 0]
    reads = {node.id for a in fixed for node in ast.walk(a) if isinstance(node, ast.Name)}
    if not isinstance(target, _IN_C) or not reads.isdisjoint(given):
        return None
    values = [
        None if i >= 0 else eval(compile(ast.Expression(a), "<dynamotor>", "eval"), dict(scope))
        for a, i in zip(arguments, inputs, strict=True)
    ]
    names = tuple(keyword.arg for keyword in call.keywords if keyword.arg is not None)
    checks, places = zip(*results, strict=True)
    return _C.OneCall(
        target, tuple(values), tuple(inputs), names, tuple(scope[c] for c in checks), places, len(given)
    )
