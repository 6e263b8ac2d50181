"""Changes of models, of their Python and of losses, made between two training steps; see `changes`."""

from __future__ import annotations

import collections
import random
import types
from typing import Any

import torch
from torch import nn

from . import models
from .changes import change
from .models import KNOB, SEEN, Criterion, Scaled
from .training import World


def _set(w: World, owner: Any, name: str, value: Any) -> None:
    """Set an attribute that outlives the world, and put it back at its end."""
    before = owner.__dict__[name]
    setattr(owner, name, value)
    w.undo.append(lambda: setattr(owner, name, before))


@change
def fail_once(w: World, r: random.Random) -> None:
    KNOB.fails = True


@change
def knob_of_the_model(w: World, r: random.Random) -> None:
    KNOB.scale = r.choice([0.5, 0.25])
    KNOB.table["scale"] = r.choice([0.5, 3.0])
    KNOB.values[:] = [r.choice([0.5, 2.0])]


@change
def factor_of_a_function(w: World, r: random.Random) -> None:
    _set(w, Scaled, "factor", r.choice([0.5, 2.0]))


@change
def backward_of_a_function(w: World, r: random.Random) -> None:
    _set(w, Scaled, "backward", staticmethod(lambda ctx, g: g * 0.25))


@change
def forward_of_the_class(w: World, r: random.Random) -> None:
    before = models.Net.forward
    _set(w, models.Net, "forward", lambda self, x: before(self, x) * 0.5)


@change
def forward_of_a_layer(w: World, r: random.Random) -> None:
    layer = w.model.first
    before = layer.forward
    layer.forward = lambda x: before(x) + 0.1  # type: ignore[method-assign]


@change
def class_of_a_layer(w: World, r: random.Random) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    if type(w.model.second) is nn.Linear:
        w.model.second.__class__ = Doubled


@change
def no_bias(w: World, r: random.Random) -> None:
    """The optimizer still has the parameter."""
    w.model.first.bias = None


@change
def attributes_of_the_model(w: World, r: random.Random) -> None:
    if isinstance(w.model, models.Shared):
        w.model.scales[r.randrange(2)] = 0.25
        w.model.activation = r.choice([torch.relu, torch.sigmoid, torch.tanh])
    if isinstance(w.model, models.Counting):
        w.model.calls += 3


@change
def grow_the_model(w: World, r: random.Random) -> None:
    if isinstance(w.model, models.Shared):
        w.model.blocks.append(nn.Linear(3, 3).double())
        w.model.scales.append(1.0)


@change
def shrink_the_model(w: World, r: random.Random) -> None:
    if isinstance(w.model, models.Shared) and len(w.model.blocks) > 1:
        del w.model.blocks[-1]


@change
def write_a_buffer(w: World, r: random.Random) -> None:
    for buffer in w.model.buffers():
        if buffer.is_floating_point():
            buffer.mul_(0.5)


@change
def drop_a_buffer(w: World, r: random.Random) -> None:
    norm = next(m for m in w.model.modules() if isinstance(m, nn.BatchNorm1d))
    norm.track_running_stats = not norm.track_running_stats


@change
def load_the_model(w: World, r: random.Random) -> None:
    state = {name: value * 0.5 for name, value in w.model.state_dict().items()}
    w.model.load_state_dict(state, assign=r.random() < 0.3)


@change
def swap_tensors(w: World, r: random.Random) -> None:
    """Parameters that hooks or a compiled program hold may refuse it."""
    first, second = w.model.first.bias, getattr(w.model.second, "bias", None)
    if first is not None and second is not None and first is not second:
        first.data, second.data = second.data, first.data


@change
def backward_hook(w: World, r: random.Random) -> None:
    k = r.choice([0.5, 0.9])
    w.handles.append(
        w.model.second.register_full_backward_hook(
            lambda m, gi, go: tuple(g if g is None else g * k for g in gi)
        )
    )


@change
def forward_pre_hook(w: World, r: random.Random) -> None:
    w.handles.append(w.model.first.register_forward_pre_hook(lambda m, args: (args[0] * KNOB.scale,)))


@change
def hook_on_all_modules(w: World, r: random.Random) -> None:
    w.handles.append(nn.modules.module.register_module_forward_hook(lambda m, args, out: SEEN.append("all")))


@change
def weights_of_the_loss(w: World, r: random.Random) -> None:
    if isinstance(w.loss, Criterion):
        w.loss.weights[r.randrange(2)] = r.choice([0.25, 2.0])


@change
def default_of_the_loss(w: World, r: random.Random) -> None:
    if isinstance(w.loss, types.FunctionType) and w.loss.__defaults__:
        w.loss.__defaults__ = (r.choice([0.0, 0.3]),)


@change
def code_of_the_loss(w: World, r: random.Random) -> None:
    if isinstance(w.loss, types.FunctionType) and w.loss.__defaults__:
        w.loss.__code__ = (lambda out, y, smoothing=0.0: nn.functional.cross_entropy(out, y) * 2).__code__


@change
def another_list_of_groups(w: World, r: random.Random) -> None:
    w.optimizer.param_groups = [dict(group) for group in w.optimizer.param_groups]


@change
def another_table_of_states(w: World, r: random.Random) -> None:
    w.optimizer.state = collections.defaultdict(dict, w.optimizer.state)


@change
def one_gradient_gone(w: World, r: random.Random) -> None:
    r.choice(w.parameters() or [w.spare]).grad = None


@change
def other_seed(w: World, r: random.Random) -> None:
    torch.manual_seed(r.randrange(9))
    random.seed(r.randrange(9))


@change
def other_batch(w: World, r: random.Random) -> None:
    w.rows = r.choice([2, 3, 5, 8])


@change
def freeze_a_layer(w: World, r: random.Random) -> None:
    for p in w.model.first.parameters():
        p.requires_grad_(not p.requires_grad)
