"""`dynamotor.report(fn, *args, path="report.html")`: one self-contained page that shows what the compiler
did.

DYNAMOTOR_REPORT=out.html writes one for a whole program when it ends (without measured times). Jinja2, which
torch brings, fills `report.html.j2`; charts need matplotlib (`pip install dynamotor[report]`), without which
the page says so.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import linecache
import os
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..api import compile as compile_, dispatcher_of, plain
from ..base.errors import UsageError, UserLine
from .lowered import call_both_ways
from .record import GraphText, Record
from .verdict import Times, Verdict

NO_CHARTS = "Charts need matplotlib: pip install dynamotor[report]"
_COLORS = {
    "placeholder": "#eef2f7",
    "output": "#f7e9d7",
    "call_function": "#e1eefb",
    "call_method": "#e1eefb",
}


def report(
    fn: Callable[..., Any],
    *args: Any,
    path: str | os.PathLike[str] = "dynamotor-report.html",
    compile_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Path:
    """Compile `fn` anew, call it (and the backward of its result) and write a page about it; gives the
    page's path.

    The function is called thirteen times, ten of them compiled, for real: its side effects happen; gradients
    are as before. Times of kernels are of the last three calls, under torch.profiler; the time against eager
    is the shortest of three calls each, in turns.
    """
    check_writable(path)
    record = Record()
    original = plain(fn)
    compiled = compile_(original, **(compile_options or {}))
    with record.listening():
        for _ in range(3):
            call_both_ways(compiled, args, kwargs)
    device = _device(record)
    outside = _outside(record, compiled, args, kwargs)
    seconds = [
        [_seconds(lambda: call_both_ways(f, args, kwargs), device) for f in (compiled, original)]  # noqa: B023
        for _ in range(3)
    ]
    times = Times(min(s[0] for s in seconds), min(s[1] for s in seconds), outside)
    _measure(record, lambda: call_both_ways(compiled, args, kwargs))
    name = getattr(fn, "__qualname__", type(fn).__name__)
    return write(record, path, name, _peaks(device), times)


def _seconds(work: Callable[[], Any], device: str) -> float:
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _outside(record: Record, compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Note which torch calls of one forward run in graphs; gives the part of its time outside of them."""
    dispatcher = dispatcher_of(compiled)
    if dispatcher is None:  # an optimizer's step
        return 0.0
    share = dispatcher.miss.__self__.share
    with share.watched() as counts:
        seconds = _seconds(lambda: compiled(*args, **kwargs), "cpu")
    record.shares = {share.number: (share.name, counts)}
    return min(1.0, float(counts.seconds) / seconds)


def check_writable(path: str | os.PathLike[str]) -> None:
    """UsageError (DM142) before any work where no file can be written at the path."""
    target = Path(path)
    wrong = target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK)
    if wrong or target.exists() and not os.access(target, os.W_OK):
        raise UsageError(
            "DM142", f"the report cannot be written to {target}", cure="give a path that can be written"
        )


def _device(record: Record) -> str:
    return (
        "cuda"
        if torch.cuda.is_available() and any(" cuda" in program.text for program in record.programs)
        else "cpu"
    )


def _measure(record: Record, call: Callable[[], Any], calls: int = 3) -> None:
    """Seconds of each step: the mean over calls of the same kernel, or of the same aten op on the same
    shapes.
    """
    with torch.profiler.profile(record_shapes=True) as profile:
        for _ in range(calls):
            call()
    kernels = {e.key.removeprefix("dynamotor::"): e for e in profile.key_averages()}
    by_shape = [
        (e.key, [s for s in e.input_shapes if s], e) for e in profile.key_averages(group_by_input_shape=True)
    ]
    for step in (step for program in record.programs for step in program.steps):
        if step.loops:
            found = kernels.get(step.name)
        else:
            key, shapes = "::".join(step.name.split(".")[:2]), [list(s) for s in step.shapes if s]
            found = next(
                (e for name, given, e in by_shape if name == key and given[: len(shapes)] == shapes), None
            )
        if found is not None and found.count:
            total = getattr(found, "device_time_total", 0) or found.cpu_time_total
            step.seconds = total * 1e-6 / found.count


