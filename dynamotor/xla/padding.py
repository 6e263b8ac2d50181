"""Graphs with symbols on the xla device: one executable for all sizes of a bucket (`options={"pad": ...}`).

XLA compiles for fixed sizes. A graph whose sizes differ between calls is written at the sizes of a bucket, larger
than a call's: inputs are padded, results cut. What an op makes of the padding stays in the padding, or the padding
is masked before it (a sum takes zeros there, a maximum minus infinity, attention no keys). An op for which no rule
here says so refuses the graph, which is compiled for each size then ("fallback" xla.pad, DM679, with the op).

>>> call = Bucketed(gm, lambda graph: compile_once(graph, info), pad=16)      # multiples of 16
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..base.events import counters, emit
from ..base.registry import Registry, register_all
from ..graph.module import graph_module
from ..graph.size_nodes import is_size
from ..graph.sizes import Dim, Size, Symbol, settled
from ..graph.spec import TensorSpec, contiguous_stride

TRIED = 3  # buckets of each size, where guards refuse the smallest
aten = torch.ops.aten
Compiled = Callable[..., Any]
Values = Mapping[Symbol, int]


class Refused(Exception):
    """An op for which nothing says that padding does no harm."""


@dataclass(frozen=True, eq=False)
class Run:
    """A size that is padded: as many elements are meant, from the first on."""

    size: Size

    def __eq__(self, other: object) -> bool:
        return type(other) is Run and self.size.same(other.size)

    def __hash__(self) -> int:
        return hash(self.size)


def _settled(size: Dim) -> Dim:
    return settled(size) if type(size) is Size else size


# A dimension, as the sizes that it was merged from, outermost first; () is one of size 1.
Axis = tuple[int | Run, ...]
Axes = tuple[Axis, ...]


def axis_of(size: Dim) -> Axis:
    """The axis of a dimension of which only the size is known: a product in the order of its symbols."""
    size = _settled(size)
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
    return math.prod([f.size if type(f) is Run else f for f in axis])  # type: ignore[misc]


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


def _same(a: Dim, b: Dim) -> bool:
    return a.same(b) if type(a) is Size else type(b) is not Size and a == b


def _content(size: Dim) -> int:
    return math.gcd(*size.terms.values()) if type(size) is Size else size


def regrouped(axes: Axes, shape: Sequence[Dim]) -> Axes:
    """The axes of a tensor's elements in another shape. Refused where a dimension begins within a padded one."""
    rest = [f for axis in axes for f in axis][::-1]
    found: list[Axis] = []
    for wanted in map(_settled, shape):
        own: list[int | Run] = []
        so_far: Dim = 1
        while not _same(_settled(so_far), wanted):
            if not rest:
                raise Refused("a view that cuts a padded dimension")
            f = rest.pop()
            if type(f) is int:
                need = _content(wanted) // _content(so_far)
                if need and f % need == 0 and f != need and need > 1:
                    rest.append(f // need)
                    f = need
                elif not need or need % f:
                    raise Refused("a view that cuts a padded dimension")
            own.append(f)
            so_far = so_far * (f.size if type(f) is Run else f)
        found.append(_merged(own))
    if rest:
        raise Refused("a view that cuts a padded dimension")
    return tuple(found)


@dataclass(frozen=True)
class Written:
    """A graph at the sizes of a bucket. given: of each tensor among the inputs, its position and axes; outputs:
    of each result its axes and strides, or the size that it is; None where it is neither. needed: sizes whose values at the call are
    the last input, None where nothing asks.
    """

    gm: fx.GraphModule
    given: tuple[tuple[int, Axes], ...]
    outputs: tuple[tuple[Axes, tuple[Dim, ...]] | Size | None, ...]
    needed: tuple[Size, ...]


class Writer:
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
        last.meta["val"] = tuple(
            [a.meta.get("val") if isinstance(a, fx.Node) else a for a in last.args[0]]  # type: ignore[union-attr]
        )
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
        if isinstance(val, tuple | list):
            return type(val)(map(self.number, val))
        return self.value(val)

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
            or any(type(a) is int for a in inputs)
            or any(_any_run(self.axes[a]) for a in inputs if isinstance(a, fx.Node))
        )
        if not touched:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.made.__getitem__)
            new = self.graph.create_node(node.op, node.target, args, kwargs)
            new.meta = {**node.meta, "val": self.number(val)}
            self.made[node] = new
            self.axes[new] = self._plain_axes(val)
            return
        rule = rules.get(node.target) if node.op == "call_function" else None
        if rule is None and isinstance(node.target, torch._ops.OpOverload) and _is_pointwise(node.target):
            rule = _pointwise
        if rule is None:
            raise Refused(str(node.target))
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
        """What the rule says of the result's sizes is what the graph says."""
        for spec, own in zip(val, axes, strict=True) if isinstance(val, tuple | list) else [(val, axes)]:
            if not isinstance(spec, TensorSpec):
                continue
            if len(own) != len(spec.shape) or not all(
                _same(_settled(size_of(a)), _settled(n)) for a, n in zip(own, spec.shape, strict=True)
            ):
                raise Refused(
                    f"a result of {spec.shape}, and {[str(size_of(a)) for a in own]} was worked out"
                )

    def emit(
        self, target: Any, *args: Any, dtype: torch.dtype, shape: Sequence[int], **kwargs: Any
    ) -> fx.Node:
        """A node that the graph did not have."""
        node = self.graph.create_node("call_function", target, args, kwargs)
        shape = tuple(shape)
        node.meta["val"] = TensorSpec(shape, contiguous_stride(shape), dtype, self.device, 0)
        return node

    def actual(self, run: Run) -> fx.Node:
        """A size as it is at the call: a tensor without dimensions."""
        if run not in self._actual:
            place = self.needed.setdefault(run, len(self.needed))
            self._actual[run] = self.emit(aten.select.int, self._sizes, 0, place, dtype=torch.int64, shape=())
        return self._actual[run]

    def count(self, axes: Iterable[Axis]) -> fx.Node | int:
        """The number of elements along axes, as it is at the call."""
        total: fx.Node | int = 1
        for f in (f for axis in axes for f in axis):
            part = self.actual(f) if type(f) is Run else f
            if isinstance(total, int) and isinstance(part, int):
                total *= part
            elif isinstance(total, int) and total == 1:
                total = part
            else:
                first, second = (total, part) if isinstance(total, fx.Node) else (part, total)
                total = self.emit(aten.mul.Tensor, first, second, dtype=torch.int64, shape=())
        return total

    def valid(self, axis: Axis) -> fx.Node:
        """Which elements along an axis are meant."""
        if axis in self._valid:
            return self._valid[axis]
        sizes = [self.value(f.size) if type(f) is Run else f for f in axis]
        n = math.prod(sizes)
        places = self.emit(aten.arange.default, n, device=self.device, dtype=torch.int64, shape=(n,))
        found: fx.Node | None = None
        for k, f in enumerate(axis):
            if type(f) is Run:
                step, at = math.prod(sizes[k + 1 :]), places
                if step > 1:
                    at = self.emit(
                        aten.div.Tensor_mode, at, step, rounding_mode="floor", dtype=torch.int64, shape=(n,)
                    )
                if k:
                    at = self.emit(aten.remainder.Scalar, at, sizes[k], dtype=torch.int64, shape=(n,))
                within = self.emit(aten.lt.Tensor, at, self.actual(f), dtype=torch.bool, shape=(n,))
                both = [found, within]
                found = (
                    within
                    if found is None
                    else self.emit(aten.logical_and.default, *both, dtype=torch.bool, shape=(n,))
                )
        assert found is not None
        self._valid[axis] = found
        return found

    def masked(self, x: fx.Node, axes: Axes, dims: Iterable[int], fill: Any) -> fx.Node:
        """The tensor with `fill` in the place of the padding along some dimensions."""
        spec = x.meta["val"]
        for d in dims:
            if is_padded(axes[d]):
                mask, (n,) = self.valid(axes[d]), self.valid(axes[d]).meta["val"].shape
                shape = [1] * d + [n] + [1] * (len(axes) - 1 - d)
                mask = self.emit(aten.view.default, mask, shape, dtype=torch.bool, shape=shape)
                value = self.emit(aten.full.default, [], fill, dtype=spec.dtype, device=self.device, shape=())
                value.kwargs = {"dtype": spec.dtype, "device": self.device}
                x = self.emit(aten.where.self, mask, x, value, dtype=spec.dtype, shape=spec.shape)
        return x


