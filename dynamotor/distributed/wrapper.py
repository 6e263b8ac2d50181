"""The facts of a DistributedDataParallel module: reduced parameters, buckets, and cases that only
it can do.

>>> reduced_parameters(ddp)       # {"layer.weight": Parameter, ...}, without ignored and frozen ones
>>> bucket_caps(ddp)              # (1048576, 26214400): the first bucket, then all others
>>> why_not_ingraph(ddp)          # None, or why DDP's own reducer must do the work
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from ..base import compat


@dataclass(frozen=True, slots=True)
class Reason:
    """Why gradients are not reduced inside the graph: a stable code for counters, and a sentence."""

    code: str
    text: str


def reduced_parameters(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Parameters whose gradients DDP averages, by name, a shared one once."""
    ignored = ddp.parameters_to_ignore
    return {name: p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored}


def bucket_caps(ddp: DistributedDataParallel) -> tuple[int, ...]:
    """Bytes at which the first, second, ... bucket is closed; the last number holds for all that follow."""
    listed = tuple(getattr(ddp, "bucket_bytes_cap_list", ()) or ())
    if listed:
        return listed
    settings = getattr(ddp, "_bucket_config", None)
    if settings is not None:
        first = settings.first_bucket_bytes_cap
    else:
        first = compat.first_bucket_bytes if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
    return (first, ddp.bucket_bytes_cap) if first < ddp.bucket_bytes_cap else (ddp.bucket_bytes_cap,)


def wire_settings(ddp: DistributedDataParallel) -> str:
    """What all ranks must have alike when DDP's own reducer does the work: it sends other things otherwise,
    or nothing.
    """
    text = f"find_unused_parameters={ddp.find_unused_parameters}, static_graph={ddp.static_graph}"
    if (
        ddp.find_unused_parameters and not ddp.static_graph
    ):  # otherwise the first rank's buckets are everybody's
        text += f", bucket sizes {bucket_caps(ddp)}"
    return f"{text}, {len(reduced_parameters(ddp))} parameters"


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether a user looks at or changes the parameter's gradient on its way."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _builtin_hook(ddp: DistributedDataParallel) -> bool:
    return bool(ddp._get_ddp_logging_data().get("comm_hook"))


# One row a case: code, what to tell, test.
_NATIVE: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("comm_hook", "a communication hook is registered", lambda d: bool(d._comm_hooks) or _builtin_hook(d)),
    ("find_unused", "find_unused_parameters=True", lambda d: d.find_unused_parameters),
    ("static_graph", "static_graph=True", lambda d: d.static_graph),
    ("mixed_precision", "DDP's own mixed precision is on", lambda d: d.mixed_precision is not None),
    ("delayed", "delay_all_reduce_named_params is used", lambda d: bool(d._delay_all_reduce_params)),
    (
        "skip_unused",
        "skip_all_reduce_unused_params=True",
        lambda d: getattr(d, "skip_all_reduce_unused_params", False),
    ),
    ("python_reducer", "DDP's Python reducer is on", lambda d: d._use_python_reducer),
    (
        "optimizer_in_backward",
        "the optimizer runs in the backward",
        lambda d: any(hasattr(p, "_in_backward_optimizers") for p in d._module_parameters),
    ),
    (
        "sparse",
        "an embedding has sparse gradients",
        lambda d: any(
            getattr(m, "sparse", False)
            for m in d.module.modules()
            if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
        ),
    ),
    (
        "frozen_since",
        "parameters were frozen or unfrozen after the DistributedDataParallel module was made",
        lambda d: len(reduced_parameters(d)) != d._get_ddp_logging_data()["num_parameter_tensors"],
    ),
    (
        "param_hook",
        "a parameter has gradient hooks",
        lambda d: any(map(has_gradient_hooks, reduced_parameters(d).values())),
    ),
)


def why_not_ingraph(ddp: DistributedDataParallel) -> Reason | None:
    """What of this module only DDP's own reducer can do."""
    return next((Reason(code, text) for code, text, holds in _NATIVE if holds(ddp)), None)


def why_not_whole(model: nn.Module) -> Reason | None:
    """Why gradients of a model are not reduced in a training step that is one program."""
    modules = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if modules and modules != [model]:
        return Reason("inside", "a DistributedDataParallel module is a part of the model")
    if modules and (type(model) is not DistributedDataParallel or hasattr(model, "buffer_hook")):
        return Reason("subclass", "the DistributedDataParallel module is a subclass or has a buffer hook")
    return why_not_ingraph(modules[0]) if modules else None


def has_module_hooks(ddp: DistributedDataParallel) -> bool:
    """Whether hooks watch calls of the DDP module itself."""
    return bool(
        ddp._forward_hooks or ddp._forward_pre_hooks or ddp._backward_hooks or ddp._backward_pre_hooks
    )


def is_reducing(ddp: DistributedDataParallel) -> bool:
    """Whether a module's DDP has a reducer at all (with every all-reduce delayed it has none)."""
    return "reducer" in ddp.__dict__


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long the group's collectives may take."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    found = getattr(options, "_timeout", None)
    return found if isinstance(found, timedelta) else c10d.default_pg_timeout
