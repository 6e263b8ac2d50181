"""PyTorch's functional collectives (`torch.ops._c10d_functional.*`), which DTensor and FSDP call, on xla
tensors: they call the process group of their name, which records collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import collectives, compat, dispatch
from ..dispatch import specials
from ..lowering import rows

Tensors = list[torch.Tensor]


def _all_reduce(group: Any, inputs: Tensors, reduction: str) -> Tensors:
    options = dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, reduction.upper())
    results = [x.clone() for x in inputs]
    group.allreduce(results, options)
    return results


def _broadcast(group: Any, inputs: Tensors, source: int) -> Tensors:
    options = dist.BroadcastOptions()
    options.rootRank = source
    results = [x.clone() for x in inputs]
    group.broadcast(results, options)
    return results


def _all_gather(group: Any, inputs: Tensors, size: int) -> Tensors:
    results = [x.new_empty((x.shape[0] * size, *x.shape[1:]) if x.dim() else (size,)) for x in inputs]
    for result, x in zip(results, inputs):
        group.all_gather_single(result, x)
    return results


def _reduce_scatter(group: Any, inputs: Tensors, reduction: str, size: int) -> Tensors:
    options = dist.ReduceScatterOptions()
    options.reduceOp = getattr(dist.ReduceOp, reduction.upper())
    results = [x.new_empty((x.shape[0] // size, *x.shape[1:])) for x in inputs]
    for result, x in zip(results, inputs):
        group.reduce_scatter_single(result, x, options)
    return results


def _all_to_all(group: Any, inputs: Tensors, output_sizes: list[int], input_sizes: list[int]) -> Tensors:
    results = [x.new_empty((sum(output_sizes), *x.shape[1:])) for x in inputs]
    for result, x in zip(results, inputs):
        group.all_to_all_single(result, x, output_sizes, input_sizes)
    return results


# An op's name without its suffix -> its effect on a list of tensors.
_FUNCTIONS: dict[str, Callable[..., Tensors]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
}


def _group(group: Any) -> Any:
    return compat.resolve_group()(group) if isinstance(group, str) else group


def _move_shards(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> torch.Tensor:
    """DTensor's change of the dimension that is divided."""
    x, gathered, divided, group = args
    group = _group(group)
    if group.name() != "xla":
        return dispatch.lacking(func, args, kwargs or {})
    return x.clone() if group.size() == 1 else collectives.all_to_all(x, divided, gathered, group.size())


def _collective(func: Any, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """An op: new results, or (`_`, `out=`) written into its arguments."""
    name = func._schema.name.partition("::")[2]
    base = next(base for base in _FUNCTIONS if name.startswith(base))
    given, *settings, group = args
    group = _group(group)
    if group.name() != "xla":  # another backend, on the CPU
        return dispatch.lacking(func, args, kwargs or {})
    inputs: Sequence[torch.Tensor] = given if isinstance(given, list | tuple) else [given]
    results = _FUNCTIONS[base](group, list(inputs), *settings)
    target = (kwargs or {}).get("out", given if name.endswith("_") else None)
    if target is None:
        return results if inputs is given else results[0]
    for place, result in zip(target if isinstance(target, list | tuple) else [target], results):
        place.copy_(result)
    return target


_SUFFIXES = ("", "_", "_coalesced", "_coalesced_", "_out")
rows(
    specials.register,
    {
        tuple(
            f"_c10d_functional::{base}{suffix}" for base in _FUNCTIONS for suffix in _SUFFIXES
        ): _collective,
        "_dtensor::shard_dim_alltoall": _move_shards,
        # A recorded collective is in the graph, in the program's order: there is nothing to wait for.
        ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"): (
            lambda func, args, kwargs: args[0]
        ),
    },
)
