"""Random programs over tensors of wrapper subclasses: pairs, pairs of pairs, scaled tensors with a context. Results,
their classes and memory, gradients and written inputs must be eager's.

>>> problems(write(7), "aot_eager")
[]
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

import dynamotor

BACKENDS = ("aot_eager", "native", "aot_eager", "eager")
Kind = Any  # "plain", "scaled", or ("pair", Kind, Kind)
PAIR, NESTED = ("pair", "plain", "plain"), ("pair", ("pair", "plain", "plain"), "plain")
KINDS: tuple[Kind, ...] = ("plain", PAIR, PAIR, NESTED, "scaled", ("pair", "scaled", "plain"))


class Pair(torch.Tensor):
    """Two tensors of one shape: each op runs on both."""

    @staticmethod
    def __new__(cls, a, b):  # noqa: ANN001, ANN205, D102
        return torch.Tensor._make_wrapper_subclass(
            cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device
        )

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):  # noqa: ANN001, ANN206, D105
        return cls(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN206, D105
        def run(name: str) -> Any:
            def part(value: Any) -> Any:
                return getattr(value, name) if isinstance(value, Pair) else value

            return func(*tree_map(part, args), **tree_map(part, kwargs or {}))

        def pair(a: Any, b: Any) -> Any:
            if isinstance(a, list | tuple):
                return type(a)(map(pair, a, b))
            return cls(a, b) if isinstance(a, torch.Tensor) else a

        first, second = run("a"), run("b")
        return args[0] if func._schema.is_mutable else pair(first, second)


class Scaled(torch.Tensor):
    """A tensor times a number, which is its context: every op reads the product."""

    @staticmethod
    def __new__(cls, data, by):  # noqa: ANN001, ANN205, D102
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    def __init__(self, data: torch.Tensor, by: float) -> None:
        self.held, self.by = data, by

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["held"], self.by

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):  # noqa: ANN001, ANN206, D105
        return cls(inner["held"], context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN206, D105
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].held, args[0].by)
        if func._schema.is_mutable and isinstance(args[0], cls):
            func(args[0].held, *args[1:])
            return args[0]
        return func(*tree_map(lambda v: v.held * v.by if isinstance(v, cls) else v, args), **(kwargs or {}))


@dataclass(frozen=True)
class Program:
    """The kinds of the inputs, which of them want gradients, and the lines of a function of x0, x1, ..."""

    kinds: tuple[Kind, ...]
    graded: tuple[bool, ...]
    lines: tuple[str, ...]

    @property
    def source(self) -> str:
        """The text of the function `call`."""
        names = ", ".join(f"x{n}" for n in range(len(self.kinds)))
        return f"def call({names}):\n" + "".join(f"    {line}\n" for line in self.lines)


def _joined(a: Kind, b: Kind) -> Kind:
    """The kind of an op's result."""
    if a == "scaled":
        a = "plain"
    if b == "scaled":
        b = "plain"
    if a == "plain" == b:
        return a
    first, second = (kind if kind != "plain" else ("pair", "plain", "plain") for kind in (a, b))
    return "pair", _joined(first[1], second[1]), _joined(first[2], second[2])


UNARY = (
    "{0}.sin()",
    "{0} * 1.5",
    "{0}.t()",
    "torch.tanh({0}) + 1",
    "{0}.view(-1).reshape(4, 4)",
    "{0}.clone().mul_(0.5)",
    "torch.cat([{0}[:2], {0}[2:] * 2])",
    "{0}.chunk(2, 1)[0].repeat(1, 2)",
    "torch.zeros_like({0}) + {0}",
    "{0} * {0}.shape[0] if type({0}) is Pair else {0} - 1",
)
BINARY = ("{0} + {1}", "{0} * {1}", "{0} @ {1}", "torch.minimum({0}, {1})", "{0} - {1}.t()")


def write(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed)
    kinds = tuple(draw.choice(KINDS) for _ in range(draw.randint(1, 3)))
    graded = tuple(draw.random() < 0.4 for _ in kinds)
    known = {f"x{n}": kind for n, kind in enumerate(kinds)}
    lines: list[str] = []
    for n in range(draw.randint(1, 7)):
        line, kind = _statement(draw, known)
        name = f"v{n}"
        lines.append(line if kind is None else f"{name} = {line}")
        if kind is not None:
            known[name] = kind
    last = list(known)[-1]
    chosen = dict.fromkeys([last, *draw.sample(list(known), min(len(known), draw.randint(0, 2)))])
    return Program(kinds, graded, (*lines, f"return {', '.join(chosen)},"))


