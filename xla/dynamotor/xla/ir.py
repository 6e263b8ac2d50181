"""The recorder: ops become nodes of a trace, and the trace's key is exact (interned instructions and
positions, no hashes of objects).

An *instruction* is an op with the shapes and dtypes of its tensors and its constants; it is inferred, checked
against the lowering and interned once. Recording then costs a dictionary lookup and a few appends.

>>> lane = Lane(torch.device("xla", 0))
>>> x = lane.leaf(array, Spec((2, 2), torch.float32))
>>> y = record(aten.relu.default, (x,))
>>> y.spec
Spec(shape=(2, 2), dtype=torch.float32)
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import get_default_dtype

from dynamotor.extension_api import (
    CPU,
    DataDependent,
    MaybeNone,
    TensorSpec,
    UnsupportedOp,
    XlaError,
    config,
    infer_spec,
    warn_once,
)

from . import compat, metrics, rng
from .compat import OpOverload, tree_flatten, tree_map, tree_structure
from .dtypes import TORCH_TO_JAX, jax_dtype, torch_dtype
from .lowering import (
    LITERALS,
    Lifted,
    Lowering,
    Refusal,
    Spec,
    Unsupported,
    WrongResult,
    apply,
    find,
    on_registration,
)

Constant = Any
UNKNOWN = object()
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_SINGLE = frozenset((*_FLOATS, torch.complex64))
overfull: set[Lane] = set()  # to be flushed before the next operation
# Threads share a device's lane: each operation, flush and recording is done as a whole.
lock = threading.RLock()


class Meta:
    """An interned Spec: equal specs are one object, so that keys compare by identity."""

    __slots__ = ("spec", "shape", "dtype")
    _all: dict[tuple, Meta] = {}

    def __init__(self, spec: Spec) -> None:
        self.spec, self.shape, self.dtype = spec, spec.shape, spec.dtype

    @classmethod
    def of(cls, shape: Any, dtype: torch.dtype) -> Meta:
        """The one Meta of a shape and a torch dtype."""
        key = (tuple(shape), dtype)
        meta = cls._all.get(key)
        if meta is None:
            meta = cls._all[key] = cls(Spec(key[0], dtype))
        return meta

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Instruction:
    """An op on given metas with given constants. `template`: (args, kwargs) with `Slot`s where inputs and
    lifted scalars go.

    `metas`: Meta, or tuple of Meta | None, of the results. `refused`: why the op cannot be lowered (it then
    runs on the CPU), or None.
    """

    __slots__ = (
        "func",
        "uid",
        "rule",
        "template",
        "inputs",
        "metas",
        "refused",
        "scalars",
        "double",
        "uses",
        "strides",
        "tree",
        "default",
    )
    all: list[Instruction] = []
    rule: Lowering | MaybeNone  # None where the op is refused

    def __init__(
        self,
        func: OpOverload,
        rule: Lowering | None,
        template: Any,
        inputs: tuple[Meta, ...],
        metas: Any,
        refused: str | None,
    ) -> None:
        Instruction.all.append(self)
        self.uid = len(Instruction.all)
        self.uses = 0  # how often it was recorded
        self.func, self.rule, self.template, self.inputs = func, rule, template, inputs
        self.metas, self.refused = metas, refused
        self.scalars = 0  # how many lifted scalars it takes, and whether as float64
        self.double = _is_double(metas)
        self.tree: Any = None  # how several results are nested
        self.default = get_default_dtype()  # what integers become
        self.strides: Any = UNKNOWN  # layout.py: the strides that results of row-major tensors report

    def show(self, names: list[str] | None = None) -> str:
        """The call as Python text; `names` for the inputs."""
        names = names or [repr(meta) for meta in self.inputs]

        def text(arg: Any) -> str:
            if type(arg) is Slot:
                return names[arg.index] if arg.lifted is None else f"scalar{arg.index}"
            return f"[{', '.join(map(text, arg))}]" if type(arg) in (list, tuple) else repr(arg)

        words = [text(arg) for arg in self.template[0]] + [
            f"{name}={text(arg)}" for name, arg in self.template[1].items()
        ]
        return f"{self.func}({', '.join(words)})"

    def __repr__(self) -> str:
        return f"{self.func}({', '.join(map(repr, self.inputs))})"


class Slot:
    """A place in a template: the index-th tensor input, or the index-th lifted scalar, which is a number like
    `lifted`.
    """

    __slots__ = ("index", "lifted")

    def __init__(self, index: int, lifted: int | float | None = None) -> None:
        self.index, self.lifted = index, lifted


class Node:
    """One value: pending (instruction and inputs) or on the device (data). `item`: which result of a
    multi-result instruction it is."""

    __slots__ = (
        "instruction",
        "inputs",
        "meta",
        "data",
        "lane",
        "epoch",
        "position",
        "item",
        "owners",
        "uploaded",
    )
    instruction: Instruction | MaybeNone  # None for a leaf
    uploaded: int  # the lane's epoch when its data came from the CPU; leaves of other origin have none

    def __init__(
        self,
        instruction: Instruction | None,
        inputs: Sequence[Node],
        meta: Any,
        lane: Lane,
        data: Any = None,
    ) -> None:
        self.instruction, self.inputs, self.meta, self.lane, self.data = instruction, inputs, meta, lane, data
        self.epoch = -1
        self.position = 0
        self.item = -1
        # Roots that ever held this value, less those that were overwritten, and views, which a copy may share
        # it with: more than one, and it is not donated.
        self.owners = 0

    @property
    def spec(self) -> Spec:
        return self.meta.spec


class Lane:
    """What one device has recorded since its last flush: nodes in order, the leaves that they read, and the
    key of it all.
    """

    __slots__ = (
        "device",
        "epoch",
        "nodes",
        "leaves",
        "key",
        "scalars",
        "pending",
        "replaced",
        "draws",
        "collective",
        "recording",
        "checks",
        "before",
        "after",
    )

    def __init__(self, device: torch.device, recording: bool = False) -> None:
        self.device = device
        self.recording = recording  # the bridge's: it has leaves without data, and nothing may be read of it
        self.epoch = 0
        # The random state that the recording began with, and the one after its last draw (device.using_lane).
        self.before: int | MaybeNone = None
        self.after: int | MaybeNone = None
        self.clear()

    def clear(self) -> None:
        """Start the next trace; nodes of the last one that were not flushed can no longer be read."""
        self.epoch += 1
        self.nodes: list[Node] = []
        self.leaves: list[Node] = []
        self.key: list[Any] = []
        self.scalars: list[float] = []
        self.pending: list[Any] = []  # roots (tensor.Alias) that were given a value of this trace
        self.replaced: list[Node] = []  # leaves whose root was overwritten: their buffers may be donated
        self.draws: list[int] = []  # keys
        self.collective = False
        self.checks: list[Any] = []  # checks.Check

    def leaf(self, data: Any, meta: Meta) -> Node:
        """A value that is (or, in the bridge, will be) on the device."""
        return Node(None, (), meta, self, data)

    def place(self, node: Node) -> int:
        """Position of an input: >= 0 for nodes of this trace, negative for leaves, which are numbered at
        their first use.
        """
        if node.epoch == self.epoch:
            return node.position
        if node.data is None and node.instruction is not None:
            raise _lost()
        node.epoch = self.epoch
        self.leaves.append(node)
        node.position = position = -len(self.leaves)
        self.key.append(node.meta)
        return position


def _lost() -> XlaError:
    return XlaError(
        "DM601",
        "this tensor was never computed",
        why="the graph that it belongs to failed to compile or to run",
        cure="look at the first error; recreate the tensors that depend on it",
    )


_memo: dict[tuple, Instruction] = {}
# What has one row-major result and neither draws nor meets other replicas, by the same keys: nothing but a
# node is to be made.
simple: dict[tuple, Instruction] = {}
_rules: dict[int, Lowering] = {}
_NO_RULE = Lowering(lambda: None)
# The largest numbers of dtypes: a kernel's answer for one number between two of them holds for all.
_LARGEST = sorted(
    {
        abs(float(end))
        for kind, dtypes in ((torch.iinfo, _INTEGERS), (torch.finfo, _FLOATS))
        for dtype in dtypes
        for end in (kind(dtype).min, kind(dtype).max)
    }
)
_EXACT = 1 << 53  # integers up to this are float64


def record(
    func: compat.OpOverload,
    args: tuple,
    kwargs: dict[str, Any] | None = None,
    lane: Lane | MaybeNone = None,
) -> Node:
    """Record one functional op on nodes and constants; returns its node (`unpack` gives the items of
    multi-result ops).

    Raises `Refused` when the op has no lowering for these arguments, and what aten's shape check raises for
    wrong arguments.
    """
    inputs: list[Node] = []
    identity = id(func)  # overloads live for ever, and hashing one is a call of Python code
    rule = _rules.get(identity)
    if rule is None:
        rule = _rules[identity] = find(func) or _NO_RULE
    lifts, literals = rule.lifted, rule.literals
    lifted: list[float] | None = [] if lifts else None
    key: list[Any] = [identity, get_default_dtype()]  # which is that of integers' quotients
    for arg in args:
        if type(arg) is Node:
            inputs.append(arg)
            key.append(arg.meta)
        elif arg is None or type(arg) is int and int not in lifts:
            key.append(arg)
        else:
            key.append(_describe(arg, inputs, lifted, literals))
    if kwargs:
        for name, arg in kwargs.items():
            key.append(name)
            if type(arg) is Node:
                inputs.append(arg)
                key.append(arg.meta)
            else:
                key.append(_describe(arg, inputs, lifted, literals))
    full = tuple(key)
    instruction = _memo.get(full)
    if instruction is None:
        instruction = _memo[full] = _infer(func, args, kwargs or {})
    if instruction.refused is not None:
        raise Refused(instruction)
    if inputs:
        lane = inputs[0].lane
    if instruction.rule.random:  # before the node, which must not be there without its key
        given = (arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, torch.Generator))
        key_of_draw = rng.draw(lane.device, next(given, None))
    node = append(lane, instruction, inputs, lifted)
    if instruction.rule.random:
        lane.draws.append(key_of_draw)
    return node


def remember(instruction: Instruction, args: tuple) -> None:
    """Note an instruction as simple, if it is; `args`: those of the op."""
    rule = instruction.rule
    if not (rule.random or rule.collective or instruction.scalars) and instruction.strides is None:
        metas = iter(instruction.inputs)
        key = [arg if type(arg) is int or arg is None else next(metas, UNKNOWN) for arg in args]
        simple[id(instruction.func), get_default_dtype(), *key] = instruction


def append(lane: Lane, instruction: Instruction, inputs: list[Node], lifted: list[float] | None) -> Node:
    """Add a node for an instruction to its lane's trace."""
    epoch = lane.epoch
    positions = []
    for node in inputs:
        if node.lane is not lane:
            raise mixed_devices(lane, node.lane)
        positions.append(node.position if node.epoch == epoch else lane.place(node))
    instruction.uses += 1
    key = lane.key
    key.append(instruction.uid)
    key.extend(positions)
    if lifted:
        lane.scalars.extend(lifted)
    node = Node(instruction, inputs, instruction.metas, lane)
    node.epoch = epoch
    node.position = len(lane.nodes)
    lane.nodes.append(node)
    if node.position >= config.xla_trace_limit and not lane.recording:
        overfull.add(lane)
    if instruction.rule.collective:
        lane.collective = True
    return node


