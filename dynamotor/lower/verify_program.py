"""Checks of what lowering and scheduling made; each raises InternalError DM913 with the statement that is
wrong.

>>> verify_kernel(kernel, specs)  # stores each element once, reads complete elements inside of buffers
>>> verify_program(program)                  # steps read what earlier ones wrote
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from ..base.errors import InternalError
from ..graph.sizes import Dim, hint
from ..graph.spec import TensorSpec, numel
from .index_bounds import Facts, ends
from .index_expr import ZERO, Atom, Bounds, Div, Index, Loaded, Var
from .ir import (
    ROWS,
    STORED,
    Expr,
    ExternNode,
    Kernel,
    LoopNode,
    Reduce,
    ScanStatement,
    Statement,
    Store,
    memory_of,
    roots,
    walk,
)
from .program import BufRef, LoopStep, Program, refs


def wrong(what: str, why: object) -> NoReturn:
    """Raise InternalError DM913."""
    cure = "this is a bug in dynamotor: please report it"
    raise InternalError("DM913", f"the lowered program is wrong: {what}", why=str(why), cure=cure)


# -- positions -----------------------------------------------------------------------------------------------
def bounds(index: Index, facts: Facts = ()) -> Bounds:
    """Smallest and largest value of an index under the known bounds."""
    if not facts and index.is_affine:
        return index.bounds
    terms, low, high = dict(index.terms), index.const, index.const
    for form, (a, b) in facts:
        atom, step = next(iter(form.terms.items()))
        ratio = terms.get(atom, 0) // step
        if ratio and all(terms.get(t) == ratio * c for t, c in form.terms.items()):
            low, high = low + min(ratio * a, ratio * b), high + max(ratio * a, ratio * b)
            for t in form.terms:
                del terms[t]
    for atom, c in terms.items():
        a, b = _atom_bounds(atom, facts)
        low, high = low + min(c * a, c * b), high + max(c * a, c * b)
    return low, high


def _atom_bounds(atom: Atom, facts: Facts) -> Bounds:
    if isinstance(atom, Var):
        return atom.bounds
    if isinstance(atom, Loaded):
        limit = atom.expr.args[1]
        size = limit.args[0] + 1 if atom.expr.op == "min" and limit.op == "const" else limit
        if atom.expr.op not in ("min", "wrap_index") or size > atom.size:
            wrong(f"nothing checks the position {atom.expr}", f"there are {atom.size}")
        return 0, atom.size - 1
    low, high = bounds(atom.base, facts)
    if low < 0:
        low, high = ends(atom.base, facts) or (low, high)
    if low < 0:  # `Index` lifts it: kernels round towards zero
        wrong(f"what {atom} divides may be {low}", facts)
    if isinstance(atom, Div):
        return low // atom.n, high // atom.n
    return (low % atom.n, high % atom.n) if low // atom.n == high // atom.n else (0, atom.n - 1)


NEVER: Facts = ((ZERO, (0, -1)),)  # what no place meets


def _never(facts: Facts) -> bool:
    """Whether facts contradict each other: what stands under them is not evaluated."""
    return any(low > high for _, (low, high) in facts)


def learn(condition: Expr, holds: bool, facts: Facts) -> Facts:
    """The facts, and those that a condition on loop variables adds where it holds (or does not)."""
    if _never(facts):
        return facts
    if condition.op == ("and" if holds else "or"):
        return learn(condition.args[1], holds, learn(condition.args[0], holds, facts))
    if condition.op == "not":
        return learn(condition.args[0], not holds, facts)
    if condition.op not in ("lt", "ge") or condition.args[1].op != "const":
        return facts
    place, limit = condition.args[0], condition.args[1].args[0]
    if place.op != "index":  # two sizes may have been compared: `n - 1 < n - 1`
        fails = place.op == "const" and ((place.args[0] < limit) == (condition.op == "lt")) is not holds
        return NEVER if fails else facts
    index = place.args[0]
    form, below = Index(index.terms), (condition.op == "lt") == holds
    low, high = bounds(form, facts)
    found = (low, min(high, limit - 1 - index.const)) if below else (max(low, limit - index.const), high)
    known = dict(facts)
    if len(form.terms) > 1:
        known[form] = found
    known.update(_terms_between(form, found, facts))
    return tuple(sorted(known.items(), key=lambda fact: -len(fact[0].terms)))


def _terms_between(form: Index, found: Bounds, facts: Facts) -> Iterator[tuple[Index, Bounds]]:
    """The bounds of each term that follow from those of the sum: `8*i + j >= 64` with j < 8 says that i is at
    least 8, and `-i >= -1` that it is at most 1.
    """
    for atom, c in form.terms.items():
        a, b = bounds(Index({t: n for t, n in form.terms.items() if t != atom}), facts)
        ends = (found[0] - b, found[1] - a) if hint(c) > 0 else (found[1] - a, found[0] - b)
        first, last = bounds(Index.of(atom), facts)
        yield Index.of(atom), (max(first, -(-ends[0] // c)), min(last, ends[1] // c))


def _accesses(roots: Iterable[Expr], seen: set[Any]) -> list[tuple[Expr, Facts]]:
    """The loads and the results of other statements under expressions, with the facts that hold where each is
    evaluated.
    """
    found: list[tuple[Expr, Facts]] = []

    def visit(e: Expr, facts: Facts) -> None:
        key = (e, facts) if facts else e
        if key in seen or _never(facts):
            return
        seen.add(key)
        if e.op in READS:
            found.append((e, facts))
        if e.op == "masked":
            condition, body, other = e.args
            visit(condition, facts)
            visit(body, learn(condition, True, facts))
            visit(other, learn(condition, False, facts))
        else:
            for child in e.children:
                visit(child, facts)

    for root in roots:
        visit(root, ())
    return found


def _inside(e: Expr, facts: Facts, specs: Mapping[str, TensorSpec]) -> None:
    """A load reads an element of its buffer, as a dtype of its width."""
    name, index, memory = e.args
    if name not in specs or memory.itemsize != specs[name].dtype.itemsize:
        wrong(f"{e} reads {memory}", f"{name} is {specs.get(name)}")
    low, high = bounds(index, facts)
    if low < 0 or high >= specs[name].extent:
        low, high = ends(index, facts) or (low, high)
    if low < 0 or high >= specs[name].extent:
        wrong(f"{e} reads positions {low} to {high}", f"{name} has {specs[name].extent}; known: {facts}")


def _same_places(steps: list[tuple[Dim, Dim]], wanted: list[tuple[Dim, Dim]]) -> bool:
    """Whether loops of these steps and sizes reach the same places as a buffer's, each once; slices of slices
    may interleave.
    """
    joined = _joined(steps)
    return joined == _joined(wanted) and all(
        step > sum((n - 1) * s for s, n in joined.items() if s < step) for step in joined
    )


def _joined(steps: list[tuple[Dim, Dim]]) -> dict[Dim, Dim]:
    """Sizes by steps: a loop that goes on where another ends is one with it. Where steps repeat, some place
    is reached twice: step 0 says so.
    """
    found = dict(sorted(steps, reverse=True))
    if len(found) < len(steps):
        return {0: 2}
    for step, size in list(found.items()):
        if step and step * size in found:
            found[step] = size * found.pop(step * size)
    return found


def _place(s: Store | LoopNode, index: Index, loops: Collection[Var], spec: TensorSpec) -> None:
    """A store over these loops reaches each element of the buffer once; a scatter stays inside of it."""
    name = s.buffer
    if s.memory is not memory_of(spec.dtype):
        wrong(f"{name} is stored as {s.memory}", f"it is {spec}")
    low, high = bounds(index)
    if low < 0 or high >= spec.extent:
        wrong(f"{name}[{index}] is stored at positions {low} to {high}", f"{name} has {spec.extent}")
    if s.scatter if isinstance(s, LoopNode) else s.scatters:
        return
    big = {v for v in loops if v.size > 1}
    steps = [(index.terms.get(v, 0), v.size) for v in big] if set(index.terms) <= big else []
    if s.part:
        if set(index.terms) - big or not _same_places(steps, steps):
            wrong(f"{name}[{index}] over {', '.join(map(str, loops))} reaches some element twice", spec)
    elif index.const or not _same_places(
        steps, [(step, n) for step, n in zip(spec.stride, spec.shape, strict=True) if n > 1]
    ):
        wrong(
            f"{name}[{index}] over {', '.join(f'{v}<{v.size}' for v in loops)} "
            f"is not each element of {name} once",
            spec,
        )


# -- kernels -------------------------------------------------------------------------------------------------
def levels(kernel: Kernel) -> Iterator[tuple[tuple[Var, ...], tuple[Statement, ...]]]:
    """The statements in the order in which they are complete, with the loops that each runs in."""
    for phase in kernel.phases:
        yield (*kernel.outer, *kernel.middle, *kernel.inner), phase.inner
        yield kernel.outer if kernel.template == ROWS else (*kernel.outer, *kernel.inner), phase.row
    yield kernel.inner if kernel.template == ROWS else (*kernel.outer, *kernel.inner), kernel.final
    yield (), kernel.final_once


READS = ("load", "acc", "scratch", "scan")


def result_of(s: Statement) -> tuple[str, Any]:
    """The name under which a statement's result is read."""
    if isinstance(s, Store):
        return "load", s.buffer
    return "acc" if isinstance(s, Reduce) else "scan" if isinstance(s, ScanStatement) else "scratch", s.id


