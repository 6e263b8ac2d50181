"""Where a value comes from: sources can be fetched again at the next call, and print as Python.

A source is a root (`Arg`, `Const`) or one raw step away from its `base`. Raw means that no user code runs:
dictionaries are read as dictionaries, classes through their MRO without binding, functions and cells by their
slots.

>>> DictItem(InstanceDict(Arg(0, "self")), "training").fetch((module,))
True
>>> str(DictItem(InstanceDict(Arg(0, "self")), "training"))
'self.training'
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..base.registry import MaybeNone

# Another torch.nn.functional.relu after a compile is seen, another code of that function or another item of a list that
# its module holds is not; everything that hangs on users' objects and classes is.
_TRUSTED_ROOTS = frozenset(sys.stdlib_module_names) - {"__main__", "test", "this"} | {
    "torch",
    "numpy",
    "dynamotor",
}


def trusted_module(name: Any) -> bool:
    """Whether the module of this name is taken as constant."""
    return isinstance(name, str) and name.partition(".")[0] in _TRUSTED_ROOTS


def stands_in(value: Any, name: str) -> bool:
    """Whether a function in a module's dict is a closure in the place of the module's own: `context_parallel` puts a
    new one there each time, so that its parts are guarded.
    """
    return type(value) is types.FunctionType and value.__closure__ is not None and value.__name__ != name


class Missing(Exception):
    """The source leads nowhere now: a key, attribute, item or cell is gone."""


class Source:
    """Base of all sources: immutable, hashable, compared by structure. `base` is None for roots."""

    __slots__ = ("base", "key", "_hash")
    # How the C guard program takes this step (csrc/guards.c has the same names).
    step_kind: ClassVar[str]
    gone: ClassVar[tuple[type[Exception], ...]] = ()  # what `read` raises where there is nothing
    text: ClassVar[str] = "{0.base}.{0.key}"
    base: Source | MaybeNone
    key: Any
    _hash: int

    def __init__(self, base: Source | None, key: Any = None) -> None:
        _set_base(self, base)
        _set_key(self, key)
        _set_hash(self, hash((type(self), base, self._key_identity())))

    def _key_identity(self) -> Any:
        return self.key

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other) or self._hash != other._hash:
            return False
        return self._key_identity() == other._key_identity() and self.base == other.base

    def __str__(self) -> str:
        return self.text.format(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"

    def fetch(self, args: tuple[Any, ...]) -> Any:
        """The value now, for a call with these flat arguments; raises `Missing`."""
        assert self.base is not None
        return self.step(self.base.fetch(args))

    def step(self, parent: Any) -> Any:
        """The value one step away from the base's value; raises `Missing`."""
        try:
            return self.read(parent)
        except self.gone:
            raise Missing(str(self)) from None

    def ends_at(self, parent: Any) -> bool:
        """Whether the step from this value leads nowhere."""
        try:
            self.step(parent)
        except Missing:
            return True
        return False

    def read(self, parent: Any) -> Any:
        """The same; raises one of `gone` where there is nothing."""
        raise NotImplementedError

    @property
    def root(self) -> Source:
        """The `Arg` or `Const` at the start of the chain."""
        source = self
        while source.base is not None:
            source = source.base
        return source

    @property
    def roots(self) -> tuple[Source, ...]:
        """The same, for a source that may have several."""
        root = self.root
        return (root,) if root is self else root.roots

    def leads_through(self, sources: Container[Source | None]) -> bool:
        """Whether one of these is on the way, or this one."""
        return self in sources or self.base is not None and self.base.leads_through(sources)

    @property
    def is_held(self) -> bool:
        """Whether the chain starts at an object that the cache entry holds (so that its value can be
        bound).
        """
        return isinstance(self.root, Const)


_set_base, _set_key, _set_hash = (vars(Source)[name].__set__ for name in Source.__slots__)


