"""The C extension of dynamotor-xla: `csrc/*.c` has the documentation."""

from collections.abc import Callable
from typing import Any

import torch

class Timing:
    count: int
    total: float
    samples: list[tuple[float, float]]
    def since(self, start: float) -> None: ...

def xla_setup(
    tensor: type,
    alias: type,
    node: type,
    lock: Any,
    lanes: dict[Any, Any],
    lane_of: Callable[[Any], Any],
    settings: tuple[Callable[[], Any], ...],
    timings: Any,
) -> None: ...

class XlaCall:
    order: tuple[int, ...]
    start: Callable[[list[Any]], list[Any]] | None
    finishes: bool
    def __init__(self, device: torch.device, outputs: tuple[Any, ...]) -> None: ...
    def __call__(self, *inputs: Any) -> tuple[Any, ...]: ...
    def gather(self, inputs: tuple[Any, ...]) -> list[Any]: ...
    def set_inputs(self, order: tuple[int, ...], arrays: list[Any], completes: bool) -> None: ...
    def set_start(self, start: Callable[[list[Any]], list[Any]], settings: tuple[Any, ...]) -> None: ...
