"""The nodes that stand for a compiled graph in autograd's graph: one, or where that would visit too much,
several.

Autograd visits a node's successors, with or without a gradient (`reach.py`). Where not all outputs lead to
all inputs, an output that may have hooks gets a node of its own, and an input that is no leaf hangs behind
those outputs alone that use it.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base.compat import keeps_graph
from ..base.errors import BackendError
from ..base.events import emit
from ..graph.spec import Compiled, TensorSpec
from ..graph.tensor_subclass import is_wrapper
from .calls import call_without_autocast, call_without_grad, unseen
from .desugar import plain_tangent
from .double_backward import Again, Given, is_batched
from .inner_outputs import linker, refuse_hooks
from .node_hooks import is_users, refusing_hooks
from .recipe import Recipe
from .saved import as_they_lay, laid, lie_as_noted, note_write, tensor_layouts
from .separate_backwards import Reads, SeparateBackwards
from .shared_gradients import Gradients, LeaderNode, SharedGradients, SiblingNode

Finish = Callable[
    [Sequence[Any], Sequence[Any], Sequence[Any]], tuple[Any, ...]
]  # (inputs, values, the nodes' contexts) → the user's outputs
_is_grad_enabled = torch.is_grad_enabled


@dataclass(frozen=True)
class AutogradNode:
    """One node of a compiled graph in autograd's graph. It saves inputs by position, then outputs of the
    forward by position.

    compile_backward: called with the positions of tangents that do not arrive; None where it needs zeros in
    their place. gradients: the inputs that it leads to. tangents: which of the joint graph's lead to it, in
    their order. reach: for each gradient, the positions among `tangents` of those that lead to it. reads:
    which of the saved tensors, sizes left out, a backward without some tangents reads. unsaved: the inputs
    that the backward reads as they are when it runs: a custom autograd function kept them on its context.

    Behind several, where all outputs lead to the last of them, comes one that stands for no node: it gives
    the gradients of all, and saves the same as that last node (`shared_gradients.py`).
    """

    compile_backward: Callable[[frozenset[int]], Compiled | None]
    saved_inputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    gradients: tuple[int, ...]
    tangents: tuple[int, ...]
    reach: tuple[frozenset[int], ...]
    reads: Reads
    unsaved: frozenset[int]


def through_one_node(
    forward: Compiled, node: AutogradNode, recipe: Recipe, finish: Finish | None, again: Again | None
) -> Compiled:
    """The forward as an autograd function of all inputs, from inputs to its values and what `finish` makes of
    them.
    """
    apply = _whole_function(forward, node, recipe, again).apply
    without_gradient = tuple(
        i for i, flows in zip(recipe.gradient_of, recipe.flows, strict=True) if not flows
    )
    if len(without_gradient) == len(recipe.gradient_of):
        without_gradient = ()  # the outputs require a gradient all the same
    # PyTorch loses a retain_grad of an output that is not its node's first when the output is written in
    # place.
    marked = tuple(k for k in _seen_by_hooks(recipe) if len(recipe.tangents) > 1 or k > 0)
    if not without_gradient and not marked and finish is None:
        return apply
    first = recipe.differentiable.index(True)
    link = linker(recipe, again)

    def run(*inputs: torch.Tensor) -> tuple[Any, ...]:
        given = list(inputs)
        for i in without_gradient:  # no gradient ever comes: its hooks are not to be called
            given[i] = given[i].detach()
        values = list(apply(*given))
        context = values[first].grad_fn
        for k in marked:
            values[k] = _own_node(values[k])
        link(values, (context,))
        return tuple(values) if finish is None else finish(inputs, values, (context,))

    return run


def _seen_by_hooks(recipe: Recipe) -> tuple[int, ...]:
    """Differentiable values that are handed out as they are, so that the user may hang hooks on them."""
    handed_out = {
        plan.index for plan in recipe.plans if plan.kind == "value" and not plan.steps and not plan.detach
    }
    return tuple(
        k for k, differentiable in enumerate(recipe.differentiable) if differentiable and k in handed_out
    )


def _whole_function(
    forward: Compiled, node: AutogradNode, recipe: Recipe, again: Again | None
) -> type[torch.autograd.Function]:
    """The function that runs the forward and leads to all inputs."""
    n = recipe.n_values
    fixed = tuple(k for k, differentiable in enumerate(recipe.differentiable) if not differentiable)
    wanted = tuple(k for k, differentiable in enumerate(recipe.differentiable) if differentiable)
    n_inputs, positions = recipe.n_inputs, node.gradients
    watched = positions if len(wanted) > 1 else ()
    edges = [0, *itertools.accumulate(i not in recipe.symbols for i in range(n_inputs))]  # sizes have none
    save = saver(node, recipe)
    backward = unseen(Backward(node, recipe, wanted, wanted, [edges[i] for i in positions], again))

    @refusing_hooks
    class CompiledFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[Any, ...]:
            given = None if again is None else again.given(inputs)
            outs = forward(*inputs)
            save(ctx, inputs, outs, given if again is None else again.completed(given, outs))
            values = tuple(outs[:n])
            if fixed:
                ctx.mark_non_differentiable(*[values[k] for k in fixed])
            return values

        @staticmethod
        def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
            grads: list[torch.Tensor | None] = [None] * n_inputs
            for position, grad in zip(positions, backward(ctx, tangents), strict=True):
                grads[position] = grad
            pass_over_hooks(ctx, [edges[i] for i in watched if grads[i] is None])
            return tuple(grads)

    return CompiledFunction


def through_nodes(
    forward: Compiled,
    nodes: Sequence[AutogradNode],
    recipe: Recipe,
    finish: Finish | None,
    again: Again | None,
) -> Compiled:
    """Several nodes, each behind the values that lead to it. The forward runs before them, and none of them
    computes.
    """
    n = recipe.n_values
    wanted = tuple(k for k, differentiable in enumerate(recipe.differentiable) if differentiable)
    whole = nodes[-1] if {*nodes[0].gradients} & {*nodes[-1].gradients} else None
    if whole is not None:
        nodes = [*nodes[:-2], replace(nodes[-2], reads=whole.reads, unsaved=whole.unsaved)]
    behind = [tuple(wanted[k] for k in node.tangents) for node in nodes]
    backwards = _backwards_of(nodes, whole, recipe, behind, again)
    parts = [
        (_part_function(node, recipe, values, backward).apply, node.gradients, values)
        for node, values, backward in zip(nodes, behind, backwards, strict=True)
    ]
    alone = {k: [len(values) == 1 for values in behind if k in values] == [True] for k in wanted}
    link = linker(recipe, again)

    def run(*inputs: torch.Tensor) -> tuple[Any, ...]:
        given = None if again is None else again.given(inputs)
        outs = call_without_grad(forward, inputs)
        given = given if again is None else again.completed(given, outs)
        made: dict[int, list[torch.Tensor]] = {k: [] for k in wanted}
        contexts: list[Any] = []
        shared = None if whole is None else SharedGradients()
        for apply, gradients, values in parts:
            for k, value in zip(
                values, apply((inputs, outs, given), *[inputs[i] for i in gradients]), strict=True
            ):
                made[k].append(value)
            contexts.append(value.grad_fn)
            contexts[-1].shared = shared
        if whole is not None:  # the others do not know of it: no cycle keeps the saved tensors
            contexts[-1].siblings = contexts[:-1]
        results = list(outs[:n])
        for k, found in made.items():
            results[k] = (
                found[0] if alone[k] else _own_node(found[0]) if len(found) == 1 else _Several.apply(*found)
            )
        link(results, contexts)
        return tuple(results) if finish is None else finish(inputs, results, contexts)

    return run


def _backwards_of(
    nodes: Sequence[AutogradNode],
    whole: AutogradNode | None,
    recipe: Recipe,
    behind: Sequence[Sequence[int]],
    again: Again | None,
) -> list[Gradients]:
    """The backward of each node."""

    def backward_of(node: AutogradNode, values: Sequence[int]) -> Backward:
        return Backward(node, recipe, range(len(values)), values, range(len(node.gradients)), again)

    own = [backward_of(node, values) for node, values in zip(nodes, behind, strict=True)]
    if whole is None:
        return [*own]
    places = [tuple(map(whole.gradients.index, node.gradients)) for node in nodes]
    siblings = [
        SiblingNode(k, nodes[k].tangents, places[k], one, one.opened) for k, one in enumerate(own[:-1])
    ]
    leader = LeaderNode(own[-1], backward_of(whole, behind[-1]), places[-1], tuple(siblings))
    return [*siblings, leader]


def _part_function(
    node: AutogradNode, recipe: Recipe, values: Sequence[int], gradients: Gradients
) -> type[torch.autograd.Function]:
    """A function that leads to some inputs, from these values, which have been computed."""
    save, backward = saver(node, recipe), unseen(gradients)

    @refusing_hooks
    class CompiledPart(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, computed: tuple[Any, ...], *inputs: torch.Tensor) -> tuple[Any, ...]:
            save(ctx, *computed)
            return tuple([computed[1][k].detach() for k in values])

        @staticmethod
        def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
            grads = backward(ctx, tangents)
            pass_over_hooks(ctx, [i for i, grad in enumerate(grads) if grad is None])
            return None, *grads

    return CompiledPart


# Gives a tensor a node of its own in autograd's graph, and does nothing else; that of `lift` is for real
# numbers.
def _own_node(value: torch.Tensor) -> torch.Tensor:
    return _Several.apply(value) if value.is_complex() else torch.ops.aten.lift.default(value)


@refusing_hooks
class _Several(torch.autograd.Function):
    """One value that several nodes made: its gradient goes to all of them."""

    @staticmethod
    def forward(ctx: Any, *same: torch.Tensor) -> torch.Tensor:
        ctx.n = len(same)
        ctx.set_materialize_grads(False)
        return same[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:
        return (grad,) * ctx.n


def saver(
    node: AutogradNode, recipe: Recipe
) -> Callable[[Any, Sequence[Any], Sequence[Any], Given | None], None]:
    """Notes on a node's context what its backward needs of the inputs and the forward's results."""
    n_inputs, sizes = recipe.n_inputs, tuple(recipe.symbols)
    saved_inputs = tuple(i for i in node.saved_inputs if i < n_inputs and i not in sizes)
    saved_outputs, unsaved = node.saved_outputs, node.unsaved
    contents = tuple((n, k, recipe.contents[k]) for n, k in enumerate(saved_outputs) if k in recipe.contents)
    n_kept = len(saved_inputs)

    def save(ctx: Any, inputs: Sequence[Any], outs: Sequence[Any], given: Given | None) -> None:
        saved = [
            *[inputs[i].data if i in unsaved else inputs[i] for i in saved_inputs],
            *[outs[i] for i in saved_outputs],
        ]
        for n, k, i in contents:
            if outs[k].stride() == inputs[i].stride() and not inputs[i].is_inference():
                saved[n_kept + n] = inputs[i]
        ctx.save_for_backward(*saved)
        ctx.layouts = tensor_layouts(saved)
        ctx.set_materialize_grads(False)
        ctx.given = given
        if sizes:
            ctx.sizes = [inputs[i] for i in sizes]

    return save


class Backward:
    """A node's gradients from its context and tangents; the backward is compiled at its first call. One that
    can frees each saved tensor after its last use.

    places: where the node's tangents are among those it gets. values: whose gradients they are. edges: where
    the gradients go on.
    """

    def __init__(
        self,
        node: AutogradNode,
        recipe: Recipe,
        places: Sequence[int],
        values: Sequence[int],
        edges: Sequence[int],
        again: Again | None,
    ) -> None:
        n_inputs, symbols, saved = recipe.n_inputs, recipe.symbols, node.saved_inputs
        self.values, self.edges, self.again = values, edges, again
        self.saved_inputs = tuple(i for i in saved if i < n_inputs and i not in symbols)
        self.places_of_sizes = [(saved.index(i), k) for k, i in enumerate(symbols) if i in saved]
        self.in_order = tuple(symbols.values())
        self.constants = tuple(recipe.constants[i - n_inputs] for i in saved if i >= n_inputs)
        self.arriving = tuple(zip(places, [recipe.tangents[k] for k in node.tangents], strict=True))
        self.reach, self.nothing = node.reach, (None,) * len(node.gradients)
        self.numbers, self.inner, self.gradients = node.tangents, bool(recipe.inner), node.gradients
        self.keeps_more = again is not None and bool(again.unwatched or recipe.results)
        self.draws = bool(recipe.draws)
        self.saves = recipe.frees or bool(saved) or bool(node.saved_outputs)
        self.separate = SeparateBackwards.of(node.tangents, recipe.parts, node.reads)
        self.compiled_for = _compiled_when_called(node.compile_backward, once=len(self.arriving) == 1)

    def __call__(self, ctx: Any, tangents: Sequence[Any]) -> Sequence[Any]:
        for tangent in tangents:
            if tangent is not None and tangent._is_zerotensor():
                return self._beside_zeros(ctx, tangents)
        arriving, again = self.arriving, self.again
        if self.inner:
            arrived = [n for n, (k, _) in zip(self.numbers, arriving, strict=True) if tangents[k] is not None]
            refuse_hooks(ctx, sum(1 << number for number in arrived))
        wrapped = any(map(is_wrapper, tangents))
        if wrapped:
            tangents = [plain_tangent(tangent) for tangent in tangents]
            wrapped = any(map(is_wrapper, tangents))
        many = wrapped or any(map(is_batched, tangents))
        if many and again is not None and ctx.given is not None and again.repeats:
            return self._again(again, ctx.given, tangents)
        BackendError.when(
            wrapped,
            "DM263",
            "a tensor subclass arrives as the gradient of a plain result of a compiled graph",
            why="its backward was compiled for plain gradients, and the graph cannot run again",
            cure="give the loss a plain tensor (to_local(), full_tensor(), ...)",
        )
        saved = self.opened(ctx, tangents)
        sizes = ctx.sizes if self.in_order else ()
        if not _is_grad_enabled():
            return (self._run_many if many else self._run)(saved, tangents, sizes)
        if again is not None and ctx.given is not None:
            kept = dict(zip(self.saved_inputs, saved, strict=False))  # outputs of the forward follow
            return self._again(again, ctx.given.unpacked(kept), tangents)
        raise BackendError(  # at once: a search for gradients of some inputs passes a mark on the results by
            "DM408",
            "gradients were asked for with create_graph=True, and the graph cannot run again",
            why="it has effects, communicates, or draws while a CUDA graph is captured",
            cure="leave create_graph out, or compute second derivatives on the original function"
            " (dynamotor.disable)",
        )

    def opened(self, ctx: Any, tangents: Sequence[Any]) -> list[Any]:
        """The saved tensors, of which the graph lets go unless it is to be kept; and of inputs that are kept
        for a second derivative alone.
        """
        saved = self._saved(ctx, tangents)
        if not keeps_graph():
            ctx.maybe_clear_saved_tensors()
            if self.keeps_more and not _is_grad_enabled():
                ctx.given = None
        return saved

    def _saved(self, ctx: Any, tangents: Sequence[Any]) -> list[Any]:
        """The saved tensors, in the layouts in which they were saved."""
        separate, arrive = self.separate, frozenset[int]()
        if separate is not None:
            arrive = frozenset([n for n, (k, _) in enumerate(self.arriving) if tangents[k] is not None])
        try:
            saved = list(ctx.saved_tensors) if self.saves else []
        except RuntimeError as error:
            left = None if separate is None else separate.take(ctx, arrive)
            if left is not None:
                return left
            if self.saved_inputs:
                note_write(error)
            raise
        if not lie_as_noted(saved, ctx.layouts):
            saved = as_they_lay(saved, ctx.layouts, ctx._raw_saved_tensors)
        if separate is not None:
            separate.leave(ctx, saved, arrive)
        return saved

    def _again(self, again: Again, given: Given, tangents: Sequence[Any]) -> Sequence[Any]:
        found = tuple([tangents[k] for k, _ in self.arriving])
        return again.gradients(given, self.gradients, self.values, found)

    def _run_many(self, saved: list[Any], tangents: Sequence[Any], sizes: Sequence[int]) -> Sequence[Any]:
        """Many gradients at once, which PyTorch's ops take and generated kernels do not."""
        try:
            return self._run(saved, tangents, sizes)
        except RuntimeError as error:
            if not self.draws:
                raise
            raise BackendError(
                "DM408",
                "many gradients at once were asked for, of a graph that draws random numbers",
                why="generated kernels take one at a time, and eager PyTorch draws other numbers",
                cure="set dynamotor.config.fallback_random, ask for one at a time, or use dynamotor.disable",
            ) from error

    def _run(self, saved: list[Any], tangents: Sequence[Any], sizes: Sequence[int]) -> Sequence[Any]:
        arriving = self.arriving
        absent = frozenset([n for n, (k, _) in enumerate(arriving) if tangents[k] is None])
        if len(absent) == len(arriving):
            return self.nothing
        backward = self.compiled_for(absent)
        filled: frozenset[int] = frozenset()
        if backward is None:  # zeros have to stand in
            backward, filled = self.compiled_for(filled), absent
            assert backward is not None
        if self.constants:
            n = len(self.saved_inputs)
            saved[n:n] = self.constants
        for place, k in self.places_of_sizes:
            saved.insert(place, sizes[k])
        of = dict(zip(self.in_order, sizes, strict=True))
        saved += [
            _fit(tangents[k], spec.at(of) if of else spec)
            for n, (k, spec) in enumerate(arriving)
            if n not in absent or n in filled
        ]
        grads = call_without_autocast(
            getattr(backward, "boxed", None) or (lambda given: backward(*given)), (saved,)
        )
        if not absent:
            return grads
        return [None if absent >= roots else grad for roots, grad in zip(self.reach, grads, strict=True)]

    def _beside_zeros(self, ctx: Any, tangents: Sequence[Any]) -> Sequence[Any]:
        """Zeros without memory stay zero whatever they are multiplied by: nothing arrives."""
        others = [None if tangent is None or tangent._is_zerotensor() else tangent for tangent in tangents]
        zero = {n for n, (k, _) in enumerate(self.arriving) if tangents[k] is not others[k]}
        return [
            _zeros_for(ctx, edge) if grad is None and zero & roots else grad
            for grad, roots, edge in zip(self(ctx, others), self.reach, self.edges, strict=True)
        ]


