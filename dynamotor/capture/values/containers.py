"""Lists, tuples, dicts and sets: made in the trace, or from outside with their items read (and guarded) on
demand.

A container from outside that is changed is replayed as a whole after the graph has run (effects.py).
"""

from __future__ import annotations

import operator
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from ...base.narrowing import checked
from ...base.registry import MaybeNone
from ..breaks import unsupported, unsupported_if
from ..guards import (
    Absent,
    DictKeys,
    IdIs,
    Length,
    Replaceable,
    TypeIs,
    is_constant,
    ordered_keys,
)
from ..source import Called, Const, DictItem, SeqItem, Source, stands_in
from .base import (
    MISSING,
    Epoch,
    IdentityKey,
    Iterator,
    ObjectKey,
    ResultEmitter,
    StandIn,
    Trace,
    Value,
    makers,
    once,
    wrap_typed,
)
from .constant import Constant
from .identity import Identity
from .operators import COMPARE, like
from .walks import DictIterator, Indexed, SequenceIterator, SetIterator, Table


class SequenceValue(Indexed):
    """What lists and tuples share. `obj` is the outside object, `_items` None until its items are read."""

    __slots__ = ("obj", "_items", "trace", "born", "owner")
    kind: type = list
    owner: weakref.ref[Value]

    def __init__(
        self,
        items: Iterable[Value] | None,
        source: Source | None = None,
        obj: Any = MISSING,
        trace: Trace | MaybeNone = None,
    ) -> None:
        self.source, self.obj, self.trace, self.born = source, obj, trace, Epoch.now
        self._items = None if items is None else list(items)

    @property
    def items(self) -> list[Value]:
        """The item values; those of an outside object are read now."""
        if self._items is None:
            wrap, source = self.trace.wrap, self.source
            self._items = [
                wrap(SeqItem(source, i), item)
                for i, item in enumerate(self.kind.__iter__(self.obj))  # type: ignore[attr-defined]
            ]
        return self._items

    @property
    def takes_over(self) -> bool:
        items = self._items or ()
        return any(item.takes_over for item in items if not isinstance(item, SequenceValue))

    @property
    def symbolic(self) -> bool:  # type: ignore[override]
        """Whether an item that was read is a size that is an expression."""
        return self._items is not None and once(self, lambda: any(item.symbolic for item in self.items))

    def is_constant(self) -> bool:
        return once(self, lambda: all(item.is_constant() for item in self.items))

    def as_constant(self) -> Any:
        return self.kind(item.as_constant() for item in self.items)

    def truth(self, trace: Trace) -> bool:
        return bool(self.items)

    def length(self, trace: Trace) -> Value:
        return Constant(len(self.items))

    def unpack(self, trace: Trace) -> list[Value]:
        return list(self.items)

    def iterate(self, trace: Trace) -> Iterator:
        return SequenceIterator(self)

    def contains(self, trace: Trace, item: Value) -> Value:
        return Constant(any(trace.equal(other, item) for other in self.items))

    def index_of(self, trace: Trace, key: Value) -> Any:
        """A real int or slice index."""
        if key.python_type() is slice or isinstance(key, Constant) and key.is_plain:
            return key.as_constant()
        if trace.has_special(key, "__index__"):
            return trace.call_special(key, "__index__", [], {}).as_constant()
        return like(key.python_type())  # which C code refuses

    def getitem(self, trace: Trace, key: Value) -> Value:
        index = self.index_of(trace, key)
        try:
            found = self.items[index]
        except (IndexError, TypeError) as error:
            raise trace.error(type(error), str(error).replace("list", self.kind.__name__)) from None
        if not isinstance(index, slice):
            return found
        whole = index.indices(len(self.items)) == (0, len(self.items), 1)
        return self if whole and self.is_its_copy else type(self)(found)

    @property
    def is_its_copy(self) -> bool:
        """Whether a copy is the object itself: of tuples, but for their subclasses'."""
        return type(self) is TupleValue

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        contents = contents_of(other)
        if op in COMPARE:
            given = other.value if isinstance(other, Constant) else None
            if contents is None and isinstance(given, self.kind) and isinstance(given, tuple):  # a torch.Size
                contents = TupleValue([Constant(item) for item in given])
            return (
                self._compare(trace, op, contents)
                if contents is not None and contents.python_type() is self.kind
                else None
            )
        if op is operator.add and not reflected:
            if contents is not None and contents.python_type() is self.kind:
                added = contents.unpack(trace)
                if not added and self.is_its_copy:
                    return self
                exact = not self.items and isinstance(other, SequenceValue) and other.is_its_copy
                return other if exact else type(self)(self.items + added)
        if op is operator.mul and (times := _times(other)) is not None:
            return self if times == 1 and self.is_its_copy else type(self)(self.items * times)
        return None

    def _compare(self, trace: Trace, op: Callable[..., Any], other: Value) -> Value:
        mine, theirs = [
            [StandIn(trace, item) for item in items] for items in (self.items, other.unpack(trace))
        ]
        found = op(mine, theirs)
        return found.value if isinstance(found, StandIn) else Constant(found)

    def describe(self) -> str:
        return f"a {self.kind.__name__}" + ("" if self._items is None else f" of {len(self._items)}")