def _any_run(axes: Any) -> bool:
    """Whether there is padding in a tensor, or in one of several."""
    return any(map(_any_run, axes)) if isinstance(axes, tuple) else type(axes) is Run


def _holds_size(val: Any) -> bool:
    if isinstance(val, TensorSpec):
        return any(type(_settled(n)) is Size for n in val.shape)
    return isinstance(val, tuple | list) and any(map(_holds_size, val))


def _symbolic_arguments(node: fx.Node) -> frozenset[int]:
    """Positions of arguments that are sizes."""
    return frozenset(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and is_size(a))


def _is_pointwise(target: torch._ops.OpOverload) -> bool:
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

    writer: Writer
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
    def shape(self) -> Sequence[Dim]:
        """Of the result."""
        return self.node.meta["val"].shape


rules: Registry[Any, Callable[[Call], tuple[fx.Node, Any]]] = Registry("padding")
rule = rules.register


def _dims(dims: Any, n: int) -> list[int]:
    every = range(n) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    return [d % n for d in every] if n else []


def broadcast(all_axes: Sequence[Axes]) -> Axes:
    """The axes of what tensors with these give together."""
    n = max(map(len, all_axes), default=0)
    found: list[Axis] = []
    for d in range(n):
        own = [axes[d - n + len(axes)] for axes in all_axes if d - n + len(axes) >= 0]
        some = [axis for axis in own if axis]
        if any(axis != some[0] for axis in some):
            raise Refused("operands whose padding lies elsewhere")
        found.append(some[0] if some else ())
    return tuple(found)


