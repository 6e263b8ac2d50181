"""Functions that are traced once for each kind of arguments and then only called, which costs no recording of
their operations.

>>> fast = assume_pure(lambda a, b: (a @ b).relu())
>>> block = PureModule(TransformerBlock())
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.func import functional_call

from ...base.compat import tree_flatten, tree_unflatten
from ..errors import require
from ..ir import Meta
from ..jax_call import apply, call_jax, number_of
from ..recent import Recent
from ..subgraph import trace_call
from ..tensor import is_xla

_KEPT = 256


def assume_pure(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which must give the same for the same arguments and change nothing, recorded as one operation,
    with gradients.

    Arguments are nested containers of xla tensors and of plain hashable values; what `fn` reads beside them
    must not change. DM669 where it draws random numbers, uses tensors from outside (pass them), or needs a
    value while it is traced.
    """
    programs = Recent(_KEPT)

    @functools.wraps(fn)
    def pure(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        metas = {i: Meta.of(leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves) if is_xla(leaf)}
        inputs = [leaves[i] for i in metas]
        others = tuple([metas.get(i, (type(leaf), leaf)) for i, leaf in enumerate(leaves)])
        key = (tree, others, torch.get_float32_matmul_precision())
        found = programs.get(key)
        if found is None:
            found = programs[key] = _program(fn, leaves, tree, metas, inputs[0].device)
        number, result_tree = found
        return tree_unflatten(apply(number, inputs), result_tree)

    return pure


def _program(
    fn: Callable, leaves: list[Any], tree: Any, metas: dict[int, Meta], device: Any
) -> tuple[int, Any]:
    name = getattr(fn, "__name__", type(fn).__name__)
    traced, results = trace_call(fn, leaves, tree, metas, device, f"the pure function {name}")
    what = "draws random numbers" if traced.graph.draws else "uses tensors that are no arguments"
    require(
        not (traced.captured or traced.graph.draws),
        "DM669",
        f"the pure function {name} {what}",
        cure="pass them as arguments, or do not assume it pure",
    )
    return number_of((fn, object()), lambda: traced.call), results


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
        self._pure = assume_pure(lambda tensors, args, kwargs: functional_call(module, tensors, args, kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        return self._pure(tensors, args, kwargs)
