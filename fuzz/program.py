"""A tensor program as data: inputs and steps, each a line of Python; so it can be run, cut down and printed.

>>> program = Program((Input((2, 9)),), (Step("{0}.sum(-1)", (0,)),), outputs=(1,))
>>> print(program.source())
def f(x0):
    v1 = x0.sum(-1)
    return (v1,)
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

FLOATS = ("float32", "float64", "bfloat16", "float16")
_names = itertools.count()

# Contents of an input: an expression of its shape and dtype.
_FLOAT_FILLS = {
    "random": "torch.randn({shape}).to({dtype})",
    "positive": "(torch.rand({shape}) + 0.5).to({dtype})",
    "equal": "torch.full({shape}, 0.5, dtype={dtype})",
    "zeros": "torch.zeros({shape}, dtype={dtype})",
    "ties": "torch.randint(-3, 4, {shape}).to({dtype})",
    "halves": "(torch.randint(-9, 10, {shape}) * 0.5).to({dtype})",
    "multiples": "(torch.randint(-9, 10, {shape}) * 0.3).to({dtype})",
    "infinite": "torch.randn({shape}).masked_fill(torch.rand({shape}) < 0.2, float('inf')).to({dtype})",
    "nan": "torch.randn({shape}).masked_fill(torch.rand({shape}) < 0.2, float('nan')).to({dtype})",
}
_INT_FILLS = {
    "random": "torch.randint({low}, 10, {shape}, dtype={dtype})",
    "positive": "torch.randint(1, 10, {shape}, dtype={dtype})",
    "equal": "torch.full({shape}, 3, dtype={dtype})",
    "zeros": "torch.zeros({shape}, dtype={dtype})",
    "ties": "torch.randint(0, 2, {shape}, dtype={dtype})",
}
# Of integers of 8 and 16 bits: around both ends, where sums wrap.
_NARROW_FILLS = _INT_FILLS | {
    "ends": "(torch.randint(-2, 3, {shape}) + torch.iinfo({dtype}).max).to({dtype})"
}
NARROW = ("int8", "uint8", "int16")
LAYOUTS = ("", "transposed", "strided", "offset", "expanded", "channels_last")


@dataclass(frozen=True)
class Input:
    """A tensor that a program is given.

    fill: a row above, "index:N" (positions below N) or "perm:N" (none twice along the last dimension).
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    fill: str = "random"
    layout: str = ""
    grad: bool = False

    def text(self) -> str:
        """The expression that makes it."""
        return self._laid_out() + (".requires_grad_()" if self.grad else "")

    def _laid_out(self) -> str:
        shape = self.shape
        if self.layout == "transposed" and len(shape) > 1:
            return f"{self._filled(shape[::-1])}.permute({tuple(range(len(shape)))[::-1]})"
        if self.layout == "strided" and shape:
            return f"{self._filled((*shape[:-1], 2 * shape[-1]))}[..., ::2]"
        if self.layout == "offset" and shape:
            return f"{self._filled((shape[0] + 1, *shape[1:]))}[1:]"
        if self.layout == "expanded" and shape:
            return f"{self._filled((1, *shape[1:]))}.expand({shape})"
        if self.layout == "channels_last" and len(shape) == 4:
            return f"{self._filled(shape)}.contiguous(memory_format=torch.channels_last)"
        return self._filled(shape)

    def _filled(self, shape: tuple[int, ...]) -> str:
        dtype = f"torch.{self.dtype}"
        if self.fill.startswith("index:"):
            return f"torch.randint(0, {self.fill[6:]}, {shape}, dtype={dtype})"
        if self.fill.startswith("perm:") and shape:
            return f"torch.rand({(*shape[:-1], int(self.fill[5:]))}).argsort(-1)[..., :{shape[-1]}]"
        if self.dtype == "bool":
            return f"(torch.rand({shape}) < 0.5)"
        if self.dtype in FLOATS:
            return _FLOAT_FILLS[self.fill].format(shape=shape, dtype=dtype)
        fills = _NARROW_FILLS if self.dtype in NARROW else _INT_FILLS
        return fills.get(self.fill, fills["random"]).format(
            shape=shape, dtype=dtype, low=0 if self.dtype == "uint8" else -9
        )


@dataclass(frozen=True)
class Step:
    """One line: `text` with {n} for its n-th operand. `results` > 1 takes a tuple apart."""

    text: str
    operands: tuple[int, ...]
    results: int = 1


@dataclass(frozen=True)
class Program:
    """Values are numbered: the inputs, then the results of the steps. outputs: those that are returned.

    cotangents: numbers of the outputs that get a gradient when some input asks for one.
    """

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    seed: int = 0
    cotangents: tuple[int, ...] = ()
    target: str = ""  # how it is compiled, e.g. "avx2"; see fusion.TARGETS
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", self.seed % 2**63)  # as large as a generator takes

    def value_name(self, n: int) -> str:
        return f"x{n}" if n < len(self.inputs) else f"v{n}"

    def lines(self) -> list[str]:
        """The body of the function."""
        lines, at = [], len(self.inputs)
        for step in self.steps:
            names = ", ".join(self.value_name(at + n) for n in range(step.results))
            text = step.text.format(*map(self.value_name, step.operands))
            lines.append(f"{names} = {text}" if names else text)
            at += step.results
        results = ", ".join(map(self.value_name, self.outputs))
        return [*lines, f"return ({results}{',' if len(self.outputs) == 1 else ''})"]

    def source(self) -> str:
        """The function as text."""
        names = ", ".join(f"x{n}" for n in range(len(self.inputs)))
        return "\n    ".join([f"def f({names}):", *self.lines()]) + "\n"

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The function."""
        return define(self.source(), "f")

    def make_inputs(self) -> list[torch.Tensor]:
        """New tensors, always the same numbers. Leaves PyTorch's generator where it was."""
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(self.seed)
            return [eval(one.text(), {"torch": torch}) for one in self.inputs]

    def trains(self) -> bool:
        return any(one.grad for one in self.inputs)

    def without_gradients(self) -> Program:
        return replace(self, inputs=tuple(replace(one, grad=False) for one in self.inputs), cotangents=())


def define(
    source: str, name: str, names: dict[str, Any] | None = None, scope: dict[str, Any] | None = None
) -> Any:
    """A name that the source defines, run in `scope` or one of its own; tracebacks know the source."""
    filename = f"<fuzz {next(_names)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    scope = {"torch": torch, "F": torch.nn.functional} if scope is None else scope
    scope.update(names or {})
    exec(compile(source, filename, "exec", dont_inherit=True), scope)
    return scope[name]
