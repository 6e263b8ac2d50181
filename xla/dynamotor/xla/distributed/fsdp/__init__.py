"""FSDP over replicas: each process keeps one part of every parameter, gathers them for a forward pass, and
gets its part of the averaged gradients. PyTorch's parametrizations do the wiring.

>>> model = XlaFullyShardedDataParallel(model.to("xla"))
>>> optimizer = torch.optim.Adam(model.parameters())       # state for this replica's parts only
>>> loss.backward(); optimizer.step()  # no xm.optimizer_step: the gradients are reduced already
"""

from __future__ import annotations

import contextlib
import glob
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.utils import parametrize

from ... import replication
from ...collectives import REDUCE_MAX, REDUCE_SUM, all_reduce, differentiable_all_gather
from ...errors import require
from ...utils.checkpoint import checkpoint
from ..spmd.patched_linear import apply_xla_patch_to_nn_linear  # noqa: F401  (torch_xla's place for it)

_SUFFIX = ".original"


def part_of(t: torch.Tensor, rank: int | None = None) -> torch.Tensor:
    """A replica's part (this one's) of a tensor's elements, one-dimensional; the last parts are padded by
    zeros.
    """
    size = -(-t.numel() // replication.size())
    flat = torch.nn.functional.pad(t.detach().reshape(-1), (0, size * replication.size() - t.numel()))
    return flat.reshape(-1, size)[replication.rank() if rank is None else rank].clone()


def whole(part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The tensor of all replicas' parts, differentiable: gradients are averaged over the replicas."""
    gathered = differentiable_all_gather(part)
    if gathered.requires_grad:
        gathered.register_hook(lambda gradient: gradient / replication.size())
    return gathered[: math.prod(shape)].reshape(tuple(shape))


# fmt: off
_OPTIONS = frozenset((
    "optimization_barrier_in_forward", "optimization_barrier_in_backward", "mark_step_on_finalization",
    "disable_reshard_on_root", "fp32_reduce_scatter", "shard_param_on_dim_0", "pin_layout_in_collective_ops",
    "coalesce_all_gather_ops", "coalesce_reduce_scatter_ops", "bucket_cap_mb", "auto_wrap_policy",
    "auto_wrapper_callable", "param_init_fn", "sharding_groups", "sharding_rank", "sharding_world_size",
    "opt_flatten_overlap", "state_dict_type", "_shard_size_multiple", "_use_xla_patched_linear", "_debug_msg",
    "_debug_dummy_forward_pass", "_debug_print", "_debug_dummy_all_gather_op",
    "_debug_dummy_reduce_scatter_op",
    "_debug_dummy_optimization_barrier_op",
))
# fmt: on


class _Whole(torch.nn.Module):
    """The parametrization: a part is stored, the parameter is seen."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        return whole(part if self.dtype is None else part.to(self.dtype), self.shape)


def _make_real(module: torch.nn.Module, init: Callable[[torch.nn.Module], Any] | None) -> None:
    """Give parts of a module that are on the meta device parameters: `init(part)`, else its own
    `reset_parameters()`."""
    for part in module.modules():
        if not any(t.is_meta for t in [*part._parameters.values(), *part._buffers.values()] if t is not None):
            continue
        if init is not None:
            init(part)
        else:
            part.to_empty(device="xla", recurse=False)
            part.reset_parameters()  # type: ignore[operator]


class XlaFullyShardedDataParallel(torch.nn.Module):
    """A module whose parameters are divided over the replicas. Wrapping parts of a model before the whole is
    allowed, not needed. Attributes that it does not have are the wrapped module's.

    module: moved to the device if it is not there; parts on the meta device are made by `param_init_fn(part)`
    or their `reset_parameters()`. compute_dtype: parameters are cast to it before they are gathered.
    buffer_dtype: floating-point buffers are cast to it. The options after reshard_after_forward that say how
    torch_xla flattens, wraps, reshards and orders its work are accepted: XLA decides when a gathered
    parameter is needed and freed.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        reshard_after_forward: bool = True,
        flatten_parameters: bool = False,
        execute_sharding_on_init: bool = True,
        *,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        unknown = sorted(options.keys() - _OPTIONS)
        if unknown:
            raise TypeError(f"XlaFullyShardedDataParallel got unexpected options: {', '.join(unknown)}")
        _make_real(module, options.get("param_init_fn"))
        self.module = module.to("xla")
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer_dtype is not None and buffer is not None and buffer.is_floating_point():
                    owner._buffers[name] = buffer.to(buffer_dtype)
        shapes: dict[torch.nn.Parameter, torch.Size] = {}
        for owner in [m for m in module.modules() if not isinstance(m, parametrize.ParametrizationList)]:
            for name, parameter in list(owner._parameters.items()):
                if parameter is None:
                    continue
                if parameter not in shapes:  # a tied one has its part already
                    shapes[parameter] = parameter.shape
                    parameter.data = part_of(parameter)
                parametrize.register_parametrization(
                    owner, name, _Whole(shapes[parameter], compute_dtype), unsafe=True
                )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with parametrize.cached():
            return self.module(*args, **kwargs)

    def get_shard_metadata(self) -> dict[str, Any]:
        """Data for `consolidate_sharded_state_dicts` beside the state dicts: names and shapes of the
        divided parameters, and the rank.
        """
        named = dict(self.named_modules())
        wrappers = sorted(
            [f"{n}." if n else "" for n, m in named.items() if isinstance(m, XlaFullyShardedDataParallel)],
            key=len,
        )
        lists = {n: m for n, m in named.items() if isinstance(m, parametrize.ParametrizationList)}
        names = {}
        for key in self.state_dict():
            name = key
            for prefix in reversed(wrappers):
                name = (
                    prefix + name[len(prefix) :].removeprefix("module.") if name.startswith(prefix) else name
                )
            names[key] = name.replace("parametrizations.", "").removesuffix(_SUFFIX)
        return {
            "names": names,
            "shapes": {n + _SUFFIX: m[0].shape for n, m in lists.items()},
            "rank": replication.rank(),
        }

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __getitem__(self, key: int) -> Any:
        return self.module[key]  # type: ignore[index]  # a Sequential, or a list of modules

    def params_with_grad(self) -> list[torch.nn.Parameter]:
        """The parameters (parts of them) that have a gradient."""
        return [p for p in self.parameters() if p.grad is not None]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """For backward passes whose gradients are accumulated. Gradients of parts are sums over the replicas,
        so that adding them up before or after they are reduced is the same."""
        yield

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, groups: Sequence[Sequence[int]] | None = None
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over the parts of all replicas. groups: None or one group of
        all."""
        require(
            groups is None or [sorted(group) for group in groups] == [list(range(replication.size()))],
            "DM681",
            "clip_grad_norm_ got groups of some of the replicas",
            why=f"{groups} of {replication.size()} replicas",
            cure="leave groups out",
        )
        return clip_parts([p.grad for p in self.parameters() if p.grad is not None], max_norm, norm_type)


def clip_parts(grads: Sequence[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale gradients, of which this replica has parts, so that their norm is at most `max_norm`; the norm
    before that.
    """
    norm = torch.nn.utils.get_total_norm(grads, norm_type)
    how, power = (REDUCE_MAX, 1.0) if math.isinf(norm_type) else (REDUCE_SUM, norm_type)
    norm = all_reduce(how, norm**power) ** (1 / power)
    torch._foreach_mul_(list(grads), (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


def consolidate_sharded_state_dicts(checkpoints: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The state dict of the model that was wrapped, from `{"model": state_dict, "shard_metadata": ...}` of
    every replica.
    """
    ordered = sorted(checkpoints, key=lambda c: c["shard_metadata"]["rank"])
    names, shapes = ordered[0]["shard_metadata"]["names"], ordered[0]["shard_metadata"]["shapes"]
    found = {names[key]: value for key, value in ordered[0]["model"].items()}
    for key, shape in shapes.items():
        flat = torch.cat([c["model"][key].cpu() for c in ordered])
        found[names[key]] = flat[: math.prod(shape)].reshape(shape)
    return found


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str, ckpt_suffix: str = "_rank-*-of-*.pth", save_path: str = "", save_model: bool = True
) -> tuple[dict[str, torch.Tensor], str]:
    """`consolidate_sharded_state_dicts` of the files `ckpt_prefix + ckpt_suffix`, written to a file: (state
    dict, its path).
    """
    paths = sorted(glob.glob(ckpt_prefix + ckpt_suffix))
    whole = consolidate_sharded_state_dicts(
        [torch.load(path, map_location="cpu", weights_only=False) for path in paths]
    )
    save_path = save_path or f"{ckpt_prefix}_consolidated.pth"
    if save_model:
        torch.save({"model": whole}, save_path)
    return whole, save_path


def checkpoint_module(module: torch.nn.Module) -> torch.nn.Module:
    """The same module; its forward pass is computed again in the backward pass instead of being kept."""
    # To the end, as a reentrant one does (step closures): XLA drops what no gradient needs.
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, early_stop=False)
    return module
