"""Every operator between numbers that differ between calls, of all kinds: `rest -= k // 2` of a float and an
integer was refused as CPython refuses a float and a list, and a program that caught it went another way.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression

NUMBERS = ["x", "k", "k // 2", "k % 5", "-k", "k / 2", "k * 0.5", "x * 2", "2.5", "3", "True", "'a'"]
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "<", ">=", "==", "!=", "&", "<<"]


@pytest.mark.parametrize("left", NUMBERS)
def test_operators_give_what_eager_gives(left: str) -> None:
    source, texts = ["def program(x, k):", "    found = []"], []
    for right in NUMBERS:
        for op in OPERATORS:
            lines = [f"found.append({left} {op} ({right}))"]
            if op in ("+", "-", "*", "/", "//", "%"):
                lines.append(f"a = {left}; a {op}= {right}; found.append(a)")
            texts += lines
            for line in lines:
                source += ["    try:", f"        {line}", "    except Exception as error:"]
                source.append("        found.append((type(error).__name__, str(error)))")
    scope: dict[str, Any] = {}
    exec("\n".join([*source, "    return found"]), scope)
    program = scope["program"]
    compiled = dynamotor.compile(program, backend="eager")
    for args in ((1.5, 2), (2.5, 3), (3.0, 5), (4.25, 4)):
        pairs = zip(texts, map(repr, compiled(*args)), map(repr, program(*args)), strict=True)
        assert [pair for pair in pairs if pair[1] != pair[2]] == [], args


@pytest.mark.regression
def test_integers_with_a_history():
    def write(x, y):
        x[0] = y
        return x.bitwise_not()

    def args():
        return torch.zeros(1, 1, dtype=torch.int64), torch.tensor(1.5, requires_grad=True)

    assert torch.equal(dynamotor.compile(write)(*args()), write(*args()))
