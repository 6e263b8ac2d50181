"""Random tensor programs. Each line runs when it is chosen: a program is valid, and its sizes are known.

>>> Generator(seed=3).program().source()
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from .ops import ALL, FUSED, MULTIPLIED
from .program import FLOATS, LAYOUTS, NARROW, Input, Program, Step

SIZES = [1, 2, 7, 8, 9, 16, 17, 64]
RARE_SIZES = [0, 3, 4, 33, 128, 300]
DTYPES = (
    ["float32"] * 10
    + ["float64"] * 3
    + ["bfloat16"] * 3
    + ["float16"] * 2
    + ["int64"] * 2
    + ["int32", "uint8", "bool", "int8", "int16"]
)
MOST_ELEMENTS = 1 << 15
LARGEST = {torch.float16: 100.0, torch.bfloat16: 1e4}


class Generator:
    """Builds one program. values: results of the lines on the program's own inputs."""

    def __init__(self, seed: int, small: bool = False, products: bool = False) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.small = small  # for interpreters: few elements
        self.sizes = self.rng.sample(SIZES, 3)
        if self.rng.random() < 0.25:
            self.sizes[0] = self.rng.choice(RARE_SIZES)
        self.dtypes = [self.rng.choice(DTYPES)] * 4 + [self.rng.choice(DTYPES)]
        self.products = products
        if products:  # templates compute those of halves
            self.dtypes = [self.rng.choice(["bfloat16", "float16"])]
        self.trains = self.rng.random() < 0.5
        self.fused = self.rng.random() < 0.4  # few ops over the same loops, most of their results returned
        self.special = self.rng.random() < 0.12  # equal values, zeros, infinities
        self.spoilt = False  # a line that was not kept may have written to a value
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.values: dict[int, torch.Tensor] = {}  # by a number of the generator's own
        self.made: list[Any] = []  # ("input", n) or ("step", n, result), by number
        self.scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}

    # -- choices ------------------------------------------------------------------------------

    def size(self) -> int:
        size = self.rng.choice(self.sizes)
        return min(size, 17) if self.small else size

    def shape(self, most: int = 4) -> tuple[int, ...]:
        """A shape over the program's few sizes."""
        rank = min(most, self.rng.choice([0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4]))
        shape = [self.size() for _ in range(rank)]
        while torch.Size(shape).numel() > (512 if self.small else MOST_ELEMENTS):
            shape[shape.index(max(shape))] = self.rng.choice([1, 2])
        return tuple(shape)

    def new_input(self, shape: tuple[int, ...], dtype: str = "", fill: str = "") -> int:
        """The number of a new input; an empty dtype or fill is chosen."""
        dtype = dtype or self.rng.choice(self.dtypes)
        if not fill:
            fill = (
                self.rng.choice(["zeros", "equal", "ties", "infinite", "nan"])
                if self.special
                else self.rng.choice(["random"] * 8 + ["positive", "ties", "halves", "multiples"])
            )
            if dtype in NARROW and self.rng.random() < 0.3:
                fill = "ends"
        layout = self.rng.choice(LAYOUTS) if self.rng.random() < 0.25 else ""
        grad = self.trains and dtype in FLOATS and self.rng.random() < 0.7
        one = Input(tuple(shape), dtype, fill, layout, grad)
        value = eval(one.text(), self.scope)
        return self.add(value, ("input", len(self.inputs)), self.inputs, one)

    def add(self, value: torch.Tensor, origin: tuple[Any, ...], where: list[Any], what: Any) -> int:
        where.append(what)
        return self._number(value, origin)

    def _number(self, value: torch.Tensor, origin: tuple[Any, ...]) -> int:
        number = len(self.made)
        self.values[number] = value
        self.made.append(origin)
        return number

    def pick(self) -> int:
        """An earlier value, rather a late one."""
        numbers = list(self.values)
        if not numbers or self.rng.random() < 0.05:
            return self.new_input(self.shape())
        if self.rng.random() < (0.2 if self.fused else 0.5):
            return self.rng.choice(numbers[-3:])
        return self.rng.choice(numbers)

    def partner(self, x: int) -> int:
        """A value that broadcasts with x: an earlier one or a new input."""
        shape = self.values[x].shape
        fits = [n for n, v in self.values.items() if n != x and _broadcasts(v.shape, shape)]
        if fits and self.rng.random() < 0.6:
            return self.rng.choice(fits[-5:])
        return self._along(x)

    def _space(self) -> tuple[int, ...]:
        """Two or three dimensions, rarely of one element."""
        shape = tuple(self.size() for _ in range(self.rng.choice([2, 2, 3])))
        return shape if torch.Size(shape).numel() <= MOST_ELEMENTS else shape[:2]

    def _along(self, x: int) -> int:
        """A new input that broadcasts with x: some of its dimensions, some of those of one element."""
        shape = self.values[x].shape
        other = list(shape)
        if self.rng.random() < 0.5:
            other = other[self.rng.randrange(len(other) + 1) :]
        other = [1 if self.rng.random() < 0.15 else n for n in other]
        dtype = self.dtype_name(x) if self.rng.random() < 0.8 else ""
        return self.new_input(tuple(other), dtype)

    def dtype_name(self, x: int) -> str:
        return str(self.values[x].dtype).removeprefix("torch.")

    # -- the program --------------------------------------------------------------------------

    def program(self) -> Program:
        """The program that this seed gives."""
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(self.seed % 2**63)
            first = self.new_input(self._space() if self.fused else self.shape())
            for _ in range(self.rng.choice([1, 2]) if self.fused else 0):
                self._along(first)
            count = self.rng.choice([1, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 10])
            lines = MULTIPLIED if self.products else FUSED if self.fused else ALL
            weights, kinds = zip(*lines, strict=True)
            for _ in range(4 * count):
                if len(self.steps) >= count or self.spoilt:
                    break
                self._try(self.rng.choices(kinds, weights)[0])
        return self._finish()

    def _try(self, kind: Any) -> None:
        """Add a line of this kind, if PyTorch takes it."""
        before = len(self.inputs), len(self.made), set(self.values), self.rng.getstate()
        text, results = "", 1
        try:
            text, operands, *rest = kind(self)
            results = rest[0] if rest else 1
            values = self._run(text, operands, results)
            usable = all(self._usable(v, operands) for v in (*values, *(self.values[n] for n in operands)))
        except (
            RuntimeError,
            TypeError,
            ValueError,
            IndexError,
            ZeroDivisionError,
            NotImplementedError,
            AttributeError,
        ):
            usable = False
        if not usable:
            self.spoilt = bool(text) and writes(Step(text, operands, results))
            del self.inputs[before[0] :], self.made[before[1] :]
            self.values = {n: v for n, v in self.values.items() if n in before[2]}
            return
        self.steps.append(Step(text, operands, results))
        for n, value in enumerate(values):
            self._number(value, ("step", len(self.steps) - 1, n))

    def _run(self, text: str, operands: tuple[int, ...], results: int) -> tuple[Any, ...]:
        """The line's results. A line that writes runs on clones first: it may raise half-way."""
        names = [f"v{n}" for n in operands]
        scope = {**self.scope, **{f"v{n}": self.values[n] for n in operands}}
        line = text.format(*names)
        if results == 0:
            copies = {f"v{n}": self.values[n].detach().clone() for n in operands}
            exec(line, {**self.scope, **copies})
            exec(line, scope)
            if scope[names[0]] is not self.values[operands[0]]:
                raise ValueError("the name was bound to another tensor")
            return ()
        value = eval(line, scope)
        return tuple(value) if results > 1 else (value,)

    def _usable(self, value: Any, operands: tuple[int, ...]) -> bool:
        """Whether a result is small and tame enough to be compared."""
        if (
            not isinstance(value, torch.Tensor)
            or value.layout is not torch.strided
            or value.numel() > MOST_ELEMENTS
        ):
            return False
        if self.small and value.numel() > 1024:
            return False
        if not value.is_floating_point():
            rounded = (
                any(self.values[n].is_floating_point() for n in operands) and value.dtype is not torch.bool
            )
            return not value.is_complex() and not (rounded and self._wild(value, operands))
        largest = value.detach().abs().nan_to_num(0, 0, 0).max().item() if value.numel() else 0
        finite = self.special or bool(torch.isfinite(value).all())
        return finite and largest < LARGEST.get(value.dtype, 1e6)

    def _wild(self, value: torch.Tensor, operands: tuple[int, ...]) -> bool:
        """Whether an integer may come from a float that no integer of its type holds (undefined in C++)."""
        floats = [self.values[n].detach() for n in operands if self.values[n].is_floating_point()]
        low = 0 if value.dtype is torch.uint8 else -100
        return any(bool((~((v > low - 1) & (v < 100))).any()) for v in floats)

    def _finish(self) -> Program:
        """The values that are returned, and the numbering of `Program`."""
        lines = [n for n, origin in enumerate(self.made) if origin[0] == "step" and n in self.values]
        count = self.rng.choice([2, 3, 4, 6] if self.fused else [1, 1, 2, 2, 3, 4])
        kept = set(self.rng.sample(lines, min(len(lines), count)))
        if lines and self.rng.random() < 0.8:
            kept.add(lines[-1])
        if not kept or self.rng.random() < 0.03:
            kept.add(self.rng.choice(list(self.values)))
        number, steps = self._renumber()
        outputs = [number[n] for n in sorted(kept)]
        self.rng.shuffle(outputs)
        cotangents = [n for n in range(len(outputs)) if self.rng.random() < 0.85]
        return prune(Program(tuple(self.inputs), tuple(steps), tuple(outputs), self.seed, tuple(cotangents)))

    def _renumber(self) -> tuple[dict[int, int], list[Step]]:
        """Inputs first, then the results of the steps in order."""
        number = {n: o[1] for n, o in enumerate(self.made) if o[0] == "input"}
        starts, at = [], len(self.inputs)
        for step in self.steps:
            starts.append(at)
            at += step.results
        number |= {n: starts[o[1]] + o[2] for n, o in enumerate(self.made) if o[0] == "step"}
        return number, [replace(s, operands=tuple(number[n] for n in s.operands)) for s in self.steps]


