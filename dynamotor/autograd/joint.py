"""The joint trace: the torch graph runs once over ShapeTensors, then PyTorch's own engine runs its backward.

The result is one fx graph of functional aten ops whose output is (values, written inputs, gradients), and a
plan of how the user's outputs come from the values and the inputs.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..base import compat
from ..base.compat import tree_leaves
from ..graph.custom_function import Apply
from ..graph.module import graph_module
from ..graph.result_strides import is_dense
from ..graph.shape_tensor import ShapeTensor, UnsupportedOp, recording
from ..graph.sizes import Size, Symbol
from ..graph.spec import TensorSpec, aten, contiguous_stride
from ..graph.sym_int import from_torch
from ..graph.tensor_subclass import WrapperSpec, flatten, is_wrapper
from . import decompositions, randomness  # noqa: F401  (they register their rules)
from .aten_recorder import GraphRecorder
from .calls import no_autocast
from .desugar import (
    Feed,
    Results,
    Spec,
    WrapperBoundary,
    boundary_of,
    feed,
    refuse_views,
    take_apart,
    tangent_of,
    with_offsets_of,
)
from .extract import is_view
from .functional import TracedAlias, read, with_holes
from .reach import kept_tensors, reaching, saving_parts
from .recipe import OutputPlan, Recipe, Step


@dataclass
class Joint:
    """A traced program. Values are tensors the compiled forward returns; gradients stand per input, None
    where none flows.
    """

    gm: torch.fx.GraphModule
    inputs: list[torch.fx.Node]
    constants: list[torch.Tensor]
    tangents: list[torch.fx.Node]
    plans: list[OutputPlan]
    differentiable: list[bool]  # per value
    mutated: dict[int, int]  # input indices, and how many ops write each
    gradient_of: list[int] = field(default_factory=list)  # input indices that want a gradient
    reach: dict[int, int] = field(
        default_factory=dict
    )  # for each of these, the tangents that lead to it: bit k is the k-th
    inner: dict[int, int] = field(
        default_factory=dict
    )  # for each user output that others are computed from, their tangents
    versions: dict[int, int] = field(default_factory=dict)  # of the values that were written, by place
    parts: tuple[int, ...] = ()  # tangents (bits) in groups: see `saving_parts`
    on_contexts: frozenset[int] = frozenset()  # inputs on contexts of custom functions
    boundary: WrapperBoundary | None = None  # of a program with tensors of wrapper subclasses
    results: tuple[int, ...] = ()  # the values that are results of calls that are not repeated
    saved_written: frozenset[int] = frozenset()  # input indices that eager saves as the program leaves them
    reshaped: dict[int, int] = field(default_factory=dict)  # see `Recipe`

    @property
    def symbols(self) -> dict[int, Symbol]:
        """The inputs that are sizes (plain ints at a call)."""
        vals = {i: node.meta["val"] for i, node in enumerate(self.inputs)}
        return {i: only for i, val in vals.items() if type(val) is Size for only in val.symbols}

    @property
    def output(self) -> tuple[list[Any], list[Any], list[Any]]:
        """(values, new contents of the mutated inputs, gradients): the nodes, as they are now."""
        return next(iter(reversed(self.gm.graph.nodes))).args[0]

    def recipe(self) -> Recipe:
        """The facts that the program's run-time wrapper needs."""
        values, _, grads = self.output
        return Recipe(
            len(self.inputs) - len(self.constants),
            tuple(self.constants),
            self.symbols,
            tuple(self.plans),
            len(values),
            tuple(self.differentiable),
            dict(self.mutated),
            tuple(self.gradient_of),
            tuple(grad is not None for grad in grads),
            tuple(node.meta["val"] for node in self.tangents),
            self.inner,
            self.versions,
            parts=self.parts,
            results=self.results,
            reshaped=self.reshaped,
        )


