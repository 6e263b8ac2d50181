"""Emits the Python that follows the graph: it turns the graph's outputs into the user's results, and redoes side
effects.

>>> def finish(outs, args):
...     v0 = {}
...     v0['loss'] = outs[0]
...     return v0
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from .. import _C
from ..graph.sizes import Size, settled
from .breaks import unsupported, unsupported_if
from .source import Arg, Const, SizeOf, Source, StrideOf
from .values.base import Trace, Value
from .values.constant import Constant
from .values.lazy_text import LateText, OutsideText
from .values.number import FloatValue
from .values.size import ConditionValue, QuotientValue, SizeValue
from .values.torch_function import HeldNumber

_READS = re.compile(r"v\d+ = (outs|args)\[\d+\]|\w+ = lambda: .*")
_FIRST = "def finish(outs, args):\n    v0 = outs[0]\n    return v0\n"  # of most functions
_NAMED = (
    "def finish(outs, args):\n    v0 = outs[0]\n    v1 = outs[1]\n    v2 = {}((v0, v1, ))\n    return v2\n"
)
_INLINE = (int, str, bool, bytes, type(None), type(Ellipsis))


class ResultEmitter:
    """Emits the statements of `finish`; each value is emitted once and has a name from then on."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.prologue: list[str] = []
        self.lines: list[str] = []
        self.names: dict[int, str] = {}
        self.unfilled: set[int] = set()  # cells that are made and have no contents yet, by id
        self.for_frame = (
            False  # iterators are for the stack of a frame, where only a resumed capture reads them
        )
        self.return_type: type | None = None  # the last one that was emitted (of `max(dim)`, `sort`, ...)
        self.constants: dict[str, Any] = {}
        self.outputs: list[Any] = []  # fx nodes, in the order of `outs`
        self._constant_names: dict[int, str] = {}
        self._fresh = itertools.count()
        self._out_index: dict[Any, int] = {}
        self._kept: list[Any] = []
        self._replayed: set[int] = set()

    # For `Value.reconstruct` --------------------------------------------------------------------------------
    def emit(self, value: Value) -> str:
        """An expression of the object that a value stands for; one object for one value."""
        if isinstance(value, SizeValue | ConditionValue | QuotientValue):
            return value.reconstruct(self)
        if isinstance(value, FloatValue):
            return self.fetched_name(value.guarded())
        if isinstance(value, OutsideText):
            return self.fetched_name(value.source)
        if isinstance(value, Constant) and type(value) not in (HeldNumber, LateText):
            return self.constant(value.value)
        known = self.names.get(id(value))
        if known is not None:
            return known
        if value.source is not None:
            return self._fetched(value)
        if value in self.trace.objects.must_stay:
            raise unsupported(
                "reconstruct", f"{value.describe()} leaves the graph", self.trace.objects.must_stay[value]
            )
        text = value.reconstruct(self)
        known = self.names.get(id(value))
        if known is not None:
            return known
        if text.isidentifier():
            self.remember(value, text)
            return text
        return self.new_object(value, text)

    def _fetched(self, value: Value) -> str:
        """Outside objects are fetched first of all: an effect may move what their sources go through."""
        name = self.fetched_name(value.source)
        self.remember(value, name)
        return name

    def fetched_name(self, source: Source) -> str:
        """A name for a source's value before any effect."""
        text = self.fetch(source)
        if text.isidentifier():
            return text
        name = f"v{next(self._fresh)}"
        self.prologue.append(f"{name} = {text}")
        return name

    def new_object(self, value: Value, text: str) -> str:
        """Bind the expression to a fresh name that stands for the value; call it before emitting the value's
        contents, so that contents may refer back to it. A value that was made while the expression's parts
        were (one of them holds it) stays that object."""
        known = self.names.get(id(value))
        if known is not None:
            return known
        name = self.bound(text)
        self.remember(value, name)
        return name

    def bound(self, text: str) -> str:
        """A fresh name, bound to the expression."""
        name = f"v{next(self._fresh)}"
        self.statement(f"{name} = {text}")
        return name

    def remember(self, value: Value, name: str) -> None:
        """The name stands for the value."""
        self.names[id(value)] = name
        self._kept.append(value)

    def statement(self, text: str) -> None:
        """Add a line."""
        self.lines.append(text)

    def is_emitted(self, value: Value) -> bool:
        """Whether a value has a name."""
        return id(value) in self.names

    def only_reads(self, begin: int) -> bool:
        """Whether the lines from number `begin` on only name outputs, arguments and functions."""
        return all(map(_READS.fullmatch, self.lines[begin:]))

    def nest(self, begin: int, head: str, result: str) -> None:
        """Make the lines from number `begin` on the body of a function with this head, which returns an expression."""
        body = [*self.lines[begin:], f"return {result}"]
        self.lines[begin:] = [head, *(f"    {line}" for line in body)]

    def constant(self, obj: Any) -> str:
        """An expression of a known real object."""
        if type(obj) in _INLINE or type(obj) is float and math.isfinite(obj):
            return repr(obj)
        name = self._constant_names.get(id(obj))
        if name is None:
            label = getattr(obj, "__name__", None) or type(obj).__name__
            label = label if isinstance(label, str) and label.isidentifier() else type(obj).__name__
            name = self._constant_names[id(obj)] = f"c{len(self.constants)}_{label}"
            self.constants[name] = obj
        return name

    def replay(self, value: Any) -> None:
        """Give an outside object that changed its final contents, once."""
        if value in self.trace.effects.touched and id(value) not in self._replayed:
            self._replayed.add(id(value))
            value.replay(self)

    def tensor(self, value: Any) -> str:
        """The graph's output that holds a tensor value made in the trace."""
        return self.output(value.node)

    def output(self, node: Any) -> str:
        """The graph's output that a node is."""
        return f"outs[{self.place(node)}]"

    def place(self, node: Any) -> int:
        """The number of the graph's output that a node is."""
        index = self._out_index.setdefault(node, len(self.outputs))
        if index == len(self.outputs):
            self.outputs.append(node)
        return index

    def size(self, expr: Size) -> str:
        """An expression of a size: `repr` of one is Python over its symbols' names."""
        number = settled(expr)
        if type(number) is not Size:
            return repr(number)
        self.constants.update(floordiv=operator.floordiv, mod=operator.mod)
        for symbol in number.symbols:
            if symbol.unbacked:
                node = self.trace.sizes.node(self.trace.graph, Size({(symbol,): 1}, symbol.env))
                self._first(f"{symbol} = {self.output(node)}")
                continue
            source = self.trace.sizes.sources[symbol]
            unsupported_if(
                any(
                    v.source == source.base
                    and v.carrier is None
                    and v.spec is not self.trace.sizes.read(v.source, v.obj)
                    for v in self.trace.tensors.by_example.values()
                    if v.source is not None
                ),
                "reconstruct",
                f"{source} is needed after the tensor's shape was changed in place",
            )
            self._first(f"{symbol} = {self.fetch(source)}")
        return f"({number!r})"

    def _first(self, line: str) -> None:
        """A line that goes before all others, once."""
        if line not in self.prologue:
            self.prologue.append(line)

    def fetch(self, source: Source) -> str:
        """A source's value, for this call's arguments."""
        if type(source) is Arg:
            return f"args[{source.index}]"
        if type(source) is Const:
            return self.constant(source.obj)
        if type(source) in (SizeOf, StrideOf):
            return f"{self.fetch(source.base)}.{'size' if type(source) is SizeOf else 'stride'}({source.key})"
        return f"{self.constant(source.fetch)}(args)"

    # The finished function ----------------------------------------------------------------------------------
    def function(self, result: str) -> tuple[Callable[[Any, Any], Any], str]:
        """`finish(outs, args)` that returns the expression, and its text."""
        lines = [*self.prologue, *self.lines, f"return {result}"]
        text = "def finish(outs, args):\n" + "".join(f"    {line}\n" for line in lines)
        if text == _FIRST:
            return _C.first_result, text
        cls = self.return_type
        if cls is not None and text == _NAMED.format(self.constant(cls)):
            return _C.named_by(cls), text
        namespace = dict(self.constants)
        exec(compile(text, "<dynamotor finish>", "exec"), namespace)
        return namespace["finish"], text