class Arg(Source):
    """A flat call argument: positionals first, then keyword values in the order of the call."""

    __slots__ = ("name",)
    step_kind = "arg"
    text = "{0.name}"
    name: str

    def __init__(self, index: int, name: str) -> None:
        object.__setattr__(self, "name", name)
        super().__init__(None, index)

    @property
    def index(self) -> int:
        return self.key

    def fetch(self, args: tuple[Any, ...]) -> Any:
        if self.key >= len(args):
            raise Missing(str(self))
        return args[self.key]


class Const(Source):
    """An object that the entry holds, compared by identity: the root module, the function, a class, a
    module.
    """

    __slots__ = ("label",)
    step_kind = "const"
    text = "{0.label}"
    label: str

    def __init__(self, obj: Any, label: str) -> None:
        object.__setattr__(self, "label", label)
        super().__init__(None, obj)

    def _key_identity(self) -> Any:
        return id(self.key)

    @property
    def obj(self) -> Any:
        return self.key

    def fetch(self, args: tuple[Any, ...]) -> Any:
        return self.key


class Attr(Source):
    """Plain `getattr`, run again at every call: only for C slots and getsets that have no better source."""

    __slots__ = ()
    step_kind = "getattr"
    gone = (AttributeError,)

    def read(self, parent: Any) -> Any:
        return getattr(parent, self.key)


class Called(Source):
    """The answer of a C function (the key) about the base, asked again at every call: a weak reference's
    object.
    """

    __slots__ = ()
    step_kind = "getattr"
    gone = (TypeError, AttributeError)  # of another base
    text = "{0.base}()"

    def __str__(self) -> str:
        method = isinstance(self.key, types.MethodDescriptorType)
        return f"{self.base}.{self.key.__name__}()" if method else super().__str__()

    def read(self, parent: Any) -> Any:
        return self.key(parent)


class Made(Called):
    """A new object at each call: the result of a function that the entry holds (the base)."""

    __slots__ = ()

    def __init__(self, make: Callable[[], Any], label: str) -> None:
        super().__init__(Const(make, label), _call)


def _call(make: Callable[[], Any]) -> Any:
    return make()


class Joined(Source):
    """Several sources as one: the tuple of their values."""

    __slots__ = ()
    step_kind = "getattr"  # a function of all arguments

    def __init__(self, parts: tuple[Source, ...]) -> None:
        super().__init__(None, parts)

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.key))})"

    def fetch(self, args: tuple[Any, ...]) -> Any:
        return tuple([part.fetch(args) for part in self.key])

    @property
    def roots(self) -> tuple[Source, ...]:
        return tuple([root for part in self.key for root in part.roots])

    def leads_through(self, sources: Container[Source | None]) -> bool:
        return self in sources or any(part.leads_through(sources) for part in self.key)


SEQUENCE_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))


@dataclass(frozen=True)
class _StepsAhead:
    steps: int

    def __call__(self, iterator: Any) -> Any:
        if type(iterator) not in SEQUENCE_ITERATORS:
            raise TypeError
        _, (items,), *at = iterator.__reduce__()
        index = self.steps + (at[0] or 0 if at else 0)
        if index >= len(items):
            raise TypeError
        return items[index]


class Ahead(Called):
    """The item so many steps ahead of an iterator over a list, tuple or range, which stays where it is."""

    __slots__ = ()

    def __init__(self, base: Source, steps: int) -> None:
        super().__init__(base, _StepsAhead(steps))

    def __str__(self) -> str:
        return f"{self.base}[+{self.key.steps}]"


class InstanceDict(Source):
    """The `__dict__` of an instance or module."""

    __slots__ = ()
    step_kind = "instance_dict"
    gone = (AttributeError,)
    text = "{0.base}.__dict__"

    def read(self, parent: Any) -> Any:
        found = object.__getattribute__(parent, "__dict__")
        if type(found) is not dict:
            raise AttributeError
        return found


