"""The part of a step that is numbers on the host: read, calculated and written as plain Python, packed for
the program.

Step counts and the numbers that optimizers make of them and of learning rates are 0-d tensors, or Python's
own. A program that took each as an input would spend more on them than on the update itself. Of those on a
GPU the host keeps what it wrote (`Mirror`), so that nobody waits for the GPU.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph.nodes import needed_for, overload
from ..graph.spec import TensorSpec, aten
from .numbers import Question

_float = ctypes.c_float


class Mirror:
    """What 0-d tensors on a GPU hold: read once, then known from what was written, until somebody else
    writes.
    """

    def __init__(self) -> None:
        self.known: dict[int, tuple[torch.Tensor, int, float]] = {}

    def read(self, tensor: torch.Tensor) -> float:
        """The tensor's number; waits for the GPU only where it is not known."""
        found = self.known.get(id(tensor))
        if found is None or found[1] != tensor._version:
            found = self.known[id(tensor)] = tensor, tensor._version, tensor.item()
        return found[2]

    def write(self, tensors: Sequence[torch.Tensor], values: Sequence[float]) -> None:
        """Copy the numbers into the tensors (of one device)."""
        dtypes = {tensor.dtype for tensor in tensors}  # of one dtype they are copied by one kernel
        on_host = torch.tensor(
            values, dtype=dtypes.pop() if len(dtypes) == 1 else torch.float64, device="cpu"
        )
        on_device = on_host.to(tensors[0].device, non_blocking=True)
        torch._foreach_copy_(list(tensors), list(on_device.unbind()))
        for tensor, value in zip(tensors, values, strict=True):
            self.known[id(tensor)] = tensor, tensor._version, value


def single(value: float) -> float:
    """Rounded to float32."""
    return _float(value).value


def _of_tensor(value: float, like: float | None = None, **_: Any) -> float:
    return value


# What each op means for numbers. Results of float32 are rounded afterwards.
OPS: dict[Any, Callable[..., float]] = {
    aten.add.Tensor: lambda a, b, alpha=1: a + alpha * b,
    aten.sub.Tensor: lambda a, b, alpha=1: a - alpha * b,
    aten.rsub.Scalar: lambda a, b, alpha=1: b - alpha * a,
    aten.rsub.Tensor: lambda a, b, alpha=1: b - alpha * a,
    aten.mul.Tensor: operator.mul,
    aten.div.Tensor: operator.truediv,
    aten.remainder.Tensor: operator.mod,
    aten.neg.default: operator.neg,
    aten.pow.Scalar: operator.pow,
    aten.pow.Tensor_Scalar: operator.pow,
    aten.pow.Tensor_Tensor: operator.pow,
    aten.sqrt.default: math.sqrt,
    aten.reciprocal.default: lambda a: 1 / a,
    aten.exp.default: math.exp,
    aten.maximum.default: max,
    aten.minimum.default: min,
    aten.full.default: lambda size, value, **_: value,
    aten._to_copy.default: _of_tensor,
    aten.clone.default: _of_tensor,
    aten.alias.default: _of_tensor,
    aten.copy.default: lambda old, new: new,
    aten.view.default: _of_tensor,
}
_DTYPES = (torch.float64, torch.float32)


def is_number(node: fx.Node) -> bool:
    """Whether a node gives one floating number."""
    val = node.meta.get("val")
    return isinstance(val, TensorSpec) and not val.shape and val.dtype in _DTYPES


def calculate(node: fx.Node, values: dict[fx.Node, float]) -> float:
    """What a node of numbers gives, for the values of its operands."""
    args = fx.map_arg(node.args, values.__getitem__)
    kwargs = {k: v for k, v in fx.map_arg(node.kwargs, values.__getitem__).items() if k in ("alpha", "value")}
    result = OPS[node.target](*args, **kwargs)
    return single(result) if node.meta["val"].dtype is torch.float32 else result


def on_host(graph: fx.Graph, leaves: Sequence[fx.Node], contents: dict[fx.Node, Any]) -> set[fx.Node]:
    """The nodes that are numbers made of these inputs alone. An input stays out when its new contents are
    not.
    """
    left = {leaf for leaf in leaves if is_number(leaf)}
    while True:
        found = set(left)
        for node in graph.nodes:
            if (
                node.op == "call_function"
                and node.target in OPS
                and is_number(node)
                and found.issuperset(node.all_input_nodes)
            ):
                found.add(node)
        wrong = {leaf for leaf in left if leaf in contents and contents[leaf] not in found}
        if not wrong:
            return found
        left -= wrong


@dataclass(frozen=True)
class HostProgram:
    """`values(read)` gives what `wanted` are, in order, or None where an answer of the trace does not hold
    any more.
    """

    code: Callable[[list[float]], list[float] | None]
    source: str

    @staticmethod
    def of(
        nodes: Sequence[fx.Node],
        leaves: Sequence[fx.Node],
        wanted: Sequence[fx.Node],
        questions: Sequence[tuple[Question, bool]],
    ) -> HostProgram:
        """nodes: in order of calculation. leaves: those that are read, in the order of the list that is
        given.
        """
        names = {node: f"n{k}" for k, node in enumerate([*leaves, *nodes])}
        scope: dict[str, Any] = {"single": single}
        lines = [f"{''.join(names[leaf] + ', ' for leaf in leaves)} = read"] if leaves else []
        needed = needed_for(
            {
                *wanted,
                *(side for q, _ in questions for side in (q.left, q.right) if isinstance(side, fx.Node)),
            }
        )
        for node in nodes:
            if node in needed:
                text = _text(node, names, scope)
                text = f"single({text})" if node.meta["val"].dtype is torch.float32 else text
                lines.append(f"{names[node]} = {text}")
        signs = {"eq": "==", "ne": "!=", "lt": "<", "le": "<="}
        for question, answer in questions:
            sides = [
                names[side] if isinstance(side, fx.Node) else _plain(side)
                for side in (question.left, question.right)
            ]
            lines.append(f"if ({sides[0]} {signs[question.kind]} {sides[1]}) is not {answer}: return None")
        lines.append(f"return [{', '.join(names[node] for node in wanted)}]")
        source = "def values(read):\n    " + "\n    ".join(lines) + "\n"
        exec(compile(source, "<dynamotor numbers of a step>", "exec"), scope)
        return HostProgram(scope["values"], source)


_SIGNS = {
    aten.mul.Tensor: "*",
    aten.div.Tensor: "/",
    aten.pow.Scalar: "**",
    aten.pow.Tensor_Scalar: "**",
    aten.pow.Tensor_Tensor: "**",
    aten.add.Tensor: "+",
    aten.sub.Tensor: "-",
}


def _plain(value: Any) -> str:
    return f"float({str(value)!r})" if isinstance(value, float) and value - value != 0 else f"({value!r})"


def _text(node: fx.Node, names: dict[Any, str], scope: dict[str, Any]) -> str:
    """A node as a Python expression."""
    args = [names[a] if isinstance(a, fx.Node) else _plain(a) for a in node.args]
    if node.target in _SIGNS and len(args) == 2 and "alpha" not in node.kwargs:
        return f"{args[0]} {_SIGNS[node.target]} {args[1]}"
    if OPS[node.target] is _of_tensor:
        return args[0]
    if node.target is aten.full.default:
        return args[1]
    name = f"op_{overload(node).name().replace('::', '_').replace('.', '_')}"
    scope[name] = OPS[node.target]
    given = [f"{k}={names.get(v) or _plain(v)}" for k, v in node.kwargs.items() if k in ("alpha", "value")]
    return f"{name}({', '.join([*args, *given])})"
