"""Gradients of gradients: under `create_graph=True` a compiled backward does not run; its computation runs
as a program that can be differentiated again.

That program is one call of `FirstDerivative`: the torch graph, run again, and PyTorch's engine over it. It is
compiled ahead of time as any other is, so that its own backward (and the third derivative) are compiled too.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..base import compat
from ..base.errors import BackendError
from ..base.events import emit
from ..graph.modes import UnderSettings, autocast_state
from ..graph.module import graph_module
from ..graph.op_facts import facts, is_collective, is_custom, written_names
from ..graph.private_draws import default_generator
from ..graph.shape_tensor import ShapeTensor, recording
from ..graph.sizes import leaves_in
from ..graph.spec import Compiled, TensorSpec
from ..graph.tensor_subclass import is_wrapper
from .extract import inputs_of
from .inplace import all_arguments, with_written
from .joint import Joint
from .recipe import Recipe
from .simplify import has_effect

Compile = Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Compiled]
_PLAIN_PRODUCTS = {
    compat.enable_flash_attention: False,
    compat.enable_mem_efficient_attention: False,
    compat.enable_cudnn_attention: False,
    compat.enable_math_attention: True,
}
_MOST_PROGRAMS = 8  # layouts and sizes of one graph; what comes then runs in eager PyTorch


@dataclass(frozen=True)
class Given:
    """A call's inputs, kept for its second derivative: inputs (`old` contents of those that it wrote
    and whose gradients need them), versions of the tensors that autograd does not watch, and where the
    generators stood. `packed`: the forward ran under hooks for saved tensors. results: of the operators that
    are not called again, with their versions."""

    inputs: tuple[Any, ...]
    versions: dict[int, int]
    generators: dict[torch.device, torch.Tensor]
    packed: bool
    results: tuple[tuple[torch.Tensor, int], ...] = ()

    def unpacked(self, saved: Mapping[int, torch.Tensor | None]) -> Given:
        """The same with the tensors that hooks kept: an input may have been written after it was packed."""
        if not self.packed:
            return self
        kept = {i: tensor for i, tensor in saved.items() if tensor is not None}
        inputs = tuple([kept.get(i, one) for i, one in enumerate(self.inputs)])
        return replace(
            self, inputs=inputs, versions={i: v for i, v in self.versions.items() if i not in kept}
        )


@dataclass(frozen=True)
class Again:
    """A graph that can be differentiated again.

    unwatched: tensor inputs that the graph does not write and that autograd does not watch for writes in
    every node's backward. tensors: all that the graph does not write; under hooks for saved tensors none is
    watched. as_eager_draws: whether eager PyTorch draws the same random numbers.
    """

    gm: torch.fx.GraphModule
    compile: Compile
    recipe: Recipe
    unwatched: tuple[int, ...]
    tensors: tuple[int, ...]
    as_eager_draws: bool
    grad_mode: bool = field(default_factory=torch.is_grad_enabled)
    autocast: dict[str, tuple[bool, torch.dtype]] = field(default_factory=autocast_state)
    programs: dict[Any, Compiled] = field(default_factory=dict)

    @property
    def repeats(self) -> bool:
        """Whether it can run again in eager PyTorch, with the numbers that it drew."""
        return self.as_eager_draws or not self.recipe.draws

    def given(self, inputs: tuple[Any, ...]) -> Given | None:
        """Before the forward runs: what its second derivative will need. None while a CUDA graph is captured,
        when a generator's state may not be read.
        """
        try:
            generators = {device: default_generator(device).get_state() for device in self.recipe.draws}
        except RuntimeError:
            return None
        if self.recipe.old:
            kept = list(inputs)
            for i in self.recipe.old:
                kept[i] = inputs[i].detach().clone()
            inputs = tuple(kept)
        packed = compat.top_saved_hooks(True) is not None
        places = self.tensors if packed else self.unwatched
        return Given(inputs, {i: version_of(inputs[i]) for i in places}, generators, packed)

    def completed(self, given: Given | None, outs: Sequence[torch.Tensor]) -> Given | None:
        """The same after the forward has run."""
        places = self.recipe.results
        if given is None or not places:
            return given
        kept = [outs[k].detach() for k in places]  # an output itself would be in a cycle with its node
        return replace(given, results=tuple([(one, version_of(one)) for one in kept]))

    def gradients(
        self, given: Given, positions: Sequence[int], values: Sequence[int], tangents: tuple[Any, ...]
    ) -> list[Any]:
        """The gradients of the inputs at `positions` by the tangents that arrive for `values`, with a history
        where gradients are recorded.
        """
        arrived = [(k, tangent) for k, tangent in zip(values, tangents, strict=True) if tangent is not None]
        wanted = tuple(i for i in positions if given.inputs[i].requires_grad)
        found: dict[int, Any] = {}
        if arrived and wanted:
            found = dict(zip(wanted, self._run(given, wanted, (), arrived), strict=True))
        return [_as_asked(found.get(i)) for i in positions]

    def between(
        self, given: Given, value: int, arrived: Sequence[tuple[int, torch.Tensor]]
    ) -> torch.Tensor | None:
        """The gradient by one value of others of the same graph, by the tangents that arrived for these."""
        return _as_asked(self._run(given, (), (value,), arrived)[0])

    def _run(
        self,
        given: Given,
        inputs: tuple[int, ...],
        inner: tuple[int, ...],
        arrived: Sequence[tuple[int, torch.Tensor]],
    ) -> list[Any]:
        watched = [*[(given.inputs[i], version) for i, version in given.versions.items()], *given.results]
        if any(version_of(one) != version for one, version in watched):
            raise RuntimeError(
                "one of the inputs of a compiled graph was modified by an inplace operation before the "
                "gradient of its gradient was asked for"
            )
        places = tuple([i for i, one in enumerate(given.inputs) if isinstance(one, torch.Tensor)])
        asked = {*self.recipe.gradient_of, *self.recipe.old}
        BackendError.when(
            any(given.inputs[i].requires_grad for i in places if i not in asked),
            "DM408",
            "requires_grad of an input was set between a graph's call and the gradient of its gradient",
            why="eager differentiates its backward alone by it, and a compiled graph runs again whole",
            cure="call requires_grad_() before the function, or use dynamotor.disable",
        )
        sizes = {i: one for i, one in enumerate(given.inputs) if i not in places}
        first = FirstDerivative(self, places, sizes, inputs, inner, tuple(k for k, _ in arrived))
        operands = [*(given.inputs[i] for i in places), *(one for one, _ in given.results)]
        operands += [tangent for _, tangent in arrived]
        if any(is_batched(tangent) or is_wrapper(tangent) for _, tangent in arrived):
            first.create_graph = torch.is_grad_enabled()
            with _drawing_from(given.generators):
                return list(first(*operands))
        with torch.enable_grad(), _drawing_from(given.generators):
            return list(self._program(first, operands)(*operands))

    def _program(self, first: FirstDerivative, operands: Sequence[torch.Tensor]) -> Compiled:
        specs = tuple((TensorSpec.of(one), one.requires_grad) for one in operands)
        key = (first.wanted, first.inner, first.values, tuple(first.sizes.items()), specs)
        if key not in self.programs:
            if len(self.programs) >= _MOST_PROGRAMS:
                emit(
                    "fallback",
                    what="call",
                    name="gradient of a gradient",
                    reason="many layouts",
                    code="DM408",
                )
                return first
            self.programs[key] = self.compile(first.graph(len(operands)), operands)
        return self.programs[key]


class FirstDerivative:
    """A torch graph's gradients, by inputs that are wanted and by `inner` values, as a function of its tensor
    inputs and of the tangents of some of its values.

    Runs in a recording, and on real tensors where a recording fails.
    """

    __name__ = __qualname__ = "first_derivative"
    create_graph = True

    def __init__(
        self,
        again: Again,
        places: tuple[int, ...],
        sizes: dict[int, Any],
        wanted: tuple[int, ...],
        inner: tuple[int, ...],
        values: tuple[int, ...],
    ) -> None:
        self.again, self.places, self.sizes = again, places, sizes
        self.wanted, self.inner, self.values = wanted, inner, values

    def graph(self, n_operands: int) -> torch.fx.GraphModule:
        """The torch graph that is this call alone."""
        graph = torch.fx.Graph()
        operands = [graph.placeholder(f"given_{i}") for i in range(n_operands)]
        found = graph.call_function(self, tuple(operands))
        graph.output(
            tuple(
                graph.call_function(operator.getitem, (found, k))
                for k in range(len(self.wanted + self.inner))
            )
        )
        return graph_module(graph, "FirstDerivative")

    def __call__(self, *operands: torch.Tensor) -> tuple[Any, ...]:
        again, n = self.again, len(self.places)
        first_tangent = n + len(again.recipe.results)
        BackendError.when(
            not again.repeats and not isinstance(operands[0], ShapeTensor),
            "DM408",
            "the gradient of the gradient of a graph that draws random numbers was asked for",
            why="it cannot be recorded, and eager PyTorch draws others",
            cure="set dynamotor.config.fallback_random, or leave the function out with dynamotor.disable",
        )
        inputs: dict[int, Any] = dict(self.sizes)
        flows = dict(zip(again.recipe.gradient_of, again.recipe.flows, strict=True))
        with torch.enable_grad():  # aliases: an input may have been computed from another one
            for i, one in zip(self.places, operands, strict=False):
                inputs[i] = one.clone() if i in again.recipe.mutated else one.view_as(one)
                if not flows.get(i, True):  # handed in without its history: the graph takes gradients of it
                    inputs[i] = _leaf(inputs[i])
            with as_captured(again):
                results = _Repeat(again.gm, operands[n:first_tangent]).run(
                    *[inputs[i] for i in range(len(inputs))], enable_io_processing=False
                )
            roots = [self._value(results, k) for k in self.values]
            return compat.execution_engine.get().run_backward(
                tuple(roots),
                tuple(operands[first_tangent:]),
                True,
                self.create_graph,
                (*[inputs[i] for i in self.wanted], *[self._value(results, k) for k in self.inner]),
                allow_unreachable=True,
                accumulate_grad=False,
            )

    def _value(self, results: Sequence[Any], value: int) -> torch.Tensor:
        """The tensor that a value of the compiled graph is: a result, or what results are views of."""
        for plan, result in zip(self.again.recipe.plans, results, strict=True):
            if plan.kind == "value" and plan.index == value and not plan.detach:
                return result._base if plan.steps and result._base is not None else result
        raise BackendError("DM408", "the gradient of a gradient of an output that was detached was asked for")


@contextlib.contextmanager
def as_captured(again: Any) -> Iterator[None]:
    """Grad mode and autocast as they were where a graph was captured."""
    with contextlib.ExitStack() as stack:
        for device, (enabled, dtype) in again.autocast.items():
            if enabled:
                stack.enter_context(torch.autocast(device, dtype=dtype))
        stack.enter_context(torch.set_grad_enabled(again.grad_mode))
        yield


class _Repeat(torch.fx.Interpreter):
    """Runs a torch graph again. Operators whose Python may do something else now (`once`) are not called:
    copies of their earlier results stand below autograd, which differentiates them as before.
    """

    def __init__(self, gm: torch.fx.GraphModule, results: Sequence[torch.Tensor]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.results = iter(results)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """By plain products where the graph attends: no other kernel has a second derivative."""
        return UnderSettings(super().run, _PLAIN_PRODUCTS)(*args, **kwargs)

    def run_node(self, n: torch.fx.Node) -> Any:
        if "once" not in n.meta:
            return super().run_node(n)
        with recording(self):
            return super().run_node(n)

    def record(self, func: compat.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op that the call makes, and its writes."""
        if not is_custom(func):
            return func(*args, **kwargs)
        given = all_arguments(func, args, kwargs)
        found = [next(self.results).clone() for place in facts(func).returns if place is None]
        for target in leaves_in([given[name] for name in written_names(func)]):
            if target is not None:
                target.copy_(next(self.results))
        return with_written(func, found, given)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its history. Under `vmap` PyTorch makes leaves for its own transforms alone."""
    before = compat.leaves_allowed()
    compat.allow_leaves(True)
    try:
        return tensor.detach().requires_grad_()
    finally:
        compat.allow_leaves(before)


def is_batched(tangent: Any) -> bool:
    """Whether it stands for many (`is_grads_batched=True`, vmap): no kernel of ours takes it."""
    return tangent is not None and (compat.is_legacy_batched(tangent) or compat.is_batched(tangent))


def _as_asked(grad: torch.Tensor | None) -> torch.Tensor | None:
    return grad.detach() if grad is not None and grad.requires_grad and not torch.is_grad_enabled() else grad


def repeatable(joint: Joint) -> Recipe:
    """The program's recipe with the facts that a second derivative needs."""
    calls = [n for n in joint.gm.graph.nodes if n.op == "call_function"]
    seeds = [n for n in calls if n.target is torch.ops.dynamotor.new_seed.default]
    effects = [n for n in calls if has_effect(n)]
    writable = {joint.inputs[i]: i for i in joint.mutated}
    needed = inputs_of(joint.output[2], set(writable))
    return replace(
        joint.recipe(),
        old=tuple(sorted(writable[node] for node in needed)),
        draws=tuple({n.meta["val"].device: None for n in seeds + effects if _is_tensor(n)}),
        once=bool(seeds and effects)
        or not all(map(_is_tensor, effects))
        or any(is_collective(n.target) for n in effects),
    )


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), TensorSpec)


def version_of(tensor: torch.Tensor | None) -> int:
    """How often the tensor was written; 0 for None and for inference tensors, which do not count writes."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


@contextlib.contextmanager
def _drawing_from(states: dict[torch.device, torch.Tensor]) -> Iterator[None]:
    """Random numbers as the forward drew them."""
    before = {device: default_generator(device).get_state() for device in states}
    try:
        for device, state in states.items():
            default_generator(device).set_state(state)
        yield
    finally:
        for device, state in before.items():
            default_generator(device).set_state(state)
