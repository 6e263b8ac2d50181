"""Guards: conditions under which a compiled graph is valid. Each kind is a class; an instance, called a row,
is one condition of one graph.

A row checks itself in Python (`check`: reasons and tests), says why it failed (`reason`), and encodes itself
for the C program of its entry (`csrc/guards.c`), which decides at every call: by the C function that the class
names in `code`, or by `check_value` if that is "predicate".

>>> guard = ConstEquals(Arg(0, "n"), 3)
>>> guard.check((3,)), guard.check((3.0,))
(True, False)
>>> guard.reason((4,))
'argument `n` is 4, was 3'
"""

from __future__ import annotations

import enum
import operator
import re
import reprlib
import struct
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from dynamotor.graph.kernel_checks import kernel_settings
from dynamotor.graph.spec import TensorSpec

from ..base import compat
from .source import Arg, Attr, Const, DictItem, Missing, SlotOf, Source, TypeAttr

_SAME_BY_VALUE = frozenset(
    {int, str, bytes, range, torch.device, torch.dtype, torch.layout, torch.memory_format, types.CodeType}
)
_SEQUENCES = frozenset({tuple, list, torch.Size})


def const_equal(now: Any, then: Any) -> bool:
    """Type-exact equality of constants: 1, 1.0 and True differ, 0.0 and -0.0 differ, nan equals nan. Runs no
    user code.
    """
    if type(now) is not type(then):
        return False
    return now is then or _comparison_key(now) == _comparison_key(then)


def _comparison_key(value: Any) -> Any:
    """A hashable key that is equal where `const_equal` holds. Runs no user code."""
    kind = type(value)
    if kind in _SAME_BY_VALUE:
        return kind, value
    if kind in (float, complex):
        return kind, struct.pack("dd", value.real, value.imag)
    if kind in (set, frozenset):
        return kind, frozenset(map(_comparison_key, value))
    if kind in _SEQUENCES or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        return kind, tuple(map(_comparison_key, (list if kind is list else tuple).__iter__(value)))
    if kind is slice:
        return kind, tuple(map(_comparison_key, (value.start, value.stop, value.step)))
    return kind, id(value)


def is_constant(value: Any) -> bool:
    """Whether `ConstEquals` can compare the value by more than identity (and it cannot change in place)."""
    kind = type(value)
    if kind in (tuple, torch.Size, frozenset) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        return all(map(is_constant, value))
    if kind is slice:
        return is_constant((value.start, value.stop, value.step))
    return (
        kind in _SAME_BY_VALUE
        or kind in (float, complex, bool, type(None), type(...), type(NotImplemented))
        or (isinstance(value, enum.Enum))
    )


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class _Brief(reprlib.Repr):
    """Texts of a few characters, whatever a value holds: a storage shows every byte of a model's weights."""

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, torch.Tensor):
            strided = x.layout == torch.strided
            return f"a {type(x).__name__} of {TensorSpec.of(x)}" if strided else "a sparse tensor"
        if isinstance(x, torch.UntypedStorage | torch.TypedStorage):
            return f"a {type(x).__name__} of {x.nbytes()} bytes"
        if type(x) is weakref.ref:
            held = x()
            return "a freed object" if held is None else self.repr1(held, level)
        return super().repr1(x, level)

    def repr_instance(self, x: Any, level: int) -> str:
        return repr(x)


_brief = _Brief()
_brief.maxstring = _brief.maxother = _brief.maxlong = 80