class TupleValue(SequenceValue):
    """A tuple."""

    __slots__ = ()
    kind = tuple

    def hash_key(self, trace: Trace) -> Hashable:
        return tuple(item.hash_key(trace) for item in self.items)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        return "(" + "".join(f"{emitter.emit(item)}, " for item in self.items) + ")"


class ListValue(SequenceValue):
    """A list. tail: the values added to an outside list whose items are unread: its length may change from call to
    call."""

    __slots__ = ("tail",)
    kind = list

    def __init__(
        self,
        items: Iterable[Value] | None,
        source: Source | None = None,
        obj: Any = MISSING,
        trace: Trace | MaybeNone = None,
    ) -> None:
        super().__init__(items, source, obj, trace)
        self.tail: list[Value] = []

    @property
    def is_unread(self) -> bool:
        """Whether no item of an outside list was looked at."""
        return self._items is None and self.kind is list

    @property
    def items(self) -> list[Value]:
        if self.is_unread:
            length = list.__len__(self.obj)  # a subclass may have its own
            self.trace.reader.guard(Length(self.source, length))
            super().items.extend(self.tail)
        return super().items

    @property
    def takes_over(self) -> bool:
        return super().takes_over or any(item.takes_over for item in self.tail)

    def truth(self, trace: Trace) -> bool:
        if self.is_unread and not self.tail:
            return trace.reader.ask(self.source, self.obj, "whether it has items", _has_items)
        return self.is_unread or bool(self.items)

    def length(self, trace: Trace) -> Value:
        if not self.is_unread:
            return super().length(trace)
        length = trace.wrap(Called(self.source, list.__len__), list.__len__(self.obj))
        return trace.binary(operator.add, length, Constant(len(self.tail)))

    def getitem(self, trace: Trace, key: Value) -> Value:
        at = key.value if type(key) is Constant and type(key.value) is int and self.is_unread else 0
        return self.tail[at] if -len(self.tail) <= at < 0 else super().getitem(trace, key)

    def add(self, trace: Trace, values: list[Value]) -> None:
        """Add items at the end."""
        if self.is_unread:
            self.tail += values
            trace.effects.touch(self)
        else:
            self.mutate(trace).extend(values)

    def mutate(self, trace: Trace) -> list[Value]:
        """The items, to be changed in place; an outside list is recorded as an effect."""
        items = self.items
        if self.obj is not MISSING:
            held = () if self in trace.effects.touched else self.kind.__iter__(self.obj)
            trace.effects.touch(self, held)
        else:
            trace.effects.change(self)
        return items

    def setitem(self, trace: Trace, key: Value, value: Value) -> None:
        index = self.index_of(trace, key)
        new = value.unpack(trace) if isinstance(index, slice) else value
        trace.real(operator.setitem, self.mutate(trace), index, new)

    def delitem(self, trace: Trace, key: Value) -> None:
        index = self.index_of(trace, key)
        trace.real(operator.delitem, self.mutate(trace), index)

    def extend(self, trace: Trace, other: Value) -> None:
        """`list.extend`: a generator sees its earlier items, and items before an exception stay."""
        if other.python_type() in (list, tuple):
            self.add(trace, other.unpack(trace))
        else:
            for item in list(self.items) if contents_of(other) is self else other.each(trace):
                self.add(trace, [item])

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        if op is operator.iadd:
            self.extend(trace, other)
            return self
        if op is operator.imul and (times := _times(other)) is not None:
            items = self.mutate(trace)
            items[:] = items * times
            return self
        return super().binary(trace, op, other, reflected)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        if owner := owner_of(self):
            return emitter.emit(owner)
        name = emitter.new_object(self, "[]")
        self.fill(emitter, name)
        return name

    def fill(self, emitter: ResultEmitter, name: str) -> None:
        """Put the items into a new list, or an object of a subclass."""
        if self.items:
            emitter.statement(
                f"list.extend({name}, [{', '.join([emitter.emit(item) for item in self.items])}])"
            )

    def replay(self, emitter: ResultEmitter) -> None:
        """Give the outside list its final contents."""
        items = self.tail if self.is_unread else self.items
        texts = f"[{', '.join([emitter.emit(item) for item in items])}]"
        name = emitter.emit(self)
        change = f"extend({name}" if self.is_unread else f"__setitem__({name}, slice(None)"
        emitter.statement(f"list.{change}, {texts})")