_OF_TENSORS = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor
    for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")
}


def _pointwise(call: Call) -> tuple[fx.Node, Any]:
    writer, target = call.writer, call.node.target
    tensors = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, fx.Node)]
    axes = broadcast([writer.axes[a] for a in tensors])
    if call.symbolic:
        target = _OF_TENSORS.get(target, target)
        spec = tensors[0].meta["val"] if tensors else None
        if target not in _OF_TENSORS.values() or not spec or not (spec.shape or spec.dtype.is_floating_point):
            raise Refused(f"{target} of a size")
        for place in call.symbolic:
            size = _settled(call.node.args[place].meta["val"])
            if type(size) is Size:
                call.args[place] = writer.actual(Run(size))
    if sum(is_size(a) for a in call.node.all_input_nodes) > len({call.node.args[i] for i in call.symbolic}):
        raise Refused(f"{target} of a size")
    return call.emit(axes, target)


@rule(
    aten.clone.default,
    aten._to_copy.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
)
def _copy(call: Call) -> tuple[fx.Node, Any]:
    return call.emit(call.axes(0))


@rule(operator.getitem)
def _getitem(call: Call) -> tuple[fx.Node, Any]:
    return call.emit(call.axes(0)[call.args[1]])


@rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _view(call: Call) -> tuple[fx.Node, Any]:
    axes = regrouped(call.axes(0), call.shape)
    call.args = [call.args[0], list(call.writer.number(tuple(call.shape)))]
    return call.emit(axes, aten.reshape.default)


@rule(aten.permute.default)
def _permute(call: Call) -> tuple[fx.Node, Any]:
    axes = call.axes(0)
    return call.emit(tuple([axes[d] for d in call.args[1]]))


@rule(aten.transpose.int)
def _transpose(call: Call) -> tuple[fx.Node, Any]:
    axes = list(call.axes(0))
    a, b = call.args[1:3]
    axes[a], axes[b] = axes[b], axes[a]
    return call.emit(tuple(axes))


@rule(aten.t.default)
def _t(call: Call) -> tuple[fx.Node, Any]:
    return call.emit(call.axes(0)[::-1])


@rule(aten.unsqueeze.default)
def _unsqueeze(call: Call) -> tuple[fx.Node, Any]:
    axes, d = list(call.axes(0)), call.args[1]
    axes.insert(d if d >= 0 else d + len(axes) + 1, ())
    return call.emit(tuple(axes))


