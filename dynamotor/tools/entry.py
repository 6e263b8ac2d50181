"""The arguments of a packaged program must be as the examples were, in all that the program may look at.

A package has no guards of capture. Checks on plain data (`ArgumentChecks`) imply the guards of
arguments, or the export is refused: one structure with its types and keys, equal numbers and texts, tensors
of one class, layout, dtype and `requires_grad`, one tensor in two places where the examples were one.

>>> entry = ArgumentChecks.of(((x,), {"scale": 2.0}), guards, (x, 2.0))
>>> entry.tensors(((other,), {"scale": 2.0}))  # UsageError (DM115) where something differs
{2: other}
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    const_equal,
)
from ..capture.source import Arg, DictItem, InstanceDict, SeqItem, Source
from ..capture.symbolic_inputs import SizesHold
from ..graph.plain_data import NotPlain, encode, plain
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


@plain
@dataclass(frozen=True)
class TensorFacts:
    """The properties of a tensor argument that a program may read."""

    cls: str
    spec: TensorSpec
    requires_grad: bool
    absent: tuple[str, ...]  # attributes that it must not have
    facts: tuple[tuple[str, Any], ...]  # answers of `_FACTS`

    def check(self, tensor: Any, name: str) -> torch.Tensor:
        """The tensor, or UsageError (DM115)."""
        if type(tensor) is not _CLASSES[self.cls]:
            raise not_built_for(f"{name}, a {type(tensor).__name__}, but for a {self.cls}")
        found = tuple(tensor.shape), tensor.dtype, tensor.device
        if (
            found != (self.spec.shape, self.spec.dtype, self.spec.device)
            or tensor.layout is not torch.strided
        ):
            raise not_built_for(
                f"{name} of shape {list(tensor.shape)} and {tensor.dtype}, but for {self.spec}"
            )
        if tensor.stride() != self.spec.stride:
            raise not_built_for(
                f"{name} with strides {list(tensor.stride())}, but for {list(self.spec.stride)}",
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
        plain_tensor = tensor.detach().resolve_conj().resolve_neg()
        return (
            plain_tensor
            if plain_tensor.stride() == self.spec.stride
            else copy_as(plain_tensor, [*map(int, self.spec.stride)])
        )


@plain
@dataclass(frozen=True)
class ArgumentChecks:
    """The arguments of a program. nodes: path, kind and facts of each of `flatten`; same, distinct: pairs of
    nodes that are one object, or two.
    """

    nodes: tuple[tuple[tuple[Any, ...], str, Any], ...]
    same: tuple[tuple[int, int], ...]
    distinct: tuple[tuple[int, int], ...]

    @staticmethod
    def of(given: Any, guards: Sequence[Any], flat: tuple[Any, ...]) -> ArgumentChecks:
        """The checks for arguments like these. given: positional arguments and a dict of those by name; flat:
        both, as the guards' sources take them. Raises UsageError (DM114) if no check implies a guard on
        arguments.
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
        nodes: list[tuple[tuple[Any, ...], str, Any]] = []
        for k, (path, value) in enumerate(found):
            if isinstance(value, torch.Tensor):
                rows = absent.get(k, ()), facts.get(k, ())
                nodes.append((path, "tensor", _facts_of(value, *map(tuple, rows))))
            elif type(value) in _KINDS.values():
                nodes.append((path, type(value).__name__, len(value)))
            else:
                nodes.append((path, "value", value))
        entry = ArgumentChecks(tuple(nodes), tuple(same), tuple(distinct))
        try:
            encode(entry)
        except NotPlain as why:
            raise refused(
                f"an argument is {why}",
                "a call cannot be compared with it in another process",
                "pass tensors and plain values",
            ) from None
        return entry

    def tensors(self, given: Any) -> dict[int, torch.Tensor]:
        """The tensors of a call, by their nodes. UsageError (DM115) where it is not like the examples."""
        found = list(flatten(given))
        if len(found) != len(self.nodes):
            raise not_built_for("arguments of this structure")
        tensors = {}
        for k, ((path, value), (then, kind, fact)) in enumerate(zip(found, self.nodes, strict=True)):
            name = name_of(then)
            if not const_equal(path, then):
                raise not_built_for("arguments of this structure")
            if kind == "tensor":
                tensors[k] = fact.check(value, name)
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
        return tensors

    def tensor_nodes(self) -> list[int]:
        """The nodes that are tensors, in order."""
        return [k for k, (_, kind, _) in enumerate(self.nodes) if kind == "tensor"]


def name_of(path: tuple[Any, ...]) -> str:
    """An argument for people: its position or name, and its contents."""
    if len(path) < 2:
        return "the arguments"
    first, *rest = path[1:]
    return f"argument {first}" + "".join(f"[{key!r}]" for key in rest)


def _facts_of(tensor: torch.Tensor, absent: tuple[str, ...], facts: tuple[Any, ...]) -> TensorFacts:
    name = next((name for name, cls in _CLASSES.items() if type(tensor) is cls), None)
    if name is None:
        raise refused(
            f"an argument is a {type(tensor).__name__}", "a file holds plain tensors", "pass a tensor"
        )
    return TensorFacts(name, TensorSpec.of(tensor), tensor.requires_grad, absent, facts)


def _asked(guards: Sequence[Any], flat: tuple[Any, ...], ids: dict[int, int]) -> Any:
    """The questions about arguments that need checks of their own: absent attributes, facts, and pairs that
    are two objects.
    """
    absent: dict[int, list[str]] = {}
    facts: dict[int, list[tuple[str, Any]]] = {}
    distinct: list[tuple[int, int]] = []
    for row in guards:
        moving = [source for source in row.sources if not source.is_held]
        # Programs that write arguments are refused; a package has no symbols, and torch.export checks sizes.
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
