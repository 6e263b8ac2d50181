"""A part of a graph whose sizes differ between calls: compiled when it first runs, once for all sizes that
its own guards admit.

The guards of the entry were settled before the part was compiled, and sizes that data decides are known only
now: here each symbol is one of an environment of its own, with the value that arrived. A size of 0 or 1 is a
number, as everywhere, and the part is compiled for it apart.

>>> call = Variants(stage, compiled); call(5, torch.ones(5, 3)); call(7, torch.ones(7, 3))      # one program
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..base.config import config
from ..base.errors import InternalError
from ..base.events import counters, emit, log
from ..graph.modes import preserved_modes
from ..graph.module import copied, graph_module
from ..graph.shapes import UnsupportedOp
from ..graph.size_nodes import is_size
from ..graph.sizes import (
    INFINITY,
    DataDependent,
    Guard,
    ShapeEnv,
    Size,
    Symbol,
    evaluate,
    hint,
    rewritten,
)
from ..graph.spec import Compiled, TensorSpec
from ..graph.tensor_subclass import HeldPart, WrapperSpec, flatten, leaves_of
from .graph_split import Trial
from .program_cache import specs_of

MOST = 8  # programs of a part; other sizes run in eager PyTorch
LARGEST = 1 << 31  # numbers from tensors beyond it run in eager PyTorch: kernels compute in 64 bits


@dataclass(frozen=True)
class _Program:
    """numbers: inputs of which it needs the value; symbols: the others that are sizes, `least` of them;
    specs: of its tensors, by place, of a wrapper those of its parts; takes: the inputs that `call` is given.
    """

    numbers: dict[int, int]
    symbols: dict[int, Symbol]
    least: dict[int, int]
    specs: dict[int, list[TensorSpec]]
    guards: list[Guard]
    takes: tuple[int, ...]
    call: Compiled

    def admits(self, arguments: Sequence[Any]) -> bool:
        """Whether it is right for these inputs."""
        if any(arguments[i] != value for i, value in self.numbers.items()) or any(
            arguments[i] < least for i, least in self.least.items()
        ):
            return False
        of = {symbol: arguments[i] for i, symbol in self.symbols.items()}
        return all(guard.holds(of) for guard in self.guards) and all(
            tuple(tensor.shape) == evaluate(spec.shape, of) and tensor.stride() == evaluate(spec.stride, of)
            for i, specs in self.specs.items()
            for tensor, spec in zip(flatten(arguments[i]), specs, strict=True)
        )


class Variants:
    """The programs of one part (`gm`, whose placeholders' specs hold the whole graph's symbols); `backend`
    compiles one.
    """

    def __init__(self, gm: fx.GraphModule, backend: Callable[..., Compiled]) -> None:
        self.gm, self.backend = gm, backend
        self.inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.static = gm.meta["static_inputs"]
        self.programs: list[_Program] = []
        self.refused = False  # symbols stop the compiler
        self.compiling, self.make = threading.Lock(), config.bound(self._made, "strict")

    def __call__(self, *arguments: Any) -> Any:
        program = self._fitting(arguments) or self.make(arguments)
        if program is None:
            counters["fallback"]["aot.sizes of a part"] += 1
            return self.gm.forward(*arguments)
        return program.call(*[arguments[i] for i in program.takes])

    def _fitting(self, arguments: Sequence[Any]) -> _Program | None:
        return next((p for p in self.programs if p.admits(arguments)), None)

    def _made(self, arguments: Sequence[Any]) -> _Program | None:
        if (
            self.refused
            or len(self.programs) >= MOST
            or any(type(a) is int and abs(a) >= LARGEST for a in arguments)
        ):
            return None
        with self.compiling:
            program = self._fitting(arguments)
            if program is None:
                try:
                    program = self._compiled(arguments)
                except _Refuses:
                    return None
                except InternalError as error:
                    if config.verify or config.strict:
                        raise
                    emit("fallback", what="part", name="", reason=str(error), code=error.code)
                    log("fallbacks", f"a part of a graph runs in eager PyTorch: {error}")
                    self.refused = True
                    return None
                self.programs.append(program)
        return program

    def _compiled(self, arguments: Sequence[Any]) -> _Program:
        """A program for these sizes, and all others that its guards admit."""
        env = ShapeEnv()
        outer = {
            i: only
            for i, node in enumerate(self.inputs)
            if is_size(node)
            for only in node.meta["val"].symbols
        }
        sizes = {symbol: _inner(env, symbol, arguments[i]) for i, symbol in outer.items()}
        specs = {
            i: _arrived(node.meta["val"], arguments[i], sizes, env)
            for i, node in enumerate(self.inputs)
            if i not in outer
        }
        numbers = {i: n for i, s in outer.items() if type(n := sizes[s]) is int}
        symbols = {i: only for i, s in outer.items() if type(n := sizes[s]) is Size for only in n.symbols}
        takes = tuple([i for i in range(len(self.inputs)) if i not in numbers])
        stage = self._graph(numbers, {**specs, **{i: sizes[symbol] for i, symbol in outer.items()}}, env)
        stage.meta["static_inputs"] = frozenset(k for k, i in enumerate(takes) if i in self.static)
        given = [arguments[i] for i in takes]
        if any(_least(outer[i]) < 0 for i in symbols):
            _ask_kernels(stage, given)
        counters["frames"]["parts compiled"] += 1
        call = self.backend(stage, given)
        checked = {i: leaves_of(spec) for i, spec in specs.items() if i not in self.static}
        least = {i: _least(outer[i]) for i in symbols}
        return _Program(numbers, symbols, least, checked, env.guards, takes, call)

    def _graph(self, numbers: dict[int, int], vals: dict[int, Any], env: ShapeEnv) -> fx.GraphModule:
        graph = fx.Graph()
        fixed = {node: numbers[i] for i, node in enumerate(self.inputs) if i in numbers}
        inputs = {i: node for i, node in enumerate(self.inputs) if i not in numbers}
        calls = [node for node in self.gm.graph.nodes if node.op != "placeholder"]
        copies = copied(graph, inputs.values(), calls, fixed)
        for i, node in inputs.items():
            copies[node].meta["val"] = vals[i]
        stage = graph_module(graph, type(self.gm).__name__, self.gm)
        if len(numbers) < sum(map(is_size, self.inputs)):
            stage.meta["shape_env"] = env
        return stage


class _Refuses(Exception):
    """Eager's kernels raise for these numbers."""


