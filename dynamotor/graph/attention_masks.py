"""Attention whose mask is computed in the graph: the formula of the mask chooses the kernel.

A causal mask becomes `is_causal`, a mask that hides nothing is left out, keys that no query sees are cut off,
and heads that are repeated for groups of queries become `enable_gqa`. Each replacement is proven for all
indices. Dead code elimination then removes the nodes that computed the mask.

>>> simplify_attention(gm, inputs)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base.config import config
from ..base.errors import InternalError
from ..base.events import counters, log
from .index_formulas import (
    CONDITIONS,
    Condition,
    NoFormula,
    Position,
    Read,
    affine,
    at_least,
    atoms,
    computed,
    negated,
    replaced,
)
from .mask_formula import Choice, Formulas, name_of
from .modes import UnderSettings
from .module import copied, graph_module
from .nodes import reached
from .sizes import equal, hint, known
from .spec import TensorSpec

Node = torch.fx.Node
ATTENTION = torch.nn.functional.scaled_dot_product_attention
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_NEGLIGIBLE = -1e30  # added to a score so that its weight is zero beside any visible key
_NEW = ("linear", "matmul", "add", "sub", "mul", "cat", "embedding")
_PLAIN_PRODUCTS = 0  # PyTorch's number for attention by plain products


@dataclass(frozen=True)
class Attention:
    """A call of attention: its node, arguments by name, and the metadata of query, key, value and mask.

    A call that stands for products of a program (`eager_attention.py`) may have sinks, in its metadata.
    """

    node: Node
    given: dict[str, Any]
    query: TensorSpec
    key: TensorSpec
    value: TensorSpec
    mask: TensorSpec | None

    @property
    def sinks(self) -> Node | None:
        """A score of each head that no value belongs to."""
        return self.node.meta.get("sinks")

    @property
    def places(self) -> tuple[Position, Position, Position, Position]:
        """Indices of batch, head, query and key."""
        batch, heads, rows, _ = self.query.shape
        return (
            Position("b", batch),
            Position("h", heads),
            Position("q", rows),
            Position("k", self.key.shape[2]),
        )


def simplify_attention(gm: torch.fx.GraphModule, inputs: Sequence[Any] = ()) -> dict[Node, Condition]:
    """Rewrite the calls of attention whose mask or repeated heads are understood. inputs: with
    `config.check` each formula is compared with the mask that the graph computes of them.

    Gives the calls that keep a mask whose formula is known, and which keys it shows.
    """
    calls = [call for node in gm.graph.nodes if (call := attention_call(node)) is not None]
    kept: dict[Node, Condition] = {}
    if not calls:
        return kept
    formulas, origins = Formulas(), Formulas(views=True)
    writes = Writes(gm)
    for call in calls:
        unwritten = functools.partial(writes.none_before, call.node)
        visible = _understood(gm, call, formulas, unwritten, inputs)
        if visible is not None:
            changed = _without_mask(call, visible)
            if changed is call:
                kept[call.node] = visible
            call = changed
        _with_groups(call, origins, unwritten)
    gm.recompile()
    return kept


def attention_call(node: Node) -> Attention | None:
    """The call that a node makes, if its tensors have the usual four dimensions."""
    function = node.target.function if isinstance(node.target, UnderSettings) else node.target
    if node.op != "call_function" or function is not ATTENTION:
        return None
    given = dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
    specs: list[Any] = [arg.meta.get("val") for arg in map(given.get, _NAMES[:3]) if isinstance(arg, Node)]
    if len(specs) < 3 or any(type(s) is not TensorSpec or len(s.shape) != 4 for s in specs):
        return None
    mask = given.get("attn_mask")
    found = mask.meta.get("val") if isinstance(mask, Node) else None
    if mask is not None and type(found) is not TensorSpec:
        return None
    query, key, value = specs
    return Attention(node, given, query, key, value, found)


# Nodes that write -------------------------------------------------------------------------------------------
def _writes(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") or "out" in node.kwargs
    assigned = node.target is operator.setitem or name in ("iadd", "isub", "imul", "iand", "ior", "ixor")
    return (
        node.op.startswith("call") and (in_place or assigned) and name not in ("and_", "or_", "not_", "is_")
    )


def _storage(node: Any, new: Sequence[str] = ()) -> set[Node]:
    """The node and those that it may be a view of. new: functions whose results are no views."""

    def above(n: Node) -> list[Node]:
        viewed = n.op.startswith("call") and name_of(n) not in new
        return [a for a in n.args[:1] if isinstance(a, Node) and viewed]

    return reached([node] if isinstance(node, Node) else [], above)


class Writes:
    """The nodes of a graph that write."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self._order = {node: i for i, node in enumerate(gm.graph.nodes)}
        self._into = {n: n.kwargs.get("out", *n.args[:1]) for n in gm.graph.nodes if _writes(n)}
        self._found = [(node, _storage(into)) for node, into in self._into.items()]

    def none_before(self, end: Node, nodes: set[Node]) -> bool:
        """Whether no write between the first of the nodes and the end can change one of them."""
        place = self._order
        start = min(map(place.__getitem__, nodes), default=place[end])
        memory = set().union(*map(_storage, nodes))
        return not any(start < place[node] < place[end] and memory & written for node, written in self._found)

    def may_change(self, node: Node) -> bool:
        """Whether one may write the node or a view of it."""
        return any(node in _storage(into, _NEW) for into in self._into.values())


