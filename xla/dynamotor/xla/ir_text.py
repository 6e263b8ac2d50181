"""Recorded work that waits to be computed: as lines of operations, as XLA's program, and
facts about a single tensor.

>>> print(text(pending([torch.ones(2, device="xla") + 1])[0]))
IR {
  %0 = f32[2]{0} aten::ones([2], dtype=torch.float32)
  %1 = f32[2]{0} aten::add(%0, 1), ROOT=0
}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from . import device as devices, placement, rng
from .dtypes import jax_dtype
from .errors import require
from .execute import Graph, scalar_vector, to_function
from .ir import Lane, Node
from .sync import live_nodes
from .tensor import XLATensor, is_xla, node_of
from .transfer import wrap_array

# numpy's names of types and XLA's.
_SHORT = {"bfloat": "bf", "float": "f", "uint": "u", "int": "s", "complex": "c", "bool": "pred"}


def type_text(dtype: torch.dtype) -> str:
    """XLA's name of a dtype: "f32"."""
    name = jax_dtype(dtype).name.replace("_", "")
    start = next(start for start in _SHORT if name.startswith(start))
    return _SHORT[start] + name.removeprefix(start)


def shape_text(meta: Any) -> str:
    """XLA's name of a shape, row-major: "f32[4,2]{1,0}"; of several results a tuple of them."""
    if type(meta) is tuple:
        return f"({', '.join([shape_text(item) for item in meta if item is not None])})"
    sizes, order = ",".join(map(str, meta.shape)), ",".join(map(str, reversed(range(len(meta.shape)))))
    return f"{type_text(meta.dtype)}[{sizes}]" + (f"{{{order}}}" if order else "")


def pending(tensors: Sequence[torch.Tensor] = ()) -> tuple[Graph, list[Node]]:
    """The graph of xla tensors (of all that wait, where none are given), and the leaves that are its inputs:
    only what these tensors need. A tensor that was computed already is an input and a result.

    DM672 where nothing waits to be computed, or a collective does: that program belongs to all replicas.
    """
    lane = devices.lane_of(tensors[0].device if tensors else torch.device("xla", devices.current_device()))
    nodes = [node_of(t) for t in tensors] if tensors else live_nodes(lane)  # type: ignore[arg-type]
    require(
        nodes and not lane.collective,
        "DM672",
        "there is no program to show",
        why="a collective is part of it" if nodes else "all values were computed already",
        cure="call it before mark_step and before reading values",
    )
    leaves, outputs = list(lane.leaves), []
    for node in nodes:
        if node.epoch != lane.epoch:
            leaves.append(node)
        outputs.append(node.position if node.epoch == lane.epoch else -len(leaves))
    graph = dataclasses.replace(Graph.of(lane, outputs), leaves=[leaf.meta for leaf in leaves])
    graph, used = _pruned(graph)
    return graph, [leaves[-position - 1] for position in used]


def _pruned(graph: Graph) -> tuple[Graph, list[int]]:
    """A graph without the leaves that nothing reads, and the positions that the others had."""
    steps = graph.steps.values()
    read = {*graph.outputs, *[position for step in steps for position in step.inputs]}
    used = sorted([position for position in read if position < 0], reverse=True)
    place = {position: -index - 1 for index, position in enumerate(used)}
    moved = {
        at: dataclasses.replace(step, inputs=tuple([place.get(p, p) for p in step.inputs]))
        for at, step in graph.steps.items()
    }
    return dataclasses.replace(
        graph,
        steps=moved,
        leaves=[graph.leaves[-position - 1] for position in used],
        outputs=tuple([place.get(position, position) for position in graph.outputs]),
        scalars=graph.scalars if any(step.instruction.scalars for step in steps) else 0,
        draws=graph.draws if any(step.draw >= 0 for step in steps) else 0,
    ), used


