"""The call program: a lowered `Program` written as a readable Python function over kernels, aten calls and
planned memory.

def call(arg0, arg1):
    out0 = take((24576, float32), (32, 192), (192, 1))
    k0(arg0, buf1)                       # buf1 is in the scratch block, as a global of this function
    mm(buf1, arg1_v0, out=out0)          # arg1_v0: a view of a parameter, remade when its memory moves
    return (out0,)
"""

from __future__ import annotations

import builtins
import functools
import keyword
import linecache
import marshal
import operator
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import _C
from ..base import cache, compat
from ..base.config import config
from ..base.errors import BackendError, BuildError, UserLine
from ..base.events import counters, emit, log, new_number
from ..graph.op_facts import is_collective, is_custom
from ..graph.plain_data import plain
from ..graph.sizes import FUNCTIONS, Dim, Size, equal, hint, is_symbolic, numbers
from ..graph.spec import CPU, GraphInfo, TensorSpec, copy_as, is_lazy
from ..lower.extern import Awaited, may_alias
from ..lower.program import Buffer, BufRef, ExternStep, LoopStep, Program, refs, touches, writes_of
from ..runtime import cpp_build, memory
from . import attend_cpp, checked, cpp, cpp_family, externs, product_cpp
from .one_call import one_call

_view: Callable[..., torch.Tensor] = compat.reinterpret_tensor
KEPT_SIZES = 8  # values of the symbols for which a program keeps the views of its memory, at least
KEPT_NAMES = 1 << 14  # names of such views and kernels, for more sizes
LONG = 10_000  # characters of a text whose code is kept on disk: 5 ms of Python's compiler, and a file
UNIT_CHARACTERS = (
    7_000  # a translation unit of about this size compiles in 0.15 s, of which 0.06 s are its own
)
Shape = tuple[int, ...]
_UNDISPATCHED = ("new", "take", "torch")  # names of the text that reach no op (of torch: only dtypes)
_below_autograd = compat.BelowViews
_profiler_is_on = compat.profiler_enabled


def shown_by(steps: Iterable[LoopStep | ExternStep]) -> dict[str, set[str]]:
    """For results of view-like calls, the buffers whose memory they may show."""
    holds: dict[str, set[str]] = {}
    for step in steps:
        if isinstance(step, ExternStep) and step.out_variant is None and may_alias(step.target):
            shown = {ref.name for ref in refs((step.args, step.kwargs))}
            shown = shown.union(*(holds.get(other, ()) for other in shown))
            holds.update((name, shown) for name in step.outs if name)
    return holds


def step_accesses(steps: Sequence[LoopStep | ExternStep]) -> Iterator[tuple[set[str], set[str]]]:
    """The buffers that each step touches and writes, those behind views included."""
    holds = shown_by(steps)

    def memory_of(names: Iterable[str]) -> set[str]:
        return set(names).union(*(holds.get(name, ()) for name in names))

    for step in steps:
        made = {name for name in step.outs if name} if isinstance(step, ExternStep) else set()
        yield memory_of(touches(step)), memory_of(set(writes_of(step)) - made) | made


def nbytes_of(spec: TensorSpec) -> int | Size:
    """The bytes that a tensor takes, from its first element to its last."""
    if is_symbolic(spec.shape) or is_symbolic(spec.stride):  # an empty one is taken for a larger one
        steps = zip(spec.shape, spec.stride, strict=True)
        return (1 + sum((size - 1) * stride for size, stride in steps)) * spec.dtype.itemsize
    return spec.extent * spec.dtype.itemsize


