"""A function of the user's in a kernel of attention: `score_mod`, its derivative, or `mask_mod` as lines of
Triton over a tile of scores.

>>> body = TileFunction(target.score, specs, limits, True)  # of score, batch, head, query, key, its inputs
>>> result = body.lines(["s", "b", "h", "i", "j", "f0"], lines)            # the name that holds the result
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..autograd.joint import trace_joint
from ..base.errors import DynamotorError
from ..graph.nodes import operand, operands
from ..graph.sizes import Dim
from ..graph.spec import TensorSpec
from ..graph.subgraphs import Body
from ..lower.lowering import Decline, decline_if

F32 = torch.float32
Range = tuple[int, int]
TRITON = {
    torch.bool: "tl.int1",
    torch.uint8: "tl.uint8",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}


_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
    "logical_and": "&",
    "logical_or": "|",
    "logical_xor": "^",
}
_CALLS = {
    "abs": "tl.abs({})",
    "neg": "-({})",
    "exp": "tl.exp({})",
    "exp2": "libdevice.exp2({})",
    "log": "tl.log({})",
    "log2": "tl.log2({})",
    "sqrt": "libdevice.sqrt({})",
    "rsqrt": "libdevice.rsqrt({})",
    "sin": "libdevice.sin({})",
    "cos": "libdevice.cos({})",
    "tanh": "libdevice.tanh({})",
    "erf": "libdevice.erf({})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-({0})))",
    "reciprocal": "1.0 / ({})",
    "maximum": "maximum({}, {})",
    "minimum": "minimum({}, {})",
    "relu": "maximum({}, 0.0)",
    "sgn": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0} * 0.0))",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0} * 0.0))",
    "tanh_backward": "{0} * (1.0 - {1} * {1})",
    "sigmoid_backward": "{0} * (1.0 - {1}) * {1}",
    "threshold_backward": "tl.where({1} <= {2}, 0.0, {0})",
    "logical_not": "({}) == 0",
    "bitwise_not": "~({})",
    "square": "{0} * {0}",
}
_COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")
_SAME = ("alias", "clone", "detach", "_to_copy", "expand", "view", "convert_element_type", "lift_fresh_copy")
_ENDS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "maximum": max, "minimum": min,
}  # fmt: skip
_TILES = ("s", "plain")  # arguments that are tiles of scores
_NUMBERS = ("scalar_tensor", "full")
_POSITIONS = {
    "add", "sub", "neg", "floor_divide", "remainder", *_COMPARES, *_SAME, *_NUMBERS, "index", "where",
}  # fmt: skip


@dataclass
class Early:
    """What stands before the loop over tiles: lines, and the values of a function that do not change in it.

    moving: names of arguments that do.
    """

    moving: tuple[str, ...]
    lines: list[str] = field(default_factory=list)
    names: dict[fx.Node, str] = field(default_factory=dict)


class TileFunction:
    """A body traced over numbers: `lines` writes it (`derivative`: the gradient of its first argument, behind
    whose tangent it takes). limits: how many batches, heads, queries and keys there are. Decline where an op
    has no form here, or a gradient of its inputs is wanted.
    """

    def __init__(
        self, body: Body, specs: Sequence[TensorSpec], limits: Sequence[int], differentiable: bool
    ) -> None:
        decline_if(len(body.gm.graph.nodes) > 200, "a long function")
        graded = [differentiable, *[False] * (len(specs) - 1)]
        try:
            with torch.enable_grad():
                joint = trace_joint(body.gm, specs, graded, list(range(len(specs))), {})
        except (DynamotorError, RuntimeError, TypeError) as error:
            raise Decline(str(error)) from error
        values, written, gradients = joint.output
        self.inputs, self.tangents, (plan,) = joint.inputs, joint.tangents, joint.plans
        decline_if(
            written or joint.constants or plan.kind not in ("value", "input") or plan.steps,
            "a function with effects",
        )
        self.result = values[plan.index] if plan.kind == "value" else joint.inputs[plan.index]
        self.gradient = gradients[0] if gradients else None
        self.identity = plan.kind == "input" and plan.index == 0
        self.nodes = [node for node in joint.gm.graph.nodes if node.op == "call_function"]
        first = int(differentiable)
        places = zip(self.inputs[first : first + 4], limits, strict=True)
        self.ranges = {node: (0, size - 1) for node, size in places}
        for node in self.nodes:
            if (found := _range(node, self.ranges)) is not None:
                self.ranges[node] = found
        self.checks = False  # whether a position needs one
        for node in self.nodes:
            self._text(node, dict.fromkeys(joint.gm.graph.nodes, "x"), [], "w")

    @property
    def wide(self) -> bool:
        """Whether positions are to have 64 bits: the function does more than compare and add them."""
        return any(not node.meta["val"].dtype.is_floating_point and _name(node) not in _POSITIONS
                   and node.meta["val"].dtype != torch.bool for node in self.nodes)  # fmt: skip

    def lines(
        self,
        given: Sequence[str],
        out: list[str],
        tangent: str = "",
        early: Early | None = None,
        number: Callable[[Dim], str] = str,
        along: Mapping[str, str] | None = None,
    ) -> str:
        """Append the lines; gives the text of the result, or of the first argument's gradient. number: how
        the strides of tensors are written that it reads. along: arguments that are vectors along a side of
        the tile, and the index that broadcasts them.
        """
        wanted = self.gradient if tangent else self.result
        if tangent and self.identity:
            return tangent
        if wanted is None:
            return "0.0"
        early = early or Early(tuple(given))
        known: dict[fx.Node, str] = dict(zip(self.inputs, given, strict=True))
        moving = {node for node, name in known.items() if name in early.moving} | {*self.tangents}
        sides = self._sides(known, along or {})
        known |= dict.fromkeys(self.tangents, tangent) | early.names
        needed, found = [wanted], set()
        while needed:
            node = needed.pop()
            if node not in found and node not in known:
                found.add(node)
                needed += node.all_input_nodes
        for node in self.nodes:
            if node in found:
                moves = not moving.isdisjoint(node.all_input_nodes)
                lines, letter = (out, "w") if moves else (early.lines, "e")
                text = self._text(node, _broadcast(node, known, sides), lines, letter, number)
                known[node] = f"{letter}{len(lines)}"
                lines.append(f"{known[node]} = {text}")
                if moves:
                    moving.add(node)
                else:
                    early.names[node] = known[node]
        return known[wanted] + (sides[wanted] or "")

    def _sides(self, known: Mapping[fx.Node, str], along: Mapping[str, str]) -> dict[fx.Node, str | None]:
        """How each value is broadcast over the tile: by an index if it is a vector along one side, by none
        ("") if it is a number, None if it is a tile.
        """
        sides: dict[fx.Node, str | None] = dict.fromkeys(self.tangents)
        for node, name in known.items():
            sides[node] = along.get(name, None if name in _TILES else "")
        for node in self.nodes:
            met = {sides[value] for value in node.all_input_nodes} - {""}
            sides[node] = met.pop() if len(met) == 1 else None if met else ""
        return sides

    def _text(
        self,
        node: fx.Node,
        known: dict[fx.Node, str],
        out: list[str],
        letter: str,
        number: Callable[[Dim], str] = str,
    ) -> str:
        """One op as an expression; names of lines before it are the letter's."""
        name, spec = _name(node), node.meta["val"]
        decline_if(
            type(spec) is not TensorSpec or spec.shape or spec.dtype not in TRITON,
            f"{node.target} of more than a number",
        )
        compute = F32 if spec.dtype in (torch.float16, torch.bfloat16) else spec.dtype
        if name == "index":
            return self._loaded(node, known, out, letter, number)
        if name in _NUMBERS:
            value = node.args[-1]
            return f"tl.full((), {_literal(value)}, {TRITON[spec.dtype]})"
        if name in ("zeros_like", "ones_like"):
            return f"tl.full((), {int(name == 'ones_like')}, {TRITON[spec.dtype]})"
        if name in _SAME:
            return self._as(node.args[0], spec.dtype, known)
        if name == "where":
            test, *rest = node.args
            a, b = (self._as(v, spec.dtype, known) for v in rest)
            return f"tl.where({self._as(test, torch.bool, known)}, {a}, {b})"
        kind = _met(node.args) if name in _COMPARES or name.startswith("logical") else compute
        given = [v for v in node.args if isinstance(v, (fx.Node, bool, int, float))]
        short = self._short(node)
        operands = [str(v) if short and type(v) is int else self._as(v, kind, known) for v in given]
        text = self._computed(node, name, operands, kind)
        return text if compute == spec.dtype else f"({text}).to({TRITON[spec.dtype]})"

    def _computed(self, node: fx.Node, name: str, operands: list[str], kind: torch.dtype) -> str:
        decline_if(name in ("add", "sub") and node.kwargs.get("alpha", 1) != 1, "a sum with a factor")
        if name in _INFIX:
            return f"({operands[0]}) {_INFIX[name]} ({operands[1]})"
        if name in _CALLS and (kind.is_floating_point or name not in ("sgn", "sign", "relu")):
            return _CALLS[name].format(*[f"({o})" for o in operands])
        if name == "div" and "rounding_mode" not in node.kwargs and kind.is_floating_point:
            return f"({operands[0]}) / ({operands[1]})"
        floors = name == "floor_divide" or name == "div" and node.kwargs.get("rounding_mode") == "floor"
        if (floors or name == "remainder") and not kind.is_floating_point:
            divisor = node.args[1]
            decline_if(type(divisor) is not int or divisor <= 0, "a division by a variable")
            rest = f"((({operands[0]}) % {divisor} + {divisor}) % {divisor})"
            return rest if name == "remainder" else f"(({operands[0]}) - {rest}) // {divisor}"
        if name == "pow" and node.args[1] in (2, 3):
            return " * ".join([f"({operands[0]})"] * (2 if node.args[1] == 2 else 3))
        if name == "clamp" and len(node.args) == 3:
            low, high = (None if v is None else self._as(v, kind, {}) for v in node.args[1:])
            text = operands[0] if low is None else f"maximum({operands[0]}, {low})"
            return text if high is None else f"minimum({text}, {high})"
        raise Decline(f"{node.target} in a function of scores")

    def _as(self, value: Any, dtype: torch.dtype, known: dict[fx.Node, str]) -> str:
        """A value in another type."""
        if not isinstance(value, fx.Node):
            return f"tl.full((), {_literal(value)}, {TRITON[dtype]})"
        if value.meta["val"].dtype == dtype or not dtype.is_floating_point and dtype != torch.bool:
            return known[value]  # positions have as many bits as they need
        if dtype == torch.bool:
            return f"({known[value]}) != 0"
        if dtype == F32 and self._small(value, *value.args) and _name(value) in ("add", "sub"):
            # Of positions in float32: to convert each difference takes as long as its exponential.
            a, b = (self._as(arg, dtype, known) for arg in value.args)
            return f"({a}) {_INFIX[_name(value)]} ({b})"
        return f"({known[value]}).to({TRITON[dtype]})"

    def _short(self, node: fx.Node) -> bool:
        """Whether 32 bits hold an operation on positions, so that its numbers need no type: with one of 64
        bits, each element of a tile would be computed in two registers.
        """
        given: list[Any] = [self.ranges.get(v) if isinstance(v, fx.Node) else (v, v) for v in node.args]
        inside = all(r is not None and r[0] >= -(2**31) and r[1] < 2**31 for r in given)
        return inside and (node in self.ranges or _name(node) in _COMPARES)

    def _small(self, *values: Any) -> bool:
        """Whether all are integers that float32 holds, the first one computed."""
        if values[0].op != "call_function":
            return False
        ranges = [self.ranges.get(v) if isinstance(v, fx.Node) else (v, v) for v in values]
        return all(r is not None and r[0] >= -(2**24) and r[1] <= 2**24 for r in ranges)

    def _loaded(
        self,
        node: fx.Node,
        known: dict[fx.Node, str],
        out: list[str],
        letter: str,
        number: Callable[[Dim], str],
    ) -> str:
        """An element of a tensor that the function reads."""
        tensor, given = operand(node, 0), operands(node, 1)
        spec: TensorSpec = tensor.meta["val"]
        indices = [index for index in given if isinstance(index, fx.Node)]
        if tensor not in self.inputs or len(indices) != len(given) or len(given) != len(spec.shape):
            raise Decline("a part of a tensor in a function of scores")
        at = []
        for index, size, stride in zip(indices, spec.shape, spec.stride, strict=True):
            decline_if(index.meta["val"].dtype == torch.bool, "a mask as an index")
            low, high = self.ranges.get(index, (-1, size))
            step = number(stride) if stride != 1 else "1"
            times = f".to(tl.int64) * {step}" if size * stride >= 2**31 else f" * {step}"
            if low >= 0 and high < size:
                at.append(f"({known[index]}){times}")
                continue
            self.checks = True
            name = f"{letter}{len(out)}"
            out.append(f"{name} = {known[index]}")
            out.append(f"tl.device_assert(({name} >= -{size}) & ({name} < {size}), 'index out of range')")
            at.append(f"tl.where({name} < 0, {name} + {size}, {name}){times}")
        loaded = f"tl.load({known[tensor]} + {' + '.join(at) or '0'})"
        return f"({loaded}) != 0" if spec.dtype == torch.bool else loaded


