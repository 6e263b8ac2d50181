"""From guard rows and input sources to what C runs at each call: the guard program, entries, reasons for a
miss.

>>> program = compile_program([TypeIs(Arg(0, "x"), int)], inputs=[Arg(0, "x")])
>>> program.check((3,)), program.check(("3",))
((3,), None)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynamotor import _C

from .guards import Ambient, AnyGuard, Guard, IdIs, TypeIs, first_failure
from .source import Arg, Called, Const, InstanceDict, Joined, Missing, Source

ALL_ARGS = Arg(-1, "all arguments")  # the tuple of them
_NONE: Mapping[int, Any] = {}
KEPT_ARG = "kept_arg"  # the step to an argument that a program is bound to
MANY = 64  # sources on one argument from which on a program is bound to it; a walk costs 20 ns a source, with cold caches 100
_RELATIONS = frozenset({"same", "distinct", "no_overlap", "apart", "sizes"})


class _Nodes:
    """Numbers the sources of a program, parents before children.

    What hangs on an object whose identity is guarded hangs on that object: a walk from an argument, repeated at
    each call, becomes nodes that are bound once.
    """

    def __init__(self, guards: Sequence[Guard], bound: Mapping[int, Any]) -> None:
        self.bound = bound
        self.objects = {g.source: g.obj for g in guards if type(g) is IdIs}
        self.steps: list[tuple[str, int, Any]] = []  # (kind of step, number of the parent, key)
        self.roots: list[int] = []  # of each step the number of the one that it begins at
        self.with_dict: dict[int, Any] = {}  # held objects whose `__dict__` is read, by number
        self._numbers: dict[Source, int] = {}

    def number(self, source: Source) -> int:
        """The number of a source; it and everything on its way become part of the program."""
        found = self._numbers.get(source)
        if found is None:
            found = self._numbers[source] = self._add(source)
        return found

    def _add(self, source: Source) -> int:
        base = source.base
        if type(source) is Joined:
            return self._append(Called(ALL_ARGS, self._joined(source)), self.number(ALL_ARGS))
        if type(source) is Arg and source.index in self.bound:
            return self.number(Const(self.bound[source.index], str(source)))
        if base is None:
            return self._append(source, -1)
        parent = self.number(base)
        if base in self.objects:
            parent = self.number(Const(self.objects[base], str(base)))
        if type(source) is InstanceDict and self.steps[parent][0] == Const.step_kind:
            self.with_dict[parent] = self.steps[parent][2]
        return self._append(source, parent)

    def _joined(self, source: Joined) -> Callable[[tuple[Any, ...]], Any]:
        """The tuple of a joined source's values, from the arguments of a call."""
        if not self.bound:
            return source.fetch
        last, bound = max(self.bound), self.bound

        def fetch(args: tuple[Any, ...]) -> Any:
            missing = range(len(args), last + 1)
            return source.fetch((*args, *[bound.get(i) for i in missing]))

        return fetch

    def _append(self, source: Source, parent: int) -> int:
        number = len(self.steps)
        self.steps.append((source.step_kind, parent, source.key))
        self.roots.append(number if parent < 0 else self.roots[parent])
        return number

    def placed(self, kept: frozenset[int]) -> list[int]:
        """For each number the place in the program: those on arguments first, then those on held objects, beginning
        with the arguments that are kept.
        """
        held = {number for number in self.roots if number in kept or self.steps[number][0] == Const.step_kind}
        order = sorted(range(len(self.roots)), key=lambda n: (self.roots[n] in held, n not in kept))
        places = [0] * len(order)
        for place, number in enumerate(order):
            places[number] = place
        return places


def compile_program(
    guards: Iterable[AnyGuard], inputs: Sequence[Source], bound: Mapping[int, Any] = _NONE
) -> _C.GuardProgram:
    """The guard program of an entry. `program.check(args)` gives the inputs' values when all guards hold,
    else None.

    `guards`: rows in any order, at most one `Ambient`. `inputs`: the compiled callable's arguments. `bound`:
    arguments that no call has, by their numbers.
    """
    rows = list(dict.fromkeys(guards))
    ambient = next((row for row in rows if isinstance(row, Ambient)), None)
    plain = [row for row in rows if isinstance(row, Guard)]
    nodes = _Nodes(plain, bound)
    read = [(row, nodes.number(row.sources[0])) for row in plain]
    for row in plain:
        for source in row.sources[1:]:
            nodes.number(source)
    taken = [nodes.number(source) for source in inputs]
    kept = _kept_args(nodes, plain)
    settled = [_program(nodes, read, taken, ambient, kept)] if kept else []
    return _program(nodes, read, taken, ambient, frozenset(), *settled)


