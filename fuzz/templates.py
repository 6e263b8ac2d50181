"""Matrix products of small programs as templates, as a GPU's stored table makes them of large ones."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from unittest import mock

from dynamotor.codegen import gemm_table
from dynamotor.codegen.triton_gemm import Tiling

TILINGS = (
    Tiling(16, 16, 16),
    Tiling(32, 16, 16, group=2),
    Tiling(16, 32, 16, persistent=True),
    Tiling(16, 32, 16, group=2, tma=True, tma_store=True),
    Tiling(32, 16, 16, tma=True, persistent=True),
)


@contextlib.contextmanager
def templates_everywhere() -> Iterator[None]:
    """As if the table named a template for each product; the product's label decides which."""

    def stored(label: str) -> Tiling:
        return TILINGS[zlib.crc32(label.encode()) % len(TILINGS)]

    with (
        mock.patch.object(gemm_table, "knows", lambda gpu: True),
        mock.patch.object(gemm_table, "stored", stored),
        mock.patch.object(gemm_table, "nearest", lambda label: TILINGS[0]),
    ):
        yield
