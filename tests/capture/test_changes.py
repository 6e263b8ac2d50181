"""Facts that a program can read, each changed between two calls: every call gives what eager gives.

A row of `FACTS` makes a fresh program: `(read, changes)`. `read(x)` computes with the fact, each of `changes`
changes it.
"""

from __future__ import annotations

import abc
import collections.abc
import contextvars
import dataclasses
import enum
import functools
import gc
import sys
import threading
import types
import typing
import weakref

import numpy as np
import pytest
import torch

import dynamotor

FACTS = {}
X = torch.arange(1.0, 4.0)


def fact(make):
    FACTS[make.__name__.strip("_")] = make
    return make


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def outcome(fn, *args):
    """The result, or the exception's class."""
    try:
        return fn(*args)
    except Exception as error:
        return type(error)


def check(read, changes, undo=None):
    compiled = dynamotor.compile(read, backend="eager")
    dynamotor.counters.clear()
    try:
        assert same(outcome(compiled, X), outcome(read, X)), "the first call"
        for i, change in enumerate(changes):
            change()
            for _ in range(2):
                want, got = outcome(read, X), outcome(compiled, X)
                assert same(got, want), f"change {i}: eager {want}, compiled {got}"
        assert not dynamotor.counters["frames"]["failed"] and not compiled.disabled
    finally:
        if undo is not None:
            undo()


# Python objects ---------------------------------------------------------------------------------------------
class Plain:
    k = 1.0


@fact
def isinstance_of_an_abc():
    class Base(abc.ABC):  # noqa: B024
        pass

    class Thing:
        pass

    thing = Thing()
    return lambda x: x + 1 if isinstance(thing, Base) else x - 1, [lambda: Base.register(Thing)]


@fact
def isinstance_of_a_number_and_an_abc():
    class Base(abc.ABC):  # noqa: B024
        pass

    return lambda x: x + 1 if isinstance(3, Base) else x - 1, [lambda: Base.register(int)]


@fact
def isinstance_of_an_object_made_in_the_program():
    class Base(abc.ABC):  # noqa: B024
        pass

    class Thing:
        pass

    return lambda x: x + 1 if isinstance(Thing(), Base) else x - 1, [lambda: Base.register(Thing)]


@fact
def issubclass_of_an_abc():
    class Base(abc.ABC):  # noqa: B024
        pass

    class Thing:
        pass

    return lambda x: x + 1 if issubclass(Thing, Base) else x - 1, [lambda: Base.register(Thing)]


@fact
def isinstance_of_a_protocol_with_a_method():
    @typing.runtime_checkable
    class HasArea(typing.Protocol):
        def area(self): ...

    class Thing:
        pass

    thing = Thing()
    return lambda x: x + 1 if isinstance(thing, HasArea) else x - 1, [
        lambda: setattr(Thing, "area", lambda self: 1),
        lambda: delattr(Thing, "area"),
    ]


@fact
def isinstance_of_a_protocol_with_data():
    @typing.runtime_checkable
    class HasSize(typing.Protocol):
        size: int

    thing = Plain()
    return lambda x: x + 1 if isinstance(thing, HasSize) else x - 1, [
        lambda: setattr(thing, "size", 1),
        lambda: delattr(thing, "size"),
    ]


@fact
def isinstance_through_a_metaclass():
    class Meta(type):
        answer = True

        def __instancecheck__(cls, value):
            return cls.answer

    class Kind(metaclass=Meta):
        pass

    thing = Plain()
    return lambda x: x + 1 if isinstance(thing, Kind) else x - 1, [lambda: setattr(Meta, "answer", False)]


@fact
def issubclass_through_a_metaclass():
    class Meta(type):
        answer = True

        def __subclasscheck__(cls, value):
            return cls.answer

    class Kind(metaclass=Meta):
        pass

    return lambda x: x + 1 if issubclass(Plain, Kind) else x - 1, [lambda: setattr(Meta, "answer", False)]


@fact
def isinstance_after_new_bases():
    class A:
        pass

    class B:
        pass

    class C(A):
        pass

    thing = C()
    return lambda x: x + 1 if isinstance(thing, A) else x - 1, [lambda: setattr(C, "__bases__", (B,))]


