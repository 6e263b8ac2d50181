"""`random.Random(seed)` made in the trace: its numbers follow from the seed, so they are constants of the program.

>>> rng = random.Random(3)
>>> x * rng.random()          # a constant; where `rng` leaves the trace, it is made anew with its state
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

from .breaks import unsupported, unsupported_if
from .values.base import Args, Epoch, Kwargs, ResultEmitter, Trace, Value, builtin_rule
from .values.constant import NONE, Constant
from .values.containers import ListValue, SequenceValue

# Methods that draw positions of a sequence: their draws depend on its length alone.
_PICKS = ("choice", "choices", "sample")
_DRAWS = (
    "random", "uniform", "triangular", "randint", "randrange", "getrandbits", "randbytes", "gauss", "normalvariate",
    "lognormvariate", "expovariate", "vonmisesvariate", "gammavariate", "betavariate", "paretovariate",
    "weibullvariate", "binomialvariate", "seed", "getstate", "setstate",
)  # fmt: skip


class RandomValue(Value):
    """A generator that the trace has made; `state` is one that has drawn the same numbers."""

    __slots__ = ("state", "born")
    kind = random.Random

    def __init__(self, state: random.Random) -> None:
        self.source, self.state, self.born = None, state, Epoch.now

    def hash_key(self, trace: Trace) -> Hashable:
        return self

    def getattr(self, trace: Trace, name: str) -> Value:
        unsupported_if(
            name not in (*_DRAWS, *_PICKS, "shuffle"), "random", f"{name!r} of a random.Random is read"
        )
        return RandomMethod(self, name)

    def setattr(self, trace: Trace, name: str, value: Value) -> None:
        raise unsupported("unsupported-mutation", f"attribute {name!r} of a random.Random is set")

    def reconstruct(self, emitter: ResultEmitter) -> str:
        name = emitter.new_object(self, f"{emitter.constant(random.Random)}()")
        emitter.statement(f"{name}.setstate({emitter.constant(self.state.getstate())})")
        return name


class RandomMethod(Value):
    """A method of such a generator."""

    __slots__ = ("of", "name")
    kind = type(random.Random().random)

    def __init__(self, of: RandomValue, name: str) -> None:
        self.source, self.of, self.name = None, of, name

    def call(self, trace: Trace, args: Args, kwargs: Kwargs) -> Value:
        trace.effects.change(self.of)
        method = getattr(self.of.state, self.name)
        if self.name in _DRAWS:
            return trace.real_call(method, *_constants(args), **_named(kwargs))
        items = args[0] if args else None
        if not isinstance(items, SequenceValue):
            unsupported_if(self.name == "shuffle", "random", "a sequence from outside is shuffled")
            return trace.real_call(method, *_constants(args), **_named(kwargs))
        places = list(range(len(items.items)))
        drawn = trace.real(method, places, *_constants(args[1:]), **_named(kwargs))
        if self.name == "choice":
            return items.items[drawn]
        picked = [items.items[n] for n in (places if self.name == "shuffle" else drawn)]
        if self.name != "shuffle":
            return ListValue(picked)
        unsupported_if(items.python_type() is not list, "random", "a sequence that is no list is shuffled")
        items.setitem(trace, Constant(slice(None)), ListValue(picked))
        return Constant(None)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        return f"{emitter.emit(self.of)}.{self.name}"


def _constants(args: Args) -> list[Any]:
    return [arg.as_constant() for arg in args]


def _named(kwargs: Kwargs) -> dict[str, Any]:
    return {name: value.as_constant() for name, value in kwargs.items()}


@builtin_rule(random.Random)
def _make(trace: Trace, x: Value = NONE) -> Value:
    seed = x.as_constant()
    unsupported_if(
        type(seed) not in (int, float, str, bytes),
        "random",
        "a random.Random without a plain seed is made",
        "its numbers change from call to call",
    )
    return RandomValue(random.Random(seed))
