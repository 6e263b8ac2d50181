"""Kernels whose sizes differ between calls, on a GPU: variants of one kernel, each right for some sizes.

A variant is made when a call first needs it. The kernel is planned and written with symbols whose hints are
that call's sizes, in a `ShapeEnv` of its own; what plan and text asked that is not so for all sizes is what a
call's sizes must meet to take the variant ("the row fits a tile of 64": 32 < s <= 64). A size that 16 divides
is written as 16 times another symbol, so that loads are wide where rows start at whole vectors.

>>> family = Family(step.kernel, names)      # names: of the symbols, in the order of a call's sizes
>>> variant, chosen = family.at((4, 100))    # made now, or known
>>> chosen.grid, chosen.numbers              # of each launch
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..base.events import counters
from ..graph.sizes import FUNCTIONS, Dim, ShapeEnv, Size, Symbol, evaluate, settled
from ..graph.spec import TensorSpec
from ..lower.index_expr import Div, Index, Mod
from ..lower.instance import Instance
from ..lower.ir import Kernel, forget_expressions, lowering_lock
from .scopes import title
from .triton import draft_of
from .triton_kernel import LaunchPiece, TritonFunction
from .triton_ops import ALIGNED
from .triton_plan import accesses, plan_kernel
from .triton_sizes import with_arguments
from .verify_emitted import verify_triton

ROOM = 256  # bytes: starts and sizes of buffers between launches are multiples
MOST = (1 << 31) - 1  # of a number of 32 bits


class Chosen(NamedTuple):
    """A variant at the sizes of a call. parts: (byte offset, elements) of its own buffers, which take
    `nbytes` in all. grids, numbers: of each launch; numbers are the sizes that its function takes.
    """

    nbytes: int
    parts: tuple[tuple[int, int], ...]
    grids: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One function of a variant. tensors: its pointers, as positions among the step's arguments and, behind
    these, the variant's own buffers. streams: its random streams, as positions among the step's.
    """

    function: TritonFunction
    tensors: tuple[int, ...]
    streams: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """The launches of a kernel. choose(*sizes): None where the variant is not for these sizes. parts: types
    of its own buffers, which live from launch to launch. source: of `choose`.
    """

    launches: tuple[Launch, ...]
    parts: tuple[torch.dtype, ...]
    choose: Callable[..., Chosen | None]
    source: str


class Family:
    """The variants of one kernel, or of several of equal structure."""

    def __init__(self, kernel: Kernel, names: Sequence[str]) -> None:
        self.kernel, self.names = kernel, tuple(names)
        self.title = f"dynamotor::{title(kernel)}"
        self.variants: list[Variant] = []

    def at(self, sizes: tuple[int, ...]) -> tuple[Variant, Chosen]:
        """The variant for these sizes. Decline where the kernel has no form for them."""
        for variant in self.variants:
            chosen = variant.choose(*sizes)
            if chosen is not None:
                return variant, chosen
        with lowering_lock:
            forget_expressions()
            variant = _variant(self.kernel, dict(zip(self.names, sizes, strict=True)))
        counters["kernels"]["variants for sizes"] += 1
        chosen = variant.choose(*sizes)
        assert chosen is not None, variant.source
        self.variants.insert(0, variant)
        return variant, chosen


def _variant(kernel: Kernel, values: Mapping[str, int]) -> Variant:
    """The kernel planned and written at these sizes."""
    own, of, tests = _environment(kernel, values)
    parts: list[TensorSpec] = []

    def new_buffer(spec: TensorSpec) -> str:
        parts.append(spec)
        return f"part {len(parts) - 1}"

    pieces = plan_kernel(Instance(of).kernel(kernel), new_buffer)
    drafts = [draft_of(piece) for piece in pieces]
    for kind in ("i32", "i64"):
        made = [with_arguments(draft, kind) for draft in drafts]
        source = _choice(values, tests, own, kind, parts, [d.grid for d in drafts], [n for _, n in made])
        scope: dict[str, Callable[..., Chosen | None]] = {}
        exec(source, {"Chosen": Chosen, **FUNCTIONS}, scope)
        if scope["choose"](*values.values()) is not None:
            break
    launches = []
    for piece, (function, _) in zip(pieces, made, strict=True):
        verify_triton([n for n, p in enumerate(piece.kernel.params) if p[2]], function.source)
        launches.append(_launch(kernel, piece, function, len(parts)))
    return Variant(tuple(launches), tuple(p.dtype for p in parts), scope["choose"], source)


