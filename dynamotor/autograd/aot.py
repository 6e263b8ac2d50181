"""Ahead-of-time autograd: from a torch graph to compiled functional aten graphs, joined to PyTorch's
autograd.

The way: trace jointly → simplify → partition → cut out the graphs → compile them → wrap for run time. A
program whose mutations or aliases cannot be kept exactly runs as the torch graph it is; that is counted and
emitted, never hidden.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base import cache, compat
from ..base.collector import collector_paused
from ..base.config import config
from ..base.errors import BackendError, DynamotorError, is_mistake
from ..base.events import emit, fall_back, log, timed
from ..base.recursion import deep_recursion
from ..graph.control_flow import ControlFlow
from ..graph.graph_text import program_text
from ..graph.modes import preserved_modes
from ..graph.pass_manager import run_passes
from ..graph.plain_data import NotPlain, decode, decode_graph, encode, encode_graph, symbols_by_name
from ..graph.shape_tensor import unseen_by_hooks
from ..graph.shapes import UnsupportedOp
from ..graph.size_nodes import is_size
from ..graph.sizes import DataDependent, Guard
from ..graph.spec import Compiled, GraphInfo, is_lazy, memory_groups
from ..graph.states import is_state_call
from ..graph.subgraphs import Hook
from ..graph.tensor_subclass import flatten_all, is_wrapper
from ..graph.verify_graph import verify_aten_graph, verify_torch_graph
from . import double_backward, wrapped_runtime
from .autograd_nodes import AutogradNode
from .chunked_loss import with_chunked_losses
from .desugar import same_leaves
from .eager_check import check_traced
from .extra_column import without_extra_columns
from .extract import extract, inputs_of
from .graph_split import regions_around
from .joint import Joint, trace_joint
from .late_products import move_behind_their_gradients
from .lazy_compile import compile_late
from .missing_tangents import without_tangents
from .partition import backward_of, partition
from .program_cache import MISSING, Keeper, Kept, Notes, kept, specs_of
from .reach import gradient_groups, is_always_leaf
from .recipe import Recipe
from .runtime import inference_callable, training_callable
from .simplify import PASSES, has_effect, keep_copies
from .stages import Part, StagedCall
from .wrapped_double_backward import WrappedAgain

Node = torch.fx.Node
CompileGraph = Callable[[torch.fx.GraphModule, GraphInfo], Compiled]
# Looks at (and may rewrite) the backward graph, and gives what wraps its compiled form:
# `gm.meta["on_backward"]`. With `of_part(gm, inputs)`, which gives that of a part, the graph may be cut.
OnBackward = Callable[[torch.fx.GraphModule], Callable[[Compiled], Compiled]]
# Calls in a row that are not worth a graph of their own: in training it costs as much as they do.
FEW = 3
# PyTorch's words for a write into a leaf, or into a view of one.
_WRITES_LEAF = "leaf Variable that requires grad is being used in an in-place operation"
_names = itertools.count()


def aot_compile(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    compile_graph: CompileGraph,
    *,
    static_inputs: frozenset[int] = frozenset(),
    cuts: int = 8,
    keeper: Keeper | None = None,
    part: bool = False,
) -> Compiled:
    """Differentiate, functionalise and compile a torch graph.

    `compile_graph(aten_gm, info)` compiles one aten graph. The result takes real tensors, one per
    placeholder, and returns a tuple of the graph's outputs; with grad mode on and inputs that require grad it
    takes part in autograd. The graph is specialised on the example inputs' metadata, `requires_grad`,
    aliasing, and the current grad mode. A `gm.meta["on_backward"]` (an `OnBackward`) is taken out and called
    when there is a backward graph. cuts: ops that may be left to eager PyTorch between compiled parts; with
    more the rest runs as it is. keeper: how compiled graphs are kept on disk, so that another process finds
    the whole result. part: of a graph that was looked at as a whole.
    """
    graded = [
        torch.is_tensor(t) and t.requires_grad and not torch.is_inference_mode_enabled()
        for t in example_inputs
    ]
    with collector_paused(), unseen_by_hooks(), _outside_inference_mode():
        name = f"graph{next(_names)}"
        if config.check and not part and not any(map(is_wrapper, example_inputs)):
            trace = functools.partial(_op_by_op, gm, graded, name, cuts)
            check_traced(gm, example_inputs, graded, trace)
        place = None
        if not _decided_late(gm):  # else its parts are kept
            place = kept(keeper, gm, example_inputs, graded, static_inputs)
        if place is None:
            return _aot_compile(
                gm, example_inputs, graded, compile_graph, name, static_inputs, cuts, keeper, None
            )
        with place.alone("forward", lambda: _found(gm, place, name, compile_graph, cuts)) as found:
            if found is not MISSING:
                return found
            return _aot_compile(
                gm, example_inputs, graded, compile_graph, name, static_inputs, cuts, keeper, place
            )


def _op_by_op(
    gm: torch.fx.GraphModule, graded: Sequence[bool], name: str, cuts: int, inputs: Sequence[Any]
) -> Compiled:
    """The program whose graphs run as they are."""
    return _aot_compile(
        gm, inputs, graded, lambda graph, _: graph.forward, name, frozenset(), cuts, None, None
    )


@contextlib.contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Inference mode hides composite ops' parts from a trace: it is made without gradients instead."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _aot_compile(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    graded: Sequence[bool],
    compile_graph: CompileGraph,
    name: str,
    static_inputs: frozenset[int],
    cuts: int,
    keeper: Keeper | None,
    place: Kept | None,
) -> Compiled:
    if config.verify:
        verify_torch_graph(gm)
    data = _decided_late(gm)
    for node in data:
        if isinstance(node.target, ControlFlow):  # its bodies are graphs, compiled when they first run
            node.target.compile = config.bound(
                functools.partial(_compile_stage, compile_graph=compile_graph, cuts=cuts, keeper=keeper),
                "strict",
            )
    if data:
        _note_live(name, data)
        regions = _regions(gm, example_inputs, data)
        if regions is not None:
            return _in_parts(gm, regions, compile_graph, cuts, keeper)
        longest = _longest_run(gm, set(data))
        if longest:
            why = DataDependent("DM210", f"what follows {data[0].target} cannot be run apart from it")
            _note_fallback(name, why, data[0], "graph" if longest > FEW else "op")
        return gm.forward
    try:
        with timed("trace joint graph"), preserved_modes():
            if torch.is_grad_enabled() or any(n.target is compat.set_grad_enabled for n in gm.graph.nodes):
                _refuse_inference_tensors(example_inputs, graded)
            specs, groups = specs_of(gm, example_inputs), _groups_of_used(gm, example_inputs)
            same = same_leaves(example_inputs)
            changed = with_chunked_losses(without_extra_columns(gm), graded)
            joint = trace_joint(changed, specs, graded, groups, same)
    except Exception as error:  # whatever the trace cannot do, the torch graph itself can
        at = _same_in(gm, getattr(error, "torch_node", None))
        written = isinstance(error, DynamotorError) and error.code == "DM231"
        regions = None
        if cuts and not config.strict and (at or written):
            regions = _regions(gm, example_inputs, [at] if at else None)
        _note_fallback(name, _of_input(error), at, "graph" if regions is None else "op")
        return gm.forward if regions is None else _in_parts(gm, regions, compile_graph, cuts - 1, keeper)
    with timed("simplify joint graph"):
        if joint.gradient_of:
            keep_copies(joint.gm)
        run_passes(joint.gm, PASSES, stage="joint")
    if joint.boundary is not None:
        static_inputs, place = joint.boundary.static(static_inputs), None
    emit("joint", name=name, graph=joint.gm)
    log("graphs", lambda: f"joint {name}\n{program_text(joint.gm)}")
    if not joint.gradient_of:
        return _compile_inference(joint, compile_graph, name, static_inputs, place)
    leaves: frozenset[int] = frozenset()
    if joint.boundary is None:
        leaves = frozenset(i for i, t in enumerate(example_inputs) if is_always_leaf(t, i in static_inputs))
    on_backward = gm.meta.pop("on_backward", None)
    return _compile_training(gm, joint, compile_graph, name, static_inputs, cuts, leaves, on_backward, place)


def _same_in(gm: torch.fx.GraphModule, at: Node | None) -> Node | None:
    """The node of a graph that one of its copy stands for."""
    return (
        at
        if at is None or at.graph is gm.graph
        else next((n for n in gm.graph.nodes if n.name == at.name), None)
    )


def _decided_late(gm: torch.fx.GraphModule) -> list[Node]:
    """The nodes around which the graph is cut: data decides their results' sizes, or they set a state."""
    calls = [
        n for n in gm.graph.nodes if n.op.startswith("call")
    ]  # a number that was read is an input of a part
    return [n for n in calls if _is_apart(n)]


