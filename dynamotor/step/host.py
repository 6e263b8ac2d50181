"""The part of a step that is numbers on the host: read, calculated and written as plain Python, packed for
the program.

Step counts and the numbers that optimizers make of them and of learning rates are 0-d tensors, or Python's
own. A program that took each as an input would spend more on them than on the update itself. Of those on a
GPU the host keeps written values (`Mirror`), so that it never waits for the GPU.
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

from ..autograd.calls import no_autocast
from ..base import compat
from ..graph.nodes import needed_for, overload
from ..graph.spec import TensorSpec, aten
from .numbers import ANSWERS, IS_PYTHON, Question

_float = ctypes.c_float


class Mirror:
    """Values of 0-d tensors on a GPU: read once, then known from writes, until somebody else
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


class Odd(ArithmeticError):
    """Operands for which the quick function of an op may differ from aten's: aten itself is asked."""


def _first(value: float, *_: Any, **__: Any) -> float:
    return value


def _power(a: float, b: float) -> float:
    if a > 0:
        return a**b
    raise Odd  # Python raises, or gives complex numbers; aten has zeros, infinities and NaN


def _remainder(a: float, b: float) -> float:
    if a > 0 and b > 0:
        return a % b
    raise Odd  # zeros and their signs


def _larger(a: float, b: float) -> float:
    if a > b:
        return a
    if b > a or a == b != 0:
        return b
    raise Odd  # NaN and signs of zeros


def _smaller(a: float, b: float) -> float:
    return -_larger(-a, -b)


# What each op means for numbers, as quickly as Python says it; where it raises, aten is asked. Results of
# float32 are rounded afterwards.
OPS: dict[Any, Callable[..., float]] = {
    aten.add.Tensor: lambda a, b, alpha=1: a + alpha * b,
    aten.sub.Tensor: lambda a, b, alpha=1: a - alpha * b,
    aten.rsub.Scalar: lambda a, b, alpha=1: b - alpha * a,
    aten.rsub.Tensor: lambda a, b, alpha=1: b - alpha * a,
    aten.mul.Tensor: operator.mul,
    aten.div.Tensor: operator.truediv,
    aten.remainder.Tensor: _remainder,
    aten.neg.default: operator.neg,
    aten.pow.Scalar: _power,
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Tensor_Tensor: _power,
    aten.sqrt.default: math.sqrt,
    aten.reciprocal.default: lambda a: 1 / a,
    aten.exp.default: math.exp,
    aten.maximum.default: _larger,
    aten.minimum.default: _smaller,
    aten.full.default: lambda size, value, **_: float(value),
    aten._to_copy.default: _first,
    aten.clone.default: _first,
    aten.alias.default: _first,
    aten.copy.default: lambda old, new: new,
    aten.view.default: _first,
}
# What Python's own numbers do in the optimizer: as Python does it, exceptions included.
PYTHON: dict[Any, Callable[..., float]] = {
    aten.remainder.Tensor: operator.mod,
    aten.maximum.default: max,
    aten.minimum.default: min,
    **dict.fromkeys(
        (aten.pow.Scalar, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor), lambda a, b: _real(a**b)
    ),
}


def _real(value: Any) -> float:
    if isinstance(value, complex):
        raise ArithmeticError("a power is a complex number")
    return value


_DTYPES = (torch.float64, torch.float32)


def is_number(node: fx.Node) -> bool:
    """Whether a node gives one floating number."""
    val = node.meta.get("val")
    return isinstance(val, TensorSpec) and not val.shape and val.dtype in _DTYPES