@rule(aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(call: Call) -> tuple[fx.Node, Any]:
    axes = call.axes(0)
    dims = _dims(call.args[1], len(axes))
    return call.emit(tuple([a for d, a in enumerate(axes) if d not in dims or a]))


@rule(aten.expand.default)
def _expand(call: Call) -> tuple[fx.Node, Any]:
    axes, shape = call.axes(0), call.shape
    new = len(shape) - len(axes)
    found = [axes[d - new] if d >= new and axes[d - new] else axis_of(n) for d, n in enumerate(shape)]
    call.args = [call.args[0], list(call.writer.number(tuple(shape)))]
    return call.emit(tuple(found))


def _untouched(call: Call, place: int, *dims: int) -> None:
    axes = call.axes(place)
    if is_padded(*[axes[d] for d in dims]):
        raise Refused(f"{call.node.target} along a padded dimension")


@rule(aten.slice.Tensor)
def _slice(call: Call) -> tuple[fx.Node, Any]:
    """What begins at a fixed place keeps its padding at the end."""
    axes = list(call.axes(0))
    d, start, step = (
        call.args[i] if len(call.args) > i else call.kwargs.get(name, default)
        for i, name, default in ((1, "dim", 0), (2, "start", None), (4, "step", 1))
    )
    d %= len(axes)
    if is_padded(axes[d]):
        if len(axes[d]) != 1 or step != 1 or (start or 0) < 0 or 2 in call.symbolic:
            raise Refused("a slice that does not begin at a fixed place of a padded dimension")
        size = _settled(call.shape[d])
        axes[d] = (Run(size),) if type(size) is Size else (size,) if size != 1 else ()
    else:
        axes[d] = axis_of(call.shape[d])
    return call.emit(tuple(axes))


@rule(aten.select.int)
def _select(call: Call) -> tuple[fx.Node, Any]:
    """An element from the front lies where it lay; one from the end is taken where the padding begins."""
    axes, (d, place) = list(call.axes(0)), call.args[1:3]
    d %= len(axes)
    axis = axes.pop(d)
    symbolic = 2 in call.symbolic
    if not is_padded(axis) or place >= 0 and len(axis) == 1 and not symbolic:
        if symbolic:
            raise Refused("an element at a place that is a size")
        return call.emit(tuple(axes))
    if len(axis) != 1 or type(axis[0]) is not Run:
        raise Refused("an element of merged dimensions")
    size = _settled(call.node.args[2].meta["val"]) if symbolic else axis[0].size + place
    if type(size) is not Size:
        raise Refused("an element at a place that is a size")
    writer, spec = call.writer, call.args[0].meta["val"]
    at = writer.emit(aten.view.default, writer.actual(Run(size)), [1], dtype=torch.int64, shape=(1,))
    shape = (*spec.shape[:d], 1, *spec.shape[d + 1 :])
    row = writer.emit(aten.index_select.default, call.args[0], d, at, dtype=spec.dtype, shape=shape)
    call.args = [row, d]
    return call.emit(tuple(axes), aten.squeeze.dim)


@rule(aten.select_scatter.default)
def _select_scatter(call: Call) -> tuple[fx.Node, Any]:
    axes, (d, place) = call.axes(0), call.args[2:4]
    d %= len(axes)
    rest = broadcast([axes[:d] + axes[d + 1 :], call.axes(1)])
    found = (*rest[:d], axes[d], *rest[d:])
    symbolic = 3 in call.symbolic
    if not is_padded(axes[d]) or place >= 0 and len(axes[d]) == 1 and not symbolic:
        if symbolic:
            raise Refused("an element at a place that is a size")
        return call.emit(found)
    if len(axes[d]) != 1 or type(axes[d][0]) is not Run or symbolic:
        raise Refused("an element of merged dimensions")
    size = axes[d][0].size + place
    if type(size) is not Size:
        raise Refused("an element at a place that is a size")
    writer, spec = call.writer, call.args[0].meta["val"]
    n, rank = spec.shape[d], len(axes)
    places = writer.emit(aten.arange.default, n, device=writer.device, dtype=torch.int64, shape=(n,))
    here = writer.emit(aten.eq.Tensor, places, writer.actual(Run(size)), dtype=torch.bool, shape=(n,))
    shape = [1] * d + [n] + [1] * (rank - 1 - d)
    here = writer.emit(aten.view.default, here, shape, dtype=torch.bool, shape=shape)
    row = (*spec.shape[:d], 1, *spec.shape[d + 1 :])
    src = writer.emit(aten.unsqueeze.default, call.args[1], d, dtype=spec.dtype, shape=row)
    call.args, call.kwargs = [here, src, call.args[0]], {}
    return call.emit(found, aten.where.self)


@rule(aten.slice_scatter.default)
def _slice_scatter(call: Call) -> tuple[fx.Node, Any]:
    """What is written from a fixed place to the end is written over the padding too."""
    axes, src = call.axes(0), call.axes(1)
    d, start, step = (
        call.args[i] if len(call.args) > i else call.kwargs.get(name, default)
        for i, name, default in ((2, "dim", 0), (3, "start", None), (5, "step", 1))
    )
    d %= len(axes)
    if is_padded(axes[d]):
        whole = _settled(size_of(axes[d]) - (start or 0))
        fixed = len(axes[d]) == 1 and step == 1 and (start or 0) >= 0 and 3 not in call.symbolic
        if not fixed or not _same(whole, _settled(size_of(src[d]))):
            raise Refused("a write that ends before the padding")
    rest = broadcast([axes[:d] + axes[d + 1 :], src[:d] + src[d + 1 :]])
    return call.emit((*rest[:d], axes[d], *rest[d:]))


@rule(aten.cat.default)
def _cat(call: Call) -> tuple[fx.Node, Any]:
    parts = call.args[0]
    d = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    all_axes = [list(call.writer.axes[part]) for part in parts]
    d %= len(all_axes[0])
    if any(is_padded(axes[d]) for axes in all_axes):
        raise Refused("aten.cat along a padded dimension")
    for axes in all_axes:
        axes[d] = ()
    found = list(broadcast([tuple(axes) for axes in all_axes]))
    found[d] = axis_of(call.shape[d])
    return call.emit(tuple(found))


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.chunk.default)
def _split(call: Call) -> tuple[fx.Node, Any]:
    axes = call.axes(0)
    unbind = call.node.target is aten.unbind.int
    place = 1 if unbind else 2
    d = (call.args[place] if len(call.args) > place else call.kwargs.get("dim", 0)) % len(axes)
    _untouched(call, 0, d)
    return call.emit(
        tuple(
            [
                axes[:d] + axes[d + 1 :] if unbind else (*axes[:d], axis_of(spec.shape[d]), *axes[d + 1 :])
                for spec in call.node.meta["val"]
            ]
        )
    )


