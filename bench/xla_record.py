"""What recording one op on the xla device costs: `python -m bench.xla_record`.

Microseconds an op, from the call to the returned tensor, without running anything: the best of 15 rounds of
1,000 calls, and the median.
"""

from __future__ import annotations

import statistics
import time

import torch

from dynamotor import xla

OPS = {
    "add": lambda x, y: x + y,
    "mm": lambda x, y: x.mm(y),
    "relu": lambda x, y: x.relu(),
    "sum": lambda x, y: x.sum(0),
    "view": lambda x, y: x.view(-1),
}


def measure(name: str, rounds: int = 15, calls: int = 1000) -> tuple[float, float]:
    """(best, median) microseconds of one op on 64x64 float32 tensors, gradients off."""
    x, y, op = torch.randn(64, 64, device="xla"), torch.randn(64, 64, device="xla"), OPS[name]
    xla.sync()
    times = []
    with torch.no_grad():
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(calls):
                op(x, y)
            times.append((time.perf_counter() - start) / calls * 1e6)
            xla.sync()
    return min(times), statistics.median(times)


def main() -> None:
    """Print a line per op."""
    for name in OPS:
        best, median = measure(name)
        print(f"{name:>5}: {best:5.2f} us (median {median:5.2f})")


if __name__ == "__main__":
    main()
