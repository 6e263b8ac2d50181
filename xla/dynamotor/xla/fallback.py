"""Ops without a lowering run on the CPU: flush, copy to the CPU, aten's kernel, copy back. Each is counted as
`aten::op`.

>>> torch.unique(torch.tensor([2, 1, 2], device="xla"), dim=0)     # its shape depends on data
>>> metrics.counters["aten::unique_dim"]
1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dynamotor.extension_api import MaybeNone, config, counters, emit, facts

from . import compat, layout, metrics, rng, transfer
from .compat import tree_leaves, tree_map
from .errors import require
from .ir import Cut, Lane
from .tensor import XLATensor, check_views, is_xla, new_root, wrap, write


def run_on_cpu(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None, reason: str) -> Any:
    """Run an op with aten's CPU kernel; results and in-place writes come back to the device.

    XlaError DM610 under `config.xla_strict`; Cut in a graph that is being recorded for the bridge.
    """
    kwargs = kwargs or {}
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if is_xla(leaf))
    lane: Lane | MaybeNone = next((leaf._alias.lane for leaf in tensors), None)
    name = count(func, reason, lane)
    cause = f"fallback {name}"

    def host(value: Any) -> Any:
        if type(value) is XLATensor:
            return transfer.to_cpu(value, cause)
        if isinstance(value, torch.Generator):
            return torch.Generator().manual_seed(
                rng.draw(torch.device("xla", 0) if lane is None else lane.device, value)
            )
        return torch.device("cpu") if isinstance(value, torch.device) else value

    host_args, host_kwargs = tree_map(host, args), tree_map(host, kwargs)
    # Kernels may calculate with lazy conjugates, which are not resolved inside of a handler.
    excluded = compat.excluded_keys()
    for bit in (compat.conjugate_key, compat.negative_key):
        excluded = excluded.remove(bit)
    with compat.ForceDispatchKeys(compat.included_keys(), excluded):
        result = func(*host_args, **host_kwargs)
    written = _write_back(func, args, kwargs, host_args, host_kwargs)
    originals = {id(h): d for h, d in written}

    def device(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in originals:
            return originals[id(value)]
        return wrap(new_root(transfer.from_cpu(value, lane), layout.of_tensor(value)))

    return tree_map(device, result)


def count(func: Any, reason: str, lane: Lane | None) -> str:
    """Count and report one fallback; returns the op's name. XlaError DM610 under `config.xla_strict`; Cut
    while the bridge records."""
    name = func._schema.name
    if lane is not None and lane.recording:
        raise Cut(reason)
    require(
        not config.xla_strict,
        "DM610",
        f"{func} cannot run on the XLA device",
        why=reason,
        cure="write it with other operations, add a lowering (docs/xla-op-lowering.md), or unset "
        "config.xla_strict",
    )
    metrics.counter(name)
    counters["fallback"]["xla." + name] += 1
    emit("xla.fallback", op=str(func), reason=reason, line=metrics.user_line())
    return name


def written(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an op writes."""
    return [args[at] if type(at) is int else kwargs.get(str(at)) for at in facts(func).writes]


def _write_back(
    func: Callable[..., Any], args: tuple, kwargs: dict, host_args: tuple, host_kwargs: dict
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(CPU copy, device tensor) of each tensor that the op wrote, by its schema; the device tensors get the
    new values.
    """
    pairs: list[tuple[Any, Any]] = []
    for mine, host in zip(written(func, args, kwargs), written(func, host_args, host_kwargs)):
        pairs += zip(tree_leaves(host), tree_leaves(mine))
    for host, mine in pairs:
        if type(mine) is XLATensor:
            if tuple(host.shape) != tuple(mine.shape):
                mine.data = wrap(new_root(transfer.from_cpu(host, mine._alias.lane), layout.of_tensor(host)))
            else:
                write(mine._alias, transfer.from_cpu(host, mine._alias.lane))
                check_views(mine._alias, args)
    return pairs