def _has_items(held: list[Any]) -> bool:
    return list.__len__(held) > 0


class DictValue(Table):
    """A dict. Outside dicts are read key by key, until something needs all of their keys in order
    (`load`).
    """

    __slots__ = (
        "obj",
        "_table",
        "pending",
        "complete",
        "trace",
        "trusted",
        "kind",
        "changed",
        "removed",
        "removals",
        "absent",
        "born",
        "loaded",
        "owner",
    )
    owner: weakref.ref[Value]

    def __init__(
        self,
        items: Iterable[tuple[Hashable, Value, Value]] | None,
        source: Source | None = None,
        obj: Any = MISSING,
        trace: Trace | MaybeNone = None,
        trusted: bool = False,
        kind: type = dict,
    ) -> None:
        self.source, self.obj, self.trace, self.trusted, self.kind = source, obj, trace, trusted, kind
        self.born = Epoch.now
        self._table: dict[Hashable, tuple[Value, Value]] = {}
        # Items from the first one on whose key is a text that is written behind the graph: they are unread.
        self.pending: list[tuple[Value, Value]] = []
        for hash_key, key, value in items or ():
            old = self.table.get(hash_key)  # of equal keys the first stays
            self.table[hash_key] = (key if old is None else old[0], value)
        self.complete = items is not None
        self.changed: dict[Hashable, None] = {}
        self.removed: dict[Hashable, None] = {}  # removed at some time, perhaps set again
        self.removals = 0
        self.absent: set[Hashable] = set()
        self.loaded: dict[Hashable, Any] = {}  # of an outside dict that was read whole: hash key -> key

    @property
    def table(self) -> dict[Hashable, tuple[Value, Value]]:
        """Hash key -> (key, value) of the items read or written. Texts among the keys are read now."""
        if self.pending:
            pending, self.pending = self.pending, []
            for key, value in pending:
                text = key.as_constant()
                old = self._table.get(text)
                self._table[text] = (Constant(text) if old is None else old[0], value)
        return self._table

    @table.setter
    def table(self, items: dict[Hashable, tuple[Value, Value]]) -> None:
        self._table = items

    def is_constant(self) -> bool:
        pairs = self.load().values()
        return once(self, lambda: all(k.is_constant() and v.is_constant() for k, v in pairs))

    def as_constant(self) -> Any:
        return {k.as_constant(): v.as_constant() for k, v in self.load().values()}

    # Primitives ---------------------------------------------------------------------------------------------
    def load(self) -> dict[Hashable, tuple[Value, Value]]:
        """All items in order; guards the keys of an outside dict."""
        if not self.complete:
            keys = list(ordered_keys(self.obj))
            if not self.trusted:
                self.trace.reader.guard(DictKeys(self.source, tuple(keys)))
            written, self.table = self.table, {}
            for real in keys:
                value = self._key(real)
                key = real if type(real) in _OWN_KEYS else value.hash_key(self.trace)
                self.loaded[key] = real
                if key in self.removed:
                    continue
                if key in written:
                    self.table[key] = written[key]
                else:
                    self.table[key] = (value, self._read(real))
            for key, pair in written.items():
                self.table.setdefault(key, pair)
            self.complete = True
        return self.table

    def _key(self, key: Any) -> Value:
        return self.trace.make(key)

    def _read(self, key: Any) -> Value:
        value = dict.__getitem__(self.obj, key)
        if self.trusted and not stands_in(value, key):
            if self.source is not None:  # a library's module: it, or a user, may give the name another value
                self.trace.reader.guard(IdIs(DictItem(self.source, key), value))
            return self.trace.make(value)
        return self.trace.wrap(DictItem(self.source, key), value)

    def lookup(self, key: Hashable) -> Value | None:
        """The value under a hash key, or None; the read or the absence is guarded."""
        if type(key) not in _OWN_KEYS and self.trace is not None:
            self.trace.reader.guard_key(
                key, None if self.obj is not MISSING else [k for k, _ in self.table.values()]
            )
        pair = self.table.get(key)
        if pair is not None:
            return pair[1]
        if key in self.absent and not self.trusted:
            self.trace.reader.miss_again(self.source, key)
        if self.complete or key in self.changed or key in self.absent:
            return None
        if type(key) is not str and not is_real_key(key):
            pair = self.load().get(key)
            return None if pair is None else pair[1]
        if dict.__contains__(self.obj, key):
            value = self._read(key)
            self.table[key] = (Constant(key) if type(key) is str else self._key(key), value)
            return value
        if not self.trusted:
            self.trace.reader.guard(Absent(DictItem(self.source, key)))
        self.absent.add(key)
        return None

    def holds_empty_dict(self, key: str) -> bool:
        """Whether an item that the trace has not met is an empty dict; guarded, and no value is made of it."""
        if self.obj is MISSING or self.complete or self.trusted or key in self.table or key in self.changed:
            return False
        found = dict.get(self.obj, key)
        if type(found) not in (dict, OrderedDict) or found or id(found) in self.trace.reader.values:
            return False
        source = DictItem(self.source, key)
        self.trace.reader.guard(TypeIs(source, type(found)))
        self.trace.reader.guard(DictKeys(source, ()))
        return True

    def store(self, trace: Trace, hash_key: Hashable, key: Value, value: Value) -> None:
        """`dict.__setitem__`. The same object (`self.count += 1` of a tensor) is not written again."""
        old = self.table.get(hash_key)
        if old is not None and old[1] is value:
            return
        if self.obj is not MISSING:
            trace.effects.touch(self, self._held(hash_key))
            self._may_replace(hash_key)
            self.changed[hash_key] = None
        else:
            trace.effects.change(self)
        self.table[hash_key] = (key if old is None else old[0], value)

    def show(self, key: str, value: Value | None) -> None:
        """Let a key that is there lead to another value while a part is traced, and then (None) to its own
        again: the outside dict stays as it is."""
        if value is not None:
            self.table[key] = (Constant(key), value)
        elif self.complete:
            self.table[key] = (Constant(key), self._read(key))
        else:
            self.table.pop(key, None)

    def _may_replace(self, key: Hashable) -> None:
        """A write needs not know whether the key is there: who asks for the keys and their order (`load`)
        guards them."""
        known = self.complete or key in self.table or key in self.changed or key in self.absent
        if known or self.trusted or type(key) not in _OWN_KEYS:
            self.lookup(key)
        else:
            self.trace.reader.guard(Replaceable(self.source, key))

    def _held(self, key: Hashable) -> tuple[Any, ...]:
        """The real object under a key, if any."""
        known = is_real_key(key) and dict.__contains__(self.obj, key)
        return (dict.__getitem__(self.obj, key),) if known else ()

    def remove(self, trace: Trace, hash_key: Hashable) -> None:
        """`dict.__delitem__` of a key that is there."""
        if self.obj is not MISSING:
            if hash_key in self.changed and not self.complete and not self.trusted:
                trace.reader.ask(
                    self.source,
                    self.obj,
                    f"having the key {hash_key!r}",
                    lambda d: dict.__contains__(d, hash_key),
                )
            self.changed[hash_key] = self.removed[hash_key] = None
            trace.effects.touch(self, self._held(hash_key))
        else:
            trace.effects.change(self)
        self.removals += 1
        del self.table[hash_key]

    # Protocol -----------------------------------------------------------------------------------------------
    def getitem(self, trace: Trace, key: Value) -> Value:
        self.trace = trace
        found = self.lookup(key.hash_key(trace))
        if found is None:
            raise trace.error(KeyError, key)
        return found

    def setitem(self, trace: Trace, key: Value, value: Value) -> None:
        made = self.obj is MISSING and self.kind in (dict, OrderedDict)
        if made and (key.late or self.pending and key.python_type() is str and key.is_constant()):
            trace.effects.change(self)
            self.pending.append((key, value))
        else:
            self.store(trace, key.hash_key(trace), key, value)

    def delitem(self, trace: Trace, key: Value) -> None:
        hash_key = key.hash_key(trace)
        trace.raise_if(self.lookup(hash_key) is None, KeyError, key)
        self.remove(trace, hash_key)

    def contains(self, trace: Trace, item: Value) -> Value:
        self.trace = trace
        return Constant(self.lookup(item.hash_key(trace)) is not None)

    def truth(self, trace: Trace) -> bool:
        return bool(self.load())

    def length(self, trace: Trace) -> Value:
        return Constant(len(self.load()))

    def iterate(self, trace: Trace) -> Iterator:
        return DictIterator(self, "keys")

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        if op is operator.ior:  # of pairs, too
            trace.update_dict(self, other)
            return self
        contents = contents_of(other)
        if not isinstance(contents, DictValue):
            return None
        if op in (operator.eq, operator.ne):
            mine, theirs = self.load(), contents.load()
            equal = len(mine) == len(theirs) and all(
                k in theirs and trace.equal(v, theirs[k][1]) for k, (_, v) in mine.items()
            )
            if self.kind is OrderedDict and contents.kind is OrderedDict:
                equal = equal and list(mine) == list(theirs)
            return Constant(equal == (op is operator.eq))
        if op is operator.or_ and not (reflected and isinstance(other, DictValue)):
            first, second = (contents, self) if reflected else (self, other)
            merged = DictValue([(h, k, v) for h, (k, v) in first.load().items()])
            trace.update_dict(merged, second)
            return merged
        return None

    def update(self, trace: Trace, other: DictValue) -> None:
        """Take over the items of another dict."""
        for hash_key, (key, value) in list(other.load().items()):
            self.store(trace, hash_key, key, value)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        if owner := owner_of(self):
            text = emitter.emit(owner)
            own = "__dict__" if getattr(owner, "_dict", None) is self else "keywords"  # of a partial
            return text if contents_of(owner) is self else f"{text}.{own}"
        name = filled = emitter.bound(
            f"{emitter.constant(OrderedDict)}()" if self.kind is OrderedDict else "{}"
        )
        if self.kind is types.MappingProxyType:
            name = emitter.bound(f"{emitter.constant(self.kind)}({filled})")
        emitter.remember(self, name)
        self.fill(emitter, filled)
        return name

    def fill(self, emitter: ResultEmitter, name: str) -> None:
        """Put the items into a new dict, or an object of a subclass."""
        method = emitter.constant(OrderedDict) if self.kind is OrderedDict else "dict"
        made = self._table if self.complete else self.load()
        for key, value in [*made.values(), *self.pending]:
            emitter.statement(f"{method}.__setitem__({name}, {emitter.emit(key)}, {emitter.emit(value)})")

    def replay(self, emitter: ResultEmitter) -> None:
        """Give the outside dict its final contents in their order."""
        target = emitter.emit(self)
        method = "dict" if self.kind is dict else emitter.constant(self.kind)
        final = list(self.table)
        written = [key for key in final if key in self.changed]
        if (
            self.complete
        ):  # hash keys are compared with each other alone: real ones would ask their own `__eq__`
            removed = [self.loaded[key] for key in self.removed if key in self.loaded]
            kept = dict.fromkeys(key for key in self.loaded if key not in self.removed)
            if final != [*kept, *(key for key in written if key not in kept)]:
                removed, written = list(self.loaded.values()), final
        else:
            removed = [key for key in self.removed if dict.__contains__(self.obj, key)]
        for key in removed:
            emitter.statement(f"{method}.__delitem__({target}, {emitter.emit(self._key(key))})")
        for hash_key in written:
            key, value = self.table[hash_key]
            emitter.statement(f"{method}.__setitem__({target}, {emitter.emit(key)}, {emitter.emit(value)})")

    def describe(self) -> str:
        return "a dict"


