"""Convolutions. At inference weights are reordered once for oneDNN, and what follows a convolution is done
inside it:

    y = relu(conv(x, w) + z)   becomes   packed = reorder(w)  (once);  y = conv_pointwise.binary(x, z, packed,
    ..., "add", "relu")

In training the weight's gradient of a layer with few pixels and many channels is one matrix product. On a GPU
biases, which cuDNN adds in passes of their own, move into the kernels around.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graph.nodes import arguments, find_spec, operand, spec_of, take_place
from ..graph.shapes import call
from ..graph.sizes import Dims, hint
from ..graph.spec import GraphInfo, TensorSpec, aten
from .channels_last import is_channels_last
from .gemm import is_fused
from .pass_helpers import added_to, only_user, static_nodes

mkldnn = torch.ops.mkldnn

_PACKED = getattr(
    getattr(mkldnn, "_convolution_pointwise", None), "default", None
)  # None: a torch without oneDNN
_PACKED_BINARY = getattr(getattr(mkldnn, "_convolution_pointwise", None), "binary", None)
# aten op -> oneDNN's name, for ops without parameters.
_UNARY = {
    aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
    aten.silu.default: "swish",
    aten.hardswish.default: "hardswish",
    aten.hardsigmoid.default: "hardsigmoid",
}


def prepack_convolutions(gm: fx.GraphModule, info: GraphInfo) -> None:
    """Channels-last convolution with a static weight: reorder the weight into oneDNN's own layout, once."""
    if _PACKED is None:
        return
    graph = gm.graph
    static = static_nodes(graph, info)
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target is aten.convolution.default]:
        x, weight, bias, stride, padding, dilation, transposed, _, groups = arguments(node)
        spec = find_spec(x)
        if transposed or weight not in static or not is_channels_last(node.meta["val"]):
            continue
        if (
            spec is None
            or not is_channels_last(spec)
            or spec.dtype != torch.float32
            or (bias is not None and bias not in static)
        ):
            continue
        place = [list(padding), list(stride), list(dilation), groups]
        with graph.inserting_before(node):
            packed = call(
                graph,
                mkldnn._reorder_convolution_weight.default,
                weight,
                *place,
                list(spec.hinted().shape),
                spec=TensorSpec.dense(spec_of(weight).shape, torch.float32),
            )
            new = call(graph, _PACKED, x, packed, bias, *place, "none", [], "", spec=node.meta["val"])
        take_place(new, node)


def _unary(node: fx.Node | None) -> tuple[str, list[Any]] | None:
    """oneDNN's name and parameters of an activation, or None."""
    if node is None or node.op != "call_function":
        return None
    if node.target in _UNARY:
        return _UNARY[node.target], []
    if node.target is aten.hardtanh.default:
        low, high = (*arguments(node)[1:], *(-1.0, 1.0)[len(node.args) - 1 :])[:2]
        return "hardtanh", [float(low), float(high)]
    if node.target is aten.leaky_relu.default:
        return "leaky_relu", [float(arguments(node)[1]) if len(node.args) > 1 else 0.01]
    return None


def fuse_convolutions(gm: fx.GraphModule, info: GraphInfo) -> None:
    """Residual sums and activations that follow a prepacked convolution move into it."""
    if _PACKED is None:
        return
    graph = gm.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    for conv in [n for n in graph.nodes if n.target is _PACKED]:
        after = only_user(conv)
        other = _added(conv, after)
        if after is not None and other is not None and order[other] < order[after]:
            last = only_user(after)
            unary = _unary(last)
            # oneDNN fuses relu behind a sum; others run as kernels of ours.
            relu = last if last is not None and unary is not None and unary[0] == "relu" else None
            end = after if relu is None else relu
            with graph.inserting_before(end):
                new = call(
                    graph,
                    _PACKED_BINARY,
                    conv.args[0],
                    other,
                    *conv.args[1:7],
                    "add",
                    1.0,
                    None if relu is None else "relu",
                    [],
                    None,
                    spec=conv.meta["val"],
                )
            order[new] = order[end]
            take_place(new, *([] if relu is None else [relu]), after, conv)
            continue
        unary = _unary(after)
        if after is not None and unary is not None and after.meta["val"] == conv.meta["val"]:
            with graph.inserting_before(after):
                new = call(graph, _PACKED, *conv.args[:7], *unary, "", spec=conv.meta["val"])
            order[new] = order[after]
            take_place(new, after, conv)


def _added(conv: fx.Node, add: fx.Node | None) -> fx.Node | None:
    """The other operand when `add` is conv + other, of equal spec."""
    other = added_to(conv, add)
    same = add is not None and other is not None and find_spec(other) == conv.meta["val"] == add.meta["val"]
    return other if same else None