def _short(value: Any) -> str:
    try:
        text = _ADDRESS.sub("", _brief.repr(value))
    except Exception:  # of a class that is named as one of Python's, an integer of too many digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class Guard:
    """Base of the rows. `source` leads to the checked value; a missing source fails the guard.

    A subclass sets `code`, `text` (or `explain`) and `check_value`. Its further fields are facts: the expected
    answers, which rows are compared by.
    """

    source: Source
    code: ClassVar[str] = ""
    # The reason of a failure. {source}: the subject; {now}: its value; {0}: the row; {name of a field}: that fact.
    text: ClassVar[str] = "{source} is {now}, guarded as {0}"

    def check(self, args: tuple[Any, ...]) -> bool:
        """Whether the guard holds for a call with these flat arguments."""
        try:
            return self.check_value(self.fetch(args))
        except Missing:
            return False

    def fetch(self, args: tuple[Any, ...]) -> Any:
        """The checked value, for a call with these flat arguments; raises `Missing`."""
        return self.source.fetch(args)

    def check_value(self, value: Any) -> bool:
        """Whether the guard holds when the source gives this value."""
        raise NotImplementedError

    @property
    def subject(self) -> str:
        """The source, as messages name it."""
        return f"argument `{self.source}`" if type(self.source) is Arg else f"`{self.source}`"

    def reason(self, args: tuple[Any, ...]) -> str:
        """Why it does not hold, for people."""
        try:
            value = self.source.fetch(args)
        except Missing as missing:
            return (
                f"{self.subject} is gone (`{missing}`)"
                if str(missing) != str(self.source)
                else f"{self.subject} is gone"
            )
        return self.explain(value)

    def explain(self, value: Any) -> str:
        """Why it does not hold when the source gives this value."""
        facts = {f.name: _short(getattr(self, f.name)) for f in fields(self)[1:]}
        return self.text.format(self, source=self.subject, now=_short(value), **facts)

    def __str__(self) -> str:
        values = [getattr(self, f.name) for f in fields(self) if f.name != "source"]
        facts = [value.__qualname__ if isinstance(value, type) else _short(value) for value in values]
        return f"{self.source}: {type(self).__name__}" + (f"({', '.join(facts)})" if facts else "")

    @property
    def sources(self) -> tuple[Source, ...]:
        """Every source the row reads."""
        return (self.source,)

    def encode(self, node: Callable[[Source], int]) -> Any:
        """The C function's operand beside the value of `source`: the first fact, or `check_value` for "predicate".

        `node(source)` gives the number of a source in the program, for rows that read several.
        """
        if self.code == "predicate":
            return self.check_value
        return getattr(self, self.__match_args__[1])  # type: ignore[misc]  # the field behind `source`


@dataclass(frozen=True)
class TypeIs(Guard):
    """`type(value) is cls`."""

    cls: type
    code = "type_is"

    def check_value(self, value: Any) -> bool:
        return type(value) is self.cls

    def explain(self, value: Any) -> str:
        return f"{self.subject} has type {type(value).__name__}, was {self.cls.__name__}"


@dataclass(frozen=True, eq=False)
class _EqualByFacts(Guard):
    """Base of the rows that are equal where their `then` is equal, since `==` of their facts may run user code
    or be False for one object (NaN).
    """

    @property
    def then(self) -> Any:
        """A hashable key for the facts."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _EqualByFacts) or type(other) is not type(self):
            return False
        return self.source == other.source and self.then == other.then

    def __hash__(self) -> int:
        return hash((type(self), self.source))  # a source has few rows of a kind


@dataclass(frozen=True, eq=False)
class IdIs(_EqualByFacts):
    """`value is obj`."""

    obj: Any
    code = "id_is"
    text = "{source} is {now}, was {obj} (another object)"

    @property
    def then(self) -> int:
        return id(self.obj)

    def check_value(self, value: Any) -> bool:
        return value is self.obj


@dataclass(frozen=True, eq=False)
class TensorIs(_EqualByFacts):
    """`value` is the tensor at this address. The guard neither keeps it alive nor holds it weakly:
    `torch.utils.swap_tensors` refuses tensors with weak references. A tensor that takes over the address of a
    freed one is like the same tensor with other contents, which other rows and each program check.
    """

    address: int
    memory: weakref.ref[Any]  # dead once the tensor is freed, unless another tensor shares its memory
    shown: str  # the tensor in messages
    code = "tensor_is"
    text = "{source} is {now}, not the tensor that is bound"

    @classmethod
    def of(cls, source: Source, tensor: torch.Tensor) -> TensorIs:
        """The row for a tensor."""
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        shown = _short(tensor) if plain else f"a {type(tensor).__name__}"
        return cls(source, id(tensor), weakref.ref(tensor.untyped_storage() if plain else tensor), shown)

    def __str__(self) -> str:
        return f"{self.source}: TensorIs({'a freed tensor' if self.is_gone else self.shown})"

    @property
    def then(self) -> int:
        return self.address

    @property
    def is_gone(self) -> bool:
        """Whether the tensor's memory was freed."""
        return self.memory() is None

    def check_value(self, value: Any) -> bool:
        return id(value) == self.address