_OWN_KEYS = frozenset((str, int, bool, type(None), type, torch.dtype))


def is_real_key(key: Hashable) -> bool:
    """Whether a hash key is the real object (or a tuple of such) and not the stand-in of one made in the
    trace.
    """
    if type(key) is tuple or type(key) is frozenset:
        return all(map(is_real_key, key))
    return not isinstance(key, Value | ObjectKey)


class DictView(Value):
    """`d.keys()`, `d.values()`, `d.items()`."""

    __slots__ = ("target", "part")

    def __init__(self, target: DictValue, part: str) -> None:
        super().__init__()
        self.target, self.part = target, part

    def python_type(self) -> type:
        kind = OrderedDict if issubclass(self.target.kind, OrderedDict) else dict
        return type(getattr(kind(), self.part)())

    def length(self, trace: Trace) -> Value:
        return self.target.length(trace)

    def truth(self, trace: Trace) -> bool:
        return self.target.truth(trace)

    def iterate(self, trace: Trace) -> Iterator:
        return DictIterator(self.target, self.part)

    def contains(self, trace: Trace, item: Value) -> Value:
        if self.part == "keys":
            return self.target.contains(trace, item)
        return Constant(any(trace.equal(other, item) for other in self.unpack(trace)))

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        if self.part == "values" or not (_like_a_set(other) if op in COMPARE else op in _MAKES_SETS):
            return None  # before the other's items are asked for: an iterator would be used up
        mine = SetValue.of(trace, self.unpack(trace))
        theirs = other if isinstance(other, SetValue) else SetValue.of(trace, other)
        return mine.binary(trace, op, theirs, reflected)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        return f"{emitter.emit(self.target)}.{self.part}()"


