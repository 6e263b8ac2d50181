"""Keeps rows in the order of ranks between a gather of parts of a sequence and a scatter, where all that is
computed between them treats rows alike: a tensor parallel MLP and its gradients. The copies that bring rows
into the order of the batch, and back, are views then.

>>> keep_rank_order(gm)     # cat(chunks of a gather, 1)  ->  view(gather); cat(chunks of y, 0)  ->  view(y)
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from ..base.compat import OpOverload
from ..graph.nodes import arguments
from ..graph.op_facts import facts
from ..graph.spec import TensorSpec

Node = fx.Node
aten, _ops = torch.ops.aten, torch.ops._c10d_functional
_ALIKE = frozenset((aten.clone.default, aten._to_copy.default))  # beside ops with the pointwise tag
_VIEWS = frozenset((aten.view.default, aten._unsafe_view.default, aten.reshape.default))
ROWS, ACROSS = "rows", "across"  # rows come first; a matrix of them is transposed
_OF_PRODUCTS: dict[tuple[str, ...], str] = {(ROWS, ""): ROWS, (ACROSS, ROWS): ""}


def _shape(node: Node) -> tuple[int, ...]:
    """The sizes of a tensor; () of another node, and where sizes differ between calls."""
    spec = node.meta.get("val")
    sizes = spec.shape if isinstance(spec, TensorSpec) else ()
    return tuple([n for n in sizes if type(n) is int]) if all(type(n) is int for n in sizes) else ()


def _part(node: Node) -> tuple[Node, int, int] | None:
    """The tensor of which a node is a part, along which dimension, and from where on."""
    given = arguments(node)
    if node.target is operator.getitem and given[0].target is aten.split.Tensor:
        x, size, *dims = arguments(given[0])
        return (x, dims[0] if dims else 0, given[1] * size) if _shape(x) else None
    if node.target is aten.slice.Tensor and len(given) == 4 and _shape(given[0]):
        return given[0], given[1], given[2]
    return None


def _reordered(node: Node, whole: int, joined: int) -> Node | None:
    """x, for `cat(parts of all of x along `whole`, joined)`."""
    nodes, *dims = arguments(node) if node.target is aten.cat.default and _shape(node) else ((),)
    end, of = 0, None
    for part in nodes if (dims or [0]) == [joined] else ():
        found = _part(part)
        if found is None or found[0] is not (of or found[0]) or found[1:] != (whole, end):
            return None
        of, end = found[0], end + _shape(part)[whole]
    return of if of is not None and end == _shape(of)[whole] else None


def _gathered(node: Node) -> Node | None:
    """The gather whose parts of rows a node brings into the order of the batch."""
    found = _reordered(node, 0, 1)
    start = found.args[0] if found is not None and found.target is _ops.wait_tensor.default else None
    return found if getattr(start, "target", None) is _ops.all_gather_into_tensor.default else None


def _scattered(node: Node) -> Node | None:
    """The rows that a node brings into the order of ranks, for scatters alone."""
    found = _reordered(node, 1, 0)
    alone = all(user.target is _ops.reduce_scatter_tensor.default for user in node.users)
    return found if alone and found is not None and found.meta["val"].is_contiguous else None


def _is_for_scatters(node: Node) -> bool:
    """Whether parts of rows are scattered, and nothing else."""
    parts = list(node.users) if node.target is aten.split.Tensor else [node]
    cats = {user for part in parts for user in part.users}
    return all(map(_part, parts)) and all(_scattered(cat) is node.args[0] for cat in cats)


class Rows:
    """The nodes of a graph that may have rows in the order of ranks: a kind, and the batch's sizes. Nodes
    that depend on each other are a set, which is left as it is as a whole.
    """

    def __init__(self) -> None:
        self.kinds: dict[Node, str] = {}
        self.of: dict[Node, tuple[int, int]] = {}
        self.gathers: dict[Node, Node] = {}
        self._parents: dict[Node, Node] = {}
        self._left: set[Node] = set()

    def root(self, node: Node) -> Node:
        """What stands for the node's set."""
        while (parent := self._parents.get(node, node)) is not node:
            node = parent
        return node

    def leave(self, node: Node) -> None:
        """Let this set be as it is."""
        self._left.add(self.root(node))

    def is_kept(self, node: Node) -> bool:
        """Whether the set may be in the order of ranks."""
        root = self.root(node)
        return all(self.root(left) is not root for left in self._left)

    def lead(self, node: Node, rows: tuple[int, int]) -> int:
        """How many dimensions are rows; 0: rows do not come first."""
        shape = _shape(node)
        return 2 if shape[:2] == rows else int(shape[:1] == (math.prod(rows),))

    def visit(self, node: Node) -> None:
        """Look at a node behind those that it reads."""
        gathered = _gathered(node)
        if gathered is not None:
            self.kinds[node], self.gathers[node] = ROWS, gathered
            self.of[node] = _shape(node)[0], _shape(node)[1]
        given = [arg for arg in node.all_input_nodes if arg in self.kinds]
        if gathered is not None or not given or _is_for_scatters(node):
            return
        for other in given[1:]:
            self._parents[self.root(other)] = self.root(given[0])
        rows = self.of[given[0]]
        same = node.op == "call_function" and all(self.of[other] == rows for other in given)
        kind = self._kind(node, rows) if same else None
        if kind is None:
            self.leave(given[0])
        elif kind:
            self.kinds[node], self.of[node], self._parents[node] = kind, rows, self.root(given[0])

    def _kind(self, node: Node, rows: tuple[int, int]) -> str | None:
        """The kind of a result; "" of one without rows, None where rows are not alike."""
        first, *others = [arg for arg in node.args if isinstance(arg, Node)] or [node]
        kinds = [self.kinds.get(arg, "") for arg in (first, *others)]
        shape, lead = _shape(node), self.lead(node, rows)
        if node.target in _VIEWS:
            return ROWS if kinds == [ROWS] and lead else None
        if node.target is aten.t.default:
            return ACROSS if kinds == [ROWS] and self.lead(first, rows) == 1 else None
        if node.target is aten.mm.default:
            flat = all(self.lead(arg, rows) == 1 for arg in (first, *others) if self.kinds.get(arg) == ROWS)
            return _OF_PRODUCTS.get(tuple(kinds)) if flat else None
        if node.target is aten.addmm.default:
            flat = len(_shape(first)) == 1 and self.lead(others[0], rows) == 1
            return ROWS if kinds == ["", ROWS, ""] and flat else None
        if node.target is aten.sum.dim_IntList:
            dims = list(range(self.lead(first, rows)))
            return "" if kinds == [ROWS] and dims and node.args[1] == dims else None
        about = facts(node.target) if isinstance(node.target, OpOverload) else None
        alike = node.target in _ALIKE or about is not None and about.pointwise and not about.random
        if not alike or not lead or ACROSS in kinds:
            return None
        beside = [arg for arg, kind in zip((first, *others), kinds) if not kind]
        whole = [_shape(arg) for arg, kind in zip((first, *others), kinds) if kind]
        same = all(arg.target is aten.full.default or len(_shape(arg)) <= len(shape) - lead for arg in beside)
        return ROWS if same and all(own == shape for own in whole) else None


def keep_rank_order(gm: fx.GraphModule) -> None:
    """The pass over a joint graph."""
    cats = gm.graph.find_nodes(op="call_function", target=aten.cat.default)
    if not any(map(_gathered, cats)):
        return
    found = Rows()
    for node in gm.graph.nodes:
        found.visit(node)
    for cat in cats:
        gathered, scattered = found.gathers.get(cat), _scattered(cat)
        if gathered is not None and (_shape(cat)[0] == 1 or found.is_kept(cat)):
            _replace(cat, gathered)
        elif scattered is not None and (
            _shape(scattered)[0] == 1 or scattered in found.kinds and found.is_kept(scattered)
        ):
            _replace(cat, scattered)


def _replace(cat: Node, source: Node) -> None:
    with cat.graph.inserting_before(cat):
        view = cat.graph.call_function(aten.view.default, (source, list(_shape(cat))))
    view.meta = dict(cat.meta)
    cat.replace_all_uses_with(view)
    parts = list(cat.all_input_nodes)
    for node in (cat, *parts, *dict.fromkeys(part.args[0] for part in parts)):
        if isinstance(node, Node) and not node.users:
            node.graph.erase_node(node)
