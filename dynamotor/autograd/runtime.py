"""Run time: compiled halves joined to PyTorch's autograd, and the user's outputs rebuilt from compiled values.

Everything that can be known is worked out when the callable is made; a call only gathers, runs and rebuilds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.errors import BackendError
from ..graph.spec import TensorSpec
from .joint import Joint, OutputPlan

Compiled = Callable[..., Any]
NONE_ABSENT: frozenset[int] = frozenset()
_set_grad_enabled = torch._C._set_grad_enabled
_is_grad_enabled = torch.is_grad_enabled


def _bump(tensors: list[torch.Tensor]) -> None:
    """Generated code writes without PyTorch seeing it: tell the version counters (inference tensors have none)."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])



@dataclass(frozen=True)
class ForwardBackward:
    """The compiled halves. Saved for the backward: inputs by position, then outputs of the forward by position.

    compile_backward: called with the positions of tangents that do not arrive; None where it needs zeros in their place.
    """

    forward: Compiled
    compile_backward: Callable[[frozenset[int]], Compiled | None]
    n_values: int
    saved_inputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]


def inference_callable(compiled: Compiled, joint: Joint) -> Compiled:
    """Wrap a compiled graph that takes no part in autograd."""
    compiled = _without_autocast(_with_constants(compiled, joint.constants))
    rebuild = _rebuilder(joint.plans, len(joint.output[0]))
    mutated = tuple(joint.mutated)
    quiet = torch.is_grad_enabled()
    if not mutated and not quiet and rebuild is None:
        return compiled

    def run(*inputs: torch.Tensor) -> tuple:
        before = _is_grad_enabled()
        _set_grad_enabled(False)
        try:
            values = compiled(*inputs)
            if mutated:
                _bump([inputs[i] for i in mutated])
        finally:
            _set_grad_enabled(before)
        return values if rebuild is None else rebuild(inputs, values)

    return run


def training_callable(plan: ForwardBackward, joint: Joint) -> Compiled:
    """Wrap the halves as one autograd function."""
    function = _autograd_function(plan, joint)
    apply = function.apply
    rebuild = _rebuilder(joint.plans, plan.n_values)
    grads = dict(zip(joint.gradient_of, joint.output[2], strict=True))
    apart = tuple(i for i, grad in grads.items() if grad is None)
    if len(apart) == len(grads):
        apart = ()  # the outputs require a gradient all the same
    if rebuild is None and not apart:
        return apply

    def run(*inputs: torch.Tensor) -> tuple:
        given = list(inputs)
        for i in apart:  # no gradient ever comes: its hooks are not to be called
            given[i] = given[i].detach()
        values = apply(*given)
        return values if rebuild is None else rebuild(inputs, values)

    return run


def _autograd_function(plan: ForwardBackward, joint: Joint) -> type[torch.autograd.Function]:
    forward = _without_autocast(_with_constants(plan.forward, joint.constants))
    n, saved_outputs = plan.n_values, plan.saved_outputs
    n_inputs = len(joint.inputs) - len(joint.constants)
    saved_inputs = tuple(i for i in plan.saved_inputs if i < n_inputs)
    saved_constants = tuple(joint.constants[i - n_inputs] for i in plan.saved_inputs if i >= n_inputs)
    mutated = tuple(joint.mutated)
    fixed = tuple(k for k, differentiable in enumerate(joint.differentiable) if not differentiable)
    positions = tuple(joint.gradient_of) if len(joint.tangents) > 1 else ()
    run_backward = _backward_runner(plan, joint, n_inputs, len(saved_inputs), saved_constants)

    class CompiledFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> tuple:
            outs = forward(*inputs)
            if mutated:
                _bump([inputs[i] for i in mutated])
            ctx.save_for_backward(*[inputs[i] for i in saved_inputs], *[outs[i] for i in saved_outputs])
            ctx.set_materialize_grads(False)
            values = tuple(outs[:n])
            if fixed:
                ctx.mark_non_differentiable(*[values[k] for k in fixed])
            return values

        @staticmethod
        def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple:
            saved = list(ctx.saved_tensors)
            ctx.maybe_clear_saved_tensors()  # the graph lets go of them unless it is to be kept
            grads = run_backward(saved, tangents)
            _pass_over_hooks(ctx, [i for i in positions if grads[i] is None])
            return grads

    return CompiledFunction