@rule(
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)
def _filled(call: Call) -> tuple[fx.Node, Any]:
    name = call.node.target._schema.name
    fill = {"aten::full": 1, "aten::full_like": 1, "aten::new_full": 2}.get(name)
    if fill in call.symbolic:
        raise Refused(f"{call.node.target} of a size")
    if name.endswith("_like"):
        return call.emit(call.axes(0))
    return call.emit(tuple(map(axis_of, call.shape)))


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(call: Call) -> tuple[fx.Node, Any]:
    if call.node.target is not aten.arange.default and 0 in call.symbolic or 2 in call.symbolic:
        raise Refused("a range that begins at a size")
    size = _settled(call.shape[0])
    return call.emit(((Run(size),) if type(size) is Size else axis_of(size),))


# Products
def _contract(call: Call, a: int, b: int, batch: int) -> Axes:
    """Axes of the product of two arguments; what both are summed over is masked."""
    left, right = call.axes(a), call.axes(b)
    if left[-1] != right[-2]:
        raise Refused("a product whose padding lies elsewhere")
    outer = broadcast([left[:batch], right[:batch]])
    if is_padded(left[-1]):
        call.mask(a, [len(left) - 1])
        call.mask(b, [len(right) - 2])
    return (*outer, left[-2], right[-1])


register_all(
    rule,
    (
        ((aten.mm.default,), lambda call: call.emit(_contract(call, 0, 1, 0))),
        ((aten.bmm.default,), lambda call: call.emit(_contract(call, 0, 1, 1))),
    ),
)


@rule(aten.addmm.default, aten.baddbmm.default)
def _addmm(call: Call) -> tuple[fx.Node, Any]:
    axes = _contract(call, 1, 2, 0 if call.node.target is aten.addmm.default else 1)
    return call.emit(broadcast([call.axes(0), axes]))


@rule(aten.convolution.default)
def _convolution(call: Call) -> tuple[fx.Node, Any]:
    """Beyond an image a convolution sees zeros: where the padding is."""
    x, w, transposed = call.axes(0), call.axes(1), call.args[6]
    if is_padded(*w) or is_padded(x[1]) or transposed and is_padded(*x[2:]):
        raise Refused("a convolution of padded channels, or a transposed one")
    call.mask(0, range(2, len(x)))
    sizes = [_settled(n) for n in call.shape[2:]]
    spatial = [(Run(n),) if type(n) is Size else axis_of(n) for n in sizes]
    return call.emit((x[0], axis_of(call.shape[1]), *spatial))


# Reductions
def _least(dtype: torch.dtype) -> Any:
    return -math.inf if dtype.is_floating_point else 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _most(dtype: torch.dtype) -> Any:
    return math.inf if dtype.is_floating_point else 1 if dtype is torch.bool else torch.iinfo(dtype).max


def _reduced(axes: Axes, dims: Sequence[int], keep: bool) -> Axes:
    return tuple([() if d in dims else a for d, a in enumerate(axes) if keep or d not in dims])


def _reduction(fill: Callable[[torch.dtype], Any], single: bool = False, both: bool = False) -> Any:
    """fill: what changes nothing. single: the result is a place along one dimension. both: values and places."""

    def apply(call: Call) -> tuple[fx.Node, Any]:
        axes = call.axes(0)
        args = {a.name: v for a, v in zip(call.node.target._schema.arguments, call.args)} | call.kwargs
        dims = _dims(args.get("dim"), len(axes))
        if single or both:
            flat = args.get("dim") is None
            if any(len(axes[d]) > 1 and is_padded(axes[d]) for d in dims) or flat and is_padded(*axes):
                raise Refused(f"{call.node.target} over merged dimensions")
        call.mask(0, dims, fill(call.args[0].meta["val"].dtype))
        found = _reduced(axes, dims, bool(args.get("keepdim", False)))
        return call.emit((found, found) if both else found)

    return apply


register_all(
    rule,
    (
        ((aten.sum.default, aten.sum.dim_IntList), _reduction(lambda dtype: 0)),
        ((aten.prod.default, aten.prod.dim_int), _reduction(lambda dtype: 1)),
        ((aten.any.default, aten.any.dim, aten.any.dims), _reduction(lambda dtype: 0)),
        ((aten.all.default, aten.all.dim, aten.all.dims), _reduction(lambda dtype: 1)),
        ((aten.amax.default, aten.max.default), _reduction(_least)),
        ((aten.amin.default, aten.min.default), _reduction(_most)),
        ((aten.argmax.default,), _reduction(_least, single=True)),
        ((aten.argmin.default,), _reduction(_most, single=True)),
        ((aten.max.dim,), _reduction(_least, both=True)),
        ((aten.min.dim,), _reduction(_most, both=True)),
    ),
)


