"""Which sizes, strides and integers from outside are symbols in a trace, and the guard of what the program
assumed of them.

A size is a number at first. When it differs at a later call it becomes a symbol, and one entry serves all
values that its guards admit. Sizes that are equal at the call being captured share a symbol, until a call
tells them apart.

>>> sizes = TraceSizes(SizePolicy(dynamic=True), where)
>>> sizes.read(Arg(0, "x"), torch.ones(8, 3)).shape
(s0, s1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import fx

from ..base.errors import UsageError, UserLine
from ..graph.data_sizes import DataSizes
from ..graph.size_nodes import SizeNodes
from ..graph.sizes import (
    INFINITY,
    LARGEST,
    Atom,
    Guard as Assumption,
    ShapeEnv,
    Size,
    Symbol,
    hint,
    is_symbolic,
    settled,
)
from ..graph.spec import TensorSpec, channels_last_stride, contiguous_stride
from ..graph.tensor_subclass import WrapperSpec
from .breaks import unsupported
from .graph_builder import GraphBuilder
from .guards import BYTES, Answer, ConstEquals, Guard, IdIs, TensorIs, TensorMatch, first_failure
from .source import Arg, Const, DictItem, Missing, SeqItem, SizeOf, Source, StrideOf

_OF_NUMPY = (np.float64, np.int64)  # numbers that may be inputs (values/number.py)
DIM_NAMES = "_dynamotor_dim_names"  # the attribute of a tensor with names of marked dimensions


@dataclass(frozen=True)
class FloatIs:
    """The assumption that a float is this one; `where` is what needs it."""

    name: str
    number: float
    where: UserLine | None = None

    def __repr__(self) -> str:
        return f"{self.name} == {self.number}"


@dataclass
class SizePolicy:
    """The facts of a callable's sizes from one capture to the next.

    symbolic: whether the backend takes graphs with symbols for tensors of a device (its type), and (True)
    such that data decides. varying:
    sizes, strides and integers that differed between calls. guessed: sizes that are symbols beside a varying
    one although they have not differed yet, None after a backend refused them. followed: those that equalled a varying one
    where they were first met. apart: pairs of sources that
    were equal at one call and not at another. replaced: buffers that the program sets anew. refused: why sizes stay numbers all the same.
    """

    dynamic: bool | None = None
    symbolic: Callable[[str, bool], bool] = lambda device, of_data: True
    varying: set[Source] = field(default_factory=set)
    guessed: set[Source] | None = field(default_factory=set)
    followed: set[Source] = field(default_factory=set)
    apart: set[frozenset[Source]] = field(default_factory=set)
    replaced: set[Source] = field(default_factory=set)
    seen: dict[int, dict[Source, int]] = field(
        default_factory=dict
    )  # the numbers of each entry, by the id of its guards
    refused: str = ""
    is_repeated: Callable[[type], bool] | None = None  # whether the program has several modules of a class
    checks: bool = True  # tests of data that only raise are put off until the graph has run
    states: bool = False  # the backend takes calls that set states (`graph/states.py`)
    checkpoints: bool = (
        True  # checkpoints are captured; not where the program writes the tensors that they read
    )
    function_modes: bool = True  # function modes that are entered inside are interpreted
    floats: bool = False  # floats may be inputs where sizes are numbers
    broken_regions: bool = False  # the graph breaks inside of what such calls begin and end

    def takes(self, device: str, of_data: bool = False) -> bool:
        """Whether sizes of a device's tensors may be symbols: where sizes are numbers, those that are marked."""
        may = self.dynamic is not False or not of_data
        return not self.refused and may and self.symbolic(device, of_data)

    def varies(self, source: Source) -> bool:
        """Whether it has differed between calls, where that makes it a symbol."""
        return source in self.varying and self.dynamic is not False

    def is_guessed(self, source: Source) -> bool:
        """Whether it is likely to differ, too."""
        return source in (self.guessed or ()) and self.dynamic is not False

    def differ(self, a: Source, b: Source) -> bool:
        """Whether two sizes were different at some call."""
        return frozenset((a, b)) in self.apart or any(
            n[a] != n[b] for n in self.seen.values() if a in n and b in n
        )

    def follows(self, source: Source, value: int) -> bool:
        """Whether a size equals, where it is met for the first time, the former value of a varying one: a cache is as long
        as the first prompt.
        """
        new = self.dynamic is not False and not any(source in numbers for numbers in self.seen.values())
        if new and any(
            numbers.get(other) == value for numbers in self.seen.values() for other in self.varying
        ):
            self.followed.add(source)
        return new and source in self.followed

    def again(self) -> SizePolicy:
        """The same choices for another callable, of which nothing is known yet."""
        guessed: set[Source] | None = None if self.guessed is None else set()
        return replace(
            SizePolicy(self.dynamic, self.symbolic, guessed=guessed), states=self.states, floats=self.floats
        )

    def learn(self, guards: tuple[Any, ...], args: tuple[Any, ...]) -> None:
        """Note the differences of a call from an entry with these guards."""
        if id(guards) not in self.seen:
            self.seen[id(guards)] = {
                SizeOf(row.source, d): n
                for row in guards
                if type(row) is TensorMatch
                for d, n in enumerate(row.shape)
                if n is not None
            }
        for row in guards:
            kind = type(row)
            number = kind is ConstEquals and type(row.value) in (int, float, str)
            if number or kind is TensorMatch or kind is Answer and row.asked == BYTES[0]:
                try:
                    value = row.source.fetch(args)
                except Missing:
                    continue
                if kind is TensorMatch:
                    self.varying.update(_differing(row, value))
                elif not row.check_value(value) and type(value) in (
                    (type(row.value),) if number else _OF_NUMPY
                ):
                    self.varying.add(row.source)
            elif kind is ConstEquals and type(row.value) is torch.Size:
                self.varying.update(_other_items(row, args))
            elif kind is SizesHold:
                self.apart.update(row.told_apart(args))
        others = {row.source for row in guards if type(row) in (IdIs, TensorIs) and not row.check(args)}
        tables = {(s.base.key, s.is_held) if isinstance(s.base, DictItem) else None for s in others}
        if tables <= {("_buffers", True), ("_buffers", False), ("_parameters", True)}:
            self.replaced |= others
        if self.guessed is not None:
            self.guessed |= self._guesses([row for row in guards if type(row) is TensorMatch])

    def unbind(self, guards: tuple[Any, ...], args: tuple[Any, ...]) -> None:
        """Make inputs of parameters and buffers of modules that come as arguments, where an entry with these
        guards does not fit since it is bound to those of another module, and for nothing else. A tensor may
        have the address of one of that module's, which is gone: it is another's, too."""
        others = {row.source: row for row in guards if _is_of_another(row, args)}
        tables = [s.base.key for s in others if isinstance(s.base, DictItem) and not s.is_held]
        rest = [row for row in guards if others.get(getattr(row, "source", None)) is not row]
        if len(others) == sum(key in ("_parameters", "_buffers") for key in tables):
            self.replaced.update(others if first_failure(rest, args) is None else ())

    def _guesses(self, rows: list[TensorMatch]) -> set[Source]:
        """Sizes that are likely to differ too, at another call: the batch of a tensor of which a size differs
        (its first dimension), the first dimension of others that is as large, and all of a tensor of
        positions, tokens or flags."""
        batches: set[int | None] = set()
        found: set[Source] = set()
        for row in rows:
            if row.shape and any(SizeOf(row.source, d) in self.varying for d in range(len(row.shape))):
                batches.add(row.shape[0])
                found.update(
                    SizeOf(row.source, d) for d in range(1 if row.dtype.is_floating_point else len(row.shape))
                )
        return found | {
            SizeOf(row.source, 0) for row in rows if row.shape and row.shape[0] in batches - {None}
        }


