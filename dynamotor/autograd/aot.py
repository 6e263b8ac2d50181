"""Ahead-of-time autograd: from a torch graph to compiled functional aten graphs, joined to PyTorch's autograd.

The way: trace jointly → simplify → partition → cut out the graphs → compile them → wrap for run time. A program whose
mutations or aliases cannot be kept exactly runs as the torch graph it is; that is counted and emitted, never hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.collector import collector_paused
from ..base.config import config
from ..base.errors import BackendError, DynamotorError
from ..base.events import counters, emit, timed
from ..base.log import log
from ..graph.info import GraphInfo
from ..graph.passes import run_passes
from ..graph.shape_tensor import unseen_by_hooks
from ..graph.shapes import UnsupportedOp
from ..graph.spec import TensorSpec
from ..graph.verify import verify_aten_graph, verify_torch_graph
from .absent import without_tangents
from .extract import extract
from .joint import Joint, trace_joint
from .partition import dependents, partition
from .runtime import ForwardBackward, inference_callable, training_callable
from .simplify import PASSES, has_effect

Compiled = Callable[..., Any]
CompileGraph = Callable[[torch.fx.GraphModule, GraphInfo], Compiled]
# Looks at (and may rewrite) the backward graph, and gives what wraps its compiled form: `gm.meta["on_backward"]`.
OnBackward = Callable[[torch.fx.GraphModule], Callable[[Compiled], Compiled]]
_names = itertools.count()


def aot_compile(gm: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor], compile_graph: CompileGraph, *,
                static_inputs: frozenset[int] = frozenset()) -> Compiled:
    """Differentiate, functionalise and compile a torch graph.

    `compile_graph(aten_gm, info)` compiles one aten graph. The result takes real tensors, one per placeholder, and
    returns a tuple of the graph's outputs; with grad mode on and inputs that require grad it takes part in autograd.
    The graph is specialised on the example inputs' metadata, `requires_grad`, aliasing, and the current grad mode.
    A `gm.meta["on_backward"]` (an `OnBackward`) is taken out and called when there is a backward graph.
    """
    with collector_paused(), unseen_by_hooks():
        return _aot_compile(gm, example_inputs, compile_graph, f"graph{next(_names)}", static_inputs)


def _aot_compile(gm: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor], compile_graph: CompileGraph, name: str,
                 static_inputs: frozenset[int]) -> Compiled:
    if config.verify:
        verify_torch_graph(gm)
    try:
        with timed("trace joint graph"):
            joint = trace_joint(gm, [TensorSpec.of(t) for t in example_inputs], [t.requires_grad for t in example_inputs],
                                _memory_groups(example_inputs))
    except Exception as error:  # whatever the trace cannot do, the torch graph itself can
        return _run_as_it_is(gm, name, error)
    with timed("simplify joint graph"):
        run_passes(joint.gm, PASSES, stage="joint")
    if not joint.gradient_of:
        return _compile_inference(joint, compile_graph, name, static_inputs)
    return _compile_training(joint, compile_graph, name, static_inputs, gm.meta.pop("on_backward", None))


def _memory_groups(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A number for each tensor's storage; refuses tensors whose memory does not hold what they show."""
    if any(t.is_conj() or t.is_neg() for t in tensors):
        raise UnsupportedOp("DM235", "an input is a lazy conjugate or negative", cure="resolve_conj() or resolve_neg() first")
    return [t._memory_token() if hasattr(type(t), "_memory_token") else t.untyped_storage()._cdata for t in tensors]


def _run_as_it_is(gm: torch.fx.GraphModule, name: str, error: Exception) -> Compiled:
    code = error.code if isinstance(error, DynamotorError) else type(error).__name__
    counters["fallback"][f"aot.{code}"] += 1
    emit("fallback", what="graph", name=name, reason=str(error), code=code)
    log("fallbacks", f"{name} runs op by op: {error}")
    if config.strict:
        raise BackendError("DM401", "the graph cannot be differentiated ahead of time", why=str(error),
                           cure="see the cause, or set dynamotor.config.strict = False to run it op by op") from error
    return gm.forward


def _static(nodes: Sequence[torch.fx.Node], joint: Joint, static_inputs: frozenset[int]) -> frozenset[int]:
    """Positions in `nodes` of inputs that are the same tensor at each call."""
    first_constant = len(joint.inputs) - len(joint.constants)
    always = {node for i, node in enumerate(joint.inputs) if i in static_inputs or i >= first_constant}
    return frozenset(i for i, node in enumerate(nodes) if node in always)