def _ask_kernels(stage: fx.GraphModule, arguments: Sequence[Any]) -> None:
    """Ask eager's kernels about numbers that were not known when the whole graph was traced: one may not fit
    the dtype that it fills, or the dtype have no kernel. The answers are guards.
    """
    try:
        with preserved_modes():
            Trial(stage, arguments, specs_of(stage, arguments))
    except (UnsupportedOp, DataDependent):  # no kernel answered
        return
    except Exception as error:
        raise _Refuses from error


def _inner(env: ShapeEnv, symbol: Symbol, value: int) -> Size | int:
    """What stands for a symbol of the whole graph in a part's program."""
    least = _least(symbol)
    return env.symbol(value, least, name=symbol.name) if value >= least else value


def _least(symbol: Symbol) -> int:
    """Numbers below are programs of their own: 0 and 1 of a size; none of an integer, which may be used as
    one.
    """
    return -INFINITY if symbol.lo < 0 else 2


def _arrived(val: Any, tensor: torch.Tensor, sizes: dict[Symbol, Any], env: ShapeEnv) -> Any:
    """The spec of a tensor, in a part's symbols: as it was foretold where it is so, else as it is."""

    def inner(value: Any) -> Any:
        return rewritten(value, sizes.__getitem__, env) if type(value) is Size else value

    if type(val) is WrapperSpec:
        parts = [
            part if type(part) is HeldPart else _arrived(part, getattr(tensor, name), sizes, env)
            for name, part in zip(val.names, val.inner, strict=True)
        ]
        return val.with_sizes(inner, parts)
    found = TensorSpec.of(tensor)
    shape, stride = tuple(map(inner, val.shape)), tuple(map(inner, val.stride))
    if tuple(map(hint, shape)) != found.shape:
        return found
    return replace(
        found, shape=shape, stride=stride if tuple(map(hint, stride)) == found.stride else found.stride
    )