def _is_of_another(row: Any, args: tuple[Any, ...]) -> bool:
    """Whether a row binds an object that another module has instead, or that no module has any more."""
    return type(row) in (IdIs, TensorIs) and (getattr(row, "is_gone", False) or not row.check(args))


def _other_items(row: ConstEquals, args: tuple[Any, ...]) -> Iterator[Source]:
    """The items in which a `torch.Size` differs from the guarded one of as many."""
    try:
        value = row.source.fetch(args)
    except Missing:
        return
    pairs = list(zip_longest(value, row.value)) if type(value) is torch.Size else []
    if not any(None in pair for pair in pairs):
        yield from (SeqItem(row.source, i) for i, (now, then) in enumerate(pairs) if now != then)


def _differing(row: TensorMatch, value: Any) -> Iterator[Source]:
    """The sizes and strides in which a tensor differs from the guarded ones, if it differs in nothing else
    that matters.
    """
    if type(value) is not row.cls or value.layout != torch.strided or value.dim() != len(row.shape):
        return
    for d, (now, then) in enumerate(zip(value.shape, row.shape)):
        if then is not None and now != then:
            yield SizeOf(row.source, d)
    for d, (now, then) in enumerate(zip(value.stride(), row.stride)):
        if then is not None and now != then:
            yield StrideOf(row.source, d)


