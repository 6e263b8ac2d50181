"""A tensor in a trace, and the torch calls on it: each runs once on ShapeTensors and is one node of the graph
(contract 2).

>>> torch_call(trace, torch.add, [x, y], {})        # node: add = torch.add(x, y)
>>> torch_call(trace, "view", [x, size], {})        # node: view = x.view(size)
"""

from __future__ import annotations

import contextlib
import operator
import sys
import types
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

import torch
from torch import fx

from ... import _C
from ...base import compat
from ...base.compat import OpOverload, OpOverloadPacket
from ...base.errors import DynamotorError
from ...base.narrowing import checked
from ...base.registry import Deferred, Registry
from ...graph.error_lines import history_is_refused
from ...graph.kernel_checks import tf32
from ...graph.op_facts import DATA_ERRORS, written_names
from ...graph.shape_tensor import DataDependent, ShapeTensor, UnsupportedOp, shape_mode, spec_of
from ...graph.sizes import Size, is_unbacked, leaves_in
from ...graph.spec import TensorSpec, is_lazy
from ...graph.tensor_subclass import flatten, flatten_all, is_wrapper, outer_spec
from ..breaks import Unsupported, unsupported, unsupported_if
from ..guards import Absent, KernelSettings, TensorIs, are_apart
from ..source import Called, Const, DictItem, InstanceDict, Source, input_name, is_static
from ..torch_rules import ADDRESSING, ANSWERS, METADATA, SPECIAL_METHODS
from . import repeated_calls
from .base import MISSING, Iterator, ResultEmitter, Trace, Value, under_modes, wrap_rule
from .constant import PURE_TYPES, Constant, Number
from .containers import DictValue, ListValue, SequenceValue, TupleValue
from .data_writes import note_recorded, refuse_if_recorded, write_by_data, written_part
from .jagged_size import NestedSizeValue
from .number import FloatValue
from .operators import UNARY, special_name
from .return_types import ReturnTypeValue
from .size import QuotientValue, SizeValue, size_result
from .slices import SliceValue, without_symbols