@dataclass(frozen=True, eq=False)
class ConstEquals(_EqualByFacts):
    """`const_equal(value, then)`; see `is_constant` for the values that it suits."""

    value: Any
    code = "const_equals"
    text = "{source} is {now}, was {value}"

    @property
    def then(self) -> Any:
        return _comparison_key(self.value)

    def check_value(self, value: Any) -> bool:
        return const_equal(value, self.value)


@dataclass(frozen=True, eq=False)
class Answer(_EqualByFacts):
    """`ask(value)` gives `answer` again; `asked` names the question in messages. Slow (a Python call for each
    call of the graph): only for facts that have no row of their own. If `ask` raises, `answer` is the class of the
    exception."""

    ask: Callable[[Any], Any]
    answer: Any
    asked: str
    code = "predicate"

    @property
    def then(self) -> Any:
        return self.asked, _comparison_key(self.answer)

    def check_value(self, value: Any) -> bool:
        return const_equal(answer_of(self.ask, value), self.answer)

    def explain(self, value: Any) -> str:
        return f"{self.asked} of {self.subject} is {_short(answer_of(self.ask, value))}, was {_short(self.answer)}"

    def encode(self, node: Callable[[Source], int]) -> Any:
        ask, answer = self.ask, self.answer
        return (lambda value: ask(value) is answer) if type(answer) is bool else self.check_value


BYTES = "its bytes", operator.methodcaller("tobytes")  # asked of a number of NumPy's: a NaN is itself


def answer_of(ask: Callable[[Any], Any], value: Any) -> Any:
    """The answer of a question about a value: a constant, an object, or the class of the exception that it
    raises.
    """
    try:
        return ask(value)
    except Exception as error:  # its error is the answer
        return type(error)


def key_set(tensor: torch.Tensor) -> int:
    """Raw dispatch keys of a tensor: device backend, layout, conjugate and negative views, inference,
    subclasses.
    """
    return compat.dispatch_keys(tensor).raw_repr()


@dataclass(frozen=True)
class TensorMatch(Guard):
    """A tensor of this class, shape, stride, dtype, device, dispatch keys and `requires_grad`. None sizes
    match any.
    """

    cls: type[torch.Tensor]
    shape: tuple[int | None, ...]
    stride: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    keys: int
    code = "tensor_match"

    @staticmethod
    def of(source: Source, tensor: torch.Tensor) -> TensorMatch:
        """The guard that the tensor itself passes (strided tensors only)."""
        return TensorMatch(
            source,
            type(tensor),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            key_set(tensor),
        )

    def _facts(self, value: Any) -> list[tuple[str, Any, Any]]:
        if value.layout != torch.strided:
            return [("layout {}", value.layout, torch.strided)]
        return [
            ("dtype {}", value.dtype, self.dtype),
            ("device {}", value.device, self.device),
            ("{} dimension(s)", value.dim(), len(self.shape)),
            *(
                ("size {} at dimension " + str(i), a, b)
                for i, (a, b) in enumerate(zip(value.shape, self.shape))
            ),
            *(
                ("stride {} at dimension " + str(i), a, b)
                for i, (a, b) in enumerate(zip(value.stride(), self.stride))
            ),
            ("requires_grad={}", value.requires_grad, self.requires_grad),
            ("dispatch keys {}", hex(key_set(value)), hex(self.keys)),
        ]

    def check_value(self, value: Any) -> bool:
        return type(value) is self.cls and all(
            now == then or then is None for _, now, then in self._facts(value)
        )

    def explain(self, value: Any) -> str:
        if type(value) is not self.cls:
            return f"{self.subject} has type {type(value).__name__}, was {self.cls.__name__}"
        text, now, then = next(
            (f for f in self._facts(value) if f[1] != f[2] and f[2] is not None), ("", "", "")
        )
        return f"{self.subject} has {text.format(now)}, was {then}"

    def encode(self, node: Callable[[Source], int]) -> Any:
        wild = tuple(-1 if size is None else size for size in self.shape)
        # Strides may be 0 or large but never negative, so -1 is free to mean any.
        strides = tuple(-1 if step is None else step for step in self.stride)
        return (self.cls, wild, strides, self.dtype, self.device, self.requires_grad, self.keys)