class TraceSizes:
    """The symbols of one trace. `fixed`: sources of which the program needs the numbers, with what says
    so.
    """

    def __init__(
        self,
        policy: SizePolicy,
        where: Callable[[], UserLine | None],
        fixed: Mapping[Source, Assumption | FloatIs],
    ) -> None:
        self.policy, self.fixed, self.symbolic = policy, fixed, policy.takes("cpu")
        self.env = ShapeEnv(where)
        self.sources: dict[Symbol, Source] = {}
        self.marked: dict[int, Marks] = {}  # of inner tensors, by id: those of the wrapper, which is as large
        self.alone: set[Source] = set()  # sizes that share no symbol: they are equal to others by chance
        self.named: dict[Source, str] = {}  # of marked dimensions: sizes of other names share no symbol
        self.guesses: set[Source] = set()  # which nothing but `SizePolicy.guessed` makes symbols
        self.bounds: dict[
            Symbol, tuple[int, int]
        ] = {}  # as they were asked for; the symbols' own follow from the guards too
        self.facts: dict[Source, Size] = {}  # what else is read, as an expression of the symbols
        self.integers: set[Symbol] = set()  # symbols of Python integers, without bounds until they are used
        self.env.undecided = _undecided
        self.floats: dict[Source, float] = {}  # inputs of the program that are Python floats
        self.data = DataSizes(self.env)
        self.counts = True  # what data decides is told of tensors of these devices
        self.in_body = False  # a function's body is traced, whose nodes move to a graph of its own
        self._specs: dict[Source, TensorSpec] = {}
        self._nodes: SizeNodes | None = None

    # Symbols ------------------------------------------------------------------------------------------------
    def integer(self, source: Source, value: int) -> Size | None:
        """The symbol of a Python integer that differs between calls, or may (an argument of what is dynamic);
        None for one that is a constant."""
        may = self.policy.dynamic is True and self.symbolic and value >= 2 and type(source) is Arg
        if not (may or self.policy.varies(source)) or source in self.fixed or abs(value) >= LARGEST:
            return None
        made = self.env.symbol(value, -INFINITY)
        (symbol,) = made.symbols
        self.sources[symbol] = source
        self.integers.add(symbol)
        return made

    def takes_float(self, source: Source) -> bool:
        """Whether a Python float that differs between calls is an input of the program."""
        return (
            source in self.policy.varying
            and source not in self.fixed
            and not self.policy.refused
            and (self.symbolic and self.policy.dynamic is not False or self.policy.floats)
        )

    def floats_as_numbers(self, where: UserLine | None) -> dict[Source, FloatIs]:
        """All floats that are inputs of the program, each with the assumption that it keeps its present value."""
        return {source: FloatIs(str(source), number, where) for source, number in self.floats.items()}

    def read(self, source: Source, tensor: torch.Tensor, static: bool = False) -> TensorSpec:
        """The spec of an outside tensor, with symbols for what differs between calls; `static`: a parameter
        or buffer.
        """
        found = self._specs.get(source)
        if found is None:
            found = TensorSpec.of(tensor)
            self.symbolic = self.symbolic and self.policy.takes(tensor.device.type)
            self.counts = self.counts and tensor.device.type in ("cpu", "cuda")
            if not static and self.symbolic and type(source) is not Const:
                found = self._symbolic(source, tensor, found)
            self._specs[source] = found
        return found

    def _symbolic(self, source: Source, tensor: torch.Tensor, spec: TensorSpec) -> TensorSpec:
        marks = self.marked.get(id(tensor)) or Marks.of(tensor)
        sizes: Any = spec.shape  # numbers, as strides are: the tensor is real
        self.named |= {SizeOf(source, d): name for d, name in tensor.__dict__.get(DIM_NAMES, {}).items()}
        shape = tuple([self._size(SizeOf(source, d), n, marks.of_dim(d)) for d, n in enumerate(sizes)])
        if is_symbolic(shape) or any(self.policy.varies(StrideOf(source, d)) for d in range(len(shape))):
            return replace(spec, shape=shape, stride=self._strides(source, shape, spec.stride))  # type: ignore[arg-type]
        return spec

    def _size(self, source: Source, value: int, mark: bool | tuple[int, int] | None) -> Size | int:
        policy = self.policy
        likely = policy.varies(source) or policy.is_guessed(source) or policy.follows(source, value)
        wanted = mark if mark is not None else policy.dynamic or likely
        if mark is None and not policy.dynamic and policy.is_guessed(source) and not policy.varies(source):
            self.guesses.add(source)
        if not wanted or value < 2 or value >= LARGEST or source in self.fixed:
            return value
        lo, hi = mark if type(mark) is tuple else (2, INFINITY)
        return self._symbol(source, value, lo, hi) if lo <= value <= hi else value

    def _symbol(self, source: Source, value: int, lo: int, hi: int) -> Size:
        for symbol, first in self.sources.items():
            if (
                symbol.hint == value
                and self.alone.isdisjoint((source, first))
                and self.named.get(source) == self.named.get(first)
                and self.bounds.get(symbol) == (lo, hi)
                and not self._are_apart(source, symbol, first)
            ):
                self.facts[source] = shared = Size({(symbol,): 1}, self.env)
                return shared
        made = self.env.symbol(value, lo, hi)
        (symbol,) = made.symbols
        self.sources[symbol], self.bounds[symbol] = source, (lo, hi)
        return made

    def _are_apart(self, source: Source, symbol: Symbol, first: Source) -> bool:
        sharing = [first, *(s for s, fact in self.facts.items() if fact.same(Size({(symbol,): 1}, self.env)))]
        return any(self.policy.differ(source, other) for other in sharing)

    def _strides(
        self, source: Source, shape: tuple[Size | int, ...], stride: tuple[int, ...]
    ) -> tuple[Size | int, ...]:
        """Strides as expressions of the sizes, where the tensor is dense in some order of dimensions."""
        usual = next((c for c in _usual_strides(shape) if tuple(map(hint, c)) == stride), None)
        found: list[Size | int] = list(stride if usual is None else usual)
        if usual is None:
            step: Size | int = 1
            for d in sorted(range(len(shape)), key=lambda d: (stride[d], hint(shape[d]), -d)):
                if stride[d] == hint(step):
                    found[d] = step
                elif self.policy.varies(StrideOf(source, d)) and 2 <= stride[d] < LARGEST:
                    found[d] = self._symbol(StrideOf(source, d), stride[d], 2, INFINITY)
                    if hint(step) <= stride[d]:
                        self.env.ask(
                            ">=", found[d] - step
                        )  # a write through the strides reaches no element twice
                if stride[d]:
                    step = found[d] * shape[d]
        for d, step in enumerate(found):
            if type(step) is Size and StrideOf(source, d) not in self.sources.values():
                self.facts[StrideOf(source, d)] = step
        return tuple(found)

    def guard(self, source: Source, tensor: torch.Tensor) -> TensorMatch:
        """The tensor guard of what `read` gave, which leaves the symbolic sizes and strides to
        `SizesHold`.
        """
        row, spec = TensorMatch.of(source, tensor), self._specs[source]
        if not is_symbolic(spec.shape + spec.stride):
            return row
        return replace(row, shape=_numbers(spec.shape), stride=_numbers(spec.stride))

    @property
    def data_sizes(self) -> DataSizes | None:
        """What makes symbols of sizes that depend on data; None: such a size breaks the graph."""
        data = self.data.begin()
        return data if self.takes_data else None

    @property
    def takes_data(self) -> bool:
        """Whether sizes and numbers that data decides may stay in the graph."""
        return self.symbolic and self.hands_on and self.policy.takes("cpu", of_data=True)

    @property
    def hands_on(self) -> bool:
        """Whether a number of a tensor may be read from an output of the graph, which any backend gives."""
        return self.counts and not self.in_body

    def bind(self, graph: GraphBuilder, symbol: Size, node: fx.Node) -> None:
        """The node that gives an unbacked symbol's value."""
        self._writer(graph).bind(symbol, node)

    # Use ----------------------------------------------------------------------------------------------------
    def used(self, value: Size | int) -> Size | int:
        """A size that becomes part of the graph: a number where it cannot be a symbol there."""
        if type(value) is not Size:
            return value
        for symbol in value.symbols & self.integers:
            self.integers.discard(symbol)
            self._bound(symbol)
        value = settled(value)
        return value if type(value) is int or self.symbolic else int(value)

    def _bound(self, symbol: Symbol) -> None:
        """An integer is used as a size: it is one of the known sizes, or at least 2, or a constant."""
        own, source = Size({(symbol,): 1}, self.env), self.sources[symbol]
        if symbol.hint < 2:
            int(own)
            return
        for other, first in self.sources.items():
            if (
                other.hint == symbol.hint
                and other in self.bounds
                and self.policy.dynamic is not True  # then they are one where the program needs it
                and not self._are_apart(source, other, first)
            ):
                self.env.ask("==", own - Size({(other,): 1}, self.env))
                return
        symbol.lo, self.bounds[symbol] = max(symbol.lo, 2), (2, INFINITY)

    def placeholders(self, graph: GraphBuilder, spec: TensorSpec | WrapperSpec) -> None:
        """Make the placeholders of a spec's symbols: graphs take every symbol that their tensors' sizes
        hold.
        """
        inner = spec.leaves() if type(spec) is WrapperSpec else []
        for value in (n for one in (spec, *inner) for n in (*one.shape, *one.stride)):
            if type(value) is Size:
                for symbol in sorted(value.symbols, key=lambda s: s.order):
                    self._placeholder(graph, symbol)

    def _placeholder(self, graph: GraphBuilder, symbol: Symbol) -> None:
        if symbol not in self._writer(graph).symbols:
            own = Size({(symbol,): 1}, self.env)
            node = graph.input(self.sources[symbol], symbol.hint, own, static=False, name=symbol.name)
            self._writer(graph).bind(own, node)

    def _writer(self, graph: GraphBuilder) -> SizeNodes:
        if self._nodes is None:
            self._nodes = SizeNodes(graph.graph)
        return self._nodes

    def node(self, graph: GraphBuilder, value: Size | int) -> fx.Node | int:
        """The stand-in of a size in the graph: a number, a placeholder, or a value computed from these, once
        an expression.
        """
        if type(value) is not Size:
            return value
        for symbol in sorted(value.symbols, key=lambda s: s.order):
            self._placeholder(graph, symbol)
        return self._writer(graph).node(value)

    # Assumptions --------------------------------------------------------------------------------------------
    def row(self) -> SizesHold | None:
        """The guard of the symbols' ranges, of what else must equal them, and of all that was assumed."""
        guards, self.env.settled = tuple(self.env.guards), True
        needed = {s for g in guards for s in g.expr.symbols} | {
            s for fact in self.facts.values() for s in fact.symbols
        }
        read = {s: source for s, source in self.sources.items() if s in needed or s in self.bounds}
        if not read:
            return None
        return SizesHold(
            next(iter(read.values())),
            tuple(read.items()),
            dict(self.bounds),
            tuple(self.facts.items()),
            guards,
        )

    def as_numbers(self, where: UserLine | None) -> dict[Source, Assumption]:
        """All sources of sizes, each with the assumption that it is the number that it is now."""
        symbols = {symbol: source for symbol, source in self.sources.items() if symbol in self.bounds}
        found = {source: Size({(symbol,): 1}, self.env) for symbol, source in symbols.items()}
        found |= {source: expr for source, expr in self.facts.items() if type(source) is SizeOf}
        return {
            source: Assumption("==", self.env.lift(expr - expr.hint), where) for source, expr in found.items()
        }

    def why_number(self, failed: Any, args: tuple[Any, ...]) -> str:
        """Behind a failed guard's reason: what made a number of the size or integer that differs, if that is
        known.
        """
        found = {**self.fixed, **self.specialised()}
        if type(failed) not in (TensorMatch, ConstEquals):
            return ""
        try:
            value = failed.source.fetch(args)
        except Missing:
            return ""
        differ = _differing(failed, value) if type(failed) is TensorMatch else [failed.source]
        asked = next((found[source] for source in differ if source in found), None)
        return "" if asked is None else f" (a number there, asked at {asked.where})"

    def report(self) -> list[str]:
        """For people, a line each: the symbols, their equals, the assumptions, and why other sizes are
        numbers.
        """
        row = self.row()
        numbers = [
            f"{source} is a number in this program: {g!r}"
            + (f", asked at {g.where}" if g.where is not None else "")
            for source, g in {**self.fixed, **self.specialised()}.items()
        ]
        refused = (
            [f"sizes are numbers in this program, with symbols: {self.policy.refused}"]
            if self.policy.refused
            else []
        )
        inputs = [f"{source} is an input, {n} at the capture" for source, n in self.floats.items()]
        return ([] if row is None else row.describe()) + inputs + numbers + refused

    def close(self) -> None:
        """The entry is made: keep nothing of the trace alive."""
        self.env.where = _nowhere
        self._nodes = None

    def specialised(self) -> dict[Source, Assumption]:
        """Sources whose symbols became numbers, and what asked for that."""
        guards = {s: g for g in self.env.guards if g.kind == "==" for s in g.expr.symbols}
        numbers = {s: guards[s] for s, value in self.env.fixed.items() if type(value) is int and s in guards}
        found = {self.sources[s]: g for s, g in numbers.items()} | {
            source: numbers[s] for source, fact in self.facts.items() for s in fact.symbols & numbers.keys()
        }
        return found | self._guesses_left(found) if found else found

    def _guesses_left(self, found: Mapping[Source, Assumption]) -> dict[Source, Assumption]:
        """The sizes that are symbols by a guess alone, where all that differed are numbers: such a program costs more
        and serves no other call.
        """
        first = next(iter(found.values()))
        numbers = self.as_numbers(first.where)
        left = {source: own for source, own in numbers.items() if source not in found}
        return left if left.keys() <= self.guesses else {}