def _like_a_set(value: Value) -> bool:
    """Operands that a set may be compared with: sets, frozensets, views of keys and of items."""
    if isinstance(value, DictView):
        return value.part != "values"
    real = isinstance(value, Constant) and isinstance(value.value, frozenset)
    return real or isinstance(contents_of(value), SetValue)


class SetValue(Table):
    """A set or frozenset. One from outside guards each membership asked for, until something needs all of its
    items.

    `mirror` is a real set that went through the same operations, so that it has the order that eager's has;
    None when an item is not constant (the order of such items is their addresses').
    """

    __slots__ = ("obj", "_table", "kind", "trace", "mirror", "log", "born", "owner", "removals")
    owner: weakref.ref[Value]

    def __init__(
        self,
        table: dict[Hashable, Value] | None,
        kind: type = set,
        source: Source | None = None,
        obj: Any = MISSING,
        trace: Trace | MaybeNone = None,
        mirror: Any = None,
    ) -> None:
        self.source, self._table, self.kind, self.obj, self.trace, self.mirror = (
            source,
            table,
            kind,
            obj,
            trace,
            mirror,
        )
        self.log: list[tuple[str, Value | None]] = []
        self.born, self.removals = Epoch.now, 0

    @staticmethod
    def of(trace: Trace, source: Value | list[Value], kind: type = set) -> SetValue:
        """A new set of the items of an iterable; those of a set's subclass as they are, without its `__iter__`."""
        held = None if isinstance(source, list) else contents_of(source)
        source = held if isinstance(held, SetValue) else source
        table: dict[Hashable, Value] = {}
        items = source if isinstance(source, list) else items_in_any_order(trace, source)
        for item in items:
            key = item.hash_key(trace)
            if type(key) not in _OWN_KEYS:
                trace.reader.guard_key(key, table.values())
            table.setdefault(key, item)
        like = real_items(source if isinstance(source, SetValue | DictValue | Constant) else items)
        return SetValue(table, kind, mirror=None if like is None else kind(like))

    @property
    def table(self) -> dict[Hashable, Value]:
        """The items by hash key."""
        if self._table is None:
            items = set(self.obj)
            if not all(is_constant(item) for item in items):
                self.trace.reader.ask(self.source, self.obj, "the items", lambda now: set(now) == items)
            else:
                self.trace.reader.ask(self.source, self.obj, "the items", frozenset)
                mirror = set(self.obj)
                self.mirror = mirror if list(mirror) == list(self.obj) else None
            made = {item: self.trace.make(item) for item in items}
            self._table = {
                item if type(item) in _OWN_KEYS else v.hash_key(self.trace): v for item, v in made.items()
            }
        return self._table

    def is_constant(self) -> bool:
        return all(v.is_constant() for v in self.table.values())

    def as_constant(self) -> Any:
        return self.kind(v.as_constant() for v in self.table.values())

    def hash_key(self, trace: Trace) -> Hashable:
        trace.raise_if(self.kind is set, TypeError, "unhashable type: 'set'")
        return frozenset(self.table)

    def change(self, trace: Trace, method: str, item: Value | None) -> None:
        """`set.<method>(self, item)` for add, discard, clear, update and the in-place operators."""
        one_by_one = {"update": "add", "difference_update": "discard"}.get(method)
        if one_by_one and isinstance(item, Iterator):  # it may look at the set meanwhile
            for each in item.each(trace):
                self.change(trace, one_by_one, each)
            return
        if (
            isinstance(item, Iterator) and method in _SET_METHODS
        ):  # used up here, it would give nothing to `replay`
            item = ListValue(item.unpack(trace))
        table = self.table
        if isinstance(item, Identity):
            trace.reader.guard_key(item.hash_key(trace), None if self.obj is not MISSING else table.values())
        if item is None:  # clear
            table.clear()
        elif method == "add":
            key = item.hash_key(trace)
            if key in table:
                return
            table[key] = item
        elif method == "discard":
            there = table.pop(_sought(trace, item), None)
            if there is None:
                return
            item = there  # looking up the given one again would ask its own `__eq__`
        else:
            other = SetValue.of(trace, item)
            self._meet(other)
            both = table | other.table
            kept = _SET_METHODS[method](set(table), set(other.table))
            self._table = {k: v for k, v in both.items() if k in kept}
        self.removals += method not in ("add", "update")
        if self.mirror is not None:
            like = None if item is None else real_items([item] if method in ("add", "discard") else item)
            if method == "clear":
                self.mirror.clear()
            elif like is None:
                self.mirror = None
            else:
                getattr(self.mirror, method)(like[0] if method in ("add", "discard") else like)
        if self.obj is not MISSING:
            self.log.append((method, item))
            trace.effects.touch(self, () if method == "add" or self in trace.effects.touched else self.obj)
        else:
            trace.effects.change(self)

    def _meet(self, other: SetValue) -> None:
        """Refuse an operation of two sets where one has the id of an object and the other may have it as a number."""
        for one, two in ((self, other), (other, self)):
            for key in one.table:
                if isinstance(key, IdentityKey):
                    key.refuse_numbers(None if two.obj is not MISSING else two.table.values())

    def truth(self, trace: Trace) -> bool:
        return bool(self.table)

    def length(self, trace: Trace) -> Value:
        return Constant(len(self.table))

    def ordered(self) -> list[Value]:
        """The items in the order in which eager's set gives them, when that is known."""
        table = self.table
        if len(table) < 2:
            return list(table.values())
        unsupported_if(
            self.mirror is None,
            "unsupported-value",
            "iteration over a set of objects without a fixed order",
            cure="iterate over a list or dict, or sort the set",
        )
        if self.obj is not MISSING and not self.log:
            order = list(self.obj)
            self.trace.reader.ask(self.source, self.obj, "the order", lambda now: list(now) == order)
        by_key = {v.as_constant(): v for v in table.values()}
        return [by_key[k] for k in self.mirror]

    def iterate(self, trace: Trace) -> Iterator:
        return SetIterator(TupleValue(self.ordered()), self)

    def contains(self, trace: Trace, item: Value) -> Value:
        key = _sought(trace, item)
        if type(key) not in _OWN_KEYS:
            trace.reader.guard_key(key, None if self.obj is not MISSING else self.table.values())
        if self._table is None and is_real_key(key):
            return Constant(
                trace.reader.ask(self.source, self.obj, f"having {key!r:.60}", lambda now: key in now)
            )
        return Constant(key in self.table)

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        if isinstance(other, DictView | Constant) and _like_a_set(other):
            if op in _IN_PLACE and isinstance(other, DictView):
                return None  # sets take no views: a view makes a new set of both
            other = SetValue.of(trace, other, frozenset if isinstance(other, Constant) else set)
        other = contents_of(other) or other
        if not isinstance(other, SetValue):
            return None
        mine, theirs = (other, self) if reflected and op not in COMPARE else (self, other)
        mine._meet(theirs)
        if op in COMPARE:
            return Constant(op(set(mine.table), set(theirs.table)))
        if op in _IN_PLACE:
            if self.kind is set:
                self.change(trace, _IN_PLACE[op][0], other)
                return self
            op = _IN_PLACE[op][1]
        if op not in _MAKES_SETS:
            return None
        both = mine.table | theirs.table
        kept = op(set(mine.table), set(theirs.table))
        known = mine.mirror is not None and theirs.mirror is not None
        return SetValue(
            {k: v for k, v in both.items() if k in kept},
            mine.kind,
            mirror=op(mine.mirror, theirs.mirror) if known else None,
        )

    def reconstruct(self, emitter: ResultEmitter) -> str:
        owner = owner_of(self)
        return emitter.new_object(self, self.text(emitter)) if owner is None else emitter.emit(owner)

    def text(self, emitter: ResultEmitter) -> str:
        """An expression for a set with these items."""
        if self.mirror is not None and len(self.table) > 1:
            unsupported_if(
                list(self.kind(self.mirror)) != list(self.mirror),
                "reconstruct",
                "a set whose order cannot be rebuilt leaves the captured region",
            )
            return f"{self.kind.__name__}({emitter.constant(self.mirror)})"
        text = f"{{{', '.join([emitter.emit(v) for v in self.table.values()])}}}" if self.table else "set()"
        return text if self.kind is set else f"frozenset({text})"

    def replay(self, emitter: ResultEmitter) -> None:
        """Redo the changes of the outside set."""
        name = emitter.emit(self)
        for method, item in self.log:
            emitter.statement(f"set.{method}({name}{'' if item is None else ', ' + emitter.emit(item)})")


