"""What a compiler of aten graphs is told beside the graph itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """Facts about one aten graph.

    kind: which half of the program it is. static_inputs: placeholder indices that hold the same tensor object
    (a parameter or buffer) at each call, so that work on them may be done once and checked by `(data_ptr,
    _version)`. n_outputs: for a forward graph, how many leading outputs are the user's; the rest are saved
    for the backward.
    """

    kind: Literal["inference", "forward", "backward"]
    name: str
    static_inputs: frozenset[int] = frozenset()
    n_outputs: int = 0
