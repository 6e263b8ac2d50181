"""The compiler's work, kept from its events as texts and numbers: `lower` and the report are made of it.

>>> record = Record()
>>> with record.listening():
...     dynamotor.compile(model)(x)
>>> print(record.programs[0].kernels[0].loops)
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base.errors import UserLine
from ..base.events import Event, subscribe
from ..capture.compiled_share import Counts
from ..graph.graph_text import call_text, program_text
from ..graph.sizes import hint
from ..graph.spec import TensorSpec, numel
from ..lower.ir import COLS, Expr, Kernel, roots, walk
from ..lower.kernel_text import kernel_text
from ..lower.program import BufRef, ExternStep, LoopStep, Program, refs, touches
from ..runtime.cpp_text import laid_out

_FREE = ("load", "const", "acc", "scratch", "scan", "index", "cast", "round_to")  # no arithmetic


@dataclass(frozen=True)
class GraphNode:
    """A node of a graph as drawn: its name, its target, its operands, the user's line, shape and
    dtype.
    """

    name: str
    op: str
    call: str
    reads: tuple[str, ...]
    where: UserLine | None
    spec: str


@dataclass(frozen=True)
class GraphText:
    """A graph at one stage: "captured", "joint", "forward", "backward" or "inference"."""

    name: str
    stage: str
    text: str
    nodes: tuple[GraphNode, ...]

    @staticmethod
    def of(name: str, stage: str, gm: torch.fx.GraphModule) -> GraphText:
        """The graph as it is now; passes rewrite it."""
        nodes = [
            GraphNode(
                n.name,
                n.op,
                n.target if n.op == "placeholder" else call_text(n) if n.op != "output" else "return",
                tuple(i.name for i in n.all_input_nodes),
                n.meta.get("where"),
                str(n.meta.get("val") or ""),
            )
            for n in gm.graph.nodes
        ]
        return GraphText(name, stage, program_text(gm), tuple(nodes))


@dataclass(frozen=True)
class PassText:
    """A pass that changed a graph: its seconds, and the lines around its changes, each behind "+", "-", " "
    or "@".
    """

    name: str
    seconds: float
    lines: tuple[str, ...]

    @property
    def added(self) -> int:
        """New lines."""
        return sum(line.startswith("+") for line in self.lines)

    @property
    def removed(self) -> int:
        """Lines that are gone."""
        return sum(line.startswith("-") for line in self.lines)


@dataclass
class PassesRecord:
    """The passes over one graph, in order; unchanged: the names of those that changed nothing."""

    stage: str
    after: str  # the graph's text, by which the next pass over it is known
    steps: list[PassText] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)


@dataclass
class CaptureRecord:
    """One trace: its graph (None: nothing was captured), guards with the lines that made them, why it
    stopped, sizes.
    """

    name: str
    graph: GraphText | None
    guards: list[tuple[str, UserLine | None]]
    reason: Any
    sizes: list[str]
    code: str


@dataclass
class StepRecord:
    """One step of a program. loops and code are empty for an aten call; seconds: of one call, once
    measured.
    """

    name: str
    nodes: str
    lines: tuple[UserLine, ...]
    nbytes: int
    flops: int
    loops: str = ""
    code: str = ""
    seconds: float = 0.0
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass
class ProgramRecord:
    """A compiled graph: its steps in order, the Python that calls them, bytes that are alive at each step."""

    name: str
    text: str
    python: str
    steps: list[StepRecord]
    memory: list[int]
    scratch_bytes: int
    refusals: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # (node, group, reason)

    @property
    def kernels(self) -> list[StepRecord]:
        """The generated ones."""
        return [step for step in self.steps if step.loops]

    @property
    def code(self) -> str:
        """The generated C++ or Triton, each function once."""
        return "\n".join(dict.fromkeys(step.code for step in self.kernels))


class Record:
    """Listens to events and keeps what people want to see of them; no tensors."""

    def __init__(self) -> None:
        self.captures: list[CaptureRecord] = []
        self.graphs: list[GraphText] = []
        self.passes: list[PassesRecord] = []
        self.programs: list[ProgramRecord] = []
        self.recompiles: list[dict[str, Any]] = []
        self.fallbacks: list[dict[str, Any]] = []
        self.phases: list[tuple[str, float, float]] = []  # name, start, seconds
        self.ddp: list[dict[str, str]] = []
        self.xla: list[dict[str, Any]] = []
        self.shares: dict[int, tuple[str, Counts]] = {}  # of compiled callables, by identity
        self.native: dict[str, str] = {}  # functions that are never captured, and why
        self._names: Counter[str] = Counter()
        self._lines: dict[str, UserLine] = {}
        self._refusals: Counter[tuple[str, str, str]] = Counter()

    @contextlib.contextmanager
    def listening(self) -> Iterator[Record]:
        """Record what happens inside."""
        remove = self.subscribe()
        try:
            yield self
        finally:
            remove()

    def subscribe(self) -> Any:
        """Record from now on; the returned function ends it."""
        return subscribe(self, *_HANDLERS)

    def __call__(self, event: Event) -> None:
        _HANDLERS[event.kind](self, event)

    def _capture(self, event: Event) -> None:
        captured, name = event.data["captured"], self._distinct(event.data["name"], event.data["captured"])
        graph = None if captured.gm is None else GraphText.of(name, "captured", captured.gm)
        guards = [(str(guard), captured.lines.get(guard)) for guard in captured.guards]
        self.captures.append(
            CaptureRecord(name, graph, guards, captured.reason, captured.sizes.report(), captured.code)
        )

    def _distinct(self, name: str, captured: Any) -> str:
        """A row's name: other functions of that name have other lines, other captures other numbers."""
        lines = [line for line in captured.lines.values() if line is not None]
        nodes = () if captured.gm is None else captured.gm.graph.nodes
        lines += [node.meta["where"] for node in nodes if node.meta.get("where")]
        place = f" ({os.path.basename(lines[0].filename)}:{lines[0].lineno})" if lines and "<" in name else ""
        self._names[name + place] += 1
        times = self._names[name + place]
        return f"{name}{place}" + (f", capture {times}" if times > 1 else "")

    def _share(self, event: Event) -> None:
        self.shares[event.data["of"]] = event.data["name"], event.data["counts"]

    def _graph(self, event: Event) -> None:
        gm = event.data["graph"]
        self.graphs.append(GraphText.of(event.data["name"], event.data.get("stage", "joint"), gm))
        self._lines.update((n.name, n.meta["where"]) for n in gm.graph.nodes if n.meta.get("where"))
        self._refusals.clear()

    def _pass(self, event: Event) -> None:
        name, stage, before, after = (event.data[key] for key in ("name", "stage", "before", "after"))
        last = self.passes[-1] if self.passes else None
        if last is None or last.stage != stage or last.after != before:
            last = PassesRecord(stage, before)
            self.passes.append(last)
        last.after = after
        if after == before:
            last.unchanged.append(name)
            return
        changes = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2)
        last.steps.append(
            PassText(name, event.data["seconds"], tuple(changes)[2:])
        )  # behind the names of files

    def _refuse(self, event: Event) -> None:
        self._refusals[event.data["node"], event.data["into"], event.data["reason"]] += 1

    def _code(self, event: Event) -> None:
        program, functions = event.data["program"], iter(event.data["functions"])
        steps = [self._step(program, step, functions) for step in program.steps]
        self.programs.append(
            ProgramRecord(
                event.data["name"],
                str(program),
                event.data["python"],
                steps,
                live_bytes(program),
                hint(event.data["scratch_bytes"]),
                Counter(self._refusals),
            )
        )
        self._refusals.clear()

    def _step(self, program: Program, step: LoopStep | ExternStep, functions: Iterator[Any]) -> StepRecord:
        if isinstance(step, ExternStep):
            touched = [_nbytes(r) for r in refs((step.args, step.kwargs))]
            touched += [
                _nbytes(program.buffers[name].spec) for name in step.outs if name and name in program.buffers
            ]
            shapes = tuple(tuple(hint(n) for n in r.shape) for r in refs(step.args))
            return StepRecord(
                str(step.target),
                ", ".join(n for n in step.outs if n),
                (step.where,) if step.where else (),
                sum(touched),
                _extern_flops(program, step),
                shapes=shapes,
            )
        names = step.note.split(", ")
        lines = dict.fromkeys(self._lines[n] for n in names if n in self._lines)
        nbytes = sum(
            _nbytes(program.buffers[name].spec)
            for name in dict.fromkeys(step.args)
            if name in program.buffers
        )
        function = next(functions)
        return StepRecord(
            function.name,
            step.note,
            tuple(lines),
            nbytes,
            # Templates and batches of a GPU's program have a function that no one kernel describes.
            0 if step.kernel is None else _flops(step.kernel),
            "" if step.kernel is None else kernel_text(step.kernel),
            laid_out(function.source),
        )

    def _ddp(self, event: Event) -> None:
        plan = event.data.get("plan")
        self.ddp.append(
            {"mode": event.data["mode"], "text": str(plan) if plan else event.data["reason"].text}
        )

    def _phase(self, event: Event) -> None:
        seconds = event.data["seconds"]
        self.phases.append((event.data["name"], event.time - seconds, seconds))

    def _xla(self, event: Event) -> None:
        self.xla.append(
            {
                k: v if isinstance(v, (int, float)) else str(v)
                for k, v in event.data.items()
                if k != "executable"
            }
        )


