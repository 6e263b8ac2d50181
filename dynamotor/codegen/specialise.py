"""For targets whose code has no symbols yet: a graph at the sizes of the call that is being compiled,
guarded.

>>> info, kept = specialised(gm, info)      # gm takes inputs[kept[0]], inputs[kept[1]], ... from now on
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from ..graph.info import GraphInfo
from ..graph.size_nodes import is_size
from ..graph.sizes import Size, hint
from ..graph.spec import TensorSpec
from ..lower.rewrite import placeholders

Compiled = Callable[..., tuple[Any, ...]]


def specialised(gm: fx.GraphModule, info: GraphInfo) -> tuple[GraphInfo, tuple[int, ...]]:
    """Put plain numbers in the place of all sizes of `gm`; each symbol becomes a guard. Gives the info and
    which inputs stay.
    """
    env = gm.meta.pop("shape_env")
    for node in gm.graph.nodes:
        if is_size(node):
            for symbol in node.meta["val"].symbols:
                int(Size({(symbol,): 1}, env))
    inputs = placeholders(gm.graph)
    kept = tuple(i for i, node in enumerate(inputs) if not is_size(node))
    sizes = {node: hint(node.meta["val"]) for node in gm.graph.nodes if is_size(node)}
    for node in gm.graph.nodes:
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: sizes.get(n, n))
        node.meta = {**node.meta, "val": _plain(node.meta.get("val"))}
    for node in reversed(sizes):
        gm.graph.erase_node(node)
    gm.recompile()
    static = frozenset(n for n, i in enumerate(kept) if i in info.static_inputs)
    return replace(info, static_inputs=static), kept


def _plain(val: Any) -> Any:
    if isinstance(val, TensorSpec):
        return val.hinted()
    return tuple(map(_plain, val)) if isinstance(val, tuple) else hint(val) if type(val) is Size else val


class Picking:
    """Calls a program with some of the inputs."""

    def __init__(self, call: Compiled, kept: tuple[int, ...]) -> None:
        self.call, self.kept = call, kept

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return self.call(*[inputs[i] for i in self.kept])

    def taking(self, inputs: list[Any]) -> tuple[Any, ...]:
        """A call that empties the list."""
        picked = [inputs[i] for i in self.kept]
        inputs.clear()
        take = getattr(self.call, "taking", None)
        return self.call(*picked) if take is None else take(picked)
