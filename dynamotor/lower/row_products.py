"""Products of a few rows, where reading the weights takes the time: each row becomes sums over products.

    mm(x, t(w))                       # few rows of x, w is stored row by row
    mm(x, t(w).to(x.dtype) * s)       # bytes (int8, uint8) that are converted in the graph
    mm(x, t(stack([w & 15, w >> 4], -1).view(n, k)) * s)    # and those that hold several numbers

A product by a library needs converted weights in memory: written once and read once, at several times the
bytes. With few rows the memory's rate decides, so one kernel that reads the weights as they are, once,
computes all sums; loops over them fuse with what follows (a gate, an activation, a residual). With more rows
a library's blocking of registers is worth more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..base.compat import OpOverload
from ..graph.nodes import arguments, find_spec, in_order, operand, overload, spec_of, take_place
from ..graph.op_facts import facts
from ..graph.shapes import call
from ..graph.sizes import Dim, Size
from ..graph.spec import GraphInfo, TensorSpec, aten, numel
from .lowering import lowerings
from .realize import IN_MEMORY, READ_ONCE

# The most rows, by type of the product. Beyond them blocks of registers are worth more
# (codegen/product_cpp.py); for weights in bytes a library's, with instructions for bfloat16 from few rows on.
ROWS_CPU = {torch.float32: 2, torch.bfloat16: 2, torch.float16: 2}
NARROW_CPU = {torch.float32: 8, torch.bfloat16: 2, torch.float16: 4}  # of weights in bytes
ROWS_GPU = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 1)
# Of weights in bytes that are converted as they are: beyond 2 rows, and up to these, blocks of registers.
SUMMED_BYTES = 2
MOST_BYTES = {torch.float32: 128, torch.bfloat16: 24, torch.float16: 128}
LEAST = 1 << 16  # weights; below, a call costs more than their memory
NARROW = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
MOST_PARTS = 8  # numbers in a byte
_TRANSPOSED = (aten.t.default, aten.permute.default, aten.transpose.int)
_RESHAPED = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
Apart = dict[tuple[Any, ...], fx.Node]  # rows whose places are apart
_CHEAP = (
    aten._to_copy.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.stack.default,
    aten.cat.default,
)


def sum_row_products(gm: fx.GraphModule, info: GraphInfo, on_gpu: bool = False) -> None:
    """mm and addmm of few rows → sums, where the time is that of reading the weights."""
    known: Apart = {}
    for node in [n for n in gm.graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]:
        *bias, x, w = arguments(node)
        spec = spec_of(node)
        if node.kwargs:
            continue
        if not on_gpu and _multiplies_bytes(gm.graph, node, *bias):
            continue
        if spec.is_symbolic:
            continue
        narrow = is_narrow(w, node)
        if not _pays(spec, w, narrow, on_gpu):
            continue
        base_of(x).meta[IN_MEMORY] = True  # each program that sums reads all of the row
        with gm.graph.inserting_before(node):
            take_place(_sums(gm.graph, x, w, bias, spec.dtype, narrow and not on_gpu, known), node)


def _pays(spec: TensorSpec, w: fx.Node, narrow: bool, on_gpu: bool) -> bool:
    """Whether sums are faster than the library's product, a result of this spec."""
    if not on_gpu and spec.device.type != "cpu":
        return False
    most = ROWS_GPU if on_gpu else NARROW_CPU if narrow else ROWS_CPU
    few = 0 < spec.shape[0] <= most.get(spec.dtype, 0)
    return few and (narrow or lies_by_rows(w) and (on_gpu or base_of(w).op == "placeholder"))