def _broadcast(
    node: fx.Node, known: dict[fx.Node, str], sides: Mapping[fx.Node, str | None]
) -> dict[fx.Node, str]:
    """`known` for a node's operands: vectors that meet a tile or the other side are broadcast. Until then
    they are loaded and computed in one dimension: a row of a tile would keep the layout of its load, and
    the tile that it meets may be moved to that layout.
    """
    if sides[node] is not None:
        return known
    return {value: text + (sides.get(value) or "") for value, text in known.items()}


def _range(node: fx.Node, known: dict[fx.Node, Range]) -> Range | None:
    """The least and the greatest that a position may be, by those of its operands; None: not known."""
    given = [
        (a, a) if isinstance(a, int) else known.get(a) for a in node.args if isinstance(a, (fx.Node, int))
    ]
    of = [found for found in given if found is not None]
    whole = node.meta["val"].dtype in (torch.int32, torch.int64)
    if len(of) < len(given) or not of or not whole or "alpha" in node.kwargs:
        return None
    name, (low, high), (first, last) = _name(node), of[0], of[-1]
    if name in ("remainder", "floor_divide") and 0 < first == last:
        ends = [low // first, high // first]
        if name == "remainder":
            ends = [low % first, high % first] if ends[0] == ends[1] else [0, first - 1]
    elif name == "neg":
        ends = [-high, -low]
    elif name in _SAME or name in _ENDS:
        ends = [_ENDS.get(name, min)(a, b) for a in (low, high) for b in (first, last)]
    else:
        return None
    return (min(ends), max(ends)) if max(map(abs, ends)) < 2**31 else None


def _name(node: fx.Node) -> str:
    """An op's name without its overload."""
    packet: Any = getattr(node.target, "overloadpacket", node.target)
    return str(packet.__name__)


def _met(args: Sequence[Any]) -> torch.dtype:
    """The type in which numbers are compared."""
    kinds = [
        torch.empty((), dtype=a.meta["val"].dtype, device="meta") if isinstance(a, fx.Node) else a
        for a in args
    ]
    met = torch.result_type(*kinds) if len(kinds) == 2 else kinds[0].dtype
    return F32 if met in (torch.float16, torch.bfloat16) else met


def _literal(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    decline_if(type(value) not in (bool, int, float), "a constant that is no number")
    return repr(int(value) if isinstance(value, bool) else value)