@fact
def issubclass_after_new_bases():
    class A:
        pass

    class B:
        pass

    class C(A):
        pass

    return lambda x: x + 1 if issubclass(C, A) else x - 1, [lambda: setattr(C, "__bases__", (B,))]


@fact
def isinstance_by_a_class_property():
    class Liar:
        kind = int

        @property
        def __class__(self):
            return Liar.kind

    thing = Liar()
    return lambda x: x + 1 if isinstance(thing, int) else x - 1, [lambda: setattr(Liar, "kind", str)]


@fact
def isinstance_by_a_subclass_hook():
    class Base(abc.ABC):  # noqa: B024
        yes = True

        @classmethod
        def __subclasshook__(cls, other):
            return Base.yes

    class One:
        pass

    class Two:
        pass

    things = [One()]
    return lambda x: x + 1 if isinstance(things[0], Base) else x - 1, [
        lambda: (setattr(Base, "yes", False), things.__setitem__(0, Two()))
    ]


@fact
def sized_by_a_new_method():
    class Thing:
        pass

    thing = Thing()
    return lambda x: x + 1 if isinstance(thing, collections.abc.Sized) else x - 1, [
        lambda: (setattr(Thing, "__len__", lambda self: 3), collections.abc.Sized.register(Thing))
    ]


@fact
def a_class_pattern():
    class Base(abc.ABC):  # noqa: B024
        pass

    thing = Plain()

    def read(x):
        match thing:
            case Base():
                return x + 1
        return x - 1

    return read, [lambda: Base.register(Plain)]


@fact
def the_bases_of_an_exception():
    class First(Exception):
        pass

    class Second(Exception):
        pass

    class Own(First):
        pass

    def read(x):
        try:
            raise Own
        except First:
            return x + 1
        except Second:
            return x - 1

    return read, [lambda: setattr(Own, "__bases__", (Second,))]


@fact
def callable_of_an_object():
    class Thing:
        pass

    thing = Thing()
    return lambda x: x + 1 if callable(thing) else x - 1, [lambda: setattr(Thing, "__call__", lambda self: 3)]


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@fact
def an_attribute_of_an_enum_member():
    class Shade(enum.Enum):
        A = 1

    Shade.A.weight = 1.0
    return lambda x: x * Shade.A.weight, [
        lambda: setattr(Shade.A, "weight", 2.0),
        lambda: delattr(Shade.A, "weight"),
    ]


@fact
def an_absent_attribute_of_an_enum_member():
    class Shade(enum.Enum):
        A = 1

    return lambda x: x * getattr(Shade.A, "weight", 3.0), [lambda: setattr(Shade.A, "weight", 2.0)]


@fact
def the_value_of_an_enum_member():
    class Shade(enum.Enum):
        A = 1

    return lambda x: x * Shade.A.value, [lambda: setattr(Shade.A, "_value_", 2.0)]


@fact
def the_name_of_an_enum_member():
    class Shade(enum.Enum):
        A = 1

    return lambda x: x * len(Shade.A.name), [lambda: setattr(Shade.A, "_name_", "long")]


@fact
def a_method_of_an_enum():
    class Shade(enum.Enum):
        A = 1

        def weight(self):
            return 2.0

    return lambda x: x * Shade.A.weight(), [lambda: setattr(Shade, "weight", lambda self: 5.0)]


@fact
def the_truth_of_an_enum_member():
    class Shade(enum.Enum):
        A = 1
        flag = True

        def __bool__(self):
            return WORLD["flag"]

    WORLD = {"flag": True}
    return lambda x: x + 1 if Shade.A else x - 1, [lambda: WORLD.update(flag=False)]


@fact
def the_attributes_of_an_argument_that_is_an_enum_member():
    class Shade(enum.Enum):
        A = 1

    holder = [Shade.A]
    Shade.A.weight = 1.0
    return lambda x: x * holder[0].weight, [lambda: setattr(Shade.A, "weight", 2.0)]


