"""Optimizers that can be told by a tensor on the device to skip a step: `step(found_inf=...)`, or through a
GradScaler.

>>> optimizer = syncfree.Adam(model.parameters())
>>> scaler.step(optimizer)      # nothing is read back to the host
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _skipping(
    optimizer: torch.optim.Optimizer, update: Callable[[], Any], found_inf: torch.Tensor | None
) -> Any:
    """Run an update whose effect on parameters and state is undone, on the device, where `found_inf` is not
    0.
    """
    scale = getattr(optimizer, "grad_scale", None)
    found_inf = getattr(optimizer, "found_inf", None) if found_inf is None else found_inf
    if found_inf is None:
        return update()
    vars(optimizer).update(grad_scale=None, found_inf=None)  # torch's own update must not see them
    torch._check_value(
        found_inf.numel() == 1, lambda: f"found_inf must be one number, it has shape {list(found_inf.shape)}"
    )
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if scale is not None:
        for p in parameters:
            p.grad.div_(scale)
    state_of = {
        p: {k: v.clone() for k, v in optimizer.state[p].items() if torch.is_tensor(v)} for p in parameters
    }
    value_of = {p: p.detach().clone() for p in parameters}
    result = update()
    skip = found_inf.reshape(()) > 0
    with torch.no_grad():
        for p in parameters:
            p.copy_(torch.where(skip, value_of[p], p))
            for name, new in optimizer.state[p].items():
                if torch.is_tensor(new):
                    new.copy_(torch.where(skip, state_of[p].get(name, torch.zeros_like(new)), new))
    return result


class _OnDevice:
    """Skipping, by a tensor on the device."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, found_inf: torch.Tensor | None = None) -> Any:
        """One step. closure: evaluates the model anew and returns the loss. found_inf: a tensor with one
        number; not 0: skip.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _skipping(self, self._update, found_inf)  # type: ignore[arg-type]
        return loss

    def _update(self) -> None:
        super().step()  # type: ignore[misc]


class SGD(_OnDevice, torch.optim.SGD):
    """torch.optim.SGD with `step(closure, found_inf)`: nothing changes where the tensor `found_inf` is not
    0.
    """

    def _update(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update_one(p, p.grad, group)

    def _update_one(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        change = -grad if group["maximize"] else grad
        if group["weight_decay"]:
            change = change.add(p, alpha=group["weight_decay"])
        momentum = group["momentum"]
        if momentum:
            state = self.state[p]
            if state.get("momentum_buffer") is None:
                # The first gradient enters undamped; whether a step was the first is only known on the
                # device.
                state["momentum_buffer"], state["started"] = torch.zeros_like(p), p.new_zeros(())
            started = state.setdefault("started", p.new_ones(()))
            buffer = state["momentum_buffer"]
            buffer.mul_(momentum).add_(change * (1 - started * group["dampening"]))
            started.fill_(1)
            change = change.add(buffer, alpha=momentum) if group["nesterov"] else buffer
        p.add_(change, alpha=-group["lr"])


class _Capturable(_OnDevice):
    """Step counts are on the device, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "capturable": True})


class Adam(_Capturable, torch.optim.Adam):
    """torch.optim.Adam with `step(closure, found_inf)`: nothing changes where the tensor `found_inf` is not
    0.
    """


class AdamW(_Capturable, torch.optim.AdamW):
    """torch.optim.AdamW with `step(closure, found_inf)`: nothing changes where the tensor `found_inf` is not
    0.
    """
