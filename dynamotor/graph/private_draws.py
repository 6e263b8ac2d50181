"""Random numbers without the program's generators: a region whose ops draw from copies of these.

Threads of the program share the default generators. A trial run that advances one and sets it back gives a
thread that draws meanwhile the same numbers twice; here nothing is set back.

>>> with PrivateDraws():
...     expected = torch.rand(3)
>>> torch.equal(torch.rand(3), expected)
True
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..base.compat import OpOverload
from . import prims  # noqa: F401  defines dynamotor.new_seed
from .modes import TrialMode
from .op_facts import facts
from .sizes import leaves_in
from .spec import CPU, aten, device_with_index

_DROPOUT = ("dropout_p", "dropout", "p")  # attention and recurrent layers draw where one is not zero


class NotPrivate(Exception):
    """An op draws, and has no form that takes a generator."""


class PrivateDraws(TrialMode):
    """Ops of this thread draw from copies of the default generators.

    states: where the copies start, by device; any other starts, and is noted
    here, where the default generator is at the first draw.
    """

    supports_higher_order_operators = True

    def __init__(self, states: Mapping[torch.device, torch.Tensor] | None = None) -> None:
        super().__init__()
        self.states = dict(states or {})
        self.generators: dict[torch.device, torch.Generator] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @property
    def has_drawn(self) -> bool:
        return bool(self.generators)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = _device(args, kwargs)
        if not isinstance(func, OpOverload) or not facts(func).random or device.type not in ("cpu", "cuda"):
            return func(*args, **kwargs)
        given = {a.name: value for a, value in zip(func._schema.arguments, args)} | kwargs
        form = _with_generator(func)
        if given.get("generator") is not None or form is None and not any(map(given.get, _DROPOUT)):
            return func(*args, **kwargs)
        if form is None:
            raise NotPrivate(f"{func} takes no generator")
        return form(**given | {"generator": self._generator(device)})

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            if device not in self.states:
                self.states[device] = default_generator(device).get_state()
            self.generators[device] = torch.Generator(device)
            self.generators[device].set_state(self.states[device])
        return self.generators[device]


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that ops on a device draw from unless they are given another."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index or 0]


def _device(args: Any, kwargs: dict[str, Any]) -> torch.device:
    """The device of an op's result."""
    tensors = (leaf.device for leaf in leaves_in((args, kwargs)) if isinstance(leaf, torch.Tensor))
    named = kwargs.get("device")
    return device_with_index(named) if named is not None else next(tensors, CPU)


@functools.cache
def _with_generator(func: OpOverload) -> Callable[..., Any] | None:
    """The form of an op that takes a generator and otherwise the same arguments."""
    if func in _FORMS:
        return _FORMS[func]
    arguments = {(a.name, str(a.type)) for a in func._schema.arguments}
    overloads = (getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())
    for form in (func, *overloads):
        if arguments | {("generator", "Optional[Generator]")} == {
            (a.name, str(a.type)) for a in form._schema.arguments
        }:
            return form
    return None


def _dropout(input: torch.Tensor, p: float, train: bool | None, generator: torch.Generator) -> Any:
    """aten.native_dropout."""
    if train is False or p == 0:
        return input, torch.ones_like(input, dtype=torch.bool)
    kept = torch.empty(input.shape, dtype=torch.bool, device=input.device)
    kept.bernoulli_(1 - p, generator=generator)
    return input * kept * (0.0 if p == 1 else 1 / (1 - p)), kept


def _new_seed(generator: torch.Generator, device: torch.device | None = None) -> torch.Tensor:
    """dynamotor.new_seed."""
    return torch.empty(1, dtype=torch.int64, device=device or CPU).random_(generator=generator)


_FORMS: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _dropout,
    torch.ops.dynamotor.new_seed.default: _new_seed,
}
