"""Which values of a graph become memory: buffers, and the nodes and aten calls that fill them, in order.

A value read in several places is computed again in each where that is cheap, and kept else; `Realizer`
decides when an op's value is made (`settle`) and when something needs memory (`realize`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx

from ..base.config import config
from ..graph.nodes import spec_of
from ..graph.sizes import Dim, ShapeEnv, Size, equal
from ..graph.spec import GraphInfo, TensorSpec, contiguous_stride, numel
from .index_expr import Index, Var, is_one
from .ir import (
    COMPUTE_TYPE,
    Expr,
    ExternNode,
    LoopNode,
    loads_of,
    memory_of,
    total_cost,
    walk,
)
from .program import Buffer, BufferKind, BufRef, ExternStep
from .value import LoopValue, is_dense

# A value read in several places is computed again in each when it costs no more than this, otherwise it is
# kept.
CHEAP_COST, CHEAP_LOADS = 6, 2
# In half precision keeping rounds: a residual stream that is added up again from more parts is rounded less
# often.
CHEAP_HALF_COST, CHEAP_HALF_LOADS = 8, 4
# An expression larger than this becomes real even with one reader, so that kernels stay of a size that
# compiles fast.
MAX_COST, MAX_LOADS = 400, 12
# A launch of a GPU takes longer than to read so many bytes from its cache: values that read no more may read
# so many elements, and up to this cost (less than a random number's) they are computed again where keeping
# them would be a launch of its own.
LAUNCH_BYTES, LAUNCH_LOADS, LAUNCH_COST = 1 << 22, 32, 30
# The same of operations one behind the other: what walks an expression goes as deep.
MAX_DEPTH = 100
IN_MEMORY = "in memory"  # key of a node's meta: its value is not computed again by each reader
READ_ONCE = "read_once"  # in `meta`: computed where it is read, never kept: its operands take less memory
CLONE, CLONE_OUT = torch.ops.aten.clone.default, torch.ops.aten.clone.out
# Views pass their readers' count on to their bases.
VIEW_OPS = frozenset(
    [
        "view",
        "reshape",
        "_unsafe_view",
        "permute",
        "transpose",
        "t",
        "expand",
        "squeeze",
        "unsqueeze",
        "slice",
        "select",
        "alias",
        "detach",
        "split",
        "split_with_sizes",
        "unbind",
        "chunk",
    ]
)
# Ops that look at the shape alone of one operand.
SHAPE_ONLY: dict[Any, int] = {torch.ops.aten.nll_loss_backward.default: 1}


class Realizer:
    """The buffers, loop nodes and extern calls so far of one graph that is being lowered."""

    def __init__(self, info: GraphInfo, env: ShapeEnv | None = None) -> None:
        self.info, self.env, self.is_symbolic = info, env, env is not None
        self.buffers: dict[str, Buffer] = {}
        self.schedule: list[LoopNode | ExternNode] = []
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        self.outputs: frozenset[fx.Node] = frozenset()
        self.node: fx.Node  # that is being lowered, and its spec
        self.spec: Any = None
        self.mutated: list[str] = []
        self.known: dict[fx.Node, Any] = {}  # values of the nodes so far
        self.order: dict[fx.Node, int] = {}
        self.targets: frozenset[str] = frozenset()  # inputs that get new contents
        self.claimed: dict[str, str] = {}  # copies made to be written, and their sources: see `in_place.py`
        self.copies: dict[str, LoopNode | ExternNode] = {}  # what makes them
        self.within: dict[str, list[BufRef]] = {}  # views of such a copy that show all that is written to it
        self.values: dict[str, BufRef] = {}
        self.on_gpu = config.target == "triton"  # or some tensor of the graph is on one

    def calls_aten(self, node: fx.Node) -> bool:
        """Whether the node becomes an aten call (or the output), which reads memory."""
        raise NotImplementedError

    def new_buffer(
        self,
        spec: TensorSpec,
        kind: BufferKind = "temp",
        name: str | None = None,
        value: torch.Tensor | None = None,
    ) -> Buffer:
        """A buffer with a name of its own."""
        name = name or f"buf{len(self.buffers)}"
        self.buffers[name] = buffer = Buffer(name, spec, kind, value)
        return buffer

    def add(self, node: LoopNode | ExternNode) -> None:
        """Append to the schedule."""
        if isinstance(node, LoopNode):
            node.evaluate()
            node.phase = self.node.meta.get("phase", "")
        self.schedule.append(node)

    def realize(self, x: LoopValue, stride: Sequence[Dim] | None = None) -> BufRef:
        """Give the value memory (with these strides when it is made now) and return its buffer."""
        ref = x.ref
        if ref is not None:
            return ref
        root = x.root()
        if root is not x and root.ref is None:
            self.realize(root)
            if x.ref is not None:
                return x.ref
        stride = tuple(stride or x.stride or contiguous_stride(x.shape))
        spec = TensorSpec(x.shape, stride, x.dtype)
        if not is_dense(spec):
            spec = TensorSpec.dense(x.shape, x.dtype)
        buffer = self.new_buffer(spec)
        body = x.base_body() if x.body is None else x.body
        self.add(
            LoopNode(
                buffer.name, x.shape, body, spec.stride, memory_of(x.dtype), origin=x.origin or str(self.node)
            )
        )
        ref = BufRef.whole(buffer)
        x.become(ref)
        return ref

    def copy(self, x: LoopValue, stride: Sequence[Dim]) -> BufRef:
        """A new buffer with exactly these strides, holding x."""
        spec = TensorSpec(x.shape, tuple(stride), x.dtype)
        buffer = self.new_buffer(spec)
        memory = memory_of(x.dtype)
        if memory in COMPUTE_TYPE:
            self.add(
                LoopNode(buffer.name, x.shape, x.at, spec.stride, memory, origin=f"copy for {self.node}")
            )
        else:
            ref = self.realize(x)
            step = ExternStep(CLONE, (ref,), {}, (buffer.name,), CLONE_OUT)
            self.add(ExternNode(step, frozenset({ref.name}), (buffer.name,)))
        return BufRef.whole(buffer)

    def probe(self, x: LoopValue) -> Expr:
        """The value's expression at an index of its own variables."""
        return x.at(tuple(Index.of(Var(f"p{d}", n)) for d, n in enumerate(x.shape)))

    def keep(self, x: LoopValue) -> LoopValue:
        """Make x real unless computing it again is cheap: for rules that read it in several loops."""
        if x.ref is None:
            if not _is_cheap(x, self.probe(x)):
                self.realize(x)
        return x

    def whole(self, x: LoopValue) -> LoopValue:
        """x, made real if it reads at computed positions: who reads a part of it would not look at the other
        positions.
        """
        if x.ref is None and any(e.op == "wrap_index" for e in walk(self.probe(x))):
            self.realize(x)
        return x

    def keep_if_heavy(self, x: LoopValue) -> None:
        """Make x real when it costs more than a few additions: for readers that are larger than it."""
        if x.ref is None and total_cost(self.probe(x)) > CHEAP_COST:
            self.realize(x)

    def settle(self, x: LoopValue, node: fx.Node) -> None:
        """Decide, when an op's value is made, whether it becomes real."""
        spec = node.meta["val"]
        if x.body is None:
            if node in self.outputs and x.ref is None:
                self.realize(x, spec.stride)
            return
        x.stride, x.origin = spec.stride, str(node)
        readers = self.readers[node]
        if node in self.outputs or node.meta.get(IN_MEMORY):
            self.realize(x)
            return
        if not readers:
            return
        e = self.probe(x)
        cost, count, small = total_cost(e), len(loads_of(e)), self.on_gpu and _is_small(x, e)
        again = _is_cheap(x, e) or small and cost <= LAUNCH_COST and _is_seen_apart(node)
        shared = len(readers) > 1 and (not again or any(self.calls_aten(r) for r in readers))
        most = LAUNCH_LOADS if small else MAX_LOADS
        if shared or cost > MAX_COST or count > most or e.depth > MAX_DEPTH:
            self.realize(x)


