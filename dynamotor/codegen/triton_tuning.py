"""The numbers that decide how kernels run on a GPU, measured on H100 and H200: one frozen argument of the
planner.

>>> plan_kernel(kernel, new_buffer, GpuTuning(programs=2))
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuTuning:
    """Sizes of tiles, in elements where nothing else is said, and how many programs share a GPU."""

    programs: int = 264  # two for each multiprocessor
    whole_row: int = 16384  # of a row that is kept in registers
    loop_tile: int = 4096  # of a tile of a loop over a longer row
    long_tile: int = 8192  # and of one that would not fit into registers
    loop_warp: int = 512  # of such a tile for each warp
    # Tiles of such a loop under way at once, by way of shared memory; 0: as the hardware overlaps programs.
    loop_stages: int = 0
    long_row: int = 4096  # from which on a map over many rows takes a program a row
    thread: int = 16  # of each thread in a tile of whole rows that also are summed across
    # Warps that share a row while each thread has few enough elements: two programs a multiprocessor overlap.
    row_warps: int = 8
    # Of the pipeline of a loop over such tiles: with two, loads would not run while the loop computes.
    stages: int = 3
    shared: int = 200_000  # bytes of shared memory of a multiprocessor that they may take
    columns: int = 128  # columns of a tile that is summed across alone
    one_warp: int = 256  # lanes up to which a row without vectors is left to one warp