def _longest_run(gm: torch.fx.GraphModule, apart: Container[Node]) -> int:
    """How many calls stand together, at most: none of `apart`, no write of what data counts between."""
    longest = run = 0
    for node in gm.graph.nodes:
        if node in apart or node.target is torch.ops.aten.index_put_.default:
            run = 0
        elif node.op.startswith("call") and node.target is not operator.getitem and not is_size(node):
            run += 1
        longest = max(longest, run)
    return longest


def _is_apart(node: Node) -> bool:
    return (
        bool(node.meta.keys() & _APART)
        or isinstance(node.target, ControlFlow)
        or is_state_call(node)
        or node.target
        in ("requires_grad_", setattr)  # what follows takes the tensor as a leaf, or with other data
    )


_APART = frozenset(("data_dependent", "live", "view_of_leaf"))


def _note_live(name: str, nodes: Sequence[Node]) -> None:
    """Say which calls PyTorch makes each time, and why."""
    for node in nodes:
        if "live" in node.meta:
            _note_fallback(name, UnsupportedOp(*node.meta["live"]), node, "op")


def _in_parts(
    gm: torch.fx.GraphModule,
    regions: Sequence[tuple[int, int]],
    compile_graph: CompileGraph,
    cuts: int,
    keeper: Keeper | None,
) -> Compiled:
    """The calls of the regions in eager PyTorch, those before, between and after them compiled."""
    on_part = getattr(gm.meta.get("on_backward"), "of_part", None)
    compiled = functools.partial(
        _compile_stage, compile_graph=compile_graph, cuts=cuts, keeper=keeper, on_part=on_part
    )
    calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    parts: list[Part] = []
    end = 0
    for start, stop in regions:
        parts += [(calls[end:start], compiled), (calls[start:stop], None)]
        end = stop
    return StagedCall(gm, [part for part in (*parts, (calls[end:], compiled)) if part[0]])