def verify_kernel(
    kernel: Kernel, specs: Mapping[str, TensorSpec], partial: Collection[str] = ()
) -> dict[str, set[Index]]:
    """Each written buffer is stored once, over loops that reach each of its elements once; loads stay inside
    of buffers; accumulators, kept values and running results are read where they are complete.

    partial: buffers that take parts of accumulators. Gives the buffers of which it reads the contents before
    it runs, and where.
    """
    stored: dict[str, Store] = {}
    before: dict[str, set[Index]] = {}  # loads that come before a store
    known: set[tuple[str, int]] = set()  # results of statements that may be read
    across: set[tuple[str, int]] = set()  # those that are complete after all rows
    seen: set[Any] = set()
    for n, (loops, statements) in enumerate(levels(kernel)):
        known |= across if n >= 2 * len(kernel.phases) else set()
        gathered: set[tuple[str, int]] = set()
        for s in statements:
            if any(v.size > 1 for root in roots(s) for v in root.vars.difference(loops)):
                wrong(f"{s} depends on more than its loops {loops}", kernel)
            for e, facts in _accesses(roots(s), seen):
                if e.op == "load":
                    _inside(e, facts, specs)
                    own = stored.get(e.args[0])
                    if own is None:
                        before.setdefault(e.args[0], set()).add(e.args[1])
                    elif own.index != e.args[1] or own.scatters:
                        wrong(f"{e} is overwritten, or is not complete", kernel)
                elif (e.op, e.args[0]) not in known:
                    wrong(f"{s} reads {e} before it is complete", kernel)
                elif e.op == "scratch" and bounds(e.args[1])[1] >= numel(v.size for v in kernel.inner):
                    wrong(f"{e} is outside of the kept part of a row", kernel)
            if isinstance(s, Store):
                if s.buffer in stored or s.buffer not in specs or s.expr.dtype is not STORED[s.memory]:
                    wrong(f"{s} is stored twice, or as a dtype that it has not", kernel)
                others = before.get(s.buffer, set()) - (set() if s.scatters else {s.index})
                if any(not s.part or s.index.meets(place) for place in others):
                    wrong(f"{s.buffer} is read elsewhere than where it is overwritten", kernel)
                stored[s.buffer] = s
                _place(s, s.index, loops, specs[s.buffer])
            elif result_of(s) in known | gathered | across:
                wrong(f"{s} is computed twice", kernel)
            else:
                (known if not isinstance(s, Reduce) else across if s.across else gathered).add(result_of(s))
        known |= gathered
    touched = {p[0]: p[2] for p in kernel.params}
    named = {
        e.args[0] for e in walk(*roots(*kernel.statements())) if e.op == "load"
    }  # also under conditions that never hold
    if touched != dict.fromkeys(named, False) | dict.fromkeys((*stored, *partial), True):
        wrong(
            f"the kernel stores {sorted(stored)} and reads {sorted(named)}",
            f"its parameters: {kernel.params}\n{kernel}",
        )
    return before