_ITEM_MARKS = [f"[{index}]" for index in range(64)]  # in keys: never equal to a position


def unpack(node: Node) -> list[Node | None]:
    """The items of a multi-result node (None where aten gives no tensor)."""
    return [None if meta is None else _item(node, index, meta) for index, meta in enumerate(node.meta)]


def _item(node: Node, index: int, meta: Meta) -> Node:
    lane = node.lane
    item = Node(node.instruction, [node], meta, lane)
    item.item = index
    item.epoch = lane.epoch
    item.position = len(lane.nodes)
    lane.nodes.append(item)
    lane.key.append(_ITEM_MARKS[index] if index < len(_ITEM_MARKS) else f"[{index}]")
    lane.key.append(node.position)
    return item


class Cut(Exception):
    """A graph that is being recorded for the bridge reached something that cannot be recorded; the message
    says why.
    """


class Refused(Exception):
    """The op of this instruction has no lowering for these arguments."""

    def __init__(self, instruction: Instruction) -> None:
        super().__init__(instruction.refused)
        self.instruction = instruction


def mixed_devices(one: Lane, other: Lane) -> XlaError:
    return XlaError(
        "DM602",
        f"expected all tensors to be on the same device, but found {one.device} and {other.device}",
        cure="move them with .to(device)",
    )


