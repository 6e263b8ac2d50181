"""Statements of one Triton kernel: tiles, and where each expression is computed.

A tile has one or two axes, `x` and `r`; a value spans the axes of its variables (none: one number).
A scope is a stretch of text in which some loop variables are bound; what does not depend on those of a loop
is computed before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from ..graph.sizes import Dim, Size, divides, equal
from ..graph.spec import contiguous_stride, numel
from ..lower.index_expr import Bounds, Div, Index, Loaded, Mod, Var, is_one, may_be_negative
from ..lower.ir import BOOL, F32, I32, I64, Expr, Store, make
from .scopes import Rereads, ValueScope
from .triton_ops import COMPUTE, MEMORY, literal, mark, operation, word_test
from .triton_vectors import Vectors

Axes = frozenset[str]
NOTHING: Axes = frozenset()
NO_VARS: frozenset[Var] = frozenset()
LEAST_GROUP = 8  # places that share a load: fewer are one or two vectors of their own


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a tile: `block` consecutive positions of the flat index over `vars`.

    exact: positions are never behind the end, so that no mask is needed. run: how many positions in a row a
    thread takes at most; 0 leaves that to Triton, which moves a value through shared memory where accesses of
    two widths want it.
    """

    name: str
    vars: tuple[Var, ...]
    block: int
    exact: bool
    run: int = 0

    @property
    def size(self) -> Dim:
        return numel(v.size for v in self.vars)

    @staticmethod
    def of(name: str, variables: Iterable[Var], block: int, exact: bool | None = None) -> Axis:
        """The axis over these variables, the last one fastest."""
        found = tuple(variables)
        size = numel(v.size for v in found)
        return Axis(name, found, block, divides(block, size) if exact is None else exact)


@dataclass(frozen=True, slots=True)
class Name:
    """A value in the text: its name and the axes that it spans."""

    text: str
    axes: Axes


class TileScope(ValueScope[Name]):
    """Lines, the values known in them, and the variables that they bind. Positions outside of `masks` are not
    touched.

    closed: values of this scope may not be computed outside. before: the same condition, before a loop that
    this is in. met_for: variables on which alone the condition rests, and for some of whose values it
    holds: what does not depend on them is wanted in any case.
    """

    parent: TileScope | None

    def __init__(
        self,
        parent: TileScope | None = None,
        bound: Mapping[Var, Name] | None = None,
        closed: bool = False,
        masks: tuple[Name, ...] = (),
        indent: int = 1,
        before: TileScope | None = None,
    ) -> None:
        super().__init__(parent)
        self.closed, self.before, self.met_for = closed, before, NO_VARS
        self.branches: dict[tuple[Expr, bool], TileScope] = {}
        self.own = dict(bound or {})
        self.bound: dict[Var, Name] = {**(parent.bound if parent else {}), **self.own}
        self.masks: tuple[Name, ...] = (*(parent.masks if parent else ()), *masks)
        self.indent = indent
        self.lines: list[str] = parent.lines if closed and parent else []

    def line(self, text: str) -> None:
        """Append a line."""
        self.lines.append("    " * self.indent + text)


def _met_for(condition: Expr) -> frozenset[Var]:
    """The loop variables of a condition that compares each of them with constants and holds for some of their
    values.
    """
    tests = [condition]
    ranges: dict[Var, Bounds] = {}
    while tests:
        test = tests.pop()
        if test.op == "and":
            tests += test.args
            continue
        if test.op not in ("lt", "ge") or test.args[0].op != "index" or test.args[1].op != "const":
            return NO_VARS
        index = test.args[0].args[0]
        v = next(iter(index.terms), None)
        if len(index.terms) != 1 or not isinstance(v, Var) or index.terms[v] != 1:
            return NO_VARS
        low, high = ranges.get(v, v.bounds)
        limit = test.args[1].args[0] - index.const
        if type(limit) is Size or type(v.size) is Size:
            return NO_VARS
        ranges[v] = (low, min(high, limit - 1)) if test.op == "lt" else (max(low, limit), high)
    return frozenset(ranges) if all(low <= high for low, high in ranges.values()) else NO_VARS


def _word(rand: Expr) -> Expr:
    """The 32 bits behind a random number."""
    return make("random_word", rand.args, I32)