def _undecided(question: str) -> Exception:
    return unsupported(
        "data-dependent",
        f"data-dependent branch: whether {question}",
        "the size depends on the data of a tensor",
        cure="say what holds with torch._check(...), or keep the value in tensors",
    )


def _nowhere() -> None:
    """What asks after the trace has no line."""


def _usual_strides(shape: tuple[Size | int, ...]) -> Iterator[tuple[Size | int, ...]]:
    yield contiguous_stride(shape)
    if len(shape) in (4, 5):
        yield channels_last_stride(shape)


def _numbers(values: Iterable[Size | int]) -> tuple[int | None, ...]:
    return tuple([None if type(v) is Size else v for v in values])


# The guard --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class SizesHold(Guard):
    """The symbols are in their ranges, what shares or follows from them is equal, and every assumption
    holds.
    """

    symbols: tuple[tuple[Symbol, Source], ...]
    bounds: Mapping[Symbol, tuple[int, int]]
    facts: tuple[tuple[Source, Size], ...]
    assumed: tuple[Assumption, ...]
    code = "sizes"

    @property
    def sources(self) -> tuple[Source, ...]:
        """The C program's operands: tensors and integers."""
        return tuple(
            dict.fromkeys(
                _place(source)[0] for _, source in (*self.symbols, *((None, s) for s, _ in self.facts))
            )
        )

    def values(self, args: tuple[Any, ...]) -> dict[Symbol, int]:
        """The symbols' values at a call; raises Missing."""
        return {symbol: source.fetch(args) for symbol, source in self.symbols}

    def check(self, args: tuple[Any, ...]) -> bool:
        return self.failure(args) is None

    def failure(self, args: tuple[Any, ...]) -> Any:
        """What does not hold: a missing Source, a Symbol out of its range, a pair of `facts`, an assumption;
        or None.
        """
        try:
            of = self.values(args)
            read = [source.fetch(args) for source, _ in self.facts]
        except Missing:
            return self.source
        for symbol, value in of.items():
            lo, hi = self.bounds.get(symbol, (-INFINITY, INFINITY))
            if type(value) is not int or not lo <= value <= hi:
                return symbol
        for (source, expr), value in zip(self.facts, read):
            if value != expr.value(of):
                return source, expr
        return next((g for g in self.assumed if not g.holds(of)), None)

    def told_apart(self, args: tuple[Any, ...]) -> Iterator[frozenset[Source]]:
        """Pairs of sources that shared a symbol, or were found equal, and are integers that differ at this
        call.
        """
        try:
            of = {symbol: value for symbol, value in self.values(args).items() if type(value) is int}
            read = [source.fetch(args) for source, _ in self.facts]
        except Missing:
            return
        first = dict(self.symbols)
        for (source, expr), value in zip(self.facts, read):
            (monomial, *others) = expr.terms
            for symbol in of.keys() & monomial:
                if not others and len(monomial) == 1 and type(value) is int and value != of[symbol]:
                    yield frozenset((source, first[symbol]))
        for guard in self.assumed:
            symbols = guard.expr.symbols & of.keys()
            if guard.kind == "==" and len(symbols) == len(guard.expr.terms) == 2 and not guard.holds(of):
                yield frozenset(first[s] for s in symbols)

    def reason(self, args: tuple[Any, ...]) -> str:
        failed = self.failure(args)
        if isinstance(failed, Source):
            return f"{failed} is gone"
        first = dict(self.symbols)
        if type(failed) is Symbol:
            return f"{first[failed]} is {first[failed].fetch(args)}, was {failed.hint}{self._range(failed)}"
        of = self.values(args)
        if type(failed) is tuple:
            source, expr = failed
            return (
                f"{source} is {source.fetch(args)}, and {expr} was expected ({self._now(expr.symbols, of)})"
            )
        asked = f", asked at {failed.where}" if failed.where is not None else ""
        return f"{failed!r} does not hold: {self._now(failed.expr.symbols, of)}{asked}"

    def _range(self, symbol: Symbol) -> str:
        lo, hi = self.bounds.get(symbol, (-INFINITY, INFINITY))
        return f", {lo} <= {symbol}" + (f" <= {hi}" if hi < INFINITY else "") if symbol in self.bounds else ""

    def _now(self, symbols: Iterable[Symbol], of: Mapping[Symbol, int]) -> str:
        first = dict(self.symbols)
        return "; ".join(
            f"{s} = {first[s]} is {of[s]}, was {s.hint}" for s in sorted(symbols, key=lambda s: s.order)
        )

    def describe(self) -> list[str]:
        """The symbols, what equals them, and the assumptions, a line each."""
        lines = [
            f"{symbol} = {source}, {symbol.hint} at the capture{self._range(symbol)}"
            for symbol, source in self.symbols
        ]
        lines += [f"{source} == {expr}" for source, expr in self.facts]
        return lines + [
            f"{g!r}" + (f", asked at {g.where}" if g.where is not None else "") for g in self.assumed
        ]

    def __str__(self) -> str:
        return "; ".join(map(repr, self.assumed)) or "sizes"

    def encode(self, node: Callable[[Source], int]) -> Any:
        """(the reads: (node, kind, dimension) each, the program); see csrc/sizes.c."""
        places = {
            source: (node(place), kind, dim)
            for source in [s for _, s in self.symbols] + [s for s, _ in self.facts]
            for place, kind, dim in [_place(source)]
        }
        loads = sorted(set(places.values()))  # reads of one tensor are adjacent
        program = _Program({symbol: loads.index(places[source]) for symbol, source in self.symbols})
        for symbol, _ in self.symbols:
            lo, hi = self.bounds.get(symbol, (-INFINITY, INFINITY))
            if lo > -INFINITY:
                program.emit("number", lo, "load", program.places[symbol], "ordered")
            if hi < INFINITY:
                program.emit("load", program.places[symbol], "number", hi, "ordered")
        for source, expr in self.facts:
            program.emit("load", loads.index(places[source]))
            program.expression(expr)
            program.emit("same")
        for guard in self.assumed:
            program.expression(guard.expr)
            program.emit(guard.kind)
        return tuple(loads), tuple(program.code)


