"""The torch graph under construction: placeholders for outside tensors, one node per torch call (contract 2).

>>> node = builder.call_function(torch.add, (a.node, 1), {})
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..base import compat
from ..base.errors import UserLine
from ..graph.module import graph_module
from ..graph.save_policy import SavePolicy
from ..graph.sizes import Size
from .source import Source


class GraphBuilder:
    """Builds the `fx.Graph` of a trace; `inputs[i]` is the source of placeholder i, and `examples[i]` its
    real tensor or, of a symbol's placeholder, its value."""

    def __init__(self, where: Callable[[], UserLine | None]) -> None:
        self.graph = fx.Graph()
        self.inputs: list[Source] = []
        self.examples: list[torch.Tensor | int] = []
        self.static: set[int] = set()
        self.n_calls = 0
        # Whether calls belong to a checkpoint: the backward runs them again, and saves nothing of them but for the
        # results that a policy wants.
        self.recompute: bool | SavePolicy = False
        self.live: tuple[str, str] | None = (
            None  # why PyTorch makes the calls that follow each time (an error's code)
        )
        self.once = (
            False  # second derivatives take the results of the calls that follow, and do not repeat them
        )
        self.gathers = False  # numbers in tensors index other tensors without being read (`flex_attention`)
        self.snapshots: list[fx.Node] = []  # copies of numbers that may be handed on
        self.modules: tuple[tuple[str, type], ...] = ()  # whose `forward` runs, outermost first: path, class
        self._where = where
        self._last_input: fx.Node | None = None
        self._names: dict[str, int] = {}

    def input(
        self, source: Source, example: torch.Tensor | int, val: Any, *, static: bool, name: str = "arg"
    ) -> fx.Node:
        """A new placeholder for an outside tensor, or for the value of a symbol; `static` marks parameters,
        buffers and other held tensors."""
        graph = self.graph
        anchor = self._last_input
        with (
            graph.inserting_after(anchor)
            if anchor is not None
            else graph.inserting_before(next(iter(graph.nodes), None))
        ):
            node = graph.placeholder(self._unique(name))
        node.target = node.name  # made unique
        self._last_input = node
        node.meta["val"] = val
        if static:
            self.static.add(len(self.inputs))
        self.inputs.append(source)
        self.examples.append(example)
        return node

    def _unique(self, name: str) -> str:
        """A placeholder's name is also its parameter's name in the generated code, whose first one is
        `self`.
        """
        name = "self_" if name == "self" else name
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return self._unique(f"{name}_{count}") if count else name

    def call_function(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], val: Any = None
    ) -> fx.Node:
        """A call of a public torch or operator function; tensor arguments are nodes. Set `meta["val"]` here
        or afterwards.
        """
        if target is operator.pow and not isinstance(args[0], fx.Node):
            target = torch.pow  # torch.fx writes `-3 ** x`, which is another number
        return self._call("call_function", target, args, kwargs, val)

    def call_method(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any = None
    ) -> fx.Node:
        """A call of a tensor method; `args[0]` is the tensor's node."""
        return self._call("call_method", name, args, kwargs, val)

    def _call(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any) -> fx.Node:
        node = self.graph.create_node(op, target)  # which looks at each argument, to warn
        node.args, node.kwargs = args, kwargs
        self.n_calls += 1
        node.meta["val"] = val
        node.meta["where"] = self._where()
        node.meta["modules"] = self.modules
        if self.recompute:
            node.meta["recompute"] = self.recompute
        if self.live:
            node.meta["live"] = self.live
        if self.once and not self.recompute:
            node.meta["once"] = True
        return node

    def _forget_idle_modes(self) -> None:
        """Take out calls that set a mode and back, with nothing between them."""
        kept: list[fx.Node] = []
        for node in self.graph.nodes:
            last = kept[-1] if kept else None
            if last is not None and last.target is node.target is compat.set_grad_enabled:
                if last.args != node.args:  # it was the other way before: a call is there where it differed
                    kept.pop()
                    self.graph.erase_node(node)
                    self.graph.erase_node(last)
                    self.n_calls -= 2
                    continue
            kept.append(node)

    def module(self, outputs: list[fx.Node]) -> fx.GraphModule | None:
        """The finished graph with a flat tuple of outputs; None where nothing is called."""
        for node in [part for copy in self.snapshots for part in (copy, *copy.all_input_nodes)]:
            if node.target in ("clone", "detach") and not node.users and node not in outputs:
                self.graph.erase_node(node)
        self._forget_idle_modes()
        if not self.n_calls:
            return None
        node = self.graph.output(tuple(outputs))
        node.meta["val"] = tuple(o.meta["val"] for o in outputs)
        gm = graph_module(self.graph, "Captured")
        gm.meta["static_inputs"] = frozenset(self.static)
        env = next((e.meta["val"].env for e in self.graph.nodes if type(e.meta.get("val")) is Size), None)
        if env is not None:
            gm.meta["shape_env"] = env
        return gm
