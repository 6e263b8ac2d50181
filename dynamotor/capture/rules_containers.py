"""Call rules of the methods of list, tuple, dict, set and their standard-library kin (OrderedDict,
defaultdict, deque).

A method is registered under the C descriptor, so subclasses reach it through their MRO.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from ..base.narrowing import checked
from ..base.registry import register_all
from .breaks import unsupported, unsupported_if
from .rules_builtins import sort_values
from .values.base import StandIn, Trace, Value, builtin_rule, builtin_rules, run_rule
from .values.constant import NONE, TRUE, Constant, is_none
from .values.containers import (
    DictValue,
    DictView,
    ListValue,
    SequenceValue,
    SetValue,
    TupleValue,
    contents_of,
    dict_of,
)
from .values.deque import DequeValue
from .values.string import text_of
from .values.user_object import UserObject
from .values.walks import DictIterator

_IN_PLACE = frozenset(f"__i{name}__" for name in ("add", "mul", "or", "and", "sub", "xor"))


def method(*descriptors: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register `rule(trace, contents, *args, **kwargs) -> Value | None` for C methods; contents is the
    builtin container.
    """

    def add(rule: Callable[..., Any]) -> Callable[..., Any]:
        def call(trace: Trace, obj: Value, /, *args: Value, **kwargs: Value) -> Value:
            contents = contents_of(obj)
            if contents is None:
                raise unsupported("unsupported-call", f"{descriptors[0].__qualname__} on {obj.describe()}")
            result: Any = run_rule(trace, descriptors[0], rule, (contents, *args), kwargs)
            if result is contents and (type(obj) is Constant or descriptors[0].__name__ in _IN_PLACE):
                return obj  # an object of a subclass stays that object
            if result is contents is not obj and type(contents) is TupleValue:
                return TupleValue(contents.items)  # and is not the tuple of its items
            return Constant(None) if result is None else result

        for descriptor in descriptors:
            builtin_rules.setdefault(descriptor, call)
        return rule

    return add


# Special methods shared by all ------------------------------------------------------------------------------
_KINDS: tuple[type, ...] = (
    list,
    tuple,
    dict,
    set,
    frozenset,
    OrderedDict,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
    defaultdict,
    deque,
    types.MappingProxyType,
)


def _of(name: str) -> list[Any]:
    return list(
        {
            id(d): d
            for kind in _KINDS
            if (d := getattr(kind, name, None)) is not None
            and not isinstance(d, types.BuiltinFunctionType)
            and getattr(d, "__objclass__", None) is not object
        }.values()
    )


def _view(part: str) -> Callable[..., Value]:
    return lambda trace, self: DictView(self, part)


register_all(
    method,
    (
        (_of("__len__"), lambda trace, self: self.length(trace)),
        (_of("__contains__"), lambda trace, self, item: self.contains(trace, item)),
        (_of("__getitem__"), lambda trace, self, key: self.getitem(trace, key)),
        (_of("__setitem__"), lambda trace, self, key, value: self.setitem(trace, key, value)),
        (_of("__delitem__"), lambda trace, self, key: self.delitem(trace, key)),
        (_of("__iter__"), lambda trace, self: self.iterate(trace)),
        (_of("__repr__"), lambda trace, self: text_of(trace, self, repr)),
        ((deque.extendleft,), lambda trace, self, other: self.extend(trace, other, left=True)),
        ((deque.copy,), lambda trace, self: DequeValue(self.items, maxlen=self.maxlen)),
        ((list.extend, deque.extend), lambda trace, self, other: self.extend(trace, other)),
        ((list.append,), lambda trace, self, item: self.add(trace, [item])),
        ((list.copy,), lambda trace, self: ListValue(self.items)),
        *(
            ([getattr(kind, part) for kind in (dict, OrderedDict, types.MappingProxyType)], _view(part))
            for part in ("keys", "values", "items")
        ),
        (
            (dict.__reversed__, OrderedDict.__reversed__),
            lambda trace, self: DictIterator(self, "keys", reverse=True),
        ),
        ((set.add,), lambda trace, self, item: self.change(trace, "add", item)),
        ((set.discard,), lambda trace, self, item: self.change(trace, "discard", item)),
        ((set.clear,), lambda trace, self: self.change(trace, "clear", None)),
    ),
)


