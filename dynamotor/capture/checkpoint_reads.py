"""State that a captured function reads and that PyTorch reads a second time when it calls the function again.

PyTorch calls a checkpointed function again in the backward; a compiled graph computes with the values of the forward.
So the backward first asks whether all that the function read is still the same, and raises DM252 where it is not. The
other way round, a second derivative runs the forward of an `autograd.Function` again, which eager does not: DM270.

>>> reads = StateReads(trace, CHECKPOINT)
>>> with reads.inside(pending=False): ...          # interpret the function
>>> finish = reads.watched(finish, outputs)        # outputs with a gradient get the question as a hook
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..base.compat import is_batched
from ..base.errors import CaptureError
from ..graph.shape_tensor import ShapeTensor
from .breaks import unsupported_if
from .dispatch import compile_program
from .guards import (
    Guard,
    IdIs,
    TensorIs,
    TensorMatch,
    Together,
    TypeIs,
    const_equal,
    first_failure,
    is_constant,
)
from .late_code import facts
from .source import Arg, Attr, Called, Const, Joined, Source
from .values.base import MISSING, Epoch, Trace, Value
from .values.constant import Constant
from .values.function import CellValue
from .values.number import FloatValue
from .values.size import SizeValue
from .values.tensor import TensorValue, version

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, torch.nn.Module)
_SETTINGS = ("requires_grad", "grad", "_version", "grad_fn", "is_leaf")
_CONTAINERS = (dict, list, set, tuple, collections.deque)


@dataclass(frozen=True)
class SecondCall:
    """When a function is called again, and the error where the state that it reads has changed.

    asks: whether a backward with these gradients calls it. tensors: whether the second call sees new contents of tensors.
    """

    code: str
    what: str
    why: str
    cure: str
    asks: Callable[[Sequence[Any]], bool]
    tensors: bool

    def changed(self, what: str) -> CaptureError:
        """The error that names what changed."""
        return CaptureError(self.code, f"{self.what}: {what}", why=self.why, cure=self.cure)


CHECKPOINT = SecondCall(
    "DM252",
    "the state that a checkpointed function reads changed before the backward",
    "eager PyTorch calls the function again in the backward; the compiled backward has the value of the forward",
    "pass it as an argument of the checkpoint, or use dynamotor.disable on the function that calls it",
    asks=lambda gradients: True,
    tensors=True,
)
FUNCTION = SecondCall(
    "DM270",
    "the state that the forward of an autograd function reads changed before a second derivative",
    "a compiled graph runs the forward again for a second derivative; eager keeps the value of the forward",
    "pass it as an argument of the function, or use dynamotor.disable on the function that applies it",
    asks=lambda gradients: torch.is_grad_enabled() or any(g is not None and is_batched(g) for g in gradients),
    tensors=False,
)


class StateReads:
    """Collects the sources of the values that the instructions of such functions give."""

    def __init__(self, trace: Trace, again: SecondCall) -> None:
        self.trace, self.again = trace, again
        self.active = self.pending = False
        self.begun = 0  # the epoch in which the outermost of these functions began
        self.sources: dict[Source, Any] = {}  # with the objects that they lead to, where those are held
        self.through: set[Source] = set()  # of containers and the like: the guards of what they hold count
        self.guards: dict[Guard, None] = {}
        self.used: set[fx.Node] = set()  # nodes that the functions' own nodes take
        self.versions: dict[TensorValue, Any] = {}  # of these nodes' tensors, when a function had ended

    @contextlib.contextmanager
    def inside(self, pending: bool) -> Generator[None, None, None]:
        """While a checkpointed function is interpreted. `pending`: outside objects have been changed before."""
        before, self.active = self.active, True
        self.trace.reader.watchers.append(self.meet)
        self.begun = self.begun if before else Epoch.now
        self.pending = self.pending or pending
        last = next(iter(reversed(self.trace.graph.graph.nodes)), None)
        try:
            yield
        finally:
            self.active = before
            self.trace.reader.watchers.remove(self.meet)
            made = itertools.takewhile(lambda node: node is not last, reversed(self.trace.graph.graph.nodes))
            self.used.update(*(node.all_input_nodes for node in made))
            for value in self._used_tensors():
                self.versions.setdefault(value, version(value.example))

    def _used_tensors(self) -> list[TensorValue]:
        """The tensors that the functions take from around them."""
        return [v for v in self.trace.tensors.by_example.values() if v.in_graph and v.node in self.used]

    def rewritten(self) -> bool:
        """Whether the graph writes a tensor after a function has read it: the next call finds the new contents."""
        return self.again.tensors and any(version(v.example) != then for v, then in self.versions.items())

    def meet(self, row: Any) -> None:
        """Keep a fact that the function asks for, whether the trace knew it before or not."""
        if isinstance(row, Guard) and _is_state(row):
            self.guards.setdefault(row)

    def note(self, frame: Any, instr: Any, owner: Any) -> None:
        """An instruction of a checkpointed function has run; `owner`: the object whose value it took."""
        if instr.op == "LOAD_ATTR" and instr.argval == "requires_grad" and isinstance(owner, TensorValue):
            if owner.source is not None and owner.obj is not MISSING and not isinstance(owner.source, Arg):
                self.sources[Attr(owner.source, "requires_grad")] = MISSING
        top = [value for value in frame.stack[-2:] if isinstance(value, Value)]
        if not top:
            return
        value = top[-1]
        obj = getattr(value, "obj", MISSING)
        if value.source is None:
            return self._check_made(frame, instr, owner, value)
        if isinstance(value.source, Called) or isinstance(obj, _CONTAINERS):
            self._lead_through(value)
        held = self.trace.reader.values.get(id(getattr(obj, "__self__", None)))
        if isinstance(obj, types.BuiltinMethodType) and held is not None:
            self._lead_through(held)  # `table.get`, kept under a name
        numbers = isinstance(value, Constant | FloatValue | SizeValue)
        made_anew = isinstance(value.source, Attr | Called) and not numbers
        if instr.op != "LOAD_FAST" and not isinstance(value.source, Arg | Const) and not made_anew:
            self.sources[value.source] = obj

    def _lead_through(self, held: Value) -> None:
        """The guards of an object's contents are of reads of a function."""
        self._refuse_pending(self.again.tensors and held in self.trace.effects.touches)
        if held.source is not None:
            self.through.add(held.source)

    def _check_made(self, frame: Any, instr: Any, owner: Any, value: Value) -> None:
        """A value that the trace made: no source says where the function will find it later."""
        if instr.op in ("LOAD_FAST", "CALL", "CALL_FUNCTION_EX") or not self.again.tensors:
            return
        if instr.op == "LOAD_DEREF":
            cell = frame.fast[instr.arg]
            pending = isinstance(cell, CellValue) and not cell.settled and cell.obj is MISSING
            pending = pending and instr.argval in frame.code.co_freevars and cell.born < self.begun
        else:
            outside = instr.op == "LOAD_GLOBAL" or isinstance(owner, Value) and owner.source is not None
            numbers = isinstance(value, Constant | FloatValue | SizeValue)
            pending = outside and numbers and not isinstance(owner, TensorValue)
            pending = pending and self.pending
        self._refuse_pending(pending)

    def _refuse_pending(self, pending: bool) -> None:
        unsupported_if(
            pending,
            "autograd",
            "a checkpointed function reads an object that was changed before",
            "its recomputation may find something else",
            "pass the value as an argument",
        )

    def watched(
        self, finish: Callable[[Any, Any], Any], outputs: Sequence[fx.Node]
    ) -> Callable[[Any, Any], Any]:
        """The same `finish` of an entry, whose graph's backward first asks whether the reads are as they were.
        `outputs`: the graph's."""
        within = {s for s, obj in self.sources.items() if obj is not MISSING and not isinstance(obj, _CODE)}
        within |= self.through
        for row in self.trace.reader.guards if within else ():
            if isinstance(row, Guard) and any(s.leads_through(within) for s in row.sources):
                self.guards.setdefault(row)
        numbers = self._numbers()
        self.sources.update((source, MISSING) for source in numbers)
        tensors, places = self._tensors(outputs) if self.again.tensors else ([], [])
        if not self.sources and not self.guards and not tensors and not places:
            return finish
        state = _State(
            [row for row in self.guards if row in self.trace.reader.guards], self.sources, self.again
        )
        contents = _Contents(tensors, places, self.again)

        def run(outs: Any, args: tuple[Any, ...]) -> Any:
            nodes = {out.grad_fn for out in outs if isinstance(out, torch.Tensor) and out.grad_fn is not None}
            if nodes:
                for question in (state.question(args), contents.question(args, outs)):
                    for node in nodes:
                        node.register_prehook(question)
            return finish(outs, args)

        return run

    def _numbers(self) -> list[Source]:
        """Inputs of the graph that are no tensors and that the functions use; and the integers that the functions
        read of which the trace has assumed that they equal such an input, or a number.
        """
        outside = {v.node for v in self.trace.tensors.outside if v.in_graph}
        inputs = dict(zip(self.trace.graph.graph.find_nodes(op="placeholder"), self.trace.graph.inputs))
        found = [source for node, source in inputs.items() if node in self.used and node not in outside]
        sources, fixed = self.trace.sizes.sources, self.trace.sizes.env.fixed
        used = {symbol for symbol, source in sources.items() if source in found}
        read = {row.source for row in self.guards if isinstance(row, TypeIs)}
        equal = [symbol for symbol, size in fixed.items() if isinstance(size, int) or size.symbols & used]
        return [*found, *(sources[symbol] for symbol in equal if sources.get(symbol) in read)]

    def _tensors(self, outputs: Sequence[fx.Node]) -> tuple[list[Source], list[int]]:
        """Tensors from outside, and the places of outputs, whose contents the functions read."""
        used = self._used_tensors()
        outside = [v.source for v in used if v.obj is not MISSING and v.source is not None]
        memories = {id(v.example.memory) for v in used if type(v.example) is ShapeTensor}
        shared = {
            v.node
            for v in self.trace.tensors.by_example.values()
            if v.in_graph and type(v.example) is ShapeTensor and id(v.example.memory) in memories
        }
        return outside, [k for k, node in enumerate(outputs) if node in shared]


