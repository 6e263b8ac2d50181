"""The program that lowering hands to code generation: steps over named buffers.

C ABI of a loop kernel: `extern "C" void name(void** ptrs, const int64_t* ints)`. `ptrs[i]` is `data_ptr()` of
buffer `LoopStep.args[i]` (so storage offsets of inputs are already in it); behind them is a pointer to an i64
of this call, set when a position is out of range (an IndexError); `ints` is `LoopStep.ints`, then the values
of `symbols`.

    k0(arg0, buf1)                                  # LoopStep
    buf2 = aten.mm.out(buf1, arg1.t(), out=buf2)    # ExternStep with out_variant
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch

from ..base.errors import UserLine
from ..graph.plain_data import plain
from ..graph.sizes import Dim, Dims, ShapeEnv, Size, leaves_in
from ..graph.spec import TensorSpec

BufferKind = Literal["input", "temp", "output", "const"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named piece of memory. `spec` gives shape, dtype and strides in elements (dense; `offset` does not
    matter here).

    kind: "input" (a placeholder), "temp", "output" (its memory is handed to the caller), "const" (`value`
    holds it).
    """

    name: str
    spec: TensorSpec
    kind: BufferKind
    value: torch.Tensor | None = field(default=None, compare=False)


@plain
@dataclass(frozen=True, slots=True)
class BufRef:
    """A strided view of a buffer: strides and offset in elements, counted from the buffer's `data_ptr()`.

    For an input that has a storage offset of its own, that offset is not counted here. `dtype` may differ
    from the buffer's only by a bit-preserving view (`aten.view.dtype`).
    """

    name: str
    shape: Dims
    stride: Dims
    offset: Dim
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"{self.name}[{list(self.shape)}, {list(self.stride)}, {self.offset}]"

    @staticmethod
    def whole(buffer: Buffer) -> BufRef:
        """The buffer itself."""
        return BufRef(buffer.name, buffer.spec.shape, buffer.spec.stride, 0, buffer.spec.dtype)


@dataclass(frozen=True, slots=True)
class LoopStep:
    """One generated kernel. `args[i]` names the buffer behind `ptrs[i]`.

    inplace: pairs (written, read) whose memory may be one and the same when the read one dies here.
    note: the fused ops, for reports. partial: buffers in which its programs leave parts of results (Triton).
    """

    kernel: Any  # lower.ir.Kernel
    args: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    inplace: tuple[tuple[str, str], ...] = ()
    ints: tuple[int, ...] = ()
    note: str = ""
    partial: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()

    @classmethod
    def of(cls, kernel: Any, inplace: tuple[tuple[str, str], ...], note: str, **more: Any) -> Self:
        """The step of a kernel."""
        return cls(
            kernel,
            tuple([name for name, _, _ in kernel.params]),
            kernel.reads(),
            tuple([name for name, _, written in kernel.params if written]),
            inplace,
            kernel.streams(),
            note,
            symbols=tuple([symbol.name for symbol in kernel.symbols]),
            **more,
        )


@dataclass(frozen=True, slots=True)
class ExternStep:
    """One aten (or other torch) call: `target(*args, **kwargs)`, with BufRef in place of tensors, also inside
    lists.

    outs: the buffers made from its results in order (None: an unread result). With `out_variant` the
    target is the functional overload and the call writes `outs` through that overload (`out=` keyword, e.g.
    `aten.mm.out`); otherwise the call allocates its results, whose strides are those of the buffers' specs.
    `mutates` names buffers that the call writes in place (for example `aten.copy_`); `fallback` marks an op
    without a lowering. A result that is a number has a buffer name too, with a 0-d spec; it then is a Python
    number at run time (`numbers`). `where`: the user's line.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[str | None, ...]
    out_variant: Any = None
    mutates: tuple[str, ...] = ()
    fallback: bool = False
    numbers: tuple[str, ...] = ()
    where: UserLine | None = None


Step = LoopStep | ExternStep


@dataclass(slots=True)
class Program:
    """Steps in order over buffers. `inputs[i]` is the buffer of placeholder i, or the name of the symbol that
    it holds.

    mutations: input buffers that steps write. Shapes, strides and offsets hold `Size`s of these symbols.

    values: the buffers of the graph's nodes, by name, as far as they have memory.
    """

    name: str
    inputs: tuple[str, ...]
    buffers: dict[str, Buffer]
    steps: list[Step]
    outputs: tuple[BufRef | int | float | bool | Size | None, ...]
    mutations: tuple[str, ...] = ()
    env: ShapeEnv | None = None
    values: dict[str, BufRef] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"def {self.name}({', '.join(self.inputs)}):"]
        lines += [f"    {b.name}: {b.spec}  # {b.kind}" for b in self.buffers.values()]
        for n, step in enumerate(self.steps):
            if isinstance(step, LoopStep):
                lines.append(f"    kernel{n}({', '.join(step.args)})  # {step.note}")
            else:
                words = [f"{a}" for a in step.args] + [f"{k}={v}" for k, v in step.kwargs.items()]
                made = ", ".join(str(o) for o in step.outs)
                where = f"  # {step.where.filename}:{step.where.lineno}" if step.where else ""
                lines.append(f"    {made} = {step.target}({', '.join(words)}){where}")
        return "\n".join([*lines, f"    return {', '.join(map(str, self.outputs))}"]) + "\n"


def refs(value: Any) -> Iterator[BufRef]:
    """The buffer references inside an argument."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, BufRef))


def reads_of(step: Step) -> set[str]:
    """Names of the buffers that a step reads."""
    if isinstance(step, LoopStep):
        return set(step.reads)
    return {ref.name for ref in refs((step.args, step.kwargs))}


def writes_of(step: Step) -> tuple[str, ...]:
    """Names of the buffers that a step makes or writes."""
    return step.writes if isinstance(step, LoopStep) else (*filter(None, step.outs), *step.mutates)


def touches(step: Step) -> set[str]:
    """Names of all buffers that a step reads or writes."""
    return {*(step.args if isinstance(step, LoopStep) else ()), *reads_of(step), *writes_of(step)}