class TensorValue(Value):
    """A tensor: a node of the graph and the ShapeTensor that shows its shape, dtype, layout and gradient
    flow.

    A tensor from outside has a `source` and `obj`, the real tensor; it gets its placeholder at the first use
    in a call.
    """

    __slots__ = (
        "_node",
        "example",
        "obj",
        "cls",
        "trace",
        "pinned",
        "settled",
        "first_version",
        "attributes",
        "data_of",
        "carrier",
        "inside",
        "written_inside",
        "new_data",
    )
    source: Any  # a Source for tensors from outside, else None

    def __init__(
        self,
        trace: Trace,
        node: fx.Node | None,
        example: ShapeTensor,
        source: Source | None = None,
        obj: Any = MISSING,
        cls: type = torch.Tensor,
    ) -> None:
        self.source, self.trace, self._node, self.example, self.obj, self.cls = (
            source,
            trace,
            node,
            example,
            obj,
            cls,
        )
        self.pinned = (
            source is not None
            and is_static(source)
            and source not in trace.sizes.policy.replaced
            and not (trace.modules.repeated and source.leads_through(trace.modules.repeated))
        )
        self.settled = self.pinned or (  # hardly ever another one in its program
            source is not None
            and trace.modules.owner is not None
            and is_static(source)
            and source not in trace.sizes.policy.replaced
            and source.leads_through((trace.modules.owner,))
        )
        self.first_version = version(example)
        self.attributes: dict[str, Value] = {}
        self.data_of: TensorValue | None = None  # this is `data_of.data`
        self.carrier: Any = None  # of a wrapper subclass: the object that the program has (rules_wrappers.py)
        self.inside = self.written_inside = False  # of a wrapper that is an input of the graph
        self.new_data: TensorValue | None = None  # what `.data` was set to
        trace.tensors.by_example[id(example)] = self

    @staticmethod
    def of(trace: Trace, node: fx.Node, result: Any) -> Value:
        """The value of a call's result; a result that is one of the arguments stays the value it was."""
        known = trace.tensors.by_example.get(id(result))
        if known is not None:
            return known.carrier or known
        if is_wrapper(result):
            return wrapper_values[0](trace, TensorValue(trace, node, result))
        if not isinstance(result, ShapeTensor):
            raise unsupported(
                "unsupported-op", f"{target_name(node.target)} gives a real {type(result).__name__}"
            )
        return TensorValue(trace, node, result)

    @property
    def node(self) -> fx.Node:
        """The fx node."""
        if self._node is None:
            unsupported_if(
                self.source is None,
                "transform",
                "a tensor made in a function that a transform called is used outside of it",
                cure="return it from the function",
            )
            if self.pinned:
                self.trace.reader.guard(TensorIs.of(self.source, self.obj))
            if self.carrier is None:
                spec: Any = self.trace.sizes.read(self.source, self.obj, static=self.settled)
            else:
                spec = spec_of(self.example)
                for known in map(self.trace.tensors.by_example.get, map(id, flatten(self.example))):
                    if known is not None:
                        known.inside = True
            self.trace.sizes.placeholders(self.trace.graph, spec)
            self._node = self.trace.graph.input(
                self.source, self.obj, spec, static=self.pinned, name=input_name(self.source)
            )
        return self._node

    def put(self, node: fx.Node) -> None:
        """The tensor that the trace has made is this node from here on."""
        self._node = node

    def unpin(self, trace: Trace) -> None:
        """The place that this tensor comes from is given another one: it is fetched at each call, not bound
        to the entry.
        """
        self.pinned = self.settled = False
        if self._node is not None and self.source is not None:  # tensors of the trace have no source
            trace.reader.guards.pop(TensorIs.of(self.source, self.obj), None)
            trace.graph.static.discard(trace.graph.inputs.index(self.source))

    def python_type(self) -> type:
        return self.cls

    def hash_key(self, trace: Trace) -> Hashable:
        return self if self.obj is MISSING else self.obj

    def describe(self) -> str:
        return f"a tensor {self.spec}"

    # Attributes ---------------------------------------------------------------------------------------------
    def getattr(self, trace: Trace, name: str) -> Value:
        rule, held_by = attribute_rules.get(name), METADATA.get(name)
        if trace.calls.modes and (rule is not None or held_by is not None):
            getter = getattr(torch.Tensor, name, None)
            plain = isinstance(getter, types.GetSetDescriptorType)
            return _by_mode(trace, name, getattr(getter, "__get__", None) if plain else None, [self], {})
        trace.calls.asked.add(name)
        if rule is not None:
            return rule(trace, self)
        if held_by is None:
            return super().getattr(trace, name)
        if name == "requires_grad":
            trace.tensors.asked.add(name)
        if held_by == "asked" and self.obj is not MISSING:
            found = trace.reader.attribute(self.source, self.obj, name)
            if found is not None and not self.written:
                return found
        return constant_result(trace, getattr(self.example, name))

    @property
    def spec(self) -> TensorSpec:
        """Its spec in the graph; of a wrapper, its outer one."""
        return outer_spec(self.example) if self.carrier is not None else self.example.spec

    @property
    def memory(self) -> Any:
        """The identity of its storage; a wrapper has none that another tensor shares."""
        return self.example if self.carrier is not None else self.example.memory

    @property
    def in_graph(self) -> bool:
        """Whether the graph takes it, or a wrapper around it."""
        return self._node is not None or self.inside

    @property
    def written(self) -> bool:
        """Whether the program has written into the memory; ops of a wrapper around it count no versions there."""
        return version(self.example) != self.first_version or self.written_inside

    def instance_attr(self, trace: Trace, name: str) -> Value | None:
        known = self.attributes.get(name)
        if known is None and self.obj is not MISSING:
            source = DictItem(InstanceDict(self.source), name)
            if name in self.obj.__dict__:
                known = trace.wrap(source, self.obj.__dict__[name])
            else:
                trace.reader.guard(Absent(source))
        return known

    def setattr(self, trace: Trace, name: str, value: Value) -> None:
        setter = attribute_setters.get(name)
        if setter is not None and setter(trace, self, value):
            return
        if METADATA.get(name) == "match" and name != "requires_grad":
            if value.is_constant() and value.as_constant() == getattr(self.example, name):
                return
        unsupported_if(
            hasattr(torch.Tensor, name),
            "unsupported-mutation",
            f"attribute {name!r} of a tensor is set",
            cure="use functional calls (detach(), to(), ...), or set it outside the compiled function",
        )
        self.attributes[name] = value
        trace.effects.touch(self)

    def delattr(self, trace: Trace, name: str) -> None:
        raise unsupported("unsupported-mutation", f"attribute {name!r} of a tensor is deleted")

    def replay(self, emitter: ResultEmitter) -> None:
        """Set the memory and the Python attributes that the program gave to the tensor."""
        if self.new_data is not None:
            refuse_if_recorded(self.trace, {self.example.memory})
            emitter.statement(f"{emitter.emit(self)}.data = {emitter.emit(self.new_data)}")
        for name, value in self.attributes.items():
            emitter.statement(f"{emitter.emit(self)}.{name} = {emitter.emit(value)}")

    # Operators ----------------------------------------------------------------------------------------------
    def _is_replaced(self, trace: Trace, name: str) -> bool:
        """Whether the program put a method of its own in the place of PyTorch's; guarded."""
        unsupported_if(
            trace.calls.modes and name in _SEVERAL,
            "modes",
            f"{name} of a tensor inside of a TorchFunctionMode",
        )
        return trace.type_attr(self.cls, name) is not SPECIAL_METHODS.get(name, MISSING)

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        if type(other) is not TensorValue and not _is_number(other):
            if issubclass(other.python_type(), torch.Tensor):
                return None  # a subclass's own method takes the call
            if self._is_replaced(trace, special_name(op, reflected)):
                return super().binary(trace, op, other, reflected)
            if other.is_constant() or isinstance(other, SequenceValue | DictValue):
                return None  # NotImplemented: a TypeError, or identity for == and !=
            raise unsupported("unsupported-value", f"{op.__name__} of a tensor and {other.describe()}")
        if self._is_replaced(trace, special_name(op, reflected)):
            return super().binary(trace, op, other, reflected)
        return torch_call(trace, op, [other, self] if reflected else [self, other], {})

    def unary(self, trace: Trace, op: Callable[..., Any]) -> Value:
        if self._is_replaced(trace, UNARY[op]):
            return super().unary(trace, op)
        return torch_call(trace, op, [self], {})

    def truth(self, trace: Trace) -> bool:
        if self._is_replaced(trace, "__bool__"):
            return super().truth(trace)
        raise unsupported(
            "data-dependent",
            "data-dependent branch: `if` (or another test) on a tensor's value",
            cure="use torch.where, or decide on shapes and flags",
        )

    # Container protocol -------------------------------------------------------------------------------------
    def length(self, trace: Trace) -> Value:
        if self._is_replaced(trace, "__len__"):
            return super().length(trace)
        trace.raise_if(not self.example.dim(), TypeError, "len() of a 0-d tensor")
        return constant_result(trace, self.example.shape[0])

    def getitem(self, trace: Trace, key: Value) -> Value:
        if self._is_replaced(trace, "__getitem__"):
            return super().getitem(trace, key)
        if trace.graph.gathers:
            places = key.items if isinstance(key, SequenceValue) else [key]
            if all(isinstance(place, TensorValue) for place in places):
                return torch_call(trace, torch.ops.aten.index.Tensor, [self, ListValue(places)], {})
        plain, changing = without_symbols(self.example.dim(), key)
        if not changing:
            return torch_call(trace, operator.getitem, [self, key], {})
        found: Value = self if plain is None else torch_call(trace, operator.getitem, [self, plain], {})
        for dim, index in reversed(changing):
            found = torch_call(trace, torch.select, [found, Constant(dim), index], {})
        return found

    def setitem(self, trace: Trace, key: Value, value: Value) -> None:
        if self._is_replaced(trace, "__setitem__"):
            return super().setitem(trace, key, value)
        target: Value = self
        if without_symbols(self.example.dim(), key)[1]:
            target, key = self.getitem(trace, key), Constant(...)
        elif places := _counted_places(self, key, value):
            torch_call(trace, torch.ops.aten.index_put_.default, [target, ListValue(places), value], {})
            return
        torch_call(trace, operator.setitem, [target, key, value], {})

    def contains(self, trace: Trace, item: Value) -> Value:
        if self._is_replaced(trace, "__contains__"):
            return super().contains(trace, item)
        number = type(item) is Constant and isinstance(item.value, int | float | complex)
        unsupported_if(
            not number and type(item) is not TensorValue,
            "data-dependent",
            "`in` looks for a value in a tensor",
        )
        equal = torch_call(trace, operator.eq, [self, item], {})
        return trace.call_method(torch_call(trace, "any", [equal], {}), "item", [])

    def unpack(self, trace: Trace) -> list[Value]:
        if self._is_replaced(trace, "__iter__"):
            return super().unpack(trace)
        trace.raise_if(not self.example.dim(), TypeError, "iteration over a 0-d tensor")
        return torch_call(trace, "unbind", [self, Constant(0)], {}).unpack(trace)

    def iterate(self, trace: Trace) -> Iterator:
        if self._is_replaced(trace, "__iter__"):
            return super().iterate(trace)
        return TupleValue(self.unpack(trace)).iterate(trace)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        if self.data_of is not None:
            return emitter.new_object(self, f"{emitter.emit(self.data_of)}.data")
        _check_kept(self.trace, self.example)
        return emitter.tensor(self)