def _peaks(device: str) -> dict[str, float]:
    """What this machine reaches with a copy of 64 MB (bytes a second, read and written) and a float32 product
    of 1024.
    """
    x, a = torch.empty(16 << 20, device=device), torch.randn(1024, 1024, device=device)
    y = torch.empty_like(x)

    def best(work: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    return {"bytes": 2 * x.nbytes / best(lambda: y.copy_(x)), "flops": 2 * 1024**3 / best(lambda: a @ a)}


def write(
    record: Record,
    path: str | os.PathLike[str],
    title: str,
    peaks: dict[str, float] | None = None,
    times: Times | None = None,
) -> Path:
    """Fill the template with a record."""
    import jinja2  # here and below: imported on demand

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters.update(si=_si, where=_where, drawing=drawing)
    page = env.get_template("report.html.j2").render(
        title=title,
        record=record,
        verdict=Verdict.of(record, times),
        peaks=peaks,
        sources=list(_sources(record)),
        share=_share,
        phases=_totals(record),
        phase_chart=_phase_chart(record),
        memory_chart=_memory_chart,
        no_charts=NO_CHARTS,
        colors=_COLORS,
        machine=f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}, {platform.node()}",
    )
    target = Path(path)
    target.write_text(page, encoding="utf-8")
    return target


def _si(value: float, unit: str) -> str:
    """A number with three digits and a prefix: 1.23 GB/s."""
    if not value:
        return f"0 {unit}"
    for factor, prefix in (
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
        (1, ""),
        (1e-3, "m"),
        (1e-6, "µ"),
    ):
        if value >= factor or factor == 1e-6:
            return f"{value / factor:.3g} {prefix}{unit}"
    raise AssertionError(value)


def _where(line: UserLine | None) -> str:
    return "" if line is None else f"{os.path.basename(line.filename)}:{line.lineno}"


def _share(step: Any, peaks: dict[str, float] | None) -> float:
    """Of the machine's peak, in percent: of its memory or of its arithmetic, whichever a step uses better."""
    if not peaks or not step.seconds:
        return 0.0
    used = step.nbytes / step.seconds / peaks["bytes"], step.flops / step.seconds / peaks["flops"]
    return 100 * float(max(used))


def _totals(record: Record) -> list[tuple[str, float, int]]:
    """Seconds and how often, by phase; the longest first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    times: Counter[str] = Counter()
    for name, _, took in record.phases:
        seconds[name] += took
        times[name] += 1
    return [(name, took, times[name]) for name, took in sorted(seconds.items(), key=lambda one: -one[1])]


# -- the user's source ---------------------------------------------------------------------------------------
def _sources(record: Record) -> Iterator[dict[str, Any]]:
    """The functions of which lines were captured, or broke the graph."""
    nodes = Counter(n.where for c in record.captures if c.graph for n in c.graph.nodes if n.where)
    breaks = {c.reason.where: c.reason for c in record.captures if c.reason is not None and c.reason.where}
    places: dict[str, set[int]] = {}
    for where in (*nodes, *breaks):
        places.setdefault(where.filename, set()).add(where.lineno)
    count = Counter({(w.filename, w.lineno): n for w, n in nodes.items()})
    broke = {(w.filename, w.lineno): reason for w, reason in breaks.items()}
    for filename, lines in sorted(places.items()):
        for name, first, last in _functions(filename, lines):
            rows = [
                {
                    "no": no,
                    "text": linecache.getline(filename, no).rstrip("\n"),
                    "nodes": count[filename, no],
                    "reason": broke.get((filename, no)),
                }
                for no in range(first, last + 1)
            ]
            broken = sum(row["reason"] is not None for row in rows)
            yield {"file": filename, "name": name, "first": first, "rows": rows, "breaks": broken}


def _functions(filename: str, lines: set[int]) -> Iterable[tuple[str, int, int]]:
    """Name, first and last line of the innermost functions around these lines; the lines alone where there is
    no source.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:  # text in a notebook or a template
        tree = ast.Module([], [])
    spans = list(_spans(tree, ""))
    found = {
        min([s for s in spans if s[1] <= line <= s[2]], key=lambda s: s[2] - s[1], default=("", line, line))
        for line in lines
    }
    return sorted(found, key=lambda s: s[1])