for _name, _values in {
    "__name__": ("f", "longer"),
    "__qualname__": ("f", "longer"),
    "__doc__": (None, "words"),
    "__module__": ("m", "other"),
    "__annotations__": ({}, {"a": int}),
    "__defaults__": (None, (1,)),
    "__kwdefaults__": (None, {"a": 1}),
    "note": ("a", "bc"),
}.items():

    def _function_attribute(name=_name, values=_values):
        def helper(a=1):
            return a

        setattr(helper, name, values[0])
        return (lambda x: x + len(getattr(helper, name) or ())), [lambda: setattr(helper, name, values[1])]

    FACTS[f"function {_name}"] = _function_attribute

for _name, _values in {
    "__name__": ("F", "Longer"),
    "__qualname__": ("F", "Longer"),
    "__doc__": ("", "words"),
    "__module__": ("m", "other"),
    "__annotations__": ({}, {"a": int}),
    "note": ("a", "bc"),
}.items():

    def _class_attribute(name=_name, values=_values):
        class Thing:
            pass

        setattr(Thing, name, values[0])
        return (lambda x: x + len(getattr(Thing, name) or ())), [lambda: setattr(Thing, name, values[1])]

    FACTS[f"class {_name}"] = _class_attribute

    def _instance_class_attribute(name=_name, values=_values):
        class Thing:
            pass

        setattr(Thing, name, values[0])
        thing = Thing()
        return (lambda x: x + len(getattr(type(thing), name) or ())), [
            lambda: setattr(Thing, name, values[1])
        ]

    FACTS[f"class of an instance {_name}"] = _instance_class_attribute


@fact
def the_name_of_a_method():
    class Thing:
        def go(self):
            return 1

    thing = Thing()
    return lambda x: x + len(thing.go.__name__), [lambda: setattr(Thing.go, "__name__", "longer")]


@fact
def the_contents_of_annotations():
    def helper(a: int):
        return a

    return lambda x: x + len(helper.__annotations__), [lambda: helper.__annotations__.update(b=int)]


@fact
def the_bases_of_a_class():
    class A:
        pass

    class B:
        pass

    class C(A):
        pass

    return lambda x: x + 1 if C.__bases__[0] is A else x - 1, [lambda: setattr(C, "__bases__", (B,))]


@fact
def the_mro_of_a_class():
    class A:
        pass

    class B:
        pass

    class C(A):
        pass

    return lambda x: x + 1 if A in C.__mro__ else x - 1, [lambda: setattr(C, "__bases__", (B,))]


@fact
def the_names_of_a_class():
    class Thing:
        a = 1

    return lambda x: x + len([k for k in vars(Thing) if not k.startswith("_")]), [
        lambda: setattr(Thing, "b", 2)
    ]


@fact
def a_name_in_a_class():
    class Thing:
        a = 1

    return lambda x: x + ("b" in Thing.__dict__), [lambda: setattr(Thing, "b", 2)]


@fact
def the_fields_of_a_dataclass():
    @dataclasses.dataclass
    class Thing:
        a: int = 1

    @dataclasses.dataclass
    class Other:
        a: int = 1
        b: int = 2

    return lambda x: x + len(dataclasses.fields(Thing)), [
        lambda: setattr(Thing, "__dataclass_fields__", Other.__dataclass_fields__)
    ]


@fact
def an_attribute_of_a_cached_function():
    @functools.lru_cache
    def helper():
        return 1

    helper.note = 1.0
    return lambda x: x * helper.note, [lambda: setattr(helper, "note", 2.0)]


@fact
def an_attribute_of_a_partial():
    helper = functools.partial(int, 3)
    helper.note = 1.0
    return lambda x: x * helper.note, [lambda: setattr(helper, "note", 2.0)]


@fact
def the_doc_of_a_property():
    class Thing:
        @property
        def p(self):
            return 1

    return lambda x: x + len(Thing.p.__doc__ or ""), [lambda: setattr(Thing.p, "__doc__", "words")]


@fact
def the_signature_of_a_function():
    import inspect

    def helper(a, b=1):
        return a

    def other(a):
        return a

    return lambda x: x + len(inspect.signature(helper).parameters), [
        lambda: setattr(helper, "__code__", other.__code__)
    ]