# The mask ---------------------------------------------------------------------------------------------------
def _understood(
    gm: torch.fx.GraphModule, call: Attention, formulas: Formulas, unwritten: Any, inputs: Sequence[Any]
) -> Condition | None:
    """Which keys the call's mask shows; None where it has none, or no formula says it."""
    if call.mask is None:
        return None if call.sinks is None else True
    formulas.visited = set()
    try:
        visible = visible_keys(call, formulas)
    except NoFormula:
        return None
    if not unwritten(formulas.visited):
        return None
    if config.check:
        compare_with_mask(gm, call, visible, inputs)
    return visible


def _without_mask(call: Attention, visible: Condition) -> Attention:
    """The call without its mask, where that is another way of saying it."""
    kind = "full" if visible is True else "causal" if is_causal(call, visible) else ""
    kind = "" if call.sinks is not None else kind
    counters["attention masks"][kind or "kept"] += 1
    log("passes", lambda: f"attention mask {call.given['attn_mask']}: {visible}, {kind or 'kept'}")
    if not kind:
        return call
    given = dict(call.given, attn_mask=None, is_causal=kind == "causal")
    if kind == "causal":
        given |= _seen_keys(call)
    call.node.args, call.node.kwargs = tuple(given.pop(name) for name in _NAMES[:3]), given
    changed = attention_call(call.node)
    assert changed is not None
    return changed


def visible_keys(call: Attention, formulas: Formulas) -> Condition:
    """Which keys a query sees, as a condition of the call's places. Raises NoFormula."""
    spec = call.mask
    if spec is None or len(spec.shape) > 4 or call.given.get("is_causal"):
        raise NoFormula
    at = [affine(place) for place in call.places][4 - len(spec.shape) :]
    if not all(
        type(n) is int and n == 1 or equal(n, p.size)
        for n, p in zip(spec.shape, call.places[4 - len(at) :], strict=True)
    ):
        raise NoFormula
    value = formulas.value(call.given["attn_mask"], at)
    if isinstance(value, CONDITIONS):
        return value
    if type(value) is Choice and value.no == 0.0 and type(value.yes) is float:
        value = Choice(negated(value.condition), value.no, value.yes)
    if value == 0.0:
        return True
    if type(value) is not Choice or value.yes != 0.0 or type(value.no) is not float:
        raise NoFormula
    beside = call.sinks is not None or _sees_itself(call, value.condition)
    hides = value.no == -torch.inf or value.no < _NEGLIGIBLE and beside
    if not hides:
        raise NoFormula
    return value.condition


def _sees_itself(call: Attention, visible: Condition) -> bool:
    """Whether each query sees the key of its own number: beside one, -1e30 weighs nothing."""
    *_, q, k = call.places
    return known(">=", k.size - q.size) and replaced(visible, {k: affine(q)}) is True


def is_causal(call: Attention, visible: Condition) -> bool:
    """Whether query q sees the keys 0 to q and no others, as `is_causal` has it."""
    *_, q, k = call.places
    return visible == at_least(affine(q) - affine(k))


def _seen_keys(call: Attention) -> dict[str, Any]:
    """Keys and values without those behind the last query, which a causal mask hides from all."""
    rows, columns = call.query.shape[2], call.key.shape[2]
    if type(rows) is not int or not known(">=", columns - rows - 1):
        return {}
    cut = (slice(None), slice(None), slice(None, rows))
    found: dict[str, Any] = {}
    for name, spec in (("key", call.key), ("value", call.value)):
        with call.node.graph.inserting_before(call.node):
            node = call.node.graph.call_function(operator.getitem, (call.given[name], cut))
        shape = (*spec.shape[:2], rows, spec.shape[3])
        node.meta = {**call.given[name].meta, "val": replace(spec, shape=shape)}
        found[name] = node
    return found