@dataclass(frozen=True)
class Length(Guard):
    """The number of items of a list, tuple, dict, set, str or bytes (or a subclass), counted without calling
    `__len__`.
    """

    n: int
    code = "length"

    def check_value(self, value: Any) -> bool:
        return self._of(value) == self.n

    def explain(self, value: Any) -> str:
        return f"{self.subject} has length {self._of(value)}, was {self.n}"

    @staticmethod
    def _of(value: Any) -> int:
        kinds: tuple[Any, ...] = (list, tuple, dict, set, frozenset, str, bytes)
        kind = next((kind for kind in kinds if isinstance(value, kind)), None)
        return len(value) if kind is None else kind.__len__(value)


def ordered_keys(value: dict[Any, Any]) -> Iterable[Any]:
    """The keys in their order: an OrderedDict keeps one of its own, any other dict is read raw."""
    return OrderedDict.__iter__(value) if isinstance(value, OrderedDict) else dict.__iter__(value)


@dataclass(frozen=True, eq=False)
class DictKeys(_EqualByFacts):
    """A dict (or subclass) has exactly these keys, in this order."""

    keys: tuple[Any, ...]
    code = "dict_keys"

    @property
    def then(self) -> Any:
        return _comparison_key(self.keys)

    def check_value(self, value: Any) -> bool:
        if not isinstance(value, dict) or dict.__len__(value) != len(self.keys):
            return False
        return all(map(const_equal, ordered_keys(value), self.keys))

    def explain(self, value: Any) -> str:
        return f"{self.subject} has keys {_short([*ordered_keys(value)])}, had {_short(list(self.keys))}"


# The C program's names for the absence of each kind of thing.
_ABSENT = {DictItem: "missing_key", TypeAttr: "missing_type_attr", Attr: "missing_attr", SlotOf: "cell_empty"}


@dataclass(frozen=True)
class Absent(Guard):
    """Nothing is found at the source: a dict has no such key, a class or object no such attribute, or a cell is
    empty. An attribute is looked up by `hasattr` at every call."""

    text = "{source} is {now}, and was not there"

    @property
    def code(self) -> str:  # type: ignore[override]
        return _ABSENT[type(self.source)]

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.source.base,)

    def fetch(self, args: tuple[Any, ...]) -> Any:
        return self.source.base.fetch(args)

    def check_value(self, value: Any) -> bool:
        return self.source.ends_at(value)

    def encode(self, node: Callable[[Source], int]) -> Any:
        return self.source.key


def runs_code_at_its_end(value: object) -> bool:
    """Whether letting an object go may run code: its own finalizer, or the end of a generator
    in one of the frames that an error holds.
    """
    if isinstance(value, BaseException):
        return value.__traceback__ is not None
    return hasattr(type(value), "__del__")


@dataclass(frozen=True)
class Replaceable(Guard):
    """A dict has no such key, or a value there without a finalizer, so that a write runs no code of the user's."""

    key: Any
    code = "replaceable"
    text = "{source} has a finalizer under the key {key} now"

    def check_value(self, value: Any) -> bool:
        found = dict.get(value, self.key) if isinstance(value, dict) else self
        return found is not self and not runs_code_at_its_end(found)


@dataclass(frozen=True)
class MroIs(Guard):
    """A class has this method resolution order (new `__bases__` change it)."""

    mro: tuple[type, ...]
    code = "mro_is"

    def check_value(self, value: Any) -> bool:
        return isinstance(value, type) and _mro_of(value) == self.mro

    def explain(self, value: Any) -> str:
        return f"{self.subject} has the bases {_short(value.__bases__)} now"