def _refuse_inference_tensors(inputs: Sequence[Any], graded: Sequence[bool]) -> None:
    """Autograd saves none: a compiled backward may want one where eager's wants a value made of it."""
    UnsupportedOp.when(
        any(graded) and any(torch.is_tensor(t) and t.is_inference() for t in inputs),
        "DM244",
        "an input of a graph with gradients was made in inference mode",
        cure="clone() it first",
    )


def groups_of(inputs: Sequence[Any]) -> list[int]:
    """The inputs' memory groups; refuses tensors whose memory does not hold their values."""
    UnsupportedOp.when(
        any(is_lazy(t) for t in inputs if torch.is_tensor(t)),
        "DM235",
        "an input is lazy: a conjugate, a negative or zeros without memory",
        cure="clone() it first",
    )
    return memory_groups(inputs)


def _groups_of_used(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[int]:
    """The memory groups of a graph's flat inputs. An input that nothing uses is alone: a wrapper's inner
    tensors are inputs beside it, for their guards.
    """
    groups = groups_of(flatten_all(inputs))
    at = 0
    for node, example in zip(gm.graph.find_nodes(op="placeholder"), inputs):
        end = at + len(flatten_all([example]))
        if not node.users:
            groups[at:end] = [-1 - k for k in range(at, end)]
        at = end
    return groups


def _begins_transform(node: Node) -> bool:
    """Whether a node of torch.compile's begins a level of `vmap` or `grad`, which a later one ends."""
    name = getattr(node.target, "__name__", "")
    return name.endswith("_increment_nesting") and name.startswith(("_vmap", "_grad", "_jvp", "_func"))


def _regions(
    gm: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor], ats: Sequence[Node] | None
) -> list[tuple[int, int]] | None:
    """The calls around those that failed that eager PyTorch is to run; None: all of them."""
    one = "on_backward" in gm.meta and not hasattr(gm.meta["on_backward"], "of_part")
    # one backward is wanted; a hook is to see the whole gradient; no value leaves a transform
    if one or any(isinstance(node.target, Hook) or _begins_transform(node) for node in gm.graph.nodes):
        return None
    try:
        with preserved_modes():
            return regions_around(gm, example_inputs, specs_of(gm, example_inputs), ats)
    except (
        RuntimeError,
        NotImplementedError,
        TypeError,
        ValueError,
    ) as other:  # what PyTorch says of ops on ShapeTensors
        log("fallbacks", f"the graph is not cut: {other}")
        return None