def trace_joint(
    gm: torch.fx.GraphModule,
    specs: Sequence[Spec],
    requires_grad: Sequence[bool],
    memory_groups: Sequence[int],
    same: Mapping[int, int],
) -> Joint:
    """Trace a torch graph. `memory_groups` numbers the memory of the flat inputs (wrappers taken apart):
    equal numbers share memory. same: see `feed`.

    A spec that is a `Size` (a symbol) stands for an int of each call.

    Raises UnsupportedOp (or PyTorch's own error) for programs that must run as they are.
    """
    recorder = GraphRecorder(gm.meta.get("shape_env"))
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    given = feed(recorder, names, specs, requires_grad, same)
    placeholders = list(recorder.graph.nodes)[: len(given.leaves)]
    inputs = {i: tensor for i, tensor in enumerate(given.leaves) if type(tensor) is ShapeTensor}
    aliases = {i: tensor.note for i, tensor in inputs.items()}
    with recording(recorder), torch.set_grad_enabled(torch.is_grad_enabled()):
        made = run_torch_graph(gm, recorder, given.values)
        refuse_views(gm, made, given)
        found = take_apart(made, given)
        given.check()
    torch.clear_autocast_cache()
    results = found.flat
    _refuse_views_of_functions(results, recorder.applied)
    check_inputs(inputs, aliases, given.graded, memory_groups)
    plans, sources = plan_outputs(results, inputs)
    values = [with_holes(read(alias, recorder.emit), alias.spec, recorder.emit) for alias, _ in sources]
    once = [] if given.has_wrapper() or found.wrappers else recorder.once
    values += dict.fromkeys(node for node in once if node not in values)
    roots = [tensor for _, tensor in sources] + [None] * (len(values) - len(sources))
    mutated = _written_inputs(gm, inputs)
    contents = [read(inputs[i].note, recorder.emit) for i in mutated]
    differentiable = [tensor is not None and tensor.requires_grad for tensor in roots]
    wanted = [*[t for t, graded in zip(roots, differentiable, strict=True) if graded], *found.graded]
    if wanted:
        _check_leaves([*results, *found.graded], [*inputs.values(), *given.values])
        plain = {id(value) for value in given.values if type(value) is ShapeTensor}
        taking_part = [i for i in mutated if id(inputs[i]) not in plain or _takes_part(inputs[i])]
        _check_gradients(requires_grad, given.written(taking_part))
    leaves = [i for i, needs in enumerate(requires_grad) if needs] if wanted else []
    kept = _kept_on_contexts(wanted, inputs, mutated)
    back = _differentiated(recorder, given, found, wanted, leaves) if leaves else _Gradients()
    with recording(recorder), torch.no_grad():
        leaving = [(i, *one) for i, one in zip(leaves, back.leaving, strict=True)]
        boundary = boundary_of(given, specs, found, back.arriving, leaving)
    recorder.graph.output((values, contents, back.nodes))
    saved_written = _saved_written(dict(zip(mutated, contents, strict=True)), set(placeholders))
    return Joint(
        graph_module(recorder.graph, "Joint"),
        placeholders + [node for node, _ in recorder.constants],
        [tensor for _, tensor in recorder.constants],
        back.tangents,
        plans,
        differentiable,
        mutated,
        back.places,
        dict(zip(back.places, back.reached, strict=True)),
        {k: mask for k, mask in enumerate(back.inner) if mask},
        {k: alias.memory.version for k, (alias, _) in enumerate(sources) if alias.memory.version},
        back.parts,
        kept,
        boundary,
        tuple(map(values.index, once)),
        saved_written,
        {
            i: t._version
            for i, t in inputs.items()
            if i not in mutated and not t.is_inference() and t._version
        },
    )


def _saved_written(contents: dict[int, torch.fx.Node], placeholders: set[torch.fx.Node]) -> frozenset[int]:
    """The written inputs that eager itself saves: its backward reads their new contents, and no other tensor
    holds these. Asked before the graph is simplified: a `clone()` still has a node of its own.
    """

    def is_read(node: torch.fx.Node) -> bool:
        return any(
            user.meta.get("stage") == "backward" or is_view(user) and is_read(user) for user in node.users
        )

    own = {i: node for i, node in contents.items() if node not in placeholders and "copied" not in node.meta}
    return frozenset(i for i, node in own.items() if is_read(node))


