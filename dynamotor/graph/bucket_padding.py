"""Graphs with symbols for compilers of fixed sizes (XLA): one executable for all sizes of a bucket
(`options={"pad": ...}`).

XLA compiles for fixed sizes. A graph whose sizes differ between calls is written at the sizes of a bucket,
larger than a call's: inputs are padded, results cut. An op's results from padding stay in the padding, or
the padding is masked before it (a sum takes zeros there, a maximum minus infinity, attention no keys). An op
for which no rule here says so refuses the graph, which is compiled for each size then ("fallback" xla.pad,
DM679, with the op).

>>> Padder(gm, {batch: 16, length: 32}, True, device).write().gm
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx

from ..base import compat
from ..base.errors import RaisedWhen
from ..base.narrowing import checked
from .module import graph_module, writes
from .nodes import overload
from .op_definition import definition
from .shapes import call
from .size_nodes import is_size
from .sizes import Dim, Size, Symbol, equal, settled
from .spec import TensorSpec, aten, contiguous_stride

Values = Mapping[Symbol, int]
# Answer of a padding rule: the new node (or a tuple of them) and the axes of its results.
Padded = tuple[fx.Node | tuple[fx.Node | None, ...], Any]
POINTWISE = "pointwise"  # the definition whose padding rule all pointwise ops share


class CannotPad(RaisedWhen):
    """An op for which nothing says that padding does no harm."""


@final
@dataclass(frozen=True, eq=False)
class Run:
    """A size that is padded: as many elements are meant, from the first on."""

    size: Size

    def __eq__(self, other: object) -> bool:
        return type(other) is Run and self.size.same(other.size)

    def __hash__(self) -> int:
        return hash(self.size)


def settle(size: Dim) -> Dim:
    return settled(size) if type(size) is Size else size


# A dimension, as the sizes that it was merged from, outermost first; () is one of size 1.
Axis = tuple[int | Run, ...]
Axes = tuple[Axis, ...]


def axis_of(size: Dim) -> Axis:
    """The axis of a dimension of which only the size is known: a product in the order of its symbols."""
    size = settle(size)
    if type(size) is not Size:
        return (size,) if size != 1 else ()
    ((monomial, c),) = size.terms.items() if len(size.terms) == 1 else [((), 0)]
    if (
        not monomial
        or not all(type(atom) is Symbol for atom in monomial)
        or len(set(monomial)) < len(monomial)
    ):
        return (Run(size),)
    runs = [Run(Size({(atom,): 1}, size.env)) for atom in sorted(monomial, key=lambda atom: atom.order)]
    return (*runs, *([c] if c != 1 else []))


def size_of(axis: Axis) -> Dim:
    """The number of elements that are meant."""
    return math.prod([f.size if type(f) is Run else f for f in axis])


def row_of(size: Dim) -> Axis:
    """The axis of consecutive elements, with all padding at the end."""
    axis = axis_of(size)
    return axis if at_end(axis) else (Run(checked(Size, settle(size))),)


def at_end(axis: Axis) -> bool:
    """Whether all padding along an axis is behind the elements."""
    return all(type(f) is int for f in axis[1:])


def is_padded(*axes: Axis) -> bool:
    """Whether there is padding along one of the axes."""
    return any(type(f) is Run for axis in axes for f in axis)


def _merged(factors: Iterable[int | Run]) -> Axis:
    found: list[int | Run] = []
    for f in factors:
        if type(f) is int and found and type(found[-1]) is int:
            found[-1] *= f
        elif f != 1:
            found.append(f)
    return tuple(found)


def _content(size: Dim) -> int:
    return math.gcd(*size.terms.values()) if type(size) is Size else size


def regrouped(axes: Axes, shape: Sequence[Dim]) -> Axes:
    """The axes of a tensor's elements in another shape. CannotPad where a dimension begins inside a padded
    one.
    """
    rest = [f for axis in axes for f in axis][::-1]
    found: list[Axis] = []
    for wanted in map(settle, shape):
        own: list[int | Run] = []
        so_far: Dim = 1
        while not equal(settle(so_far), wanted):
            CannotPad.when(not rest, "a view that cuts a padded dimension")
            f = rest.pop()
            if type(f) is int:
                need = _content(wanted) // _content(so_far)
                if need and f % need == 0 and f != need and need > 1:
                    rest.append(f // need)
                    f = need
                elif not need or need % f:
                    raise CannotPad("a view that cuts a padded dimension")
            own.append(f)
            so_far = so_far * (f.size if isinstance(f, Run) else f)
        found.append(_merged(own))
    CannotPad.when(rest, "a view that cuts a padded dimension")
    return tuple(found)


@dataclass(frozen=True)
class Written:
    """A graph at the sizes of a bucket. given: of each tensor among the inputs, its position and axes;
    outputs: of each result its axes and strides, or the size that it is; None where it is neither. needed:
    sizes whose values at the call are the last input, None where nothing asks.
    """

    gm: fx.GraphModule
    given: tuple[tuple[int, Axes], ...]
    outputs: tuple[tuple[Axes, tuple[Dim, ...]] | Size | None, ...]
    needed: tuple[Size, ...]


class Padder:
    """Writes the graph at sizes `of`; with `padded`, these are a bucket's and what must not see padding is
    masked."""

    def __init__(self, gm: fx.GraphModule, of: Values, padded: bool, device: torch.device) -> None:
        self.gm, self.of, self.padded, self.device = gm, of, padded, device
        self.graph = fx.Graph()
        self.made: dict[fx.Node, Any] = {}  # the new nodes, or numbers in the place of sizes
        self.axes: dict[fx.Node, Any] = {}  # of new nodes: axes, or a tuple of such
        self.needed: dict[Run, int] = {}
        self._sizes: fx.Node | None = None
        self._valid: dict[Axis, fx.Node] = {}
        self._actual: dict[Run, fx.Node] = {}

    def write(self) -> Written:
        """The graph."""
        nodes = list(self.gm.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        given = []
        for n, node in enumerate(placeholders):
            if is_size(node):
                self.made[node] = node.meta["val"].value(self.of)
                continue
            val = node.meta.get("val")
            new = self.made[node] = self.graph.placeholder(node.name)
            new.meta["val"] = self.number(val)
            axes = self.axes_of(val) if isinstance(val, TensorSpec) else ()
            if is_padded(*axes):
                shape = new.meta["val"].shape
                new.meta["val"] = TensorSpec(shape, contiguous_stride(shape), val.dtype, val.device, 0)
            self.axes[new] = axes
            given.append((n, axes))
        self._sizes = self.graph.placeholder("sizes")
        results: list[Any] = []
        for node in nodes[len(placeholders) :]:
            if node.op == "output":
                results = list(node.args[0])
            elif is_size(node) or type(node.meta.get("val")) is int and node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.made.__getitem__)
                self.made[node] = node.target(*args, **kwargs)
            else:
                self._node(node)
        outputs = tuple([self._output(a) for a in results])
        last = self.graph.output(tuple([self.made[a] if isinstance(a, fx.Node) else a for a in results]))
        last.meta["val"] = tuple([a.meta.get("val") if isinstance(a, fx.Node) else a for a in last.args[0]])
        needed = tuple([run.size for run in self.needed])
        if needed:
            self._sizes.meta["val"] = TensorSpec((len(needed),), (1,), torch.int64, torch.device("cpu"), 0)
        else:
            self.graph.erase_node(self._sizes)
        return Written(graph_module(self.graph, "Padded", self.gm), tuple(given), outputs, needed)

    def _output(self, a: Any) -> tuple[Axes, tuple[Dim, ...]] | Size | None:
        val = a.meta.get("val") if isinstance(a, fx.Node) else None
        if isinstance(val, TensorSpec):
            return self.axes[self.made[a]], val.stride
        return val if type(val) is Size else None

    def number(self, val: Any) -> Any:
        """A spec, or several, at the sizes that are written."""
        if isinstance(val, TensorSpec):
            shape, stride, offset = (
                tuple([self.value(n) for n in some]) for some in (val.shape, val.stride, (val.offset,))
            )
            return TensorSpec(shape, stride, val.dtype, val.device, offset[0])
        return type(val)(map(self.number, val)) if isinstance(val, tuple | list) else self.value(val)

    def value(self, size: Any) -> Any:
        """A size as a number."""
        return size.value(self.of) if type(size) is Size else size

    def axes_of(self, val: Any) -> Axes:
        """The axes of a spec of which only the sizes are known."""
        return tuple([axis_of(n) if self.padded else (self.value(n),) for n in val.shape])

    # Nodes --------------------------------------------------------------------------------------------------
    def _node(self, node: fx.Node) -> None:
        val = node.meta.get("val")
        inputs = [self.made[a] for a in node.all_input_nodes]
        touched = self.padded and (
            _holds_size(val)
            or any(type(a) is int or type(a) is tuple for a in inputs)
            or any(_any_run(self.axes[a]) for a in inputs if isinstance(a, fx.Node))
        )
        if not touched:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.made.__getitem__)
            new = self.graph.create_node(node.op, node.target, args, kwargs)
            new.meta = {**node.meta, "val": self.number(val)}
            self.made[node] = new
            self.axes[new] = self._plain_axes(val)
            return
        rule = definition(node.target).padding if node.op == "call_function" else None
        if rule is None and isinstance(node.target, compat.OpOverload) and _is_pointwise(node.target):
            rule = definition(POINTWISE).padding
        if rule is None:
            raise CannotPad("the graph writes its inputs" if writes(node) else str(node.target))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: self.made[a])
        symbolic = _symbolic_arguments(node)
        new, axes = rule(Call(self, node, list(args), dict(kwargs), symbolic))
        self._check(val, axes)
        self.made[node], self.axes[new] = new, axes

    def _plain_axes(self, val: Any) -> Any:
        if isinstance(val, TensorSpec):
            return self.axes_of(val)
        return tuple(map(self._plain_axes, val)) if isinstance(val, tuple | list) else ()

    def _check(self, val: Any, axes: Any) -> None:
        """The rule's sizes of the result agree with the graph's."""
        for spec, own in zip(val, axes, strict=True) if isinstance(val, tuple | list) else [(val, axes)]:
            if not isinstance(spec, TensorSpec):
                continue
            if len(own) != len(spec.shape) or not all(
                equal(settle(size_of(a)), settle(n)) for a, n in zip(own, spec.shape, strict=True)
            ):
                raise CannotPad(
                    f"a result of {spec.shape}, and {[str(size_of(a)) for a in own]} was worked out"
                )

    def op(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node that the graph did not have."""
        return call(self.graph, target, *args, **kwargs)

    def compared(self, how: str, a: fx.Node, b: fx.Node | int) -> fx.Node:
        """`a < b` and its like ("lt", ...)."""
        return self.op(getattr(getattr(aten, how), "Tensor" if isinstance(b, fx.Node) else "Scalar"), a, b)

    def places(self, n: int) -> fx.Node:
        """The numbers 0 .. n - 1."""
        return self.op(aten.arange.default, n, device=self.device, dtype=torch.int64)

    def moved(self, x: fx.Node, d: int, places: fx.Node) -> fx.Node:
        """The elements at these places along a dimension; positions beyond it are padding, any element will
        do.
        """
        last = x.meta["val"].shape[d] - 1
        return self.op(aten.index_select.default, x, d, self.op(aten.clamp.default, places, 0, last))

    def actual(self, run: Run) -> fx.Node:
        """A size as it is at the call: a tensor without dimensions."""
        if run not in self._actual:
            place = self.needed.setdefault(run, len(self.needed))
            spec = TensorSpec((), (), torch.int64, self.device)
            self._actual[run] = self.op(aten.select.int, self._sizes, 0, place, spec=spec)
        return self._actual[run]

    def count(self, axes: Iterable[Axis]) -> fx.Node | int:
        """The number of elements along axes, as it is at the call."""
        total: fx.Node | int = 1
        for f in (f for axis in axes for f in axis):
            part = self.actual(f) if isinstance(f, Run) else f
            if isinstance(total, int) and isinstance(part, int):
                total *= part
            elif isinstance(total, int) and total == 1:
                total = part
            else:
                first, second = (total, part) if isinstance(total, fx.Node) else (part, total)
                total = self.op(aten.mul.Tensor, first, second)
        return total

    def divisor(self, axes: Iterable[Axis], dtype: torch.dtype) -> fx.Node:
        """The number of elements along axes of which some are padded, in the type of the dividend."""
        return self.op(aten._to_copy.default, self.count(axes), dtype=dtype)

    def valid(self, axis: Axis) -> fx.Node:
        """Which elements along an axis are meant."""
        if axis in self._valid:
            return self._valid[axis]
        sizes = [self.value(f.size) if isinstance(f, Run) else f for f in axis]
        places = self.places(math.prod(sizes))
        found: fx.Node | None = None
        for k, f in enumerate(axis):
            if type(f) is Run:
                step, at = math.prod(sizes[k + 1 :]), places
                if step > 1:
                    at = self.op(aten.div.Tensor_mode, at, step, rounding_mode="floor")
                if k:
                    at = self.op(aten.remainder.Scalar, at, sizes[k])
                within = self.compared("lt", at, self.actual(f))
                found = within if found is None else self.op(aten.logical_and.default, found, within)
        assert found is not None
        self._valid[axis] = found
        return found

    def masked(self, x: fx.Node, axes: Axes, dims: Iterable[int], fill: Any) -> fx.Node:
        """The tensor with `fill` in the place of the padding along some dimensions."""
        for d in dims:
            if is_padded(axes[d]):
                mask = self.along(self.valid(axes[d]), d, len(axes))
                x = self.op(aten.where.self, mask, x, self.full([], fill, x.meta["val"].dtype))
        return x

    def full(self, shape: list[int], fill: Any, dtype: torch.dtype) -> fx.Node:
        """A tensor of one number."""
        return self.op(aten.full.default, shape, fill, dtype=dtype, device=self.device)

    def along(self, found: fx.Node, d: int, rank: int) -> fx.Node:
        """A row of numbers or flags as a tensor that is expanded along all other dimensions."""
        return self.op(aten.view.default, found, [1] * d + [-1] + [1] * (rank - 1 - d))