_HANDLERS: dict[str, Any] = {
    "capture": Record._capture,
    "joint": Record._graph,
    "aten_graph": Record._graph,
    "pass": Record._pass,
    "refuse": Record._refuse,
    "code": Record._code,
    "recompile": lambda self, event: self.recompiles.append(event.data),
    "fallback": lambda self, event: self.fallbacks.append(
        {k: str(v) for k, v in event.data.items() if v is not None}
    ),
    "phase": Record._phase,
    "share": Record._share,
    "native": lambda self, event: self.native.update({event.data["name"]: event.data["why"]}),
    "ddp": Record._ddp,
    "xla.compiled": Record._xla,
    "xla.compile": Record._xla,
}


def _nbytes(of: TensorSpec | BufRef) -> int:
    return numel(hint(n) for n in of.shape) * of.dtype.itemsize


def _flops(kernel: Kernel) -> int:
    """Arithmetic operations of one launch: each counts as one, whatever it costs."""

    def ops(statements: Iterable[Any]) -> int:
        found: set[Expr] = set(walk(*roots(*statements)))
        return sum(e.op not in _FREE for e in found) + sum(type(s).__name__ == "Reduce" for s in statements)

    outer, middle, inner = ([hint(v.size) for v in vs] for vs in (kernel.outer, kernel.middle, kernel.inner))
    whole = numel([*outer, *middle, *inner])
    total = sum(whole * ops(phase.inner) + numel(outer) * ops(phase.row) for phase in kernel.phases)
    return (
        total
        + numel([*(outer if kernel.template == COLS else ()), *inner]) * ops(kernel.final)
        + ops(kernel.final_once)
    )