def calculate(node: fx.Node, values: dict[fx.Node, float]) -> float:
    """The result of a node of numbers for the values of its operands, exactly: asked of aten, or of Python
    for
    its own numbers (which may raise).
    """
    if IS_PYTHON in node.meta:
        args = fx.map_arg(node.args, values.__getitem__)
        return PYTHON.get(node.target, OPS[node.target])(*args)
    with compat.DisableTorchDispatch(), torch.no_grad(), no_autocast():
        args, kwargs = fx.map_arg(
            (node.args, {k: v for k, v in node.kwargs.items() if k != "device"}),
            lambda n: torch.tensor(values[n], dtype=n.meta["val"].dtype, device="cpu"),
        )
        if node.target is aten.full.default:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return overload(node)(*args, **kwargs).item()


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
    any more, or where Python would raise.
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
        needed = needed_for(
            {
                *wanted,
                *(side for q, _ in questions for side in (q.left, q.right) if isinstance(side, fx.Node)),
            }
        )
        used = [node for node in nodes if node in needed]
        source = _source(used, leaves, wanted, questions)
        scope: dict[str, Any] = {"single": single, **{_name(node): _quick(node) for node in used}}
        exec(compile(source, "<dynamotor numbers of a step>", "exec"), scope)
        quick = scope["values"]

        def values(read: list[float]) -> list[float] | None:
            try:
                return quick(read)
            except (ArithmeticError, ValueError, TypeError):
                pass
            try:
                return _exactly(used, dict(zip(leaves, read, strict=True)), wanted, questions)
            except ArithmeticError:
                return None

        return HostProgram(values, source)


def _source(
    nodes: Sequence[fx.Node],
    leaves: Sequence[fx.Node],
    wanted: Sequence[fx.Node],
    questions: Sequence[tuple[Question, bool]],
) -> str:
    """The program's quick function."""
    names = {node: f"n{k}" for k, node in enumerate([*leaves, *nodes])}
    lines = [f"{''.join(names[leaf] + ', ' for leaf in leaves)} = read"] if leaves else []
    for node in nodes:
        text = _text(node, names)
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
    return "def values(read):\n    " + "\n    ".join(lines) + "\n"


def _exactly(
    nodes: Sequence[fx.Node],
    known: dict[fx.Node, float],
    wanted: Sequence[fx.Node],
    questions: Sequence[tuple[Question, bool]],
) -> list[float] | None:
    """The quick function's results, node by node."""
    for node in nodes:
        known[node] = calculate(node, known)
    for q, answer in questions:
        left, right = (known[side] if isinstance(side, fx.Node) else side for side in (q.left, q.right))
        if ANSWERS[q.kind](left, right) is not answer:
            return None
    return [known[node] for node in wanted]


_SIGNS = {aten.mul.Tensor: "*", aten.div.Tensor: "/", aten.add.Tensor: "+", aten.sub.Tensor: "-"}


def _plain(value: Any, rounded: bool = False) -> str:
    value = single(value) if rounded and isinstance(value, float) else value
    return f"float({str(value)!r})" if isinstance(value, float) and value - value != 0 else f"({value!r})"


def _name(node: fx.Node) -> str:
    kind = "python" if IS_PYTHON in node.meta else "op"
    return f"{kind}_{overload(node).name().replace('::', '_').replace('.', '_')}"


def _quick(node: fx.Node) -> Callable[..., float]:
    found = OPS[node.target]
    return PYTHON.get(node.target, found) if IS_PYTHON in node.meta else found


def _text(node: fx.Node, names: dict[Any, str]) -> str:
    """A node as a Python expression."""
    # As aten rounds a number that meets such a tensor, but for exponents.
    has_exponent = OPS[node.target] is _power and node.target is not aten.pow.Scalar
    rounded = node.meta["val"].dtype is torch.float32 and not has_exponent
    args = [names[a] if isinstance(a, fx.Node) else _plain(a, rounded) for a in node.args]
    if node.target in _SIGNS and len(args) == 2 and "alpha" not in node.kwargs:
        return f"{args[0]} {_SIGNS[node.target]} {args[1]}"
    if OPS[node.target] is _first:
        return args[0]
    if node.target is aten.full.default:
        return f"float({args[1]})"
    given = [
        f"{k}={names.get(v) or _plain(v, rounded)}" for k, v in node.kwargs.items() if k in ("alpha", "value")
    ]
    return f"{_name(node)}({', '.join([*args, *given])})"