@fact
def a_thread_local_with_a_default():
    local = threading.local()
    return lambda x: x + getattr(local, "k", 0.0), [
        lambda: setattr(local, "k", 2.0),
        lambda: setattr(local, "k", 3.0),
        lambda: delattr(local, "k"),
    ]


@fact
def a_thread_local():
    local = threading.local()
    local.k = 1.0
    return lambda x: x + local.k, [lambda: setattr(local, "k", 2.0), lambda: delattr(local, "k")]


@fact
def a_subclass_of_a_thread_local():
    class Local(threading.local):
        k = 1.0

    local = Local()
    return lambda x: x + local.k + hasattr(local, "j"), [
        lambda: setattr(local, "k", 2.0),
        lambda: setattr(local, "j", 2.0),
    ]


@fact
def a_write_to_a_thread_local():
    local = threading.local()

    def read(x):
        local.k = float(x[0]) + 1
        return x + local.k

    return read, [lambda: setattr(local, "k", 2.0)]


@fact
def a_weak_proxy():
    thing = Plain()
    proxy = weakref.proxy(thing)
    return lambda x: x + getattr(proxy, "k", 0.0), [
        lambda: setattr(thing, "k", 2.0),
        lambda: delattr(thing, "k"),
    ]


@fact
def a_method_of_a_weak_proxy():
    class Thing:
        k = 1.0

        def go(self):
            return self.k

    thing = Thing()
    proxy = weakref.proxy(thing)
    return lambda x: x + proxy.go(), [lambda: setattr(thing, "k", 2.0)]


@fact
def a_write_to_a_weak_proxy():
    thing = Plain()
    proxy = weakref.proxy(thing)

    def read(x):
        proxy.k = 2.0
        return x + thing.k

    return read, [lambda: setattr(thing, "k", 3.0)]


@fact
def a_weak_reference():
    things = [Plain()]
    ref = weakref.ref(things[0])
    return lambda x: x + 1 if ref() is None else x - 1, [lambda: (things.clear(), gc.collect())]


VAR = contextvars.ContextVar("VAR", default=1.0)
BARE = contextvars.ContextVar("BARE")


@fact
def a_context_variable():
    def undo():
        VAR.set(1.0)

    return lambda x: x + VAR.get(), [lambda: VAR.set(2.0), lambda: VAR.set(2)], undo


@fact
def a_context_variable_without_a_value():
    token = []
    return (lambda x: x + BARE.get(0.5)), [lambda: token.append(BARE.set(2.0)), lambda: BARE.reset(token[0])]


@fact
def the_contents_of_a_context_variable():
    items = [1.0]
    token = VAR.set(items)
    return lambda x: x + VAR.get()[0], [lambda: items.__setitem__(0, 2.0)], lambda: VAR.reset(token)


@fact
def an_attribute_of_a_python_module():
    module = types.ModuleType("some_module")
    module.k = 1.0
    return lambda x: x + module.k, [lambda: setattr(module, "k", 2.0)]


@fact
def a_lazy_attribute_of_a_python_module():
    module, table = types.ModuleType("some_module"), {"k": 1.0}
    module.__getattr__ = lambda name: table[name]
    return lambda x: x + module.k, [lambda: table.update(k=2.0)]


@fact
def an_attribute_that_a_python_module_lacks():
    module, other, table = types.ModuleType("some_module"), types.ModuleType("some_module"), {}

    def hook(name):
        if name in table:
            return table[name]
        raise AttributeError(name)

    class WithAttribute(types.ModuleType):
        k = 4.0

    return lambda x: (x + getattr(module, "k", 1.0), hasattr(other, "k")), [
        lambda: setattr(module, "__getattr__", lambda name: 2.0),
        lambda: setattr(module, "__getattr__", hook),
        lambda: table.update(k=3.0),
        table.clear,
        lambda: setattr(other, "__class__", WithAttribute),
        lambda: setattr(other, "__class__", types.ModuleType),
    ]


