"""Times programs on a GPU against each other, on random data, to choose the fastest.

>>> time_calls([library, candidate], random_inputs(specs), device)      # milliseconds; infinite for one that does not run
[0.041, 0.033]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.errors import DynamotorError
from ..base.events import timed
from ..graph.spec import TensorSpec

ROUNDS = 12
_PAUSE = 1_000_000  # cycles: the host gets ahead, so that only the device's time counts
_CACHE = 1 << 28  # bytes read before each call: data starts out of the cache, as in a model


def random_inputs(specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """A tensor for each spec: numbers around zero, integers that are zero (they may be positions).

    What lies under it is filled, so that elements may share their place, as those of an expanded tensor do.
    """
    found = []
    for spec in specs:
        memory = torch.zeros(spec.extent, dtype=spec.dtype, device=spec.device)
        found.append((memory.normal_() if spec.dtype.is_floating_point else memory).as_strided(spec.shape, spec.stride))
    return found


def time_calls(calls: Sequence[Callable[..., Any]], inputs: Sequence[torch.Tensor], device: torch.device) -> list[float]:
    """Median milliseconds of each call on the same inputs, in turns."""
    with timed("autotune"), torch.cuda.device(device), torch.no_grad():
        other = torch.ones(_CACHE, dtype=torch.int8, device=device)
        alive = [call if _runs(call, inputs) else None for call in calls]
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(ROUNDS):
            for call, found in zip(alive, times, strict=True):
                if call is not None:
                    found.append(_once(call, inputs, other))
    return [statistics.median(found) if found else float("inf") for found in times]


def _runs(call: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> bool:
    """The first calls: they build and load; a tile may ask for more memory than a multiprocessor has."""
    try:
        for _ in range(2):
            call(*inputs)
        torch.cuda.synchronize()
        return True
    except (DynamotorError, RuntimeError):
        return False


def _once(call: Callable[..., Any], inputs: Sequence[torch.Tensor], other: torch.Tensor) -> float:
    other.amax()
    torch.cuda._sleep(_PAUSE)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call(*inputs)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