_SET_METHODS: dict[str, Callable[[set[Any], set[Any]], set[Any]]] = {
    "update": operator.or_,
    "intersection_update": operator.and_,
    "difference_update": operator.sub,
    "symmetric_difference_update": operator.xor,
}
_IN_PLACE = {
    operator.ior: ("update", operator.or_),
    operator.iand: ("intersection_update", operator.and_),
    operator.isub: ("difference_update", operator.sub),
    operator.ixor: ("symmetric_difference_update", operator.xor),
}


def real_items(source: Value | list[Value]) -> Any:
    """A real iterable that a set takes in like the value's (its kind decides the order that results), None if
    not constant.
    """
    if isinstance(source, SetValue):
        return (
            source.mirror if len(source.table) > 1 else source.as_constant() if source.is_constant() else None
        )
    if isinstance(source, Constant):
        return source.value
    if isinstance(source, DictValue):
        return (
            source.as_constant()
            if all(k.is_constant() for k, _ in source.load().values()) and source.is_constant()
            else None
        )
    items = (
        source if isinstance(source, list) else source.items if isinstance(source, SequenceValue) else None
    )
    if items is None or not all(item.is_constant() for item in items):
        return None
    return [item.as_constant() for item in items]


_MAKES_SETS = frozenset((operator.and_, operator.or_, operator.sub, operator.xor))


