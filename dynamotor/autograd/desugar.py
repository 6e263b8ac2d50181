"""Tensors of wrapper subclasses at the border of a compiled program: the program takes and gives their inner
tensors, autograd sees the wrappers.

The torch graph runs over wrappers around tensors without data, so `__torch_dispatch__` is traced through, in
the forward and in the backward. A `WrapperBoundary` keeps the trace's facts.

>>> boundary.flat((x, quantised))        # [x, quantised.values, quantised.scale]
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.compat import NestedTensor
from ..base.errors import BackendError
from ..graph.nodes import operands
from ..graph.shape_tensor import UnsupportedOp, recording
from ..graph.sizes import Size, Symbol
from ..graph.spec import TensorSpec
from ..graph.tensor_subclass import HeldPart, WrapperSpec, flatten, flatten_all, is_wrapper
from .aten_recorder import GraphRecorder

Spec = TensorSpec | WrapperSpec | Size
_RAGGED = ("_offsets", "_lengths")  # the inner tensors by whose identity PyTorch knows a jagged size


@dataclass(frozen=True)
class WrapperBoundary:
    """How a program's wrappers are taken apart and put together.

    inputs: the spec of each input, None for one that is passed as it is. symbols: the places of inputs that
    are sizes. wrappers: each wrapper among the outputs, with the places of its inner tensors among the flat
    outputs; the first `n_graded` require gradients. outputs: where each output comes from: ("leaf", flat
    place), ("input", place) or ("wrapper", place). tangents: the spec of each gradient that arrives, None for
    a plain one. gradients: for each gradient that leaves, the input's place, the gradient's spec and its
    number of tensors.
    """

    inputs: tuple[WrapperSpec | None, ...]
    symbols: dict[int, Symbol]
    wrappers: tuple[tuple[WrapperSpec, tuple[int, ...]], ...] = ()
    n_graded: int = 0
    outputs: tuple[tuple[str, int], ...] = ()
    tangents: tuple[WrapperSpec | None, ...] = ()
    gradients: tuple[tuple[int, WrapperSpec | None, int], ...] = ()

    @functools.cached_property
    def jagged(self) -> tuple[int, ...]:
        """The places of inputs that are jagged tensors."""
        return tuple([i for i, spec in enumerate(self.inputs) if spec and spec.cls is NestedTensor])

    def flat(self, inputs: Sequence[Any]) -> list[Any]:
        """The program's inputs with inner tensors in the place of wrappers."""
        return [
            leaf
            for value, spec in zip(inputs, self.inputs, strict=True)
            for leaf in ((value,) if spec is None else _parts(value, spec))
        ]

    def static(self, places: frozenset[int]) -> frozenset[int]:
        """Places among the flat inputs of objects that are the same at each call."""
        counts = [1 if spec is None else len(spec.leaves()) for spec in self.inputs]
        starts = [0, *itertools.accumulate(counts)]
        return frozenset(k for i in places for k in range(starts[i], starts[i + 1]))

    def values(self, inputs: Sequence[Any]) -> dict[Symbol, int]:
        """The symbols' values at a call."""
        return {symbol: inputs[i] for i, symbol in self.symbols.items()}

    def flat_tangents(self, tangents: Sequence[Any], of: Mapping[Symbol, int]) -> list[Any]:
        """The gradients that arrive, wrappers taken apart."""
        found: list[Any] = []
        for tangent, spec in zip(tangents, self.tangents, strict=True):
            if tangent is not None and tangent._is_zerotensor():
                tangent = torch.zeros(tangent.shape, dtype=tangent.dtype, device=tangent.device)
            if spec is None:
                found.append(tangent)  # `Backward` refuses a wrapper
            elif tangent is None:
                found += [None] * len(spec.leaves())
            else:
                found += _parts(_of_kind(tangent, at(spec, of)), spec)
        return found

    def offsets(self, inputs: Sequence[Any]) -> dict[int, Any]:
        """By place: an input that is a jagged tensor, without its data; its gradient is as ragged."""
        return {
            i: [(name, own if name in _RAGGED else None) for name, own in _inner(inputs[i])]
            for i in self.jagged
        }

    def wrap_gradients(
        self, grads: Sequence[Any], of: Mapping[Symbol, int], offsets: Mapping[int, Any]
    ) -> list[Any]:
        """A gradient for each input, from the program's."""
        result: list[Any] = [None] * len(self.inputs)
        rest = iter(grads)
        for place, spec, count in self.gradients:
            leaves = list(itertools.islice(rest, count))
            if leaves and all(leaf is None for leaf in leaves):  # no gradient has arrived
                continue
            if place in offsets and spec is not None:
                own = dict(offsets[place])
                leaves = [
                    leaf if own.get(name) is None else own[name] for name, leaf in zip(spec.names, leaves)
                ]
            result[place] = leaves[0] if spec is None else at(spec, of).wrap(leaves)
        return result