def _backward_runner(plan: ForwardBackward, joint: Joint, n_inputs: int, n_saved_inputs: int,
                     constants: tuple[torch.Tensor, ...]) -> Callable[[list, tuple], tuple]:
    """The function from (saved tensors, tangents) to one gradient per input; the backward is compiled on its first call.

    It empties the list: a compiled backward that can frees each tensor after its last use.
    """
    wanted = [k for k, differentiable in enumerate(joint.differentiable) if differentiable]
    arriving = tuple(zip(wanted, [node.meta["val"] for node in joint.tangents], strict=True))
    positions = tuple(joint.gradient_of)
    reached = _reached_from(joint)
    compile_backward, several = plan.compile_backward, len(arriving) > 1
    compiled: dict[frozenset[int], Compiled | None] = {}
    compiling = threading.Lock()  # a CPU's backward runs on the thread that asks for it: two may come first
    del plan, joint

    def backward_for(absent: frozenset[int]) -> Compiled | None:
        nonlocal compile_backward
        if absent not in compiled:
            with compiling:
                if absent not in compiled:
                    compiled[absent] = compile_backward(absent)
                    if not several:
                        del compile_backward  # and the graph with it
        return compiled[absent]

    def run(saved: list, tangents: tuple) -> tuple:
        if _is_grad_enabled():
            with torch.no_grad():
                return _only_once(run(saved, tangents))
        absent = frozenset([n for n, (k, _) in enumerate(arriving) if tangents[k] is None]) if several else NONE_ABSENT
        backward = backward_for(absent)
        if backward is None:  # zeros have to stand in
            backward, absent = backward_for(NONE_ABSENT), NONE_ABSENT
        if constants:
            saved[n_saved_inputs:n_saved_inputs] = constants
        saved += [_fit(tangents[k], spec) for n, (k, spec) in enumerate(arriving) if n not in absent]
        grads = _call_without_autocast(getattr(backward, "taking", None) or (lambda given: backward(*given)), (saved,))
        result: list[torch.Tensor | None] = [None] * n_inputs
        for position, grad in zip(positions, grads, strict=True):
            result[position] = grad
        if reached and any(tangents[k] is None for k, _ in arriving):
            for position, roots in reached.items():
                if all(tangents[wanted[k]] is None for k in roots):
                    result[position] = None  # no output that the loss knows of depends on it
        return tuple(result)

    return run


@dataclass(frozen=True)
class _UnlessAbsent:
    """A hook of a leaf that passes over a gradient that has not come."""

    hook: Callable[[Any], Any]
    gradient: Callable[[Any], Any]  # of what the hook is called with

    def __call__(self, given: Any) -> Any:
        return None if self.gradient(given) is None else self.hook(given)


def _pass_over_hooks(ctx: Any, absent: Sequence[int]) -> None:
    """Autograd calls the hooks of all leaves behind this node, some with None; eager has no such node and does not call them.

    PyTorch's own hooks stay as they are: they expect None, and count their calls (`register_multi_grad_hook`).
    """
    for i in absent:
        leaf = getattr(ctx.next_functions[i][0], "variable", None)
        if leaf is None:
            continue
        for hooks, gradient in ((leaf._backward_hooks, lambda grad: grad),
                                (leaf._post_accumulate_grad_hooks, lambda leaf: leaf.grad)):
            for key, hook in (hooks or {}).items():
                if type(hook) is not _UnlessAbsent and not (getattr(hook, "__module__", None) or "").startswith("torch."):
                    hooks[key] = _UnlessAbsent(hook, gradient)