def multiply_weight_gradients(gm: fx.GraphModule, info: GraphInfo) -> None:
    """Weight gradients as patches and one product, where patches are much smaller than the weight (few
    pixels, many channels).

    There oneDNN spends its time on reordering the weight's gradient (512 channels, 7x7, batch 4: 13 ms
    against 7).
    """
    graph = gm.graph
    for node in [
        n for n in graph.nodes if n.op == "call_function" and n.target is aten.convolution_backward.default
    ]:
        grad, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = arguments(node)
        g, w = spec_of(grad), spec_of(weight)
        plain = not transposed and groups == 1 and len(g.shape) == 4 and all(d == 1 for d in dilation)
        if not plain or not mask[1] or w.shape[2:] == (1, 1):
            continue
        pixels = g.shape[0] * g.shape[2] * g.shape[3]
        if g.dtype != torch.float32 or 2 * hint(pixels) > w.shape[0]:
            continue
        with graph.inserting_before(node):
            result = _patches_product(graph, grad, x, w.shape, list(stride), list(padding))
        _computed_apart(node, 1, result)


def _computed_apart(node: fx.Node, which: int, result: fx.Node) -> None:
    """One of a convolution's gradients is another node's result from now on."""
    node.update_arg(10, [wanted and n != which for n, wanted in enumerate(arguments(node)[10])])
    node.meta["val"] = tuple([None if n == which else spec for n, spec in enumerate(node.meta["val"])])
    for user in [user for user in node.users if user.args[1] == which]:
        take_place(result, user)
    for unused in [user for user in node.users if not user.users]:
        node.graph.erase_node(unused)
    if not node.users:
        node.graph.erase_node(node)


def _patches_product(
    graph: fx.Graph, grad: fx.Node, x: fx.Node, weight: Dims, stride: list[int], padding: list[int]
) -> fx.Node:
    """The gradient of a weight (out, in, height, width): (out, pixels) @ (pixels, in * height * width)."""
    top, left = padding if len(padding) == 2 else (padding[0], padding[0])
    down, right = stride if len(stride) == 2 else (stride[0], stride[0])
    padded = call(graph, aten.constant_pad_nd.default, x, [left, left, top, top], 0.0)
    rows = call(graph, aten.unfold.default, padded, 2, weight[2], down)
    patches = call(graph, aten.unfold.default, rows, 3, weight[3], right)  # (batch, in, y, x, height, width)
    ordered = call(graph, aten.permute.default, patches, [0, 2, 3, 1, 4, 5])
    inner, spec = weight[1] * weight[2] * weight[3], spec_of(grad)
    pixels = spec.shape[0] * spec.shape[2] * spec.shape[3]
    columns = call(
        graph,
        aten.reshape.default,
        ordered,
        [-1, inner],
        spec=TensorSpec.dense((pixels, inner), spec.dtype, spec.device),
    )
    moved = call(graph, aten.permute.default, grad, [1, 0, 2, 3])
    left_side = call(
        graph,
        aten.reshape.default,
        moved,
        [weight[0], -1],
        spec=TensorSpec.dense((weight[0], pixels), spec.dtype, spec.device),
    )
    return call(graph, aten.view.default, call(graph, aten.mm.default, left_side, columns), list(weight))


def split_convolution_bias(gm: fx.GraphModule, info: GraphInfo) -> None:
    """convolution(x, w, bias) → convolution(x, w) + bias where a kernel of ours reads it, and a bias'
    gradient → a sum.
    """
    graph = gm.graph
    for node in [n for n in graph.nodes if n.op == "call_function"]:
        if node.target is aten.convolution.default:
            _add_bias(graph, node)
        elif node.target is aten.convolution_backward.default and arguments(node)[10][2]:
            _sum_for_bias(graph, node)


def _add_bias(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, bias, *place = arguments(node)
    spec = node.meta["val"]
    if (
        bias is None
        or spec_of(bias).dtype is not spec.dtype
        or not any(is_fused(user, node) for user in node.users)
    ):
        return
    with graph.inserting_before(node):
        plain = call(graph, node.target, x, weight, None, *place, spec=spec)
        along = call(graph, aten.view.default, bias, [-1] + [1] * (len(spec.shape) - 2))
        total = call(graph, aten.add.Tensor, plain, along, spec=spec)
    take_place(total, node)


def _sum_for_bias(graph: fx.Graph, node: fx.Node) -> None:
    grad = operand(node, 0)
    others = [d for d in range(len(spec_of(grad).shape)) if d != 1]
    with graph.inserting_before(node):
        total = call(graph, aten.sum.dim_IntList, grad, others, spec=node.meta["val"][2])
    _computed_apart(node, 2, total)
