"""Layout assignment: 2-D convolutions run channels-last, and so do the ops between them.

A convolution's input is converted where it is not channels-last yet; strides are then inferred again for all
nodes after it, as eager would give them for channels-last inputs. Graph outputs of the user's keep the
strides that eager gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..base import compat
from ..base.errors import DynamotorError
from ..graph.nodes import arguments, find_spec, operand, spec_of
from ..graph.op_facts import sees_strides
from ..graph.shapes import at_hints, call, has_symbols, infer_spec, specs_in
from ..graph.sizes import Dims, equal, hint, packed
from ..graph.spec import GraphInfo, TensorSpec, aten, channels_last_stride, contiguous_stride
from .pass_helpers import looks_at_another, output_node
from .program import BufRef
from .value import is_dense

# Where convolutions run faster channels-last: oneDNN on a CPU, the tensor cores of a GPU.
_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16)}


def is_channels_last(spec: TensorSpec | BufRef | None) -> bool:
    """Whether a 4-D tensor is laid out with channels innermost (dimensions of size 1 may have any stride)."""
    innermost_first = (1, 3, 2, 0)
    return (
        spec is not None
        and len(spec.shape) == 4
        and packed((spec.shape[d], spec.stride[d]) for d in innermost_first)
    )


def _wants_channels_last(node: fx.Node) -> bool:
    """Whether a node is a convolution (or the backward of one) that runs faster channels-last."""
    if node.op != "call_function" or node.target not in (
        aten.convolution.default,
        aten.convolution_backward.default,
    ):
        return False
    x = find_spec(node.args[1 if node.target is aten.convolution_backward.default else 0])
    if x is not None and len(x.shape) == 4 and x.shape[1] == 1:
        return False  # one channel is both layouts at once, and aten takes it for row-major
    return x is not None and len(x.shape) == 4 and x.dtype in _DTYPES.get(x.device.type, ()) and x.numel > 0


def assign_layouts(gm: fx.GraphModule, info: GraphInfo) -> None:
    """Make convolutions channels-last and carry the layout on."""
    graph = gm.graph
    onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    convolutions = {node for node in graph.nodes if _wants_channels_last(node)}
    if convolutions and not onednn and spec_of(operand(next(iter(convolutions)), 0)).device.type == "cpu":
        convolutions = set()
    # Saved values arrive channels-last in a backward that was traced with eager's strides, also where the
    # gradients of the convolutions are not asked for.
    changed = {
        node: node.meta.get("traced", node.meta["val"])
        for node in graph.nodes
        if node.op == "placeholder" and is_channels_last(find_spec(node))
    }
    if not convolutions and all(before == node.meta["val"] for node, before in changed.items()):
        return
    output = output_node(graph)
    promised = {node: node.meta["val"] for node in output.all_input_nodes}
    converted: dict[fx.Node, fx.Node] = {}
    loose: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        before = node.meta.get("val")
        give_strides_back(graph, node, changed)
        if node in convolutions:
            _convert_inputs(graph, node, converted, changed)
            node.meta["val"] = _channels_last_result(node)
        elif any(n in changed for n in node.all_input_nodes):
            node.meta["val"] = inferred_again(node, loose)
        if _is_loose(node, loose):
            loose.add(node)
        if node.meta.get("val") != before:
            changed[node] = before
    restore_outputs(graph, output, promised, info)


def give_strides_back(graph: fx.Graph, node: fx.Node, changed: dict[fx.Node, Any]) -> None:
    """Before a call that tells strides apart: copies of its operands as eager lays them out. `changed` holds
    eager's specs of values in another layout.
    """
    if not sees_strides(node.target):
        return
    for x in node.all_input_nodes:
        eager = changed.get(x)
        if isinstance(eager, TensorSpec) and not equal(eager.stride, spec_of(x).stride):
            with graph.inserting_before(node):
                node.replace_input_with(x, _as_in_eager(graph, x, changed))


def _as_in_eager(graph: fx.Graph, x: fx.Node, changed: dict[fx.Node, Any]) -> fx.Node:
    """A copy with eager's strides; where those leave holes, of the memory that x looks at, seen alike."""
    eager = changed.get(x, x.meta["val"])
    if is_dense(eager) or not looks_at_another(x):
        order = sorted(range(len(eager.shape)), key=lambda d: -hint(eager.stride[d]))
        row_major = equal(eager.stride, contiguous_stride(eager.shape))
        turned = x if row_major else call(graph, aten.permute.default, x, order)
        copied = call(graph, aten.clone.default, turned, memory_format=torch.contiguous_format)
        back = [order.index(d) for d in range(len(order))]
        return copied if turned is x else call(graph, aten.permute.default, copied, back)
    source = _as_in_eager(graph, operand(x, 0), changed)
    view = graph.node_copy(x, lambda n: source if n is x.args[0] else n)
    view.meta["val"] = eager
    return view


