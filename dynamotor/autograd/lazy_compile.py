"""Graphs that are compiled when their program has run before: a backward, at its first call.

The guards of the entry are made by then, so what compiling it assumes of sizes that differ between calls is
checked at each call of it.

>>> compiled = compile_late(backward, "graph0_backward", compile)     # perhaps a `Narrow`
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.config import config
from ..base.errors import EagerWarning, InternalError
from ..base.events import fall_back, warn_once
from ..graph.module import copy_of
from ..graph.size_nodes import is_size
from ..graph.sizes import Guard, Symbol
from ..graph.spec import Compiled


@dataclass(frozen=True)
class Narrow:
    """A backward that was compiled for fewer sizes than its forward: at others it runs op by op, as the
    `graph` says.
    """

    call: Compiled
    guards: Sequence[Guard]
    graph: Callable[[], torch.fx.GraphModule | None]
    name: str

    @functools.cached_property
    def op_by_op(self) -> torch.fx.GraphModule:
        """The graph as it was before anything was assumed."""
        graph = self.graph()
        assert graph is not None  # it was compiled
        return graph

    @functools.cached_property
    def symbols(self) -> list[tuple[int, Symbol]]:
        """The inputs that are sizes."""
        return _symbols(self.op_by_op)

    def __call__(self, *inputs: Any) -> Any:
        values = {symbol: inputs[i] for i, symbol in self.symbols}
        unmet = next((guard for guard in self.guards if not guard.holds(values)), None)
        if unmet is None:
            return self.call(*inputs)
        reason = f"the backward was compiled for sizes with {unmet}"
        fall_back("backward.sizes", what="call", name=self.name, reason=reason, code="sizes")
        what = f"{self.name}: {reason}; at others it runs op by op"
        warn_once(f"backward-{self.name}-{unmet}", what, EagerWarning)
        return self.op_by_op(*inputs)


def _symbols(graph: torch.fx.GraphModule) -> list[tuple[int, Symbol]]:
    return [
        (i, *node.meta["val"].symbols)
        for i, node in enumerate(graph.graph.nodes)
        if node.op == "placeholder" and is_size(node)
    ]


def compile_late(
    graph: torch.fx.GraphModule,
    name: str,
    compile: Callable[[torch.fx.GraphModule], Compiled],
    refused: Callable[[Exception], None],
) -> Compiled:
    """Compile a graph of this name, which `compile` rewrites in place. Where symbols stop it, it runs op by
    op, and `refused` is told why: its forward has run, there is no going back to a program with numbers.
    """
    symbols = _symbols(graph)
    if not symbols:
        return compile(graph)
    env, as_it_is = symbols[0][1].env, copy_of(graph)
    before = len(env.guards)
    try:
        with env.reopened():
            compiled = compile(graph)
            own = env.guards[before:]
    except InternalError as error:
        if config.verify or config.strict:
            raise
        refused(error)
        return as_it_is.forward
    return Narrow(compiled, own, lambda: as_it_is, name) if own else compiled