# Protocols that are several calls in a trace and one, or none, for a mode.
_SEVERAL = frozenset(("__bool__", "__len__", "__contains__", "__iter__", "__setitem__"))


def _counted_places(x: TensorValue, key: Value, value: Value) -> list[Value]:
    """The indices of `index_put_` where as many values are put as data decides: indexing asks whether that is one,
    which changes nothing. Empty where it holds more than tensors and whole dimensions."""
    parts = key.items if type(key) is TupleValue else [key]
    indices = [part.example for part in parts if type(part) is TensorValue]
    if (
        type(value) is not TensorValue
        or not is_unbacked(*value.spec.shape)
        or value.example.dtype is not x.example.dtype
        or [n for n in value.spec.shape[:1] if type(n) is int] == [1]
        or not all(i.dim() and i.dtype in (torch.bool, torch.int64) for i in indices)
        or not all(type(p) is TensorValue or type(p) is Constant and p.value == slice(None) for p in parts)
    ):
        return []
    return [part if type(part) is TensorValue else Constant(None) for part in parts] if indices else []


def _is_number(value: Value) -> bool:
    return value.symbolic or (
        isinstance(value, Constant)
        and (isinstance(value.value, int | float | complex) or type(value.value).__module__ == "numpy")
    )


def version(tensor: torch.Tensor) -> Any:
    """The tensor's version counter. Tensors of inference mode have none: the writes into their memory count, and
    each answer for a wrapper differs, as if it had been written.
    """
    if not tensor.is_inference():
        return tensor._version
    return tensor.memory.unseen_writes if type(tensor) is ShapeTensor else object()


