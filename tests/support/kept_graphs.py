"""A backend for tests that look at captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx


class Recorder:
    """A backend that keeps the graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        return gm.forward