class TileBody:
    """Emits the expressions of one kernel."""

    def __init__(
        self,
        pointers: Mapping[str, str],
        streams: tuple[int, ...],
        axes: tuple[Axis, ...],
        exprs: Iterable[Expr],
        wide: bool,
        vectors: Vectors | None = None,
    ) -> None:
        self.pointers, self.streams, self.wide, self.vectors = pointers, streams, wide, vectors
        self.axes = {axis.name: axis for axis in axes}
        self.order = tuple(axis.name for axis in axes)
        self.starts: dict[str, str] = {}  # axis -> its first position in the current tile
        self.checks = False
        self.stores: list[
            tuple[Store, Collection[Var]]
        ] = []  # as they are emitted, with the variables bound there
        self.count = 0
        exprs = list(exprs)
        self.rereads = Rereads(exprs)
        rounding = ("trunc", "floor", "ceil", "round", "cast")
        self.exact_divisions = {
            a
            for e in exprs
            if e.op in rounding and not (e.op == "cast" and e.dtype.is_floating_point)
            for a in e.args
            if isinstance(a, Expr) and a.op == "div" and a.dtype.is_floating_point
        }

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    # -- axes ------------------------------------------------------------------------------------------------
    def expanded(self, text: str, axis: str) -> str:
        """A one-dimensional range put on its axis of the tile."""
        if len(self.order) == 1:
            return text
        return f"({text})[:, None]" if axis == self.order[0] else f"({text})[None, :]"

    def bind(self, axis: Axis, start: str, scope: TileScope) -> tuple[dict[Var, Name], tuple[Name, ...]]:
        """Lines that give the positions of a tile from `start` on; the variables' names, and the mask if one
        is needed.
        """
        name = axis.name
        steps = f"tl.arange(0, {axis.block})"
        positions = self.expanded(f"tl.max_contiguous({steps}, {axis.run})" if axis.run else steps, name)
        at = f"{start} + {positions}" if start else positions
        self.starts[name] = start or "0"
        scope.line(f"{name} = ({at}).to(tl.int64)" if self.wide else f"{name} = {at}")
        span = frozenset((name,))
        masks: tuple[Name, ...] = ()
        if not axis.exact:
            scope.line(f"{name}_in = {name} < {mark(axis.size)}")
            masks = (Name(f"{name}_in", span),)
        return self.variables(axis, scope), masks

    def variables(self, axis: Axis, scope: TileScope) -> dict[Var, Name]:
        """The variables' names, and lines that give them where they are parts of the axis' position."""
        name, span = axis.name, frozenset((axis.name,))
        bound = {}
        for v, step in zip(axis.vars, contiguous_stride([v.size for v in axis.vars]), strict=True):
            if v.single:
                bound[v] = Name("0", NOTHING)
                continue
            text = name if is_one(step) else f"({name} // {mark(step)})"
            if any(not w.single for w in axis.vars[: axis.vars.index(v)]):
                text = f"{text} % {mark(v.size)}"
            if text != name:
                scope.line(f"{name}{axis.vars.index(v)} = {text}")
                text = f"{name}{axis.vars.index(v)}"
            bound[v] = Name(text, span)
        return bound

    def spread(self, text: str, have: Axes, want: Axes) -> str:
        """An index that spans at least `want`."""
        missing = [a for a in self.order if a in want - have]
        return " + ".join([text, *(f"{a} * 0" for a in missing)])

    def full_tile(self, name: Name) -> str:
        """The value broadcast to the whole tile."""
        if name.axes == frozenset(self.order):
            return name.text
        shape = ", ".join(str(self.axes[a].block) for a in self.order)
        return f"tl.broadcast_to({name.text}, [{shape}])"

    def mask(self, scope: TileScope, axes: Axes, inside: str = "r_in") -> tuple[str, Axes]:
        """The mask of an access that spans `axes`; a condition masks every access. inside: what stands for
        `r_in`.
        """
        parts = [m for m in scope.masks if not m.text.endswith("_in") or m.axes <= axes]
        texts = (inside if m.text == "r_in" else m.text for m in parts)
        return " & ".join(texts), frozenset().union(*(m.axes for m in parts)) if parts else NOTHING

    def by_vectors(self, index: Index, memory: torch.dtype, scope: TileScope) -> tuple[bool, bool]:
        """Whether an access takes whole vectors, and whether it may take those inside the row in
        part.
        """
        if self.vectors is None or not self.vectors.covers(index):
            return False, False
        return True, self.vectors.whole(memory) and any(m.text == "r_in" for m in scope.masks)

    def place(self, at: Name, covered: bool, want: Axes, scope: TileScope) -> str:
        """The position of an access."""
        text = self.spread(at.text, at.axes, want)
        if not covered or self.vectors is None:
            return f"({text})"
        return self.vectors.place(text, any(m.text == "r_in" for m in scope.masks))

    # -- indices ---------------------------------------------------------------------------------------------
    def index(self, index: Index, scope: TileScope) -> Name:
        """An index as text."""
        parts: list[str] = []
        axes: Axes = NOTHING
        terms = dict(index.terms)
        for axis in self.axes.values():  # all of an axis in order: its flat position, which needs no division
            loops = [v for v in axis.vars if not v.single]
            steps = contiguous_stride([v.size for v in loops])
            c = terms.get(loops[-1], 0) if loops else 0
            if (
                len(loops) > 1
                and not equal(c, 0)
                and all(equal(terms.get(v, 0), c * step) for v, step in zip(loops, steps, strict=True))
            ):
                parts.append(axis.name if is_one(c) else f"{axis.name} * {mark(c)}")
                axes |= {axis.name}
                for v in loops:
                    del terms[v]
        for atom, c in terms.items():
            found = self.atom(atom, scope)
            axes |= found.axes
            parts.append(found.text if is_one(c) else f"{found.text} * {mark(c)}")
        if not equal(index.const, 0) or not parts:
            parts.append(mark(index.const))
        return Name(" + ".join(parts), axes)

    def integer(self, index: Index, kind: str, scope: TileScope) -> Name:
        """An index as a value of an integer type; along dimensions of one element it is a number, which
        Triton cannot cast.
        """
        at = self.index(index, scope)
        text = f"({at.text}).to({kind})" if at.axes else f"tl.full((), {at.text}, {kind})"
        return self.define(text, at.axes, scope)

    def atom(self, atom: Var | Div | Mod | Loaded, scope: TileScope) -> Name:
        """One term of an index."""
        if isinstance(atom, Var):
            return scope.bound[atom]
        if isinstance(atom, Loaded):
            return self.value(atom.expr, scope)
        base = self.index(atom.base, scope)
        if may_be_negative(atom):  # `//` and `%` round towards zero on a GPU
            lift = -(atom.base.bounds[0] // atom.n) * atom.n
            base = Name(f"{base.text} + {mark(lift)}", base.axes)
            if isinstance(atom, Div):
                return Name(f"(({base.text}) // {mark(atom.n)} - {mark(lift // atom.n)})", base.axes)
        return Name(f"(({base.text}) {'//' if isinstance(atom, Div) else '%'} {mark(atom.n)})", base.axes)

    # -- values ----------------------------------------------------------------------------------------------
    def value(self, e: Expr, scope: TileScope) -> Name:
        """The name of e as seen from `scope`."""
        stays = self.rereads.stays(e)
        if (
            scope.before is not None
            and not stays
            and not e.vars & (scope.bound.keys() - scope.before.bound.keys())
        ):
            return self.value(e, scope.before)
        found = scope.find(e)
        if found is None:
            home, met = scope, NO_VARS
            while home.parent is not None and not stays and not e.vars & home.own.keys():
                if home.closed and (not home.met_for or home.met_for & (e.vars | met)):
                    break
                home, met = home.parent, met | home.met_for
            found = home.values[e] = self.compute(e, home)
        return found

    def compute(self, e: Expr, scope: TileScope) -> Name:
        """Emit e into its scope."""
        special: Callable[..., Name] | None = getattr(self, f"_{e.op}", None)
        if special is not None:
            return special(e, scope)
        test = word_test(e)
        if test is not None:
            word = self.value(_word(test[0]), scope)
            return self.define(test[1].format(word.text), word.axes, scope)
        operands = [self.value(a, scope) for a in e.args if isinstance(a, Expr)]
        texts = [o.text for o in operands]
        text = (
            f"libdevice.div_rn({texts[0]}, {texts[1]})" if e in self.exact_divisions else operation(e, texts)
        )
        return self.define(text, frozenset().union(*(o.axes for o in operands)), scope)

    def define(self, text: str, axes: Axes, scope: TileScope) -> Name:
        """Give a text a name."""
        name = self.fresh()
        scope.line(f"{name} = {text}")
        return Name(name, axes)

    def _const(self, e: Expr, scope: TileScope) -> Name:
        text = literal(e.args[0], e.dtype)
        if e.dtype in (F32, I32, I64) and "(" not in text:  # a mean's divisor, the end of a part
            text = mark(text)
        return self.define(f"tl.full((), {text}, {COMPUTE[e.dtype]})", NOTHING, scope)

    def _load(self, e: Expr, scope: TileScope) -> Name:
        buffer, index, memory = e.args
        group = self._group(index)
        if group is not None:
            return self._load_by_groups(e, *group, scope)
        at = self.index(index, scope)
        covered, some = self.by_vectors(index, memory, scope)
        mask, mask_axes = self.mask(scope, at.axes, "r_some" if some else "r_in")
        text = f"tl.load({self.pointers[buffer]} + {self.place(at, covered, mask_axes, scope)}"
        text += f", {mask}, 0)" if mask else ")"
        if memory is BOOL:
            text += ".to(tl.int1)"
        elif MEMORY[memory] != COMPUTE[e.dtype]:
            text += f".to({COMPUTE[e.dtype]})"
        return self.define(text, at.axes | mask_axes, scope)

    def _index(self, e: Expr, scope: TileScope) -> Name:
        return self.integer(e.args[0], COMPUTE[e.dtype], scope)

    def _group(self, index: Index) -> tuple[Div, Axis] | None:
        """The term of an index that is the same for whole groups of places along the last axis of a tile,
        where each tile has whole groups: one load serves a group.
        """
        axis = self.axes[self.order[-1]]
        loops = [v for v in axis.vars if not v.single]
        if len(self.order) < 2 or len(loops) != 1 or not axis.exact or self.vectors is not None:
            return None
        along = [atom for atom in index.terms if loops[0] in Index({atom: 1}, 0).vars()]
        term = along[0] if len(along) == 1 else None
        if not isinstance(term, Div) or index.loaded or type(term.n) is not int:
            return None
        of_axis = term.base.terms == {loops[0]: 1} and equal(term.base.const, 0)
        if not of_axis or term.n < LEAST_GROUP or axis.block % term.n:
            return None
        return term, axis

    def _load_by_groups(self, e: Expr, term: Div, axis: Axis, scope: TileScope) -> Name:
        """A load that all places of a group share, given to each of them."""
        buffer, index, memory = e.args
        rest = self.index(Index({a: c for a, c in index.terms.items() if a is not term}, index.const), scope)
        count = axis.block // term.n
        groups = f"(({self.starts[axis.name]}) // {term.n} + tl.arange(0, {count}))[None, :]"
        mask, mask_axes = self.mask(scope, rest.axes)
        place = self.spread(rest.text, rest.axes, mask_axes)
        text = f"tl.load({self.pointers[buffer]} + {place} + {groups} * {mark(index.terms[term])}"
        text = f"{text}, {mask}, 0)" if mask else f"{text})"
        if MEMORY[memory] != COMPUTE[e.dtype]:
            text += f".to({COMPUTE[e.dtype]})"
        block = self.axes[self.order[0]].block if rest.axes | mask_axes else 1
        text = f"tl.broadcast_to(tl.expand_dims({text}, 2), [{block}, {count}, {term.n}])"
        return self.define(f"tl.reshape({text}, [{block}, {axis.block}])", rest.axes | {axis.name}, scope)

    def _rand(self, e: Expr, scope: TileScope) -> Name:
        word = self.value(_word(e), scope)
        return self.define(f"uniform({word.text})", word.axes, scope)

    def _random_word(self, e: Expr, scope: TileScope) -> Name:
        seed, stream, linear = e.args
        while (
            scope.closed and scope.parent is not None
        ):  # the seed is one number, also where only some elements want it
            scope = scope.parent
        key, number = self.value(seed, scope).text, f"s{self.streams.index(stream)}"
        run = self._run_of_four(linear, scope)
        if run is not None:
            return self.define(f"random_words({key}, {number}, ({run.text}).to(tl.uint32))", run.axes, scope)
        at = self.index(linear, scope)
        text = at.text if at.axes else f"tl.full((), {at.text}, tl.int32)"
        return self.define(f"random_word({key}, {number}, {text})", at.axes, scope)

    def _run_of_four(self, linear: Index, scope: TileScope) -> Name | None:
        """The counters of a tile whose last axis goes through consecutive elements: one serves four of
        them.
        """
        axis = self.axes[self.order[-1]]
        loops = [v for v in axis.vars if not v.single]
        steps = contiguous_stride([v.size for v in loops])
        along = all(equal(linear.terms.get(v, 0), step) for v, step in zip(loops, steps, strict=True))
        rest = Index({a: c for a, c in linear.terms.items() if a not in loops}, linear.const)
        if (
            not loops
            or not along
            or axis.block % 4
            or not rest.is_affine
            or not all(divides(4, n) for n in (rest.const, *rest.terms.values()))
        ):
            return None
        before = self.index(Index({a: c // 4 for a, c in rest.terms.items()}, rest.const // 4), scope)
        quarter = self.expanded(
            f"({self.starts[axis.name]}) // 4 + tl.arange(0, {axis.block // 4})", axis.name
        )
        return Name(f"{before.text} + {quarter}", before.axes | {axis.name})

    def _wrap_index(self, e: Expr, scope: TileScope) -> Name:
        """A position along a dimension; one outside of it is an error of the program that is compiled."""
        x, size, wrap = e.args
        given, size = self.value(x, scope), mark(size)
        from_end = f"tl.where({given.text} < 0, {given.text} + {size}, {given.text})"
        place = self.define(from_end, given.axes, scope) if wrap else given
        test = self.define(f"({place.text} >= 0) & ({place.text} < {size})", given.axes, scope)
        mask, mask_axes = self.mask(scope, given.axes)
        seen = f"{test.text} | ({mask} == 0)" if mask else test.text
        scope.line(f'tl.device_assert({seen}, "index out of range in self")')
        self.checks = True
        kind = COMPUTE[I64] if self.wide else "tl.int32"
        return self.define(f"tl.where({test.text}, {place.text}, 0).to({kind})", given.axes, scope)

    def _masked(self, e: Expr, scope: TileScope) -> Name:
        """Each branch touches memory only where it is the one wanted."""
        condition, body, other = e.args
        test = self.value(condition, scope)
        yes, no = (
            self.value(branch, self._branch(condition, way, scope))
            for branch, way in ((body, True), (other, False))
        )
        return self.define(
            f"tl.where({test.text}, {yes.text}, {no.text})", test.axes | yes.axes | no.axes, scope
        )

    def _branch(self, condition: Expr, way: bool, scope: TileScope) -> TileScope:
        """A branch's scope; loop-invariant values are computed before the loop, under the same
        condition.
        """
        found = scope.branches.get((condition, way))
        if found is None:
            before = None
            if not scope.closed and scope.parent is not None and not condition.vars & scope.own.keys():
                before = self._branch(condition, way, scope.parent)
                when = before.masks[-1]
            else:
                when = self.value(condition, scope)
                when = when if way else self.define(f"{when.text} == 0", when.axes, scope)
            found = TileScope(scope, closed=True, masks=(when,), indent=scope.indent, before=before)
            found.met_for = _met_for(condition) if way else NO_VARS
            scope.branches[condition, way] = found
        return found

    # -- statements ------------------------------------------------------------------------------------------
    def store(self, s: Store, scope: TileScope, known: bool) -> None:
        """Emit one store. known: later reads of the same element may use the value."""
        self.stores.append((s, scope.bound.keys()))
        value, at = self.value(s.expr, scope), self.index(s.index, scope)
        self.rereads.store(s.buffer)
        if s.add:  # once for each element, also where place and value are the same along an axis
            whole = frozenset(self.order)
            mask, _ = self.mask(scope, whole)
            place = f"({self.spread(at.text, at.axes, whole)})"
            text = self.full_tile(Name(f"{value.text}.to({MEMORY[s.memory]})", value.axes))
            scope.line(
                f"tl.atomic_add({self.pointers[s.buffer]} + {place}, {text}{f', {mask}' if mask else ''}, "
                'sem="relaxed")'
            )
            return
        covered, some = self.by_vectors(s.index, s.memory, scope)
        mask, mask_axes = self.mask(scope, at.axes)
        text = value.text if s.memory is BOOL else f"{value.text}.to({MEMORY[s.memory]})"
        place = (
            f"{self.pointers[s.buffer]} + {self.place(at, covered, at.axes | value.axes | mask_axes, scope)}"
        )
        if some:  # whole vectors first, then the row's part of the others
            scope.line(f"tl.store({place}, {text}, {self.mask(scope, at.axes, 'r_all')[0]})")
            mask += " & (r_all == 0)"
        scope.line(f"tl.store({place}, {text}{f', {mask}' if mask else ''})")
        if known and not s.scatters and COMPUTE[s.expr.dtype] == MEMORY[s.memory]:
            scope.values.setdefault(make("load", (s.buffer, s.index, s.memory), s.expr.dtype), value)