def _spans(tree: ast.AST, within: str) -> Iterator[tuple[str, int, int]]:
    """Functions with the classes and functions around them, as "Model.forward"."""
    for node in ast.iter_child_nodes(tree):
        name = within
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{within}.{node.name}".strip(".")
            if not isinstance(node, ast.ClassDef):
                yield name, node.lineno, node.end_lineno or node.lineno
        yield from _spans(node, name)


# -- drawings ------------------------------------------------------------------------------------------------
def drawing(graph: GraphText) -> dict[str, Any]:
    """Places of a graph's boxes, a row a generation, and lines between them; inputs that only weights fill
    are left out.
    """
    import networkx as nx

    shown = {n.name: n for n in graph.nodes if n.op != "placeholder"}
    net = nx.DiGraph([(r, n.name) for n in shown.values() for r in n.reads if r in shown])
    net.add_nodes_from(shown)
    places: dict[str, tuple[int, int]] = {}
    for row, generation in enumerate(nx.topological_generations(net)):

        def after(name: str) -> float:
            above = [places[p][0] for p in net.predecessors(name)]
            return sum(above) / len(above) if above else 0.0

        for column, name in enumerate(sorted(generation, key=after)):
            places[name] = 170 * column, 46 * row
    boxes: list[dict[str, Any]] = [
        {
            "x": places[n.name][0],
            "y": places[n.name][1],
            "label": _label(n.call),
            "color": _COLORS.get(n.op, "#eeeeee"),
            "title": f"{n.name} = {n.call[:300]}\n{n.spec}\n{n.where or ''}",
        }
        for n in shown.values()
    ]
    width, height = (
        max((b["x"] for b in boxes), default=0) + 180,
        max((b["y"] for b in boxes), default=0) + 60,
    )
    return {
        "boxes": boxes,
        "lines": [(*places[a], *places[b]) for a, b in net.edges],
        "width": width,
        "height": height,
    }


def _label(call: str) -> str:
    """The text of a box: the op's name without its library and overload."""
    name = call.partition("(")[0].split(".")
    return (name[-2] if len(name) > 2 and name[0] in ("aten", "dynamotor") else name[-1])[:24]


def _figure(width: float, height: float) -> Any:
    """A figure and its axes; None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Any, salt: str) -> Any:
    """The figure as text that the template takes as it is."""
    import markupsafe
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return markupsafe.Markup(out.getvalue()[out.getvalue().index("<svg") :])


def _phase_chart(record: Record) -> Any:
    """When each phase ran."""
    drawn = _figure(9, 0.4 + 0.25 * len(_totals(record)))
    if drawn is None or not record.phases:
        return None
    figure, axes = drawn
    order = [name for name, _, _ in _totals(record)]
    start = min(at for _, at, _ in record.phases)
    for n, name in enumerate(reversed(order)):
        axes.broken_barh(
            [(at - start, took) for other, at, took in record.phases if other == name], (n - 0.35, 0.7)
        )
    axes.set_yticks(range(len(order)), reversed(order))
    axes.set_xlabel("seconds since the first phase began")
    return _svg(figure, "phases")


def _memory_chart(program: Any) -> Any:
    """Bytes that live at each step."""
    drawn = _figure(9, 1.8)
    if drawn is None or len(program.memory) < 2:
        return None
    figure, axes = drawn
    axes.fill_between(range(len(program.memory)), [n / 2**20 for n in program.memory], step="mid", alpha=0.5)
    axes.set_xlabel("step")
    axes.set_ylabel("MiB alive")
    return _svg(figure, program.name)