def _compile_stage(
    gm: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    compile_graph: CompileGraph,
    cuts: int,
    keeper: Keeper | None,
    on_part: Callable[..., OnBackward] | None = None,
) -> Compiled:
    if on_part is not None:
        gm.meta["on_backward"] = on_part(gm, inputs)
    return aot_compile(
        gm,
        inputs,
        compile_graph,
        static_inputs=gm.meta.get("static_inputs", frozenset()),
        cuts=cuts,
        keeper=keeper,
        part=True,
    )


def _of_input(error: Exception) -> Exception:
    """The error, or where autograd refuses a write into a leaf of the trace, one that speaks of the input:
    the user's tensor need not be a leaf, and eager then takes the write.
    """
    if not isinstance(error, UnsupportedOp) and _WRITES_LEAF in str(error):
        return UnsupportedOp(
            "DM231",
            "an input that takes part in the gradient is changed in place",
            cure="use the out-of-place op",
        )
    return error


def _note_fallback(name: str, error: Exception, at: Node | None, what: str) -> None:
    if config.verify and is_mistake(error):
        raise error
    code = error.code if isinstance(error, DynamotorError) else type(error).__name__
    fall_back(
        f"aot.{code}", what=what, name=name, reason=str(error), code=code, where=at and at.meta.get("where")
    )
    log("fallbacks", f"{name}: a {what} runs in eager PyTorch: {error}")
    if config.strict:
        raise BackendError(
            "DM409",
            "the graph cannot be differentiated ahead of time",
            why=str(error),
            cure="see the cause, or set dynamotor.config.strict = False to run it op by op",
        ) from error


def _static(nodes: Sequence[torch.fx.Node], joint: Joint, static_inputs: frozenset[int]) -> frozenset[int]:
    """Positions in `nodes` of inputs that are the same tensor at each call."""
    first_constant = len(joint.inputs) - len(joint.constants)
    always = {node for i, node in enumerate(joint.inputs) if i in static_inputs or i >= first_constant}
    return frozenset(i for i, node in enumerate(nodes) if node in always)


def _writes(joint: Joint) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    return [
        (joint.inputs[i], value)
        for i, value in zip(joint.mutated, joint.output[1], strict=True)
        if value is not joint.inputs[i]
    ]


def _compile_inference(
    joint: Joint, compile_graph: CompileGraph, name: str, static_inputs: frozenset[int], place: Kept | None
) -> Compiled:
    values, recipe = joint.output[0], joint.recipe()
    graph = extract(
        joint.gm.graph, joint.inputs, values, writes=_writes(joint), keep=_generators(joint, set())
    )
    info = GraphInfo("inference", name, _static(joint.inputs, joint, static_inputs), len(values))
    compiled = _compile_first(graph, info, compile_graph, place, recipe, [])
    if joint.boundary is not None:
        return wrapped_runtime.inference_callable(compiled, recipe, joint.boundary)
    return inference_callable(compiled, recipe)


