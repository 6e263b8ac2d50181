"""Numbers that a whole step calculates on the host, as expressions of several ops, against aten on 0-d tensors.

>>> problems(3)
[]
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import fx

from dynamotor.graph.spec import TensorSpec
from dynamotor.step.host import OPS, HostProgram

aten = torch.ops.aten
VALUES = (
    0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 7.0, 1e-8, 1e30, -1e30, 1e38, 3.5e38, 1e300, 5e-324, 1e-45,
    math.inf, -math.inf, math.nan, 0.1, 0.999, 16777217.0,
)  # fmt: skip
_OF_A_NUMBER = (aten.rsub.Scalar, aten.pow.Tensor_Scalar)
_BINARY = [op for op in OPS if [str(a.type) for a in op._schema.arguments[:2]] == ["Tensor", "Tensor"]]
_UNARY = [aten.neg.default, aten.sqrt.default, aten.reciprocal.default, aten.exp.default, aten.clone.default]


def write(seed: int) -> tuple[list[tuple[Any, ...]], torch.dtype]:
    """Calls (op, places of operands or numbers) over two inputs, and their dtype."""
    draw = random.Random(seed)
    calls: list[tuple[Any, ...]] = []
    for k in range(draw.randint(1, 6)):
        at = lambda: draw.choice((draw.randrange(k + 2), k + 1))  # noqa: E731, B023
        form = draw.choice(("binary", "binary", "unary", "number", "power"))
        if form == "binary":
            calls.append((draw.choice(_BINARY), at(), at()))
        elif form == "unary":
            calls.append((draw.choice(_UNARY), at()))
        elif form == "power":
            calls.append((aten.pow.Scalar, draw.choice(VALUES), at()))
        else:
            calls.append((draw.choice(_OF_A_NUMBER), at(), draw.choice(VALUES)))
    return calls, draw.choice((torch.float64, torch.float32))


def _arguments(call: tuple[Any, ...], known: list[Any]) -> tuple[Any, ...]:
    op, first, *rest = call
    if op is aten.pow.Scalar:
        return first, known[rest[0]]
    return (known[first], *(rest if op in _OF_A_NUMBER else [known[place] for place in rest]))


def _last(calls: list[tuple[Any, ...]], inputs: list[torch.Tensor], off: int = -1, by: int = 2) -> float:
    """Aten's number. off: a call whose result is `by` units in the last place larger, as a library may round it."""
    known: list[Any] = list(inputs)
    for k, call in enumerate(calls):
        made = call[0](*_arguments(call, known))
        known.append(made * (1 + by * torch.finfo(made.dtype).eps) if k == off else made)
    return float(known[-1].item())


def problems(seed: int) -> list[str]:
    """Inputs for which the host's numbers are not aten's."""
    calls, dtype = write(seed)
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in "xy"]
    for call in calls:
        nodes.append(graph.call_function(call[0], _arguments(call, nodes)))
    for node in nodes:
        node.meta["val"] = TensorSpec.dense((), dtype)
    try:
        program = HostProgram.of(nodes[2:], nodes[:2], [nodes[-1]], [])
    except NotImplementedError:
        return []
    draw = random.Random(seed + 1)
    for _ in range(40):
        inputs = [torch.tensor(draw.choice(VALUES), dtype=dtype) for _ in "xy"]
        try:
            want = _last(calls, inputs)
            spread = sum(abs(_last(calls, inputs, k, by) - want) for k in range(len(calls)) for by in (2, -2))
        except RuntimeError:
            continue  # a number that the dtype cannot hold: no trace has it
        if math.isfinite(want) and math.isnan(spread):
            continue  # the root of a difference that rounding may make negative
        got = program.code([x.item() for x in inputs])
        if got is None:
            continue  # Python's numbers raise: the optimizer's own code runs
        (found,) = got
        right = want != want and found != found or want == found or abs(found - want) <= 4 * spread
        if not right or want == 0 and spread == 0 and math.copysign(1, want) != math.copysign(1, found):
            names = " ".join(str(call[0]) for call in calls)
            return [f"{names} of {[x.item() for x in inputs]} in {dtype}: {found!r} and not {want!r}"]
    return []
