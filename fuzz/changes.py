"""Changes of all that a training step may look at, made between two steps."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from . import training
from .models import KNOB
from .training import LOG, Decaying, World, appends, draws, each, reads_global

Change = Callable[[World, random.Random], None]
CHANGES: dict[str, Change] = {}
REPLACING = ("_swaps", "_shares", "_counts")  # optimizers that exchange or replace tensors of their state


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


def _group(w: World, r: random.Random) -> dict[str, Any]:
    return r.choice(w.optimizer.param_groups)


def _parameter(w: World, r: random.Random) -> torch.Tensor:
    return r.choice(w.parameters() or [w.spare])


def _option(name: str, values: list[Any]) -> None:
    def set_option(w: World, r: random.Random) -> None:
        group = _group(w, r)
        refused = name == "fused" and w.scaler is not None  # eager's step asserts that all groups are fused
        if name in group and not refused:
            group[name] = r.choice(values)

    CHANGES[f"option {name}"] = set_option


for _name, _values in {
    "lr": [0.5, 0.0, 1e-3, torch.tensor(0.05), 1],
    "weight_decay": [0.0, 0.1, 0.5],
    "momentum": [0.0, 0.5, 0.9],
    "betas": [(0.5, 0.9), (0.0, 0.99), (0.9, 0.999)],
    "maximize": [True, False],
    "foreach": [True, False, None],
    "fused": [False, None],
    "nesterov": [True, False],
    "amsgrad": [False],
    "dampening": [0.5, 0],
    "eps": [1e-3, 1e-8],
    "alpha": [0.5, 0.9],
    "count": [3.0, 0.0],
}.items():
    _option(_name, _values)


@change
def nothing(w: World, r: random.Random) -> None:
    pass


@change
def pop_a_parameter(w: World, r: random.Random) -> None:
    group = _group(w, r)
    if len(group["params"]) > 1:
        group["params"].pop(r.randrange(len(group["params"])))
        w.model.zero_grad()


@change
def append_a_parameter(w: World, r: random.Random) -> None:
    left = [p for p in w.model.parameters() if all(p is not q for q in w.parameters())]
    if left:
        _group(w, r)["params"].append(left[0])


@change
def append_a_spare(w: World, r: random.Random) -> None:
    if all(w.spare is not p for p in w.parameters()):
        _group(w, r)["params"].append(w.spare)


@change
def gradient_of_the_spare(w: World, r: random.Random) -> None:
    w.spare.grad = torch.ones_like(w.spare)


@change
def reverse_parameters(w: World, r: random.Random) -> None:
    _group(w, r)["params"].reverse()


@change
def another_list(w: World, r: random.Random) -> None:
    group = _group(w, r)
    group["params"] = list(group["params"])


@change
def move_to_another_group(w: World, r: random.Random) -> None:
    groups = w.optimizer.param_groups
    if len(groups) > 1 and len(groups[0]["params"]) > 1:
        groups[1]["params"].append(groups[0]["params"].pop())


@change
def add_a_group(w: World, r: random.Random) -> None:
    left = [p for p in [*w.model.parameters(), w.spare] if all(p is not q for q in w.parameters())]
    if left:
        w.optimizer.add_param_group({"params": left[:1], "lr": 0.03})


@change
def remove_a_group(w: World, r: random.Random) -> None:
    if len(w.optimizer.param_groups) > 1:
        w.optimizer.param_groups.pop()
        w.model.zero_grad()


@change
def swap_groups(w: World, r: random.Random) -> None:
    w.optimizer.param_groups.reverse()


@change
def freeze(w: World, r: random.Random) -> None:
    _parameter(w, r).requires_grad_(False)


@change
def thaw(w: World, r: random.Random) -> None:
    for p in w.parameters():
        p.requires_grad_(True)


@change
def new_data(w: World, r: random.Random) -> None:
    p = _parameter(w, r)
    p.data = p.data.clone()


@change
def write_data(w: World, r: random.Random) -> None:
    _parameter(w, r).data.mul_(0.5)


@change
def set_data(w: World, r: random.Random) -> None:
    p = _parameter(w, r)
    with torch.no_grad():
        p.set_(p.detach().clone() * 0.5)


@change
def share_data(w: World, r: random.Random) -> None:
    w.spare.data = w.model.first.weight.data


@change
def replace_a_parameter(w: World, r: random.Random) -> None:
    w.model.second.bias = nn.Parameter(w.model.second.bias.detach() + 0.1)


@change
def swap_parameters_of_modules(w: World, r: random.Random) -> None:
    first, second = w.model.first, w.model.second
    first.bias, second.bias = second.bias, first.bias


@change
def clear_state(w: World, r: random.Random) -> None:
    w.optimizer.state.clear()


@change
def forget_one(w: World, r: random.Random) -> None:
    w.optimizer.state.pop(_parameter(w, r), None)


@change
def swap_states(w: World, r: random.Random) -> None:
    """Not for optimizers that exchange or replace tensors of their state, which whole steps write in place
    (docs/trust.md): a parameter that leaves later keeps the old ones.
    """
    a, b, state = w.model.first.bias, w.model.second.bias, w.optimizer.state
    if a in state and b in state and w.optimizer_name not in REPLACING:
        state[a], state[b] = state[b], state[a]


@change
def move_a_state(w: World, r: random.Random) -> None:
    a, b, state = w.model.first.bias, w.model.second.bias, w.optimizer.state
    if a in state:
        state[b] = state.pop(a)


@change
def share_a_state(w: World, r: random.Random) -> None:
    """Not for optimizers that exchange or replace tensors of their state, which whole steps write in place
    (docs/trust.md): a parameter that leaves later keeps the old ones.
    """
    a, b, state = w.model.first.bias, w.model.second.bias, w.optimizer.state
    if a in state and b in state and w.optimizer_name not in REPLACING:
        for key in state[a]:
            state[b][key] = state[a][key]


def _entries(w: World, r: random.Random) -> dict[str, Any]:
    found = w.optimizer.state.get(_parameter(w, r), {})
    return found if isinstance(found, dict) else {}


@change
def clone_a_state(w: World, r: random.Random) -> None:
    entries = _entries(w, r)
    for key, value in entries.items():
        if isinstance(value, torch.Tensor):
            entries[key] = value.clone()


@change
def write_a_state(w: World, r: random.Random) -> None:
    for value in _entries(w, r).values():
        if isinstance(value, torch.Tensor) and value.dim():
            value.mul_(0.5)


@change
def data_of_a_state(w: World, r: random.Random) -> None:
    for value in _entries(w, r).values():
        if isinstance(value, torch.Tensor):
            value.data = value.data.clone()


@change
def count_again(w: World, r: random.Random) -> None:
    entries = _entries(w, r)
    if isinstance(entries.get("step"), torch.Tensor):
        entries["step"] = r.choice([torch.tensor(1.0), entries["step"].fill_(2.0), torch.tensor(4.0)])
    if "n" in entries:
        entries["n"] = r.choice([2, 2.0])


@change
def swap_entries(w: World, r: random.Random) -> None:
    entries = _entries(w, r)
    if "exp_avg" in entries:
        entries["exp_avg"], entries["exp_avg_sq"] = entries["exp_avg_sq"].abs(), entries["exp_avg"].abs()


@change
def save(w: World, r: random.Random) -> None:
    w.saved = copy.deepcopy(w.optimizer.state_dict())


@change
def load(w: World, r: random.Random) -> None:
    with contextlib.suppress(ValueError):
        w.optimizer.load_state_dict(copy.deepcopy(w.saved))


@change
def defaults(w: World, r: random.Random) -> None:
    w.optimizer.defaults["lr"] = 5.0


@change
def hook_before(w: World, r: random.Random) -> None:
    w.handles.append(w.optimizer.register_step_pre_hook(lambda *_: w.seen.append("before")))


@change
def hook_after(w: World, r: random.Random) -> None:
    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            w.parameters()[0].mul_(0.9)

    w.handles.append(w.optimizer.register_step_post_hook(after))


@change
def hook_on_all(w: World, r: random.Random) -> None:
    module = sys.modules["torch.optim.optimizer"]  # torch.optim hides it behind a name of its own
    w.handles.append(module.register_optimizer_step_post_hook(lambda *_: w.seen.append("all")))


@change
def unhook(w: World, r: random.Random) -> None:
    while w.handles:
        w.handles.pop().remove()


@change
def gradient_hook(w: World, r: random.Random) -> None:
    p = _parameter(w, r)
    if p.requires_grad:
        w.handles.append(p.register_hook(lambda g: g * 0.5))


@change
def accumulation_hook(w: World, r: random.Random) -> None:
    p = _parameter(w, r)
    if p.requires_grad:
        w.handles.append(p.register_post_accumulate_grad_hook(lambda t: t.grad.mul_(0.5)))


@change
def module_hook(w: World, r: random.Random) -> None:
    w.handles.append(w.model.first.register_forward_hook(lambda m, i, out: out * 2))


@change
def patch_step(w: World, r: random.Random) -> None:
    before = w.optimizer.step

    def step(closure: Any = None) -> None:
        w.seen.append("step")
        before()

    w.optimizer.step = step  # type: ignore[method-assign]


@change
def patch_step_quietly(w: World, r: random.Random) -> None:
    def step(closure: Any = None) -> None:
        with torch.no_grad():
            for p in w.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.3)

    w.optimizer.step = step  # type: ignore[method-assign]


@change
def patch_zero_grad(w: World, r: random.Random) -> None:
    w.optimizer.zero_grad = lambda set_to_none=True: w.seen.append("zero")  # type: ignore[method-assign]


@change
def patch_class(w: World, r: random.Random) -> None:
    cls, before = type(w.optimizer), type(w.optimizer).__dict__.get("step")
    if before is None:
        return
    called = before

    def step(self: Any, closure: Any = None) -> None:
        called(self)
        with torch.no_grad():
            w.parameters()[0].add_(0.1)

    cls.step = step  # type: ignore[method-assign]
    w.undo.append(lambda: setattr(cls, "step", before))


@change
def class_factor(w: World, r: random.Random) -> None:
    cls = type(w.optimizer)
    for name in ("factor", "decay"):
        if hasattr(cls, name):
            before = getattr(cls, name)
            setattr(cls, name, r.choice([0.5, 0.25]))
            w.undo.append(lambda name=name, before=before: setattr(cls, name, before))


@change
def own_scale(w: World, r: random.Random) -> None:
    if hasattr(w.optimizer, "own_scale"):
        w.optimizer.own_scale = r.choice([0.5, 2, 0.25])


@change
def own_update(w: World, r: random.Random) -> None:
    if hasattr(w.optimizer, "update"):
        w.optimizer.update = r.choice([reads_global, appends, draws])


@change
def patch_clip(w: World, r: random.Random) -> None:
    module, before = nn.utils, nn.utils.clip_grad_norm_
    module.clip_grad_norm_ = lambda ps, max_norm: each(ps, 0.25)
    w.undo.append(lambda: setattr(module, "clip_grad_norm_", before))


@change
def patch_helper(w: World, r: random.Random) -> None:
    before = training.each
    training.each = lambda ps, factor: LOG.append("each")
    w.undo.append(lambda: setattr(training, "each", before))


@change
def global_scale(w: World, r: random.Random) -> None:
    training.SCALE = r.choice([0.5, 2.0, 3.0, 1])


@change
def knob(w: World, r: random.Random) -> None:
    KNOB.scale = r.choice([0.5, 0.05])
    KNOB.table["scale"] = r.choice([0.5, 2.0])
    w.scale = r.choice([0.5, 2.0])
    w.cell[0] = r.choice([0.5, 2.0])


@change
def closure(w: World, r: random.Random) -> None:
    if hasattr(w, "change_closure"):
        w.change_closure(r.choice([0.25, 2.0]))


@change
def default(w: World, r: random.Random) -> None:
    if isinstance(w.clip, types.FunctionType) and w.clip.__defaults__:
        w.clip.__defaults__ = (r.choice([0.25, 2.0]),)
    if isinstance(w.clip, functools.partial):
        w.clip.keywords["max_norm"] = 0.05


@change
def attribute_of_a_parameter(w: World, r: random.Random) -> None:
    _parameter(w, r).scale = 0.5  # type: ignore[attr-defined]


@change
def code_of_clip(w: World, r: random.Random) -> None:
    if isinstance(w.clip, types.FunctionType) and not w.clip.__closure__:
        w.clip.__code__ = (lambda ps: LOG.append("code")).__code__


@change
def scaler_factors(w: World, r: random.Random) -> None:
    if w.scaler is not None:
        w.scaler.set_growth_factor(4.0)
        w.scaler.set_backoff_factor(0.25)
        w.scaler.set_growth_interval(r.choice([1, 3]))


@change
def scaler_scale(w: World, r: random.Random) -> None:
    if w.scaler is not None and w.scaler._scale is not None:
        w.scaler.update(r.choice([16.0, 256.0]))


@change
def scaler_load(w: World, r: random.Random) -> None:
    if w.scaler is not None:
        w.scaler.load_state_dict({**w.scaler.state_dict(), "scale": 32.0})


@change
def scaler_patch(w: World, r: random.Random) -> None:
    if w.scaler is not None:
        before = w.scaler.unscale_
        w.scaler.unscale_ = lambda optimizer: (w.seen.append("unscale"), before(optimizer))


@change
def scaler_off(w: World, r: random.Random) -> None:
    if w.scaler is not None:
        w.scaler._enabled = not w.scaler._enabled


@change
def overflow(w: World, r: random.Random) -> None:
    w.model.factor = math.inf


@change
def factor(w: World, r: random.Random) -> None:
    w.model.factor = r.choice([1.0, 0.5])


@change
def evaluation(w: World, r: random.Random) -> None:
    w.model.train(not w.model.training)


@change
def gradients_outside(w: World, r: random.Random) -> None:
    p = _parameter(w, r)
    p.grad = torch.ones_like(p)


@change
def no_gradients(w: World, r: random.Random) -> None:
    w.optimizer.zero_grad(set_to_none=r.choice([True, False]))


@change
def scheduler(w: World, r: random.Random) -> None:
    if type(w.optimizer.step).__name__ == "function" or "step" not in vars(w.optimizer):
        w.schedulers.append(torch.optim.lr_scheduler.StepLR(w.optimizer, 1, 0.5))


@change
def step_schedulers(w: World, r: random.Random) -> None:
    for scheduler in w.schedulers:
        scheduler.step()


@change
def own_step(w: World, r: random.Random) -> None:
    """A step of the optimizer outside."""
    w.optimizer.step()


@change
def other_class(w: World, r: random.Random) -> None:
    if type(w.optimizer) is torch.optim.SGD:
        w.optimizer.__class__ = Decaying


@change
def draw(w: World, r: random.Random) -> None:
    w.seen.append(random.random())


def _mode(name: str, enter: Callable[[], Any]) -> None:
    def set_mode(w: World, r: random.Random) -> None:
        if w.modes.pop(name, None) is None:
            w.modes[name] = enter

    CHANGES[f"mode {name}"] = set_mode


@contextlib.contextmanager
def _set(getter: Callable[[], Any], setter: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = getter()
    setter(value)
    try:
        yield
    finally:
        setter(before)


_mode("autocast", lambda: torch.autocast("cpu", torch.bfloat16))
_mode("default dtype", lambda: _set(torch.get_default_dtype, torch.set_default_dtype, torch.float64))
_mode("default device", lambda: torch.device("cpu"))
_mode("anomaly", lambda: torch.autograd.set_detect_anomaly(True, check_nan=False))
_mode(
    "deterministic",
    lambda: _set(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
)


@change
def replace_a_module(w: World, r: random.Random) -> None:
    """A layer of new parameters, which the optimizer does not know."""
    w.model.second = torch.nn.Linear(3, 3).double()


@change
def wrap_a_module(w: World, r: random.Random) -> None:
    w.model.second = torch.nn.Sequential(w.model.second, torch.nn.Tanh())


@change
def share_a_module(w: World, r: random.Random) -> None:
    w.model.norm = torch.nn.Sequential(w.model.norm, w.model.norm)


@change
def another_buffer(w: World, r: random.Random) -> None:
    norm = next(m for m in w.model.modules() if isinstance(m, torch.nn.BatchNorm1d))
    norm.register_buffer("running_mean", torch.full_like(norm.running_mean, 0.5))


@change
def no_statistics(w: World, r: random.Random) -> None:
    norm = next(m for m in w.model.modules() if isinstance(m, torch.nn.BatchNorm1d))
    norm.momentum = r.choice([0.1, 0.3, None])


@change
def another_forward(w: World, r: random.Random) -> None:
    forward, k = w.model.forward, r.choice([0.5, 0.9])
    w.model.forward = lambda x: forward(x) * k


@change
def forward_hook(w: World, r: random.Random) -> None:
    k = r.choice([0.5, 0.9])
    w.handles.append(w.model.first.register_forward_hook(lambda module, args, out: out * k))


@change
def counting_forward_hook(w: World, r: random.Random) -> None:
    w.handles.append(w.model.first.register_forward_hook(lambda module, args, out: w.seen.append(1)))


@change
def tie_parameters(w: World, r: random.Random) -> None:
    second = w.model.second
    if isinstance(second, torch.nn.Linear):
        second.bias = w.model.first.bias


@change
def a_gradient_of_another_kind(w: World, r: random.Random) -> None:
    """Fused optimizers of PyTorch on a CPU read a gradient in the order of its memory, whatever its strides are."""
    p = _parameter(w, r)
    turned = p.dim() == 2 and not w.optimizer.defaults.get("fused")
    p.grad = torch.ones(*p.shape[::-1], dtype=p.dtype).t() if turned else torch.zeros_like(p)


@change
def group_of_a_module(w: World, r: random.Random) -> None:
    """A group that is made of a generator, as `add_param_group` takes it."""
    known = {id(p) for p in w.parameters()}
    new = [p for p in w.model.parameters() if id(p) not in known]
    if new:
        w.optimizer.add_param_group({"params": (p for p in new), "lr": 0.03})


@change
def another_scheduler(w: World, r: random.Random) -> None:
    if type(w.optimizer.step).__name__ == "function" or "step" not in vars(w.optimizer):
        w.schedulers[:] = [torch.optim.lr_scheduler.ExponentialLR(w.optimizer, 0.9)]


@change
def load_with_other_options(w: World, r: random.Random) -> None:
    state = copy.deepcopy(w.optimizer.state_dict())
    for group in state["param_groups"]:
        group["lr"] = group["lr"] * 0.5 if isinstance(group["lr"], float) else group["lr"]
    w.optimizer.load_state_dict(state)


@change
def reset_state_hook(w: World, r: random.Random) -> None:
    w.handles.append(w.optimizer.register_load_state_dict_post_hook(lambda o: w.seen.append("loaded")))