def _compile_first(
    graph: torch.fx.GraphModule,
    info: GraphInfo,
    compile_graph: CompileGraph,
    place: Kept | None,
    recipe: Recipe,
    backwards: Sequence[_Backward],
) -> Compiled:
    """Compile the graph of a forward, or of a program without backward; and keep the whole program but its
    backwards' code.
    """
    notes = Notes()
    with notes.taken():
        compiled = compile_verified(graph, info, compile_graph)
    for backward in backwards:
        _adopt_layouts(graph, backward.saved_outputs, backward.graph(), len(backward.saved_inputs))
    if place is not None:
        own = place.env.guards[place.assumed :] if place.env is not None else ()
        place.keep("forward", compiled, notes, own, lambda: _plain_program(place, recipe, backwards))
    return compiled


def _plain_program(place: Kept, recipe: Recipe, backwards: Sequence[_Backward]) -> dict[str, Any]:
    """The stored parts of a program beside its compiled forward. Graphs are texts in the text: few are read
    again.
    """
    NotPlain.when(recipe.constants, "a tensor that the program holds as a constant")
    rows = []
    for one in backwards:
        info = replace(one.info, name="")  # counts the programs of this process
        facts = one.saved_inputs, one.saved_outputs, one.gradients, one.tangents, one.reach, info, one.unsaved
        rows.append([encode(facts), json.dumps(encode_graph(one.graph()))])
    place.backwards = cache.digest(json.dumps(rows))
    return {"recipe": encode(recipe), "backwards": rows}


def _found(gm: torch.fx.GraphModule, place: Kept, name: str, compile_graph: CompileGraph, cuts: int) -> Any:
    """The program as an earlier process kept it, or MISSING."""

    def build(data: dict[str, Any], forward: Compiled | None, guards: list[Guard]) -> Compiled:
        for guard in guards:
            guard.expr.env.assume(guard)
        symbols = symbols_by_name(place.env)
        recipe: Recipe = decode(data["recipe"], symbols)
        backwards: list[_Backward] = []
        for facts, text in data["backwards"]:
            inputs, outputs, gradients, tangents, reach, info, unsaved = decode(facts, symbols)
            info = replace(info, name=_backward_name(name, len(backwards)))
            backwards.append(
                _Backward(
                    functools.partial(_graph_of, text, symbols),
                    inputs,
                    outputs,
                    gradients,
                    tangents,
                    reach,
                    info,
                    unsaved,
                )
            )
        assert forward is not None
        place.backwards = cache.digest(json.dumps(data["backwards"]))
        if not backwards:
            return inference_callable(forward, recipe)
        second = _again(gm, recipe, backwards, compile_graph, cuts)
        return training_callable(
            forward, _autograd_nodes(backwards, compile_graph, None, place), recipe, second
        )

    return place.find("forward", name, build)


def _graph_of(text: str, symbols: Mapping[str, Any]) -> torch.fx.GraphModule:
    return decode_graph(json.loads(text), symbols)


@dataclass(frozen=True)
class _Cut:
    """The joint graph cut in two. `saved`: the backward's inputs, `kept` inputs first; `results` by place
    in the forward.
    """

    forward: torch.fx.GraphModule
    saved: list[Node]
    kept: list[Node]
    results: dict[Node, int]
    backward_nodes: set[Node]


@dataclass(frozen=True)
class _Backward:
    """One of a program's backwards before it is compiled. `AutogradNode` describes the fields; `graph`
    gives its graph.
    """

    graph: Callable[[], torch.fx.GraphModule]
    saved_inputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    gradients: tuple[int, ...]
    tangents: tuple[int, ...]
    reach: tuple[frozenset[int], ...]  # for each gradient, the tangents that lead to it
    info: GraphInfo
    unsaved: frozenset[int]

    @property
    def n_saved(self) -> int:
        """How many of the graph's inputs come before the tangents."""
        return len(self.saved_inputs) + len(self.saved_outputs)

    def without(self, absent: frozenset[int]) -> torch.fx.GraphModule | None:
        """The graph without the tangents at these positions; None where zeros have to stand in."""
        reached = frozenset(n for n, tangents in enumerate(self.reach) if tangents - absent)
        first = self.n_saved
        return without_tangents(self.graph(), frozenset(first + k for k in absent), first, reached)