def _zeros_for(ctx: Any, edge: int) -> torch.Tensor:
    """Zeros as the gradient that leaves by this edge."""
    function, place = ctx.next_functions[edge]
    wanted = function._input_metadata[place]
    return torch._efficientzerotensor(wanted.shape, dtype=wanted.dtype, device=wanted.device)


def _compiled_when_called(
    compile_backward: Callable[[frozenset[int]], Compiled | None], *, once: bool
) -> Callable[[frozenset[int]], Compiled | None]:
    """The backward for a set of absent tangents, compiled when it is first asked for."""
    compiled: dict[frozenset[int], Compiled | None] = {}
    compiling = threading.Lock()  # a CPU's backward runs on the thread that asks for it: two may come first

    def backward_for(absent: frozenset[int]) -> Compiled | None:
        nonlocal compile_backward
        if absent not in compiled:
            with compiling:
                if absent not in compiled:
                    compiled[absent] = compile_backward(absent)
                    if once:
                        del compile_backward  # and the graph with it
        return compiled[absent]

    emit("late", build=functools.partial(backward_for, frozenset()))
    return backward_for


class _Arrival:
    """A leaf's last tensor hook: whether a gradient came in the backward that is running."""

    came = True

    def __call__(self, grad: torch.Tensor | None) -> None:
        self.came = grad is not None

    def has_come(self, leaf: torch.Tensor) -> bool:
        """For the hooks that run after the gradient was added up."""
        return self.came