def _dict_getitem(trace: Trace, obj: Value, key: Value) -> Value:
    """`dict.__getitem__` of a subclass honours `__missing__` and defaultdict's factory."""
    found = dict_of(obj).lookup(key.hash_key(trace))
    if found is not None:
        return found
    if isinstance(obj, UserObject):
        if issubclass(obj.cls, defaultdict):
            return _missing(trace, obj, key)
        if trace.has_special(obj, "__missing__"):
            return trace.call_special(obj, "__missing__", [key], {})
    raise trace.error(KeyError, key)


for _descr in (dict.__getitem__, OrderedDict.__getitem__, defaultdict.__getitem__):
    builtin_rules[_descr] = _dict_getitem


def _missing(trace: Trace, obj: UserObject, key: Value) -> Value:
    factory = obj.getattr(trace, "default_factory")
    trace.raise_if(is_none(factory), KeyError, key)
    value = trace.call(factory, [])
    dict_of(obj).store(trace, key.hash_key(trace), key, value)
    return value


_OWN_UNIONS = (defaultdict, OrderedDict)
_C_CONTENTS = (list, tuple, dict, set, frozenset, deque)


def _operator_methods(name: str, op: Any, reflected: bool = False) -> None:
    # What `|` makes of a defaultdict or an OrderedDict is one again: that is theirs to make.
    @method(*[d for d in _of(name) if name not in ("__or__", "__ror__") or d.__objclass__ not in _OWN_UNIONS])
    def _operate(trace: Trace, self: Any, other: Value) -> Value:
        result, inner = self.binary(trace, op, other, reflected), contents_of(other)
        unread = inner is None and issubclass(
            other.python_type(), _C_CONTENTS
        )  # C looks into an object from outside
        unsupported_if(
            result is None and (unread or reflected and inner is not None),
            "unsupported-call",
            f"{name} of {self.describe()} and {other.describe()}",
        )
        if result is None and isinstance(self, SequenceValue):  # it raises instead
            raise unsupported("unsupported-call", f"{name} of a sequence and {other.describe()}")
        return Constant(NotImplemented) if result is None else result


for _name in ("add", "mul", "or", "and", "sub", "xor"):
    _operator_methods(f"__{_name}__", getattr(operator, _name + ("_" if _name in ("or", "and") else "")))
    _operator_methods(
        f"__r{_name}__", getattr(operator, _name + ("_" if _name in ("or", "and") else "")), True
    )
    _operator_methods(f"__i{_name}__", getattr(operator, "i" + _name))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _operator_methods(f"__{_name}__", getattr(operator, _name))


# list -------------------------------------------------------------------------------------------------------
def _moving(name: str, kind: type) -> None:
    """A method that only moves items: it runs on the values themselves, with CPython's own errors."""
    run = getattr(kind, name)

    @method(run)
    def _move(trace: Trace, self: ListValue, *args: Value) -> Any:
        given = [_whole(trace, a) if i == 0 and name in _AT_A_PLACE else a for i, a in enumerate(args)]
        result = trace.real(run, self.items, *given)
        self.mutate(trace)
        return result


_AT_A_PLACE = frozenset(("insert", "pop", "rotate"))
for _name in ("insert", "pop", "clear", "reverse"):
    _moving(_name, list)
    _moving(_name, deque)
for _name in ("append", "appendleft", "popleft", "rotate"):
    _moving(_name, deque)


def _whole(trace: Trace, value: Value) -> int:
    """What C makes of an argument that is a position or a count."""
    if trace.has_special(value, "__index__"):
        value = trace.call_special(value, "__index__", [], {})
    elif not hasattr(value.python_type(), "__index__"):
        kind = value.python_type().__name__
        raise trace.error(TypeError, f"'{kind}' object cannot be interpreted as an integer")
    return operator.index(value.as_constant())


