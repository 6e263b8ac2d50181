"""Code that runs in a backward, or that raises inside regions, over an object that changes between calls, or between
forward and backward.

A program is a few lines of Python; it is run in eager and compiled, and gradients, effects, the generator of random
numbers and the modes of the thread must be equal.

>>> problems(write(7), "aot_eager")
[]
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch

import dynamotor

BACKENDS = ("eager", "aot_eager", "aot_eager", "native")
# What is read, and the statement that sets it to `v`.
READS = {
    "K": "global K; K = v",
    "TABLE['k']": "TABLE['k'] = v",
    "ITEMS[0]": "ITEMS[0] = v",
    "Holder.k": "Holder.k = v",
    "holder.k": "holder.k = v",
    "helper()": "global helper; helper = lambda: v",
    "HELD[0].k": "HELD[0] = Holder(); HELD[0].k = v",
    "len(ITEMS)": "ITEMS[:] = [v] * int(v)",
    "(3.0 if FLAG else 2.0)": "global FLAG; FLAG = v > 4",
    "1.5": "pass",
    "torch.rand_like(g)": "pass",
}
UNARY = (
    "x.sin()",
    "x * 1.5",
    "x.tanh() + x",
    "x.exp()",
    "(x * x).sum(0, keepdim=True) + x",
    "x.t().t()",
    "x.clone()",
)
EFFECTS = ("pass", "pass", "LOG.append(1)", "holder.k += 1", "ITEMS.append(1.0)")
PLACES = ("backward", "context", "hook", "hook of a function", "hook of a leaf", "operator", "region")
REGIONS = (
    "torch.no_grad()",
    "torch.autocast('cpu', torch.bfloat16)",
    "torch.inference_mode()",
    "torch.enable_grad()",
)
HEAD = """
import torch
K, TABLE, ITEMS, FLAG, LOG = 2.0, {'k': 2.0}, [2.0], False, []
class Holder: k = 2.0
holder, HELD = Holder(), [Holder()]
def helper(): return K
def change(v):
    %(change)s
class Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.holder = %(context)s
        return x * 1
    @staticmethod
    def backward(ctx, g):
        %(effect)s
        return g * %(read)s
def on_gradient(g):
    %(effect)s
    return g * %(read)s
"""


def write(seed: int) -> str:
    """The text of a program that defines `call(x)` and `change(v)`."""
    draw = random.Random(seed)
    place, read = draw.choice(PLACES), draw.choice(list(READS))
    before, after = ([draw.choice(UNARY) for _ in range(draw.randint(0, 2))] for _ in range(2))
    middle = {
        "backward": ["x = Part.apply(x)"],
        "context": ["x = Part.apply(x)"],
        "hook": [f"x = x * 2; x.register_hook(lambda g: g * {read})"],
        "hook of a function": ["x = x * 2; x.register_hook(on_gradient)"],
        "hook of a leaf": ["x.register_hook(on_gradient)"],
        "operator": ["x = torch.ops.fuzz_late.scale(x)"],
        "region": [
            f"with {draw.choice(REGIONS)}:",
            "    y = x.detach() * 2",
            *(["    print(end='')"] if draw.random() < 0.5 else []),
            f"    y = y.index_select(0, torch.tensor([{draw.choice((0, 99))}]))",
            "x = x + y.detach().clone().sum()",
        ],
    }[place]
    held = place == "context" and read.startswith(("holder", "HELD"))
    fill = {
        "change": READS[read],
        "context": "holder" if held else "None",
        "read": "ctx.holder.k" if held else read,
        "effect": draw.choice(EFFECTS),
    }
    text = HEAD % fill
    if held:
        text = text.replace("return g * ctx.holder.k\n", f"return g * {read}\n").replace(
            f"return g * {read}\n", "return g * ctx.holder.k\n", 1
        )
    lines = [*(f"x = {one}" for one in before), *middle, *(f"x = {one}" for one in after), "return x.sum()"]
    return text + "def call(x):\n" + "".join(f"    {line}\n" for line in lines)


_library = torch.library.Library("fuzz_late", "DEF")
_library.define("scale(Tensor x) -> Tensor")
_now: dict[str, Any] = {}
_library.impl("scale", lambda x: x * _now["ITEMS"][0], "CompositeImplicitAutograd")


def observed(text: str, compile: Callable[[Any], Any]) -> list[Any]:
    """What two calls of a program, two backwards of each and changes between them give."""
    space: dict[str, Any] = {}
    exec(compile_text(text), space)
    _now.clear()
    _now.update(space)
    call, found = compile(space["call"]), list[Any]()
    for value in (2.0, 5.0):
        torch.manual_seed(3)
        x = torch.linspace(0.5, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
        space["change"](value)
        try:
            loss = call(x)
            found.append(loss.detach())
            space["change"](value + 2)
            for keep in (True, False):
                loss.backward(retain_graph=keep)
                found.append(x.grad)
                x.grad = None
        except Exception as error:  # noqa: BLE001 (the program's)
            if "[DM" in str(error):
                return ["refused"]
            found.append(type(error).__name__)
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()
        held = space["holder"].k, space["ITEMS"][0], len(space["ITEMS"]), len(space["LOG"])
        found += [modes, [float(n) for n in held], torch.get_rng_state().sum()]
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
    return found


def compile_text(text: str) -> Any:
    """The code of a program."""
    return compile(text, "<late>", "exec")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return math.isclose(a, b, rel_tol=1e-6) if isinstance(a, float) and isinstance(b, float) else a == b


def problems(text: str, backend: str) -> list[str]:
    """What differs from eager."""
    dynamotor.reset()
    want = observed(text, lambda f: f)
    got = observed(text, lambda f: dynamotor.compile(f, backend=backend))
    if got == ["refused"] or _same(want, got):
        return []
    return [f"{backend}: eager {want}, compiled {got}"]
