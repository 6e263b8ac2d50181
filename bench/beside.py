"""One program run four ways: eager, eager in float64, dynamotor, and torch.compile's capture alone. Says how
far results are from float64 and how many graphs and breaks each capture took.

A program is a function of a `Way`: it builds everything anew, compiles through the way what its users would
compile, and returns by name all that counts: outputs, gradients, state after some steps.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

import dynamotor
from dynamotor.base.events import counters

from . import share
from .numerics import largest_error, output_tensors

Tensors = dict[str, torch.Tensor]
T = TypeVar("T")
FLOOR = 2e-5  # of float32, relative to the largest element: what another order of sums does to small programs
SPREAD = 4  # how many times eager's own error a compiled program may have


@dataclass(frozen=True)
class Way:
    """How a program runs: what compiles it and the dtype of its numbers."""

    compile: Callable[..., Any]
    dtype: torch.dtype = torch.float32
    backend: str | None = None  # for libraries that call torch.compile themselves; None: they shall not

    @share.aside()
    def cast(self, value: Any) -> Any:
        """A tensor or module with this way's dtype where it holds floating-point numbers."""
        if isinstance(value, torch.nn.Module):
            return value.to(self.dtype)
        return value.to(self.dtype) if value.is_floating_point() else value

    def randn(self, *shape: int) -> torch.Tensor:
        """The same normal numbers in each dtype."""
        return torch.randn(*shape).to(self.dtype)

    def inference(self, model: Any, *args: Any, **kwargs: Any) -> Tensors:
        """Outputs of two calls of the compiled model, or function, without gradients."""
        compiled = self.compile(self.cast(model).eval() if isinstance(model, torch.nn.Module) else model)
        with torch.no_grad():
            compiled(*args, **kwargs)
            return named(out=output_tensors(compiled(*args, **kwargs)))

    def training(
        self, model: torch.nn.Module, *args: Any, loss: Callable[..., Any] | None = None, steps: int = 3
    ) -> Tensors:
        """Losses and the first outputs and gradients of some steps of SGD, and the state that they leave."""
        model = self.cast(model)
        compiled = self.compile(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        found: Tensors = {}
        for step in range(steps):
            optimizer.zero_grad()
            out = compiled(*args)
            total = weighed(out) if loss is None else loss(out)
            total.backward()
            found |= named(**{f"loss{step}": [total]})
            if step == 0:
                found |= named(out=output_tensors(out)) | gradients_of(model)
            optimizer.step()
        return found | state_of(model)

    def gradients(self, function: Callable[..., Any], *inputs: torch.Tensor) -> Tensors:
        """Outputs of a compiled function and the gradients of floating-point inputs."""
        compiled = self.compile(function)
        with share.aside():
            leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
        compiled(*leaves)
        out = compiled(*leaves)
        wanted = [t for t in leaves if t.requires_grad]
        return named(
            out=output_tensors(out), grad=torch.autograd.grad(weighed(out), wanted, materialize_grads=True)
        )


@share.aside()
def named(**groups: Iterable[torch.Tensor]) -> Tensors:
    """Copies of tensors under the names of their group."""
    return {
        f"{key}.{n}": t.detach().clone() for key, tensors in groups.items() for n, t in enumerate(tensors)
    }


@share.aside()
def gradients_of(model: torch.nn.Module) -> Tensors:
    """The gradients of a module's parameters."""
    return {f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@share.aside()
def state_of(model: torch.nn.Module) -> Tensors:
    """Parameters and buffers."""
    return {f"state {n}": t.detach().clone() for n, t in model.state_dict().items() if torch.is_tensor(t)}


@share.aside()
def weighed(output: Any) -> torch.Tensor:
    """A scalar in which every element of every output has a weight of its own."""
    total: Any = 0.0
    for tensor in output_tensors(output):
        if tensor.requires_grad:
            weights = torch.linspace(-1, 1, max(tensor.numel(), 1), dtype=tensor.dtype).view(tensor.shape)
            total = total + (tensor * (weights + 0.1)).mean()
    return total


@dataclass
class Row:
    """What `measure` found; `error` is that of a program that did not run."""

    name: str
    graphs: int = 0
    breaks: int = 0
    torch_graphs: int | None = None
    torch_breaks: int | None = None
    error_ours: float | None = None
    error_eager: float | None = None
    worst: str = ""
    right: bool = False
    why: dict[str, int] | None = None
    fallbacks: dict[str, int] | None = None
    error: str = ""
    share: float | None = None  # of aten calls in compiled graphs; `share.py`
    torch_share: float | None = None
    eager: dict[str, int] | None = None  # the aten calls outside of graphs, the most frequent


def add_shares(row: Row, program: Callable[[Way], Tensors]) -> Row:
    """Fill in the shares of aten calls that run compiled, here and with torch.compile."""

    def seeded(compile_: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        program(Way(compile_, backend="eager"))

    found: dict[str, float | None] = {}
    for compiler, calls in share.shares(seeded):
        if isinstance(calls, Exception):
            row.error = row.error or f"share with {compiler}: {told(calls)}"
            continue
        found[compiler] = calls.share
        if compiler == "dynamotor":
            row.eager = dict(calls.eager.most_common(8))
    row.share, row.torch_share = found.get("dynamotor"), found.get("torch.compile")
    return row


def measure(name: str, program: Callable[[Way], Tensors], *, exact: bool = True) -> Row:
    """Run a program all four ways; without `exact` the reference is eager in float32 and equality is asked up
    to rounding.
    """
    row = Row(name)
    eager = run(program, Way(lambda fn, **options: fn))
    reference = run(program, Way(lambda fn, **options: fn, torch.float64)) if exact else eager
    try:
        dynamotor.reset()
        ours = run(program, Way(dynamotor.compile, backend="inductor"))
        row.graphs, row.breaks = counters["capture"]["graphs"], sum(counters["breaks"].values())
        row.why, row.fallbacks = dict(counters["breaks"]), dict(counters["fallback"])
        row.right = judge(row, ours, eager, reference)
    except Exception as e:
        row.error = told(e)
    finally:
        dynamotor.reset()
    row.torch_graphs, row.torch_breaks = torch_counts(program)
    return add_shares(row, program)


def run(program: Callable[[Way], Tensors], way: Way) -> Tensors:
    """A program from seed 0."""
    torch.manual_seed(0)
    with dynamotor.replace_torch_compile() if way.backend == "inductor" else contextlib.nullcontext():
        return program(way)


def told(error: BaseException) -> str:
    """An error in one line, with the last file of ours or of the program that it passed."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {text} ({place.filename.rpartition('/')[2]}:{place.lineno})"


def judge(row: Row, ours: Tensors, eager: Tensors, reference: Tensors) -> bool:
    """Note the tensor that is furthest beyond eager's own error; say whether all are near enough."""
    if ours.keys() != reference.keys():
        row.worst, row.error_ours = ", ".join(sorted(ours.keys() ^ reference.keys())[:3]), float("inf")
        return False
    kinds = {kind: sizes(reference, kind) for kind in ("grad", "state")}
    right, most = True, -1.0
    for key, wanted in reference.items():
        scale = kinds.get(kind_of(key), 0.0)
        mine, its = (error(found[key], wanted, scale) for found in (ours, eager))
        right &= mine <= max(FLOOR, SPREAD * its)
        if (beyond := mine / max(FLOOR, its)) > most:
            most, row.worst, row.error_ours, row.error_eager = beyond, key, mine, its
    return right


def kind_of(key: str) -> str:
    """The group of a name: `grad` of "grad weight" and of "grad.0"."""
    return key.replace(".", " ").split()[0]


def sizes(tensors: Tensors, kind: str) -> float:
    """The largest number among gradients, or among parameters and buffers."""
    found = [t.double().abs().max().item() for k, t in tensors.items() if kind_of(k) == kind and t.numel()]
    return max(found, default=0.0)


def error(found: torch.Tensor, wanted: torch.Tensor, scale: float) -> float:
    """The largest difference relative to the reference; gradients and state that are rounding noise beside
    the others count relative to those.
    """
    if found.shape == wanted.shape and wanted.numel() and scale:
        size = wanted.double().abs().max().item()
        if size < 1e-4 * scale:
            return (found.double() - wanted.double()).abs().max().item() / (1e-4 * scale)
    return largest_error([found], [wanted])


def torch_counts(program: Callable[[Way], Tensors]) -> tuple[int | None, int | None]:
    """Graphs and breaks of torch.compile's capture (backend "eager"); nothing where that fails."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        run(
            program, Way(lambda fn, **options: torch.compile(fn, backend="eager", **options), backend="eager")
        )
    except Exception:
        return None, None
    found = torch._dynamo.utils.counters
    return found["stats"]["unique_graphs"], sum(found["graph_break"].values())


def in_child(name: str, work: Callable[[], Row], timeout: float) -> Row:
    """Run `work` in a forked process, so that neither a crash nor a patch reaches the next."""
    found = apart(work, timeout, "in eager: ")
    return Row(name, error=found) if isinstance(found, str) else found


def apart(work: Callable[[], T], timeout: float, prefix: str = "") -> T | str:
    """The result of `work` in a forked process, or its error (after `prefix`) in one line."""
    context = multiprocessing.get_context("fork")
    ours, its = context.Pipe(duplex=False)

    def body() -> None:
        try:
            its.send(work())
        except Exception as e:
            its.send(prefix + told(e))

    child = context.Process(target=body)
    child.start()
    its.close()
    try:
        if not ours.poll(timeout):
            return f"no result within {timeout:.0f} s"
        return ours.recv()
    except EOFError:
        child.join()
        return f"the process ended with status {child.exitcode}"
    finally:
        child.kill()
        child.join()


LOW = 0.98  # of the aten calls in graphs; with less, a row names what runs outside


def _outside(row: dict[str, Any]) -> str:
    """The aten calls outside of graphs where they are many."""
    if row.get("share") is None or row["share"] >= LOW:
        return ""
    most = [f"{name.removeprefix('aten::')} {n}" for name, n in list(row["eager"].items())[:5]]
    return f"outside of graphs: {', '.join(most)}"


def table(rows: Iterable[dict[str, Any]], reasons: dict[str, str]) -> str:
    """A Markdown table of rows of the JSON file."""
    lines = [
        "| program | right | error (eager's) | graphs, breaks | `torch.compile`: graphs, breaks | compiled share (`torch.compile`'s) | reason |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        theirs = "fails" if row["torch_graphs"] is None else f"{row['torch_graphs']}, {row['torch_breaks']}"
        reason = reasons.get(row["name"], "") or (row["error"] and f"`{row['error'][:110]}`")
        reason = "; ".join(filter(None, (reason, _outside(row))))
        errors = (
            "-" if row["error_ours"] is None else f"{row['error_ours']:.0e} ({row['error_eager'] or 0:.0e})"
        )
        right = "yes" if row["right"] else "**no**"
        shares = f"{_percent(row.get('share'))} ({_percent(row.get('torch_share'))})"
        lines.append(
            f"| {row['name']} | {right} | {errors} | {row['graphs']}, {row['breaks']} | {theirs} | {shares} | {reason} |"
        )
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def printed(row: Row) -> str:
    """A row for the terminal."""
    errors = f"{row.error_ours} ({row.error_eager}) {row.worst}"
    counts = f"{row.graphs}, {row.breaks} ({row.torch_graphs}, {row.torch_breaks})"
    counts += f" | {_percent(row.share)} ({_percent(row.torch_share)})"
    why = f"{row.why or ''} {row.eager or ''} {row.error}"
    return " | ".join([row.name, "right" if row.right else "WRONG", errors, counts, why])
