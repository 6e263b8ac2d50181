"""Training steps between which something changes: `compile_step` beside the eager loop that it stands for.

A program is a small model, an optimizer (PyTorch's, or one of a user's own that looks things up or leaves effects),
what clips, a scaler, and changes, one between two steps each. Losses, weights, gradients, state, options and what the
user's Python sees or leaves are compared after each step.

>>> problems(3)      # how the compiled steps differ from the eager ones: nothing when they are right
[]
"""

from __future__ import annotations

import contextlib
import io
import math
import random
from collections.abc import Iterator
from typing import Any

import torch

import dynamotor

from . import model_changes  # noqa: F401 (its changes)
from .changes import CHANGES
from .models import KNOB, Asked
from .training import World, plain

STEPS = 7


def difference(a: Any, b: Any, path: str = "", rel: float = 1e-5) -> str:
    """Where two observations differ first; empty where they agree."""
    if isinstance(a, float) and isinstance(b, float):
        close = math.isclose(a, b, rel_tol=rel, abs_tol=1e-7) or a == b or a != a and b != b
        return "" if close else f"{path}: {b!r} and not {a!r}"
    if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        return next(filter(None, (difference(a[k], b[k], f"{path}.{k}", rel) for k in a)), "")
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        pairs = enumerate(zip(a, b))
        return next(filter(None, (difference(x, y, f"{path}[{k}]", rel) for k, (x, y) in pairs)), "")
    return "" if type(a) is type(b) and a == b else f"{path}: {str(b)[:200]} and not {str(a)[:200]}"


def changes(seed: int) -> list[list[str]]:
    """The changes before each step but the first."""
    chosen = random.Random(seed + 1)
    names = list(CHANGES)
    few = [chosen.choice(names) for _ in range(3)]
    found: list[list[str]] = [[]]
    for _ in range(STEPS - 1):
        n = chosen.choice([0, 1, 1, 1, 2])
        found.append([chosen.choice(few if chosen.random() < 0.5 else names) for _ in range(n)])
    return found


def run(seed: int, backend: str, between: list[list[str]]) -> Iterator[Any]:
    """What each step gives and leaves; an exception ends it. backend: "" for the eager loop."""
    world = World(seed)
    drawn = torch.Generator().manual_seed(seed)
    chosen = random.Random(seed + 2)
    step = world.compiled(backend) if backend else world.step()
    try:
        for names in between:
            for name in names:
                CHANGES[name](world, chosen)
            x = torch.randn(world.rows, 4, generator=drawn, dtype=torch.float64)
            y = torch.randint(0, 3, (world.rows,), generator=drawn)
            try:
                with world.around():
                    loss = step(x, y)
            except Asked:
                loss, KNOB.fails = "raised", False
            yield {"loss": plain(loss), **world.observed()}
    except Exception as error:
        refused = "[DM" in str(error) and "[DM401]" not in str(error)
        yield "raised", "refused" if refused else type(error).__name__, str(error)
    finally:
        world.close()


def problems(seed: int, backend: str = "aot_eager", between: list[list[str]] | None = None) -> list[str]:
    """How compiled steps differ from eager ones."""
    between = changes(seed) if between is None else between
    with contextlib.redirect_stderr(io.StringIO()):
        eager = list(run(seed, "", between))
        with dynamotor.config.patch(fallback_random=True):
            found = list(run(seed, backend, between))
    for k, (a, b) in enumerate(zip(eager, found)):
        if isinstance(a, tuple) or isinstance(b, tuple):
            raised = [one[1] if isinstance(one, tuple) else "no error" for one in (a, b)]
            if raised[0] != raised[1] and raised[1] != "refused":
                text = b[2] if isinstance(b, tuple) else a[2]
                return [f"step {k}: {raised[1]} and not {raised[0]}: {text[:300]}"]
            return []
        text = difference(a, b)
        if text:
            return [f"step {k} {text}"]
    return []


def reduce(seed: int, backend: str) -> list[list[str]]:
    """The changes that it takes."""
    between = changes(seed)
    for k in reversed(range(len(between))):
        for name in list(between[k]):
            fewer = [list(names) for names in between]
            fewer[k].remove(name)
            if problems(seed, backend, fewer):
                between = fewer
    return between


def backend_of(seed: int) -> str:
    """Kernels are none of what changes, so few programs build any."""
    return "native" if seed % 40 == 0 else "aot_eager"


def describe(seed: int) -> str:
    """The parts of the program of a seed."""
    world = World(seed)
    world.close()
    scaler = "" if world.scaler is None else f", {type(world.scaler).__name__}"
    kept = ", the update alone" if world.alone else ""
    kept += ", gradients kept" if world.keep_grads else ""
    return f"{type(world.model).__name__}, {world.optimizer_name}, clip: {world.clip_name}{scaler}, {world.accumulate} backwards a step{kept}"
