"""`dynamotor.explain(fn)(*args)`: graphs, breaks with their reasons, fallbacks to aten
kernels.

>>> print(dynamotor.explain(model)(x))
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..api import compile as compile_, dispatcher_of, plain
from ..base.errors import link
from ..base.events import Event, collect, counters, phase_seconds
from ..capture.compiled_share import Counts
from ..capture.frontend import eager_texts, served_entries
from ..capture.recompiles import by_reason
from ..capture.stance import said_by, stance
from .tables import counted

_CODE = re.compile(r"\.(DM\d{3})$")  # counters of whole graphs or backwards: `build.DM301`
_OP = re.compile(r"(?!xla\.)\w+\.\w+\.\w+")  # `aten.erfinv.default`


def is_op(counter: str) -> bool:
    """Whether a key of counters["fallback"] is an op that runs as PyTorch's kernel in a compiled program;
    others are parts that run in eager PyTorch.
    """
    return _OP.fullmatch(counter) is not None and _CODE.search(counter) is None


@dataclass
class Explanation:
    """What ran in one call of a compiled callable; `str()` is the report."""

    graphs: list[torch.fx.GraphModule] = field(default_factory=list)
    compile_ids: list[str] = field(default_factory=list)  # of the programs that ran, as the log has them
    recompiles: list[str] = field(
        default_factory=list
    )  # the ID of each new program, and why those before did not fit, with their IDs
    guards: list[list[str]] = field(default_factory=list)
    break_reasons: list[Any] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)
    declined: dict[str, str] = field(default_factory=dict)  # why an op's lowering left a call to aten
    eager: list[str] = field(
        default_factory=list
    )  # graphs, and ops between compiled parts, that eager PyTorch runs, and why
    gradients: list[str] = field(
        default_factory=list
    )  # inside DistributedDataParallel: how each graph's are reduced
    choices: list[dict[str, Any]] = field(
        default_factory=list
    )  # backend="auto": the chosen backend of each graph, and all times
    seconds: dict[str, float] = field(default_factory=dict)
    counts: Counts = field(
        default_factory=Counts
    )  # torch calls of this call: in graphs, and in eager PyTorch by reason
    native: dict[str, str] = field(default_factory=dict)  # functions that are never captured, and why
    sizes: list[list[str]] = field(
        default_factory=list
    )  # of each capture: symbols, their guards, why others are numbers

    @property
    def graph_count(self) -> int:
        return len(self.graphs)

    @property
    def graph_break_count(self) -> int:
        return len(self.break_reasons)

    @property
    def share(self) -> float:
        """The part of the torch calls of this call that ran compiled."""
        return self.counts.share

    @property
    def op_count(self) -> int:
        """Torch calls captured in all graphs."""
        return sum(n.op in ("call_function", "call_method") for g in self.graphs for n in g.graph.nodes)

    def __str__(self) -> str:
        lines = [
            f"{counted(self.graph_count, 'graph')}, {counted(self.op_count, 'torch call')}, "
            f"{counted(self.graph_break_count, 'break')}, {counted(sum(map(len, self.guards)), 'guard')}"
        ]
        lines.append(str(self.counts))
        if self.compile_ids:
            lines.append(f"compile IDs: {', '.join(dict.fromkeys(self.compile_ids))}")
        lines += self.recompiles
        lines += [
            f"left to eager: {counted(n, 'torch call')}: {why}" for why, n in self.counts.eager.most_common()
        ]
        if self.counts.eager:
            lines.append(f"seconds outside of graphs: {self.counts.seconds:.4f}")
        lines += [f"never captured: {name}: {why}" for name, why in self.native.items()]
        lines += [f"break {i + 1}: {reason}" for i, reason in enumerate(self.break_reasons)]
        lines += [f"sizes of capture {i + 1}: {line}" for i, found in enumerate(self.sizes) for line in found]
        lines += [f"gradients are reduced {text}" for text in self.gradients]
        lines += [f"in eager PyTorch: {text}" for text in self.eager]
        for i, choice in enumerate(self.choices):
            lines += [f"backends of graph {i + 1}, the quickest is {choice['chosen']}:"]
            lines += [f"  {one}" for one in choice["times"]]
        ops = [
            f"{op} ×{n}" + (f" ({self.declined[op]})" if op in self.declined else "")
            for op, n in self.fallbacks.most_common()
            if is_op(op)
        ]
        if ops:
            lines.append("aten kernels used for lack of a lowering: " + ", ".join(ops))
        lines += [
            f"left to PyTorch ×{n}: {code[1]} (reason: the log channel `fallbacks`; cure: {link(code[1])})"
            for name, n in self.fallbacks.most_common()
            if (code := _CODE.search(name)) and not any(code[1] in text for text in self.eager)
        ]
        lines += [
            f"left to PyTorch ×{n}: {name} (reason: the log channel `fallbacks`)"
            for name, n in self.fallbacks.most_common()
            if not is_op(name) and not _CODE.search(name)
        ]
        if self.seconds:
            lines.append("seconds: " + ", ".join(f"{name} {s:.3f}" for name, s in self.seconds.items()))
        return "\n".join(lines)


def explain(fn: Callable[..., Any], **compile_options: Any) -> Callable[..., Explanation]:
    """Call `fn` with the arguments given to the returned function, and report what ran.

    A compiled function or module is called as it is: its earlier programs are described too. Anything
    else, or with compile_options (those of `compile`), is compiled anew. The call runs for real: its side
    effects happen.
    """

    def run(*args: Any, **kwargs: Any) -> Explanation:
        dispatcher = dispatcher_of(fn)
        compiled = (
            fn if dispatcher is not None and not compile_options else compile_(plain(fn), **compile_options)
        )
        before, seconds_before = Counter(counters["fallback"]), dict(phase_seconds)
        hits = {} if dispatcher is None else {entry: entry.hits for entry in served_entries(dispatcher)}
        found, compiler = Explanation(), dispatcher_of(compiled).miss.__self__
        with (
            collect("capture", "break", "ddp", "fallback", "auto", "recompile") as events,
            compiler.share.watched() as counts,
        ):
            compiled(*args, **kwargs)
        if (holds := stance()) != "default":
            without = "everything" if holds == "force_eager" else "code without a program that fits"
            found.eager.append(f"{without}, since {said_by()} says {holds}")
        found.counts, found.native = counts, compiler.inner.native
        more = Counter(counters["fallback"]) - before
        for entry, n in hits.items():
            if entry.hits > n:
                more += _note_entry(found, entry.info.data)
        for event in events:
            _note(found, event)
            if event.kind == "capture":
                found.sizes.append(event.data["captured"].sizes.report())
                found.compile_ids.append(event.compile_id)
        found.fallbacks = Counter(
            {name: n for name, n in more.items() if not name.startswith("ddp.")}
        )  # in `gradients`
        found.seconds = {
            k: v - seconds_before.get(k, 0.0)
            for k, v in phase_seconds.items()
            if v > seconds_before.get(k, 0.0)
        }
        return found

    return run


def _note_entry(found: Explanation, captured: Any) -> Counter[str]:
    """Describe a version that was compiled before; its fallbacks."""
    found.compile_ids.append(captured.compile_id)
    if captured.reason is not None:
        found.break_reasons.append(captured.reason)
    if captured.gm is not None:
        found.graphs.append(captured.gm)
        found.guards.append([str(g) for g in captured.guards])
    found.eager += captured.eager
    found.choices += [event.data for event in captured.events if event.kind == "auto"]
    found.sizes.append(captured.sizes.report())
    fallbacks: Counter[str] = captured.fallbacks
    return fallbacks


def _note(found: Explanation, event: Event) -> None:
    if event.kind == "break":
        found.break_reasons.append(event.data.get("reason"))
    elif event.kind == "recompile":
        new = event.data["new"]
        then = (
            f"compiled again as {new}"
            if new
            else "in eager PyTorch, since there are as many programs as may be"
        )
        found.recompiles.append(f"{then}: {by_reason(event.data['reasons'], event.data['failed'])}")
    elif event.kind == "fallback":
        found.eager += eager_texts([event])
        if event.data.get("why", "no lowering") != "no lowering":
            found.declined[event.data["op"]] = event.data["why"]
    elif event.kind == "auto":
        found.choices.append(event.data)
    elif event.kind == "ddp":
        plan = event.data.get("plan")
        found.gradients.append(f"{event.data['mode']}: {plan.summary if plan else event.data['reason'].text}")
    elif event.data.get("graph") is not None:
        found.graphs.append(event.data["graph"])
        found.guards.append([str(g) for g in event.data.get("guards", ())])
