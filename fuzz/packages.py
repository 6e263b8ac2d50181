"""Packages and exported programs beside their source, called with arguments that differ from the examples.

A program asks its arguments for facts (strides, dtypes, identity, keys, signs of zero, `requires_grad`); each call's
arguments are the examples with some changed. A call gives eager's result or is refused with a code.

>>> problems(3)
[]
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dynamotor
from dynamotor import UsageError

# Over a, b: tensors, k: a number, d: a dict of tensors, l: a list of tensors.
FACTS = (
    "a.is_contiguous()", "a.stride(0) > 1", "a.dtype is torch.float32", "a is b", "a.requires_grad", "k > 0", "k == 2",
    "isinstance(k, int)", "isinstance(k, bool)", "1 in d", "'a' in d", "len(l) > 1", "type(l) is list", "a.shape == b.shape",
    "a.shape[0] == 2", "a.dim() == 2", "hasattr(a, 'scale')", "isinstance(a, torch.nn.Parameter)", "b is None", "l[0] is a",
    "list(d)[0] == 1", "a.storage_offset() == 0", "a.is_leaf", "a.device.type == 'cpu'", "str(k) == '2'", "k is None",
    "a.untyped_storage().data_ptr() == l[0].untyped_storage().data_ptr()", "torch.is_grad_enabled()",
)  # fmt: skip
RESULTS = (
    "a * 2", "a + (0 if b is None else b)", "a / torch.full((1,), float(k or 0))", "a * len(l)", "sum(d.values()) + a",
    "{key: value * 2 for key, value in d.items()}", "[a, *l]", "a * (k or 1)", "a.sum(0)", "a.t()", "{'x': a.clone(), 1: a}",
)  # fmt: skip


def _part(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x])[len(x) :]


def _marked(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.scale = 2.0  # type: ignore[attr-defined]
    return x


TENSORS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda x: x,
    lambda x: x * 2,
    lambda x: x.t().contiguous().t(),
    lambda x: x.double(),
    lambda x: x.clone().requires_grad_(),
    lambda x: torch.nn.Parameter(x, False),
    lambda x: x[:1],
    lambda x: torch.cat([x, x]),
    lambda x: x[0],
    lambda x: -0.0 * x,
    lambda x: None,
    _part,
    _marked,
)
NUMBERS = (2, 2.0, 3, 0.0, -0.0, True, -1, None, float("inf"), float("nan"))
SHAPE = (2, 3)
ROWS = torch.export.Dim("rows")
DIMENSIONS: tuple[Any, ...] = (
    None,
    None,
    {"a": {0: ROWS}},
    {"a": {0: ROWS}, "b": {0: ROWS}},
    {"b": {0: torch.export.Dim("some", min=2, max=3)}},
    {"a": {1: "columns"}},
)


def arguments(draw: random.Random, changed: bool) -> list[Any]:
    """The examples, or what differs from them in a few places."""
    x, y = torch.arange(6.0).view(SHAPE) - 2, torch.arange(6.0).view(SHAPE) / 3
    a, b, k, d, l = x, y, 2, {1: x + 1, "a": y}, [x, y]  # noqa: E741
    for _ in range(draw.randint(1, 2) if changed else 0):
        match draw.randrange(8):
            case 0:
                a = draw.choice(TENSORS)(a) if a is not None else y
            case 1:
                b = draw.choice(TENSORS)(y)
            case 2:
                k = draw.choice(NUMBERS)
            case 3:
                d = draw.choice(
                    ({True: x, "a": y}, {"a": y, 1: x}, {1: x}, {1: x, "a": y, "c": y}, {1.0: x, "a": y})
                )
            case 4:
                l = draw.choice(((x, y), [x], [y, x], [x, x], [x.clone(), y], [x, y, y]))  # noqa: E741
            case 5:
                b = a
            case 6:
                a = b if b is not None else a
            case 7:
                a, b = b, a
    return [a, b, k, d, l]


def write(seed: int) -> str:
    """The text of a program."""
    draw = random.Random(seed)
    lines = ["def call(a, b, k, d, l):", f"    r = {draw.choice(RESULTS)}"]
    for fact in draw.sample(FACTS, draw.randint(1, 3)):
        lines += [f"    if {fact}:", f"        r = [r, {draw.choice(RESULTS)}]"]
    return "\n".join([*lines, "    return r", ""])


def same(a: Any, b: Any) -> bool:
    """Whether two results have the same structure, types, keys, dtypes, strides and values, signs of zero included."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return torch.equal(a.isnan(), b.isnan()) and torch.equal((1 / a).nan_to_num(7), (1 / b).nan_to_num(7))
    if isinstance(a, dict):
        keys = [(type(k), k) for k in a] == [(type(k), k) for k in b] if isinstance(b, dict) else False
        return keys and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def problems(seed: int) -> list[str]:
    """Calls whose result is not the source's."""
    text, draw = write(seed), random.Random(seed + 1)
    space: dict[str, Any] = {"torch": torch}
    exec(text, space)
    call, way = space["call"], "package" if seed % 4 == 0 else "exported_program"
    dynamotor.reset()
    try:
        example = arguments(draw, False)
        call(*example)
        program = dynamotor.export(call, tuple(example), dynamic_shapes=draw.choice(DIMENSIONS))
        if way == "package":
            with tempfile.TemporaryDirectory() as folder:
                program.package(Path(folder) / "model.dm")
                run = dynamotor.load(Path(folder) / "model.dm")
        else:
            run = program.exported_program().module()
    except (UsageError, dynamotor.CaptureError, RuntimeError, TypeError, ZeroDivisionError):
        return []  # refused, or the program raises
    for n in range(12):
        given = arguments(draw, n > 0)
        with torch.no_grad():
            try:
                got = run(*given)
            except Exception as error:  # noqa: BLE001 (a refusal)
                if n == 0:
                    return [f"{way}: the examples are refused: {error!r}"[:300] + f"\n{text}"]
                continue
            try:
                want = call(*given)
            except Exception as error:  # noqa: BLE001 (the program's)
                return [f"{way}: {given} gave {got}, eager raises {error!r}\n{text}"]
        if not same(want, got):
            return [f"{way}: {given} gave {got} and not {want}\n{text}"]
    return []