def writes_inputs(trace: Trace) -> bool:
    """Whether the graph writes a tensor from outside in place."""
    return any(v.written for v in trace.tensors.outside if v.in_graph)


def check_write(trace: Trace, target: Any, given: list[ShapeTensor], written: list[ShapeTensor]) -> None:
    """Break the graph before a call that writes an outside tensor where eager may refuse it, at the program's
    line: views of leaves, views of a kind that is not written, tensors of inference mode, operands that
    overlap."""
    if target is not operator.setitem:  # of other writes into a tensor of inference mode the trial knows
        written = [t for t in written if not t.is_inference()]
    memories = {id(t.memory) for t in given}
    values = [v for v in trace.tensors.outside if id(v.memory) in memories]
    for value in values:
        if all(value.memory is not t.memory for t in written):
            continue
        if value.obj.is_inference() and not torch.is_inference_mode_enabled():
            raise _write_refused(target, "a view of a tensor of inference mode is written outside of it")
        if (
            torch.is_grad_enabled()
            and any(t.requires_grad for t in written)
            and trace.reader.ask(value.source, value.obj, "whether writes are refused", _refuses_gradients)
        ):
            raise _write_refused(target, "autograd refuses writes into this view")
        if torch.is_grad_enabled() and _may_view_a_new_leaf(trace, value):
            raise _write_refused(target, "it may be a view of a tensor that requires_grad_() has made a leaf")
        others = [v.obj for v in values if v is not value and v.obj is not value.obj]
        if others and not are_apart([value.obj, *others], 1):
            raise _write_refused(target, "operands share memory")


def _refuses_gradients(tensor: torch.Tensor) -> bool:
    """Whether autograd refuses writes into a tensor: a view of a leaf, one of the results of `unbind`, one
    that was made where gradients were off."""
    if not tensor._is_view():
        return False
    base = tensor._base
    of_leaf = base is not None and base.requires_grad and base.is_leaf
    return of_leaf or compat.creation_meta(tensor) != compat.CreationMeta.DEFAULT


def _may_view_a_new_leaf(trace: Trace, value: TensorValue) -> bool:
    """Whether an outside tensor is a view, and the program has made another one a leaf: it may be a view of that."""
    others = any(leaf.obj is not value.obj for leaf in trace.tensors.new_leaves)
    return others and trace.reader.ask(value.source, value.obj, "being a view", compat.is_view)


def _write_refused(target: Any, why: str) -> Unsupported:
    return unsupported("unsupported-op", f"{target_name(target)} may be refused", why)


# Outside tensors --------------------------------------------------------------------------------------------
@wrap_rule(torch.Tensor, torch.nn.Parameter)
def wrap_tensor(trace: Trace, source: Source, obj: torch.Tensor) -> Value:
    _refuse_exotic(obj)
    spec = trace.sizes.read(source, obj, static=is_static(source))
    trace.reader.guard(trace.sizes.guard(source, obj))
    value = TensorValue(trace, None, _example(obj, spec), source, obj, type(obj))
    trace.tensors.outside.append(value)
    return value


def _refuse_exotic(obj: torch.Tensor) -> None:
    if (
        obj.layout != torch.strided
        or obj.is_quantized
        or obj.is_nested
        or is_lazy(obj)
        or obj.device.type == "meta"
    ):
        raise unsupported(
            "unsupported-value",
            f"a {obj.layout} tensor on {obj.device}"
            + (", lazily conjugate, negative or zero" if obj.layout == torch.strided else ""),
            cure="only plain strided tensors are captured",
        )
    if hasattr(obj, "has_names") and obj.has_names():  # PyTorch before 2.13
        raise unsupported("unsupported-value", "a tensor with named dimensions")
    unsupported_if(
        obj.requires_grad and not (obj.is_floating_point() or obj.is_complex()),
        "unsupported-value",
        f"a {obj.dtype} tensor with a history: what wants a gradient was written into it",
    )
    unsupported_if(
        compat.maybe_functorch_level(obj) not in (None, -1) or compat.is_functional(obj),
        "tensor-subclass",
        "a tensor of a functorch transform (vmap, grad) is read",
    )
    unsupported_if(history_is_refused(obj), "unsupported-value", "a view that autograd refuses to read")


def _example(obj: torch.Tensor, spec: TensorSpec) -> ShapeTensor:
    """A ShapeTensor that looks like a real tensor to autograd too: a leaf, or the result of something."""
    with torch.inference_mode(obj.is_inference()):
        if not obj.requires_grad or obj.is_leaf:
            return ShapeTensor.make(spec, requires_grad=obj.requires_grad)
        with torch.enable_grad():
            result = ShapeTensor.make(spec)
            result.copy_(ShapeTensor.make(spec, requires_grad=True))
            return result