def _writes(joint: Joint) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    return [(joint.inputs[i], value) for i, value in zip(joint.mutated, joint.output[1], strict=True)
            if value is not joint.inputs[i]]


def _compile_inference(joint: Joint, compile_graph: CompileGraph, name: str, static_inputs: frozenset[int]) -> Compiled:
    values = joint.output[0]
    graph = extract(joint.gm.graph, joint.inputs, values, writes=_writes(joint), keep=_generators(joint, set()))
    info = GraphInfo("inference", name, _static(joint.inputs, joint, static_inputs), len(values))
    return inference_callable(_compile(graph, info, compile_graph), joint)


def _compile_training(joint: Joint, compile_graph: CompileGraph, name: str, static_inputs: frozenset[int],
                      on_backward: OnBackward | None) -> Compiled:
    with timed("partition"):
        chosen = partition(joint)
        emit("partition", name=name, saved_bytes=chosen.saved_bytes, eager_bytes=chosen.eager_bytes)
        backward_nodes = dependents(list(joint.gm.graph.nodes), joint.tangents)
        values, _, grads = joint.output
        written = {joint.inputs[i] for i in joint.mutated}
        kept_inputs = [node for node in chosen.saved if node.op == "placeholder" and node not in written]
        computed = [node for node in chosen.saved if node not in kept_inputs and node not in values]
        forward = extract(joint.gm.graph, joint.inputs, [*values, *computed], writes=_writes(joint),
                          keep=_generators(joint, backward_nodes))
        saved = [*kept_inputs, *(node for node in chosen.saved if node not in kept_inputs)]
        backward = extract(joint.gm.graph, [*saved, *joint.tangents], grads, anchored=backward_nodes)
    around = on_backward(backward) if on_backward is not None else None
    compiled = _compile(forward, GraphInfo("forward", name, _static(joint.inputs, joint, static_inputs), len(values)),
                        compile_graph)
    info = GraphInfo("backward", f"{name}_backward", _static(saved, joint, static_inputs))
    several = len(joint.tangents) > 1  # then not all of them need arrive, and the graph is kept for those who come another time

    saved_outputs = tuple(values.index(node) if node in values else len(values) + computed.index(node)
                          for node in saved[len(kept_inputs):])

    def compile_backward(absent: frozenset[int]) -> Compiled | None:
        _adopt_layouts(forward, saved_outputs, backward, len(kept_inputs))
        graph = without_tangents(backward, frozenset(len(saved) + k for k in absent)) if several else backward
        if graph is None:
            return None
        compiled = _compile(graph, info, compile_graph)
        return compiled if around is None else around(compiled)

    plan = ForwardBackward(
        forward=compiled, compile_backward=compile_backward, n_values=len(values),
        saved_inputs=tuple(joint.inputs.index(node) for node in kept_inputs), saved_outputs=saved_outputs)
    return training_callable(plan, joint)


def _adopt_layouts(forward: torch.fx.GraphModule, saved_outputs: Sequence[int], backward: torch.fx.GraphModule,
                   first: int) -> None:
    """The compiler may lay saved values out in its own way and says so in the forward's specs; the backward takes them over."""
    made = next(node for node in reversed(forward.graph.nodes) if node.op == "output").args[0]
    arrive = [node for node in backward.graph.nodes if node.op == "placeholder"][first:]
    for node, position in zip(arrive, saved_outputs, strict=False):
        node.meta["val"] = made[position].meta["val"]


def _generators(joint: Joint, backward: set[torch.fx.Node]) -> list[torch.fx.Node]:
    """Random ops that advance PyTorch's generator, and collectives: they run in the forward whether or not anybody uses them."""
    return [node for node in joint.gm.graph.nodes
            if node.op == "call_function" and node not in backward and has_effect(node)]


def _compile(graph: torch.fx.GraphModule, info: GraphInfo, compile_graph: CompileGraph) -> Compiled:
    if config.verify:
        verify_aten_graph(graph)
    emit("aten_graph", name=info.name, stage=info.kind, graph=graph)
    log("graphs", lambda: f"{info.kind} {info.name}\n{graph.graph.python_code('self').src}")
    with timed(f"compile {info.kind}"):
        return compile_graph(graph, info)

