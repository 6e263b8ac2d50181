"""A graph that raised after it may have written its inputs cannot run again: its calls run one by one
on copies of its inputs, to find the line of the program that raises.

>>> raise as_eager_raises(gm, inputs, IndexError("index out of range in self"), False)
IndexError: index 7 is out of bounds for dimension 0 with size 5        # at the user's line
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..base import compat
from ..base.errors import UserLine
from ..graph.error_lines import show_its_line
from ..graph.modes import preserved_modes
from ..graph.private_draws import PrivateDraws

_NOTE = (
    "the compiled call had written its inputs: its changes of objects and inputs before this line may not be done "
    "(dynamotor, DM405)"
)


def acts_outside(node: fx.Node) -> bool:
    """Whether a node is a custom op, communicates, gives a tensor other data, or makes an input a leaf."""
    if node.target is setattr:
        return True
    if node.target == "requires_grad_":
        return any(source.op == "placeholder" for source in node.all_input_nodes)
    custom = isinstance(node.target, compat.OpOverload | compat.OpOverloadPacket)
    return custom and not str(node.target).startswith("aten.")


def sends(node: fx.Node) -> bool:
    """Whether a node gathers parameters from other ranks, which must not be asked twice."""
    return getattr(node.target, "communicates", False)


class _Steps(fx.Interpreter):
    at: UserLine | None = None

    def run_node(self, node: fx.Node) -> Any:
        if acts_outside(node) or sends(node):
            self.at = None
            raise NotImplementedError(f"{node} is not for copies")
        self.at = node.meta.get("where")
        return super().run_node(node)


def _is_the_same(error: Exception, found: Exception) -> bool:
    """Whether eager's error is that of the call: kernels know one kind for positions out of range, aten's ops
    have two.
    """
    position = isinstance(error, IndexError) and "out of bounds" in str(found)
    return isinstance(found, type(error)) or position and isinstance(found, RuntimeError)


def as_eager_raises(
    gm: fx.GraphModule, inputs: Sequence[Any] | None, error: Exception, draws: bool
) -> Exception:
    """The error of the op that raises, with a traceback that ends at the user's line; `error` itself where
    the ops on copies raise nothing of its kind.
    draws: the CPU's random state is that before the graph, whose draws up to the error are made now.
    """
    steps = _Steps(gm, garbage_collect_values=False)
    steps.extra_traceback = False  # the error's text is eager's own
    try:
        with preserved_modes(), contextlib.nullcontext() if draws else PrivateDraws(), torch.no_grad():
            given = [t.detach() if isinstance(t, torch.Tensor) else t for t in inputs or ()]
            steps.run(*copy.deepcopy(given), enable_io_processing=False)
    except Exception as found:  # a copy may fail where the call did not: its error is not the program's
        if steps.at is not None and _is_the_same(error, found):
            error = found.with_traceback(steps.at.traceback())
            error.__context__ = None
    show_its_line(error, gm, inputs or ())
    error.add_note(_NOTE)
    return error
