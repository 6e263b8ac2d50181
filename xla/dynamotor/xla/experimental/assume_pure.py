"""Functions that are traced once for each kind of arguments and then only called, which costs no recording of
their operations.

>>> fast = assume_pure(lambda a, b: (a @ b).relu())
>>> block = PureModule(TransformerBlock())
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.func import functional_call

from dynamotor.extension_api import Ambient

from .. import placement, rng
from ..compat import tree_flatten, tree_unflatten
from ..errors import require
from ..execute import scalar_vector
from ..ir import Meta
from ..jax_call import apply, call_jax, number_of, numbers
from ..recent import Recent
from ..subgraph import Subgraph, trace_call
from ..tensor import is_xla

_KEPT = 256
_XLA_COMPUTATION_CACHE = numbers  # where the programs of pure functions are found


def assume_pure(fn: Callable[..., Any], *, add_rng_seed_argument: bool = False) -> Callable[..., Any]:
    """`fn`, which must give the same for the same arguments and change nothing, recorded as one operation,
    with gradients.

    Arguments are nested containers of xla tensors and of plain hashable values; what `fn` reads beside them
    must not change, but for PyTorch's modes (autocast, precision) and the training mode of a module. With
    add_rng_seed_argument the result takes an integer `rng_seed=` that its random numbers follow. DM669 where
    it draws random numbers without that, uses tensors from outside (pass them), or needs a value while it is
    traced.
    """
    programs, name = Recent(_KEPT), getattr(fn, "__name__", type(fn).__name__)
    module = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)

    @functools.wraps(fn)
    def pure(*args: Any, rng_seed: int | None = None, **kwargs: Any) -> Any:
        if not add_rng_seed_argument and rng_seed is not None:
            kwargs["rng_seed"] = rng_seed
        leaves, tree = tree_flatten((args, kwargs))
        metas = {i: Meta.of(leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves) if is_xla(leaf)}
        inputs = [leaves[i] for i in metas]
        others = tuple([metas.get(i, (type(leaf), leaf)) for i, leaf in enumerate(leaves)])
        training = _training(module) if isinstance(module, torch.nn.Module) else ()
        key = (tree, others, Ambient.current(), placement.settings(), training)
        found = programs.get(key)
        if found is None:
            found = programs[key] = _program(fn, leaves, tree, metas, inputs[0].device, add_rng_seed_argument)
        number, result_tree, literals = found
        if add_rng_seed_argument:
            require(
                rng_seed is not None,
                "DM669",
                f"the pure function {name} needs rng_seed=",
                why="without one, each call would draw the same numbers",
            )
            inputs.append(torch.as_tensor(rng_seed, dtype=torch.int64).to(inputs[0].device))
        return tree_unflatten(apply(number, [*inputs, *literals]), result_tree)

    return pure


def assume_pure_torch(fn: Callable[..., Any], use_cache: bool = False) -> Callable[..., Any]:
    """torch_xla's variant that traces by PyTorch; here the same as `assume_pure`, which keeps its traces.
    use_cache: accepted."""
    return assume_pure(fn)


def _training(module: torch.nn.Module) -> tuple[bool, ...]:
    return tuple([part.training for part in module.modules()])


def _program(
    fn: Callable, leaves: list[Any], tree: Any, metas: dict[int, Meta], device: Any, seeded: bool
) -> tuple[int, Any, list[torch.Tensor]]:
    """The number of a function's program, how its results are nested, and the tensor literals that it
    takes."""
    name = getattr(fn, "__name__", type(fn).__name__)
    traced, results = trace_call(fn, leaves, tree, metas, device, f"the pure function {name}")
    draws = traced.graph.draws
    require(
        len(traced.captured) == traced.literals and (seeded or not draws),
        "DM669",
        f"the pure function {name} "
        + ("draws random numbers" if draws and not seeded else "uses tensors that are no arguments"),
        cure="pass tensors as arguments; add_rng_seed_argument=True lets it draw random numbers",
    )
    program = traced.without_captured()
    key = ("pure", traced.key, tuple(traced.scalars), len(metas), seeded)
    number = number_of(
        key, lambda: functools.partial(_seeded, program, len(metas)) if seeded else program.call
    )
    return number, results, traced.captured


def _seeded(program: Subgraph, inputs: int, *arrays: jax.Array) -> list[Any]:
    """A program whose random numbers follow a seed: (inputs..., seed, literals...) -> results."""
    seed = arrays[inputs].astype(jnp.uint64)
    state = jnp.stack([seed >> 32, seed & jnp.uint64(0xFFFFFFFF)]).astype(jnp.uint32)
    keys = [rng.keys_from(state, program.graph.draws)] if program.graph.draws else []
    numbers = [scalar_vector(program.scalars)] if program.scalars else []
    return program.program(*arrays[:inputs], *arrays[inputs + 1 :], *numbers, *keys)


def j2t_autograd(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A jax function as a differentiable function of xla tensors."""
    return lambda *args, **kwargs: call_jax(fn, args, kwargs)


class PureModule(torch.nn.Module):
    """A module whose forward pass is assumed pure in its parameters, buffers and arguments: traced once for
    each kind of them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._module = module
        self._pure = assume_pure(functools.partial(_call_module, module))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        return self._pure(_training(self._module), tensors, args, kwargs)


def _call_module(
    module: torch.nn.Module, training: tuple[bool, ...], tensors: dict, args: tuple, kwargs: dict
) -> Any:
    """`training` tells programs of the module's modes apart."""
    return functional_call(module, tensors, args, kwargs)