def _is_cheap(x: LoopValue, e: Expr) -> bool:
    half = x.dtype.is_floating_point and x.dtype.itemsize == 2
    cost, loads = (CHEAP_HALF_COST, CHEAP_HALF_LOADS) if half else (CHEAP_COST, CHEAP_LOADS)
    return total_cost(e) <= cost and len(loads_of(e)) <= loads


def _is_small(x: LoopValue, e: Expr) -> bool:
    """Whether a value reads so few bytes that a launch takes longer."""
    loads = loads_of(e)
    if len(loads) > LAUNCH_LOADS or any(type(n) is Size for n in x.shape):
        return False
    itemsize: int = sum(load.args[2].itemsize for load in loads)
    return int(numel(x.shape)) * itemsize <= LAUNCH_BYTES


def _is_seen_apart(node: fx.Node) -> bool:
    """Whether readers see different parts of a value, some elements more than once: no kernel that computes
    the value can have all of them.
    """
    whole = numel(spec_of(node).shape)
    seen = [numel(spec_of(view).shape) for view in _views_read(node)]
    return min(seen, default=whole) < whole < sum(seen)


def _views_read(node: fx.Node) -> Iterator[fx.Node]:
    """The node and the views of it that other calls read, once for each reader."""
    for user in node.users:
        if _is_view(user):
            yield from _views_read(user)
        else:
            yield node


def _is_view(node: fx.Node) -> bool:
    """Whether a call passes its readers on to its operand."""
    packet = getattr(node.target, "overloadpacket", None)
    named = packet is not None and packet.__name__ in VIEW_OPS
    return node.op == "call_function" and (named or type(node.target) is BuiltinFunctionType)


def count_readers(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node the calls that read it, looking through views."""
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        found: list[fx.Node] = []
        for user in node.users:
            if user.target in SHAPE_ONLY and [n for n, a in enumerate(user.args) if a is node] == [
                SHAPE_ONLY[user.target]
            ]:
                continue
            found += readers[user] if _is_view(user) else [user]
        readers[node] = found
    return readers


def same_layout(ref: BufRef, stride: Sequence[Dim]) -> bool:
    """Whether a view has these strides where its sizes are not 1."""
    return all(equal(a, b) for n, a, b in zip(ref.shape, ref.stride, stride, strict=True) if not is_one(n))
