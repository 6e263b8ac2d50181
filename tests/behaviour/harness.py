"""Runs tables of small functions in eager and compiled, and compares results, exceptions, side effects and
counts of graphs.

A table is a text: a line of its own is an expression of `x` (a tensor) and `S` (a list that the function may
write), or several with commas between them, each a function; blocks that are indented are bodies of
functions. `#2` at the end of a line or body says that there may be two graphs, and breaks, where one graph is
the rule.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
import sys
import textwrap
import types
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import torch

import dynamotor
from dynamotor import counters

_MARK = re.compile(r"\s*#(\d+)\s*$")


def cases(table: str) -> Iterator[tuple[str, int]]:
    """(body of a function, number of graphs) of each entry."""
    for block in re.split(r"\n(?=\S)|\n\s*\n", table.strip("\n")):
        if not block.strip():
            continue
        mark = _MARK.search(block)
        text = _MARK.sub("", block).rstrip()
        graphs = int(mark.group(1)) if mark else 1
        if text[0].isspace():
            yield textwrap.dedent(text), graphs
        else:
            yield from ((f"return {part}", graphs) for part in parts(text))


def parts(line: str) -> list[str]:
    """The expressions of a line: the members of a tuple that is written without parentheses."""
    value = ast.parse(line, mode="eval").body
    if not isinstance(value, ast.Tuple) or not value.elts or value.col_offset != value.elts[0].col_offset:
        return [line]
    return [ast.get_source_segment(line, part) or "" for part in value.elts]


class Theme:
    """The cases of one table; `prelude` has the names that they use, made once for eager and once for the compiled
    functions.
    """

    def __init__(self, prelude: str, table: str) -> None:
        self.cases = list(cases(table))
        # Eager `cond` compiles, and finds globals by the module's name: that of eager stays known by it.
        self.name = f"behaviour_of_programs_{zlib.crc32(prelude.encode())}"
        self.prelude = prelude

    @functools.cached_property  # not for who only collects tests
    def spaces(self) -> list[dict[str, Any]]:
        return [self._space(self.prelude), self._space(self.prelude)][::-1]

    def _space(self, prelude: str) -> dict[str, Any]:
        module = types.ModuleType(self.name)
        sys.modules[module.__name__] = module  # dataclasses look there
        torch.manual_seed(0)
        exec(compile(textwrap.dedent(prelude), "<prelude>", "exec", dont_inherit=True), module.__dict__)
        return module.__dict__

    def function(self, at: int, which: int) -> types.FunctionType:
        """Case `at` in the one or the other name space."""
        text = f"def case{at}(x, S):\n" + textwrap.indent(self.cases[at][0], "    ")
        space = self.spaces[which]
        exec(compile(text, f"<case {at}>", "exec", dont_inherit=True), space)
        return space[f"case{at}"]

    def check(self, at: int) -> None:
        """Eager, and compiled twice: the second call runs the program of the first one."""
        body, graphs = self.cases[at]
        eager, compiled = self.function(at, 0), dynamotor.compile(self.function(at, 1), backend="eager")
        counters.clear()
        for time in range(2):
            expected, got = outcome(eager, time), outcome(compiled, time)
            assert same(got, expected), f"{body}\n  expected: {expected}\n  got:      {got}"
        found = counters["capture"]["graphs"]
        assert found <= graphs, f"{body}\n  {found} graphs, {dict(counters['breaks'])}"
        if graphs == 1:
            assert not counters["breaks"] or expected[0] == "raised", f"{body}\n  {dict(counters['breaks'])}"


def outcome(function: Any, time: int) -> tuple[Any, ...]:
    """The result or exception of a call, and its writes."""
    torch.manual_seed(time)
    x, state = torch.randn(3, 4), [1, {"a": 2}]
    said = io.StringIO()
    try:
        with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(said):
            warnings.simplefilter("always")
            result = settled(function(x, state))
    except Exception as error:
        return "raised", type(error).__name__, str(error), x, state, said.getvalue()
    return "returned", result, x, state, said.getvalue(), own(warned)


def own(warned: list[Any]) -> list[str]:
    """The program's own warnings, not those that PyTorch's C++ gives when it is asked about shapes."""
    return [
        str(w.message)
        for w in warned
        if w.category is UserWarning and "Triggered internally" not in str(w.message)
    ]


def settled(value: Any) -> Any:
    """Iterators as the lists that they give."""
    if isinstance(value, types.GeneratorType) or type(value).__module__ == "itertools":
        return list(value)
    return value


def same(a: Any, b: Any) -> bool:
    """Whether two results look alike: types by name, contents by value."""
    if type(a).__qualname__ != type(b).__qualname__:
        return False
    if isinstance(a, torch.Tensor):
        if not same(vars(a), vars(b)):
            return False
        a, b = a.as_subclass(torch.Tensor), b.as_subclass(torch.Tensor)
        known = (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        return known and torch.allclose(a.detach(), b.detach(), rtol=1e-5, atol=1e-6, equal_nan=True)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple)) or type(a).__name__ in (
        "deque",
        "dict_keys",
        "dict_values",
        "dict_items",
    ):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return a == b or a != a and b != b
    if isinstance(a, BaseException):
        return same(a.args, b.args)
    if isinstance(a, (type, types.FunctionType, types.BuiltinFunctionType)):
        return a.__qualname__ == b.__qualname__
    if (
        type(a).__module__.startswith("behaviour_of_programs") or type(a) is types.SimpleNamespace
    ) and not hasattr(a, "_value_"):
        return same(members(a), members(b))
    return a == b or repr(a) == repr(b)


def members(value: Any) -> dict[str, Any]:
    """An object's attributes, those in slots too."""
    slots = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ())]
    return {
        **getattr(value, "__dict__", {}),
        **{name: getattr(value, name, None) for name in slots if name != "__dict__"},
    }