def _launch(kernel: Kernel, piece: LaunchPiece, function: TritonFunction, n_parts: int) -> Launch:
    names = [p[0] for p in kernel.params] + [f"part {n}" for n in range(n_parts)]
    streams = kernel.streams()
    return Launch(
        function,
        tuple(names.index(p[0]) for p in piece.kernel.params),
        tuple(map(streams.index, piece.kernel.streams())),
    )


def _environment(kernel: Kernel, values: Mapping[str, int]) -> tuple[ShapeEnv, dict[Symbol, Dim], list[str]]:
    """Symbols of the variant's own with these values as hints, what stands for the kernel's, and lines that
    tell from a call's sizes whether that is so.
    """
    own, of, tests = ShapeEnv(), dict[Symbol, Dim](), list[str]()
    env = kernel.symbols[0].env if kernel.symbols else own
    aligned = _along(kernel)
    for symbol in env.symbols:
        name = symbol.name
        if symbol in env.fixed or name not in values:
            continue
        value, lo, hi = values[name], symbol.lo, symbol.hi
        if symbol not in aligned:
            of[symbol] = own.symbol(value, lo, hi, name)
        elif value and value % ALIGNED == 0:
            tests += [f"if {name} % {ALIGNED} or not {name}: return None", f"{name}_ = {name} // {ALIGNED}"]
            least = max(-(-lo // ALIGNED), 1)
            of[symbol] = own.symbol(value // ALIGNED, least, hi // ALIGNED, f"{name}_") * ALIGNED
        else:
            tests.append(f"if {name} % {ALIGNED} == 0 and {name}: return None")
            of[symbol] = own.symbol(value, lo, hi, name)
    for symbol in kernel.symbols:
        if symbol not in of:
            of[symbol] = evaluate(settled(Size({(symbol,): 1}, env)), of)
    return own, of, tests


def _along(kernel: Kernel) -> frozenset[Symbol]:
    """Symbols that tell where rows start and end in memory."""
    loops = (kernel.outer, kernel.middle, kernel.inner)
    sizes: list[Dim] = [some[-1].size for some in loops if some]
    for index in accesses(kernel):
        sizes += _steps(index)
    found = (settled(size) for size in sizes if type(size) is Size)
    return frozenset().union(*(size.symbols for size in found if type(size) is Size))


def _steps(index: Index) -> Iterable[Dim]:
    yield index.const
    for atom, step in index.terms.items():
        yield step
        if isinstance(atom, Div | Mod):
            yield atom.n
            yield from _steps(atom.base)


def _choice(
    names: Iterable[str],
    tests: Sequence[str],
    own: ShapeEnv,
    kind: str,
    parts: Sequence[TensorSpec],
    grids: Sequence[Dim],
    numbers: Sequence[Sequence[str]],
) -> str:
    """The text of `choose`."""
    lines = [*tests, *(f"if not {g.expr!r} {g.kind} 0: return None" for g in own.guards)]
    rows = [f"({''.join(f'{number}, ' for number in row)})" for row in numbers]
    lines.append(f"numbers = ({''.join(f'{row}, ' for row in rows)})")
    if any(numbers):
        least, most = (f"{f}(map({f}, filter(None, numbers)))" for f in ("min", "max"))
        fit = f"-{MOST} <= {least} and {most} <= {MOST}"
        lines.append(f"if {'not ' if kind == 'i32' else ''}({fit}): return None")
    lines.append("end = 0")
    for n, part in enumerate(parts):
        lines += [
            f"n{n}, at{n} = {part.numel!r}, end",
            f"end += -(-n{n} * {part.dtype.itemsize} // {ROOM}) * {ROOM}",
        ]
    places = "".join(f"(at{n}, n{n}), " for n in range(len(parts)))
    lines.append(f"return Chosen(end, ({places}), ({''.join(f'{g!r}, ' for g in grids)}), numbers)")
    return "\n    ".join([f"def choose({', '.join(names)}):", *lines]) + "\n"