def _written_inputs(gm: torch.fx.GraphModule, inputs: dict[int, ShapeTensor]) -> dict[int, int]:
    """The inputs that the program writes, and how many counts of writes autograd sees of each."""
    versions = {i: tensor.note.memory.version for i, tensor in inputs.items()}
    written = {i: n - inputs[i].note.memory.uncounted for i, n in versions.items() if n > 0}
    if any(node.target is getattr and node.args[1:] == ("data",) for node in gm.graph.nodes):
        return {i: inputs[i]._version for i in written}  # writes into `.data` are not counted
    return written


def _kept_on_contexts(
    roots: Sequence[torch.Tensor], inputs: dict[int, ShapeTensor], mutated: Iterable[int]
) -> frozenset[int]:
    """The inputs of which custom autograd functions keep the memory (`ctx.state = state`) and nothing saves
    it."""
    on_contexts, saved = (
        {t.note.memory for t in tensors if type(t) is ShapeTensor} for tensors in kept_tensors(roots)
    )
    kept = frozenset(i for i, tensor in inputs.items() if tensor.note.memory in on_contexts)
    UnsupportedOp.when(
        kept & set(mutated),
        "DM290",
        "an autograd function keeps an input on ctx that the graph writes",
        cure="pass it to ctx.save_for_backward, or keep a clone",
    )
    return frozenset(i for i in kept if inputs[i].note.memory not in saved)


# Their gradients are zeros that do not depend on the one that arrives.
_NAMES = ("sgn", "angle", "copysign", "nextafter")
_SIGNS = (*_NAMES, *(f"{name}_" for name in _NAMES), *(getattr(torch, name) for name in _NAMES))
_COMPARISONS = (
    "eq_", "ge_", "gt_", "le_", "lt_", "ne_",
    "greater_", "greater_equal_", "less_", "less_equal_", "not_equal_",
)  # fmt: skip


