"""Aten to XLA: one decorated jax function an op (`ops_*.py`), shared by the lazy device and the bridge.

>>> @op(aten.hypot)
... def _hypot(x, y):
...     return jnp.sqrt(x * x + y * y)

Tensors arrive as jax arrays, everything else as recorded; `device`, `layout`, `pin_memory` and
`memory_format` never arrive. Results are cast to aten's dtype afterwards, so that a rule only has to compute
with enough precision. docs/xla-op-lowering.md is the guide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from dynamotor.extension_api import Registry

from . import compat
from .dtypes import convert, jax_dtype

aten = torch.ops.aten
Target = Any  # torch._ops.OpOverload | torch._ops.OpOverloadPacket


class Spec(NamedTuple):
    """Shape and torch dtype of one value."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Lifted(NamedTuple):
    """A number that may differ between two runs of a program: its 0-d array, and a number of its
    type."""

    array: jax.Array
    like: int | float


class Unsupported(Exception):
    """Raised by a rule for arguments that it cannot lower: the op then runs on the CPU, and the reason is
    shown.
    """


def require(holds: Any, why: str) -> None:
    """Refuse to lower these arguments, unless it holds."""
    if not holds:
        raise Unsupported(why)


class WrongResult(Unsupported):
    """A rule gives something else than aten: a mistake of the rule, which is shown once."""


class Refusal(Exception):
    """Raised by a rule for calls that the CPU refuses too; its argument is the error that the user gets."""


INFINITE = frozenset((float("inf"), -float("inf")))
# Numbers that models write as literals stay constants of the graph: XLA folds them. All others may change
# from step to step.
LITERALS = INFINITE | {0.0, 1.0, -1.0, 2.0, 0.5}


@dataclass(frozen=True)
class Lowering:
    """One rule. `wants_out`: gets `out=` (Spec or tuple of them); `lifted`: numbers of these types may arrive
    as `Lifted`s, floats but for `literals`; `random`: the first argument is a jax PRNG key; `collective`: the
    graph must be run by all replicas together."""

    fn: Callable[..., Any]
    wants_out: bool = False
    lifted: tuple[type, ...] = ()
    literals: frozenset[float] = LITERALS
    random: bool = False
    collective: bool = False


lowerings: Registry[Target, Lowering] = Registry("XLA lowering")
decompositions: Registry[Target, Callable[..., Any]] = Registry("XLA decomposition")
# Called with the overloads that got a rule: cached facts about them no longer hold.
on_registration: list[Callable[[list[Any]], None]] = []


def _register(registry: Registry, targets: tuple[Target, ...], rule: Any) -> None:
    for target in targets:
        registry.add(target, rule)
        packet = isinstance(target, compat.OpOverloadPacket)
        overloads = [getattr(target, name) for name in target.overloads()] if packet else [target]
        for changed in on_registration:
            changed(overloads)


Numbers = bool | tuple[type, ...]  # True: integers and floats
_LIFTED: dict[Any, Any] = {True: (int, float), False: ()}


def op(
    *targets: Target,
    out: bool = False,
    lift: Numbers = False,
    literals: frozenset[float] = LITERALS,
    collective: bool = False,
) -> Callable[[Callable], Callable]:
    """Register the lowering of overloads, or of all functional overloads of a packet (`aten.add`).

    `out=True`: the rule takes a keyword `out`, the Spec (or tuple of Spec | None) that aten gives.
    `lift=True` (or their types): numbers may arrive as `Lifted`s (which `promotion.cast` knows), so that one
    that changes at every step (a learning rate, a length) does not compile anew. `literals`: floats that stay
    constants of the graph.
    """

    def register(fn: Callable) -> Callable:
        _register(
            lowerings,
            targets,
            Lowering(
                fn,
                wants_out=out,
                lifted=_LIFTED.get(lift, lift),
                literals=literals,
                collective=collective,
            ),
        )
        return fn

    return register


def random_op(*targets: Target, out: bool = False, lift: Numbers = False) -> Callable[[Callable], Callable]:
    """Like `op`, for an op that draws: the rule's first argument is the jax PRNG key of this call."""

    def register(fn: Callable) -> Callable:
        _register(
            lowerings, targets, Lowering(fn, wants_out=out, lifted=_LIFTED.get(lift, lift), random=True)
        )
        return fn

    return register


def rows(register: Callable[..., Callable], table: dict[Any, Callable]) -> None:
    """A table of rules of one line: `register(target)(rule)` for each row; its key is a target or several."""
    for targets, rule in table.items():
        register(*(targets if isinstance(targets, tuple) else (targets,)))(rule)


def decomposition(*targets: Target) -> Callable[[Callable], Callable]:
    """Register a decomposition: a function of torch tensors that calls other torch ops; used before torch's
    own tables.
    """

    def register(fn: Callable) -> Callable:
        _register(decompositions, targets, fn)
        return fn

    return register


_composites = torch.library.Library("aten", "IMPL")  # its kernels live as long as it does


def composite(*targets: Target) -> Callable[[Callable], Callable]:
    """Register the form of a composite op on the device, where it arrives whole: a function of torch
    tensors.
    """

    def register(fn: Callable) -> Callable:
        for target in targets:
            _composites.impl(target, fn, "AutogradXLA")
        return decomposition(*targets)(fn)  # in inference mode no autograd key is asked

    return register


def find(func: compat.OpOverload) -> Lowering | None:
    """The rule of an overload: its own, or its packet's."""
    return lowerings.get(func) or lowerings.get(func.overloadpacket)


_NEVER = ("device", "layout", "pin_memory", "memory_format", "non_blocking")


def apply(
    func: compat.OpOverload,
    rule: Lowering,
    args: tuple,
    kwargs: dict[str, Any],
    out: Any,
    key: Any = None,
) -> Any:
    """Run a rule on jax values and cast the results to aten's dtypes.

    `out`: Spec, or tuple of Spec | None, that aten gives (None: unknown, the rule decides); `key`: PRNG
    key for random ops. Raises Unsupported when the rule refuses, WrongResult when it gives another shape than
    aten.
    """
    kwargs = {name: value for name, value in kwargs.items() if name not in _NEVER}
    if rule.wants_out:
        kwargs["out"] = out
    result = rule.fn(key, *args, **kwargs) if rule.random else rule.fn(*args, **kwargs)
    if out is None:
        return jax.tree.map(jnp.asarray, result)
    if isinstance(out, Spec):
        return _conform(func, result, out)
    if not isinstance(result, (tuple, list)) or len(result) != len(out):
        raise WrongResult(
            f"the lowering of {func} gives {type(result).__name__}, aten gives {len(out)} values"
        )
    return tuple(None if spec is None else _conform(func, value, spec) for value, spec in zip(result, out))


def _conform(func: compat.OpOverload, value: Any, spec: Spec) -> jax.Array:
    value = jnp.asarray(value)
    if value.shape != tuple(spec.shape):
        raise WrongResult(f"the lowering of {func} gives shape {value.shape}, aten gives {tuple(spec.shape)}")
    dtype = jax_dtype(spec.dtype)
    return value if value.dtype == dtype else convert(value, dtype)