@fact
def the_limit_of_digits():
    number, text = 10**4000, "1" * 4000

    def attempt(fn):
        try:
            return len(str(fn()))
        except ValueError:
            return 0

    def read(x):
        return (
            x + attempt(lambda: str(number)),
            attempt(lambda: f"{number}"),
            attempt(lambda: "%d" % (number,)),  # noqa: UP031
            attempt(lambda: repr((number,))),
            attempt(lambda: int(text) > 0),
        )

    before = sys.get_int_max_str_digits()
    set_limit = sys.set_int_max_str_digits
    return read, [lambda: set_limit(700), lambda: set_limit(0)], lambda: set_limit(before)


@fact
def how_numpy_reacts_to_an_overflow():
    one, zero, before = np.float64(1), np.float64(0), np.geterr()

    def read(x):
        return x * float(one / zero), int(np.int64(1 << 62) * np.int64(4))

    changes = [lambda reaction=reaction: np.seterr(all=reaction) for reaction in ("raise", "ignore", "raise")]
    np.seterr(all="ignore")
    return read, changes, lambda: np.seterr(**before)


@fact
def a_slot():
    class Thing:
        __slots__ = ("k",)

    thing = Thing()
    return lambda x: x + getattr(thing, "k", 0.0), [
        lambda: setattr(thing, "k", 2.0),
        lambda: delattr(thing, "k"),
    ]


@fact
def the_default_factory_of_a_dict():
    table = collections.defaultdict(lambda: 1.0)
    return lambda x: x + (table.default_factory is None), [lambda: setattr(table, "default_factory", None)]


@fact
def the_order_of_a_set():
    items = {1, 2}
    return lambda x: x + sum(items), [lambda: items.add(5), lambda: items.clear()]


@fact
def the_dict_of_an_instance():
    thing = Plain()
    return lambda x: x + len(vars(thing)), [
        lambda: setattr(thing, "a", 1),
        lambda: setattr(thing, "__dict__", {}),
    ]


@fact
def the_length_of_a_deque():
    items = collections.deque([1.0])
    return lambda x: x + len(items), [lambda: items.append(2.0)]


@fact
def the_arguments_of_an_exception():
    error = ValueError(1.0)
    return lambda x: x + error.args[0], [lambda: setattr(error, "args", (2.0,))]


@fact
def a_hash_that_changes():
    class Thing:
        h = 1

        def __hash__(self):
            return Thing.h

    thing = Thing()
    return lambda x: x + hash(thing), [lambda: setattr(Thing, "h", 2)]


@fact
def a_weakly_held_object():
    class Thing:
        value = 1.0

    things = [Thing(), Thing()]
    refs = [weakref.ref(things[0]), weakref.ref(things[1])]
    return lambda x: x + refs[0]().value, [
        lambda: setattr(things[0], "value", 2.0),
        lambda: refs.reverse(),
        lambda: things.clear() or gc.collect(),
    ]


@fact
def a_value_under_a_weak_key():
    class Thing:
        pass

    thing, table = Thing(), weakref.WeakKeyDictionary()
    table[thing] = 1.0
    return lambda x: x + table[thing], [lambda: table.update({thing: 2.0}), lambda: table.clear()]


@fact
def what_a_class_is_dispatched_to():
    @functools.singledispatch
    def twice(value):
        return value * 2

    return lambda x: twice(x), [lambda: twice.register(torch.Tensor, lambda value: value + 1)]


@fact
def what_takes_over_a_call_of_pytorch():
    class Scaled(torch.Tensor):
        by = 1.0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            result = super().__torch_function__(func, types, args, kwargs or {})
            return result * cls.by if func is torch.Tensor.add else result

    def other(cls, func, types, args=(), kwargs=None):
        return "other"

    held = [X.as_subclass(Scaled)]
    return lambda x: x + held[0], [
        lambda: setattr(Scaled, "by", 3.0),
        lambda: held.__setitem__(0, X * 2),
        lambda: held.__setitem__(0, (X * 3).as_subclass(Scaled)),
        lambda: held.__setitem__(0, X.double().as_subclass(Scaled)),
        lambda: setattr(Scaled, "__torch_function__", classmethod(other)),
    ]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", FACTS)
def test_a_changed_fact_is_seen(name):
    check(*FACTS[name]())