def _backward_name(name: str, number: int) -> str:
    return f"{name}_backward{number or ''}"


def _compile_training(
    gm: torch.fx.GraphModule,
    joint: Joint,
    compile_graph: CompileGraph,
    name: str,
    static_inputs: frozenset[int],
    cuts: int,
    leaves: frozenset[int],
    on_backward: OnBackward | None,
    place: Kept | None,
) -> Compiled:
    with timed("partition"):
        cut = _cut(joint, name, static_inputs)
        groups = (
            _groups(joint, cut, leaves)
            if on_backward is None and joint.boundary is None
            else {_everything(joint): joint.gradient_of}
        )
        parts = _parts(joint, cut, groups)
    around = on_backward(parts[0][-1]) if on_backward is not None else None
    backwards = []
    for k, (group, saved, tangents, graph) in enumerate(parts):
        inputs = tuple(joint.inputs.index(node) for node in saved if node in cut.kept)
        outputs = tuple(cut.results[node] for node in saved[len(inputs) :])
        info = GraphInfo("backward", _backward_name(name, k), _static(saved, joint, static_inputs))
        reach = tuple(
            frozenset(k for k, tangent in enumerate(tangents) if joint.reach[i] >> tangent & 1) for i in group
        )
        graph_of, unsaved = functools.partial(_itself, graph), _unsaved(joint, inputs, graph)
        backwards.append(_Backward(graph_of, inputs, outputs, tuple(group), tangents, reach, info, unsaved))
    recipe = replace(double_backward.repeatable(joint), contents=_contents(joint, cut))
    info = GraphInfo("forward", name, _static(joint.inputs, joint, static_inputs), recipe.n_values)
    forward = _compile_first(cut.forward, info, compile_graph, place, recipe, backwards)
    nodes = _autograd_nodes(backwards, compile_graph, around, place)
    if joint.boundary is not None:
        repeated = WrappedAgain(gm, recipe, joint.boundary)
        return wrapped_runtime.training_callable(forward, nodes[0], recipe, joint.boundary, repeated)
    second = None if around is not None else _again(gm, recipe, backwards, compile_graph, cuts)
    return training_callable(forward, nodes, recipe, second)


