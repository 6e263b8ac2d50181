"""A function that the program hands to a transform or to control flow: interpreted once on fresh examples, its
nodes moved into a graph of its own.

>>> body, free = interpret(trace, fn, (example,), {})
>>> body.gm          # takes the example's tensors, then those of `free`
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..graph.modes import preserved_modes
from ..graph.module import graph_module
from ..graph.shape_tensor import ShapeTensor
from ..graph.spec import TensorSpec
from ..graph.subgraphs import Body, Leaf
from .breaks import Unsupported, unsupported
from .values.base import Raised, Trace, Value
from .values.containers import DictValue, ListValue, TupleValue
from .values.context import ModeEffect
from .values.tensor import TensorValue


def template_of(value: Value, leaves: list[TensorValue]) -> Any:
    """A value as a template; its tensors are appended to `leaves`."""
    if type(value) is TensorValue:
        leaves.append(value)
        return Leaf(len(leaves) - 1)
    if type(value) is TupleValue or type(value) is ListValue:
        return value.kind([template_of(item, leaves) for item in value.items])
    if type(value) is DictValue and value.kind is dict:
        return {key.as_constant(): template_of(item, leaves) for key, item in value.load().values()}
    if value.is_constant():
        return value.as_constant()
    raise unsupported("transform", f"a function transform meets {value.describe()}")


def value_of(trace: Trace, template: Any, leaves: Sequence[Value]) -> Value:
    """The value of a template, in new containers."""
    kind = type(template)
    if kind is Leaf:
        return leaves[template.index]
    if kind is tuple:
        return TupleValue([value_of(trace, item, leaves) for item in template])
    if kind is list:
        return ListValue([value_of(trace, item, leaves) for item in template])
    if kind is dict:
        return DictValue([(key, trace.make(key), value_of(trace, v, leaves)) for key, v in template.items()])
    return trace.make(template)


def interpret(
    trace: Trace,
    fn: Value,
    arguments: tuple[Any, Any],
    examples: Sequence[torch.Tensor],
    *,
    name: str,
    now: bool = False,
) -> tuple[Body, list[TensorValue]]:
    """A function's body, and the values that it reads from outside. arguments: template of its positional and
    named ones; examples: what their tensors look like; now: eager calls it here, once. Raises Unsupported for
    effects, which `now` may have on objects that the trace has changed before or made."""
    ModeEffect.of(trace)  # so that the body's `no_grad` is no effect that is new
    region = _Region(trace, name)
    region.now = now
    stand_ins = [region.stand_in(example) for example in examples]
    region.begin()
    args, kwargs = arguments
    in_body, trace.sizes.in_body = trace.sizes.in_body, True
    with preserved_modes():
        try:
            result = trace.call(
                fn,
                [value_of(trace, arg, stand_ins) for arg in args],
                {key: value_of(trace, arg, stand_ins) for key, arg in kwargs.items()},
            )
        except Raised as raised:
            raise unsupported(
                "transform", f"a function given to {name} raises {raised.value.describe()}"
            ) from None
        finally:
            trace.sizes.in_body = in_body
    outputs: list[TensorValue] = []
    template = template_of(result, outputs)
    return region.cut_out([value.node for value in stand_ins], outputs, template)


def _stand_in(index: int) -> None:
    raise AssertionError("the argument of a body stands in its own graph")


class Rehearsal:
    """A part of a trace that may have no effects; `refused` makes the error that says so. now: eager runs it
    here and once, as the trace does.
    """

    now = False

    def __init__(self, trace: Trace, refused: Callable[[str], Unsupported]) -> None:
        self.trace, self.refused = trace, refused
        self.known = set(trace.graph.graph.nodes)
        self.n_calls = trace.graph.n_calls

    def begin(self) -> None:
        """From here on nothing may be changed."""
        trace = self.trace
        effects = trace.effects
        self.n_touches = len(effects.touches)
        self.touched = {v: dict(v.table) if isinstance(v, DictValue) else {} for v in effects.touched}
        self.n_effects, self.begun = len(effects.calls), effects.begin()
        self.versions, self.failed = versions(trace), trace.checks.failed

    def check(self) -> None:
        """Refuse effects."""
        trace = self.trace
        effects = trace.effects
        changed = [v for v in effects.touches[self.n_touches :] if not self._may_change(v)]
        older = effects.changed_older(self.begun) and not self.now
        if changed or older or len(effects.calls) != self.n_effects:
            raise self.refused("it has side effects")
        if trace.checks.failed is not self.failed:
            raise self.refused("it raises where data says so")
        if any(value.example._version != version for value, version in self.versions):
            raise self.refused("it writes a tensor of outside in place")

    def _may_change(self, value: Value) -> bool:
        known = self.touched.get(value)
        if self.now and known is not None:
            return True
        return _is_back(value, known or {}) or isinstance(value, ModeEffect) and known is not None

    def forget(self) -> None:
        """Take its nodes out of the graph."""
        outer = self.trace.graph
        for node in reversed([n for n in outer.graph.nodes if n not in self.known and n.op != "placeholder"]):
            outer.graph.erase_node(node)
        outer.n_calls = self.n_calls


class _Region(Rehearsal):
    """The part of the outer graph in which a body is interpreted."""

    def __init__(self, trace: Trace, name: str) -> None:
        super().__init__(trace, functools.partial(_refused, name))
        self.values = set(trace.tensors.by_example)

    def stand_in(self, example: torch.Tensor) -> TensorValue:
        spec = example.spec if isinstance(example, ShapeTensor) else TensorSpec.of(example)
        spec = TensorSpec(spec.shape, spec.stride, spec.dtype, spec.device)
        made = ShapeTensor.make(spec, requires_grad=example.requires_grad)
        return TensorValue(self.trace, self.trace.graph.call_function(_stand_in, (0,), {}, spec), made)

    def cut_out(
        self, arguments: list[fx.Node], outputs: list[TensorValue], template: Any
    ) -> tuple[Body, list[TensorValue]]:
        """Move the new nodes; operands from the others are further inputs."""
        trace, outer = self.trace, self.trace.graph
        self.check()
        moved = [node for node in outer.graph.nodes if node not in self.known and node.op != "placeholder"]
        inside, ends = set(moved), [value.node for value in outputs]
        free = dict.fromkeys(n for node in moved for n in node.all_input_nodes if n not in inside)
        free |= dict.fromkeys(node for node in ends if node not in inside)
        by_node = {v._node: v for v in trace.tensors.by_example.values() if v._node in free}
        if len(by_node) != len(free):
            raise self.refused("it reads a size that changes from call to call")
        graph = fx.Graph()
        new = {node: _placeholder(graph, f"a{i}", node) for i, node in enumerate([*arguments, *free])}
        for node in moved:
            if node not in new:
                new[node] = graph.node_copy(node, new.__getitem__)
        graph.output(tuple([new[node] for node in ends])).meta["val"] = tuple(n.meta["val"] for n in ends)
        self.forget()
        for key, value in trace.tensors.by_example.items():
            if key not in self.values and value.source is None:
                value._node = None  # it may not be read outside
        return Body(graph_module(graph, "Body"), len(free), template), [by_node[node] for node in free]


def _refused(name: str, cause: str) -> Unsupported:
    return unsupported(
        "transform", f"a function is given to {name}", cause, "keep the function free of effects"
    )


def _is_back(value: Value, before: Mapping[Any, Any]) -> bool:
    """Whether a dict from outside holds what it held (`functional_call` puts parameters in and out): what it
    held `before` in the trace, or else for real.
    """
    return isinstance(value, DictValue) and all(
        key in value.table
        and (
            value.table[key][1] is before[key][1]
            if key in before
            else key in value.obj and value.table[key][1].real() is value.obj[key]
        )
        for key in value.changed
    )


def _placeholder(graph: fx.Graph, name: str, like: fx.Node) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = like.meta["val"]
    return node


def versions(trace: Trace) -> list[tuple[TensorValue, Any]]:
    """The tensors of a trace, and how often each was written."""
    return [
        (v, v.example._version) for v in trace.tensors.by_example.values() if not v.example.is_inference()
    ]


class _Asked(Exception):
    """Ends a transform when it calls its function: its arguments are the answer."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args_of_call, self.kwargs_of_call, self.grad = args, kwargs, torch.is_grad_enabled()


def called_with(run: Callable[[Callable[..., Any]], Any]) -> _Asked | None:
    """What `run` calls the function with that it is given; None if it does not call it."""

    def function(*args: Any, **kwargs: Any) -> Any:
        raise _Asked(args, kwargs)

    try:
        run(function)
    except _Asked as asked:
        return asked
    return None