# -- programs ------------------------------------------------------------------------------------------------
def verify_nodes(schedule: Iterable[LoopNode | ExternNode], specs: Mapping[str, TensorSpec]) -> None:
    """Each loop node reads and writes inside of buffers, and each element of its result is written
    once.
    """
    for node in schedule:
        if isinstance(node, LoopNode) and 0 not in node.domain:
            for e, facts in _accesses([node.evaluate()], set()):
                _inside(e, facts, specs)
            _place(node, node.place, node.own[: len(node.shape)], specs[node.buffer])
            if (node.reduce or node.scan) in ("sum", "prod") and node.memory is torch.bool:
                wrong(f"{node.buffer} is a {node.reduce} of booleans", "they have no arithmetic: any, all")


def verify_program(program: Program) -> None:
    """Kernels are right; every step reads complete values, inside of buffers; buffers are written once.
    `in_place.verify_in_place` checks that no step reads old contents of the others.
    """
    specs = {name: b.spec for name, b in program.buffers.items()}
    empty = {name for name, spec in specs.items() if not spec.numel}
    there = empty | {name for name, b in program.buffers.items() if b.kind in ("input", "const")}
    for step in program.steps:
        if isinstance(step, LoopStep):
            places = verify_kernel(step.kernel, specs, step.partial)
            stores = {s.buffer: s for s in step.kernel.statements() if isinstance(s, Store)}
            reads, writes = set(places), set(step.writes)
            if step.args != tuple(p[0] for p in step.kernel.params) or not reads <= set(step.reads):
                wrong(f"a step's buffers are {step.args}", step.kernel)
            for name, other in step.inplace:
                if (
                    stores.keys() != {name}
                    or places.get(other, set()) - {stores[name].index}  # none: its condition never holds
                    or len(step.kernel.phases) > 1
                ):
                    wrong(f"{name} takes the memory of {other}, which is still read", step.kernel)
            again = {name for name, s in stores.items() if s.scatters or s.part} | set(program.mutations)
        else:
            found = list(refs((step.args, step.kwargs)))
            for ref in found:
                _lies_inside(ref, specs)
            reads, again = {ref.name for ref in found}, set(step.mutates)
            writes = {o for o in step.outs if o} | again
        if reads - there or writes & there - again - empty or (writes & again) - there:
            wrong(
                f"a step reads {sorted(reads)} and writes {sorted(writes)}",
                f"there is {sorted(there)}\n{step}",
            )
        there |= writes
    for ref in refs(program.outputs):
        _lies_inside(ref, specs)
        if ref.name not in there - set(program.mutations):
            wrong(f"the output {ref.name} is never written, or overwritten", program)


def _lies_inside(ref: BufRef, specs: Mapping[str, TensorSpec]) -> None:
    spec = specs[ref.name]
    end = ref.offset + TensorSpec(ref.shape, ref.stride, ref.dtype).extent
    if ref.offset < 0 or end > max(spec.extent, ref.offset) or ref.dtype.itemsize != spec.dtype.itemsize:
        wrong(f"{ref} is not inside of its buffer", spec)
