"""The facts of a compiled program that its run-time wrapper needs: plain data, whose program may come from
the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..graph.plain_data import plain
from ..graph.sizes import Symbol
from ..graph.spec import TensorSpec

Step = tuple[
    Callable[..., Any], tuple[Any, ...], dict[str, Any], bool
]  # op or getitem, arguments after the tensor, keywords, grad mode


@plain
@dataclass(frozen=True)
class OutputPlan:
    """How a user output is made: the `index`-th value or input, and view steps replayed on it.

    detach: "" where the output is eager's view of it, "last" where it is a tensor apart that shares its
    memory, "first" where it is a view of such a tensor. kind "constant" holds a plain number or a size in
    `constant`. early: a view of an input that was made before the last write to it.
    """

    kind: str
    index: int = 0
    steps: tuple[Step, ...] = ()
    detach: str = ""
    constant: Any = None
    early: bool = False


@plain
@dataclass(frozen=True)
class Recipe:
    """How a compiled program's values become the user's outputs, and what autograd is told of them.

    n_inputs: of the caller's, before the constants. n_values: the compiled forward's leading results.
    differentiable: of each. mutated: the inputs that are written, and by how many ops. flows: whether a
    gradient flows to each of `gradient_of`. tangents: the layouts in which gradients of values arrive.
    inner: for each user output that others are computed from, their tangents (bits). versions: the
    results that in-place ops made, and how many ops. For second derivatives (`double_backward.py`): the
    written inputs whose `old` contents gradients need, the devices of whose generators it `draws`, and
    whether the graph can run but `once`. parts: the tangents (bits) of which eager takes those of a group in
    one backward only, since it frees the tensors that were saved for them; other tangents may come again.
    results: the values that are results of operators which a second derivative does not call again.
    contents: a saved result's place in the forward -> the input that holds the same values after the call,
    and is saved instead. reshaped: inputs of which views alone were changed in place, in shape, and how
    often: eager counts that as writes.
    """

    n_inputs: int
    constants: tuple[torch.Tensor, ...]
    symbols: dict[int, Symbol]  # the inputs that are sizes (plain ints at a call)
    plans: tuple[OutputPlan, ...]
    n_values: int
    differentiable: tuple[bool, ...]
    mutated: dict[int, int]
    gradient_of: tuple[int, ...] = ()
    flows: tuple[bool, ...] = ()
    tangents: tuple[TensorSpec, ...] = ()
    inner: dict[int, int] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    old: tuple[int, ...] = ()
    draws: tuple[torch.device, ...] = ()
    once: bool = False
    parts: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    contents: dict[int, int] = field(default_factory=dict)
    reshaped: dict[int, int] = field(default_factory=dict)

    @property
    def frees(self) -> bool:
        """Whether eager's backward frees something, and so does not run twice."""
        return bool(self.parts)
