"""The partition: which values the forward saves for the backward, by a minimum cut over bytes.

Pointwise ops, views and random draws may run again in the backward; matrix products, convolutions and
reductions never do. The result never saves more bytes than eager's autograd would.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..graph.kernel_checks import PRODUCTS
from ..graph.nodes import move_before, needed_for, operand, overload
from ..graph.op_facts import facts, is_collective
from ..graph.size_nodes import is_size
from ..graph.sizes import hint
from ..graph.spec import FLOAT8, HALVES, TensorSpec, aten
from .extract import is_view, memory_root
from .joint import Joint
from .late_products import is_kept
from .maxflow import FlowNetwork
from .simplify import COPY_OF_INPUT, has_effect, is_attention

Node = torch.fx.Node
_NEVER = float(1 << 62)  # a capacity that no cut can afford

_MATRIX_PRODUCTS = PRODUCTS - {aten.convolution.default} | {aten._grouped_mm.default}
_WORTH_A_WRITE = 1 << 20  # bytes: to save less is not worth another write

# Cheap ops that carry no pointwise tag.
_RECOMPUTABLE = {
    aten.full.default,
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.scalar_tensor.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.copy.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.constant_pad_nd.default,
    aten.tril.default,
    aten.triu.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.where.self,
    aten.gelu_backward.default,
    aten.batch_norm_elemt.default,
    torch.ops.dynamotor.rand.default,
}


@dataclass(frozen=True)
class Partition:
    """`saved` values in joint order: inputs of the backward besides the tangents. Bytes count values other
    than an
    input.
    """

    saved: list[Node]
    saved_bytes: int
    eager_bytes: int

    def makes_again(self, node: Node) -> bool:
        """Whether the backward computes an operand again because it reads all that it is made of."""
        root = memory_root(node)
        return is_recomputable(root) and not _is_checkpointed(root) and not is_kept(node, self.saved)


def is_recomputable(node: Node) -> bool:
    """Whether the backward may run the op again instead of reading its saved result."""
    if node.op != "call_function" or COPY_OF_INPUT in node.meta:
        return False
    if is_size(node) or is_view(node) or node.target in _RECOMPUTABLE:
        return True
    if node.target is operator.getitem:
        return False
    about = facts(overload(node))
    return about.pointwise and not about.random


@dataclass(frozen=True)
class JointNodes:
    """A graph with a forward and a backward: its nodes in order, those of the backward, the results of the
    forward for the user (values and written inputs), and the results of the backward (None: all of its nodes
    are needed).

    kept: new contents of written inputs that outlive the forward in the inputs, which eager saves. lent:
    inputs that the program may write before the backward, through NumPy too, where nothing counts it.
    laid_out: those that `lay_out_early` gave.
    frugal: save memory at the cost of time. Operands of products are computed again too, and so written
    twice.
    """

    nodes: list[Node]
    backward: set[Node]
    values: list[Node]
    written: list[Node]
    grads: list[Node] | None
    frugal: bool = False
    kept: Sequence[Node] = ()
    laid_out: Collection[Node] = ()
    lent: frozenset[Node] = frozenset()


def partition(joint: Joint, static: frozenset[int]) -> Partition:
    """Choose the values of a joint graph that the forward saves. static: the inputs that are parameters and
    buffers.
    """
    backward = backward_of(joint)
    laid_out = lay_out_early(joint.gm.graph, backward)
    nodes = list(joint.gm.graph.nodes)
    grads = [node for node in joint.output[2] if node is not None]
    values, written = list(joint.output[0]), list(joint.output[1])
    kept = [node for i, node in zip(joint.mutated, written, strict=True) if i in joint.saved_written]
    lent = frozenset(
        node for i, node in enumerate(joint.inputs) if i not in static and i not in joint.gradient_of
    )
    both = JointNodes(nodes, backward, values, written, grads, kept=kept, laid_out=laid_out, lent=lent)
    cut, eager_bytes = choose_saved(both)
    saved = [node for node in nodes if node in cut or node.op == "placeholder" and is_size(node)]
    return Partition(saved, _bytes(saved), eager_bytes)


def backward_of(joint: Joint) -> set[Node]:
    """The nodes of the backward: what depends on a gradient that arrives, or on a collective that a
    gradient's formula starts (attention over ranks gathers its keys again), since ranks meet in eager's
    order.
    """
    nodes = list(joint.gm.graph.nodes)
    sent = [n for n in nodes if is_collective(n.target) and n.meta.get("stage") == "backward"]
    return dependents(nodes, [*joint.tangents, *sent])


def choose_saved(joint: JointNodes) -> tuple[set[Node], int]:
    """The values that the forward saves, and the bytes that eager's autograd would save. Mark the halves that
    have to be rounded, because forward and backward both compute them.
    """
    nodes, backward = joint.nodes, joint.backward
    grads = [] if joint.grads is None else joint.grads
    wanted = needed_for(list(backward) if joint.grads is None else grads)
    read = {arg for node in backward if node in wanted for arg in node.all_input_nodes}
    eager = {memory_root(node) for node in read.union(grads) - backward}
    eager = {node for node in eager if not is_size(node)}
    eager_bytes = _bytes(eager)
    cut = _minimum_cut(joint, wanted, set(grads), eager)
    if cut is None or _bytes(cut) > eager_bytes:
        cut = eager
    _round_twice(nodes, cut, {node for node in backward if node in wanted} | set(grads))
    return cut, eager_bytes


def _round_twice(nodes: list[Node], saved: set[Node], backward: set[Node]) -> None:
    """Mark halves that the backward computes again although it also reads saved values computed from them
    (the mean of a norm, and the norm itself). Both times they are rounded: a gradient that subtracts one from
    the other needs the same value in both.
    """
    again, behind = set[Node](), set[Node]()  # behind: something saved is made of them
    for node in reversed(nodes):
        users = [user for user in node.users if user.op != "output"]
        if node not in saved and (
            node in backward or any(user in backward or user in again for user in users)
        ):
            again.add(node)
        if any(
            user in saved
            and not (_is_half(user) and (is_recomputable(user) or user.target in PRODUCTS))
            or user in behind
            and (is_recomputable(user) or not _is_half(user))
            for user in users
        ):
            behind.add(node)
        if node in behind and node in again and _is_half(node):
            node.meta["rounded"] = True


def _is_half(node: Node) -> bool:
    return getattr(node.meta["val"], "dtype", None) in HALVES


def dependents(nodes: list[Node], roots: list[Node]) -> set[Node]:
    """The nodes that depend on the roots, the roots with them."""
    found = set(roots)
    for node in nodes:
        if node.op != "output" and any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


def _size(node: Node) -> float:
    val = node.meta["val"]
    return hint(val.nbytes) if isinstance(val, TensorSpec) else _NEVER


def _bytes(nodes: Any) -> int:
    return int(sum(_size(node) for node in nodes if node.op != "placeholder"))


def _minimum_cut(
    joint: JointNodes, wanted: set[Node], grads: set[Node], eager: set[Node]
) -> set[Node] | None:
    """Each candidate is an edge in → out with its bytes as capacity; the cut edges are the saved values.

    None when no cut separates forward and backward: that cannot happen, but need not be fatal.
    """
    nodes, backward = joint.nodes, joint.backward
    forward = needed_for([*joint.values, *joint.written])
    free = eager.intersection((*joint.values, *joint.kept))
    candidates = [node for node in nodes if node in wanted and node not in backward and node.op != "output"]
    index = {node: 2 * i for i, node in enumerate(candidates)}
    source, sink = 2 * len(candidates), 2 * len(candidates) + 1
    net = FlowNetwork(sink + 1)
    distance = _distances(candidates, backward)
    for node in candidates:
        a = index[node]
        net.edge(a, a + 1, 0.5 if node in free else _cost(node, distance[node]))
        if (
            node.op == "placeholder"
            or _must_stay(node, forward, joint, wanted)
            or node in forward
            and _reads_lent(node, joint.lent)
        ):
            net.edge(source, a, _NEVER)
        for user in node.users:
            if user in index:
                net.edge(a + 1, index[user], _NEVER)
            elif user in backward and user in wanted:
                net.edge(a + 1, sink, _NEVER)
        if node in grads:
            net.edge(a + 1, sink, _NEVER)
    if net.max_flow(source, sink) >= _NEVER:
        return None
    side = net.reachable(source)
    return {node for node in candidates if side[index[node]] and not side[index[node] + 1]}


def _distances(candidates: list[Node], backward: set[Node]) -> dict[Node, int]:
    """Steps from each candidate to its nearest use by the backward."""
    distance: dict[Node, int] = {}
    for node in reversed(candidates):
        distance[node] = min(
            [0 if user in backward else distance.get(user, 50) + 1 for user in node.users], default=50
        )
    return distance


def _cost(node: Node, distance: int) -> float:
    """What saving the node costs: bytes, more for values far from their use and for those that fusion would
    not write.

    Views are never saved (their memory's root is), inputs are kept for next to nothing.
    """
    if node.op == "placeholder":
        return 1.0
    if is_view(node) or not isinstance(node.meta["val"], TensorSpec) or _is_checkpointed(node):
        return _NEVER
    written_anyway = not is_recomputable(node) or any(
        not is_recomputable(user) and user.op != "output" for user in node.users
    )
    return (16.0 + _size(node)) * 1.1 ** min(distance, 50) * (1.0 if written_anyway else 2.0)


def _must_stay(node: Node, forward: set[Node], joint: JointNodes, wanted: set[Node]) -> bool:
    """Whether the op runs in the forward only: it is expensive, or the backward would have to write its
    result to memory anyway.
    """
    if _is_checkpointed(node):
        return False
    if _compares_rounded(node) or "saved" in node.meta and not is_view(node):
        return True
    if node in joint.laid_out and any(_opaque_readers(node, joint.backward, wanted)):
        return True  # the kernel that rounds writes both layouts
    if not is_recomputable(node):
        return node in forward or node.target is not operator.getitem
    if node not in forward or is_view(node):
        return False
    readers = list(_opaque_readers(node, joint.backward, wanted))
    if not readers or joint.frugal and _is_operand_alone(node, joint.backward):
        return False
    return not _is_by_product(node, readers, joint.backward & wanted)


def _is_by_product(node: Node, readers: list[Node], backward: set[Node]) -> bool:
    """Whether the value, which only products read, is made of values that kernels of the backward read anyway
    (that of a gate, for the gradients of its two operands): to compute it again costs its write alone.
    """
    if _size(node) < _WORTH_A_WRITE or not all(reader.target in _MATRIX_PRODUCTS for reader in readers):
        return False
    numel = _numel(node)
    parts = _made_of(node)
    whole = {part for part in parts if _numel(part) == numel}
    if any(part.op == "placeholder" for part in whole):  # a weight's update reads it elsewhere and later
        return False
    beside = all(_is_read_beside(part, numel, backward) for part in whole)
    return beside and all(part.op == "placeholder" or _numel(part) == 1 for part in parts - whole)


def _made_of(node: Node) -> set[Node]:
    """The sources of a value that is computed again: inputs, and results of ops that run once. Of parts of
    one, whose gradients are joined in memory, it is the whole.
    """
    found, stack = set[Node](), list(node.all_input_nodes)
    while stack:
        arg = stack.pop()
        if is_recomputable(arg):
            stack.extend(arg.all_input_nodes)
        elif not is_size(arg):
            found.add(arg)
    return found


def _is_read_beside(value: Node, numel: int, backward: set[Node]) -> bool:
    """Whether a pointwise op of the backward reads the value, or one that is computed from it again."""
    seen, stack = {value}, [value]
    while stack:
        for user in stack.pop().users:
            if user in seen or not is_view(user) and (not is_recomputable(user) or _numel(user) != numel):
                continue
            if user in backward and not is_view(user):
                return True
            seen.add(user)
            stack.append(user)
    return False


def _numel(node: Node) -> int:
    val = node.meta["val"]
    return hint(val.numel) if isinstance(val, TensorSpec) else 0


def lay_out_early(graph: torch.fx.Graph, backward: set[Node]) -> set[Node]:
    """Write numbers of float8 for products of the backward where the forward rounds them, so that one kernel
    does both: put these ops, with those that they alone need, before the product of the forward. Give the ops
    that write.
    """
    written = {
        node
        for node in graph.find_nodes(op="call_function", target=aten.clone.default)
        if is_laid_out_anew(node) and node not in backward and not any(map(_is_gathered, needed_for([node])))
    }
    if written:
        moved = {node for node in needed_for(written) if node.meta.get("stage") == "backward"}
        move_before(graph, moved, aten._scaled_mm.default)
    return written


def is_laid_out_anew(node: Node) -> bool:
    """Whether the op writes numbers of float8 in another order of dimensions, as a product of the backward
    wants them.
    """
    if node.target is not aten.clone.default or node.meta["val"].dtype not in FLOAT8:
        return False
    source = operand(node, 0)
    return source.meta["val"].stride != node.meta["val"].stride and memory_root(source).op == "call_function"


def _is_gathered(node: Node) -> bool:
    """Whether a value is there again for the backward without being saved: shards are gathered twice."""
    return node.op == "call_function" and (_is_checkpointed(node) or is_collective(node.target))


def _reads_lent(node: Node, lent: frozenset[Node]) -> bool:
    """Whether the op reads an input that may have other contents at the backward: its result is saved, as in
    eager. It is as small as the input, and ops on it may still run again.
    """
    if is_view(node) or is_size(node) or _is_checkpointed(node):
        return False
    return any(memory_root(arg) in lent for arg in node.all_input_nodes)


def _is_operand_alone(node: Node, backward: set[Node]) -> bool:
    """Whether the forward reads an activation in ops that fuse with nothing alone (what goes on beside them
    is at the end of a chain that would be computed again as a whole); weights are no activations.
    """
    if all(memory_root(arg).op == "placeholder" for arg in node.all_input_nodes):
        return False
    stack = [user for user in node.users if user not in backward]
    while stack:
        user = stack.pop()
        if is_view(user):
            stack.extend(user.users.keys() - backward)
        elif is_recomputable(user):
            return False
    return True


def _is_checkpointed(node: Node) -> bool:
    """Whether the program wants the op to run again in the backward, which it can where it draws from no
    generator.
    """
    if node.target is operator.getitem and is_collective(operand(node, 0).target):
        return "recompute" in operand(node, 0).meta  # the parts of a repeated gather
    if "recompute" not in node.meta or _compares_rounded(node):
        return False
    if node.target is operator.getitem or is_size(node):
        return True
    return not facts(overload(node)).random or is_attention(node) and not has_effect(node)


def _compares_rounded(node: Node) -> bool:
    """Whether floats are compared for equality, as the gradient of a maximum does to find it. Calculating
    them again may round them in another way: halves, and ops that share a kernel with a matrix product.
    """
    return node.target in (aten.eq.Tensor, aten.ne.Tensor) and any(map(_is_rounded, node.all_input_nodes))


def _is_rounded(node: Node) -> bool:
    root = memory_root(node)
    is_float = getattr(node.meta["val"], "dtype", torch.bool).is_floating_point
    return root.op != "placeholder" and (_is_half(node) or is_float and is_recomputable(root))


def _opaque_readers(node: Node, backward: set[Node], wanted: set[Node]) -> Iterator[Node]:
    """The ops of the backward that read the value from memory."""
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if is_view(user):
            stack.extend(user.users)
        elif (
            user in backward
            and user in wanted
            and not is_recomputable(user)
            and not _fuses_its_operands(user)
        ):
            yield user


def _fuses_its_operands(node: Node) -> bool:
    """Reductions whose kernels compute their operands, and a loss that asks for its operand's shape
    alone.
    """
    return node.target in (
        aten.sum.dim_IntList,
        aten.sum.default,
        aten.mean.dim,
        aten._log_softmax_backward_data.default,
        aten.nll_loss_backward.default,
    )