class DictItem(Source):
    """An item of a dict (or dict subclass), looked up by `dict.__getitem__`."""

    __slots__ = ()
    step_kind = "dict_item"
    gone = (KeyError, TypeError)

    def _key_identity(self) -> Any:
        return type(self.key), self.key

    def read(self, parent: Any) -> Any:
        if not dict.__contains__(
            parent, self.key
        ):  # `dict.__getitem__` would call a subclass's `__missing__`
            raise KeyError(self.key)
        return dict.__getitem__(parent, self.key)

    def __str__(self) -> str:
        if isinstance(self.base, InstanceDict) and isinstance(self.key, str):
            return f"{self.base.base}.{self.key}"
        return f"{self.base}[{self.key!r}]"


class SeqItem(Source):
    """An item of a tuple or list (or a subclass), by position, without calling `__getitem__`."""

    __slots__ = ()
    step_kind = "seq_item"
    gone = (IndexError, TypeError)
    text = "{0.base}[{0.key}]"

    def read(self, parent: Any) -> Any:
        kind = tuple if isinstance(parent, tuple) else list
        return kind.__getitem__(parent, self.key)


def lookup_type_attr(cls: type, name: str) -> Any:
    """The entry of a class's MRO under a name, unbound (as `_PyType_Lookup`); raises `Missing`."""
    for klass in type.__dict__["__mro__"].__get__(cls):
        namespace = type.__dict__["__dict__"].__get__(klass)
        if name in namespace:
            return namespace[name]
    raise Missing(f"{cls.__name__}.{name}")


class TypeAttr(Source):
    """Raw MRO lookup of a name on a class, without binding."""

    __slots__ = ()
    step_kind = "type_attr"
    gone = (TypeError,)  # not a class

    def read(self, parent: Any) -> Any:
        return lookup_type_attr(parent, self.key)


_OWNERS = {"__self__": types.MethodType, "__func__": types.MethodType, "cell_contents": types.CellType}


class SlotOf(Source):
    """The slot of a Python function, a bound method or a cell under a name; a function's `__defaults__` and friends
    may be None.
    """

    __slots__ = ()
    step_kind = "slot"
    gone = (AttributeError, ValueError)  # of another object, or an empty cell

    def read(self, parent: Any) -> Any:
        if type(parent) is not _OWNERS.get(self.key, types.FunctionType):
            raise AttributeError
        return getattr(parent, self.key)


class SizeOf(Source):
    """The size of one dimension of a tensor."""

    __slots__ = ()
    step_kind = "size_of"
    text = "{0.base}.shape[{0.key}]"
    gone = (TypeError, IndexError)  # not a tensor, or one of fewer dimensions

    def read(self, parent: Any) -> Any:
        return torch.Tensor.size(parent, self.key)


class StrideOf(Source):
    """The stride of one dimension of a strided tensor, in elements."""

    __slots__ = ()
    step_kind = "stride_of"
    text = "{0.base}.stride({0.key})"
    gone = (TypeError, IndexError)

    def read(self, parent: Any) -> Any:
        return torch.Tensor.stride(parent, self.key)


def is_static(source: Source | None) -> bool:
    """Whether a source leads to a module's parameter or buffer: bound to the entry, the same object until a
    guard fails.
    """
    table = source.base if isinstance(source, DictItem) else None
    return isinstance(table, DictItem) and table.key in ("_parameters", "_buffers")


def input_name(source: Source) -> str:
    """A placeholder's name: the path to the tensor, without the tables in which modules keep things."""
    words: list[str] = []
    while type(source) in (DictItem, InstanceDict) and type(source.base) in (DictItem, InstanceDict, Const):
        if type(source.key) not in (str, type(None)):
            break
        words[:0] = _WORDS(source.key or "")
        source = source.base
    words[:0] = _WORDS(str(source))
    named = [w for w in words if w not in ("_modules", "_parameters", "_buffers", "__dict__")]
    return "_".join(named)[-60:].lstrip("_0123456789") or "arg"


_WORDS = re.compile(r"\w+").findall