@dataclass(frozen=True)
class KernelSettings(Guard):
    """PyTorch's settings that choose kernels, and with them strides or errors: which attention, oneDNN,
    cuDNN, threads.
    """

    settings: tuple[Any, ...]
    bits: int  # the settings as the C program reads them, or -1
    code = "kernel_settings"

    @staticmethod
    def current(bits: int) -> KernelSettings:
        """The guard that holds now; `bits` is `_C.kernel_settings()`."""
        return KernelSettings(Const(None, "PyTorch's settings"), kernel_settings(), bits)

    def check_value(self, value: Any) -> bool:
        return kernel_settings() == self.settings

    def explain(self, value: Any) -> str:
        return f"the settings of attention, oneDNN, cuDNN and threads are {kernel_settings()}, were {self.settings}"

    def encode(self, node: Callable[[Source], int]) -> Any:
        return self.bits


@dataclass(frozen=True)
class DigitLimit(Guard):
    """`sys.get_int_max_str_digits()`, above which integers have no decimal text. Only programs that write or
    read integers of more digits than the least limit have it.
    """

    limit: int
    code = "predicate"
    LEAST_DIGITS: ClassVar[int] = sys.int_info.str_digits_check_threshold

    @staticmethod
    def current() -> DigitLimit:
        """The guard that holds now."""
        return DigitLimit(Const(None, "Python's limit of digits"), sys.get_int_max_str_digits())

    @staticmethod
    def concerns(value: object) -> bool:
        """Whether the value is an integer that a limit may keep from having a text, or a tuple with one."""
        if type(value) is tuple:
            return any(map(DigitLimit.concerns, value))
        return type(value) is int and value.bit_length() > 3 * DigitLimit.LEAST_DIGITS

    def check_value(self, value: Any) -> bool:
        return sys.get_int_max_str_digits() == self.limit

    def explain(self, value: Any) -> str:
        return f"integers may have {sys.get_int_max_str_digits()} digits as text now, {self.limit} before"


_mro_of = type.__dict__["__mro__"].__get__


@dataclass(frozen=True)
class Together(Guard):
    """Base of the rows about several sources, `source` the first of them; a missing one fails the guard."""

    others: tuple[Source, ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.source, *self.others)

    def fetch(self, args: tuple[Any, ...]) -> Any:
        return [source.fetch(args) for source in self.sources]

    def reason(self, args: tuple[Any, ...]) -> str:
        return self.text.format(source=self.source, others=", ".join(map(str, self.others)))

    def encode(self, node: Callable[[Source], int]) -> Any:
        return tuple(node(source) for source in self.sources)


@dataclass(frozen=True)
class SameObject(Together):
    """Two sources give one object."""

    code = "same"
    text = "{source} and {others} were one object and are not now"

    def check_value(self, value: Any) -> bool:
        return value[0] is value[1]

    def encode(self, node: Callable[[Source], int]) -> Any:
        return node(self.others[0])


@dataclass(frozen=True)
class Distinct(Together):
    """`source` and the first of `others`, `n_changed` sources, give objects that no other source gives. One row for all
    pairs: a program that writes into each layer of a cache reads hundreds of dicts."""

    n_changed: int = 1
    code = "distinct"

    def check_value(self, value: Any) -> bool:
        changed = set(map(id, value[: self.n_changed]))
        return len(changed) == self.n_changed and changed.isdisjoint(map(id, value[self.n_changed :]))

    def reason(self, args: tuple[Any, ...]) -> str:
        changed: dict[int, Source] = {}
        for place, source in enumerate(self.sources):
            try:
                found = id(source.fetch(args))
            except Missing:
                return f"`{source}` is gone"
            if found in changed:
                return f"`{changed[found]}` and `{source}` were different objects and are one now"
            if place < self.n_changed:
                changed[found] = source
        return super().reason(args)

    def encode(self, node: Callable[[Source], int]) -> Any:
        return self.n_changed, super().encode(node)


def memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte past the last that a strided tensor may touch; tensors without storage name
    their memory by a number."""
    token_of = getattr(type(tensor), "_memory_token", None)
    if token_of is not None:
        token = token_of(tensor)
        return token, token + 1
    start, spec = tensor.data_ptr(), TensorSpec.of(tensor)
    return start, start + spec.extent * tensor.element_size()


@dataclass(frozen=True)
class NoOverlap(Together):
    """The memory of the tensor at `source` (which is written) overlaps none of the others' memory."""

    code = "no_overlap"
    text = "the memory of {source} overlaps one of {others}"

    def check_value(self, value: Any) -> bool:
        return are_apart(value, 1)

    def encode(self, node: Callable[[Source], int]) -> Any:
        return tuple(node(source) for source in self.others)


@dataclass(frozen=True)
class Apart(Together):
    """`NoOverlap` of `source` and the first of `others`, `n_written` tensors that are written, with all
    tensors. One row for all pairs: most addresses stay the same between calls, and C then skips the comparison."""

    n_written: int
    code = "apart"
    text = "tensors of which some are written share memory now"

    def check_value(self, value: Any) -> bool:
        return are_apart(value, self.n_written)

    def encode(self, node: Callable[[Source], int]) -> Any:
        return self.n_written, super().encode(node)


def are_apart(tensors: list[torch.Tensor], n_written: int) -> bool:
    """Whether the memory of the first `n_written` tensors overlaps no other one's."""
    ranges = [memory_range(tensor) for tensor in tensors]
    return not any(
        a < d and c < b
        for i, (a, b) in enumerate(ranges[:n_written])
        for c, d in ranges[i + 1 :]
        if a < b and c < d
    )


@dataclass(frozen=True)
class Ambient:
    """PyTorch's thread-wide state, which changes the results of ops, is as it was at capture. One an entry; it
    has no source.
    """

    grad_mode: bool
    inference_mode: bool
    autocast: tuple[tuple[str, torch.dtype | None], ...]  # (device type, dtype or None when off)
    autocast_cache: bool
    default_dtype: torch.dtype
    # The device of a `with torch.device(...)`, the identity of any other mode.
    function_modes: tuple[torch.device | int, ...]
    function_enabled: int
    dispatch_modes: int
    deterministic: bool
    include_keys: int
    exclude_keys: int

    AUTOCAST_DEVICES: ClassVar[tuple[str, ...]] = ("cpu", "cuda", "xla")
    code: ClassVar[str] = "ambient"
    sources: ClassVar[tuple[Source, ...]] = ()

    @staticmethod
    def current() -> Ambient:
        """The guard that holds now, on this thread."""
        autocast = tuple(
            (device, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)
            for device in Ambient.AUTOCAST_DEVICES
        )
        modes = compat.function_mode_stack() if compat.count_function_modes() else ()
        modes = tuple(mode.device if isinstance(mode, compat.DeviceContext) else id(mode) for mode in modes)
        enabled = 0 if compat.torch_function_enabled() else 2 if compat.torch_function_all_disabled() else 1
        return Ambient(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
            modes,
            enabled,
            compat.count_dispatch_modes(),
            compat.deterministic_algorithms(),
            compat.included_keys().raw_repr(),
            compat.excluded_keys().raw_repr(),
        )

    def check(self, args: tuple[Any, ...]) -> bool:
        return Ambient.current() == self

    def reason(self, args: tuple[Any, ...]) -> str:
        now = Ambient.current()
        facts = [
            (f.name.replace("_", " "), getattr(now, f.name), getattr(self, f.name)) for f in fields(self)
        ]
        return "; ".join(f"{name} is {_state(a)}, was {_state(b)}" for name, a, b in facts if a != b)


def _state(value: Any) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


AnyGuard = Guard | Ambient


def first_failure(guards: list[AnyGuard] | tuple[AnyGuard, ...], args: tuple[Any, ...]) -> AnyGuard | None:
    """The first guard that does not hold for a call with these flat arguments, or None."""
    return next((guard for guard in guards if not guard.check(args)), None)
