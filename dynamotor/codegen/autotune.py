"""Times programs on a GPU against each other, on random data, to choose the fastest.

>>> # milliseconds; infinite for one that fails or errs
>>> time_calls([library, candidate], random_inputs(specs), device)
[0.041, 0.033]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base import compat
from ..base.errors import DynamotorError
from ..base.events import timed
from ..graph.sizes import numbers
from ..graph.spec import TensorSpec, duplicate

ROUNDS = 12
_PAUSE = 1_000_000  # cycles: the host gets ahead, so that only the device's time counts
_FEW = 0.005  # of all elements


def random_inputs(specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """A tensor for each spec: numbers around zero, integers that are zero (they may be positions).

    The memory under it is filled, so that elements may share their place, as those of an expanded tensor do.
    """
    found = []
    for spec in specs:
        memory = torch.zeros(int(spec.extent), dtype=spec.dtype, device=spec.device)
        filled = memory.normal_() if spec.dtype.is_floating_point else memory
        found.append(filled.as_strided(numbers(spec.shape), numbers(spec.stride)))
    return found


def time_calls(
    calls: Sequence[Callable[..., Any]],
    inputs: Sequence[torch.Tensor],
    device: torch.device,
    rounds: int = ROUNDS,
) -> list[float]:
    """Median milliseconds of each call on the same inputs, in turns. One whose results are not the first
    one's is out.
    """
    with timed("autotune"), torch.cuda.device(device), torch.no_grad():
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        other = torch.ones(
            5 * cache, dtype=torch.int8, device=device
        )  # read before each call: as in a model, data is not in it
        wanted = _results(calls[0], inputs)
        alive = [
            wanted is not None,
            *(wanted is not None and _agrees(_results(c, inputs), wanted) for c in calls[1:]),
        ]
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(rounds):
            for call, runs, found in zip(calls, alive, times, strict=True):
                if runs:
                    found.append(_once(call, inputs, other))
    return [statistics.median(found) if found else float("inf") for found in times]


def _results(call: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """The first call's results and written inputs. It builds and loads: a tile may ask for more than
    there is.
    """
    try:
        given = [duplicate(t) for t in inputs]
        found = [*call(*given), *given]
        torch.cuda.synchronize()
        return found
    except (DynamotorError, RuntimeError):
        return None


def _agrees(found: list[torch.Tensor] | None, wanted: list[torch.Tensor]) -> bool:
    """Whether these are the same numbers but for rounding, which a comparison in the epilogue makes large
    here and there.
    """
    return found is not None and all(bool(_off(a, b) <= _FEW) for a, b in zip(found, wanted, strict=True))


def _off(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The share of elements of `a` that are not near those of `b`, where these are numbers."""
    a, b = a.float(), b.float()
    known = b.isfinite()
    size = torch.where(known, b, 0).abs()
    near = (a - b).abs() <= 0.25 * size + 0.05 * size.mean()
    return (known & ~near).float().mean()


def _once(call: Callable[..., Any], inputs: Sequence[torch.Tensor], other: torch.Tensor) -> float:
    other.amax()
    compat.gpu_sleep(_PAUSE)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call(*inputs)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