def _multiplies_bytes(graph: fx.Graph, node: fx.Node, bias: fx.Node | None = None) -> bool:
    """mm(x, t(to_copy(w))) of bytes, of any or of several rows → byte_product(x, t(w)), where a call may have
    few rows. A converted weight would be kept beside w, and compared with it at each call.
    """
    *_, x, w = arguments(node)
    rows, spec = spec_of(x).shape[0], spec_of(node)
    most = MOST_BYTES.get(spec.dtype, 0)
    if not most or type(rows) is not Size and not SUMMED_BYTES < rows <= most:
        return False
    chain = [node]
    while w.target in _TRANSPOSED and w.users.keys() == {chain[-1]}:
        chain.append(w)
        w = operand(w, 0)
    if w.target is not aten._to_copy.default or w.users.keys() != {chain[-1]}:
        return False
    given = find_spec(operand(w, 0))
    if given is None or given.dtype not in (torch.int8, torch.uint8) or given.is_symbolic:
        return False
    if numel(given.shape) < LEAST or {n.meta["val"].dtype for n in (w, x)} != {spec.dtype}:
        return False
    if bias is not None and (len(spec_of(bias).shape) != 1 or spec_of(bias).dtype != spec.dtype):
        return False
    found, made = operand(w, 0), []
    with graph.inserting_before(node):
        for view in reversed(chain[1:]):
            found = call(graph, overload(view), found, *view.args[1:])
            made.append(found)
        fits = spec_of(found).stride[0] == 1  # a row of weights is contiguous
        if fits:
            take_place(call(graph, torch.ops.dynamotor.byte_product.default, x, found, bias), node)
    for unread in [] if fits else reversed(made):
        graph.erase_node(unread)
    return fits


def _source_of(x: fx.Node) -> tuple[fx.Node, tuple[Dim, ...]]:
    """The node whose elements, in order, a node shows under this shape."""
    shape = tuple(spec_of(x).shape)
    while x.target in _RESHAPED:
        x = operand(x, 0)
    return x, shape


def base_of(node: fx.Node) -> fx.Node:
    """The node that a view shows."""
    while isinstance(node.target, OpOverload) and facts(node.target).is_view:
        node = operand(node, 0)
    return node


def lies_by_rows(w: fx.Node) -> bool:
    """Whether weights in memory are contiguous along the sums."""
    spec = find_spec(w)
    return (
        spec is not None
        and not spec.is_symbolic
        and spec.stride[0] == 1
        and spec.shape[0] >= 256  # a program takes whole rows
        and int(numel(spec.shape)) >= LEAST
    )


def is_narrow(w: fx.Node, product: fx.Node) -> bool:
    """Whether a weight is computed for this product alone, from bytes and much smaller tensors."""
    count, bytes_seen = numel(spec_of(w).shape), False
    todo = [(w, product)]
    while todo:
        node, user = todo.pop()
        spec = find_spec(node)
        if spec is None or spec.is_symbolic:
            return False
        if numel(spec.shape) * 8 <= count:
            continue
        if spec.dtype in NARROW:
            bytes_seen = True
        elif node.users.keys() != {user} or not _is_fused(node):
            return False
        else:
            todo += [(operand, node) for operand in node.all_input_nodes]
    return bytes_seen and int(count) >= LEAST


def _is_fused(node: fx.Node) -> bool:
    """Whether a node is computed in the kernel that reads it."""
    if node.op != "call_function" or node.target not in lowerings:
        return False
    return node.target in _CHEAP or facts(overload(node)).is_view or facts(overload(node)).pointwise


def _sums(
    graph: fx.Graph,
    x: fx.Node,
    w: fx.Node,
    bias: list[fx.Node],
    dtype: torch.dtype,
    convert: bool,
    known: Apart,
) -> fx.Node:
    """The rows of x times w, each as one sum over w's rows, computed in float32. convert: the rows of x are
    converted before all sums and not in each. known: rows that are apart.
    """

    def wide(value: fx.Node) -> fx.Node:
        if value.target is aten._to_copy.default and spec_of(operand(value, 0)).dtype in NARROW:
            value = operand(value, 0)  # halves hold every byte
        if spec_of(value).dtype == torch.float32:
            return value
        return call(graph, aten._to_copy.default, value, dtype=torch.float32)

    columns, rows = [wide(column) for column in columns_of(graph, w)], []
    _read_once(columns)
    period = len(columns)
    places = None if convert or period == 1 else apart(graph, x, period, known)
    for n in range(spec_of(x).shape[0]):
        row = call(graph, aten.select.int, x, 0, n)
        total = None
        for start, weights in enumerate(columns):
            if places is not None:
                whole = call(graph, aten.select.int, places, 0, start)
                factors = wide(call(graph, aten.select.int, whole, 0, n))
            else:
                factors = wide(_every(graph, row, period, start))
            if convert and period > 1 and factors.target is aten.slice.Tensor:
                factors = call(graph, aten.clone.default, factors)  # each program loads whole vectors of it
            if convert and factors.op == "call_function":
                factors.meta[IN_MEMORY] = True
            products = call(graph, aten.mul.Tensor, weights, call(graph, aten.unsqueeze.default, factors, 1))
            part = call(graph, aten.sum.dim_IntList, products, [0])
            total = part if total is None else call(graph, aten.add.Tensor, total, part)
        rows.append(call(graph, aten.unsqueeze.default, total, 0))
    result = rows[0] if len(rows) == 1 else call(graph, aten.cat.default, rows)
    for addend in bias:
        result = call(graph, aten.add.Tensor, result, wide(addend))
    return result if dtype == torch.float32 else call(graph, aten._to_copy.default, result, dtype=dtype)