def run_torch_graph(
    gm: torch.fx.GraphModule, recorder: GraphRecorder, inputs: Sequence[ShapeTensor]
) -> tuple[Any, ...]:
    """Interpret the torch graph; each node's user line is noted on the aten nodes that it makes."""
    env: dict[torch.fx.Node, Any] = {}
    lookup = env.__getitem__
    feed = iter(inputs)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(feed)
            continue
        args = torch.fx.node.map_arg(node.args, lookup)
        if node.op == "output":
            return tuple(args[0]) if isinstance(args[0], (tuple, list)) else (args[0],)
        kwargs = torch.fx.node.map_arg(node.kwargs, lookup) if node.kwargs else {}
        recorder.where, recorder.recompute = node.meta.get("where"), node.meta.get("recompute", False)
        memories = [env[n].note.memory for n in node.all_input_nodes if type(env[n]) is ShapeTensor]
        given = [(memory, memory.version) for memory in memories]
        zeros = _zeros_made(node.target, [*args, *kwargs.values()])
        recorder.wrote = []
        try:
            if "live" in node.meta:
                raise UnsupportedOp(*node.meta["live"])
            if node.op == "call_function":
                env[node] = node.target(*args, **kwargs)
            elif node.op == "call_method":
                env[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            else:
                raise UnsupportedOp(
                    "DM242", f"a {node.op} node in a torch graph", cure="pass outside tensors as placeholders"
                )
        except Exception as error:
            error.__dict__["torch_node"] = node  # around which the graph may be cut
            raise
        _note_order(given, env[node])
        if recorder.graded and "once" in node.meta:
            wrote = set(map(id, recorder.wrote))  # returned or not, their content comes behind the results
            fresh = [t for t in tree_leaves(env[node]) if t is not None and id(t) not in wrote]
            recorder.once += [read(t.note, recorder.emit) for t in (*fresh, *recorder.wrote)]
        if isinstance(node.target, Apply):
            recorder.applied += [(t.note, node) for t in _views_of(args, env[node])]
        recorder.made.append((compat.sequence_number(), node))
        if zeros and env[node].requires_grad:
            env[node].register_hook(lambda gradient, zeros=zeros: recorder.arrives(zeros, gradient))
    raise UnsupportedOp("DM242", "a torch graph without output")


def _zeros_made(target: Any, args: Sequence[Any]) -> int:
    """How many zeros the op's formula makes of its operands; a sign's, of the last one, which complex numbers
    give a slope.
    """
    operands = args[-1:] if target in _SIGNS else args if target in _COMPARISONS else ()
    graded = [each for each in operands if isinstance(each, torch.Tensor) and each.requires_grad]
    return sum(target in _COMPARISONS or not each.is_complex() for each in graded)


def _views_of(args: Sequence[Any], result: Any) -> list[ShapeTensor]:
    """The views of its arguments that a custom function returns. An argument that it returns as written is
    none.
    """
    given = [a for a in tree_leaves(args) if type(a) is ShapeTensor]
    memories = {a.note.memory for a in given}
    tensors = [t for t in tree_leaves(result) if type(t) is ShapeTensor and t.requires_grad]
    return [t for t in tensors if t.note.memory in memories and all(t is not a for a in given)]


def _refuse_views_of_functions(
    results: Sequence[Any], applied: Sequence[tuple[TracedAlias, torch.fx.Node]]
) -> None:
    """Leave a custom function to PyTorch whose view of an argument is a result, or is viewed by one: PyTorch
    refuses writes into it, and a view that is replayed would lack the function in its history. The graph is
    cut around its node.
    """
    nodes = {id(alias): node for alias, node in applied}
    graded = [t for t in results if nodes and type(t) is ShapeTensor and t.requires_grad]
    for tensor in graded:
        alias: TracedAlias | None = tensor.note
        while alias is not None:
            if id(alias) in nodes:
                error = UnsupportedOp(
                    "DM297",
                    "a result is the view of an argument that a custom autograd function returns",
                    cure="return a clone from the function's forward",
                )
                error.__dict__["torch_node"] = nodes[id(alias)]
                raise error
            alias = alias.parent


def _note_order(given: Sequence[tuple[Any, int]], result: Any) -> None:
    """Whether a memory is written after autograd has recorded a call with it."""
    for memory, version in given:
        memory.overwritten |= memory.recorded and memory.version != version
    if torch.is_grad_enabled() and any(
        type(t) is ShapeTensor and t.requires_grad for t in tree_leaves(result)
    ):
        for memory, _ in given:
            memory.recorded = True


def check_inputs(
    inputs: dict[int, ShapeTensor],
    aliases: dict[int, TracedAlias],
    requires_grad: Sequence[bool],
    groups: Sequence[int],
) -> None:
    """Changes of inputs are made functional only where that is eager's meaning in full."""
    UnsupportedOp.when(
        any(tensor.note is not aliases[i] for i, tensor in inputs.items()),
        "DM241",
        "an input's shape or strides are changed in place",
        cure="use the out-of-place op",
    )
    UnsupportedOp.when(
        any(tensor.requires_grad != requires_grad[i] for i, tensor in inputs.items()),
        "DM231",
        "an input begins to require a gradient",
        cure="use the out-of-place op",
    )
    for i, tensor in inputs.items():
        UnsupportedOp.when(
            tensor.note.memory.version > 0 and sum(group == groups[i] for group in groups) > 1,
            "DM232",
            "an input is changed in place and shares memory with another input",
            cure="clone one of them",
        )


def _check_leaves(results: Sequence[Any], inputs: Sequence[Any]) -> None:
    """A result made with `requires_grad=True` has to gather its gradient as a leaf does."""
    given = {id(tensor) for tensor in inputs}
    leaves: list[Any] = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
    made = [t for t in leaves if id(t) not in given]
    if any(is_wrapper(t) or t.note.func is None for t in made):  # no view that no_grad made
        raise UnsupportedOp("DM234", "an output is a leaf that is made inside", cure="make the leaf outside")


def _check_gradients(requires_grad: Sequence[bool], mutated: Iterable[int]) -> None:
    """Gradients flow only to inputs, and only to inputs that stay as they are."""
    UnsupportedOp.when(
        not any(requires_grad),
        "DM234",
        "an output requires a gradient and no input does",
        cure="make the leaf outside",
    )
    UnsupportedOp.when(
        any(requires_grad[i] for i in mutated),
        "DM231",
        "an input that takes part in the gradient is changed in place",
        cure="use the out-of-place op",
    )


def _takes_part(tensor: ShapeTensor) -> bool:
    """Whether autograd records a write into an input, or has recorded a call with it before the write."""
    return not tensor.is_leaf or tensor.note.memory.overwritten


def _chain(alias: TracedAlias, root: TracedAlias) -> tuple[Step, ...] | None:
    """The view steps from `root` down to `alias`, or None when root is not on the way."""
    steps: list[Step] = []
    at: TracedAlias | None = alias
    while at is not None and at is not root:
        if at.func is None:
            return None
        if at.one_of is None:
            steps.append((at.func, at.args, at.kwargs, at.grad_mode))
        else:
            index, func, args, kwargs = at.one_of
            steps += [
                (operator.getitem, (index,), {}, at.grad_mode),
                (func, args, kwargs, at.grad_mode),
            ]  # the last comes first
        # behind a write, autograd makes the view's history again: of the whole memory
        at = at.asked if at.asked is not None and at.born == at.memory.version else at.parent
    return tuple(reversed(steps)) if at is root else None


def plan_outputs(
    results: Sequence[Any], inputs: dict[int, ShapeTensor]
) -> tuple[list[OutputPlan], list[Any]]:
    """Plans for the user's outputs, and the (alias, tensor) of each value that the graph must return for
    them.
    """
    input_of = {tensor.note.memory: i for i, tensor in inputs.items()}
    by_memory: dict[Any, list[ShapeTensor]] = {}
    for tensor in results:
        if isinstance(tensor, ShapeTensor) and tensor.note.memory not in input_of:
            group = by_memory.setdefault(tensor.note.memory, [])
            if not any(tensor is other for other in group):
                group.append(tensor)
    sources: list[tuple[TracedAlias, ShapeTensor | None]] = []
    value_of: dict[Any, int] = {}
    for memory, group in by_memory.items():
        value_of[memory] = len(sources)
        sources.append(_root_of(memory, group))
    plans = []
    for tensor in results:
        if not isinstance(tensor, ShapeTensor):
            plans.append(OutputPlan("constant", constant=from_torch(tensor)))
        elif tensor.note.memory in input_of:
            index = input_of[tensor.note.memory]
            _refuse_graded_apart(tensor, inputs[index])
            plans.append(_plan(tensor, "input", index, inputs[index].note, inputs[index]))
        else:
            index = value_of[tensor.note.memory]
            plans.append(_plan(tensor, "value", index, *sources[index]))
    return plans, sources


def _refuse_graded_apart(tensor: ShapeTensor, source: ShapeTensor) -> None:
    """A gradient that arrived by a write, in a tensor that autograd does not know as a view of the input."""
    UnsupportedOp.when(
        tensor.requires_grad and tensor is not source and not _is_view_of(tensor, source),
        "DM231",
        "a detached view of an input begins to require a gradient",
        cure="use the out-of-place op",
    )


def _is_view_of(tensor: ShapeTensor, source: ShapeTensor | None) -> bool:
    return (
        source is not None
        and tensor._base is not None
        and (tensor._base is source or tensor._base is source._base)
    )


def _plan(
    tensor: ShapeTensor, kind: str, index: int, root: TracedAlias, source: ShapeTensor | None
) -> OutputPlan:
    steps = _chain(tensor.note, root)
    apart = tensor.requires_grad and tensor is not source and not _is_view_of(tensor, source)
    if steps is None or apart and source is not None:  # a history of its own (`unsafe_split`)
        raise UnsupportedOp(
            "DM233", "outputs share memory in a way that cannot be replayed", cure="clone one of them"
        )
    if tensor is source or (source is None and not steps):
        return OutputPlan(kind, index)
    detach = _detach(tensor, source)
    if not steps and not detach:  # a view of all of it (`x[...]`) is another tensor
        steps = ((aten.alias.default, (), {}, True),)
    counted = kind == "input" and source is not None and source._version > 0  # not by writes into `.data`
    return OutputPlan(
        kind, index, steps, detach, early=counted and tensor.note.born < tensor.note.memory.version
    )


def _detach(tensor: ShapeTensor, source: ShapeTensor | None) -> str:
    """Where on the way from its source an output was cut off from it (a write to one then gives the other no
    gradient).
    """
    if tensor.requires_grad:
        return ""
    if tensor._base is None:
        return "last"
    return "" if _is_view_of(tensor, source) else "first"


def _root_of(memory: Any, group: list[ShapeTensor]) -> tuple[TracedAlias, ShapeTensor | None]:
    """The graph's result for outputs that share memory: the one output, or the tensor that all of them
    view.
    """
    if len(group) == 1:
        return _root_of_one(memory, group[0])
    wanting = [tensor for tensor in group if tensor.requires_grad]
    if not wanting:
        return memory.base, _whole(memory, group)
    root = wanting[0]._base if wanting[0]._base is not None else wanting[0]
    if not isinstance(root, ShapeTensor) or any(_chain(tensor.note, root.note) is None for tensor in group):
        raise UnsupportedOp(
            "DM233", "outputs share memory in a way that cannot be replayed", cure="clone one of them"
        )
    return next((t for t in group if t is root), root).note, root


def _whole(memory: Any, group: list[ShapeTensor]) -> ShapeTensor | None:
    """The tensor that has the whole memory and of which outputs without gradient are views, if there is
    one.
    """
    bases = [tensor._base for tensor in group if tensor._base is not None]
    return next(
        (
            t
            for t in [*bases, *group]
            if isinstance(t, ShapeTensor) and t.note is memory.base and t._base is None
        ),
        None,
    )


def _root_of_one(memory: Any, tensor: ShapeTensor) -> tuple[TracedAlias, ShapeTensor | None]:
    """The output itself; where it leaves holes in its memory, or is one of several views, what it is a view
    of, so that it keeps eager's strides and refuses writes."""
    if tensor.requires_grad and tensor.note.one_of is not None and isinstance(tensor._base, ShapeTensor):
        return tensor._base.note, tensor._base
    if not is_dense(tensor.spec):
        if not tensor.requires_grad:
            return memory.base, _whole(memory, [tensor])
        root = tensor._base
        if (
            isinstance(root, ShapeTensor)
            and is_dense(root.spec)
            and _chain(tensor.note, root.note) is not None
        ):
            return root.note, root
    return tensor.note, tensor


def tangent_spec(spec: TensorSpec) -> TensorSpec:
    """The layout in which a gradient of an output arrives: the output's own when it has no holes, else
    row-major.
    """
    stride = spec.stride if is_dense(spec) else contiguous_stride(spec.shape)
    return TensorSpec(spec.shape, stride, spec.dtype, spec.device)


def inner_tangent_specs(of: WrapperSpec) -> list[TensorSpec]:
    """Those of the tensors inside of a wrapper's gradient: all as the wrapper shows it, where they have its
    shape, since autograd copies or keeps a gradient by the strides that it shows.
    """
    outer = of.outer
    return [
        tangent_spec(one if one.shape != outer.shape else replace(one, stride=outer.stride))
        for one in of.leaves()
    ]


@dataclass
class _Gradients:
    """A traced backward. tangents: the nodes of the gradients that arrive. nodes: those of the gradients that
    leave, for the inputs at `places` (for tensors inside wrappers: numbers beyond all places). arriving and
    leaving: the specs of those that are wrappers. reached and inner: for each place and result, the roots
    that lead to it (see `reaching`). parts: roots that share saved tensors (see `saving_parts`).
    """

    tangents: list[torch.fx.Node] = field(default_factory=list)
    nodes: list[torch.fx.Node | None] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    arriving: list[WrapperSpec | None] = field(default_factory=list)
    leaving: list[tuple[WrapperSpec | None, int]] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    inner: list[int] = field(default_factory=list)
    parts: tuple[int, ...] = ()


def _differentiated(
    recorder: GraphRecorder, given: Feed, results: Results, roots: list[Any], leaves: list[int]
) -> _Gradients:
    """The backward from the roots to the leaves, with the roots that lead to each of them."""
    inputs, parts = [given.values[i] for i in leaves], saving_parts(roots)
    if not given.has_wrapper() and not results.wrappers:
        reached, inner = reaching(roots, inputs, results.flat)
        back = _backward(recorder, roots, inputs, given.places(leaves))
        return replace(back, reached=reached, inner=inner, parts=parts)
    back = _backward(recorder, roots, inputs, given.places(leaves))
    everything, bits = (1 << len(back.tangents)) - 1, _bits_of_roots(back)
    reached, _ = reaching(roots, inputs, [])
    masks = [sum(bit for k, bit in enumerate(bits) if mask >> k & 1) for mask in reached]
    spread = [mask for mask, (_, count) in zip(masks, back.leaving, strict=True) for _ in range(count)]
    return replace(back, reached=spread, parts=(everything,) if parts else ())


def _bits_of_roots(back: _Gradients) -> list[int]:
    """For each root the bits of its tangents: of a wrapper, those of the tensors inside."""
    counts = [1 if spec is None else len(spec.leaves()) for spec in back.arriving]
    ends = list(itertools.accumulate(counts))
    return [((1 << count) - 1) << (end - count) for count, end in zip(counts, ends, strict=True)]


def _backward(
    recorder: GraphRecorder, roots: list[Any], inputs: list[Any], places: Sequence[int | None]
) -> _Gradients:
    """Run PyTorch's engine from the roots to the inputs under the recorder. places: of the inputs among the
    flat ones, None for wrappers.
    """
    recorder.stage, recorder.where, recorder.recompute = "backward", None, False
    arriving: list[ShapeTensor] = []
    specs: list[WrapperSpec | None] = []
    tangents: list[Any] = []
    for i, root in enumerate(roots):
        with recording(recorder), torch.no_grad():
            specs.append(tangent_of(root) if is_wrapper(root) else None)
        of = specs[-1]
        laid = [tangent_spec(root.spec)] if of is None else inner_tangent_specs(of)
        made = [
            recorder.input(f"tangent_{i}" if of is None else f"tangent_{i}_{k}", s)
            for k, s in enumerate(laid)
        ]
        arriving += made
        with recording(recorder), torch.no_grad():
            tangents.append(made[0] if of is None else of.wrap(with_offsets_of(root, made)))
    with recording(recorder), no_autocast():
        try:  # what torch.autograd.grad calls; its checks of the tangents would import sympy
            grads = compat.execution_engine.get().run_backward(
                tuple(roots),
                tuple(tangents),
                False,
                False,
                tuple(inputs),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        except Exception as error:
            error.__dict__["torch_node"] = recorder.forward_of_failed()
            raise
        parts = [[None] if grad is None else flatten(grad) for grad in grads]
        nodes = [None if leaf is None else recorder.node_of(leaf) for leaves in parts for leaf in leaves]
    ids = itertools.count(1 << 32)  # beyond the places of inputs
    return _Gradients(
        [tangent.note.memory.input for tangent in arriving],
        nodes,
        [
            place if place is not None and len(leaves) == 1 else next(ids)
            for place, leaves in zip(places, parts, strict=True)
            for _ in leaves
        ],
        specs,
        [
            (WrapperSpec.of(grad) if is_wrapper(grad) else None, len(leaves))
            for grad, leaves in zip(grads, parts, strict=True)
        ],
    )