@rule(aten.mean.default, aten.mean.dim)
def _mean(call: Call) -> tuple[fx.Node, Any]:
    """A sum, divided by how many elements are meant."""
    axes, spec = call.axes(0), call.node.meta["val"]
    keep = bool(call.args[2]) if len(call.args) > 2 else bool(call.kwargs.get("keepdim", False))
    dims = _dims(call.args[1] if len(call.args) > 1 else None, len(axes))
    found = _reduced(axes, dims, keep)
    reduced = [axes[d] for d in dims]
    if not is_padded(*reduced):
        return call.emit(found)
    call.mask(0, dims)
    writer, shape = call.writer, _shape(call)
    wide = torch.float64 if spec.dtype is torch.float64 else torch.float32  # sums of halves may overflow
    total = writer.emit(aten.sum.dim_IntList, call.args[0], dims, keep, dtype=wide, shape=shape)
    total.kwargs = {"dtype": wide}
    count = writer.count(reduced)
    mean = writer.emit(aten.div.Tensor, total, count, dtype=wide, shape=shape)
    if not shape:  # a number of 64 bits beside one without dimensions decides nothing
        assert isinstance(count, fx.Node)
        count = writer.emit(aten._to_copy.default, count, dtype=wide, shape=())
        count.kwargs = {"dtype": wide}
        mean = writer.emit(aten.div.Tensor, total, count, dtype=wide, shape=shape)
    call.args, call.kwargs = [mean], {"dtype": spec.dtype}
    return call.emit(found, aten._to_copy.default)


def _shape(call: Call) -> tuple[int, ...]:
    """The shape of a call's result as numbers."""
    return call.writer.number(tuple(call.shape))


@rule(aten.cumsum.default, aten.cumprod.default)
def _scan(call: Call) -> tuple[fx.Node, Any]:
    """What comes before the padding knows nothing of it."""
    axes = call.axes(0)
    if len(axes[call.args[1]]) > 1 and is_padded(axes[call.args[1]]):
        raise Refused(f"{call.node.target} over merged dimensions")
    return call.emit(axes)


@rule(aten.tril.default, aten.triu.default)
def _triangle(call: Call) -> tuple[fx.Node, Any]:
    axes = call.axes(0)
    if any(len(axis) > 1 and is_padded(axis) for axis in axes[-2:]):
        raise Refused(f"{call.node.target} over merged dimensions")
    return call.emit(axes)


@rule(aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default)
def _softmax(call: Call) -> tuple[fx.Node, Any]:
    axes, d = call.axes(0), call.args[1] % len(call.axes(0))
    call.mask(0, [d], -math.inf)
    return call.emit(axes)


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(call: Call) -> tuple[fx.Node, Any]:
    axes = broadcast([call.axes(0), call.axes(1)])
    for place in (0, 1):
        call.mask(place, [call.args[2] % len(axes)])
    return call.emit(axes)


@rule(aten.native_layer_norm.default)
def _layer_norm(call: Call) -> tuple[fx.Node, Any]:
    axes, n = call.axes(0), len(call.args[1])
    _untouched(call, 0, *range(len(axes) - n, len(axes)))
    rows = axes[: len(axes) - n] + ((),) * n
    return call.emit((axes, rows, rows))


@rule(aten.native_layer_norm_backward.default)
def _layer_norm_backward(call: Call) -> tuple[fx.Node, Any]:
    axes, n = broadcast([call.axes(0), call.axes(1)]), len(call.args[2])
    _untouched(call, 1, *range(len(axes) - n, len(axes)))
    for place in (0, 1, 3, 4):
        call.mask(place, range(len(axes) - n))
    own = axes[len(axes) - n :]
    wanted = zip((axes, own, own), call.args[7], strict=True)
    return call.emit(tuple([found if want else () for found, want in wanted]))