def at(spec: WrapperSpec, of: Mapping[Symbol, int]) -> WrapperSpec:
    """The spec at a call's sizes."""
    return spec.at(of) if of and spec.is_symbolic else spec


def _parts(value: Any, spec: WrapperSpec) -> Iterator[Any]:
    for name, one in zip(spec.names, spec.inner, strict=True):
        inner = getattr(value, name)
        if isinstance(one, WrapperSpec):
            yield from _parts(inner, one)
        elif isinstance(one, TensorSpec):
            yield plain_tangent(inner)


def plain_tangent(tangent: Any) -> Any:
    """A gradient as the plain tensor for which the backward was compiled, if its class converts it (one that
    waits for a collective)."""
    convert = getattr(tangent, "__coerce_same_metadata_as_tangent__", None) if is_wrapper(tangent) else None
    found = None if convert is None else convert(None, torch.Tensor)
    return tangent if found is None else found


def _of_kind(tangent: Any, spec: WrapperSpec) -> Any:
    """A gradient as the wrapper for which the backward was compiled; the class may convert another one."""
    if not matches(tangent, spec):
        convert = getattr(tangent, "__coerce_same_metadata_as_tangent__", None)
        if convert is not None:
            other = () if type(tangent) is spec.cls else (spec.cls,)
            tangent = convert(spec.context, *other)
        BackendError.when(
            not matches(tangent, spec, convert is None),
            "DM263",
            f"the gradient of a {spec.cls.__name__} is a {type(tangent).__name__}, or has another context",
            why="the backward is compiled before a gradient arrives, for one like the output",
            cure="keep this output inside the compiled function, or give the class"
            " __coerce_same_metadata_as_tangent__",
        )
    return tangent


def matches(value: Any, spec: WrapperSpec, exactly: bool = True) -> bool:
    """Whether a value is a wrapper of this class, with these names, this context and such inner tensors. Not
    exactly: with any context, where its class has just converted it to this one.
    """
    if type(value) is not spec.cls:
        return False
    names, context = value.__tensor_flatten__()
    return (
        tuple(names) == spec.names
        and (not exactly or bool(context == spec.context))
        and all(_matches_part(getattr(value, name), one) for name, one in zip(names, spec.inner, strict=True))
    )


def _matches_part(part: Any, spec: Any) -> bool:
    if isinstance(spec, HeldPart):
        return part is spec.value or bool(part == spec.value)
    return matches(part, spec) if isinstance(spec, WrapperSpec) else not is_wrapper(plain_tangent(part))


