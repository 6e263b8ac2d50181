"""`module.to("xla")` and back: a module's parameters stay the Python objects that they were, so ties hold and
optimizers made before keep training them; the optimizers' state follows at their next step.

>>> optimizer = torch.optim.Adam(model.parameters())
>>> model.to("xla")             # optimizer.param_groups[0]["params"] are the parameters on the device
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dynamotor.extension_api import allow_step_hook, warn_once

from . import compat
from .compat import tree_map_only
from .regions import is_eager_mode
from .tensor import is_xla

# References to a tensor that is nothing but an argument of one of our kernels: by the dispatcher's key, by
# __torch_dispatch__; further ones by the mode of eager mode.
_HELD, _HELD_XLA = 2, 4
_EAGER, _EAGER_XLA = 4, 1
_conversions = 0
_served: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def mark(source: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, as `Module._apply` must see it to swap it into a parameter that moves: it asks
    whether the copy is of a subclass that has parts."""
    global _conversions
    if isinstance(source, torch.nn.Parameter) and _is_applied():
        _conversions += 1
        if _swappable(source):
            made = made if is_xla(made) else torch.nn.Parameter(made, requires_grad=False)
            vars(made).update(__tensor_flatten__=_whole, __tensor_unflatten__=_whole)
    return made


def _is_applied() -> bool:
    """Whether this is done by `Module._apply`: by `module.to`, `cpu`, ..."""
    frame: Any = sys._getframe(2)
    for _ in range(10):
        if frame is None or frame.f_code is compat.module_apply.__code__:
            break
        frame = frame.f_back
    else:
        return False
    return frame is not None


def _whole(*_: Any) -> Any:
    raise TypeError("an xla tensor has no parts")


def _swappable(tensor: torch.Tensor) -> bool:
    """Whether nothing but Python and its own gradient node hold the tensor; a warning says where not."""
    plain, eager = (_HELD_XLA, _EAGER_XLA) if is_xla(tensor) else (_HELD, _EAGER)
    own = plain + eager * is_eager_mode() + tensor.requires_grad  # one may be its gradient node
    held = tensor._use_count() > own  # type: ignore[attr-defined]
    references = weakref.getweakrefs(tensor) + (
        [] if tensor.grad is None else weakref.getweakrefs(tensor.grad)
    )
    if not held and not references:
        return True
    warn_once(
        "xla.new_parameter",
        "a parameter that moves between the CPU and xla becomes another Python object: ties and optimizers "
        "made before do not "
        "see it, because "
        + (
            "weak references to it exist"
            if references
            else "a graph that was not run backward, or C++ code, holds it"
        ),
    )
    return False


def _state_follows(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """State that was made for parameters elsewhere moves to where they are now (state of one number stays
    where it is).
    """
    if _served.get(optimizer) == _conversions:
        return
    _served[optimizer] = _conversions
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, torch.Tensor) and isinstance(state, dict):
            for name, kept in state.items():
                state[name] = tree_map_only(
                    torch.Tensor, functools.partial(_following, parameter.device), kept
                )


def _following(where: torch.device, kept: torch.Tensor) -> torch.Tensor:
    kinds = {kept.device.type, where.type}
    follows = len(kinds) == 2 and "xla" in kinds and (kept.dim() > 0 or where.type == "cpu")
    return kept.to(where) if follows else kept


register_optimizer_step_pre_hook(_state_follows)
allow_step_hook(_state_follows)
