"""Equal maps over small buffers, and equal sums of rows, as one launch: updates of parameters, casts of
weights, counters; products of one row or of few with several weights.

Maps whose drafts have the same text but for marked numbers become one function: each program finds its item
by a tree of comparisons, which gives it the item's pointers and numbers, and runs the text once. Steps move
for that: a map waits until its results are needed or its operands overwritten; the others of its kind
that can run by then run with it.

>>> program = batched(expand(lowered))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..base.cache import digest
from ..base.events import counters
from ..graph.spec import numel
from ..lower.ir import Kernel, Store, of_kind
from ..lower.program import Program, Step
from .call_program import step_accesses
from .triton import TritonStep, draft_piece
from .triton_body import Axis
from .triton_kernel import LaunchPiece, LaunchPlan, TritonFunction
from .triton_ops import mark
from .triton_plan import is_map, is_wide, map_plan, row_plan
from .triton_sizes import NUMBERS, constant_of, settle

SMALL = 1 << 20  # elements up to which a launch costs a map as much as its memory does
SMALL_SUMS = 1 << 24  # of sums of rows: from here on they fill the GPU (26 is as fast for 8 layers of an 8B)
MOST_PROGRAMS = 1 << 11  # of a product of few rows
TINY = 132  # programs of a map that may share a launch with others than its like
FEWEST = 4  # maps of a kind for which it pays to build another function
START = "    pid = tl.program_id(0)\n"  # the first line of a map's function
BLOCK = 1024  # elements that a program takes
MOST_POINTERS = 480  # parameters of a launch are 4 kB
MOST_BYTES = 64 << 20  # of intermediates that wait for a batch, or that a batch makes early


@dataclass(frozen=True, slots=True)
class _Item:
    """A map that may be part of a batch: its step, its draft, and what tells kinds apart."""

    step: TritonStep
    draft: TritonFunction
    kind: tuple[object, ...]
    numbers: tuple[str, ...]
    nbytes: int


_Writer = Callable[[Sequence[_Item], Mapping[str, str]], TritonFunction]  # of items, and pointers by buffer


def batched(program: Program) -> Program:
    """The program with maps that are equal but for sizes run together, and with tiny maps of all kinds."""
    found = [_item(step, program) for step in program.steps]
    counts = Counter(item.kind for item in found if item is not None)
    items = [item if item is not None and counts[item.kind] >= FEWEST else None for item in found]
    program = _together(program, items, _function)
    return _together(program, [_tiny(step, program) for step in program.steps], _side_by_side)


def _together(program: Program, items: Sequence[_Item | None], function: _Writer) -> Program:
    """The program with items of a kind in one launch where they can be."""
    if not any(items):
        return program
    steps: list[Step] = []
    for group in _in_order(program, items):
        batch = [item for n in group if (item := items[n]) is not None]
        steps += [_one_launch(batch, function)] if len(batch) > 1 else [program.steps[n] for n in group]
    return replace(program, steps=steps)


def _item(step: Step, program: Program) -> _Item | None:
    """A step as part of a batch; None where it stays on its own."""
    if not isinstance(step, TritonStep) or step.function is None or step.partial:
        return None
    function, kernel = step.function, step.kernel
    if function.checks or function.scratch or function.fallback and not step.in_parts:
        return None
    if step.in_parts is not None:
        if int(function.grid) > MOST_PROGRAMS:
            return None
        draft = step.in_parts
    elif kernel is None or (plan := _plan(kernel)) is None:
        return None
    else:
        draft = draft_piece(LaunchPiece(kernel, plan, {}))
    parts = NUMBERS.split(draft.source)
    kind = (*parts[::2], draft.signature, step.ints)
    return _Item(step, draft, kind, tuple(parts[1::2]), _nbytes(step, program))


def _tiny(step: Step, program: Program) -> _Item | None:
    """A map that takes little more than its launch; None for another step. All are of one kind."""
    if not isinstance(step, TritonStep) or step.function is None or step.kernel is None or step.partial:
        return None
    function = step.function
    if not is_map(step.kernel) or function.grid > TINY or step.ints or START not in function.source:
        return None
    return _Item(step, function, (), (), _nbytes(step, program))


def _nbytes(step: TritonStep, program: Program) -> int:
    """Bytes of the intermediates that a step reads or writes."""
    buffers = (program.buffers[name] for name in step.args)
    return sum(b.spec.extent * b.spec.dtype.itemsize for b in buffers if b.kind == "temp")


def _plan(kernel: Kernel) -> LaunchPlan | None:
    """How a kernel runs as part of a batch; None where it does not."""
    loops = (*kernel.outer, *kernel.middle, *kernel.inner)
    stores = [of_kind(s, Store) for s in kernel.statements() if isinstance(s, Store)]
    if kernel.streams() or is_wide(kernel) or any(s.scatters or s.part for s in stores):
        return None
    if is_map(kernel):
        few = numel(v.size for v in loops) <= SMALL and map_plan(kernel).second is None
        return LaunchPlan("map", Axis.of("x", loops, BLOCK, exact=False)) if few else None
    return row_plan(kernel) if numel(v.size for v in loops) <= SMALL_SUMS else None


# -- order ---------------------------------------------------------------------------------------------------
def _needs(program: Program) -> list[set[int]]:
    """For each step those before it that it may not overtake: producers of its operands, and steps that touch
    its results.
    """
    needs: list[set[int]] = []
    writer: dict[str, int] = {}
    readers: dict[str, set[int]] = {}
    for n, (reads, writes) in enumerate(step_accesses(program.steps)):
        found = {writer[name] for name in reads | writes if name in writer}
        found = found.union(*(readers.get(name, ()) for name in writes))
        for name in reads:
            readers.setdefault(name, set()).add(n)
        for name in writes:
            writer[name], readers[name] = n, set()
        needs.append(found - {n})
    return needs


class _Room:
    """The rest of a launch's parameters, and of the memory that may wait for it."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.nbytes = 0

    def takes(self, item: _Item) -> bool:
        """Whether the item fits, and is counted."""
        names, nbytes = self.names | set(item.step.args), self.nbytes + item.nbytes
        if self.names and (len(names) > MOST_POINTERS or nbytes > MOST_BYTES):
            return False
        self.names, self.nbytes = names, nbytes
        return True


