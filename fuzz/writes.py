"""Programs that write: views of inputs and of values made inside, written and read in any order.

Steps are run in eager while a program is made, so that each fits; one that eager refuses is left out.

>>> print(generated(1, 0, "avx2").source())
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import torch

from .program import Input, Program, Step
from .trial import INTERPRETED

FEW, MANY = 4, 14  # steps of a program
DTYPES = ("float32", "float32", "float32", "float64", "bfloat16", "int64")
MAKES = ("{0} * 1", "{0}.clone()", "torch.zeros_like({0})", "torch.empty_like({0}).copy_({0})", "{0} + 1")
VIEWS = (
    "{0}[{at}]",
    "{0}[{at}:]",
    "{0}[:, {start}:{stop}]",
    "{0}[..., {start}:{stop}]",
    "{0}[::2]",
    "{0}[..., 1::2]",
    "{0}.select({dim}, {at})",
    "{0}.narrow({dim}, {start}, {length})",
    "{0}.transpose({dim}, -1)",
    "{0}.movedim(0, -1)",
    "{0}.flatten()",
    "{0}.view(-1)",
    "{0}.unsqueeze({dim})",
    "{0}[None]",
    "{0}.squeeze()",
    "{0}.unflatten(0, (1, -1))",
    "{0}.diagonal()",
    "{0}.split(2)[0]",
    "{0}.chunk(2, {dim})[-1]",
    "{0}.unbind({dim})[{at}]",
    "{0}.detach()",
    "{0}.as_strided(({length},), (1,), {0}.storage_offset() + {start})",
)
WRITES = (
    "{0}.fill_({n})",
    "{0}.zero_()",
    "{0}.mul_({n})",
    "{0}.add_({n})",
    "{0}.copy_({1})",
    "{0}.add_({1}, alpha={n})",
    "{0}.mul_({1})",
    "{0}.masked_fill_({1} > 0, {n})",
    "{0}.clamp_(-1, {n})",
    "{0}.lerp_({1}, 0.25)",
    "{0}.relu_()",
    "{0}.index_fill_({dim}, torch.tensor([{at}]), {n})",
    "{0}.index_copy_({dim}, torch.tensor([{at}]), {1}.narrow({dim}, {at}, 1))",
    "{0}.index_copy_({dim}, torch.tensor([{at}, {start}]), {1}.narrow({dim}, 0, 2))",
    "{0}.index_add_({dim}, torch.tensor([{at}, {at}, {start}]), {1}.narrow({dim}, 0, 3))",
    "{0}.index_put_((torch.tensor([{at}]),), {1}[{at}])",
    "{0}.index_put_((torch.tensor([{at}, {at}]),), {1}[:1], accumulate=True)",
    "{0}.index_put_(({1} > 0.5,), {1}.sum())",
    "{0}.scatter_({dim}, ({1} > 0).long(), {n})",
    "{0}.scatter_add_({dim}, ({1} > 0).long(), {1})",
    "{0}.scatter_reduce_({dim}, ({1} > 0).long(), {1}, 'amax')",
    "{0}.masked_scatter_({1} > 0, {1})",
    "torch._foreach_add_([{0}, {2}], {n}) or {0}",
    "({0}.__setitem__({at}, {n}), {0})[1]",
    "({0}.__setitem__({at}, {1}[{start}].clone()), {0})[1]",
    "({0}.__setitem__((..., slice({start}, {stop})), {1}[..., {start}:{stop}]), {0})[1]",
    "({0}.__setitem__((..., {at}), {1}[..., {start}].clone()), {0})[1]",
    "torch.add({0}, {1}, out={0})",
)
READS = (
    "{0} * 2",
    "{0}.clone()",
    "{0}.sum()",
    "{0}.sum(-1)",
    "{0} + {1}",
    "{0}.float().softmax(-1)",
    "{0}.contiguous()",
    "{0}.flip(0)",
    "({0}.float() @ {0}.float().transpose(-1, -2))",
    "torch.cat([{0}, {1}])",
    "{0}.max()",
)


class Maker:
    """Makes one program, on values that it has computed so far."""

    def __init__(self, seed: int, small: bool) -> None:
        self.rng = random.Random(seed)
        self.seed, self.small = seed, small
        self.inputs = tuple(self._input() for _ in range(self.rng.randint(1, 3)))
        self.values = Program(self.inputs, (), (), seed).make_inputs()
        self.buffers = list(range(len(self.inputs)))  # values that may be written, and views of them
        self.steps: list[Step] = []

    def _input(self) -> Input:
        sizes = (2, 3, 4, 5, 8) if self.small else (2, 3, 4, 7, 8, 9, 16, 17, 33)
        shape = tuple(self.rng.choice(sizes) for _ in range(self.rng.choice((1, 2, 2, 3, 3, 4))))
        layout = self.rng.choice(("", "", "", "transposed", "strided", "offset"))
        return Input(shape, self.rng.choice(DTYPES), layout=layout)

    def add(self, text: str, *operands: int) -> int | None:
        """Run a step, and keep it where eager runs it; gives the number of its value."""
        names = [f"values[{n}]" for n in operands]
        with contextlib.suppress(Exception):
            value = eval(text.format(*names), {"torch": torch, "values": self.values})
            if isinstance(value, torch.Tensor) and value.numel() < 20_000:
                self.steps.append(Step(text, operands))
                self.values.append(value)
                return len(self.values) - 1
        return None

    def filled(self, text: str, of: torch.Tensor) -> str:
        """The text with numbers in the place of its names; {0} and the like stay."""
        dim = self.rng.randrange(max(of.dim(), 1))
        size = max(of.shape[dim] if of.dim() else 1, 1)
        least = max(min([*of.shape, size]), 1)
        start = self.rng.randrange(least)
        numbers = {
            "dim": dim,
            "at": self.rng.randrange(least),
            "start": start,
            "stop": self.rng.randint(start, least),
            "length": self.rng.randint(1, size),
            "n": self.rng.choice((1, 2, 3, -1)),
        }
        for name, number in numbers.items():
            text = text.replace(f"{{{name}}}", str(number))
        return text

    def step(self) -> None:
        """A view of a buffer, a write through it, or a read."""
        target = self.rng.choice(self.buffers[-6:] + self.buffers[:3])
        value, way = self.values[target], self.rng.random()
        if way < 0.3:
            made = self.add(self.filled(self.rng.choice(VIEWS), value), target)
            if made is not None and self._same_memory(made, target):
                self.buffers.append(made)
        elif way < 0.75:
            text = self.filled(self.rng.choice(WRITES), value)
            self.add(text, target, self._source(target), self.rng.choice(self.buffers))
        elif way < 0.83:
            made = self.add(self.rng.choice(MAKES), target)
            self.buffers += [] if made is None else [made]
        else:
            self.add(self.filled(self.rng.choice(READS), value), target, self._source(target))

    def _same_memory(self, a: int, b: int) -> bool:
        first, second = (self.values[n].untyped_storage().data_ptr() for n in (a, b))
        return bool(first == second)

    def _source(self, target: int) -> int:
        """A value of the target's shape, apart from its memory: eager's order in it would be anyone's guess."""
        want = self.values[target]
        same = [n for n, v in enumerate(self.values) if v.shape == want.shape and v.dtype is want.dtype]
        chosen = self.rng.choice(same)
        if self._same_memory(chosen, target) or self.rng.random() < 0.3:
            halves = want.dtype.is_floating_point and self.rng.random() < 0.5
            made = self.add("{0} * 0.5" if halves else "{0} + 1", chosen)
            chosen = chosen if made is None else made
        return chosen

    def program(self) -> Program:
        for _ in range(self.rng.randint(FEW, MANY)):
            self.step()
        last = len(self.values) - 1
        some = self.rng.sample(range(len(self.values)), min(3, len(self.values)))
        outputs = tuple(dict.fromkeys([last, *some]))
        return Program(self.inputs, tuple(self.steps), outputs, self.seed)


def generated(seed: int, n: int, target: str) -> Program:
    """The n-th program of a seed."""
    program = Maker(seed * 1_000_003 + n, small=target in INTERPRETED).program()
    return replace(program, target=target, name=f"{seed}:{n}")