def _is_state(row: Guard) -> bool:
    """Whether a fact is one of Python's objects, not of a tensor."""
    return all(s.key not in _SETTINGS for s in row.sources if isinstance(s.key, str))


class _Weak(weakref.ref[Any]):
    """A reference of this module's; programs have references of their own."""


def _facts(value: Any) -> Any:
    return facts(value) if type(value) is types.FunctionType else None


class _State:
    """The reads as one guard program over their roots. What may be held weakly is: a hook on a graph that a model
    keeps must not keep the model.
    """

    def __init__(self, guards: Iterable[Guard], sources: Iterable[Source], again: SecondCall) -> None:
        self.again = again
        rows = [row for row in guards if not isinstance(row, Together)]
        objects = [row.source for row in rows if isinstance(row, IdIs | TensorIs)]
        self.rows = [row for row in rows if not isinstance(row, IdIs | TensorIs | TensorMatch)]
        self.sources = list(dict.fromkeys((*sources, *objects)))
        sources = [*(row.source for row in self.rows), *self.sources]
        roots = list(dict.fromkeys([root for source in sources for root in source.roots]))
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
            if (
                not known or not self.again.asks(gradients) or any(map(_is_gone, roots))
            ):  # a freed object cannot have been changed
                return
            now = self._values(roots)
            if now is None:
                failed = first_failure(tuple(self.rows), tuple(map(_real, roots)))
                raise self.again.changed(
                    "something" if failed is None else failed.reason(tuple(map(_real, roots)))
                )
            before = [value() if weak else value for value, weak in zip(then, self.weak)]
            for source, old, new, fact in zip(self.sources, before, now, known_facts):
                if old is not new and not (is_constant(old) and const_equal(new, old)):
                    raise self.again.changed(f"{source} is another object, or has another value")
                if fact is not None and fact != _facts(new):
                    raise self.again.changed(f"{source} has other code, or other defaults")

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
    """Tensors from outside, and outputs of the graph, that the function reads: their contents are to stay."""

    def __init__(self, sources: Sequence[Source], places: Sequence[int], again: SecondCall) -> None:
        self.places, self.again = places, again
        roots = list(dict.fromkeys(root for source in sources for root in source.roots))
        arguments: dict[Source, Source] = {root: Arg(i, str(root)) for i, root in enumerate(roots)}
        self.names = [str(source) for source in sources]
        self.program = compile_program([], [_moved(source, arguments) for source in sources])
        self.of_call = [root if isinstance(root, Arg) else None for root in roots]
        self.held = [None if isinstance(root, Arg) else _held(root.fetch(())) for root in roots]

    def question(self, args: tuple[Any, ...], outs: Sequence[Any]) -> Callable[[Any], None]:
        """The question of a backward of the call with these arguments and outputs."""
        roots = [
            _real(held) if root is None else root.fetch(args) for root, held in zip(self.of_call, self.held)
        ]
        tensors = [*(self.program.check(tuple(roots)) or ()), *[outs[k] for k in self.places]]
        names = [*self.names, *["a result" for _ in self.places]]
        then = [(_counter_of(t), None if t.is_inference() else t._version) for t in tensors]

        def ask(gradients: Any) -> None:
            for (held, known), name in zip(then, names):
                tensor = held()
                if tensor is not None and known is not None and tensor._version != known:
                    raise self.again.changed(f"{name} was written in place")

        return ask


def _counter_of(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """A tensor with the same version counter, as long as it can change. Eager's checkpoint holds its tensors, too; an
    alias without history, since a hook of a graph must not hold the graph's results. A model is not held.
    """
    if isinstance(tensor, torch.nn.Parameter):
        return weakref.ref(tensor)
    alias = tensor.detach()
    return lambda: alias


def _moved(source: Source, places: Mapping[Source, Source]) -> Source:
    """The source with another root."""
    if type(source) is Joined:
        return Joined(tuple([_moved(part, places) for part in source.key]))
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
