"""Inference mode and the state of random numbers in a trace: nodes of the graph (`graph/states.py`) around which a
backend cuts. A region in which the graph breaks is none: then the graph breaks at its ends instead.

Inference mode is also entered for real, as grad mode is, so that the trial's tensors are inference tensors.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from ..base import compat
from ..graph import states
from .breaks import Unsupported, unsupported, unsupported_if
from .values.base import MISSING, CallRule, ResultEmitter, Trace, Value, builtin_rule, call_finder
from .values.constant import Constant
from .values.context import ModeEffect, Standing
from .values.instances import inline_function
from .values.tensor import TensorValue, torch_call
from .values.user_object import UserObject

_SEEDS = range(-(2**63), 2**64)


class StateEffect(Standing):
    """The states that a trace sets: an effect, which functions that others call later may not have."""

    __slots__ = ("regions", "saved")

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.regions: list[Value] = []  # those of inference mode that are open
        self.saved = False  # a state was read, which a generator may put back in its `finally`

    def replay(self, emitter: ResultEmitter) -> None:
        """The graph has done it all."""
        unsupported_if(self.regions, "context", "torch.inference_mode() is left open")


def broken_region(trace: Trace) -> bool:
    """Whether a trace stopped inside a region: it is to be made again without such regions."""
    effect = StateEffect.known(trace)
    if effect is None or trace.sizes.policy.broken_regions:
        return False
    return bool(effect.regions) or effect.saved and any(g.has_duties() for g in trace.stack.generators)


def _state_call(trace: Trace, refused: Unsupported) -> StateEffect:
    """Note a call that sets a state. Raises `refused` where that is no node."""
    policy = trace.sizes.policy
    if not policy.states or policy.broken_regions or trace.sizes.in_body or trace.graph.recompute:
        raise refused
    return StateEffect.of(trace)


def _random_call(trace: Trace, name: str) -> StateEffect:
    why = "it reads or sets the state of a random number generator"
    effect = _state_call(trace, unsupported("random", f"{name} is called", why))
    trace.calls.draws = True
    return effect


# Inference mode ---------------------------------------------------------------------------------------------
def _inference(trace: Trace, region: Value) -> StateEffect:
    if not isinstance(region, UserObject) or region.obj is not MISSING:
        raise _refused()
    effect = _state_call(trace, _refused())
    ModeEffect.of(trace)  # grad mode goes with it
    return effect


def _refused() -> Unsupported:
    return unsupported(
        "context",
        "torch.inference_mode() begins or ends",
        cure="enter it outside the compiled function, or use torch.no_grad",
    )


@builtin_rule(torch.inference_mode.__enter__)
def _enter(trace: Trace, region: Value) -> Value:
    effect = _inference(trace, region)
    mode = bool(region.getattr(trace, "mode").as_constant())
    trace.graph.call_function(states.enter_inference, (mode,), {})
    states.enter_inference(mode)
    effect.regions.append(region)
    return Constant(None)


@builtin_rule(torch.inference_mode.__exit__)
def _exit(trace: Trace, region: Value, *error: Value) -> Value:
    effect = _inference(trace, region)
    if not effect.regions or effect.regions[-1] is not region:
        raise _refused()
    trace.graph.call_function(states.leave_inference, (), {})
    states.leave_inference()
    effect.regions.pop()
    return Constant(None)


# Random numbers ---------------------------------------------------------------------------------------------
@builtin_rule(torch.random.fork_rng)
def _fork_rng(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    _random_call(trace, "fork_rng")
    return inline_function(trace, torch.random.fork_rng, [*args], kwargs)


@builtin_rule(torch.get_rng_state)
def _get_rng_state(trace: Trace) -> Value:
    _random_call(trace, "get_rng_state").saved = True
    length = torch.get_rng_state().numel()
    return torch_call(
        trace, states.random_state, [], {}, run=lambda: torch.empty(length, dtype=torch.uint8, device="cpu")
    )


@builtin_rule(torch.set_rng_state)
def _set_rng_state(trace: Trace, new_state: Value) -> Value:
    if not isinstance(new_state, TensorValue) or new_state.example.dtype is not torch.uint8:
        raise unsupported("random", "set_rng_state() is called without a state")
    _random_call(trace, "set_rng_state")
    trace.graph.call_function(states.restore_random_state, (new_state.node,), {})
    return Constant(None)


@call_finder
def _find_manual_seed(fn: Callable[..., Any]) -> CallRule | None:
    """`import torch._dynamo` puts a function around it, so that it is not captured."""
    around = type(fn) is types.FunctionType and fn.__code__.co_filename == compat.torch_compile_file
    return _manual_seed if around and fn.__dict__.get("__wrapped__") is torch.random.manual_seed else None


@builtin_rule(torch.random.manual_seed)
def _manual_seed(trace: Trace, seed: Value) -> Value:
    unsupported_if(
        seed.python_type() is not int or seed.as_constant() not in _SEEDS,
        "random",
        "manual_seed() is called without an int",
    )
    _random_call(trace, "manual_seed")
    trace.graph.call_function(states.seed, (int(seed.as_constant()),), {})
    return trace.make(torch.default_generator)