def _place(source: Source) -> tuple[Source, int, int]:
    """(the operand, 0: an integer, 1: a tensor's size, 2: its stride, the dimension)."""
    if type(source) in (SizeOf, StrideOf) and source.base is not None:
        return source.base, 1 if type(source) is SizeOf else 2, source.key
    return source, 0, 0


_CODES = {
    name: i
    for i, name in enumerate(
        ("number", "load", "add", "mul", "floordiv", "mod", "min", "max", "same", "ordered", ">=", "==", "!=")
    )
}


class _Program:
    """Postfix code over 64-bit integers: an operation, and for `number` and `load` its operand."""

    def __init__(self, places: Mapping[Symbol, int]) -> None:
        self.places = places
        self.code: list[int] = []

    def emit(self, *words: str | int) -> None:
        """Add operations (by name) and operands."""
        self.code.extend([_CODES[word] if isinstance(word, str) else word for word in words])

    def expression(self, expr: Size) -> None:
        """Push the value."""
        for i, (monomial, c) in enumerate(expr.terms.items() or [((), 0)]):
            constant = c != 1 or not monomial
            if constant:
                self.emit("number", c)
            for atom in monomial:
                self._atom(atom)
            self.emit(*["mul"] * (constant + len(monomial) - 1))
            if i:
                self.emit("add")

    def _atom(self, atom: Atom) -> None:
        if type(atom) is Symbol:
            self.emit("load", self.places[atom])
        else:
            self.expression(atom.a)
            self.expression(atom.b)
            self.emit(atom.kind)