def items_in_any_order(trace: Trace, value: Value) -> list[Value]:
    """The items of an iterable for a use that does not depend on their order."""
    return list(value.table.values()) if isinstance(value, SetValue) else value.unpack(trace)


def _sought(trace: Trace, item: Value) -> Hashable:
    """The key that a set looks for: a set as the frozenset of its items, which has a hash."""
    cls, contents = item.python_type(), contents_of(item)
    if isinstance(item, SetValue) or issubclass(cls, set) and trace.type_attr(cls, "__hash__") is None:
        if not isinstance(contents, SetValue):
            raise unsupported("unsupported-value", f"{item.describe()} is looked for in a set")
        return frozenset(contents.table)
    return item.hash_key(trace)


def _times(value: Value) -> int | None:
    """The whole number in a value of `int` or a subclass of it."""
    held = value if isinstance(value, Constant) else getattr(value, "base", None)
    return held.value if isinstance(held, Constant) and isinstance(held.value, int) else None


def owner_of(contents: Value) -> Value | None:
    """The object made in the trace whose contents these are (of a subclass of list, dict or set) or whose
    `__dict__`.
    """
    owner = getattr(contents, "owner", None)
    return None if owner is None else owner()


def contents_of(value: Value) -> Value | None:
    """The list, tuple, dict or set inside a value (of a builtin type or a subclass), or None."""
    if isinstance(value, SequenceValue | DictValue | SetValue):
        return value
    if isinstance(value, Constant):
        return TupleValue([Constant(v) for v in value.value]) if type(value.value) is tuple else None
    return getattr(value, "base", None)