@dataclass(frozen=True)
class _UnlessAbsent:
    """A hook of a leaf that passes over a gradient that has not come."""

    hook: Callable[[Any], Any]
    has_come: Callable[[Any], bool]  # of the hook's arguments

    def __call__(self, given: Any) -> Any:
        return self.hook(given) if self.has_come(given) else None


def pass_over_hooks(ctx: Any, absent: Sequence[int]) -> None:
    """Autograd calls the hooks of all leaves behind this node, some with None; eager has no such node and
    does not call them.

    PyTorch's own hooks stay as they are: they expect None, and count their calls
    (`register_multi_grad_hook`).
    """
    for i in absent:
        leaf = getattr(ctx.next_functions[i][0], "variable", None)
        if leaf is None:
            continue
        _wrap(leaf._backward_hooks, lambda grad: grad is not None)
        if leaf._post_accumulate_grad_hooks:
            watch = next(
                (hook for hook in (leaf._backward_hooks or {}).values() if type(hook) is _Arrival), None
            )
            if watch is None:
                watch = _Arrival()
                leaf.register_hook(watch)
            _wrap(leaf._post_accumulate_grad_hooks, watch.has_come)


def _wrap(hooks: dict[int, Any] | None, has_come: Callable[[Any], bool]) -> None:
    if hooks is None:
        return
    for key, hook in hooks.items():
        if type(hook) not in (_UnlessAbsent, _Arrival) and is_users(hook):
            hooks[key] = _UnlessAbsent(hook, has_come)


def _fit(tangent: torch.Tensor | None, spec: TensorSpec) -> torch.Tensor:
    """A tangent in the layout that the backward was compiled for."""
    if tangent is None:
        return spec.empty().zero_()
    if tangent.layout is not torch.strided:  # an embedding's
        tangent = tangent.to_dense()
    return laid(tangent, spec.stride)
