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
from ..collectives import REDUCE_SUM, all_reduce
from ..errors import require
from .fsdp import clip_parts, part_of, whole


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """optimizer_class(**defaults) on this replica's parts.

    optimizer_dtype: the type of the parts, of their gradients and of the optimizer's state (the parameters'
    own where not given). grad_clipping: scale gradients to a norm of `max_norm`; `grad_norm` is the norm
    before that in the last step. save_master_weights: keep the parts in `state_dict()`. sharding_groups: None
    or one group of all replicas. pin_layout, lazy_init: accepted, since XLA chooses layouts and the parts are
    made at once. DM667 for groups of some replicas.
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
        save_master_weights: bool = False,
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
        self._max_norm = max_norm if grad_clipping else None
        self._save_parts = save_master_weights
        self._grad_norm: torch.Tensor | None = None
        self._pairs = [
            (p, torch.nn.Parameter(part_of(p).to(optimizer_dtype or p.dtype)))
            for group in self.param_groups
            for p in group["params"]
        ]
        part = dict(self._pairs)
        parts = [{**group, "params": [part[p] for p in group["params"]]} for group in self.param_groups]
        self.base_optimizer = optimizer_class(parts, **defaults)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients before clipping, in the last step; None before the first, or without
        clipping."""
        return self._grad_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, update this replica's parts, gather the parameters."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group, base in zip(self.param_groups, self.base_optimizer.param_groups):
            base.update(
                {key: value for key, value in group.items() if key != "params"}
            )  # a scheduler changes ours
        for p, part in self._pairs:
            part.grad = (
                None
                if p.grad is None
                else part_of(all_reduce(REDUCE_SUM, p.grad, 1 / replication.size())).to(part.dtype)
            )
        if self._max_norm is not None:
            self._grad_norm = clip_parts(
                [part.grad for _, part in self._pairs if part.grad is not None], self._max_norm
            )
        self.base_optimizer.step()
        for p, part in self._pairs:
            p.copy_(whole(part, p.shape))
        return loss

    def state_dict(self) -> dict[str, Any]:
        """This replica's part of the state: save one for each replica."""
        state = {**super().state_dict(), "base_state": self.base_optimizer.state_dict()}
        if self._save_parts:
            state["sharded_master_weights"] = [part.detach() for _, part in self._pairs]
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of a replica of the same rank and number gave."""
        state = dict(state_dict)
        self.base_optimizer.load_state_dict(state.pop("base_state"))
        for (_, part), saved in zip(self._pairs, state.pop("sharded_master_weights", ())):
            part.copy_(saved)
        super().load_state_dict(state)