def _broadcasts(a: torch.Size, b: torch.Size) -> bool:
    """Whether the two shapes broadcast to one of them."""
    return all(x == y or x == 1 or y == 1 for x, y in zip(reversed(a), reversed(b), strict=False))


def writes(step: Step) -> bool:
    """Whether a line changes what its first operand holds (or may)."""
    return step.results == 0 or "_(" in step.text


def prune(program: Program) -> Program:
    """The program without lines and inputs that no output depends on (what writes in place is kept)."""
    inputs = len(program.inputs)
    starts, at = [], inputs
    for step in program.steps:
        starts.append(at)
        at += step.results
    needed = set(program.outputs)
    keep = [False] * len(program.steps)
    for n in reversed(range(len(program.steps))):
        step = program.steps[n]
        if writes(step) or needed & set(range(starts[n], starts[n] + step.results)):
            keep[n] = True
            needed |= set(step.operands)
    return drop(
        program, [n for n, k in enumerate(keep) if not k], [n for n in range(inputs) if n not in needed]
    )


def drop(program: Program, steps: list[int], inputs: list[int]) -> Program:
    """The program without these steps and inputs, which are unread."""
    number: dict[int, int] = {}
    kept_inputs = [n for n in range(len(program.inputs)) if n not in inputs]
    number.update({old: new for new, old in enumerate(kept_inputs)})
    at, new = len(program.inputs), len(kept_inputs)
    kept_steps = []
    for n, step in enumerate(program.steps):
        if n not in steps:
            number.update({at + k: new + k for k in range(step.results)})
            new += step.results
            kept_steps.append(replace(step, operands=tuple(number[o] for o in step.operands)))
        at += step.results
    return replace(
        program,
        inputs=tuple(program.inputs[n] for n in kept_inputs),
        steps=tuple(kept_steps),
        outputs=tuple(number[n] for n in program.outputs),
    )