def compare_with_mask(
    gm: torch.fx.GraphModule, call: Attention, visible: Condition, inputs: Sequence[Any]
) -> None:
    """Raise DM280 where the formula is not the mask that the graph computes of these inputs."""
    mask = call.given["attn_mask"]
    reads = sorted({atom.node for atom in atoms(visible) if type(atom) is Read}, key=str)
    needed = reached([mask, *reads], lambda n: n.all_input_nodes)
    graph = torch.fx.Graph()
    holders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    made = copied(graph, holders, [n for n in gm.graph.nodes if n in needed and n not in holders])
    graph.output(tuple(made[node] for node in (mask, *reads)))
    if len(holders) != len(inputs):
        return
    with torch.no_grad():
        real, *tensors = graph_module(graph)(*inputs)
    sizes = [call.query.shape[0], call.query.shape[1], call.query.shape[2], call.key.shape[2]]
    numbers = [hint(n) for n in sizes]
    axes = torch.meshgrid(*[torch.arange(n) for n in numbers], indexing="ij")
    found = evaluate(
        visible, dict(zip(call.places, axes, strict=True)), dict(zip(reads, tensors, strict=True))
    )
    wanted = real if real.dtype is torch.bool else real > _NEGLIGIBLE
    if not torch.equal(torch.as_tensor(found).expand(numbers), wanted.cpu().expand(numbers)):
        raise InternalError(
            "DM280",
            f"the mask {mask} is not {visible}",
            where=call.node.meta.get("where"),
            cure="this is a bug in dynamotor: please report it",
        )


def evaluate(condition: Condition, places: dict[Position, Any], tensors: dict[Node, torch.Tensor]) -> Any:
    """A condition at tensors of places."""

    def atom(item: Any) -> Any:
        if type(item) is Position:
            return places[item]
        if type(item) is Read:
            return tensors[item.node].cpu()[tuple(torch.as_tensor(computed(i, atom)) for i in item.at)].long()
        return item.size.hint

    return computed(condition, atom)


# Repeated heads ---------------------------------------------------------------------------------------------
def _with_groups(call: Attention, origins: Formulas, unwritten: Any) -> None:
    """Give the call the heads that its keys and values repeat."""
    heads = call.query.shape[1]
    if call.given.get("enable_gqa") or type(heads) is not int:
        return
    origins.visited = set()
    key, value = [_unrepeated(origins, call, name) for name in ("key", "value")]
    if key is None or value is None or not unwritten(origins.visited):
        return
    alike = equal(key.meta["val"].shape[1], value.meta["val"].shape[1])
    if alike and (call.sinks is not None or _has_kernels_for_groups(call, key, value)):
        given = dict(call.given, key=key, value=value, enable_gqa=True)
        call.node.args, call.node.kwargs = tuple([given.pop(name) for name in _NAMES[:3]]), given


def _unrepeated(origins: Formulas, call: Attention, name: str) -> Node | None:
    """The tensor of which an argument repeats each head for as many heads of queries."""
    node, heads = call.given[name], call.query.shape[1]
    shape = node.meta["val"].shape
    at = [affine(Position(letter, n)) for letter, n in zip("bhsd", shape, strict=True)]
    wanted = origins.value(node, at)
    for found in _views_above(node):
        below = found.meta["val"].shape
        if len(below) != 4 or type(below[1]) is not int or below[1] == heads or heads % below[1]:
            continue
        same = equal((below[0], *below[2:]), (shape[0], *shape[2:]))
        if same and origins.value(found, [at[0], at[1].divided(heads // below[1])[0], *at[2:]]) == wanted:
            return found
    return None


def _views_above(node: Node) -> Iterator[Node]:
    while node.op.startswith("call") and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
        if type(node.meta.get("val")) is not TensorSpec:
            return
        yield node


def _has_kernels_for_groups(call: Attention, key: Node, value: Node) -> bool:
    """Whether PyTorch has kernels with groups, and with the mask without them."""
    without = not _adds_a_mask(call) or _has_kernel(call, call.given["key"], call.given["value"])
    return without and _has_kernel(call, key, value, enable_gqa=True)


def _adds_a_mask(call: Attention) -> bool:
    """Whether numbers are added to the scores. Where they hide all keys of a row by the smallest number (no
    infinity), gradients of PyTorch's kernels are not those of its plain products: on a CPU they are larger by
    the number of keys.
    """
    return call.mask is not None and call.mask.dtype is not torch.bool


def _has_kernel(call: Attention, key: Node, value: Node, **groups: bool) -> bool:
    """Whether PyTorch has a kernel there, and would not take plain products."""
    choose: Any = torch.ops.aten._fused_sdp_choice.default
    if isinstance(call.node.target, UnderSettings):
        choose = UnderSettings(choose, call.node.target.settings)
    dtype = call.node.meta["val"].dtype
    specs = [call.query, key.meta["val"], value.meta["val"], *([] if call.mask is None else [call.mask])]
    tensors = [replace(spec.hinted(), dtype=dtype).empty() for spec in specs[:3]]
    tensors += [spec.hinted().empty() for spec in specs[3:]]
    if torch.is_grad_enabled():
        tensors[0].requires_grad_()
    given = {name: call.given[name] for name in ("dropout_p", "is_causal", "scale") if name in call.given}
    return choose(*tensors, **given, **groups) != _PLAIN_PRODUCTS