def _statement(draw: random.Random, known: dict[str, Kind]) -> tuple[str, Kind]:
    """A line, and the kind of the value that it makes (None: it writes)."""
    names, way = list(known), draw.random()
    one, other = draw.choice(names), draw.choice(names)
    pairs = [name for name in names if known[name][0] == "pair"]
    if way < 0.3:
        return draw.choice(UNARY).format(one), _joined(known[one], known[one])
    if way < 0.6:
        return draw.choice(BINARY).format(one, other), _joined(known[one], known[other])
    if way < 0.7 and pairs:
        name, part = draw.choice(pairs), draw.choice("ab")
        return f"{name}.{part}", known[name][1 if part == "a" else 2]
    if way < 0.8:
        plain = [name for name in names if known[name] == "plain"]
        if plain:
            a, b = draw.choice(plain), draw.choice(plain)
            return f"Pair({a}.detach() * 2, {b}.detach().contiguous())", PAIR
    if way < 0.86:
        return f"{one}.detach()", known[one]
    if way < 0.93:
        return draw.choice(("{0}.add_(1)", "{0}.mul_({1}.detach())")).format(one, one), None
    if pairs:
        return f"{draw.choice(pairs)}.{draw.choice('ab')}.add_(0.5)", None
    return f"{one} * 0.25", _joined(known[one], known[one])


def made(kind: Kind, generator: torch.Generator) -> Any:
    """An input of a kind."""
    if kind == "plain":
        return torch.rand(4, 4, generator=generator, dtype=torch.float64)
    if kind == "scaled":
        by = 0.5 + float(torch.randint(2, (), generator=generator))
        return Scaled(made("plain", generator), by)
    return Pair(made(kind[1], generator), made(kind[2], generator))


def shown(value: Any) -> Any:
    """The compared properties of a value: classes, numbers, strides, whether it wants a gradient."""
    if isinstance(value, Pair):
        return ["Pair", value.requires_grad, tuple(value.shape), shown(value.a), shown(value.b)]
    if isinstance(value, Scaled):
        return ["Scaled", value.requires_grad, value.by, shown(value.held)]
    if isinstance(value, torch.Tensor):
        return [type(value).__name__, value.requires_grad, value.stride(), value.detach().clone()]
    return value


def leaves(value: Any) -> list[torch.Tensor]:
    """The plain tensors in a value."""
    if isinstance(value, Pair):
        return [*leaves(value.a), *leaves(value.b)]
    return leaves(value.held) if isinstance(value, Scaled) else [value]


def _memory(values: list[Any]) -> list[int]:
    """Which plain tensors share memory: for each the first with the same."""
    found = [leaf.untyped_storage().data_ptr() for value in values for leaf in leaves(value)]
    return [found.index(place) for place in found]


def observed(program: Program, compile: Callable[[Any], Any]) -> list[Any]:
    """What three calls of a program and their backwards give, the last one on inputs of other contexts."""
    space: dict[str, Any] = {"torch": torch, "Pair": Pair}
    exec(program.source, space)
    call, found = compile(space["call"]), list[Any]()
    for seed in (0, 0, 1):
        generator = torch.Generator().manual_seed(seed)
        inputs = [
            made(kind, generator).requires_grad_(graded)
            for kind, graded in zip(program.kinds, program.graded, strict=True)
        ]
        try:
            results = call(*inputs)
            found += [shown(result) for result in results]
            found.append(_memory([*inputs, *results]))
            roots = [result.sum() for result in results if result.requires_grad]
            if roots:  # together: the class of a gradient may depend on which results it comes from
                torch.autograd.backward(roots)
        except Exception as error:  # noqa: BLE001 (the program's)
            if "[DM" in str(error):
                return ["refused"]
            found.append(type(error).__name__)
        found += [[shown(x.detach()), shown(x.grad)] for x in inputs]
    return found


def same(a: Any, b: Any) -> bool:
    """Equal, numbers up to rounding."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-10, equal_nan=True)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def problems(program: Program, backend: str) -> list[str]:
    """What differs from eager."""
    dynamotor.reset()
    want = observed(program, lambda function: function)
    got = observed(program, lambda function: dynamotor.compile(function, backend=backend))
    if got == ["refused"] or same(want, got):
        return []
    differs = next((n for n, (a, b) in enumerate(zip(want, got)) if not same(a, b)), -1)
    return [f"{backend}: observation {differs}: eager {want[differs]}, compiled {got[differs]}"]


def reduce(program: Program, backend: str) -> Program:
    """A program without the lines that do not matter."""
    for n in reversed(range(len(program.lines) - 1)):
        lines = program.lines[:n] + program.lines[n + 1 :]
        name = program.lines[n].partition(" = ")[0]
        if any(name in line.replace(f"{name} = ", "") for line in lines):
            continue
        small = Program(program.kinds, program.graded, lines)
        if problems(small, backend):
            program = small
    return program
