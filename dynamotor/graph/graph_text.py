"""A graph as a program to read: a line a node with its shape and dtype, and the user's line wherever it
changes.

>>> print(program_text(gm))
def forward(x: float32[2, 4]):
    # model.py:7 in forward: return x.sin() * 2
    sin = aten.sin.default(x)  # float32[2, 4]
    return (sin,)
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator
from typing import Any

import torch

from ..base import compat
from ..base.errors import UserLine


def program_text(gm: torch.fx.GraphModule) -> str:
    """The graph as a readable Python program."""
    nodes = list(gm.graph.nodes)
    inputs = [f"{n.name}: {_spec(n)}" if _spec(n) else n.name for n in nodes if n.op == "placeholder"]
    return "\n    ".join([f"def forward({', '.join(inputs)}):", *_lines(nodes)]) + "\n"


def _lines(nodes: list[torch.fx.Node]) -> Iterator[str]:
    last = None
    for node in nodes:
        where = node.meta.get("where")
        if where is not None and where != last and node.op != "placeholder":
            yield f"# {line_text(where)}"
            last = where
        if node.op == "output":
            yield f"return {node.args[0]!r}"
        elif node.op != "placeholder":
            spec = _spec(node)
            yield f"{node.name} = {call_text(node)}" + (f"  # {spec}" if spec else "")


def call_text(node: torch.fx.Node) -> str:
    """The call that a node stands for, as Python writes it."""
    words = [repr(a) for a in node.args] + [f"{k}={v!r}" for k, v in node.kwargs.items()]
    if node.op == "call_method":
        return f"{words[0]}.{node.target}({', '.join(words[1:])})"
    if node.op != "call_function":
        return f"self.{node.target}" + (f"({', '.join(words)})" if node.op == "call_module" else "")
    return f"{target_text(node.target)}({', '.join(words)})"


def target_text(target: Any) -> str:
    """The name by which a program calls an op or a function of torch's."""
    if isinstance(target, compat.OpOverload):
        return str(target)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or type(target).__name__
    module = (getattr(target, "__module__", "") or "").replace("_operator", "operator")
    return f"{module}.{name}" if module and module != "builtins" else name


def line_text(where: UserLine) -> str:
    """A user's line in one line: file, number, function, source."""
    source = linecache.getline(where.filename, where.lineno).strip()
    return f"{os.path.basename(where.filename)}:{where.lineno} in {where.function}" + (
        f": {source}" if source else ""
    )


def _spec(node: torch.fx.Node) -> str:
    val = node.meta.get("val")
    return (
        "" if val is None else f"({', '.join(map(str, val))})" if isinstance(val, (tuple, list)) else str(val)
    )
