"""New contents of inputs are stored where they belong: no copy behind a kernel that could have written the
input itself.

A value that others read as well (a momentum, of which the update is made) has a buffer of its own and is
copied into the input at the end. Where the kernel that makes it is the last to read the input, and reads each
element no later than it stores it, it stores into the input.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .ir import ROWS, Expr, Kernel, Phase, Store, loads_of, roots
from .program import Buffer, LoopStep, Step, touches
from .schedule import in_place_pairs


def write_back(
    steps: list[Step], buffers: dict[str, Buffer], inputs: Collection[str], kept: Collection[str]
) -> list[Step]:
    """The steps without copies that their makers can do. inputs: those that are overwritten; kept: buffers
    that must be made.
    """
    places: dict[str, list[int]] = {}
    for at, step in enumerate(steps):
        for name in touches(step):
            places.setdefault(name, []).append(at)
    sizes = {name: (b.spec.numel, b.spec.dtype) for name, b in buffers.items()}
    result: list[Step | None] = list(steps)
    for at, step in enumerate(steps):
        pair = _copied(step) if isinstance(step, LoopStep) else None
        if pair is None:
            continue
        source, target = pair
        maker, *others = places[source]
        if (
            target not in inputs
            or source in kept
            or buffers[source].kind != "temp"
            or others != [at]
            or any(maker < n != at for n in places[target])
        ):
            continue
        making = result[maker]
        if isinstance(making, LoopStep) and source in making.writes:
            made = _storing(making.kernel, source, target)
            if made is not None:
                pairs = in_place_pairs(made, sizes)
                result[maker], result[at] = LoopStep.of(made, pairs, making.note), None
    return [step for step in result if step is not None]


def _stores(kernel: Kernel) -> list[Store]:
    """The stores of a kernel that is one pass and stores each element as it comes to it; none of any
    other.
    """
    if (
        kernel.template != ROWS
        or len(kernel.phases) != 1
        or kernel.final
        or kernel.final_once
        or kernel.phases[0].row
    ):
        return []
    found = [s for s in kernel.phases[0].inner if isinstance(s, Store) and not (s.scatters or s.part)]
    return found if len(found) == len(kernel.phases[0].inner) else []


def _copied(step: LoopStep) -> tuple[str, str] | None:
    """(source, target) of a kernel that copies a buffer element by element and does nothing else."""
    stores = _stores(step.kernel)
    if len(step.args) != 2 or len(stores) != 1:
        return None
    store, e = stores[0], stores[0].expr
    if e.op != "load" or e.args[1] != store.index or len({p[1] for p in step.kernel.params}) > 1:
        return None
    return e.args[0], store.buffer


def _storing(kernel: Kernel, source: str, target: str) -> Kernel | None:
    """The kernel with its stores to `source` made into `target`, behind all that reads that; None where it
    reads it elsewhere.
    """
    stores = _stores(kernel)
    if not stores:
        return None
    moved = next(s for s in stores if s.buffer == source)
    if any(s.buffer == target for s in stores) or any(e.args[0] == source for s in stores for e in _loads(s)):
        return None
    if any(e.args[0] == target and e.args[1] != moved.index for s in stores for e in _loads(s)):
        return None
    types = {p[0]: p[1] for p in kernel.params}
    if types.get(target, types[source]) != types[source]:
        return None
    inner = (*(s for s in stores if s is not moved), replace(moved, buffer=target))
    places = [n for n, s in enumerate(inner) if s.buffer == target]
    if any(
        e.args[0] == s.buffer for n, s in enumerate(inner) for later in inner[n + 1 :] for e in _loads(later)
    ):
        return None  # an earlier store would be read as the old value
    assert len(places) == 1
    return replace(kernel, phases=(Phase(inner),)).with_params()


def _loads(store: Store) -> list[Expr]:
    return [e for root in roots(store) for e in loads_of(root)]