# Marks ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class DimRange:
    """The values that a dimension marked dynamic may have; None: no bound."""

    dim: int
    min: int | None
    max: int | None


def mark_dynamic(
    tensor: torch.Tensor, dim: int | Sequence[int], *, min: int | None = None, max: int | None = None
) -> None:
    """Make a dimension, or several, a symbol from the first call on; `min` and `max`: the sizes that one program
    must serve.

    Sizes 0 and 1 are programs of their own. Where the program needs the number itself the dimension is
    specialised all the same, and `explain` says why. Raises IndexError for a dimension out of range.
    """
    UsageError.when(
        min is not None and max is not None and min > max,
        "DM144",
        f"mark_dynamic(min={min}, max={max}) admits no size",
        cure="pass a min that is at most max",
    )
    for n in _checked(tensor, dim):
        tensor.__dict__.setdefault("_dynamo_dynamic_indices", set()).add(n)
        tensor.__dict__.setdefault("_dynamo_dynamic_range", set()).add(DimRange(n, min, max))


def mark_static(tensor: torch.Tensor, dim: int | Sequence[int] | None = None) -> None:
    """Keep a dimension, several or all, numbers: every size is a program of its own; dimensions that are marked
    dynamic, too, stay dynamic. Raises IndexError as `mark_dynamic`.
    """
    dims = range(tensor.dim()) if dim is None else _checked(tensor, dim)
    tensor.__dict__.setdefault("_dynamo_static_indices", set()).update(dims)