def _guarded(spec: TensorSpec) -> int:
    """Bytes of a buffer in check mode: up to the next aligned place, and as many behind it that no step may
    write.
    """
    return -(-spec.extent * spec.dtype.itemsize // memory.ALIGNMENT) * memory.ALIGNMENT + memory.GUARD


def _view_dtype(
    tensor: torch.Tensor, dtype: torch.dtype, shape: Shape, stride: Shape, offset: int
) -> torch.Tensor:
    """A view with other strides whose elements are read as another dtype of the same width."""
    return _view(tensor.view(dtype), shape, stride, offset)


@plain
@dataclass(frozen=True)
class Expected:
    """Handle a result whose spec differs from the one that the program was compiled for.

    Only the strides may differ (an aten kernel chose others): the result is laid out anew, and that is
    counted. planned: it is written into memory of the program's. number: it may be a Python number.
    """

    spec: TensorSpec
    target: Any
    planned: bool
    number: bool = False
    where: UserLine | None = None

    def __call__(self, value: Any) -> Any:
        spec = self.spec
        if self.number and isinstance(value, (bool, int, float)):
            return value
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise self._error(
                str(value.layout) if isinstance(value, torch.Tensor) else f"{type(value).__name__} {value!r}"
            )
        if is_lazy(value):
            value = value.clone()
        found = TensorSpec.of(value)
        if self._is_state_of_attention(found) or str(self.target).startswith("dynamotor.bucket_"):
            return value  # a bucket's start gives the rank's own values, possibly none
        if (found.shape, found.dtype, found.device) != (spec.shape, spec.dtype, spec.device):
            raise self._error(str(found))
        if 0 in spec.shape or all(
            n == 1 or a == b for n, a, b in zip(spec.shape, found.stride, spec.stride, strict=True)
        ):
            return _view(value, spec.shape, spec.stride, 0)
        if self.planned or self._is_on_its_way():
            raise self._error(str(found))
        counters["restrided"][str(self.target)] += 1
        return copy_as(value, numbers(spec.stride))

    def _is_on_its_way(self) -> bool:
        """Whether it is the result of a collective's start: the wait finds the collective by its memory."""
        target = self.target
        return not isinstance(target, Awaited) and is_collective(getattr(target, "target", target))

    def sized(self, shape: tuple[Any, ...], stride: tuple[Any, ...]) -> Any:
        """The check of a result of these sizes."""
        otherwise = self if shape is self.spec.shape else functools.partial(self._at, shape, stride)
        return _C.Expect(shape, stride, self.spec.dtype, self.spec.device, otherwise)

    def _is_state_of_attention(self, found: TensorSpec) -> bool:
        """Seed and offset that attention on a GPU hands to its backward are on the CPU unless a CUDA graph is
        recorded.
        """
        return (
            found.shape == self.spec.shape == ()
            and found.dtype is self.spec.dtype is torch.int64
            and str(self.target).startswith("aten._scaled_dot_product")
        )

    def _at(self, shape: tuple[Dim, ...], stride: tuple[Dim, ...], value: Any) -> Any:
        return replace(self, spec=replace(self.spec, shape=shape, stride=stride))(value)

    def _error(self, found: str) -> BackendError:
        return _unforeseen(self, found, str(self.spec))


def _nothing(step: ExternStep, value: Any) -> None:
    """Refuse a result where the op's shape rule said None, or a size (PyTorch's own ops tell sizes as
    foretold).
    """
    if value is not None and not (type(value) is int and str(step.target).startswith("aten.")):
        raise _unforeseen(step, f"a {type(value).__name__}", "None")


def _as_many(step: ExternStep, values: Sequence[Any]) -> Sequence[Any]:
    """A list of results, as long as its shape rule said."""
    if len(values) != len(step.outs):
        raise _unforeseen(step, f"{len(values)} tensors", f"{len(step.outs)}")
    return values


def _unforeseen(step: ExternStep | Expected, found: str, foretold: str) -> BackendError:
    return BackendError(
        "DM404",
        f"{step.target} returned {found}, but its shape rule foretold {foretold}",
        where=step.where,
        why="the program was compiled for the rule's result, and would read other memory",
        cure="mend the op's register_fake (or meta kernel); report it when the op is PyTorch's own",
    )


def _recorded(label: str, kernel: Callable[..., None], *args: Any) -> None:
    with compat.RecordFunction(label):
        kernel(*args)


def _written(tensors: list[torch.Tensor]) -> None:
    """Move the version counters of inputs that were written through pointers, as an in-place op does."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


# Functions that the program's text calls besides kernels and ops, by name. No op, kernel or buffer gets one
# of these
# names.
HELPERS: dict[str, Any] = {
    "torch": torch,
    "view": _view,
    "view_dtype": _view_dtype,
    "copied": copy_as,
    "written": _written,
}
_LATER = ("take", "new", "check", "watch", "on_device", "current_stream", "stream", "call", "given", "_")
_RESERVED = {*HELPERS, *FUNCTIONS, *_LATER, *keyword.kwlist, *dir(builtins)}


def _is_whole(ref: BufRef, buffer: Buffer) -> bool:
    """Whether a reference is to the buffer as it is."""
    whole = BufRef.whole(buffer)
    places = ((r.shape, r.stride, r.offset) for r in (ref, whole))
    return ref.dtype is whole.dtype and equal(*places)


def _differs(ref: BufRef) -> bool:
    """Whether a view is another one at calls with other sizes."""
    return is_symbolic((*ref.shape, *ref.stride, ref.offset))


@plain
@dataclass(frozen=True)
class Listing:
    """A program as data: its text, and the meaning of the text's globals beside ops.

    layout: the text of `Writer.layout` where sizes differ between calls, checks: of results of such sizes.
    symbols: which inputs are sizes.
    takes: it is called with a list, which it empties. scratch: tensors in the block: their buffer, where that
    starts and offsets (bytes), its bytes, the view. bound: views of inputs: the position, the
    view, the input's spec. pool: results by bytes and type. kernels: C name, pointers, ints. labels: what a
    profile calls them.
    """

    source: str
    layout: str
    symbols: tuple[int, ...]
    takes: bool
    scratch: dict[str, tuple[str, int, int, int, BufRef]]
    scratch_size: int
    bound: dict[str, tuple[int, BufRef, TensorSpec]]
    pool: dict[tuple[int, torch.dtype], int]
    kernels: dict[str, tuple[str, int, tuple[int, ...]]]
    labels: dict[str, str]
    checks: dict[str, Expected]


class Writer:
    """Writes the text of one program. After `write()`, the fields say what its globals must hold."""

    def __init__(self, program: Program, info: GraphInfo, device: torch.device = CPU) -> None:
        self.program, self.info, self.device = program, info, device
        self.static = {program.inputs[i] for i in info.static_inputs if i < len(program.inputs)}
        # Check mode: hooks stand around each step, guard bytes behind each planned buffer.
        self.watched = config.check and program.env is None and not config.sanitize
        self.takes = (
            info.kind == "backward"
        )  # inputs come in a list that is emptied: each is freed after its last use
        self.given = program.buffers.keys() & set(program.inputs) - self.static if self.takes else set()
        self.outputs = {ref.name for ref in program.outputs if isinstance(ref, BufRef)}
        self.constants: dict[str, Any] = {}  # globals that never change
        self.described: dict[str, Any] = {}  # the same as plain data: a `Callee` or an `Expected`
        self.scratch: dict[str, BufRef] = {}  # globals that are tensors in the block
        self.seen: set[str] = (
            set()
        )  # names by which aten calls know buffers and views; kernels take addresses
        self.bound: dict[str, BufRef] = {}  # globals that are views of static inputs
        self.kernels: dict[str, tuple[str, int, tuple[int, ...]]] = {}  # global -> C name, pointers, ints
        self.functions: dict[str, cpp.CFunction] = {}
        self.labels: dict[str, str] = {}  # global -> the kernel's name in a profile
        self.pool: Counter[tuple[Dim, torch.dtype]] = Counter()
        self.called: list[Any] = []  # the function of each loop step, in order: for reports
        self.lines: list[str] = []
        self._names: dict[Any, str] = {}
        self.checks: dict[str, Expected] = {}  # globals that check results whose sizes differ between calls
        self._taken = {*_RESERVED, *program.buffers, *program.inputs}
        self._kernel_names: dict[Any, str] = {}
        self._fresh: set[str] = set()  # buffers that an extern call allocates
        self._last: dict[str, int] = {}
        self._plan()

    # -- memory ----------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """The offsets of buffers in the scratch block."""
        first: dict[str, int] = {}
        holds = shown_by(self.program.steps)
        for at, step in enumerate(self.program.steps):
            if isinstance(step, ExternStep) and step.out_variant is None:
                self._fresh |= {name for name in step.outs if name}
            for name in touches(step):
                for held in (name, *holds.get(name, ())):
                    first.setdefault(held, at)
                    self._last[held] = at
        self.holds = holds
        for name in self.outputs & holds.keys():  # copied out at the very end
            self._last.update(dict.fromkeys(holds[name], len(self.program.steps) - 1))
        temps = [
            buffer
            for buffer in self.program.buffers.values()
            if buffer.name in first and self._in_scratch(buffer)
        ]
        nbytes = _guarded if self.watched else nbytes_of
        lifetimes = [
            memory.Lifetime(b.name, nbytes(b.spec), first[b.name], self._last[b.name]) for b in temps
        ]
        inplace: dict[str, list[str]] = {}
        for step in self.program.steps:
            if isinstance(step, LoopStep):
                for written, read in step.inplace:
                    inplace.setdefault(written, []).append(read)
        self.offsets: Mapping[str, Dim]
        self.scratch_size: Dim
        self.plan: checked.MemoryPlan | None = None
        if self.program.env is not None:
            self.offsets, self.scratch_size = memory.plan_slots(lifetimes, inplace)
        else:
            offsets, self.scratch_size = memory.plan_offsets(lifetimes, inplace)
            self.offsets = offsets
            if config.verify:
                memory.verify_plan(lifetimes, offsets, inplace)
            if self.watched:
                stops = {b.name: offsets[b.name] + int(nbytes_of(b.spec)) for b in temps}
                ends = {life.name: offsets[life.name] + int(life.nbytes) for life in lifetimes}
                self.plan = checked.MemoryPlan(offsets, stops, ends, first, self._last)
        for buffer in temps:
            self.scratch[buffer.name] = BufRef.whole(buffer)

    def _in_scratch(self, buffer: Buffer) -> bool:
        return (
            buffer.kind in ("temp", "output")
            and buffer.name not in self.outputs
            and buffer.name not in self._fresh
        )

    # -- values ----------------------------------------------------------------------------------------------

    def ref(self, ref: BufRef) -> str:
        """The expression for a view of a buffer."""
        text = self._ref(ref)
        self.seen.add(text)
        return text

    def _ref(self, ref: BufRef) -> str:
        buffer = self.program.buffers[ref.name]
        if _is_whole(ref, buffer):
            return ref.name
        kept = ref.name in self.static or buffer.kind == "const"
        if ref.name in self.scratch or kept and not _differs(ref):
            known = self._names.get(ref)
            if known is None:
                known = self._names[ref] = self.unique(f"{ref.name}_v{len(self._names)}")
                if ref.name in self.static:
                    self.bound[known] = ref
                elif buffer.value is not None:
                    self.constants[known] = make_view(buffer.value, ref, buffer.spec)
                else:
                    self.scratch[known] = ref
            return known
        return self.view(ref)

    def view(self, ref: BufRef) -> str:
        """The expression that makes a view at each call."""
        if ref.dtype != self.program.buffers[ref.name].spec.dtype:
            return f"view_dtype({ref.name}, {ref.dtype}, {ref.shape}, {ref.stride}, {ref.offset})"
        return f"view({ref.name}, {ref.shape}, {ref.stride}, {ref.offset})"

    def value(self, value: Any) -> str:
        """The expression for an argument of an aten call."""
        if isinstance(value, BufRef):
            return self.ref(value)
        if isinstance(value, (tuple, list)):
            items = ", ".join(self.value(item) for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
        if isinstance(value, float) and value - value != 0:
            return f"float({str(value)!r})"
        if value is None or isinstance(
            value, (bool, int, float, str, Size, torch.dtype, torch.memory_format, torch.layout)
        ):
            return repr(value)
        return (
            f"torch.device({str(value)!r})" if isinstance(value, torch.device) else self.constant("c", value)
        )

    def unique(self, stem: str) -> str:
        """A name that nothing else in the text has."""
        name, n = stem, 0
        while name in self._taken:
            name, n = f"{stem}_{n}", n + 1
        self._taken.add(name)
        return name

    def constant(self, stem: str, value: Any, plain: Any = None) -> str:
        """A global that holds a value, and what says so as plain data; equal objects share one."""
        key = (stem, id(value))
        if key not in self._names:
            name = self._names[key] = self.unique(stem)
            self.constants[name], self.described[name] = value, plain
        return self._names[key]

    # -- steps -----------------------------------------------------------------------------------------------

    def loop(self, step: LoopStep) -> Iterator[str]:
        """The lines that run one kernel."""
        key = (id(step.kernel), step.ints)
        name = self._kernel_names.get(key)
        if name is None:
            function = cpp.emit_kernel(step.kernel)
            self.functions.setdefault(function.name, function)
            row = (function.name, len(step.args), step.ints)
            name = self._kernel_names[key] = self.named(self.kernels, row, f"dynamotor::{function.name}")
        self.called.append(self.functions[self.kernels[name][0]])
        yield f"{name}({', '.join((*step.args, *step.symbols))})" + (f"  # {step.note}" if step.note else "")

    def named(self, table: dict[str, Any], row: Any, label: str) -> str:
        """The global that a row of a table of kernels stands behind; equal rows share it."""
        name = next((known for known, other in table.items() if other == row), None)
        name = name or self.unique(f"k{len(table)}")
        table[name], self.labels[name] = row, label
        return name

    def own_kernel(self, step: ExternStep) -> product_cpp.Own | None:
        """A function that is an op's kernel here, with the buffers and numbers that it is given."""
        if step.target is torch.ops.dynamotor.attend.default:
            return product_cpp.Own(*attend_cpp.kernel(step))
        name = step.outs[0] if step.out_variant is not None else None
        return product_cpp.kernel(step, BufRef.whole(self.program.buffers[name])) if name else None

    def _launch(self, own: product_cpp.Own) -> str:
        """The call of an op's own kernel."""
        self.functions.setdefault(own.function.name, own.function)
        fixed = not is_symbolic(own.numbers)
        row = (own.function.name, len(own.buffers), tuple(map(int, own.numbers)) if fixed else ())
        name = self.named(self.kernels, row, f"dynamotor::{own.function.name}")
        return f"{name}({', '.join((*own.buffers, *([] if fixed else map(str, own.numbers))))})"

    def extern(self, step: ExternStep) -> Iterator[str]:
        own = self.own_kernel(step)
        if own is not None and not own.condition:
            yield f"{self._launch(own)}  # {step.target}"
            return
        stem, callee = externs.callee_of(step)
        outs = [name if name and self._is_read(name, step) else "_" for name in step.outs]
        self.seen.update(outs)
        arguments = [self.value(arg) for arg in step.args]
        arguments += [f"{key}={self.value(arg)}" for key, arg in step.kwargs.items()]
        note = f"  # {step.target}" if step.fallback else ""
        if step.out_variant is not None:
            keywords = [a.name for a in step.out_variant._schema.arguments if a.is_out]
            arguments += [f"{keyword}={name}" for keyword, name in zip(keywords, outs, strict=True)]
        call = f"{self.constant(stem, callee.function, callee)}({', '.join(arguments)})"
        absent = [k for k, name in enumerate(step.outs) if name is None] if is_custom(step.target) else []
        for k in absent:
            outs[k] = self.unique("none")
        if is_custom(step.target) and externs.returns_many(step.target):
            call = f"{self.constant('as_many', functools.partial(_as_many, step))}({call})"
        if own is not None:
            yield f"{self._launch(own)} if {own.condition} else {call}"
        elif step.out_variant is not None or not outs or outs == ["_"]:
            yield call + note
        elif len(outs) == 1 and not absent and not externs.returns_many(step.target):
            yield f"{outs[0]} = {self._expected(outs[0], step)}({call}){note}"
            return
        else:
            comma = "," if externs.returns_many(step.target) and len(outs) == 1 else ""
            yield f"{', '.join(outs)}{comma} = {call}{note}"
        for k, name in enumerate(outs):
            if k in absent:
                yield f"{self.constant('nothing', functools.partial(_nothing, step))}({name})"
            elif name != "_":
                check = self._expected(name, step)
                yield f"{check}({name})" if step.out_variant is not None else f"{name} = {check}({name})"

    def _expected(self, name: str, step: ExternStep) -> str:
        """The global that lets a result through when it is as the program was compiled for."""
        spec = replace(self.program.buffers[name].spec, device=self.device, offset=0)
        otherwise = Expected(
            spec, step.target, step.out_variant is not None, name in step.numbers, step.where
        )
        if is_symbolic((*spec.shape, *spec.stride)):
            check = self.unique(f"as_{name}")
            self.checks[check] = otherwise
            return check
        return self.constant(f"as_{name}", otherwise.sized(spec.shape, spec.stride), otherwise)

    def _is_read(self, name: str, step: ExternStep) -> bool:
        """Whether anybody reads a result of this step; in planned memory it has to be written anyway."""
        return (
            step.out_variant is not None
            or name in self.outputs
            or self.program.steps[self._last[name]] is not step
        )

    def new_result(self, name: str) -> str:
        spec = self.program.buffers[name].spec
        nbytes = nbytes_of(spec)
        if hint(nbytes) < memory.SMALL or not config.reuse_memory:
            return f"{name} = new({spec.shape}, {spec.stride}, {spec.dtype})"
        self.pool[nbytes, spec.dtype] += 1
        return f"{name} = take(({nbytes}, {spec.dtype}), {spec.shape}, {spec.stride})"

    def result(self, ref: BufRef | float | Size | None, used: Counter[str]) -> str:
        """The expression for one output of the program."""
        if not isinstance(ref, BufRef):
            return self.value(ref)
        buffer = self.program.buffers[ref.name]
        used[ref.name] += 1
        if buffer.kind == "const" or ref.name in self.holds:
            return f"copied({self.ref(ref)}, {ref.stride})"
        whole = _is_whole(ref, buffer)
        if whole and (buffer.kind == "input" or used[ref.name] == 1):
            return ref.name
        return self.view(ref) if not whole else f"view({ref.name}, {ref.shape}, {ref.stride}, 0)"

    def write(self) -> str:
        """The source text of the program."""
        made: set[str] = set(self.program.inputs)
        for at, step in enumerate(self.program.steps):
            touched = touches(step)
            for name in sorted(touched & self.outputs - made - self._fresh):
                if self.program.buffers[name].kind not in ("input", "const"):
                    self.lines.append(self.new_result(name))
                    made.add(name)
            if self.watched:
                self.lines.append(f"check.before({at})")
            self.lines.extend(self.loop(step) if isinstance(step, LoopStep) else self.extern(step))
            if self.watched:
                unread = (
                    ()
                    if isinstance(step, LoopStep)
                    else {n for n in step.outs if n and not self._is_read(n, step)}
                )
                names = [name for name in writes_of(step) if name not in unread]
                self.lines.append(f"check.after({at}, dict({', '.join(f'{name}={name}' for name in names)}))")
            dead = sorted(
                n
                for n in touched & (self._fresh | self.given) - self.outputs
                if self._last[n] == at and not (isinstance(step, ExternStep) and n in step.outs)
            )
            if dead:
                self.lines.append(f"del {', '.join(dead)}")
        for name in sorted(
            self.outputs - made - self._fresh
        ):  # an output without elements that no step writes
            if self.program.buffers[name].kind not in ("input", "const"):
                self.lines.append(self.new_result(name))
        if self.program.mutations:
            self.lines.append(f"written([{', '.join(self.program.mutations)}])")
        used: Counter[str] = Counter()
        results = ", ".join(self.result(ref, used) for ref in self.program.outputs)
        self.lines.append(f"return ({results}{',' if len(self.program.outputs) == 1 else ''})")
        for name, buffer in self.program.buffers.items():
            if buffer.kind == "const":
                self.constants[name] = buffer.value
        given = ", ".join(self.program.inputs)
        head = [f"def call({given}):"]
        if self.takes:
            unused = sorted(self.given - self.outputs - self._last.keys())
            unpack = [f"{given}{',' if len(self.program.inputs) == 1 else ''} = given"] if given else []
            head = [
                "def call(given):",
                *unpack,
                "given.clear()",
                *([f"del {', '.join(unused)}"] if unused else []),
            ]
        if self.watched:
            head.append("check = watch()")
        return "\n    ".join([*head, *self.lines]) + "\n"

    def listing(self) -> Listing:
        """The program as data; its text is written here."""
        source, buffers = self.write(), self.program.buffers
        fixed = self.program.env is None  # else `layout` says the sizes
        pool = {(0, torch.uint8): max(self.pool.values(), default=1)}
        scratch = {}
        if fixed and self.functions:
            self.functions, self.kernels = cpp_family.merged(self.functions, self.kernels)
        if fixed:
            pool = {(int(nbytes), dtype): count for (nbytes, dtype), count in self.pool.items()}
            scratch = {name: (ref.name, *self._place(ref), ref) for name, ref in self.scratch.items()}
        unsized = {
            name: replace(c, spec=replace(c.spec, shape=(), stride=())) for name, c in self.checks.items()
        }
        position = {name: i for i, name in enumerate(self.program.inputs)}
        bound = {name: (position[ref.name], ref, buffers[ref.name].spec) for name, ref in self.bound.items()}
        symbols = tuple(i for name, i in position.items() if name not in buffers)
        return Listing(
            source,
            "" if fixed else self.layout(),
            symbols,
            self.takes,
            scratch,
            int(self.scratch_size) if fixed else 0,
            bound,
            pool,
            self.kernels,
            self.labels,
            unsized,
        )

    def _place(self, ref: BufRef) -> tuple[int, int, int]:
        """The start of a buffer of numbers, a view's offset in it, and its bytes."""
        spec = self.program.buffers[ref.name].spec
        return int(self.offsets[ref.name]), int(ref.offset * spec.dtype.itemsize), int(nbytes_of(spec))

    def layout(self) -> str:
        """The source text of a function of the symbols: bytes of scratch memory, the places in it, what
        results are like.
        """
        names = [name for name in self.program.inputs if name not in self.program.buffers]
        lines = [f"def layout({', '.join(names)}):", f"    return {self.scratch_size}, {{"]
        for name, ref in self.scratch.items():
            offset = self.offsets[ref.name] + ref.offset * self.program.buffers[ref.name].spec.dtype.itemsize
            place = (
                f"({offset}, {ref.shape}, {ref.stride}, {ref.dtype})" if name in self.seen else f"{offset}"
            )
            lines.append(f"        {name!r}: {place},")
        checks = [
            f"        {name!r}: ({check.spec.shape}, {check.spec.stride}),"
            for name, check in self.checks.items()
        ]
        return "\n".join([*lines, "    }, {", *checks, "    }"]) + "\n"


def make_view(tensor: torch.Tensor, ref: BufRef, spec: TensorSpec) -> torch.Tensor:
    """The view of `tensor` (laid out as `spec`) that `ref` describes."""
    if ref.dtype != spec.dtype:
        return _view_dtype(tensor, ref.dtype, numbers(ref.shape), numbers(ref.stride), int(ref.offset))
    return _view(tensor, ref.shape, ref.stride, ref.offset)


def _split(functions: list[cpp.CFunction]) -> list[list[cpp.CFunction]]:
    """Functions in units that compile at the same time."""
    size = sum(len(f.source) for f in functions)
    count = max(1, min(cpp_build.processors(), size // UNIT_CHARACTERS, 8))
    units: list[list[cpp.CFunction]] = [[] for _ in range(count)]
    for f in sorted(functions, key=lambda f: (-len(f.source), f.name)):
        min(units, key=lambda unit: sum(len(g.source) for g in unit)).append(f)
    return [unit for unit in units if unit]


class CallProgram(_C.Program):
    """A compiled graph: `program(*tensors) -> tuple`. Safe to call from several threads and from within
    itself.

    The C++ is built in the background; the first call waits for it. When the build fails,
    `on_build_error(error)` raises or gives the callable that takes this one's place.
    """

    _checks: checked.StepChecks | None = None
    _constants: Mapping[str, Any]  # globals of the text that are there before its kernels
    _direct: Callable[..., tuple[Any, ...]] | None = (
        None  # the text's function, which calls with a list share
    )
    builds: Any

    def __init__(
        self, program: Program, info: GraphInfo, on_build_error: Callable[[BuildError], Callable[..., Any]]
    ) -> None:
        writer = self._writer = self._write(program, info)
        self._on_build_error = on_build_error
        listing, self._constants = writer.listing(), writer.constants
        texts = self._start_builds()
        self._set_up(program.name, listing)
        self._checks = checked.StepChecks(writer.program, writer.plan) if writer.plan is not None else None
        log("code", self.source)
        emit(
            "code",
            name=self.name,
            python=self.source,
            scratch_bytes=writer.scratch_size,
            program=writer.program,
            functions=writer.called,
            **texts,
        )

    def _set_up(self, name: str, listing: Listing) -> None:
        """Make the function of the text, and what calls of it share."""
        self.name, self.source, self.listing = name, listing.source, listing
        filename = f"<dynamotor {self.name} {new_number()}>"
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(True), filename)
        weakref.finalize(self, linecache.cache.pop, filename, None).atexit = False
        self._code = _code_of(self.source, filename)
        scope: dict[str, Any] = {}
        symbols = listing.symbols
        self._sizes = (
            operator.itemgetter(*symbols)
            if len(symbols) > 1
            else lambda inputs: tuple([inputs[i] for i in symbols])
        )
        if listing.layout:
            exec(compile(listing.layout, filename, "exec"), {"torch": torch, **FUNCTIONS}, scope)
        self._nbytes: dict[tuple[int, ...], int] = {}  # of scratch memory, by the symbols' values
        self._latest: tuple[tuple[int, ...], Any] | None = None
        self._layout: Callable[..., Any] | None = scope.get("layout")
        self._static = tuple(sorted({position for position, _, _ in listing.bound.values()}))
        limits = {} if listing.layout else {kind: 4 * count for kind, count in listing.pool.items()}
        self._pool = memory.new_pool(limits, 4 * max(listing.pool.values(), default=1))
        self._reuses_memory = config.reuse_memory
        self._globals: dict[str, Any] | None = None
        self._calls_torch = True
        self._instances: weakref.WeakKeyDictionary[memory.Block, dict[tuple[int, ...], CallInstance]] = (
            weakref.WeakKeyDictionary()
        )
        self._replacement: Callable[..., tuple[Any, ...]] | None = None
        self._arena = self._memory()
        self._arena.register(self)
        emit("late", build=self.build_all)

    # -- what depends on the target (C++ on a CPU here) ------------------------------------------------------
    def _write(self, program: Program, info: GraphInfo) -> Writer:
        return Writer(program, info)

    def _memory(self) -> memory.Arena:
        """Where the program's temporaries come from."""
        return memory.arena

    def _start_builds(self) -> dict[str, str]:
        """Start to build the kernels; gives their text for reports."""
        self._units = _split(list(self._writer.functions.values()))
        self.sources = [cpp.emit_unit(unit) for unit in self._units]
        self.cpp_source = "\n".join(self.sources)
        self.builds = [cpp_build.start_build(source, cpp.flags(source)) for source in self.sources]
        return {"cpp": self.cpp_source}

    def _built(self) -> dict[str, Any]:
        """The kernels and what else the program's text names, by name; BuildError when one does not build."""
        libraries = [pending.result() for pending in self.builds]
        return self._kernels(
            {f.name: library for unit, library in zip(self._units, libraries, strict=True) for f in unit}
        )

    def _kernels(self, place: Mapping[str, cpp_build.Library]) -> dict[str, Any]:
        """The kernels, whose C functions are in these libraries, and where results come from."""
        found: dict[str, Any] = {"take": self._pool.take, "new": memory.new_tensor}
        for name, (c_name, n_pointers, ints) in self.listing.kernels.items():
            found[name] = cpp_build.make_kernel(place[c_name], c_name, n_pointers, ints)
        return found

    def described(self) -> dict[str, Any]:
        """The text's other globals as plain data; None for what has no such form."""
        return {name: self._writer.described.get(name) for name in self._writer.constants}

    def units(self) -> list[tuple[str, tuple[str, ...], list[str]]]:
        """The C++ that was built: source, flags, names of the functions in it."""
        return [
            (source, cpp.flags(source), [f.name for f in unit])
            for source, unit in zip(self.sources, self._units, strict=True)
        ]

    # -- calls -----------------------------------------------------------------------------------------------
    def prepare(self) -> None:
        """Fill the globals that all instances share, once; waits for the built library."""
        if self._globals is not None or self._replacement is not None:
            return
        try:
            shared = {"__builtins__": builtins, **HELPERS, **FUNCTIONS, **self._constants, **self._built()}
        except BuildError as error:
            self._replacement = self._on_build_error(error)
            return
        if self._checks is not None:
            for name in {"new", "take"} & shared.keys():
                shared[name] = functools.partial(checked.fresh, shared[name])
        called = set(self._code.co_names) & shared.keys()
        self._calls_torch = not called <= {*self.listing.kernels, *_UNDISPATCHED}
        if self._checks is None and self._is_shared():
            function = types.FunctionType(self._code, shared, "call")
            if self.listing.takes:
                self._direct = function
            else:
                direct = one_call(self.source, shared) or function
                keys = _keys_below_autograd() if self._calls_torch else 0
                self.call_by(direct, None if _C.reads_profiler else _profiler_is_on, keys)
        self._globals = shared

    def _is_shared(self) -> bool:
        """Whether one function serves all calls: it has no memory beside its results and no views of
        inputs.
        """
        return not self.listing.scratch and not self.listing.bound and self._layout is None

    def build_all(self) -> None:
        """Wait for all that is being built."""
        self.prepare()

    def _instance(self, block: memory.Block, sizes: tuple[int, ...]) -> CallInstance:
        """The function whose globals are in `block`, for these values of the symbols."""
        scope = dict(self._globals or {})
        if self._layout is not None:
            _, places, results = self._laid_out(sizes)
            scope.update(block.places(places))
            scope.update((name, self.listing.checks[name].sized(*result)) for name, result in results.items())
            return CallInstance(types.FunctionType(self._code, scope, "call"), scope)
        allocations: dict[str, memory.Block] = {}
        for name, (buffer, start, inside, nbytes, ref) in self.listing.scratch.items():
            home = block
            if config.sanitize:
                home, start = allocations.setdefault(buffer, memory.Block(nbytes)), 0
            scope[name] = home.tensor(start + inside, numbers(ref.shape), numbers(ref.stride), ref.dtype)
        if self._checks is not None:
            scope["watch"] = functools.partial(self._checks.watch, block)
        return CallInstance(types.FunctionType(self._code, scope, "call"), scope)

    def _laid_out(self, sizes: tuple[int, ...]) -> Any:
        """What `Writer.layout` says for these values of the symbols."""
        latest = self._latest
        if latest is None or latest[0] != sizes:
            assert self._layout is not None
            latest = self._latest = sizes, self._layout(*sizes)
        return latest[1]

    def _rebind(self, instance: CallInstance, inputs: Sequence[torch.Tensor]) -> None:
        """Remake the views of static inputs, whose memory has moved."""
        for name, (position, ref, spec) in self.listing.bound.items():
            instance.scope[name] = make_view(inputs[position], ref, spec)

    def _labelled(self, scope: dict[str, Any]) -> Callable[..., Any]:
        """The function with kernels that show in a profile."""
        named = {
            name: functools.partial(_recorded, label, scope[name])
            for name, label in self.listing.labels.items()
        }
        return types.FunctionType(self._code, {**scope, **named}, "call")

    def boxed(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """A call that empties the list: a backward frees its saved values as it goes, as eager's
        does.
        """
        if self._direct is None or self._calls_torch or _profiler_is_on():
            return self._run(inputs)
        return self._direct(inputs)

    def _run(self, inputs: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> tuple[Any, ...]:
        if self._globals is None:
            self.prepare()
            if self._replacement is not None:
                return self._replacement(*inputs)
        sizes: tuple[int, ...] = ()
        nbytes = self.listing.scratch_size
        if self._layout is not None:
            sizes = self._sizes(inputs)
            known_bytes = self._nbytes.get(sizes)
            if known_bytes is None:
                if len(self._nbytes) >= 1024:
                    self._nbytes.clear()
                known_bytes = self._nbytes[sizes] = memory.roomy(self._laid_out(sizes)[0])
            nbytes = known_bytes
        block, gives_back = self._arena.acquire(nbytes), True
        try:
            known = self._instances.get(block)
            if known is None:
                known = self._instances[block] = {}
            instance = known.get(sizes)
            if instance is None:
                instance = self._instance(block, sizes)
                if len(known) >= max(KEPT_SIZES, KEPT_NAMES // len(instance.scope)):
                    known.pop(next(iter(known)))
                known[sizes] = instance
            if self._static:
                pointers = _C.data_ptrs([inputs[i] for i in self._static])
                if pointers != instance.pointers:
                    self._rebind(instance, inputs)
                    instance.pointers = pointers
            call: Callable[..., tuple[Any, ...]] = (
                instance.call if not _profiler_is_on() else self._labelled(instance.scope)
            )
            if self.listing.takes:
                call = functools.partial(call, inputs if type(inputs) is list else list(inputs))
                inputs = ()
            if not self._calls_torch:
                return call(*inputs)
            with _below_autograd():
                return call(*inputs)
        except BaseException:
            gives_back = not any(getattr(value, "holds_memory", False) for value in self._constants.values())
            raise
        finally:
            if self._reuses_memory and gives_back:
                self._arena.release(block)


@functools.cache
def _keys_below_autograd() -> int:
    """The dispatch keys that `_below_autograd` excludes, as bits. A new thread excludes none of them."""
    found: list[int] = []

    def read() -> None:
        found.append(compat.excluded_keys().raw_repr())
        with _below_autograd():
            found.append(compat.excluded_keys().raw_repr())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return found[1] & ~found[0]


def _code_of(source: str, filename: str) -> types.CodeType:
    """The code of a text's function. That of a long text is kept on disk, as `.pyc` files are: Python takes
    20 ms for the text of a model's backward.
    """
    key = cache.digest(sys.version, source) if len(source) > LONG else ""
    known = cache.load("python", key) if key else None
    if known is not None:
        stored: types.CodeType = marshal.loads(known)
        return stored.replace(co_filename=filename)
    scope: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), {"torch": torch}, scope)
    code: types.CodeType = scope["call"].__code__
    if key:
        cache.store("python", key, marshal.dumps(code))
    return code


class CallInstance:
    """The call function bound to one block of scratch memory, and the static inputs' pointers that its views
    were made of.
    """

    __slots__ = ("call", "scope", "pointers")

    def __init__(self, call: Callable[..., Any], scope: dict[str, Any]) -> None:
        self.call, self.scope = call, scope
        self.pointers: tuple[int, ...] | None = None