def _again(
    gm: torch.fx.GraphModule,
    recipe: Recipe,
    backwards: Sequence[_Backward],
    compile_graph: CompileGraph,
    cuts: int,
) -> double_backward.Again | None:
    """What second derivatives come from; None where the graph cannot run again."""
    if recipe.once:
        return None
    watched = set.intersection(*(set(one.saved_inputs) - one.unsaved for one in backwards))
    tensors = tuple(sorted(set(range(recipe.n_inputs)).difference(recipe.symbols, recipe.mutated)))
    unwatched = tuple(i for i in tensors if i not in watched)

    @config.bound
    def compiled(first: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Compiled:
        with torch.enable_grad():
            return aot_compile(first, inputs, compile_graph, cuts=cuts)

    return double_backward.Again(gm, compiled, recipe, unwatched, tensors, config.fallback_random)


def _itself(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    return graph


def _autograd_nodes(
    backwards: Sequence[_Backward],
    compile_graph: CompileGraph,
    around: Callable[[Compiled], Compiled] | None,
    place: Kept | None,
) -> list[AutogradNode]:
    return [
        AutogradNode(
            config.bound(_BackwardCompiler(one, k, compile_graph, around, place), "strict"),
            one.saved_inputs,
            one.saved_outputs,
            one.gradients,
            one.tangents,
            one.reach,
            functools.partial(_reads, one),
            one.unsaved,
        )
        for k, one in enumerate(backwards)
    ]


def _unsaved(joint: Joint, saved_inputs: Sequence[int], graph: torch.fx.GraphModule) -> frozenset[int]:
    """The inputs that only a custom autograd function's backward reads, off its context. One from which the
    backward also computes forward values again has to be as it was.
    """
    return frozenset(
        i
        for i, node in zip(saved_inputs, graph.graph.nodes, strict=False)
        if i in joint.on_contexts and all(user.meta.get("stage") == "backward" for user in node.users)
    )


def _reads(backward: _Backward, absent: frozenset[int]) -> frozenset[int]:
    """Which saved tensors (by place, sizes left out) the backward reads where some tangents do not arrive."""
    graph = backward.without(absent) or backward.graph()
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"][: backward.n_saved]
    return frozenset(k for k, node in enumerate(n for n in inputs if not is_size(n)) if node.users)


def _cut(joint: Joint, name: str, static_inputs: frozenset[int]) -> _Cut:
    chosen = partition(joint, static_inputs)
    emit("partition", name=name, saved_bytes=chosen.saved_bytes, eager_bytes=chosen.eager_bytes)
    backward_nodes = backward_of(joint)
    nodes = [node for node in joint.gm.graph.nodes if node.op != "output"]
    move_behind_their_gradients(nodes, backward_nodes, chosen.makes_again)
    values = joint.output[0]
    written = {joint.inputs[i] for i in joint.mutated}
    kept = [node for node in chosen.saved if node.op == "placeholder" and node not in written]
    free = {
        node for node in values if "copied" not in node.meta
    }  # else the program may have the copy, and write it
    outputs = [*values, *(node for node in chosen.saved if node not in kept and node not in free)]
    forward = extract(
        joint.gm.graph, joint.inputs, outputs, writes=_writes(joint), keep=_generators(joint, backward_nodes)
    )
    places = list(enumerate(outputs))
    results = {
        node: k for k, node in (*reversed(places), *places[len(values) :])
    }  # the first of equal values
    return _Cut(
        forward, [*kept, *(node for node in chosen.saved if node not in kept)], kept, results, backward_nodes
    )


def _contents(joint: Joint, cut: _Cut) -> dict[int, int]:
    """The saved results that are the new contents of inputs, where eager saves the inputs: autograd has to
    notice a later write to them.
    """
    written = dict(zip(joint.output[1], joint.mutated, strict=True))
    places = {
        node: i for node, i in written.items() if i in joint.saved_written and i not in joint.gradient_of
    }
    return {cut.results[node]: places[node] for node in cut.saved if node in places}


def _everything(joint: Joint) -> int:
    return (1 << len(joint.tangents)) - 1


def _groups(joint: Joint, cut: _Cut, leaves: frozenset[int]) -> dict[int, list[int]]:
    """Inputs that share an autograd node, by the tangents that lead to them. What has an effect cannot run in
    two of them.
    """
    everything = _everything(joint)
    graded = {
        i: joint.reach[i]
        for i, grad in zip(joint.gradient_of, joint.output[2], strict=True)
        if grad is not None
    }
    groups = gradient_groups(graded, everything, leaves)
    covered = functools.reduce(operator.or_, groups, 0)
    if (
        len(groups) < 2
        or covered != everything
        or any(has_effect(node) for node in cut.backward_nodes if node.op == "call_function")
    ):
        return {everything: joint.gradient_of}
    return groups


def _parts(
    joint: Joint, cut: _Cut, groups: Mapping[int, list[int]]
) -> list[tuple[list[int], list[Node], tuple[int, ...], torch.fx.GraphModule]]:
    """The backward of each group, and where one group has all tangents, it as the last, and one for all
    inputs.
    """
    everything = _everything(joint)
    if len(groups) == 1 or everything not in groups:
        return [(group, *_backward_graph(joint, cut, group, mask)) for mask, group in groups.items()]
    own = groups[everything]
    others = {mask: group for mask, group in groups.items() if mask != everything}
    inputs = [i for group in (*others.values(), own) for i in group]
    whole = _backward_graph(joint, cut, inputs, everything)
    return [
        *[(group, *_backward_graph(joint, cut, group, mask)) for mask, group in others.items()],
        (own, *_backward_graph(joint, cut, own, everything, whole[0])),
        (inputs, *whole),
    ]


def _backward_graph(
    joint: Joint, cut: _Cut, group: Sequence[int], mask: int, saved: list[Node] | None = None
) -> tuple[list[Node], tuple[int, ...], torch.fx.GraphModule]:
    """A backward for these inputs: the values it gets of the forward (those it reads, unless they are given),
    its tangents and its graph.
    """
    gradients = dict(zip(joint.gradient_of, joint.output[2], strict=True))
    outputs = [gradients[i] for i in group]
    if saved is None:
        needed = inputs_of(outputs, set(cut.saved))
        saved = [node for node in cut.saved if node in needed or is_size(node)]
    tangents = tuple(k for k in range(len(joint.tangents)) if mask >> k & 1)
    graph = extract(
        joint.gm.graph, [*saved, *(joint.tangents[k] for k in tangents)], outputs, anchored=cut.backward_nodes
    )
    return saved, tangents, graph


@dataclass(frozen=True)
class _BackwardCompiler:
    """Compiles a backward when it is first called, for tangents of which some do not arrive (their
    positions).
    """

    backward: _Backward
    number: int
    compile_graph: CompileGraph
    around: Callable[[Compiled], Compiled] | None
    place: Kept | None

    def __call__(self, absent: frozenset[int]) -> Compiled | None:
        make, graph = functools.partial(self.compiled, absent), functools.partial(self.graph, absent)
        with collector_paused():
            if self.place is None:
                call = make()
            else:
                part = f"backward {self.number} {sorted(absent)}"
                call = self.place.backward(part, self.backward.info.name, make, graph)
        return call if self.around is None or call is None else self.around(call)

    def compiled(self, absent: frozenset[int]) -> Compiled | None:
        """Compile it now."""
        graph, info = self.graph(absent), self.backward.info
        if graph is None:
            return None
        compile = functools.partial(compile_verified, info=info, compile_graph=self.compile_graph)
        refused = functools.partial(_note_fallback, info.name, at=None, what="graph")
        return compile_late(graph, info.name, compile, refused)

    def graph(self, absent: frozenset[int]) -> torch.fx.GraphModule | None:
        """The graph of what arrives; None when nothing does."""
        graph = self.backward.graph()
        n_inputs = sum(node.op == "placeholder" for node in graph.graph.nodes)
        # With one tangent the graph is kept as it is, for other tangents.
        return graph if n_inputs <= self.backward.n_saved + 1 else self.backward.without(absent)


def _adopt_layouts(
    forward: torch.fx.GraphModule, saved_outputs: Sequence[int], backward: torch.fx.GraphModule, first: int
) -> None:
    """The compiler may choose the layout of saved values and says so in the forward's specs; the backward
    takes them over.
    """
    made = next(node for node in reversed(forward.graph.nodes) if node.op == "output").args[0]
    arrive = [node for node in backward.graph.nodes if node.op == "placeholder"][first:]
    for node, position in zip(arrive, saved_outputs, strict=False):
        node.meta["traced"], node.meta["val"] = node.meta["val"], made[position].meta["val"]


def _generators(joint: Joint, backward: set[torch.fx.Node]) -> list[torch.fx.Node]:
    """Random ops that advance PyTorch's generator, and collectives: they run in the forward whether or not
    anybody uses them.
    """
    return [
        node
        for node in joint.gm.graph.nodes
        if node.op == "call_function" and node not in backward and has_effect(node)
    ]


def compile_verified(graph: torch.fx.GraphModule, info: GraphInfo, compile_graph: CompileGraph) -> Compiled:
    """One aten graph, verified and shown, and compiled."""
    sizes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder" and is_size(node)]
    if sizes:
        graph.meta["shape_env"] = sizes[0].env
    if config.verify:
        verify_aten_graph(graph)
    emit("aten_graph", name=info.name, stage=info.kind, graph=graph)
    log("graphs", lambda: f"{info.kind} {info.name}\n{program_text(graph)}")
    with timed(f"compile {info.kind}"), deep_recursion():
        return compile_graph(graph, info)
