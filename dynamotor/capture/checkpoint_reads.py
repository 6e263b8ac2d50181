"""Python state that a checkpointed function reads: PyTorch calls the function again in the backward, where it finds
the state of then; a compiled graph computes with the values of the forward. So the backward of a graph with a
checkpoint asks first whether all that the function read is still the same, and raises DM252 where it is not.

>>> reads = CheckpointReads(trace)
>>> with reads.inside(pending=False): ...          # interpret the function
>>> finish = reads.watched(finish)    # outputs with a gradient get the question as a hook
"""

from __future__ import annotations

import contextlib
import itertools
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..base.errors import CaptureError
from .breaks import unsupported_if
from .dispatch import compile_program
from .guards import Guard, IdIs, TensorIs, TensorMatch, Together, const_equal, first_failure, is_constant
from .late_code import facts
from .source import Arg, Attr, Called, Const, Source
from .values.base import MISSING, Epoch, Trace, Value
from .values.constant import Constant
from .values.function import CellValue
from .values.number import FloatValue
from .values.size import SizeValue
from .values.tensor import TensorValue

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, torch.nn.Module)
_SETTINGS = ("requires_grad", "grad", "_version", "grad_fn", "is_leaf")


class CheckpointReads:
    """Collects the sources of the values that the instructions of checkpointed functions give."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.active = self.pending = False
        self.begun = 0  # the epoch in which the outermost of these functions began
        self.sources: dict[Source, Any] = {}  # with the objects that they lead to, where those are held
        self.guards: dict[Guard, None] = {}
        self.used: set[fx.Node] = set()  # nodes that the functions' own nodes take

    @contextlib.contextmanager
    def inside(self, pending: bool) -> Generator[None, None, None]:
        """While a checkpointed function is interpreted. `pending`: outside objects have been changed before."""
        before, self.active = self.active, True
        self.begun = self.begun if before else Epoch.now
        self.pending = self.pending or pending
        known, nodes = len(self.trace.reader.guards), len(self.trace.graph.graph.nodes)
        try:
            yield
        finally:
            self.active = before
            made = itertools.islice(self.trace.graph.graph.nodes, nodes, None)
            self.used.update(*(node.all_input_nodes for node in made))
            new = list(self.trace.reader.guards)[known:]
            self.guards.update((row, None) for row in new if isinstance(row, Guard) and _is_state(row))

    def note(self, frame: Any, instr: Any, owner: Any) -> None:
        """An instruction of a checkpointed function has run; `owner`: the object whose value it took."""
        if instr.op == "LOAD_ATTR" and instr.argval == "requires_grad" and isinstance(owner, TensorValue):
            if owner.source is not None and owner.obj is not MISSING and not isinstance(owner.source, Arg):
                self.sources[Attr(owner.source, "requires_grad")] = MISSING
        top = [value for value in frame.stack[-2:] if isinstance(value, Value)]
        if not top:
            return
        value = top[-1]
        if value.source is None:
            return self._check_made(frame, instr, owner, value)
        numbers = isinstance(value, Constant | FloatValue | SizeValue)
        made_anew = isinstance(value.source, Attr | Called) and not numbers
        if not isinstance(value.source, Arg | Const) and not made_anew:
            self.sources[value.source] = getattr(value, "obj", MISSING)

    def _check_made(self, frame: Any, instr: Any, owner: Any, value: Value) -> None:
        """A value that the trace made: no source says where the function will find it later."""
        if instr.op == "LOAD_DEREF":
            cell = frame.fast[instr.arg]
            pending = isinstance(cell, CellValue) and not cell.settled and cell.obj is MISSING
            pending = pending and instr.argval in frame.code.co_freevars and cell.born < self.begun
        else:
            outside = instr.op == "LOAD_GLOBAL" or isinstance(owner, Value) and owner.source is not None
            numbers = isinstance(value, Constant | FloatValue | SizeValue)
            pending = outside and numbers and not isinstance(owner, TensorValue)
            pending = pending and self.pending
        unsupported_if(
            pending,
            "autograd",
            "a checkpointed function reads an object that was changed before",
            "its recomputation may find something else",
            "pass the value as an argument",
        )

    def watched(self, finish: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The same `finish` of an entry, whose graph's backward first asks whether the reads are as they were."""
        within = {s for s, obj in self.sources.items() if obj is not MISSING and not isinstance(obj, _CODE)}
        for row in self.trace.reader.guards:
            if isinstance(row, Guard) and any(s.leads_through(within) for s in row.sources):
                self.guards.setdefault(row)
        outside = {v.node: v for v in self.trace.tensors.outside if v.in_graph}
        used = [node for node in self.used if node.op == "placeholder"]
        tensors = [
            v.source
            for v in map(outside.get, used)
            if v is not None and v.source is not None and not v.written
        ]
        inputs = dict(zip(self.trace.graph.graph.find_nodes(op="placeholder"), self.trace.graph.inputs))
        numbers = [inputs[node] for node in used if node not in outside and node in inputs]
        self.sources.update((source, MISSING) for source in numbers)
        if not self.sources and not self.guards and not tensors:
            return finish
        state = _State([row for row in self.guards if row in self.trace.reader.guards], self.sources)
        contents = _Contents(tensors)

        def run(outs: Any, args: tuple[Any, ...]) -> Any:
            nodes = {out.grad_fn for out in outs if isinstance(out, torch.Tensor) and out.grad_fn is not None}
            if nodes:
                for question in (state.question(args), contents.question(args)):
                    for node in nodes:
                        node.register_prehook(question)
            return finish(outs, args)

        return run


def _is_state(row: Guard) -> bool:
    """Whether a fact is one of Python's objects, not of a tensor."""
    return all(s.key not in _SETTINGS for s in row.sources if isinstance(s.key, str))