def _extern_flops(program: Program, step: ExternStep) -> int:
    """Of matrix products, convolutions and attention, as torch.utils.flop_counter counts them; 0 of what it
    does not know.
    """
    from torch.utils.flop_counter import flop_registry  # slow to import

    count = flop_registry.get(getattr(step.target, "overloadpacket", None))
    if count is None or not any(step.outs):
        return 0

    def shape(value: Any) -> Any:
        if isinstance(value, BufRef):
            return torch.Size(hint(n) for n in value.shape)
        return [shape(v) for v in value] if isinstance(value, (list, tuple)) else value

    # Several results are gradients of the arguments behind the first: an unread one has no buffer.
    read = [torch.Size(map(hint, program.buffers[n].spec.shape)) if n else None for n in step.outs]
    args = [shape(a) for a in step.args]
    made = read[0] if len(read) == 1 else [own or of for own, of in zip(read, args[1:])]
    return int(count(*args, **{k: shape(v) for k, v in step.kwargs.items()}, out_val=made))


def live_bytes(program: Program) -> list[int]:
    """Bytes of the program's own buffers that hold a value at each step; inputs and constants are not
    counted.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for at, step in enumerate(program.steps):
        for name in touches(step):
            first.setdefault(name, at)
            last[name] = at
    end = len(program.steps) - 1
    last.update({ref.name: end for ref in program.outputs if isinstance(ref, BufRef)})
    total = [0] * len(program.steps)
    for name, start in first.items():
        buffer = program.buffers.get(name)
        if buffer is not None and buffer.kind in ("temp", "output"):
            for at in range(start, last[name] + 1):
                total[at] += _nbytes(buffer.spec)
    return total
