"""ZeRO, stage 1: each replica keeps the optimizer's state of its part of every parameter, updates that, and
gathers the rest.

>>> optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
>>> loss.backward(); optimizer.step()       # gradients are averaged over the replicas here
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import replication
from ..collectives import REDUCE_SUM, all_gather, reduce_scatter
from ..errors import require
from .fsdp import clip_parts


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """optimizer_class(**defaults) on this replica's parts: rows of each parameter, the last ones padded.

    optimizer_dtype: the type of the parts and of the optimizer's state (float32, or the parameters' own where
    that is wider). grad_clipping: scale gradients to a norm of `max_norm`; `grad_norm` is the norm before
    that in the last step. save_master_weights: keep the parts in `state_dict()`. lazy_init: the parts are
    made by `init_zero()`. use_grad_acc_hook: gradients are added up in `optimizer_dtype`, as `main_grad` of a
    parameter. higher_cc_precision: they are sent in it. sharding_groups: None or one group of all replicas.
    pin_layout, bucket_cap_mb_*: accepted, since XLA chooses layouts and joins transfers. DM681 for groups of
    some replicas.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type,
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = 1.0,
        pin_layout: bool = True,
        sharding_groups: Sequence[Sequence[int]] | None = None,
        grad_norm_groups: Sequence[Sequence[int]] | None = None,
        lazy_init: bool = False,
        bucket_cap_mb_all_gather: int = 0,
        bucket_cap_mb_reduce_scatter: int = 0,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = False,
        higher_cc_precision: bool = False,
        **defaults: Any,
    ) -> None:
        super().__init__(params, defaults)
        for groups in (sharding_groups, grad_norm_groups):
            require(
                groups is None or [sorted(group) for group in groups] == [list(range(replication.size()))],
                "DM681",
                "ZeroRedundancyOptimizer got groups of some of the replicas",
                why=f"{groups} of {replication.size()} replicas",
                cure="leave sharding_groups and grad_norm_groups out",
            )
        self._class, self._defaults, self._dtype = optimizer_class, defaults, optimizer_dtype
        self._max_norm = (1.0 if max_norm is None else max_norm) if grad_clipping else None
        self._save_parts, self._sends_wide = save_master_weights, higher_cc_precision
        self._grad_norm: torch.Tensor | None = None
        self._pairs: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []
        if use_grad_acc_hook:
            for p in self._parameters():
                p.register_post_accumulate_grad_hook(self._accumulate)
        if not lazy_init:
            self.init_zero()

    def init_zero(self) -> None:
        """Make the parts, of the parameters' present values, and the optimizer of them."""
        make = torch.nn.Parameter
        part = {p: make(_rows(p).to(self._type(p)), p.requires_grad) for p in self._parameters()}
        self._pairs = list(part.items())
        parts = [{**group, "params": [part[p] for p in group["params"]]} for group in self.param_groups]
        self.base_optimizer = self._class(parts, **self._defaults)
        _settings(self.base_optimizer, self)  # its own defaults, too: they are saved

    def _parameters(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def _type(self, p: torch.Tensor) -> torch.dtype:
        return self._dtype or torch.promote_types(p.dtype, torch.float32)

    def _accumulate(self, p: Any) -> None:
        grad = p.grad.to(self._type(p))
        p.main_grad = grad if getattr(p, "main_grad", None) is None else p.main_grad + grad
        p.grad = None

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients before clipping, in the last step; None before the first, or without
        clipping."""
        return self._grad_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, update this replica's parts, gather the parameters."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        _settings(self, self.base_optimizer)  # a scheduler changes ours
        for p, part in self._pairs:
            grad = getattr(p, "main_grad", None) if p.grad is None else p.grad
            part.grad = None if grad is None else self._averaged(grad, part.dtype)
        if self._max_norm is not None:
            self._grad_norm = clip_parts(
                [part.grad for _, part in self._pairs if part.grad is not None], self._max_norm
            )
        self.base_optimizer.step()
        _settings(self.base_optimizer, self)
        self._gather()
        return loss

    def _averaged(self, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        padded = _padded(grad.to(dtype) if self._sends_wide else grad)
        return reduce_scatter(REDUCE_SUM, padded, 1 / replication.size(), 0, replication.size()).to(dtype)

    def _gather(self) -> None:
        for p, part in self._pairs:
            rows = all_gather(part.detach().to(p.dtype))
            p.copy_(rows[: p.shape[0]] if p.dim() else rows[0])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of `use_grad_acc_hook` as well."""
        super().zero_grad(set_to_none)
        for p in self._parameters():
            vars(p).pop("main_grad", None)

    def get_shape_info(self) -> dict[int, torch.Size]:
        """The whole shape of each parameter, by its number."""
        return {number: p.shape for number, p in enumerate(self._parameters())}

    def state_dict(self) -> dict[str, Any]:
        """This replica's part of the state, as torch_xla's optimizer saves it: save one for each replica."""
        base = self.base_optimizer.state_dict()["state"]
        state = {**super().state_dict(), "base_state": base, "shape_info": self.get_shape_info()}
        if self._save_parts:
            state["sharded_master_weights"] = {i: part.detach() for i, (_, part) in enumerate(self._pairs)}
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of a replica of the same rank and number gave. The parts follow the saved
        ones and the parameters these; where none were saved, the parts follow the parameters.
        """
        state = dict(state_dict)
        base, parts = state.pop("base_state"), state.pop("sharded_master_weights", None)
        super().load_state_dict(state)
        self.init_zero()
        self.base_optimizer.load_state_dict({"state": base, "param_groups": state["param_groups"]})
        if parts is not None:
            for number, (_, part) in enumerate(self._pairs):
                part.copy_(parts[number])
            self._gather()


def _padded(t: torch.Tensor) -> torch.Tensor:
    """A tensor whose rows the replicas can share; a number is a row."""
    t = t.detach() if t.dim() else t.detach().reshape(1)
    missing = -t.shape[0] % replication.size()
    return torch.cat([t, t.new_zeros((missing, *t.shape[1:]))]) if missing else t


def _rows(t: torch.Tensor) -> torch.Tensor:
    """This replica's rows."""
    return _padded(t).chunk(replication.size())[replication.rank()].clone()


def _settings(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Copy what parameter groups say beside their parameters."""
    for ours, theirs in zip(source.param_groups, target.param_groups):
        theirs.update({key: value for key, value in ours.items() if key != "params"})