def _in_order(program: Program, items: Sequence[_Item | None]) -> Iterator[list[int]]:
    """The steps in an order that keeps their needs, batches together."""
    needs = _needs(program)
    done: set[int] = set()
    waiting: dict[tuple[object, ...], list[int]] = {}
    rooms: dict[tuple[object, ...], _Room] = {}
    alike: dict[tuple[object, ...], list[int]] = {}
    for n, item in enumerate(items):
        if item is not None:
            alike.setdefault(item.kind, []).append(n)

    def launch(kind: tuple[object, ...]) -> list[int]:
        group, room = waiting.pop(kind), rooms.pop(kind)
        for n in alike[kind]:
            item = items[n]
            if (
                item is not None
                and n not in done
                and n not in group
                and needs[n] <= done
                and room.takes(item)
            ):
                group.append(n)
        done.update(group)
        alike[kind] = [n for n in alike[kind] if n not in done]
        return group

    for n, item in enumerate(items):
        if n in done:
            continue
        for other in sorted(needs[n] - done):
            before = items[other]
            if before is not None and other not in done:
                yield launch(before.kind)
        if item is None:
            done.add(n)
            yield [n]
            continue
        if item.kind in waiting and not rooms[item.kind].takes(item):
            yield launch(item.kind)
        if item.kind not in waiting:
            waiting[item.kind], rooms[item.kind] = [], _Room()
            rooms[item.kind].takes(item)
        waiting[item.kind].append(n)
    for kind in list(waiting):
        yield launch(kind)


# -- one launch ----------------------------------------------------------------------------------------------
def _one_launch(items: Sequence[_Item], function: _Writer) -> TritonStep:
    """The step that runs these maps."""
    steps = [item.step for item in items]
    pointers = {name: f"a{n}" for n, name in enumerate(dict.fromkeys(a for step in steps for a in step.args))}
    counters["kernels"]["in batches"] += len(items)
    used = Counter(name for step in steps for name in dict.fromkeys(step.args))
    return replace(
        steps[0],
        kernel=None,
        args=tuple(pointers),
        reads=tuple(dict.fromkeys(name for step in steps for name in step.reads)),
        writes=tuple(dict.fromkeys(name for step in steps for name in step.writes)),
        inplace=tuple(pair for step in steps for pair in step.inplace if used[pair[1]] == 1),
        note=f"{len(items)} times: {steps[0].note}",
        function=function(items, pointers),
    )


