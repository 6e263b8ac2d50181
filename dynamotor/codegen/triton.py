"""Triton for fused loop kernels: the launches of a kernel, each a function that equal kernels share.

>>> functions, steps = expand(program)      # the program's loop steps as launches over more buffers

The functions are text; runtime/triton_build.py makes GPU code of them, bench/triton_interpret.py runs them
without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..graph.spec import TensorSpec
from ..lower.program import Buffer, LoopStep, Program, Step
from ..lower.verify_program import verify_program
from . import triton_sizes
from .cpp import structure
from .triton_kernel import LaunchPiece, TileEmitter, TritonFunction
from .triton_ops import unmarked
from .triton_plan import DEFAULT, GpuTuning, NewBuffer, plan_kernel
from .triton_scan import ScanTiles
from .verify_emitted import verify_places, verify_triton, wrong


@dataclass(frozen=True, slots=True)
class TritonStep(LoopStep):
    """One launch. `args` are the buffers behind the function's pointers, `ints` its random streams.

    kernel: the one that the function was written from; None for a function of another origin (templates,
    batches). in_parts: the function's draft, of a product of few rows.
    """

    function: TritonFunction | None = None
    in_parts: TritonFunction | None = None

    def __post_init__(self) -> None:
        # Passes behind this one read the kernel for the function: another kernel would be a wrong result.
        if self.kernel is not None and self.args != tuple([name for name, _, _ in self.kernel.params]):
            wrong(
                f"the pointers of a launch, {self.args}, are not its kernel's parameters", self.kernel.params
            )


_memo: dict[str, TritonFunction] = {}


def emit_piece(piece: LaunchPiece) -> TritonFunction:
    """The function of one launch; launches of equal structure give the same one."""
    return triton_sizes.settle(draft_piece(piece))


def draft_piece(piece: LaunchPiece) -> TritonFunction:
    """The function with its numbers between marks."""
    key = f"{_canonical(piece)}\n{piece.plan}"
    found = _memo.get(key)
    if found is None:
        if len(_memo) > 4096:
            _memo.clear()
        found = draft_of(piece)
        verify_triton([n for n, p in enumerate(piece.kernel.params) if p[2]], unmarked(found.source))
        _memo[key] = found
    return found


def draft_of(piece: LaunchPiece) -> TritonFunction:
    """The function of one launch with its numbers between marks; each store stands in its loops."""
    emitter = (ScanTiles if piece.plan.form == "scan" else TileEmitter)(piece)
    around = piece.plan.r.vars if piece.plan.form == "across" and not piece.plan.looped else ()
    draft = emitter.draft()
    verify_places(piece.kernel, emitter.body.stores, around)
    return draft


def _canonical(piece: LaunchPiece) -> str:
    """A key without the names of buffers and variables."""
    order = {p[0]: n for n, p in enumerate(piece.kernel.params)}
    return f"{structure(piece.kernel)}\n{[(n, order[b]) for n, b in piece.partial.items()]}"


def expand(program: Program, tuning: GpuTuning = DEFAULT) -> Program:
    """The program with each loop step replaced by its launches, and buffers for values passed to each
    other.
    """
    buffers = dict(program.buffers)

    def new_buffer(spec: TensorSpec) -> str:
        name = f"part{len(buffers)}"
        buffers[name] = Buffer(name, spec, "temp")
        return name

    steps: list[Step] = []
    for step in program.steps:
        steps += _launches(step, new_buffer, tuning) if isinstance(step, LoopStep) else [step]
    expanded = Program(program.name, program.inputs, buffers, steps, program.outputs, program.mutations)
    verify_program(expanded)
    return expanded


def _launches(step: LoopStep, new_buffer: NewBuffer, tuning: GpuTuning) -> Iterator[TritonStep]:
    pieces = plan_kernel(step.kernel, new_buffer, tuning)
    for piece in pieces:
        yield TritonStep.of(
            piece.kernel,
            step.inplace if len(pieces) == 1 else (),
            step.note,
            partial=tuple(piece.partial.values()),
            function=emit_piece(piece),
        )
