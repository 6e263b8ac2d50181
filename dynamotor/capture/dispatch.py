"""From guard rows and input sources to what C runs at each call: the guard program, entries, reasons for a miss.

>>> program = compile_program([TypeIs(Arg(0, "x"), int)], inputs=[Arg(0, "x")])
>>> program.check((3,)), program.check(("3",))
((3,), None)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dynamotor import _C

from .guards import Ambient, AnyGuard, Guard, IdIs, TensorMatch, TypeIs, first_failure
from .source import Arg, Const, InstanceDict, Missing, Source, TypeOf

_RELATIONS = frozenset({"same", "distinct", "no_overlap"})


class _Nodes:
    """Numbers the sources of a program: parents first, those on arguments before those on held objects."""

    def __init__(self, guards: Sequence[Guard]) -> None:
        self.classes = {g.source: g.cls for g in guards if type(g) in (TypeIs, TensorMatch)}  # type: ignore[attr-defined]
        self.objects = {g.source: g.obj for g in guards if type(g) is IdIs}  # type: ignore[attr-defined]
        self.order: dict[Source, None] = {}
        self._resolved: dict[Source, Source] = {}

    def resolve(self, source: Source) -> Source:
        """The same value by a path that needs fewer steps at each call, given the guards on the way.

        What hangs on an object whose identity is guarded hangs on that object; the class of a value whose class is
        guarded is that class. Both turn a walk from an argument into bound nodes.
        """
        found = self._resolved.get(source)
        if found is None:
            found = self._resolved[source] = self._resolve(source)
        return found

    def _resolve(self, source: Source) -> Source:
        if source.base is None:
            return source
        original, base = source.base, self.resolve(source.base)
        if original in self.objects:
            base = Const(self.objects[original], str(original))
        if type(source) is TypeOf and original in self.classes:
            return Const(self.classes[original], str(source))
        if base is source.base:
            return source
        clone = object.__new__(type(source))
        Source.__init__(clone, base, source.key)
        return clone

    def add(self, source: Source) -> Source:
        """Make the source and everything on its way part of the program; returns the resolved source."""
        source = self.resolve(source)
        if source not in self.order:
            if source.base is not None:
                self.add(source.base)
            self.order[source] = None
        return source

    def number(self) -> dict[Source, int]:
        """The final numbers."""
        held = [s for s in self.order if s.is_held]
        return {s: i for i, s in enumerate([s for s in self.order if not s.is_held] + held)}


def _class_guards(nodes: _Nodes) -> Iterable[Guard]:
    """The class of a held object whose `__dict__` is read: `obj.__class__ = other` moves no dict."""
    for source in nodes.order:
        if isinstance(source, InstanceDict) and isinstance(source.base, Const):
            yield TypeIs(source.base, type(source.base.obj))


def compile_program(guards: Iterable[AnyGuard], inputs: Sequence[Source]) -> _C.GuardProgram:
    """The guard program of an entry. `program.check(args)` gives the inputs' values when all guards hold, else None.

    `guards`: rows in any order, at most one `Ambient` (which must hold now). `inputs`: what the compiled callable takes.
    """
    rows = list(dict.fromkeys(guards))
    ambient = next((g.state for g in rows if isinstance(g, Ambient)), None)
    plain = [g for g in rows if isinstance(g, Guard)]
    nodes = _Nodes(plain)
    for row in plain:
        for source in row.sources:
            nodes.add(source)
    taken = [nodes.add(source) for source in inputs]
    plain += _class_guards(nodes)
    numbers = nodes.number()

    def node(source: Source) -> int:
        return numbers[nodes.resolve(source)]

    encoded_nodes = [(s.step_kind, -1 if s.base is None else numbers[s.base], s.key) for s in numbers]
    # Those of one node lie together, cheap ones first; those that relate nodes come last.
    checks = sorted((row.code in _RELATIONS, node(row.source), row.code != "type_is", i) for i, row in enumerate(plain))
    encoded_checks = [(plain[i].code, n, plain[i].encode(node), getattr(plain[i], "check_value", None))
                      for _, n, _, i in checks]
    return _C.GuardProgram(encoded_nodes, encoded_checks, [numbers[s] for s in taken], ambient)


@dataclass
class EntryInfo:
    """What Python keeps with an entry: its guards (for reasons), and anything a report may want."""

    guards: tuple[AnyGuard, ...]
    inputs: tuple[Source, ...]
    data: Any = None


def make_entry(guards: Iterable[AnyGuard], inputs: Sequence[Source], run: Callable[..., Any],
               finish: Callable[[Any, tuple[Any, ...]], Any] | None, n_positional: int, kwnames: tuple[str, ...] = (),
               data: Any = None) -> _C.Entry:
    """One compiled version of a function, for `Dispatcher.add`. `finish(outs, args)` makes the result, None: it is outs."""
    guards = tuple(dict.fromkeys(guards))
    program = compile_program(guards, inputs)
    return _C.Entry(program, run, finish, n_positional, kwnames, EntryInfo(guards, tuple(inputs), data))


def miss_reason(entry: _C.Entry, args: tuple[Any, ...], n_positional: int, kwnames: tuple[str, ...]) -> str:
    """Why an entry does not serve a call with these flat arguments: the text of a recompilation message."""
    if entry.n_positional != n_positional or entry.kwnames != kwnames:
        return (f"the call has {n_positional} positional arguments and keywords {list(kwnames)}, "
                f"was {entry.n_positional} and {list(entry.kwnames)}")
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
    """Sources of a call's flat arguments; `names` are the parameters' names, as far as the positionals have one."""
    positional = [names[i] if i < len(names) else f"args[{i}]" for i in range(n_positional)]
    return tuple(Arg(i, name) for i, name in enumerate([*positional, *kwnames]))