def _side_by_side(items: Sequence[_Item], pointers: Mapping[str, str]) -> TritonFunction:
    """The function of one launch for different maps: each program calls one of them."""
    functions = {item.draft.name: item.draft for item in items}
    kinds = {n: k for item in items for n, k in zip(item.step.args, item.draft.signature, strict=True)}
    lines: list[str] = []
    end = 0
    for item in items:
        end += int(item.draft.grid)
        given = [f"at - {end - int(item.draft.grid)}", *(pointers[name] for name in item.step.args)]
        lines += [f"{'elif' if lines else 'if'} at < {end}:", f"    {item.draft.name}({', '.join(given)})"]
    body = "".join(f"    {line}\n" for line in ["at = tl.program_id(0)", *lines])
    called = "".join(
        f.source.replace(f"def {name}(", f"def {name}(pid, ").replace(START, "")
        for name, f in functions.items()
    )
    name = f"dm_maps_{digest(called, body)[:12]}"
    text = f"{called}@triton.jit\ndef {name}({', '.join(pointers.values())}):\n{body}"
    signature = tuple(kinds[name] for name in pointers)
    warps, checks = max(f.warps for f in functions.values()), any(f.checks for f in functions.values())
    return TritonFunction(name, text, signature, end, warps, checks)


def _function(items: Sequence[_Item], pointers: Mapping[str, str]) -> TritonFunction:
    """The function of one launch, and of that for other pointers."""
    steps, draft = [item.step for item in items], items[0].draft
    kinds = {name: kind for step in steps for name, kind in zip(step.args, draft.signature, strict=False)}
    numbers = draft.signature[len(steps[0].args) :]
    chosen = {
        f"p{k}": [pointers[name] for name in names]
        for k, names in enumerate(zip(*(step.args for step in steps), strict=True))
    }
    columns, texts = _columns(items)
    chosen |= columns
    grids = [int(item.draft.grid) for item in items]
    starts = [sum(grids[:n]) for n in range(len(grids) + 1)]
    lines = ["at = tl.program_id(0)"]
    lines += [f"{name} = {values[0]}" for name, values in chosen.items() if len(set(values)) == 1]
    several = {name: values for name, values in chosen.items() if len(set(values)) > 1}
    lines += _tree(starts, several, 0, len(items))
    parts = NUMBERS.split(draft.source)
    parts[1::2] = texts
    body = "".join(parts).split("\n", 3)[3]  # behind the decorator, the head, and the number of the program
    arguments = ", ".join([*pointers.values(), *(f"s{n}" for n in range(len(numbers)))])
    text = (
        f"@triton.jit\ndef {draft.name}({arguments}):\n" + "".join(f"    {line}\n" for line in lines) + body
    )
    signature = (*(kinds[name] for name in pointers), *numbers)
    others = [replace(item, draft=other) for item in items if (other := item.draft.fallback) is not None]
    fallback = _function(others, pointers) if others else None
    return settle(replace(draft, source=text, signature=signature, grid=starts[-1], fallback=fallback))


def _columns(items: Sequence[_Item]) -> tuple[dict[str, list[str]], list[str]]:
    """Numbers that differ between the items, by name; and what stands at each number of the text."""
    names: dict[tuple[str, ...], str] = {}
    texts = []
    for column in zip(*(item.numbers for item in items), strict=True):
        same = len(set(column)) == 1
        texts.append(mark(column[0]) if same else names.setdefault(column, f"m{len(names)}"))
    return {name: [constant_of(n) for n in column] for column, name in names.items()}, texts


def _tree(starts: Sequence[int], several: dict[str, list[str]], low: int, high: int) -> list[str]:
    """Lines that give each program the pointers and numbers of its item, one of those from `low` to `high`:

    if at < ⟦3⟧: pid, p0, m0 = at - ⟦0⟧, a0, ⟦2304⟧
    else:        pid, p0, m0 = at - ⟦3⟧, a1, ⟦768⟧
    """
    if high - low == 1:
        return [f"pid = at - {mark(starts[low])}", *(f"{name} = {v[low]}" for name, v in several.items())]
    middle = (low + high) // 2
    return [
        f"if at < {mark(starts[middle])}:",
        *("    " + line for line in _tree(starts, several, low, middle)),
        "else:",
        *("    " + line for line in _tree(starts, several, middle, high)),
    ]