def _kept_args(nodes: _Nodes, rows: Sequence[Guard]) -> frozenset[int]:
    """The numbers of the arguments that a program may be bound to: many sources hang on one, and its class allows
    weak references.
    """
    weak = {
        nodes.number(row.source)
        for row in rows
        if type(row) is TypeIs
        and type(row.source) is Arg
        and row.source.index >= 0
        and row.source.index not in nodes.bound
        and row.cls.__weakrefoffset__
        and not issubclass(row.cls, torch.Tensor)
    }
    count = Counter(nodes.roots) if weak else {}  # most programs take tensors alone
    return frozenset(number for number in weak if count[number] > MANY)


def _program(
    nodes: _Nodes,
    rows: Sequence[tuple[Guard, int]],
    taken: Sequence[int],
    ambient: Ambient | None,
    kept: frozenset[int],
    *settled: _C.GuardProgram,
) -> _C.GuardProgram:
    """The program of rows, each with the number of its first source. kept: arguments that it is bound to."""
    places = nodes.placed(kept)
    steps: list[Any] = [None] * len(places)
    for number, (kind, parent, key) in enumerate(nodes.steps):
        step = KEPT_ARG if number in kept else kind
        steps[places[number]] = (step, places[parent] if parent >= 0 else -1, key)
    checks = _checks(nodes, rows, places)
    return _C.GuardProgram(steps, checks, [places[i] for i in taken], ambient, *settled)


def _checks(
    nodes: _Nodes, rows: Sequence[tuple[Guard, int]], places: Sequence[int]
) -> list[tuple[str, int, Any, Any]]:
    """The encoded checks: those of one node adjacent, cheap ones first; those that relate nodes last."""

    def node(source: Source) -> int:
        return places[nodes.number(source)]

    checks = [
        (
            (row.code in _RELATIONS, places[number], row.code != TypeIs.code),
            (row.code, places[number], row.encode(node), getattr(row, "check_value", None)),
        )
        for row, number in rows
    ]
    # `obj.__class__ = other` moves no dict, so the class of a held object whose `__dict__` is read is
    # checked.
    checks += [
        ((False, places[i], False), (TypeIs.code, places[i], type(obj), None))
        for i, obj in nodes.with_dict.items()
    ]
    return [check for _, check in sorted(checks, key=lambda pair: pair[0])]


@dataclass
class EntryInfo:
    """What Python keeps with an entry: its guards (for reasons), and anything a report may want."""

    guards: tuple[AnyGuard, ...]
    inputs: tuple[Source, ...]
    data: Any = None


def make_entry(
    guards: Iterable[AnyGuard],
    inputs: Sequence[Source],
    run: Callable[..., Any],
    finish: Callable[[Any, tuple[Any, ...]], Any] | None,
    n_positional: int,
    kwnames: tuple[str, ...] = (),
    data: Any = None,
) -> _C.Entry:
    """One compiled version of a function, for `Dispatcher.add`. `finish(outs, args)` makes the result, None:
    it is outs.
    """
    guards = tuple(guards)
    program = compile_program(guards, inputs)
    return _C.Entry(program, run, finish, n_positional, kwnames, EntryInfo(guards, tuple(inputs), data))


def miss_reason(entry: _C.Entry, args: tuple[Any, ...], n_positional: int, kwnames: tuple[str, ...]) -> str:
    """Why an entry does not serve a call with these flat arguments: the text of a recompilation message."""
    if entry.n_positional != n_positional or entry.kwnames != kwnames:
        return (
            f"the call has {n_positional} positional arguments and keywords {list(kwnames)}, "
            f"was {entry.n_positional} and {list(entry.kwnames)}"
        )
    failed = first_failure(entry.info.guards, args)
    if failed is not None:
        return failed.reason(args)
    for source in entry.info.inputs:
        try:
            source.fetch(args)
        except Missing:
            return f"{source} is gone"
    return "no guard fails now; the state moved while the call was looked at"


def arg_sources(names: Sequence[str], n_positional: int, kwnames: tuple[str, ...]) -> tuple[Arg, ...]:
    """Sources of a call's flat arguments; `names` are the parameters' names, as far as the positionals have
    one.
    """
    positional = [names[i] if i < len(names) else f"args[{i}]" for i in range(n_positional)]
    return tuple(Arg(i, name) for i, name in enumerate([*positional, *kwnames]))