def dict_of(value: Value) -> DictValue:
    """The dict inside an instance of dict or of a subclass."""
    return checked(DictValue, contents_of(value))


def _fresh_dict(trace: Trace, obj: Any) -> Value:
    return DictValue([(k, trace.make(k), trace.fresh(v)) for k, v in obj.items()], kind=type(obj))


makers[tuple] = lambda trace, obj: TupleValue([trace.fresh(item) for item in obj])
makers[list] = lambda trace, obj: ListValue([trace.fresh(item) for item in obj])
makers[set] = lambda trace, obj: SetValue({item: trace.make(item) for item in obj}, mirror=obj)
makers[frozenset] = lambda trace, obj: SetValue(
    {item: trace.make(item) for item in obj}, frozenset, mirror=obj
)
makers[dict] = makers[types.MappingProxyType] = _fresh_dict


def _wrap_list(trace: Trace, source: Source, obj: list[Any]) -> Value:
    return ListValue(None, source, obj, trace)


def _wrap_tuple(trace: Trace, source: Source, obj: tuple[Any, ...]) -> Value:
    if type(source) is not Const:
        trace.reader.guard(Length(source, len(obj)))
    return TupleValue(None, source, obj, trace)


wrap_typed(_wrap_list, list)
wrap_typed(_wrap_tuple, tuple)
wrap_typed(lambda trace, source, obj: DictValue(None, source, obj, trace), dict)
wrap_typed(lambda trace, source, obj: SetValue(None, type(obj), source, obj, trace), set, frozenset)
