"""Products of half precision whose rows do not fill 16 bytes are padded: cuBLAS runs them at a fraction of
its rate otherwise.

    logits = mm(h, w.t())            # w: 50257 x 768
    logits = mm(h, pad(w, 7 rows).t())[:, :50257]

The rule: a dimension along which an operand or the result is contiguous has a size that 8 does not divide,
and all three sizes are large, so that one more pass over an operand costs little beside the product. Results
stay views of the padded ones, also when they are saved for the backward; only the user's outputs are copied
into eager's strides.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..base.config import config
from ..graph.nodes import arguments, find_spec, operand, spec_of, take_place
from ..graph.shapes import call
from ..graph.sizes import hint
from ..graph.spec import HALVES, GraphInfo, TensorSpec, aten
from .channels_last import give_strides_back, inferred_again, restore_outputs
from .pass_helpers import looks_at_another, output_node

ALIGNED = 8  # elements of 2 bytes in what tensor cores load at once
TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)


def pad_products(gm: fx.GraphModule, info: GraphInfo) -> None:
    """mm and addmm with sizes that are multiples of 8 along contiguous dimensions, their results sliced."""
    graph, output = gm.graph, output_node(gm.graph)
    promised = {node: node.meta["val"] for node in output.all_input_nodes}
    known: dict[tuple[fx.Node, int, int], fx.Node] = {}
    changed: dict[fx.Node, TensorSpec] = {}  # values in another layout than eager's, with eager's spec
    for node in [n for n in graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]:
        more = _missing(node)
        if more is None:
            continue
        with graph.inserting_before(node):
            result = _padded_product(graph, node, more, known)
        changed[result] = node.meta["val"]
        if node in promised:
            promised[result] = promised.pop(node)
        take_place(result, node)
    if changed:
        _spread_strides(graph, changed)
        restore_outputs(graph, output, promised, info)
        _save_without_copy(output, info)


def _missing(node: fx.Node) -> tuple[int, int, int] | None:
    """What rows, inner size and columns of a product lack to multiples of 8; None when it stays as it is."""
    a, b = (find_spec(arg) for arg in node.args[-2:])
    if (
        a is None
        or b is None
        or a.dtype not in HALVES
        or min(map(hint, (*a.shape, *b.shape))) < config.pad_products_from
    ):
        return None
    if node.target is aten.addmm.default and spec_of(operand(node, 0)).shape != b.shape[1:]:
        return None
    first, second = _contiguous(a), _contiguous(b)
    if first is None or second is None:
        return None
    lacking = {(0, 1)[first], (1, 2)[second], 2}
    rows, inner, columns = (
        -n % ALIGNED if d in lacking and type(n) is int else 0 for d, n in enumerate((*a.shape, b.shape[1]))
    )
    return (rows, inner, columns) if rows or inner or columns else None


def _contiguous(spec: TensorSpec) -> int | None:
    """The dimension along which a matrix is contiguous."""
    return next((d for d in (1, 0) if spec.stride[d] == 1), None)


def _padded_product(
    graph: fx.Graph, node: fx.Node, more: tuple[int, int, int], known: dict[Any, fx.Node]
) -> fx.Node:
    *bias, a, b = (operand(node, position) for position in range(len(node.args)))
    rows, inner, columns = more
    if bias and columns:
        bias = [call(graph, aten.constant_pad_nd.default, bias[0], [0, columns])]
    operands = (*bias, _padded(graph, a, rows, inner, known), _padded(graph, b, inner, columns, known))
    result = call(graph, node.target, *operands, **node.kwargs)
    for dim, extra, size in ((0, rows, spec_of(a).shape[0]), (1, columns, spec_of(b).shape[1])):
        if extra:
            result = call(graph, aten.slice.Tensor, result, dim, 0, size)
    return result


def _padded(graph: fx.Graph, x: fx.Node, rows: int, columns: int, known: dict[Any, fx.Node]) -> fx.Node:
    """A matrix with zeros below and to the right, contiguous along the same dimension; made once for all that
    want it.
    """
    if not rows and not columns:
        return x
    if _contiguous(spec_of(x)) == 0:
        turned = operand(x, 0) if x.target in TRANSPOSES else call(graph, aten.t.default, x)
        return call(graph, aten.t.default, _padded(graph, turned, columns, rows, known))
    key = x, rows, columns
    if key not in known:
        known[key] = call(graph, aten.constant_pad_nd.default, x, [0, columns, 0, rows])
    return known[key]


def _save_without_copy(output: fx.Node, info: GraphInfo) -> None:
    """Saved values were copied because the user had the memory that they view; now the user has a copy."""
    values = list(arguments(output)[0])
    memory = [_memory(value) for value in values]
    for at in range(info.n_outputs if info.kind == "forward" else len(values), len(values)):
        node = values[at]
        if isinstance(node, fx.Node) and node.target is aten.clone.default and _is_sliced(operand(node, 0)):
            if _memory(node.args[0]) not in memory:
                values[at], memory[at] = node.args[0], _memory(node.args[0])
    output.args = (tuple(values),)


def _memory(node: Any) -> Any:
    """The node whose memory a chain of views looks at."""
    while isinstance(node, fx.Node) and looks_at_another(node):
        node = node.args[0]
    return node


def _is_sliced(node: fx.Node) -> bool:
    """Whether a value looks at a padded product."""
    root = _memory(node)
    return (
        root.target in (aten.mm.default, aten.addmm.default)
        and root.meta["val"].numel != node.meta["val"].numel
    )


def _spread_strides(graph: fx.Graph, changed: dict[fx.Node, TensorSpec]) -> None:
    """Infer the specs of what reads results that have other strides now."""
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and any(n in changed for n in node.all_input_nodes)
            and node.target is not aten.copy_.default
        ):
            give_strides_back(graph, node, changed)
            before = node.meta["val"]
            node.meta["val"] = inferred_again(node, set())
            if node.meta["val"] != before:
                changed[node] = before