# At trace time ----------------------------------------------------------------------------------------------
@dataclass
class Feed:
    """The placeholders' values in the trace, and the plain tensors of it, in order."""

    values: list[Any]
    leaves: list[Any]
    graded: list[bool]  # of the leaves: those inside of wrappers take no part in autograd
    specs: tuple[WrapperSpec | None, ...]

    def check(self) -> None:
        """Refuse a program that gave an input other inner tensors: only writes into them reach the caller."""
        leaves = iter(self.leaves)
        for value, spec in zip(self.values, self.specs, strict=True):
            old = [next(leaves) for _ in (spec.leaves() if spec else (None,))]
            if spec is not None:
                now = flatten(value)
                UnsupportedOp.when(
                    len(now) != len(old) or any(a is not b for a, b in zip(now, old)),
                    "DM261",
                    f"an op gives an input, a {spec.cls.__name__}, another inner tensor",
                    cure="write into the inner tensor (copy_) in __torch_dispatch__",
                )

    def places(self, inputs: Sequence[int]) -> list[int | None]:
        """The places of inputs among the leaves; None for wrappers."""
        counts = [1 if spec is None else len(spec.leaves()) for spec in self.specs]
        starts = [0, *itertools.accumulate(counts)]
        return [starts[i] if self.specs[i] is None else None for i in inputs]

    def written(self, leaves: Iterable[int]) -> set[int]:
        """The inputs to which these leaves belong."""
        counts = [1 if spec is None else len(spec.leaves()) for spec in self.specs]
        owners = [i for i, count in enumerate(counts) for _ in range(count)]
        return {owners[leaf] for leaf in leaves}

    def has_wrapper(self) -> bool:
        """Whether an input is a wrapper."""
        return any(spec is not None for spec in self.specs)


def same_leaves(inputs: Sequence[Any]) -> dict[int, int]:
    """The flat inputs that are an earlier one, where an input is jagged: its size is known by which tensor
    holds its offsets."""
    first: dict[int, int] = {}
    found: dict[int, int] = {}
    if any(type(value) is NestedTensor for value in inputs):
        for k, leaf in enumerate(flatten_all(inputs)):
            if (
                isinstance(leaf, torch.Tensor)
                and not leaf.is_floating_point()
                and first.setdefault(id(leaf), k) != k
            ):
                found[k] = first[id(leaf)]
    return found


def feed(
    recorder: GraphRecorder,
    names: Sequence[str],
    specs: Sequence[Spec],
    requires_grad: Sequence[bool],
    same: Mapping[int, int],
) -> Feed:
    """Inputs for a trace: a placeholder for each plain tensor and size, wrappers around them. same: flat
    inputs that are an earlier one."""
    found = Feed([], [], [], tuple([s if type(s) is WrapperSpec else None for s in specs]))
    for name, spec, needs in zip(names, specs, requires_grad, strict=True):
        start = len(found.leaves)
        if type(spec) is not WrapperSpec:
            leaf = recorder.input(name, spec, needs)  # type: ignore[arg-type]
            leaf = found.leaves[same[start]] if start in same else leaf
            found.values.append(leaf)
            found.leaves.append(leaf)
            found.graded.append(needs)
            continue
        inner = [recorder.input(f"{name}_{k}", one) for k, one in enumerate(spec.leaves())]
        for k in range(len(inner)):
            inner[k] = found.leaves[same[start + k]] if start + k in same else inner[k]
        recorder.graded |= needs
        with recording(recorder), torch.no_grad():
            wrapper = spec.wrap(inner)
        found.values.append(wrapper.requires_grad_(needs) if needs else wrapper)
        found.leaves += inner
        found.graded += [False] * len(inner)
    return found


@dataclass
class Results:
    """The torch graph's results in the trace, wrappers taken apart. wrappers: those that are not inputs,
    graded ones first.
    """

    flat: list[Any]
    wrappers: list[tuple[Any, tuple[int, ...]]]
    n_graded: int
    outputs: tuple[tuple[str, int], ...]

    @property
    def graded(self) -> list[Any]:
        """The wrappers that want gradients."""
        return [wrapper for wrapper, _ in self.wrappers[: self.n_graded]]


