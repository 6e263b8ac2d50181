"""Tensor programs at many sizes: one compiled callable is called with 20 sets of sizes, 0, 1 and those around
vector widths among them, and compared with eager at each.

>>> problems([fusion.generated(1, 0, "avx2")], "avx2")
"""

from __future__ import annotations

import contextlib
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

import dynamotor
from dynamotor import config
from dynamotor.base.errors import BuildError
from dynamotor.base.events import counters

from .batch import Batch, Waiting
from .bounds import spread
from .compare import Outcome, differences, observe
from .generate import MOST_ELEMENTS
from .program import Input, Program
from .reduce import resized_input
from .trial import GRAPHS, compiling

CALLS, KEPT_CALLS = 20, 6
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 130)
LEAST_IN_TEXT = 7  # a smaller number in a line may be anything


def with_sizes_read(program: Program) -> Program:
    """The program with the sizes of its inputs in the place of the numbers in its lines that are such
    sizes.
    """
    read = {
        n: f"x{i}.shape[{d}]"
        for i, one in reversed(list(enumerate(program.inputs)))
        for d, n in enumerate(one.shape)
    }

    def text(line: str) -> str:
        return re.sub(r"(?<![\w.])\d+(?![\w.])", lambda m: read.get(_large(m[0]), m[0]), line)

    return replace(program, steps=tuple(replace(step, text=text(step.text)) for step in program.steps))


def _large(digits: str) -> int:
    n = int(digits)
    return n if n >= LEAST_IN_TEXT else -1


def variants(program: Program) -> list[Program]:
    """The program with its own sizes, then with others; sizes that are equal stay so, mostly."""
    pick = random.Random(program.seed)
    sizes = sorted({n for one in program.inputs for n in one.shape if n > 1})
    found = [program]
    for _ in range(20 * CALLS if sizes else 0):  # some programs take few other sizes
        if len(found) == CALLS:
            break
        changed = pick.sample(sizes, pick.randint(1, len(sizes)))
        to = {n: pick.choice(SIZES) for n in changed}
        inputs = tuple(resized_input(one, to) for one in program.inputs)
        if all(map(_can_be_made, inputs)):
            found.append(replace(program, inputs=inputs))
    return found


def _can_be_made(one: Input) -> bool:
    """Whether the input is not large, and there is something to choose from for its positions and its
    expanded dimension.
    """
    expanded = one.layout == "expanded" and one.shape[:1] == (0,)
    few = one.fill.startswith("perm:") and int(one.fill[5:]) < max(one.shape[-1:], default=0)
    small = torch.Size(one.shape).numel() <= 2 * MOST_ELEMENTS
    return small and one.fill != "index:0" and not few and not expanded


@dataclass
class Family:
    """A program, its calls, and its faults."""

    program: Program
    dynamic: bool | None
    calls: list[Program] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    entries: int = 0

    def __post_init__(self) -> None:
        self.function = self.program.function()
        self.compiled = dynamotor.compile(self.function, dynamic=self.dynamic)
        self.calls = variants(self.program)

    def eager(self, call: Program) -> Outcome:
        return observe(self.function, call.make_inputs(), call.cotangents, call.seed)

    def waits(self, n: int) -> bool:
        """Make a call and judge it; whether it needs kernels to be built first."""
        call = self.calls[n]
        try:
            got = observe(self.compiled, call.make_inputs(), call.cotangents, call.seed)
        except Waiting:
            return True
        want = self.eager(call)
        if want.error is not None and self._may_be_unread(call):
            return False
        found = differences(want, got, lambda *runs: spread(lambda: self.eager(call), *runs))
        self.problems += [f"{p} (call {n}: {[list(one.shape) for one in call.inputs]})" for p in found]
        self.entries = len(self.compiled.entries)
        return False

    def _may_be_unread(self, call: Program) -> bool:
        """Whether a step before the last raises in eager: one whose result is unread is left out when compiled."""
        last = len(call.inputs) + sum(step.results for step in call.steps[:-1]) - 1
        before = replace(call, steps=call.steps[:-1], outputs=(last,), cotangents=())
        return observe(before.function(), call.make_inputs(), (), call.seed).error is not None


@contextlib.contextmanager
def _on_disk() -> Iterator[None]:
    """Programs are kept on disk and found there, as they are for users; each library is built by itself."""
    with (
        tempfile.TemporaryDirectory() as folder,
        config.patch(disk_cache=True, program_cache=True, verify=False, check=False, cache_dir=folder),
    ):
        yield


def judged(programs: Sequence[Program], target: str, kept: bool = False) -> tuple[list[Family], Counter[str]]:
    """The programs, each called with its sizes in turn, and the outcomes of the calls. kept: programs
    compiled for some sizes are loaded from disk for others, and once more by a second callable.
    """
    seen: Counter[str] = Counter()
    try:
        settings = config.patch(symbolic_sizes=True, cache_size_limit=64)
        with compiling(target), settings, _on_disk() if kept else Batch() as batch:
            families = [Family(with_sizes_read(p), (None, True)[p.seed % 2]) for p in programs]
            if kept:
                families += [Family(family.program, family.dynamic) for family in families]
            for n in range(KEPT_CALLS if kept else CALLS):
                waiting = [f for f in families if n < len(f.calls) and not f.problems]
                seen["calls"] += len(waiting)
                for _ in range(GRAPHS):
                    waiting = [f for f in waiting if f.waits(n)]
                    if not waiting:
                        break
                    _build(batch, waiting)
        seen["entries"] += sum(f.entries for f in families)
        seen["general entries"] += sum(e.general for f in families for e in f.compiled.entries)
        seen["kept numbers"] += counters["capture"]["sizes kept numbers"]
        seen["failed"] += counters["frames"]["failed"]
        return families, seen
    finally:
        dynamotor.reset()


def _build(batch: Batch, waiting: list[Family]) -> None:
    try:
        batch.build()
    except BuildError as error:
        for one in waiting:
            one.problems.append(str(error).splitlines()[0])


def problems(programs: Sequence[Program], target: str, kept: bool = False) -> list[list[str]]:
    """The faults of each program."""
    families = judged(programs, target, kept)[0]
    return [first.problems or last.problems for first, last in zip(families, families[-len(programs) :])]


def test_of(program: Program, found: list[str]) -> str:
    """A finding as text: the function, and the inputs of its calls."""
    family = with_sizes_read(program)
    lines = [*(f"# {p[:160]}" for p in found[:3]), family.source()]
    for n, call in enumerate(variants(family)):
        lines.append(
            f"# call {n}: torch.manual_seed({call.seed}); [{', '.join(i.text() for i in call.inputs)}]"
        )
    return (
        "\n".join(lines) + f"\n# dynamic={(None, True)[program.seed % 2]}, cotangents {program.cotangents}\n"
    )