class _Weak(weakref.ref):
    """A reference of this module's; programs have references of their own."""


def _facts(value: Any) -> Any:
    return facts(value) if type(value) is types.FunctionType else None


class _State:
    """The reads as one guard program over their roots. What may be held weakly is: a hook on a graph that a model
    keeps must not keep the model.
    """

    def __init__(self, guards: Iterable[Guard], sources: Iterable[Source]) -> None:
        rows = [row for row in guards if not isinstance(row, Together)]
        objects = [row.source for row in rows if isinstance(row, IdIs | TensorIs)]
        self.rows = [row for row in rows if not isinstance(row, IdIs | TensorIs | TensorMatch)]
        self.sources = list(dict.fromkeys((*sources, *objects)))
        roots = list(dict.fromkeys([s.root for s in (*(r.source for r in self.rows), *self.sources)]))
        places: dict[Source, Source] = {root: Arg(i, str(root)) for i, root in enumerate(roots)}
        self.rows = [replace(row, source=_moved(row.source, places)) for row in self.rows]
        self.sources = [_moved(source, places) for source in self.sources]
        self.program = compile_program(self.rows, self.sources)
        self.weak: list[bool] = []
        self.held = [None if isinstance(root, Arg) else _held(root.fetch(())) for root in roots]
        self.of_call = [root if isinstance(root, Arg) else None for root in roots]

    def question(self, args: tuple[Any, ...]) -> Callable[[Any], None]:
        """The questions of a backward of the call with these arguments."""
        given = [None if root is None else root.fetch(args) for root in self.of_call]
        roots = [
            held if root is None else value if isinstance(value, torch.Tensor) else _held(value)
            for root, held, value in zip(self.of_call, self.held, given)
        ]  # nothing else may hold a tensor that is given
        values = self._values(roots)
        then, known = self._kept(values or ()), values is not None
        known_facts = list(map(_facts, values or ()))
        del values  # some are held weakly

        def ask(gradients: Any) -> None:
            if not known or any(map(_is_gone, roots)):  # a freed object cannot have been changed
                return
            now = self._values(roots)
            if now is None:
                failed = first_failure(tuple(self.rows), tuple(map(_real, roots)))
                raise _changed("something" if failed is None else failed.reason(tuple(map(_real, roots))))
            before = [value() if weak else value for value, weak in zip(then, self.weak)]
            for source, old, new, fact in zip(self.sources, before, now, known_facts):
                if old is not new and not (is_constant(old) and const_equal(new, old)):
                    raise _changed(f"{source} is another object, or has another value")
                if fact is not None and fact != _facts(new):
                    raise _changed(f"{source} has other code, or other defaults")

        return ask

    def _kept(self, values: Sequence[Any]) -> list[Any]:
        """The values, those weakly that `weak` says: it is of the first call, whose types the guards repeat."""
        if len(self.weak) != len(values):
            self.weak = [isinstance(_held(value), _Weak) for value in values]
        return [_Weak(value) if weak else value for value, weak in zip(values, self.weak)]

    def _values(self, roots: Sequence[Any]) -> tuple[Any, ...] | None:
        """The sources' present values; None where a fact does not hold."""
        return self.program.check(tuple(map(_real, roots)))


class _Contents:
    """Tensors from outside that the function reads and the graph does not write: their contents are to stay."""

    def __init__(self, sources: Sequence[Source]) -> None:
        roots = list(dict.fromkeys(source.root for source in sources))
        places: dict[Source, Source] = {root: Arg(i, str(root)) for i, root in enumerate(roots)}
        self.names = [str(source) for source in sources]
        self.program = compile_program([], [_moved(source, places) for source in sources])
        self.of_call = [root if isinstance(root, Arg) else None for root in roots]
        self.held = [None if isinstance(root, Arg) else _held(root.fetch(())) for root in roots]

    def question(self, args: tuple[Any, ...]) -> Callable[[Any], None]:
        """The question of a backward of the call with these arguments."""
        roots = [
            _real(held) if root is None else root.fetch(args) for root, held in zip(self.of_call, self.held)
        ]
        tensors = self.program.check(tuple(roots)) or ()
        then = [(weakref.ref(t), None if t.is_inference() else t._version) for t in tensors]

        def ask(gradients: Any) -> None:
            for (held, version), name in zip(then, self.names):
                tensor = held()
                if tensor is not None and version is not None and tensor._version != version:
                    raise _changed(f"{name} was written in place")

        return ask


def _changed(what: str) -> CaptureError:
    return CaptureError(
        "DM252",
        f"the state that a checkpointed function reads changed before the backward: {what}",
        why="eager PyTorch calls the function again in the backward; the compiled backward has the value of the forward",
        cure="pass it as an argument of the checkpoint, or use dynamotor.disable on the function that calls it",
    )


def _moved(source: Source, places: Mapping[Source, Source]) -> Source:
    """The source with another root."""
    if source.base is None:
        return places[source]
    new = type(source).__new__(type(source))
    Source.__init__(new, _moved(source.base, places), source.key)
    return new


def _held(value: Any) -> Any:
    """The value, weakly where Python can."""
    weak = isinstance(value, torch.nn.Module | torch.Tensor | types.FunctionType) or _is_plain(value)
    return _Weak(value) if weak else value


def _is_plain(value: Any) -> bool:
    return bool(type(value).__flags__ & _HEAP_TYPE) and type(value).__weakrefoffset__ > 0


def _real(held: Any) -> Any:
    return held() if isinstance(held, _Weak) else held


def _is_gone(held: Any) -> bool:
    return isinstance(held, _Weak) and held() is None
