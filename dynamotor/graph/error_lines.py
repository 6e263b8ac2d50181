"""Which line of the program raised, where a graph's own operations would not raise on copies of its inputs:
autograd's errors about views are about histories, which copies lack.

>>> show_its_line(error, gm, inputs); raise     # with a traceback that ends at the user's line
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from traceback import walk_tb
from typing import Any

import torch
from torch import fx

from ..base.errors import DynamotorError, UserLine

_ASSIGNED = re.compile(r"\b(\w+)\s*(?::[^=;]*)?=\s")


def show_its_line(error: Exception, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Let the error's traceback end at a line of the program that `gm` was captured from: the one that it
    has, the line of the node that the graph's generated code stopped at, or of the first one that reads an
    input whose history autograd refuses to give. Coded errors say their line themselves.
    """
    if isinstance(error, DynamotorError):
        return
    lines = {n: n.meta["where"] for n in gm.graph.nodes if isinstance(n.meta.get("where"), UserLine)}
    frames = list(walk_tb(error.__traceback__))
    if frames and (frames[-1][0].f_code.co_filename, frames[-1][1]) in {
        (line.filename, line.lineno) for line in lines.values()
    }:
        return
    at = _by_generated_code(frames, {node.name: line for node, line in lines.items()})
    if at is None:
        placeholders = gm.graph.find_nodes(op="placeholder")
        # Without inputs where a guard holds no longer, for the graph has written its tensor.
        refused = {node for node, t in zip(placeholders, inputs, strict=False) if history_is_refused(t)}
        at = next((line for node, line in lines.items() if refused & {*node.all_input_nodes}), None)
    if at is not None:
        error.__traceback__ = at.traceback()


def _by_generated_code(frames: Sequence[tuple[Any, int]], lines: dict[str, UserLine]) -> UserLine | None:
    for frame, number in reversed(frames):
        if isinstance(frame.f_locals.get("self"), fx.GraphModule):
            text = linecache.getline(frame.f_code.co_filename, number)
            return next((lines[name] for name in _ASSIGNED.findall(text) if name in lines), None)
    return None


def history_is_refused(value: Any) -> bool:
    """Whether it is a view that was made where gradients were off, of a tensor written since."""
    try:
        return isinstance(value, torch.Tensor) and value.is_leaf is None  # never: reading it is the question
    except RuntimeError:
        return True
