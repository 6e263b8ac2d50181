"""The walk over an aten graph: one rule an op, then the outputs and the writes into inputs."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..base import compat
from ..base.errors import InternalError
from ..graph.nodes import arguments, function, operand
from ..graph.sizes import Size, equal
from ..graph.spec import GraphInfo, TensorSpec
from . import outputs
from .lowering import LoopBuilder
from .outputs import COPY_
from .program import BufRef
from .realize import count_readers
from .value import LoopValue


def _tell_phases(graph: fx.Graph) -> None:
    """Nodes that passes put into the backward of a whole step belong to it, as their operands do."""
    for node in graph.nodes:
        if any(arg.meta.get("phase") == "backward" for arg in node.all_input_nodes):
            node.meta["phase"] = "backward"


def lower_nodes(gm: fx.GraphModule, info: GraphInfo) -> tuple[LoopBuilder, list[str], tuple[Any, ...]]:
    """Run the rules over the graph; gives the state, the input buffers' names and the outputs."""
    ctx = LoopBuilder(info, gm.meta.get("shape_env"))
    ctx.on_gpu = ctx.on_gpu or any(_is_on_gpu(node) for node in gm.graph.nodes)
    ctx.readers = count_readers(gm.graph)
    _tell_phases(gm.graph)
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    returned = arguments(output)[0]
    flat_outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
    ctx.outputs = frozenset(n for n in flat_outputs if isinstance(n, fx.Node))
    env = ctx.known
    ctx.order = {node: n for n, node in enumerate(gm.graph.nodes)}
    inputs: list[str] = []
    copies: list[fx.Node] = []
    for node in gm.graph.nodes:
        ctx.node, ctx.spec = node, node.meta.get("val")
        if node.op == "placeholder":
            name = f"arg{len(inputs)}" if type(ctx.spec) is not Size else str(ctx.spec)
            inputs.append(name)
            if isinstance(ctx.spec, TensorSpec):
                if any(user.target is COPY_ and operand(user, 0) is node for user in node.users):
                    ctx.targets |= {name}
                buffer = ctx.new_buffer(ctx.spec, "input", name)
                env[node] = LoopValue(
                    ctx.spec.shape,
                    ctx.spec.dtype,
                    ref=BufRef(name, ctx.spec.shape, ctx.spec.stride, 0, buffer.spec.dtype),
                )
                env[node].stride = ctx.spec.stride
            else:
                env[node] = ctx.spec
        elif node.op == "get_attr":
            env[node] = _constant(ctx, gm, node)
        elif node.op == "call_function" and node.target is COPY_ and operand(node, 0).op == "placeholder":
            copies.append(node)
        elif node.op == "call_function":
            env[node] = _lower_call(ctx, node, env)
        elif node.op != "output":
            raise InternalError(
                "DM910",
                f"a node of kind {node.op} in an aten graph",
                why=str(node.format_node()),
                cure="report this graph",
            )
    ctx.node, ctx.spec = output, None
    targets = {env[operand(n, 0)].ref.name for n in copies}
    owners: dict[str, fx.Node] = {}
    results = tuple([outputs.returned(ctx, n, env, targets, owners) for n in flat_outputs])
    outputs.write_inputs(ctx, copies, env, targets)
    ctx.values = {
        n.name: v.ref
        for n, v in env.items()
        if isinstance(v, LoopValue) and v.ref is not None and n.op != "placeholder"
    }
    return ctx, inputs, results


def _is_on_gpu(node: fx.Node) -> bool:
    spec = node.meta.get("val")
    return any(
        isinstance(s, TensorSpec) and s.device.type == "cuda"
        for s in (spec if isinstance(spec, tuple) else (spec,))
    )


def _constant(ctx: LoopBuilder, gm: fx.GraphModule, node: fx.Node) -> LoopValue:
    tensor: Any = gm
    for part in str(node.target).split("."):
        tensor = getattr(tensor, part)
    spec = TensorSpec.of(tensor)
    buffer = ctx.new_buffer(spec, "const", value=tensor.detach())
    value = LoopValue(spec.shape, spec.dtype, ref=BufRef(buffer.name, spec.shape, spec.stride, 0, spec.dtype))
    value.stride = spec.stride
    return value


def _lower_call(ctx: LoopBuilder, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    args = fx.map_arg(node.args, lambda n: env[n])
    kwargs = fx.map_arg(node.kwargs, lambda n: env[n])
    if type(node.meta.get("val")) is Size:
        value = node.meta["val"]  # a size, computed while the graph was recorded
    elif not isinstance(node.target, compat.OpOverload):
        value = function(node)(*args, **kwargs)  # operator.getitem and arithmetic on numbers
    elif node.target._schema.is_mutable:
        raise InternalError(
            "DM912",
            f"{node.target} changes its operand inside an aten graph",
            why="lowering takes functional graphs",
            cure="report the program; backend='eager' runs it",
        )
    else:
        value = ctx.call(node, args, kwargs)
    if isinstance(value, LoopValue):
        _check(value, node)
        ctx.settle(value, node)
        if value.stride is None:
            value.stride = node.meta["val"].stride
    return value


def _check(value: LoopValue, node: fx.Node) -> None:
    spec = node.meta["val"]
    if isinstance(spec, TensorSpec) and (
        value.dtype != spec.dtype or not (equal(value.shape, spec.shape) or tuple(value.shape) == spec.shape)
    ):  # the latter may follow from a guard
        raise InternalError(
            "DM911",
            f"the lowering of {node.target} gives {value.dtype}{list(value.shape)}, aten gives {spec}",
            why="a wrong rule in dynamotor.lower",
            cure="report this; config.backend='aot_eager' avoids it",
        )
