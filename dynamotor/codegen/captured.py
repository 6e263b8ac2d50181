"""The loop compiler's rewrites of a captured graph, before it is differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..graph.attention_masks import simplify_attention
from .attention_proposals import propose, settle
from .block_attention import use_blocks
from .flex_attention import fuse_attention


def rewrite_captured(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Choose the kernels of attention by the formulas of its masks and scores, in place.

    Whatever compiles a captured graph for the loop compiler begins with this: `compile`, `compile_step`,
    packages. inputs: those of the first call.
    """
    proposed = propose(gm)
    use_blocks(gm, simplify_attention(gm, inputs))
    settle(gm, proposed)
    fuse_attention(gm)