# Attributes -------------------------------------------------------------------------------------------------
# Of attributes that are more than metadata.
attribute_rules: Registry[str, Callable[[Trace, TensorValue], Value]] = Registry("attribute")
attribute_rule = attribute_rules.register
# What setting an attribute does; False where that is unusual.
attribute_setters: Registry[str, Callable[[Trace, TensorValue, Value], bool]] = Registry("attribute setter")


def _view_attribute(name: str) -> None:
    attribute_rules.add(name, lambda trace, value: torch_call(trace, getattr, [value, Constant(name)], {}))


for _name in ("T", "mT", "H", "mH", "real", "imag"):
    _view_attribute(_name)


@attribute_rule("data")
def _data(trace: Trace, value: TensorValue) -> Value:
    """As detach(), until something is written: detach() shares the version counter, by which autograd sees
    writes.
    """
    result = torch_call(trace, "detach", [value], {})
    assert isinstance(result, TensorValue)
    if not result.example.is_inference() and value.new_data is None:
        result.data_of = value
    return result


@attribute_rule("grad_fn")
def _grad_fn(trace: Trace, value: TensorValue) -> Value:
    """A leaf has none. Hooks on the one node of a compiled graph would see other gradients: that runs eager."""
    if value.getattr(trace, "is_leaf").as_constant():
        return Constant(None)
    stop = refuse_autograd_state()
    stop.whole = value.obj is MISSING
    raise stop


@attribute_rule("_grad", "_base", "_version", "grad_dtype", "_cdata", "volatile")
def _refuse_autograd_state(trace: Trace, value: TensorValue) -> Value:
    raise refuse_autograd_state()


def refuse_autograd_state() -> Unsupported:
    return unsupported(
        "autograd",
        "a tensor's autograd state (grad, grad_fn, ...) is read",
        cure="read it outside the compiled function",
    )


@attribute_rule("__class__")
def _class(trace: Trace, value: TensorValue) -> Value:
    return trace.make(value.cls)


# Immutable torch objects that are plain data for a trace, made freely at trace time and compared by value.
DATA_TYPES = frozenset(
    (
        torch.Size,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.finfo,
        torch.iinfo,
        compat.SDPBackend,
    )
)
PURE_TYPES.update(DATA_TYPES)

_DTYPES = {float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128}

# Constants that a node may hold: printed by torch.fx as they are.
_ARGUMENT_TYPES = frozenset(
    (
        int,
        float,
        bool,
        complex,
        str,
        type(None),
        type(Ellipsis),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    )
)


# What makes the value of a tensor of a wrapper subclass (rules_wrappers.py).
wrapper_values: list[Callable[[Trace, TensorValue], Value]] = []


# Calls ------------------------------------------------------------------------------------------------------
# A call with floats that differ between calls among its arguments (late_numbers.py); None: they are constants.
call_with_numbers = Deferred[[Trace, Callable[..., Any] | str, list[Value], dict[str, Value]], Value | None](
    "call_with_numbers"
)


def lower(value: Value, nodes: bool) -> Any:
    """An argument for the graph (`nodes`: tensors become fx nodes) or for the trial run (tensors become
    ShapeTensors).
    """
    if type(value) is TensorValue:
        return value.node if nodes else value.example
    if type(value) is SizeValue or type(value) is NestedSizeValue:
        return value.lowered(nodes)
    if isinstance(value, SequenceValue) and value.kind in (list, tuple):  # PyTorch takes no deque
        items = [lower(item, nodes) for item in value.items]
        return items if value.kind is list else tuple(items)
    if isinstance(value, SliceValue):
        return slice(*[lower(part, nodes) for part in value.parts])
    if isinstance(value, DictValue):
        return {key.as_constant(): lower(item, nodes) for key, item in value.load().values()}
    if value.is_constant():
        return _constant(value.as_constant(), nodes)
    base = getattr(value, "base", None)  # a subclass of a builtin container: a namedtuple, an OrderedDict
    if isinstance(base, Value):
        return lower(base, nodes)
    raise unsupported(
        "unsupported-value",
        f"{value.describe()} is passed to a torch function",
        cure="pass tensors, numbers, strings and containers of these",
    )


def _constant(obj: Any, nodes: bool) -> Any:
    kind = type(obj)
    if kind in _ARGUMENT_TYPES:
        return obj
    if isinstance(obj, tuple):
        return tuple(_constant(item, nodes) for item in obj)
    if kind is list:
        return [_constant(item, nodes) for item in obj]
    if kind is slice:
        return slice(*[_constant(part, nodes) for part in (obj.start, obj.stop, obj.step)])
    if kind is range:
        return obj
    for plain in (bool, int, float, complex, str):  # enums and NumPy's float64
        if isinstance(obj, plain):
            return plain(obj)  # type: ignore[arg-type]
    if hasattr(obj, "item") and kind.__module__ == "numpy" and obj.ndim == 0 and obj.dtype.kind not in "bc":
        # A boolean is a float to some functions, and a bool to others; complex64 is real. What takes no number
        # of NumPy's says so in the trial run.
        return obj.item() if nodes else obj
    if kind is type and obj in _DTYPES:
        return _DTYPES[obj]
    if kind is type(torch.LongTensor):  # `type()` takes the name as well
        return f"{obj.__module__}.{obj.__name__}"
    raise unsupported(
        "unsupported-value",
        f"{type(obj).__name__} object is passed to a torch function",
        cure="pass tensors, numbers, strings and containers of these",
    )


