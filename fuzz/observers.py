"""Operators that log the Python state that they observe, among changes of that state and tensor code.

A program is a list of statements over module globals, lists, dicts, attributes and closures; `see` is a custom op
that appends a snapshot of them to a log, `bump` one that changes them, `fail` one that raises. Results, the log and
the state that is left must be eager's.

>>> problems(3)
[]
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch

import dynamotor

from .steps import difference

BACKENDS = ("eager", "aot_eager", "aot_eager", "native")
STATEMENTS = (
    "x = x * 1.5 + 1",
    "x = x.sin()",
    "x = x + len(ITEMS)",
    "x = x * TABLE.get('k', 2.0)",
    "x = x * held.k",
    "ITEMS.append(float(len(ITEMS)))",
    "ITEMS.pop() if ITEMS else None",
    "TABLE['k'] = TABLE.get('k', 1.0) + 1",
    "TABLE.clear()",
    "held.k += 1",
    "held.more = len(ITEMS)",
    "K = K + 1",
    "print(end='')",
    "warnings.warn('text %d' % len(ITEMS))",
    "x = see(x)",
    "x = see(x)",
    "x = see_again(x)",
    "x = bump(x)",
    "x = x.clone(); x.mul_(K)",
)
REGIONS = (
    "with torch.no_grad():",
    "with torch.autocast('cpu', torch.bfloat16):",
    "if x.dim():",
    "for _ in range(2):",
)
SPACE: dict[str, Any] = {}


def snapshot() -> tuple[Any, ...]:
    """The state that a program changes, and PyTorch's modes."""
    held = SPACE["held"]
    return (
        SPACE["K"], list(SPACE["ITEMS"]), dict(SPACE["TABLE"]), held.k, getattr(held, "more", None), len(SPACE["SHOWN"]),
        torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
    )  # fmt: skip


def _copy(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fuzz_observers::see", mutates_args=())
def see(x: torch.Tensor) -> torch.Tensor:
    """Log the state."""
    SPACE["LOG"].append(snapshot())
    return x.clone()


@torch.library.custom_op("fuzz_observers::bump", mutates_args=())
def bump(x: torch.Tensor) -> torch.Tensor:
    """Change the state."""
    SPACE["ITEMS"].append(-1.0)
    SPACE["held"].k += 10
    return x * SPACE["held"].k


@torch.library.custom_op("fuzz_observers::fail", mutates_args=())
def fail(x: torch.Tensor) -> torch.Tensor:
    """Log, and raise."""
    SPACE["LOG"].append(snapshot())
    raise KeyError("asked for")


for _op in (see, bump, fail):
    _op.register_fake(_copy)
    _op.register_autograd(lambda ctx, g: g * 2)
_library = torch.library.Library("fuzz_observers_too", "DEF")
_library.define("see(Tensor x) -> Tensor")


def _see_again(x: torch.Tensor) -> torch.Tensor:
    SPACE["LOG"].append(snapshot())
    return x * len(SPACE["ITEMS"])


_library.impl("see", _see_again, "CompositeImplicitAutograd")


def write(seed: int) -> str:
    """The text of a program that defines `call(x)`."""
    draw = random.Random(seed)
    lines = ["global K"]
    for _ in range(draw.randint(3, 8)):
        line = draw.choice(STATEMENTS)
        if draw.random() < 0.2:
            lines += [draw.choice(REGIONS), *(f"    {draw.choice(STATEMENTS)}" for _ in range(2))]
        lines.append(line)
    if draw.random() < 0.3:
        region = draw.choice(REGIONS)
        block = [f"    {region}", "        x = fail(x)", "except KeyError:", "    LOG.append('caught')"]
        lines += ["try:", *block] if draw.random() < 0.5 else [region, "    x = fail(x)"]
    return "def call(x):\n" + "".join(f"    {line}\n" for line in [*lines, "return x.float().sum()"])


class _Held:
    k = 2.0


def observed(text: str, compile: Callable[[Any], Any]) -> list[Any]:
    """What three calls give and leave."""
    SPACE.clear()
    SPACE.update(
        torch=torch, warnings=warnings, K=2.0, ITEMS=[1.0], TABLE={}, held=_Held(), LOG=[], SHOWN=[],
        see=see, bump=bump, fail=fail, see_again=torch.ops.fuzz_observers_too.see,
    )  # fmt: skip
    exec(text, SPACE)
    call, found = compile(SPACE["call"]), list[Any]()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = _show
        for k in range(3):
            x = torch.linspace(0.5, 1, 4).requires_grad_()
            try:
                loss = call(x)
                if loss.requires_grad:
                    loss.backward()
                found += [loss.item(), None if x.grad is None else x.grad.tolist()]
            except Exception as error:  # noqa: BLE001 (the program's)
                found.append(type(error).__name__)
            found.append(snapshot())
            torch.set_grad_enabled(True)
            torch.set_autocast_enabled("cpu", False)
            SPACE["ITEMS"].append(float(k))
    return [*found, list(SPACE["LOG"]), list(SPACE["SHOWN"])]


def _show(message: Any, category: Any, *place: Any) -> None:
    if category is not dynamotor.EagerWarning:
        SPACE["SHOWN"].append(str(message))


def problems(seed: int) -> list[str]:
    """How a program of a seed differs from eager."""
    text, backend = write(seed), BACKENDS[seed % len(BACKENDS)]
    want = observed(text, lambda call: call)
    dynamotor.reset()
    with dynamotor.config.patch(warn_slower=False):
        got = observed(text, lambda call: dynamotor.compile(call, backend=backend))
    wrong = difference(want, got, rel=1e-4 if backend == "native" else 1e-5)
    return [f"{backend}: {wrong}\n{text}"] if wrong else []
