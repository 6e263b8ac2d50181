"""Random numbers in loops: `dynamotor::rand`, a pure function of (seed, stream, linear index); graph/prims.py
has the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..graph import prims  # noqa: F401  (defines torch.ops.dynamotor)
from ..graph.sizes import Dim
from ..graph.spec import contiguous_stride
from .index import ZERO, flatten
from .ir import F32, make
from .lowering import LoopBuilder, decline_if, lowering
from .value import LoopValue


@lowering(torch.ops.dynamotor.rand.default)
def _rand(ctx: LoopBuilder, seed: LoopValue, stream: int, size: Sequence[Dim], **_: Any) -> LoopValue:
    """A uniform float32 in [0, 1) for each element, row-major."""
    decline_if(ctx.spec.dtype is not F32, "rand of another dtype")
    strides = contiguous_stride(ctx.spec.shape)
    key = seed.at((ZERO,))
    return ctx.generate(lambda index: make("rand", (key, int(stream), flatten(index, strides)), F32))