def _any_run(axes: Any) -> bool:
    """Whether there is padding in a tensor, or in one of several."""
    return any(map(_any_run, axes)) if isinstance(axes, tuple) else type(axes) is Run


def _holds_size(val: Any) -> bool:
    if isinstance(val, TensorSpec):
        return any(type(settle(n)) is Size for n in val.shape)
    return isinstance(val, tuple | list) and any(map(_holds_size, val))


def _symbolic_arguments(node: fx.Node) -> frozenset[int]:
    """Positions of arguments that are sizes."""
    return frozenset(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and is_size(a))


def _is_pointwise(target: compat.OpOverload) -> bool:
    return (
        torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
    )


# Rules ------------------------------------------------------------------------------------------------------
@dataclass
class Call:
    """A node that meets padding. args, kwargs: new nodes, and sizes as numbers; symbolic: which of the args
    those are."""

    writer: Padder
    node: fx.Node
    args: list[Any]
    kwargs: dict[str, Any]
    symbolic: frozenset[int]

    def axes(self, place: int) -> Axes:
        """Of an argument."""
        return self.writer.axes[self.args[place]]

    def mask(self, place: int, dims: Iterable[int], fill: Any = 0) -> None:
        """Mask an argument."""
        self.args[place] = self.keep(
            self.writer.masked(self.args[place], self.axes(place), dims, fill), self.axes(place)
        )

    def keep(self, node: fx.Node, axes: Axes) -> fx.Node:
        """Note a new node's axes."""
        self.writer.axes[node] = axes
        return node

    def emit(self, axes: Any, target: Any = None) -> tuple[fx.Node, Any]:
        """The node with these arguments."""
        new = self.writer.graph.create_node(
            "call_function", target or self.node.target, tuple(self.args), self.kwargs
        )
        new.meta = {**self.node.meta, "val": self.writer.number(self.node.meta["val"])}
        return new, axes

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by name, and the defaults of the others."""
        schema = overload(self.node)._schema.arguments
        given = {a.name: value for a, value in zip(schema, self.args)}
        return {a.name: a.default_value for a in schema} | given | self.kwargs

    def size(self, name: str) -> Dim | None:
        """An argument that may be a size, as it is at the call: an expression or a number."""
        schema = overload(self.node)._schema.arguments
        given = {a.name: value for a, value in zip(schema, self.node.args)} | self.node.kwargs
        value = given.get(name)
        return settle(value.meta["val"] if isinstance(value, fx.Node) else value)  # type: ignore[arg-type]

    @property
    def shape(self) -> Sequence[Dim]:
        """Of the result."""
        return self.node.meta["val"].shape


def untouched(call: Call, place: int, *dims: int) -> None:
    """Refuse a call whose argument is padded along one of these dimensions."""
    axes = call.axes(place)
    CannotPad.when(is_padded(*[axes[d] for d in dims]), f"{call.node.target} along a padded dimension")


def in_a_row(call: Call, axes: Axes, *dims: int) -> None:
    """Refuse a call along dimensions with padding between elements."""
    CannotPad.when(not all(at_end(axes[d]) for d in dims), f"{call.node.target} along merged dimensions")


def broadcast_axes(all_axes: Sequence[Axes]) -> Axes:
    """The axes of what tensors with these give together."""
    n = max(map(len, all_axes), default=0)
    found: list[Axis] = []
    for d in range(n):
        own = [axes[d - n + len(axes)] for axes in all_axes if d - n + len(axes) >= 0]
        some = [axis for axis in own if axis]
        CannotPad.when(any(axis != some[0] for axis in some), "operands with padding at different places")
        found.append(some[0] if some else ())
    return tuple(found)