def apart(graph: fx.Graph, x: fx.Node, numbers: int, known: Apart) -> fx.Node:
    """The rows, once for each number of a byte: the places that are multiplied with this number, in memory
    side by side, so that each program loads whole vectors.
    """
    if numbers == 1:
        return call(graph, aten.unsqueeze.default, x, 0)
    key = (*_source_of(x), numbers)
    if key not in known:
        rows, inner = spec_of(x).shape
        found = call(graph, aten.reshape.default, x, [rows, inner // numbers, numbers])
        found = call(graph, aten.permute.default, found, [2, 0, 1])
        known[key] = call(graph, aten.clone.default, found, memory_format=torch.contiguous_format)
        known[key].meta[IN_MEMORY] = True
    return known[key]


def columns_of(graph: fx.Graph, w: fx.Node) -> list[fx.Node]:
    """A weight that is computed from bytes, as one matrix for each number of a byte."""
    period = numbers_of(w)
    return [w] if period == 1 else [_column(graph, w, period, i) for i in range(period)]


def _read_once(weights: list[fx.Node]) -> None:
    """Let weights be computed in the sums alone: constants of them would be read, and compared with their
    sources at each call.
    """
    todo = list(weights)
    while todo:
        node = todo.pop()
        if node.op == "call_function" and READ_ONCE not in node.meta:
            node.meta[READ_ONCE] = True
            todo += node.all_input_nodes


def _every(graph: fx.Graph, value: fx.Node, period: int, start: int) -> fx.Node:
    """Each `period`-th element along the first dimension."""
    if period == 1:
        return value
    length = spec_of(value).shape[0]
    return call(graph, aten.slice.Tensor, value, 0, start, length, period)


def numbers_of(w: fx.Node) -> int:
    """How many numbers beside one another along the sums are parts of one byte: each is unpacked by shifts of
    its own, so their sums are taken apart, and no vector has elements of several kinds.
    """
    todo, length = [w], spec_of(w).shape[0]
    while todo:
        node = todo.pop()
        if node.target is aten.stack.default:
            parts, dim = arguments(node)[0], (*arguments(node), 0)[1]
            rank = len(spec_of(node).shape)
            if dim % rank == rank - 1 and len(parts) <= MOST_PARTS and length % len(parts) == 0:
                return len(parts)
        elif node.op == "call_function" and find_spec(node) is not None and _is_fused(node):
            todo += [n for n in node.all_input_nodes if find_spec(n) is not None]
    return 1


def _column(graph: fx.Graph, w: fx.Node, period: int, start: int) -> fx.Node:
    """Each `period`-th element of a weight, computed by calls of its own: what two read is kept in memory."""
    count = numel(spec_of(w).shape)
    made: dict[fx.Node, fx.Node] = {}

    def is_copied(node: fx.Node) -> bool:
        spec = find_spec(node)
        return spec is not None and numel(spec.shape) * 8 > count and _is_fused(node)

    for node in in_order([w], lambda n: n.all_input_nodes if is_copied(n) else ()):
        if is_copied(node):
            made[node] = graph.node_copy(node, lambda n: made.get(n, n))
    return call(graph, aten.clone.default, _every(graph, made[w], period, start))
