"""Random programs with size arithmetic, branches on sizes and tensors made of them: text of a function
`program(x, y, k)`.
"""

from __future__ import annotations

import math
import random
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F

import dynamotor

SIZES = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17)

_SIZE = (
    "{a} + {b}",
    "{a} * 2 + 1",
    "{a} - {b}",
    "{a} * {b}",
    "{a} // 2",
    "{a} // ({b} * {b} + 1)",
    "{a} % 3",
    "{a} % ({b} + 20)",
    "min({a}, {b})",
    "max({a}, 3)",
    "min({a}, 6)",
    "len({t})",
    "{t}.shape[-1]",
    "{t}.numel()",
    "{t}.size(0)",
    "abs({a} - 5)",
    "-(-{a} // 4)",
    "divmod({a}, 3)[1]",
    "{a} ** 2",
    "int({a})",
    "math.prod({t}.shape)",
    "sum({t}.shape)",
    "{t}.stride(0)",
    "(({a}, {b}) + tuple({t}.shape))[1]",
    "{t}.shape.numel()",
    "[{a}, {b}, 4][-2]",
    "({a} if {a} > {b} else {b})",
    "{a} + k",
    "k * {b}",
    "{t}.dim() + {a}",
    "helper({a}, {t})",
    "({a} == {b}) + {a}",
    "{a} // 2 * 2",
    "round({a})",
)
_TENSOR = (
    "{t} * {a}",
    "{t} + {b} / 4",
    "{t}[: {a}]",
    "{t}[{a} // 2 :]",
    "{t}.reshape(-1)",
    "{t}.reshape({t}.shape[0], -1, 1)",
    "{t}.view({t}.numel())",
    "{t}.unsqueeze(0)",
    "{t}.transpose(0, -1)",
    "torch.arange({c}, dtype=x.dtype)",
    "torch.zeros({c}, 2, dtype=x.dtype)",
    "torch.full(({c},), {a}, dtype=x.dtype)",
    "torch.cat([{t}, {t}])",
    "{t}.sum(0)",
    "{t}.sum(-1, keepdim=True)",
    "{t}.new_zeros({t}.shape)",
    "F.pad({t}, (0, {c}))",
    "{t}.flip(0)",
    "{t}.roll({a}, 0)",
    "torch.stack([{t}, {t} * 2], 1)",
    "{t}.expand(2, *{t}.shape)",
    "{t}.contiguous()",
    "{t}.mean() + {t}",
    "{t}.cumsum(0)",
    "torch.cat(torch.split({t}, {c}), 0)",
    "{t} @ {t}.transpose(-1, -2)",
    "{t}.narrow(0, 0, {t}.shape[0] // 2)",
    "{t}[..., : {c}]",
    "{t}.repeat(2, *[1] * ({t}.dim() - 1))",
    "torch.ones({t}.size(0), dtype=x.dtype)",
    "{t} - {t}.amax()",
    "F.softmax({t}, -1)",
    "{t}.clone().fill_({a})",
    "{t}.as_strided({t}.shape, {t}.stride())",
    "{t}.flatten(0, 1)",
)
_CONDITION = (
    "{a} > {b}",
    "{a} == 4",
    "{a} % 2",
    "{t}.shape[0] >= 8",
    "{a} < 2 * {b}",
    "{t}.numel() > 50",
    "{a} in (2, 8, 9)",
    "{t}.is_contiguous()",
    "{t}.shape == x.shape",
    "not {a}",
    "1 < {a} <= 9",
)


def helper(n: int, t: torch.Tensor) -> int:
    return n + t.shape[0] if n > 3 else n


@dynamotor.disable
def outside(t: torch.Tensor, n: int) -> tuple[torch.Tensor, int]:
    return t + 1, n + 1


def text(seed: int) -> str:
    """The source of a program."""
    pick = random.Random(seed)
    lines, sizes, tensors, indent = ["b, n = x.shape"], ["b", "n", "3"], ["x", "y"], ""

    def fill(form: str) -> str:
        return form.format(
            a=pick.choice(sizes),
            b=pick.choice(sizes),
            t=pick.choice(tensors),
            c=f"({pick.choice(sizes)} % 5 + 2)",
        )

    for i in range(pick.randrange(4, 10)):
        kind = pick.random()
        if kind < 0.35:
            lines.append(f"{indent}s{i} = {fill(pick.choice(_SIZE))}")
            if not indent:
                sizes.append(f"s{i}")
        elif kind < 0.8:
            lines.append(f"{indent}t{i} = {fill(pick.choice(_TENSOR))}")
            if not indent:
                tensors.append(f"t{i}")
        elif kind < 0.86:
            name = pick.choice(tensors)
            lines.append(f"{indent}{name}, s{i} = outside({name}, {pick.choice(sizes)})")
        elif kind < 0.9:
            lines.append(f"{indent}for i in range({pick.choice(sizes)} % 3): x = x + i")
        elif not indent:
            lines += [f"u{i} = x", f"if {fill(pick.choice(_CONDITION))}:"]
            indent = "    "
            lines.append(f"{indent}u{i} = {fill(pick.choice(_TENSOR))}")
            tensors.append(f"u{i}")
            continue
        indent = ""
    results = ", ".join(["x", *tensors[-2:], *pick.sample(sizes, 2), *sizes[-2:]])
    return "def program(x, y, k):\n" + "".join(f"    {line}\n" for line in [*lines, f"return ({results})"])


def program(seed: int) -> Callable[..., object]:
    """The function of a seed."""
    namespace = {"torch": torch, "F": F, "math": math, "helper": helper, "outside": outside}
    exec(compile(text(seed), f"<sizes {seed}>", "exec"), namespace)
    found = namespace["program"]
    assert isinstance(found, types.FunctionType)
    return found