def text(graph: Graph) -> str:
    """A graph as torch_xla writes one: a line an operation, results marked with their numbers."""
    names: dict[int, str] = {}
    lines: list[str] = []
    of_line: dict[int, list[int]] = {}
    for index, meta in enumerate(graph.leaves):
        names[-index - 1], of_line[-index - 1] = f"%{len(lines)}", [len(lines)]
        lines.append(f"  %{len(lines)} = {shape_text(meta)} xla::device_data(), device={graph.device}")
    for position, step in graph.steps.items():
        if step.item >= 0:
            names[position] = f"{names[step.inputs[0]]}.{step.item}"
            of_line[position] = of_line[step.inputs[0]]
            continue
        names[position], of_line[position] = f"%{len(lines)}", [len(lines)]
        call = step.instruction.show([names[p] for p in step.inputs]).removeprefix(str(step.instruction.func))
        name = step.instruction.func._schema.name
        lines.append(f"  %{len(lines)} = {shape_text(step.instruction.metas)} {name}{call}")
    for root, position in enumerate(graph.outputs):
        lines[of_line[position][0]] += f", ROOT={root}"
    return "\n".join(["IR {", *lines, "}", ""])


def debug_info(tensor: torch.Tensor, layout: str = "") -> str:
    """The state of a tensor: its shape, the operation that waits to be done, the data that it has.
    layout: over the devices, in XLA's words."""
    if not is_xla(tensor):
        return "Not a XLATensor\n"
    node, shape = node_of(tensor), shape_text(node_of(tensor).meta)
    spread = placement.spmd() is not None
    device = "SPMD:0" if spread else f"{devices.platform()}:{devices.jax_device(tensor.device).id}"
    data = "None" if node.data is None else f"\n  Data Device: {device}\n  Data Shape: {shape}"
    if sharded := node.data is not None and bool(layout):
        data += f"\n  OpSharding: {layout}\n  NumShards: {len(node.data.sharding.device_set)}"
    waits = "None" if node.instruction is None else node.instruction.show()
    if node.instruction is not None:
        waits = waits.replace(str(node.instruction.func), node.instruction.func._schema.name, 1)
    lines = {"Tensor id": id(node), "Device": device, "XLA Shape": shape}
    lines |= {"ShardingSpec": layout or None, "IR": waits, "XLAShardedData" if sharded else "XLAData": data}
    lines["Tensor on host"] = None  # a tensor is uploaded at once
    return "".join([f"{name}: {value}\n" for name, value in lines.items()])


class LoweringContext:
    """The program of tensors that wait to be computed, and its parameters.

    >>> context = LoweringContext("name"); context.build([result])
    >>> context.hlo_text(), context.parameter_id_tensor_mapping()
    """

    def __init__(self, name: str = "LoweringContext", device: Any = None) -> None:
        self._name = name

    def build(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take over the present program of these tensors."""
        graph, self._leaves = pending(tensors)
        lane: Lane = devices.lane_of(tensors[0].device)
        self._arrays = [leaf.data for leaf in self._leaves]
        self._arrays += [jnp.asarray(scalar_vector(lane.scalars))] if graph.scalars else []
        self._arrays += [jnp.asarray(rng.words(lane.draws))] if graph.draws else []
        function = to_function(graph)
        function.__name__ = self._name
        self._lowered = jax.jit(function, keep_unused=True).lower(*self._arrays)

    def hlo(self) -> bytes:
        """The program as XLA's serialized module."""
        module: Any = self._lowered.compiler_ir("hlo")
        return module.as_serialized_hlo_module_proto()

    def hlo_text(self) -> str:
        """The program as XLA's text."""
        return self._lowered.as_text(dialect="hlo")

    def device_parameter_id_tensor_mapping(self) -> dict[int, XLATensor]:
        """The tensor of each parameter, by the parameter's number."""
        return {index: wrap_array(array) for index, array in enumerate(self._arrays)}

    def parameter_id_tensor_mapping(self) -> dict[int, torch.Tensor]:
        """CPU copies of the tensor of each parameter."""
        return {index: held.cpu() for index, held in self.device_parameter_id_tensor_mapping().items()}

    def tensor_parameter_id(self, tensor: XLATensor) -> int:
        """The number of the parameter that a tensor is, or -1."""
        held = [leaf.data is node_of(tensor).data for leaf in self._leaves]
        return held.index(True) if node_of(tensor).data is not None and True in held else -1


def hlo_text(tensors: Sequence[torch.Tensor]) -> str:
    """XLA's text of the program of tensors that wait to be computed."""
    context = LoweringContext("IrToHlo")
    context.build(tensors)
    return context.hlo_text()