def describe(args: Any) -> Any:
    """The kinds of nested arguments with nodes: metas, types, values; a part of keys."""
    return _describe(args, [], None)


def _describe(
    arg: Any, inputs: list[Node], lifted: list[float] | None, literals: frozenset[float] = LITERALS
) -> Any:
    """The part of a key that an argument is; equal keys only for arguments that record the same (1, 1.0 and
    True differ, as do 0.0 and -0.0)."""
    kind = type(arg)
    if kind is Node:
        inputs.append(arg)
        return arg.meta
    if (kind is float or kind is int) and lifted is not None and is_lifted(arg, literals):
        lifted.append(arg)
        negative = arg < 0 or (
            kind is float and arg == 0.0 and math.copysign(1.0, arg) < 0
        )  # -0.0 is -rate, too
        return (
            kind if not negative and arg <= 127 else (kind, negative, bisect_left(_LARGEST, abs(arg) or 0.5))
        )
    if kind is float:
        return kind, str(arg) if arg != arg or arg == 0.0 else arg
    if kind is bool or kind is complex:
        return kind, arg if kind is bool else str(arg)
    if kind is list or kind is tuple:
        return list, tuple([_describe(item, inputs, None) for item in arg])
    if isinstance(arg, dict):
        return dict, tuple([(name, _describe(item, inputs, None)) for name, item in arg.items()])
    return None if kind is torch.Generator else arg