@method(list.sort)
def _sort(trace: Trace, self: ListValue, **kwargs: Value) -> None:
    items = sort_values(trace, list(self.items), kwargs)
    self.mutate(trace)[:] = items


def _searching(name: str, kind: type) -> None:
    """A method that looks for an item: it runs on what asks the trace whether items are equal."""

    @method(getattr(kind, name))
    def _search(trace: Trace, self: Any, item: Value, *ends: Value) -> Any:
        items = kind([StandIn(trace, one) for one in self.items])
        found = trace.real(getattr(items, name), StandIn(trace, item), *[_whole(trace, end) for end in ends])
        if found is not None:
            return Constant(found)
        left = self.mutate(trace)
        left.clear()
        left.extend(one.value for one in items)
        return None


for _name in ("index", "count"):
    for _of_items in (list, tuple, deque):
        _searching(_name, _of_items)
_searching("remove", list)
_searching("remove", deque)


# dict -------------------------------------------------------------------------------------------------------
@method(dict.get, types.MappingProxyType.get)
def _get(trace: Trace, self: DictValue, key: Value, default: Value = NONE) -> Value:
    self.trace = trace
    found = self.lookup(key.hash_key(trace))
    return default if found is None else found


@method(dict.pop, OrderedDict.pop)
def _dict_pop(trace: Trace, self: DictValue, key: Value, default: Value | None = None) -> Value:
    hash_key = key.hash_key(trace)
    found = self.lookup(hash_key)
    if found is None:
        if default is None:
            raise trace.error(KeyError, key)
        return default
    self.remove(trace, hash_key)
    return found


@method(dict.popitem, OrderedDict.popitem)
def _popitem(trace: Trace, self: DictValue, last: Value = TRUE) -> Value:
    table = self.load()
    trace.raise_if(not table, KeyError, "popitem(): dictionary is empty")
    hash_key = list(table)[-1 if trace.truth(last) else 0]
    pair = table[hash_key]
    self.remove(trace, hash_key)
    return TupleValue(pair)


@method(dict.setdefault, OrderedDict.setdefault)
def _setdefault(trace: Trace, self: DictValue, key: Value, default: Value = NONE) -> Value:
    hash_key = key.hash_key(trace)
    found = self.lookup(hash_key)
    if found is None:
        self.store(trace, hash_key, key, default)
        return default
    return found


@method(dict.clear, OrderedDict.clear)
def _dict_clear(trace: Trace, self: DictValue) -> None:
    for hash_key in list(self.load()):
        self.remove(trace, hash_key)


@builtin_rule(dict.update, OrderedDict.update)
def _update(trace: Trace, obj: Value, /, *args: Value, **kwargs: Value) -> Value:
    into: Any = contents_of(obj)
    if into is None:
        raise unsupported("unsupported-call", f"dict.update of {obj.describe()}")
    trace.update_dict(into, *args, named=kwargs)
    return Constant(None)


@builtin_rule(dict.copy)
def _dict_copy(trace: Trace, obj: Value) -> Value:
    """A plain dict, of instances of subclasses too."""
    return _copy_of_items(obj, dict)


def _copy_of_items(obj: Value, kind: type | None = None) -> DictValue:
    contents = contents_of(obj)
    assert isinstance(contents, DictValue)
    items = [(h, k, v) for h, (k, v) in contents.load().items()]
    return DictValue(items, kind=kind or contents.kind)


@builtin_rule(OrderedDict.copy, defaultdict.copy)
def _copy_of_its_class(trace: Trace, obj: Value) -> Value:
    copied = _copy_of_items(obj)
    if not isinstance(obj, UserObject):
        return copied
    result = UserObject(obj.cls, base=copied)
    if issubclass(obj.cls, defaultdict):
        result.slots = {"default_factory": obj.getattr(trace, "default_factory")}
    return result