@rule(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(call: Call) -> tuple[fx.Node, Any]:
    specs = call.node.meta["val"]
    return call.emit((call.axes(0), *[tuple(map(axis_of, spec.shape)) for spec in specs[1:]]))


@rule(aten.embedding.default)
def _embedding(call: Call) -> tuple[fx.Node, Any]:
    weight, places = call.axes(0), call.axes(1)
    _untouched(call, 0, 0, 1)
    call.mask(1, range(len(places)))
    return call.emit((*places, weight[1]))


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(call: Call) -> tuple[fx.Node, Any]:
    places = call.axes(1)
    call.mask(0, range(len(places)))
    call.mask(1, range(len(places)))
    return call.emit(tuple(map(axis_of, call.shape)))


@rule(aten.gather.default)
def _gather(call: Call) -> tuple[fx.Node, Any]:
    x, places = call.axes(0), call.axes(2)
    d = call.args[1] % len(x)
    if len(x[d]) > 1 and is_padded(x[d]):
        raise Refused("aten.gather along merged dimensions")
    if any(a != b for n, (a, b) in enumerate(zip(x, places, strict=True)) if n != d):
        raise Refused("aten.gather of a part")
    call.mask(2, range(len(places)))
    return call.emit(places)


@rule(aten.index_select.default)
def _index_select(call: Call) -> tuple[fx.Node, Any]:
    x, d = call.axes(0), call.args[1] % len(call.axes(0))
    if len(x[d]) > 1 and is_padded(x[d]):
        raise Refused("aten.index_select along merged dimensions")
    call.mask(2, [0])
    return call.emit((*x[:d], *call.axes(2), *x[d + 1 :]))


@rule(aten.nll_loss_forward.default)
def _nll_loss(call: Call) -> tuple[fx.Node, Any]:
    """Rows of padding are such as the loss ignores."""
    axes = call.axes(0)
    _untouched(call, 0, len(axes) - 1)
    call.mask(0, range(len(axes)))
    call.mask(1, [0], call.args[4])
    return call.emit((axes[:1] if call.args[3] == 0 else (), ()))


@rule(aten.nll_loss_backward.default)
def _nll_loss_backward(call: Call) -> tuple[fx.Node, Any]:
    axes = call.axes(1)
    _untouched(call, 1, len(axes) - 1)
    call.mask(1, range(len(axes)))
    call.mask(2, [0], call.args[5])
    if call.axes(0):
        call.mask(0, [0])
    return call.emit(axes)


# Attention
@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(call: Call) -> tuple[fx.Node, Any]:
    q, k, v = (call.axes(i) for i in range(3))
    _no_dropout(call, 3)
    lead = broadcast([q[:2], k[:2], v[:2]])
    _mask_keys(call, (1, 2), q, k, 4)
    return call.emit(((*lead, q[2], v[3]), (*lead, q[2])))


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_backward(call: Call) -> tuple[fx.Node, Any]:
    q, k, v = (call.axes(i) for i in (1, 2, 3))
    _no_dropout(call, 6)
    for place in (0, 1, 4, 5):  # rows of padding give no gradient
        call.mask(place, [2])
    _mask_keys(call, (2, 3), q, k, 7)
    return call.emit((q, k, v))


def _no_dropout(call: Call, place: int) -> None:
    dropout = call.args[place] if len(call.args) > place else call.kwargs.get("dropout_p", 0.0)
    if dropout:
        raise Refused("attention with dropout")


def _mask_keys(call: Call, places: tuple[int, int], q: Axes, k: Axes, causal: int) -> None:
    """No query attends padding: where each sees only what lies before it, that is so."""
    for place in places:
        call.mask(place, [2])
    axis = k[2]
    is_causal = call.args[causal] if len(call.args) > causal else call.kwargs.get("is_causal", False)
    if not is_padded(axis) or is_causal and q[2] == axis:
        return
    if is_causal:
        raise Refused("causal attention to other positions")
    writer, dtype = call.writer, call.args[places[0]].meta["val"].dtype
    valid = writer.valid(axis)
    ((n,), rows) = valid.meta["val"].shape, writer.number(call.args[places[0] - 1].meta["val"]).shape[2]
    seen = writer.emit(aten.view.default, valid, [1, 1, 1, n], dtype=torch.bool, shape=(1, 1, 1, n))
    given = call.kwargs.get("attn_mask")
    if given is None:
        shape: tuple[int, ...] = (1, 1, rows, n)
        given = writer.emit(aten.full.default, list(shape), 0.0, dtype=dtype, shape=shape)
        given.kwargs = {"dtype": dtype, "device": writer.device}
    else:
        shape = given.meta["val"].shape
    least = writer.emit(aten.full.default, [], -math.inf, dtype=dtype, shape=())
    least.kwargs = {"dtype": dtype, "device": writer.device}
    found = writer.emit(aten.where.self, seen, given, least, dtype=dtype, shape=shape)
    call.kwargs["attn_mask"] = call.keep(found, ())


# Calls ------------------------------------------------------------------------------------------------------
def bucket_of(n: int, pad: Any) -> int:
    """The size that `n` is padded to: a multiple of a number, the smallest of some that is large enough (or n
    itself, beyond them), or with "powers" a power of two."""
    if pad == "powers":
        return 1 << (n - 1).bit_length()
    if isinstance(pad, int):
        return -(-n // pad) * pad
    return min((size for size in pad if size >= n), default=n)


class Bucketed:
    """A graph with symbols as executables for buckets of sizes; for each size where padding is refused."""

    def __init__(
        self,
        gm: fx.GraphModule,
        compile_graph: Callable[[fx.GraphModule], Compiled],
        pad: Any,
        device: torch.device,
        name: str = "",
    ) -> None:
        self.gm, self.compile_graph, self.pad, self.device = gm, compile_graph, pad, device
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.symbols = [
            (n, symbol)
            for n, node in enumerate(placeholders)
            if is_size(node)
            for symbol in node.meta["val"].symbols
        ]
        self.env = gm.meta["shape_env"]
        self._buckets: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._known: dict[tuple[int, ...], tuple[Written, Compiled]] = {}
        self.refused = self._why_not()
        if self.refused:
            counters["fallback"]["xla.pad"] += 1
            reason = f"{self.refused}: compiled for each size"
            emit("fallback", what="xla.pad", name=name, reason=reason, code="DM679")

    def _why_not(self) -> str:
        """Why padding may do harm; empty where it does none."""
        if any(_writes(node) for node in self.gm.graph.nodes):
            return "the graph writes its inputs"
        try:
            Writer(self.gm, self.env.hints, True, self.device).write()
        except Refused as why:
            return str(why)
        return ""

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        of = {symbol: inputs[n] for n, symbol in self.symbols}
        key = tuple(of.values())
        if not self.refused:
            if key not in self._buckets:
                self._buckets[key] = self._bucket(of)
            key = self._buckets[key]
        known = self._known.get(key)
        if known is None:
            at = dict(zip(of, key, strict=True))
            written = Writer(self.gm, at, not self.refused, self.device).write()
            known = self._known[key] = written, self.compile_graph(written.gm)
            counters["xla"]["buckets"] += 1
        written, call = known
        sizes = dict(zip(of, key, strict=True))
        given = [_padded(inputs[n], axes, of, sizes) for n, axes in written.given]
        if written.needed:
            given.append(torch.tensor([size.value(of) for size in written.needed], device="cpu"))
        return tuple(
            [
                x if how is None else how.value(of) if type(how) is Size else _cut(x, *how, of, sizes)
                for x, how in zip(call(*given), written.outputs, strict=True)
            ]
        )

    def _bucket(self, of: Values) -> tuple[int, ...]:
        """The smallest sizes to pad to that the graph is right for: its guards may tell some sizes apart. A
        call's own where there are none."""
        choices = []
        for symbol, n in of.items():
            sizes = [n if symbol in self.env.fixed else bucket_of(n, self.pad)]
            while len(sizes) < TRIED and symbol not in self.env.fixed:
                sizes.append(bucket_of(sizes[-1] + 1, self.pad))
            choices.append(sizes)
        for sizes in sorted(itertools.product(*choices), key=math.prod):
            larger = dict(zip(of, sizes, strict=True))
            for symbol, n in self.env.fixed.items():  # another one, or a number
                if symbol in larger:
                    larger[symbol] = n.value(larger) if type(n) is Size else n
            if self.env.admits(larger):
                return tuple(larger.values())
        return tuple(of.values())


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _sizes_of(axes: Axes, of: Values) -> list[list[int]]:
    return [[f.size.value(of) if type(f) is Run else f for f in axis] for axis in axes]


def zeros_behind(x: torch.Tensor, more: list[int]) -> torch.Tensor:
    """A larger tensor; `more` as `torch.nn.functional.pad` takes it."""
    return torch.nn.functional.pad(x, more)


def _padded(x: Any, axes: Axes, of: Values, larger: Values) -> Any:
    """An input with zeros behind what it holds."""
    if not is_padded(*axes):
        return x
    own, wanted = _sizes_of(axes, of), _sizes_of(axes, larger)
    if own != wanted:
        x = x.reshape([n for some in own for n in some])
        more: list[int] = []
        for a, b in zip((n for some in own for n in some), (n for some in wanted for n in some), strict=True):
            more = [0, b - a, *more]
        x = zeros_behind(x, more)
        x = x.reshape([math.prod(some) for some in wanted])
    return x.contiguous()


def _cut(x: Any, axes: Axes, strides: tuple[Dim, ...], of: Values, larger: Values) -> Any:
    """A result without padding, with the strides that the graph says."""
    own, wanted = _sizes_of(axes, of), _sizes_of(axes, larger)
    if own == wanted:
        return x
    x = x.reshape([n for some in wanted for n in some])
    for d, n in enumerate(n for some in own for n in some):
        x = x.narrow(d, 0, n)
    x = x.reshape([math.prod(some) for some in own])
    steps = [s.value(of) if type(s) is Size else s for s in strides]
    order = sorted(range(x.dim()), key=lambda d: (-steps[d], d))
    back = [order.index(d) for d in range(x.dim())]
    return x.permute(order).contiguous().permute(back)