def _checked(tensor: torch.Tensor, dim: int | Sequence[int]) -> list[int]:
    """The dimensions, counted from the first one."""
    dims = list(dim) if isinstance(dim, Sequence) else [dim]
    UsageError.when(
        not isinstance(tensor, torch.Tensor) or any(type(n) is not int for n in dims),
        "DM144",
        f"a mark of dimension {dim!r} of a {type(tensor).__name__}",
        cure="pass a tensor, and a dimension or a list of dimensions",
    )
    for n in dims:
        if not -tensor.dim() <= n < tensor.dim():
            raise IndexError(f"dimension {n} of a tensor with {tensor.dim()} dimensions")
    return [n % tensor.dim() for n in dims]


_DYNAMIC = "dynamic", "weak_dynamic", "propagated_dynamic", "unbacked", "strict_unbacked"


@dataclass(frozen=True)
class Marks:
    """The marks of a tensor, under the names that `torch._dynamo` gives them. A dimension that is marked dynamic
    and static is dynamic, as there; one that is marked unbacked is dynamic."""

    static: frozenset[int]
    dynamic: frozenset[int]
    ranges: Mapping[int, tuple[int, int]]

    @staticmethod
    def of(tensor: torch.Tensor) -> Marks:
        """The marks on a tensor."""
        own, n = tensor.__dict__, tensor.dim()
        ranges = {
            r.dim % n: (max(r.min or 2, 2), r.max or INFINITY) for r in own.get("_dynamo_dynamic_range", ())
        }
        dynamic, static = (
            frozenset(d % n for kind in kinds for d in own.get(f"_dynamo_{kind}_indices", ()) if -n <= d < n)
            for kinds in (_DYNAMIC, ("static",))
        )
        return Marks(static - dynamic, dynamic, ranges)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.static, self.dynamic))

    def of_dim(self, dim: int) -> bool | tuple[int, int] | None:
        """False: static; the range of a dynamic dimension; None: not marked."""
        if dim in self.static:
            return False
        return self.ranges.get(dim, (2, INFINITY)) if dim in self.dynamic else None