@builtin_rule(dict.fromkeys)
def _fromkeys(trace: Trace, iterable: Value, value: Value = NONE) -> Value:
    return DictValue([(k.hash_key(trace), k, value) for k in iterable.unpack(trace)])


def _fromkeys_of(kind: type, trace: Trace, iterable: Value, value: Value = NONE) -> Value:
    made = trace.instantiate(kind, [], {})
    dict_of(made).update(trace, dict_of(_fromkeys(trace, iterable, value)))
    return made


for _kind in (OrderedDict, defaultdict):
    builtin_rule(_kind.fromkeys)(functools.partial(_fromkeys_of, _kind))


@method(OrderedDict.move_to_end)
def _move_to_end(trace: Trace, self: DictValue, key: Value, last: Value = TRUE) -> None:
    hash_key = key.hash_key(trace)
    table = self.load()
    trace.raise_if(hash_key not in table, KeyError, key)
    if next(iter(reversed(table) if trace.truth(last) else table)) == hash_key:
        return
    pair = table[hash_key]
    rest = [(h, p) for h, p in table.items() if h != hash_key]
    self.remove(trace, hash_key)
    table.clear()
    table.update([*rest, (hash_key, pair)] if trace.truth(last) else [(hash_key, pair), *rest])


# set --------------------------------------------------------------------------------------------------------
@method(set.remove)
def _set_remove(trace: Trace, self: SetValue, item: Value) -> None:
    trace.raise_if(not trace.truth(self.contains(trace, item)), KeyError, item)
    self.change(trace, "discard", item)


@method(set.copy, frozenset.copy)
def _set_copy(trace: Trace, self: SetValue) -> Value:
    if self.kind is frozenset:
        return self
    table = dict(self.table)
    return SetValue(table, self.kind, mirror=None if self.mirror is None else self.mirror.copy())


def _set_methods(name: str, op: Any) -> None:
    """The methods called like the name, and its in-place twin."""

    @method(getattr(set, name), getattr(frozenset, name))
    def _operate(trace: Trace, self: SetValue, *others: Value) -> Value:
        result = self
        for other in others:
            result = checked(SetValue, result.binary(trace, op, SetValue.of(trace, other)))
        return _set_copy(trace, self) if result is self else result

    in_place = "update" if name == "union" else f"{name}_update"

    @method(getattr(set, in_place))
    def _update_set(trace: Trace, self: SetValue, *others: Value) -> None:
        for other in others:
            self.change(trace, in_place, other)


for _name, _op in (
    ("union", operator.or_),
    ("intersection", operator.and_),
    ("difference", operator.sub),
    ("symmetric_difference", operator.xor),
):
    _set_methods(_name, _op)


@method(set.issubset, frozenset.issubset)
def _is_subset(trace: Trace, self: SetValue, other: Value) -> Value:
    return Constant(self.table.keys() <= SetValue.of(trace, other).table.keys())


def _found(trace: Trace, self: SetValue, other: Value) -> Iterable[bool]:
    """Of each item of an iterable, whether the set has it. Items behind the one that decides stay in an iterator;
    those of sets are compared without an order."""
    if isinstance(contents_of(other), SetValue):
        return (key in self.table for key in SetValue.of(trace, other).table)
    return (trace.truth(self.contains(trace, item)) for item in other.one_by_one(trace))


@method(set.issuperset, frozenset.issuperset)
def _is_superset(trace: Trace, self: SetValue, other: Value) -> Value:
    return Constant(all(_found(trace, self, other)))


@method(set.isdisjoint, frozenset.isdisjoint)
def _is_disjoint(trace: Trace, self: SetValue, other: Value) -> Value:
    return Constant(not any(_found(trace, self, other)))


# Making the standard library's dicts ------------------------------------------------------------------------
@builtin_rule(OrderedDict)
def _ordered_dict(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    base = DictValue([], kind=OrderedDict)
    trace.update_dict(base, *args, named=kwargs)
    return UserObject(OrderedDict, base=base)
