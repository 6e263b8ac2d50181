"""The arguments of a packaged program must be as the examples were, in all that the program may look at.

A package has no guards of capture. Checks on plain data (`ArgumentChecks`) imply the guards of
arguments, or the export is refused: one structure with its types and keys, equal numbers and texts, tensors
of one class, layout, dtype and `requires_grad`, one tensor in two places where the examples were one. Sizes
that may differ are symbols, whose ranges and assumptions are checked.

>>> entry = ArgumentChecks.of(((x,), {"scale": 2.0}), guards, (x, 2.0))
>>> entry.tensors(((other,), {"scale": 2.0}))  # UsageError (DM115) where something differs
({2: other}, {})
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base.errors import UsageError
from ..capture.guards import (
    Absent,
    Apart,
    ConstEquals,
    DictKeys,
    Distinct,
    Length,
    NoOverlap,
    SameObject,
    TensorMatch,
    TypeIs,
    are_apart,
    const_equal,
)
from ..capture.source import Arg, DictItem, InstanceDict, SeqItem, SizeOf, Source, StrideOf
from ..capture.symbolic_inputs import Marks, SizesHold
from ..graph.plain_data import NotPlain, encode, plain
from ..graph.sizes import INFINITY, Guard, ShapeEnv, Size, Symbol, evaluate, is_symbolic
from ..graph.spec import TensorSpec, copy_as

_KINDS: dict[str, Any] = {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": OrderedDict}
_CLASSES = {"Tensor": torch.Tensor, "Parameter": torch.nn.Parameter}
_IMPLIED = (TypeIs, ConstEquals, TensorMatch, Length, DictKeys)  # of what `_paths` reaches
_FACTS = {"is_leaf": lambda tensor: tensor.is_leaf, "storage_offset": torch.Tensor.storage_offset}


def refused(what: str, why: str, cure: str = "compile() takes all programs") -> UsageError:
    return UsageError("DM114", f"this program cannot be exported: {what}", why=why, cure=cure)


def not_built_for(what: str, cure: str = "export again with such arguments") -> UsageError:
    return UsageError(
        "DM115",
        f"the package was not built for {what}",
        cure=cure,
        why="a package has one program, for arguments like its examples",
    )


def flatten(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each container, tensor and plain value of an argument with its path, containers before their items."""
    yield path, value
    if type(value) in (tuple, list):
        for k, item in enumerate(value):
            yield from flatten(item, (*path, k))
    elif type(value) in (dict, OrderedDict):
        for key, item in value.items():
            yield from flatten(item, (*path, key))