def refuse_views(gm: torch.fx.GraphModule, results: Sequence[Any], inputs: Feed) -> None:
    """Leave a result that autograd knows as a view of an input that is a wrapper, or of the wrapper that
    another output views, to PyTorch: a write into one gives the other a gradient, or is refused. The graph
    is cut around its node.
    """
    tensors = [(n, t) for n, t in enumerate(results) if isinstance(t, torch.Tensor) and t.requires_grad]
    graded = [(n, t) for n, t in tensors if is_wrapper(t) or is_wrapper(t._base)]
    bases = [id(value) for value in inputs.values if is_wrapper(value)]
    bases += {id(t): id(t) if t._base is None else id(t._base) for _, t in graded}.values()
    given = {id(value) for value in inputs.values}
    for n, view in graded:
        if view._base is not None and id(view) not in given and bases.count(id(view._base)) > 1:
            error = UnsupportedOp(
                "DM264",
                f"a result, a {type(view).__name__}, is a view of an input or of what another result views",
                cure="clone() it",
            )
            error.__dict__["torch_node"] = operands(gm.graph.output_node(), 0)[n]
            raise error


# DTensor's conversions, and the views that jagged tensors are, are nodes of autograd from tensor to tensor;
# their private parts keep a history beside them, which nothing that is documented follows.
_OWN_GRADIENTS = ("torch.distributed.tensor", "torch.nested")


def take_apart(results: Sequence[Any], inputs: Feed) -> Results:
    """The results as plain tensors and wrappers around them."""
    flat: list[Any] = []
    wrappers: dict[int, tuple[Any, tuple[int, ...]]] = {}
    given = {id(value): i for i, value in enumerate(inputs.values)}
    places: list[tuple[str, int]] = []
    for result in results:
        if not is_wrapper(result):
            places.append(("leaf", len(flat)))
            flat.append(result)
        elif id(result) in given:
            places.append(("input", given[id(result)]))
        else:
            if id(result) not in wrappers:
                leaves = flatten(result)
                if type(result).__module__.startswith(_OWN_GRADIENTS):
                    leaves = [leaf.detach() if leaf.requires_grad else leaf for leaf in leaves]
                UnsupportedOp.when(
                    result.requires_grad and any(leaf.requires_grad for leaf in leaves),
                    "DM262",
                    f"a {type(result).__name__} wants a gradient, and so does a tensor inside of it",
                    cure="detach() the inner tensors",
                )
                wrappers[id(result)] = result, tuple(range(len(flat), len(flat) + len(leaves)))
                flat += leaves
            places.append(("wrapper", id(result)))
    ordered = sorted(wrappers.values(), key=lambda found: not found[0].requires_grad)
    of = {id(wrapper): k for k, (wrapper, _) in enumerate(ordered)}
    outputs = tuple([(kind, of[k] if kind == "wrapper" else k) for kind, k in places])
    return Results(flat, ordered, sum(wrapper.requires_grad for wrapper, _ in ordered), outputs)


def tangent_of(root: Any) -> WrapperSpec:
    """The expected gradient of a wrapper: one like it, or as its class says."""
    root = root.detach()
    expected = getattr(root, "__coerce_tangent_metadata__", None)
    # Reduced, a DTensor's part is row-major whatever strides the whole shows.
    return WrapperSpec.of(root if expected is None else expected().contiguous())


def with_offsets_of(root: Any, leaves: Sequence[Any]) -> Sequence[Any]:
    """The tensors inside of a gradient: a jagged one has the root's own offsets."""
    if type(root) is not NestedTensor:
        return leaves
    return [own if name in _RAGGED else leaf for leaf, (name, own) in zip(leaves, _inner(root), strict=True)]


def _inner(tensor: Any) -> list[tuple[str, Any]]:
    return [(name, getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]


def boundary_of(
    inputs: Feed,
    specs: Sequence[Spec],
    results: Results,
    tangents: Sequence[WrapperSpec | None],
    gradients: Sequence[tuple[int, WrapperSpec | None, int]],
) -> WrapperBoundary | None:
    """The run-time wrapper's facts; None for a program without wrappers."""
    if not inputs.has_wrapper() and not results.wrappers:
        return None
    symbols = {i: only for i, spec in enumerate(specs) if type(spec) is Size for only in spec.symbols}
    made = tuple([(WrapperSpec.of(wrapper.detach()), places) for wrapper, places in results.wrappers])
    return WrapperBoundary(
        inputs.specs, symbols, made, results.n_graded, results.outputs, tuple(tangents), tuple(gradients)
    )