def _reached_from(joint: Joint) -> dict[int, tuple[int, ...]]:
    """For each input with a gradient: from which tangents it comes. Empty where there is one tangent only."""
    if len(joint.tangents) < 2:
        return {}
    masks: dict[torch.fx.Node, int] = {node: 1 << k for k, node in enumerate(joint.tangents)}
    for node in joint.gm.graph.nodes:
        for arg in node.all_input_nodes:
            masks[node] = masks.get(node, 0) | masks.get(arg, 0)
    found = ((i, masks.get(node, 0)) for i, node in zip(joint.gradient_of, joint.output[2], strict=True) if node is not None)
    return {i: tuple(k for k in range(len(joint.tangents)) if mask >> k & 1) for i, mask in found if mask}


def _fit(tangent: torch.Tensor | None, spec: TensorSpec) -> torch.Tensor:
    """A tangent in the layout that the backward was compiled for."""
    if tangent is None:
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).zero_()
    if tangent.stride() == spec.stride and tangent.dtype is spec.dtype:
        return tangent
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).copy_(tangent)


class _SecondDerivative(torch.autograd.Function):
    """Stands where `create_graph=True` would go on, and says so instead of giving zeros."""

    @staticmethod
    def forward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return tuple([grad.view_as(grad) for grad in grads])

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple:
        raise BackendError("DM402", "the gradient of a compiled function's gradient was asked for",
                           why="the backward is compiled once, without a backward of its own",
                           cure="compute second derivatives on the original function (dynamotor.disable)")


def _only_once(grads: tuple) -> tuple:
    present = [grad.detach().requires_grad_() for grad in grads if grad is not None]
    with torch.enable_grad():
        marked = iter(_SecondDerivative.apply(*present) if present else ())
    return tuple([None if grad is None else next(marked) for grad in grads])


def _with_constants(compiled: Compiled, constants: Sequence[torch.Tensor]) -> Compiled:
    if not constants:
        return compiled
    bound = tuple(constants)
    return lambda *inputs: compiled(*inputs, *bound)


def _autocast_regions() -> list[str]:
    """Device types for which an autocast region is open."""
    return [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]


def _without_autocast(compiled: Compiled) -> Compiled:
    """The casts are in the graph already: the compiled ops must not be cast again by the region around the call."""
    if not _autocast_regions():
        return compiled
    return lambda *inputs: _call_without_autocast(compiled, inputs)


def _call_without_autocast(compiled: Compiled, inputs: tuple) -> Any:
    regions = _autocast_regions()
    if not regions:
        return compiled(*inputs)
    for kind in regions:
        torch.set_autocast_enabled(kind, False)
    try:
        return compiled(*inputs)
    finally:
        for kind in regions:
            torch.set_autocast_enabled(kind, True)


def _rebuilder(plans: Sequence[OutputPlan], n_values: int) -> Callable[[Sequence, Sequence], tuple] | None:
    """(inputs, values) → the user's outputs; None when they are the values as they stand."""
    if all(p.kind == "value" and not p.steps and not p.detach and p.index == k for k, p in enumerate(plans)) and len(
            plans) == n_values:
        return None
    makers = [_maker(plan) for plan in plans]

    def rebuild(inputs: Sequence, values: Sequence) -> tuple:
        return tuple([make(inputs, values) for make in makers])

    return rebuild


def _maker(plan: OutputPlan) -> Callable[[Sequence, Sequence], Any]:
    index, steps, detach = plan.index, plan.steps, plan.detach
    if plan.kind == "constant":
        return lambda inputs, values: plan.constant
    if not steps and not detach:
        return (lambda inputs, values: inputs[index]) if plan.kind == "input" else (lambda inputs, values: values[index])

    graded = all(step[3] for step in steps)

    def make(inputs: Sequence, values: Sequence) -> Any:
        tensor = inputs[index] if plan.kind == "input" else values[index]
        if detach:
            tensor = tensor.detach()
        if not graded:
            before = _is_grad_enabled()
            for func, args, kwargs, grad_mode in steps:
                _set_grad_enabled(before and grad_mode)
                tensor = func(tensor, *args, **kwargs)
            _set_grad_enabled(before)
            return tensor
        for func, args, kwargs, _ in steps:
            tensor = func(tensor, *args, **kwargs)
        return tensor

    return make
