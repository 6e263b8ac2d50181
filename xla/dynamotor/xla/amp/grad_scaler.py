"""Loss scaling whose decision to skip a step stays on the device, so that a training step is one graph.

>>> scaler = GradScaler()
>>> scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
"""

from __future__ import annotations

from typing import Any

import torch


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for XLA devices; with optimizers of `syncfree`, or `use_zero_grad`, no step waits
    for the device.

    init_scale, growth_factor, backoff_factor, growth_interval, enabled: as torch's. use_zero_grad: with other
    optimizers, step with zero gradients where some are infinite, instead of reading whether they are
    (momentum and weight decay then still change the weights).
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        use_zero_grad: bool = False,
    ) -> None:
        super().__init__("xla", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._use_zero_grad = use_zero_grad

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not self._use_zero_grad:
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        found = sum(optimizer_state["found_inf_per_device"].values())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = torch.where(
                        found.to(parameter.device) > 0, torch.zeros_like(parameter.grad), parameter.grad
                    )
        return optimizer.step(*args, **kwargs)
