"""ZeRO, stage 1: each replica keeps the optimizer's state of its part of every parameter, updates that, and
gathers the rest.

>>> optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
>>> loss.backward(); optimizer.step()       # gradients are averaged over the replicas here
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import replication
from ..collectives import REDUCE_SUM, all_reduce
from .fsdp import clip_parts, part_of, whole


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """optimizer_class(**defaults) on this replica's parts. With `grad_clipping` gradients are scaled to a
    norm of `max_norm`.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type,
        *,
        grad_clipping: bool = True,
        max_norm: float = 1.0,
        **defaults: Any,
    ) -> None:
        super().__init__(params, defaults)
        self._max_norm = max_norm if grad_clipping else None
        self._pairs = [
            (p, torch.nn.Parameter(part_of(p))) for group in self.param_groups for p in group["params"]
        ]
        part = dict(self._pairs)
        groups = [{**group, "params": [part[p] for p in group["params"]]} for group in self.param_groups]
        self.base_optimizer = optimizer_class(groups, **defaults)

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
                None if p.grad is None else part_of(all_reduce(REDUCE_SUM, p.grad, 1 / replication.size()))
            )
        if self._max_norm is not None:
            clip_parts([part.grad for _, part in self._pairs if part.grad is not None], self._max_norm)
        self.base_optimizer.step()
        for p, part in self._pairs:
            p.copy_(whole(part, p.shape))
        return loss

    def state_dict(self) -> dict[str, Any]:
        """This replica's part of the state: save one for each replica."""
        return {**super().state_dict(), "base": self.base_optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of a replica of the same rank and number gave."""
        self.base_optimizer.load_state_dict(state_dict["base"])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "base"})