@contextlib.contextmanager
def live_calls(trace: Trace, why: str, *, once: bool = False) -> Generator[None, None, None]:
    """Calls of the graph that PyTorch makes each time, forward and backward, and no backend records: their Python may
    read something else then (`why`, in words; empty: no such call). once: a second derivative must not repeat them.
    """
    unsupported_if(
        why and (trace.sizes.in_body or trace.graph.recompute),
        "autograd",
        "a call inside of a checkpoint, a transform or control flow reads state later",
        why,
        "pass the value that it reads as an argument",
    )
    trace.graph.live, trace.graph.once = ("DM250", why) if why else None, once
    try:
        yield
    finally:
        trace.graph.live, trace.graph.once = None, False


def tensor_call(trace: Trace, target: Callable[..., Any] | str, args: list[Value]) -> TensorValue:
    """Call a torch function that gives one tensor."""
    return checked(TensorValue, torch_call(trace, target, args, {}))


def _by_mode(
    trace: Trace, name: str, fn: Callable[..., object] | None, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    """The result of the function mode whose region the call is in; `fn` is None where it is not known how a mode is
    asked."""
    found = None if fn is None else under_modes(trace, fn, args, kwargs)
    if found is None:
        raise unsupported("modes", f"{name!r} of a tensor inside of a TorchFunctionMode")
    return found


def _as_float(trace: Trace, value: Value, is_operand: bool) -> Value:
    """A number as a `FloatValue`; an int only if it is an operand and 0 or 1 now: sizes of other calls are others."""
    if isinstance(value, SizeValue):
        small = value.expr.symbols <= trace.sizes.integers and any(s.hint < 2 for s in value.expr.symbols)
        return (value.from_outside() if is_operand and small else None) or value
    return value.from_outside() or value if isinstance(value, QuotientValue) else value


def torch_call(
    trace: Trace,
    target: Callable[..., Any] | str,
    args: list[Value],
    kwargs: dict[str, Value],
    run: Callable[..., Any] | None = None,
) -> Value:
    """Call a torch function (or by name a tensor method) with values.

    The result is a tensor value, a container of such, or a constant; results without tensors make no node.
    `run` stands in for the target in the trial run.
    """
    if trace.calls.modes:
        called = None if isinstance(target, str) else target
        return _by_mode(trace, function_name(target), called, args, kwargs)
    if any(isinstance(value, Number) for value in (*args, *kwargs.values())):
        operands = len(args) == 2 and not kwargs
        numbers = [_as_float(trace, value, operands) for value in args]
        named = {name: _as_float(trace, value, operands) for name, value in kwargs.items()}
        if any(type(value) is FloatValue for value in (*numbers, *named.values())):
            found = call_with_numbers(trace, target, numbers, named)
            if found is not None:
                return found
    trial_args = [lower(a, False) for a in args]
    trial_kwargs = {name: lower(v, False) for name, v in kwargs.items()}
    if run is None:
        run = getattr(torch.Tensor, target) if isinstance(target, str) else target
    known = trace.tensors.by_example
    tensors = [t for t in leaves_in((trial_args, trial_kwargs)) if isinstance(t, torch.Tensor)]
    wrappers = [t for t in tensors if is_wrapper(t)]
    given = [t for t in flatten_all(tensors) if isinstance(t, ShapeTensor)]
    if trace.tensors.given_away:
        for tensor in given:
            _check_kept(trace, tensor)
    key = repeated_calls.key_of(trace, run, trial_args, trial_kwargs, tensors)
    like_before = repeated_calls.again(trace, key)
    if like_before is not None:
        trace.sizes.data.begin()
        return _record(trace, target, args, kwargs, (), like_before)
    before = list(map(version, [*given, *wrappers]))
    result = trial(trace, target, run, trial_args, trial_kwargs)
    written: list[Any] = [t for t, then in zip([*given, *wrappers], before) if version(t) != then]
    if wrappers:
        written = _written_inside(trace, written)
    written += _declared_written(target, trial_args, trial_kwargs)
    if written:
        write_by_data(trace, written, written_part(target, trial_args))
        check_write(trace, target, given, written)
    note_recorded(trace, given, written, result)
    data = trace.sizes.data
    if not written and not data.met:
        if key is not None:
            repeated_calls.note(trace, key, result, given)
        if isinstance(result, torch.Tensor) and id(result) in known:
            same = known[id(result)]  # x.contiguous(), x.to(x.dtype): nothing happened
            return same.carrier or same
        if not _holds_tensor(result):
            return _answer(trace, target, args, result)
    if data.met and not data.made and type(result) is torch.SymInt:
        return constant_result(trace, result)  # a number that was read before
    if (
        function_name(target) in ADDRESSING
        and _guard_offsets(trace, args)
        and not _is_inside(result, trial_args[0])
    ):
        raise unsupported(
            "unsupported-call",
            f"{target_name(target)} leaves the tensor that it is given",
            "memory around a tensor from outside is not known",
            "index the whole tensor",
        )
    return _record(trace, target, args, kwargs, (*trial_args, *trial_kwargs.values()), result)


def _record(
    trace: Trace,
    target: Callable[..., Any] | str,
    args: list[Value],
    kwargs: dict[str, Value],
    tried: tuple[Any, ...],
    result: Any,
) -> Value:
    """Add the node of a call. tried: the arguments, and result: the result of the trial run."""
    node_args = tuple([lower(a, True) for a in args])
    node_kwargs = {name: lower(v, True) for name, v in kwargs.items()}
    val = spec_of(result)
    if isinstance(target, str):
        node = trace.graph.call_method(target, node_args, node_kwargs, val)
    else:
        node = trace.graph.call_function(target, node_args, node_kwargs, val)
    if type(result) is not ShapeTensor:
        for value, argument in zip((*args, *kwargs.values()), tried, strict=True):
            if argument is result:
                return value  # torch._foreach_add_(items, 1) is the list that it was given
    found = result_value(trace, node, result)
    data = trace.sizes.data
    if data.met:
        node.meta["data_dependent"] = True
        if type(val) is Size:
            trace.sizes.bind(trace.graph, val, node)
        _bind(trace, data.made, found)
    return found


def _written_inside(trace: Trace, written: Sequence[torch.Tensor]) -> list[ShapeTensor]:
    """The plain tensors among a call's written ones: all inside of a wrapper that was written, which counts for them."""
    found: list[Any] = flatten_all(written)
    for leaf in found:
        known = trace.tensors.by_example.get(id(leaf))
        if known is not None:
            known.written_inside = True
    return found


def _check_kept(trace: Trace, tensor: ShapeTensor) -> None:
    unsupported_if(
        tensor.memory in trace.tensors.given_away,
        "unsupported-value",
        "a tensor that shares memory with a parameter that was made of it is used",
        cure="use the parameter, or make it outside the compiled function",
    )


def _bind(trace: Trace, made: list[Size], result: Value) -> None:
    """Nodes for the sizes that a result was the first to have."""
    values: list[Any] = result.items if isinstance(result, SequenceValue) else [result]
    for value in values:
        for dim, n in enumerate(value.spec.shape if type(value) is TensorValue else ()):
            if type(n) is Size and any(map(n.same, made)):
                made = [symbol for symbol in made if not n.same(symbol)]
                trace.sizes.bind(trace.graph, n, trace.graph.call_method("size", (value.node, dim), {}, n))
        if type(value) is TensorValue and any(
            n.symbols & s.symbols for n in value.spec.shape if type(n) is Size for s in made
        ):
            raise unsupported(
                "data-dependent", f"no dimension of {value.describe()} is the size that it depends on"
            )


def _declared_written(target: Any, args: list[Any], kwargs: dict[str, Any]) -> list[ShapeTensor]:
    """The arguments that a registered op's schema marks as written: such an op counts no versions, as in eager."""
    if isinstance(target, OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if not isinstance(target, OpOverload) or target.namespace == "aten":
        return []
    given = dict(zip((a.name for a in target._schema.arguments), args)) | kwargs
    return [
        t for name in written_names(target) for t in leaves_in(given.get(name)) if isinstance(t, ShapeTensor)
    ]


def _draws_by_place(value: Any) -> bool:
    """Whether PyTorch tracks random numbers of a tensor by the place of its shard: of a DTensor on a GPU."""
    mesh = getattr(value, "device_mesh", None)
    tracker = getattr(sys.modules.get("torch.distributed.tensor._random"), "_rng_tracker", None)
    return mesh is not None and (mesh.device_type != "cpu" or tracker is not None)


def trial(trace: Trace, target: Any, run: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on ShapeTensors. What cannot be run there breaks the graph."""
    try:
        with shape_mode(trace.sizes.data_sizes) as mode:
            result = run(*args, **kwargs)
        trace.calls.asks_shapes = not (mode.reads_settings or mode.draws or mode.asserts or mode.may_raise)
        if mode.reads_settings:
            trace.reader.guard(KernelSettings.current(_C.kernel_settings()))
        unsupported_if(
            mode.draws and any(map(_draws_by_place, (*args, *kwargs.values(), result))),
            "random",
            "PyTorch gives each shard of a DTensor random numbers of its own, and replicas the same",
        )
        trace.calls.draws = trace.calls.draws or mode.draws
        trace.calls.may_raise = trace.calls.may_raise or mode.asserts or mode.may_raise
        if mode.asserts:
            trace.checks.within(target_name(target), args)
        elif mode.may_raise and trace.stack.is_caught(() if mode.runs_custom else DATA_ERRORS):
            trace.checks.caught(target_name(target))
        if mode.reads_tf32:
            trace.reader.ask(Const(tf32, "TF32"), tf32, "the setting", lambda ask: ask())
        return result
    except (Unsupported, RecursionError):
        raise
    except DataDependent as error:
        raise unsupported(
            "data-dependent",
            f"{target_name(target)} needs the data of a tensor",
            str(error.what),
            cure="keep the value in tensors (torch.where, masks), or compute it outside",
        ) from error
    except (UnsupportedOp, NotImplementedError, DynamotorError) as error:
        raise unsupported("unsupported-op", f"{target_name(target)} cannot be traced", str(error)) from error
    except Exception as error:
        # Most likely the program's own mistake: running the call natively raises eager's error in the right
        # place.
        raise unsupported(
            "unsupported-op",
            f"{target_name(target)} raised {type(error).__name__}",
            str(error),
            cure="if PyTorch refuses the arguments, its own error follows; else accept the break",
        ) from error


_OF_STRIDES = frozenset(("stride", "is_contiguous", "dim_order", "sym_stride"))


def _answer(trace: Trace, target: Any, args: list[Value], result: Any) -> Value:
    """The value of an answer without a tensor, with the guards that it needs."""
    if function_name(target) in _OF_STRIDES:
        trace.tensors.asked.add("strides")
    held_by = ANSWERS.get(function_name(target))
    is_made = not args or not isinstance(args[0], TensorValue) or args[0].obj is MISSING
    if held_by is None or held_by == "outside" and is_made:
        stop = unsupported(
            "unsupported-call",
            f"{target_name(target)} answers with a {type(result).__name__}",
            "the dependencies of the answer are not known",
            "call it outside the compiled function",
        )
        stop.whole = held_by is not None  # a graph's results have no lazy bits either
        raise stop
    if held_by == "offset":
        x = args[0]
        if type(x) is TensorValue and x.source is not None and type(result) is int and x.obj is not MISSING:
            return trace.wrap(Called(x.source, torch.Tensor.storage_offset), result)
        _guard_offsets(trace, args)
    return constant_result(trace, result)


def _guard_offsets(trace: Trace, args: list[Value]) -> list[TensorValue]:
    """The tensors from outside that share memory with the arguments: they begin where they begin in it."""
    memories = [arg.memory for arg in args if isinstance(arg, TensorValue)]
    found = [value for value in trace.tensors.outside if any(value.memory is memory for memory in memories)]
    for value in found:
        trace.reader.ask(value.source, value.obj, "the storage offset", torch.Tensor.storage_offset)
    return found


def _is_inside(result: Any, tensor: ShapeTensor) -> bool:
    """Whether a view of a tensor's storage stays between the tensor's first and last element."""
    if not isinstance(result, ShapeTensor) or result.memory is not tensor.memory:
        return False
    view, whole = result.spec, tensor.spec
    return whole.offset <= view.offset and view.offset + view.extent <= whole.offset + whole.extent


def function_name(target: Any) -> str:
    """The name of a function, method or overload, alone."""
    return target if isinstance(target, str) else getattr(target, "__name__", "").partition(".")[0]


def target_name(target: Any) -> str:
    """The name of a function or method for messages."""
    return f"Tensor.{target}" if isinstance(target, str) else getattr(target, "__name__", str(target))


def _holds_tensor(result: Any) -> bool:
    return any(isinstance(value, torch.Tensor) for value in leaves_in(result))


def constant_result(trace: Trace, result: Any) -> Value:
    """The value of a result that holds no tensor."""
    kind = type(result)
    sized = size_result(trace, result)
    if sized is not None:
        return sized
    if kind in DATA_TYPES:
        return Constant(result)
    return (
        ListValue([constant_result(trace, item) for item in result]) if kind is list else trace.make(result)
    )


def result_value(trace: Trace, node: fx.Node, result: Any) -> Value:
    """The value of a node's result; parts of a tuple are `operator.getitem` nodes."""
    if isinstance(result, torch.Tensor):
        return TensorValue.of(trace, node, result)
    kind = type(result)
    if isinstance(result, list | tuple) and kind is not torch.Size and _holds_tensor(result):
        items: list[Value] = []
        for i, item in enumerate(result):
            if isinstance(item, torch.Tensor | list | tuple) and _holds_tensor(item):
                items.append(_part(trace, node, i, item))
            else:
                items.append(constant_result(trace, item))
        if kind is list:
            return ListValue(items)
        return TupleValue(items) if kind is tuple else ReturnTypeValue(kind, items)
    return constant_result(trace, result)


def _part(trace: Trace, node: fx.Node, index: int, item: Any) -> Value:
    known = trace.tensors.by_example.get(id(item)) if isinstance(item, torch.Tensor) else None
    if known is not None:
        return known.carrier or known
    return result_value(
        trace, trace.graph.call_function(operator.getitem, (node, index), {}, spec_of(item)), item
    )