def lies_as(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether elements are at the same places by both strides: those of dimensions of size 1 say nothing."""
    return 0 in shape or all(n == 1 or i == j for n, i, j in zip(shape, a, b, strict=True))


@plain
@dataclass(frozen=True)
class TensorFacts:
    """The properties of a tensor argument that a program may read."""

    cls: str
    spec: TensorSpec
    requires_grad: bool
    absent: tuple[str, ...]  # attributes that it must not have
    facts: tuple[tuple[str, Any], ...]  # answers of `_FACTS`

    def check(
        self, tensor: Any, name: str, sizes: Mapping[Symbol, int], written: bool, asks: bool
    ) -> torch.Tensor:
        """The tensor, or UsageError (DM115). written: the program writes it; asks: it looks at strides."""
        if type(tensor) is not _CLASSES[self.cls]:
            raise not_built_for(f"{name}, a {type(tensor).__name__}, but for a {self.cls}")
        spec = self.spec
        shape, stride = (
            (evaluate(spec.shape, sizes), evaluate(spec.stride, sizes))
            if sizes
            else (spec.shape, spec.stride)
        )
        found = tuple(tensor.shape), tensor.dtype, tensor.device
        if found != (shape, spec.dtype, spec.device) or tensor.layout is not torch.strided:
            raise not_built_for(
                f"{name} of shape {list(tensor.shape)} and {tensor.dtype}, but for {self.spec}"
                + self._differing(tensor, shape)
            )
        if tensor.stride() != stride and (asks or not lies_as(shape, tensor.stride(), stride)):
            raise not_built_for(
                f"{name} with strides {list(tensor.stride())}, but for {list(stride)}",
                "copy it into a tensor with these strides (torch.empty_strided), or export again",
            )
        if tensor.requires_grad is not self.requires_grad:
            raise not_built_for(f"{name}, whose requires_grad is {tensor.requires_grad}", "detach() it")
        for attribute in self.absent:
            if attribute in vars(tensor):
                raise not_built_for(f"{name}, which has an attribute {attribute!r}")
        for fact, answer in self.facts:
            if _FACTS[fact](tensor) != answer:
                raise not_built_for(f"{name}, whose {fact} is {_FACTS[fact](tensor)}, but for {answer}")
        if written and (tensor.is_conj() or tensor.is_neg()):
            raise not_built_for(f"{name}, which is written, and a lazy view", "clone() it")
        plain_tensor = tensor.detach().resolve_conj().resolve_neg()
        if plain_tensor.stride() == stride:
            return plain_tensor
        if lies_as(shape, plain_tensor.stride(), stride):
            return plain_tensor.as_strided(shape, stride)
        return copy_as(plain_tensor, list(stride))

    def _differing(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> str:
        """The first dimension that differs, and its expected size."""
        if tensor.dim() != len(shape):
            return ""
        for d, (now, then, size) in enumerate(zip(tensor.shape, shape, self.spec.shape, strict=True)):
            if now != then:
                why = f" ({size})" if type(size) is Size else ""
                return f": the size in dimension {d} is {now}, and {then}{why} was expected"
        return ""


@plain
@dataclass(frozen=True)
class SizeRange:
    """A symbol of a program: the size (or stride) of a tensor argument's dimension, and its range."""

    symbol: Symbol
    node: int
    dim: int
    is_stride: bool
    lo: int
    hi: int

    def value(self, found: Sequence[tuple[Any, Any]], name: str) -> int:
        """Its value at a call, or UsageError (DM115)."""
        tensor = found[self.node][1]
        if not isinstance(tensor, torch.Tensor) or tensor.dim() <= self.dim:
            raise not_built_for(f"{name} without a dimension {self.dim}")
        n = tensor.stride(self.dim) if self.is_stride else tensor.shape[self.dim]
        if type(n) is not int or not self.lo <= n <= self.hi:
            upper = f"to {self.hi}" if self.hi < INFINITY else "or more"
            word = "stride" if self.is_stride else "size"
            raise not_built_for(f"{name} of {word} {n} in dimension {self.dim}, but for {self.lo} {upper}")
        return n


@plain
@dataclass(frozen=True)
class ArgumentChecks:
    """The arguments of a program. nodes: path, kind and facts of each of `flatten`; same, distinct: pairs of
    nodes that are one object, or two. sizes: the symbols, assumed: assumptions about them. written: tensor
    nodes that the program writes. asks: whether it looks at strides.
    """

    nodes: tuple[tuple[tuple[Any, ...], str, Any], ...]
    same: tuple[tuple[int, int], ...]
    distinct: tuple[tuple[int, int], ...]
    sizes: tuple[SizeRange, ...] = ()
    assumed: tuple[Guard, ...] = ()
    written: tuple[int, ...] = ()
    asks: bool = True

    @staticmethod
    def of(
        given: Any, guards: Sequence[Any], flat: tuple[Any, ...], env: ShapeEnv | None = None
    ) -> ArgumentChecks:
        """The checks for arguments like these. given: positional arguments and a dict of those by name; flat:
        both, as the guards' sources take them; env: of the symbols. Raises UsageError (DM114) if no check
        implies a guard on arguments.
        """
        found = list(flatten(given))
        ids: dict[int, int] = {}
        same = []
        for k, (_, value) in enumerate(found):
            if isinstance(value, torch.Tensor) or type(value) in (list, dict, OrderedDict):
                first = ids.setdefault(id(value), k)
                if first != k:
                    same.append((first, k))
        absent, facts, distinct = _asked(guards, flat, ids)
        symbolic = _Symbolic.of(guards, flat, ids, env or ShapeEnv())
        nodes: list[tuple[tuple[Any, ...], str, Any]] = []
        for k, (path, value) in enumerate(found):
            if isinstance(value, torch.Tensor):
                rows = absent.get(k, ()), facts.get(k, ())
                spec = symbolic.spec(ids[id(value)], value)
                nodes.append((path, "tensor", _facts_of(value, spec, *map(tuple, rows))))
            elif type(value) in _KINDS.values():
                nodes.append((path, type(value).__name__, len(value)))
            else:
                nodes.append((path, "value", value))
        entry = ArgumentChecks(
            tuple(nodes), tuple(same), tuple(distinct), tuple(symbolic.sizes), symbolic.assumed
        )
        try:
            encode(entry)
        except NotPlain as why:
            raise refused(
                f"an argument is {why}",
                "a call cannot be compared with it in another process",
                "pass tensors and plain values",
            ) from None
        return entry

    def tensors(self, given: Any) -> tuple[dict[int, torch.Tensor], dict[Symbol, int]]:
        """The tensors of a call, by their nodes, and its sizes. UsageError (DM115) where it is not like the
        examples.
        """
        found = list(flatten(given))
        if len(found) != len(self.nodes):
            raise not_built_for("arguments of this structure")
        sizes = self._sizes(found) if self.sizes else {}
        tensors = {}
        for k, ((path, value), (then, kind, fact)) in enumerate(zip(found, self.nodes, strict=True)):
            name = name_of(then)
            if not const_equal(path, then):
                raise not_built_for("arguments of this structure")
            if kind == "tensor":
                tensors[k] = fact.check(value, name, sizes, k in self.written, self.asks)
            elif kind == "value":
                if not const_equal(value, fact):
                    raise not_built_for(f"{name}, {type(value).__name__} {value!r}, but for {fact!r}")
            elif type(value) is not _KINDS[kind] or len(value) != fact:
                raise not_built_for(f"{name}, a {type(value).__name__}, but for a {kind} of {fact}")
        for a, b in self.same:
            if found[a][1] is not found[b][1]:
                raise not_built_for(f"{name_of(found[a][0])} and {name_of(found[b][0])} that are two objects")
        for a, b in self.distinct:
            if found[a][1] is found[b][1]:
                raise not_built_for(f"{name_of(found[a][0])} and {name_of(found[b][0])} that are one object")
        for a, b in self.apart():
            if not are_apart([tensors[a], tensors[b]], 1):
                raise not_built_for(
                    f"{name_of(found[a][0])} and {name_of(found[b][0])} that share memory, of which one is "
                    "written",
                    "pass copies",
                )
        return tensors, sizes

    def _sizes(self, found: Sequence[tuple[Any, Any]]) -> dict[Symbol, int]:
        of = {row.symbol: row.value(found, name_of(self.nodes[row.node][0])) for row in self.sizes}
        for guard in self.assumed:
            if not guard.holds(of):
                raise not_built_for(f"sizes for which {guard!r} does not hold: {self.told(guard, of)}")
        return of

    def told(self, guard: Guard, of: Mapping[Symbol, int] | None = None) -> str:
        """The meaning of the symbols of an assumption, with their values."""
        return "; ".join(
            f"{row.symbol} is the {'stride' if row.is_stride else 'size'} of "
            f"{name_of(self.nodes[row.node][0])} in dimension {row.dim}"
            + ("" if of is None else f", here {of[row.symbol]}")
            for row in self.sizes
            if row.symbol in guard.expr.symbols
        )

    def apart(self) -> list[tuple[int, int]]:
        """Pairs of tensor nodes of which one is written, and which are not one object."""
        nodes, same = self.tensor_nodes(), {frozenset(pair) for pair in self.same}
        return [
            (a, b)
            for a in self.written
            for b in nodes
            if a != b and frozenset((a, b)) not in same and not (b in self.written and b < a)
        ]

    def tensor_nodes(self) -> list[int]:
        """The nodes that are tensors, in order."""
        return [k for k, (_, kind, _) in enumerate(self.nodes) if kind == "tensor"]


@dataclass
class _Symbolic:
    """The sizes of arguments that are symbols. known: expressions of sizes and strides by node, kind and
    dimension; free: nodes of tensors that the program does not read, whose marked dimensions may differ.
    """

    env: ShapeEnv
    known: dict[tuple[int, bool, int], Size]
    read: set[int]
    sizes: list[SizeRange]
    assumed: tuple[Guard, ...]

    @staticmethod
    def of(guards: Sequence[Any], flat: tuple[Any, ...], ids: dict[int, int], env: ShapeEnv) -> _Symbolic:
        inside = [row for row in guards if type(row) is TensorMatch and _is_inside(row.source)]
        found = _Symbolic(env, {}, {ids[id(row.source.fetch(flat))] for row in inside}, [], ())
        for row in guards:
            if type(row) is SizesHold:
                for symbol, source in row.symbols:
                    at, lo, hi = _place_of(source, flat, ids), *row.bounds.get(symbol, (-INFINITY, INFINITY))
                    found.known[at] = Size({(symbol,): 1}, symbol.env)
                    found.sizes.append(SizeRange(symbol, at[0], at[2], at[1], lo, hi))
                for source, expr in row.facts:
                    found.known[_place_of(source, flat, ids)] = expr
                found.assumed += row.assumed
        return found

    def spec(self, node: int, tensor: torch.Tensor) -> TensorSpec:
        """The spec of the tensor at a node."""
        spec, dims = TensorSpec.of(tensor), range(tensor.dim())
        if node not in self.read:
            for d in Marks.of(tensor).dynamic:
                self._free(node, d, False, tensor.shape[d])
            if Marks.of(tensor).dynamic:
                for d in dims:
                    self._free(node, d, True, tensor.stride(d))
        shape = tuple([self.known.get((node, False, d), spec.shape[d]) for d in dims])
        stride = tuple([self.known.get((node, True, d), spec.stride[d]) for d in dims])
        return replace(spec, shape=shape, stride=stride) if is_symbolic(shape + stride) else spec

    def _free(self, node: int, dim: int, is_stride: bool, now: int) -> None:
        """Make a symbol of a size that the program does not read."""
        if (node, is_stride, dim) not in self.known:
            self.known[node, is_stride, dim] = made = self.env.symbol(now, 0)
            (symbol,) = made.symbols
            self.sizes.append(SizeRange(symbol, node, dim, is_stride, 0, INFINITY))


def _place_of(source: Source, flat: tuple[Any, ...], ids: dict[int, int]) -> tuple[int, bool, int]:
    """The node, whether it is a stride, and the dimension that a symbol is read from."""
    if type(source) in (SizeOf, StrideOf) and source.base is not None and _is_inside(source.base):
        return ids[id(source.base.fetch(flat))], type(source) is StrideOf, source.key
    raise refused(
        f"{source} may differ between calls", "a file takes sizes of tensors among the arguments alone"
    )


def name_of(path: tuple[Any, ...]) -> str:
    """An argument for people: its position or name, and its contents."""
    if len(path) < 2:
        return "the arguments"
    first, *rest = path[1:]
    return f"argument {first}" + "".join(f"[{key!r}]" for key in rest)


def _facts_of(
    tensor: torch.Tensor, spec: TensorSpec, absent: tuple[str, ...], facts: tuple[Any, ...]
) -> TensorFacts:
    name = next((name for name, cls in _CLASSES.items() if type(tensor) is cls), None)
    if name is None:
        raise refused(
            f"an argument is a {type(tensor).__name__}", "a file holds plain tensors", "pass a tensor"
        )
    return TensorFacts(name, spec, tensor.requires_grad, absent, facts)


def _asked(guards: Sequence[Any], flat: tuple[Any, ...], ids: dict[int, int]) -> Any:
    """The questions about arguments that need checks of their own: absent attributes, facts, and pairs that
    are two objects.
    """
    absent: dict[int, list[str]] = {}
    facts: dict[int, list[tuple[str, Any]]] = {}
    distinct: list[tuple[int, int]] = []
    for row in guards:
        moving = [source for source in row.sources if not source.is_held]
        # `ArgumentChecks.apart` and its sizes imply these, and torch.export checks sizes itself.
        if not moving or isinstance(row, NoOverlap | Apart | SizesHold):
            continue
        if isinstance(row, SameObject | Distinct) and all(map(_is_inside, moving)):
            if isinstance(row, SameObject) and len(moving) < 2:
                raise refused(
                    f"an argument, {moving[0]}, is an object that the program holds",
                    "a file holds a copy, which no argument can be",
                    "export with another example",
                )
            if isinstance(row, Distinct):
                nodes = [ids[id(source.fetch(flat))] for source in moving]
                distinct += [(a, b) for i, a in enumerate(nodes) for b in nodes[i + 1 :]]
        elif isinstance(row, _IMPLIED) and _is_inside(row.source):
            continue
        else:
            _ask(row, flat, ids, absent, facts)
    return absent, facts, distinct


def _ask(row: Any, flat: tuple[Any, ...], ids: dict[int, int], absent: Any, facts: Any) -> None:
    source = row.source
    owner = source.base.base if isinstance(source.base, InstanceDict) else source.base
    value = owner.fetch(flat) if owner is not None and _is_inside(owner) else None
    name = getattr(source.key, "__name__", source.key)
    if isinstance(value, torch.Tensor) and isinstance(row, Absent):
        absent.setdefault(ids[id(value)], []).append(name)
        return
    if isinstance(value, torch.Tensor) and isinstance(row, ConstEquals) and name in _FACTS:
        facts.setdefault(ids[id(value)], []).append((name, row.value))
        return
    if isinstance(row, Absent) and type(source) is DictItem and type(value) in (dict, OrderedDict):
        return  # the keys are checked
    raise refused(
        f"it asks an argument for more than a call is checked for ({row})", "a file has no such check"
    )


def _is_inside(source: Source) -> bool:
    """Whether a source is an argument, or an item of one."""
    if isinstance(source, Arg):
        return True
    return type(source) in (DictItem, SeqItem) and source.base is not None and _is_inside(source.base)