def _convert_inputs(
    graph: fx.Graph, node: fx.Node, converted: dict[fx.Node, fx.Node], changed: dict[fx.Node, Any]
) -> None:
    """Give a convolution activations, incoming gradient and weight channels-last.

    The library would convert a row-major weight itself, at each of its calls and slower than a kernel of
    ours.
    """
    activations = 2 if node.target is aten.convolution_backward.default else 1
    for position in range(activations + 1):
        x = operand(node, position)
        spec = spec_of(x)
        if is_channels_last(spec):
            continue
        if x not in converted:
            with graph.inserting_before(node):
                converted[x] = call(
                    graph,
                    aten.clone.default,
                    x,
                    memory_format=torch.channels_last,
                    spec=TensorSpec(spec.shape, channels_last_stride(spec.shape), spec.dtype, spec.device),
                )
                changed[converted[x]] = changed.get(x, spec)
            if position < activations:  # what reads x later (a residual sum) stays channels-last too
                # (but not the write of a mutated input, which is into the input itself)
                later = {
                    user
                    for user in x.users
                    if user.op == "call_function" and user.target is not aten.copy_.default and node < user
                }
                x.replace_all_uses_with(converted[x], delete_user_cb=later.__contains__)
        node.update_arg(position, converted[x])


def _channels_last_result(node: fx.Node) -> Any:
    """What oneDNN and cuDNN give for channels-last arguments: channels-last results, the weight's gradient
    too (measured).
    """

    def relaid(spec: Any) -> Any:
        is_4d = isinstance(spec, TensorSpec) and len(spec.shape) == 4
        return spec.with_stride(channels_last_stride(spec.shape)) if is_4d else spec

    val = node.meta["val"]
    return tuple(relaid(spec) for spec in val) if isinstance(val, tuple) else relaid(val)


def inferred_again(node: fx.Node, loose: set[fx.Node]) -> Any:
    """The spec of a node whose inputs have other strides now; a view that such strides do not allow keeps
    its former layout.
    """
    if not isinstance(node.target, compat.OpOverload):
        return operand(node, 0).meta["val"][arguments(node)[1]] if len(node.args) == 2 else node.meta["val"]
    given = specs_in(node.args), specs_in(node.kwargs)
    try:
        if has_symbols(given):
            infer_spec(node.target, *at_hints(given))  # what raises here would ask for all sizes as numbers
        result = infer_spec(node.target, *given)
        return (
            _with_layout_of_operands(node, result, loose)
            if torch.Tag.pointwise in node.target.tags
            else result
        )
    except (RuntimeError, ValueError, TypeError, DynamotorError):
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        return node.meta["val"]


def _full_operands(node: fx.Node, shape: Dims, loose: set[fx.Node]) -> list[TensorSpec]:
    """Operands of a pointwise op that have the result's shape and are not broadcast: those that decide on its
    layout.
    """
    specs = [
        s
        for n in node.all_input_nodes
        if n not in loose and (s := find_spec(n)) is not None and s.shape == shape
    ]
    return [s for s in specs if all(step or size == 1 for size, step in zip(s.shape, s.stride, strict=True))]


def _is_loose(node: fx.Node, loose: set[fx.Node]) -> bool:
    """Whether a 4-D pointwise result is made of broadcast operands only, such as a mean's gradient: any
    layout suits it.
    """
    spec = find_spec(node)
    pointwise = isinstance(node.target, compat.OpOverload) and torch.Tag.pointwise in node.target.tags
    return (
        pointwise
        and spec is not None
        and len(spec.shape) == 4
        and not _full_operands(node, spec.shape, loose)
    )


def _with_layout_of_operands(node: fx.Node, result: Any, loose: set[fx.Node]) -> Any:
    """A pointwise result is channels-last when its full operands are; aten may follow a broadcast one."""
    if not isinstance(result, TensorSpec) or len(result.shape) != 4 or is_channels_last(result):
        return result
    full = _full_operands(node, result.shape, loose)
    if full and all(is_channels_last(s) for s in full):
        return result.with_stride(channels_last_stride(result.shape))
    return result


def restore_outputs(graph: fx.Graph, output: fx.Node, promised: dict[fx.Node, Any], info: GraphInfo) -> None:
    """Copy the user's outputs back into eager's strides. Saved values stay as they are: the backward reads
    their specs.
    """
    values = list(arguments(output)[0])
    end = output  # the writes of mutated inputs stay last
    while end.prev.target is aten.copy_.default:
        end = end.prev
    n_outputs = info.n_outputs if info.kind == "forward" else len(values)
    for position, node in enumerate(values[:n_outputs]):
        if not isinstance(node, fx.Node) or not isinstance(promised[node], TensorSpec):
            continue
        spec = promised[node]
        if node.meta["val"].stride == spec.stride:
            continue
        with graph.inserting_before(end):
            values[position] = call(
                graph, aten.clone.default, node, memory_format=torch.contiguous_format, spec=spec
            )
    output.args = (tuple(values),)