def is_lifted(arg: int | float, literals: frozenset[float]) -> bool:
    """Whether a number becomes an input of the graph: a float that is no literal of the op's rule."""
    if type(arg) is float:
        return arg == arg and arg not in literals
    return arg not in LITERALS and -_EXACT < arg < _EXACT


def _infer(func: compat.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Instruction:
    """Shapes and dtypes by aten's own meta kernels, then the lowering evaluated abstractly: what cannot be
    lowered is known before any run."""
    rule = find(func)
    template, inputs, scalars = _template(args, kwargs, rule or _NO_RULE)
    if rule is None:
        return Instruction(func, None, template, inputs, None, "no lowering")
    try:
        (metas, tree), unknown = _shapes(func, args, kwargs), None
    except (NotImplementedError, DataDependent, UnsupportedOp) as error:
        metas, tree, unknown = (
            None,
            None,
            f"its result's shape depends on data or is unknown ({type(error).__name__})",
        )
    instruction = Instruction(func, rule, template, inputs, metas, None)
    instruction.scalars, instruction.tree = len(scalars), tree
    made, refusal = _try_lowering(instruction)
    if unknown is not None and refusal is None:  # the rule alone knows the shapes
        instruction.metas, instruction.tree = made, tree_structure(made)
        instruction.double = _is_double(made)
    instruction.refused = unknown if refusal is not None and unknown is not None else refusal
    if not rule.collective:
        for check in type_checks:
            check(func, args, kwargs, inputs)
    return instruction


# `check(func, args, kwargs, inputs)`: raises for an op that the CPU refuses (checks.py).
type_checks: list[Callable[..., None]] = []


def forget(functions: Iterable[Any]) -> None:
    """A rule of these overloads was registered: facts about them are inferred anew."""
    known = {id(func) for func in functions}
    for table in (_memo, simple):
        for key in [key for key in table if key[0] in known]:
            del table[key]
    for identity in known:
        _rules.pop(identity, None)


on_registration.append(forget)


def _template(
    args: tuple, kwargs: dict[str, Any], rule: Lowering
) -> tuple[Any, tuple[Meta, ...], list[Slot]]:
    """The arguments with slots for nodes and lifted scalars, numbered in the order in which `record` meets
    them.
    """
    inputs: list[Meta] = []
    scalars: list[Slot] = []

    def visit(arg: Any) -> Any:
        if isinstance(arg, Node):
            inputs.append(arg.meta)
            return Slot(len(inputs) - 1)
        if type(arg) in (list, tuple):
            return type(arg)(visit(item) for item in arg)
        if isinstance(arg, dict):
            return {name: visit(item) for name, item in arg.items()}
        return None if isinstance(arg, torch.Generator) else arg

    def number(arg: Any) -> Any:
        if not (type(arg) in rule.lifted and is_lifted(arg, rule.literals)):
            return visit(arg)
        scalars.append(Slot(len(scalars), type(arg)()))
        return scalars[-1]

    template = (tuple(number(arg) for arg in args), {name: number(arg) for name, arg in kwargs.items()})
    return template, tuple(inputs), scalars


def _shapes(func: compat.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Meta, or tuple of Meta | None, of the results, and how they are nested: those that the CPU gives."""
    named = tree_map(_spec_of, kwargs)
    if any(a.name == "device" for a in func._schema.arguments):
        named["device"] = CPU
    flat, tree = tree_flatten(infer_spec(func, tree_map(_spec_of, args), named))
    metas = tuple(_meta_of(item) if isinstance(item, TensorSpec) else None for item in flat)
    return (metas[0] if tree.is_leaf() else metas), tree


def _spec_of(arg: Any) -> Any:
    if isinstance(arg, Node):
        return TensorSpec.dense(arg.meta.shape, arg.meta.dtype)
    return None if isinstance(arg, torch.Generator) else arg


def _meta_of(spec: TensorSpec) -> Meta:
    if spec.dtype not in TORCH_TO_JAX:
        raise NotImplementedError(f"XLA has no type for {spec.dtype}")
    return Meta.of(spec.shape, spec.dtype)


def _is_double(metas: Any) -> bool:
    """Whether lifted scalars of an op are kept in float64: where float32 is not as wide as its results."""
    flat = metas if isinstance(metas, tuple) else (metas,)
    return any(meta is not None and meta.dtype not in _SINGLE for meta in flat)


def _try_lowering(instruction: Instruction) -> tuple[Any, str | None]:
    """(metas of the rule's results, None), or (None, why it cannot lower these arguments): it is evaluated
    on shapes alone.
    """
    inputs = [jax.ShapeDtypeStruct(meta.shape, jax_dtype(meta.dtype)) for meta in instruction.inputs]
    numbers = [
        jax.ShapeDtypeStruct((), jnp.float64 if instruction.double else jnp.float32)
        for _ in range(instruction.scalars)
    ]
    key = jax.eval_shape(lambda: jax.random.key(0)) if instruction.rule.random else None
    try:
        made = jax.eval_shape(
            lambda xs, ns, k: lower_instruction(instruction, xs, ns, k), inputs, numbers, key
        )
    except WrongResult as wrong:
        warn_once(f"xla.wrong.{instruction.func}", f"{wrong}; the operation runs on the CPU")
        return None, str(wrong)
    except Unsupported as refusal:
        return None, str(refusal)
    except Refusal as error:
        raise error.args[0] from None
    except Exception as error:  # a rule that does not take an argument: aten does, and this is counted
        if instruction.rule.collective:
            return None, None  # its axis exists only inside the replicated program
        return None, f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    metas = jax.tree.map(lambda a: Meta.of(a.shape, torch_dtype(a.dtype)), made)
    return tuple(metas) if isinstance(metas, list) else metas, None


def lower_instruction(
    instruction: Instruction, inputs: list[jax.Array], scalars: list[jax.Array], key: Any
) -> Any:
    """Run the rule of an instruction on jax values: an array, or a tuple of arrays | None."""

    def fill(arg: Any) -> Any:
        if type(arg) is Slot:
            return inputs[arg.index] if arg.lifted is None else Lifted(scalars[arg.index], arg.lifted)
        if type(arg) in (list, tuple):
            return type(arg)(fill(item) for item in arg)
        return {name: fill(item) for name, item in arg.items()} if isinstance(arg, dict) else arg

    args, kwargs = fill(instruction.template[0]), fill(instruction.template[1])
    metas, before = instruction.metas, get_default_dtype()
    out = metas and (tuple(m and m.spec for m in metas) if isinstance(metas, tuple) else metas.spec)
    torch.set_default_dtype(instruction.default)
    try:
        return apply(instruction.func, instruction.rule, args, kwargs, out, key)
    finally:
        torch.set_default_dtype(before)


def op_counts() -> Counter[str]:
    """How often each lowered op was recorded: "xla::add" -> 12."""
    counts: Counter[str] = Counter()
    for instruction in Instruction.all:
        if instruction.uses:
            counts["xla::" + instruction.func._schema.name.split("::")[1]] += instruction.uses
    return counts


def clear_op_counts() -> None:
    for instruction in Instruction.all:
        instruction.uses = 0


metrics.sources.append((op_counts, clear_op_counts))
