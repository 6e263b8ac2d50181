"""backend="auto": for each graph the quickest of the backends of `ROWS`, measured once on the call's own
inputs.

Candidates run on copies of the inputs, in turns, forward and (where gradients flow) backward; one whose
results are not eager's but for rounding is out. The decision is kept on disk; `explain` shows the times.

>>> fast = dynamotor.compile(model, backend="auto", options={"auto_backends": "eager,native,inductor"})
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import fx

from .autograd.program_cache import program_key
from .backends import eager, native, resolve, static_inputs
from .base import cache
from .base.config import config
from .base.events import counters, emit, silence, timed
from .base.extensions import BACKENDS, names
from .codegen import stored
from .codegen.checked import checkable, difference
from .graph.control_flow import ControlFlow
from .graph.module import copy_of
from .graph.plain_data import NotPlain
from .graph.spec import Backend, Compiled, duplicate

LEAST, MOST = 5, 40  # rounds
NOISE = 1e-5  # of the largest value: tolerated in a gradient that is zero but for rounding


@dataclass(frozen=True)
class Row:
    """A candidate. `there`: whether it can run a graph of this device; `ours`: it may be taken where results
    are random and cannot be compared, and takes symbols for sizes.
    """

    backend: Backend
    there: Callable[[str], bool] = lambda device: True
    ours: bool = False


def _without_cuda_graphs(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Compiled:
    with config.patch(cuda_graphs=False):
        return native(gm, list(inputs))


def _through_xla(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Compiled:
    """XLA for tensors of other devices: they are copied there and back at each call."""
    run = resolve("xla")(gm, [t.detach().to("xla").requires_grad_(t.requires_grad) for t in inputs])
    home = inputs[0].device
    return lambda *given: tuple([out.to(home) for out in run(*[t.to("xla") for t in given])])


ROWS: dict[str, Row] = {
    "eager": Row(eager, ours=True),
    "native": Row(_without_cuda_graphs, ours=True),
    "native_cudagraphs": Row(native, lambda device: device == "cuda" and config.cuda_graphs, ours=True),
    # On a GPU jax takes most of its memory when it starts: only where the program uses it already.
    "xla": Row(
        _through_xla,
        lambda device: "xla" in names(BACKENDS) and (device == "cpu" or "jax" in sys.modules),
    ),
}


def _row(name: str) -> Row:
    return ROWS.get(name) or Row(resolve(name))


@dataclass
class Time:
    """A candidate's time (milliseconds), or why it is out."""

    name: str
    forward: float = math.inf
    backward: float = 0.0
    out: str = ""

    def __str__(self) -> str:
        took = f"{self.forward:.3f} ms forward, {self.backward:.3f} ms backward"
        return f"{self.name}: {self.out or took}"


def auto(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """The quickest backend for this graph. Where it must not run twice, or eager does not run it: native."""
    inputs, devices = list(example_inputs), {t.device.type for t in example_inputs if torch.is_tensor(t)}
    if "xla" in devices:
        return resolve("xla")(gm, inputs)
    bodies = any(isinstance(node.target, ControlFlow) for node in gm.graph.nodes)
    if not devices or bodies or "on_backward" in gm.meta or not checkable(gm):
        return native(gm, inputs)
    names = [
        name for name in config.auto_backends.split(",") if _row(name).there(min(devices, key="cpu".__eq__))
    ]
    if "shape_env" in gm.meta:
        names = [name for name in names if _row(name).ours]
    key = _key(gm, inputs, names)
    known = cache.load("auto", key) if key else None
    if known is not None:
        times = [Time(**row) for row in json.loads(known)]
    else:
        fallbacks = counters["fallback"].copy()
        with timed("auto"), silence(), torch.random.fork_rng(range(torch.cuda.device_count())):
            times = _measured(gm, inputs, names)
        counters["fallback"] = fallbacks  # those of the chosen one are counted when it is compiled
        if key:
            cache.store("auto", key, json.dumps([vars(one) for one in times]).encode())
    best = min(
        times,
        key=lambda one: one.forward + one.backward,
        default=Time("native", out="nothing to choose from"),
    )
    name = "native" if best.out else best.name
    emit("auto", chosen=name, times=times)
    return _row(name).backend(gm, inputs)


def _key(gm: fx.GraphModule, inputs: Sequence[Any], names: Sequence[str]) -> str:
    """Where the decision is kept; "" where the graph has no exact text."""
    try:
        graded = [t.requires_grad for t in inputs]
        program = program_key(gm, inputs, graded, static_inputs(gm), stored.environment())
    except (NotPlain, AttributeError):  # sizes are no tensors
        return ""
    return cache.digest("auto-1", program, *names, str(torch.get_num_threads()))


# -- measuring -----------------------------------------------------------------------------------------------
class Copies:
    """Copies of a graph's inputs, on which candidates run; written inputs are restored before the next."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.originals, self.written = inputs, set[int]()
        held: dict[int, torch.UntypedStorage] = {}
        with torch.inference_mode(False), torch.no_grad():
            self.place = [duplicate(t, held) if torch.is_tensor(t) else t for t in inputs]
        self.leaves = [t for t in self.place if torch.is_tensor(t) and t.requires_grad]

    def run(self, call: Compiled) -> tuple[list[Any], list[Any], float, float]:
        """Inputs as they are afterwards and results; gradients; seconds forward and backward."""
        with torch.no_grad():
            for i in self.written:
                self.place[i].copy_(self.originals[i])
        pairs = list(zip(self.originals, self.place))
        given = [own.clone() if torch.is_tensor(t) and not t.is_leaf else own for t, own in pairs]
        versions = [t._version for t in self.place if torch.is_tensor(t)]
        start = _now()
        results = list(call(*given))
        forward = _now() - start
        tensors = [i for i, t in enumerate(self.place) if torch.is_tensor(t)]
        self.written |= {i for i, version in zip(tensors, versions) if self.place[i]._version != version}
        differentiable = [t for t in results if torch.is_tensor(t) and t.requires_grad]
        tangents = [_tangent(t) for t in differentiable]
        start = _now()
        grads: Sequence[Any] = ()
        if differentiable and self.leaves:
            grads = torch.autograd.grad(differentiable, self.leaves, tangents, allow_unused=True)
        return [*given, *results], list(grads), forward, _now() - start

    def seen(self, call: Compiled) -> list[list[Any]]:
        """Copies of all values of a run, and what else a program may see of inputs and results."""
        values, grads, *_ = self.run(call)
        memory = [t.untyped_storage().data_ptr() if torch.is_tensor(t) else 0 for t in values]
        facts = [
            (t.stride(), t.requires_grad, memory.index(m)) if m else None for t, m in zip(values, memory)
        ]
        return [[t.detach().clone() if torch.is_tensor(t) else t for t in (*values, *grads)], facts]


def _tangent(t: torch.Tensor) -> torch.Tensor:
    """A gradient that no sum cancels."""
    return (torch.arange(t.numel(), device=t.device) % 7 - 2.5).to(t.dtype).reshape(t.shape)


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _measured(gm: fx.GraphModule, inputs: list[Any], names: Sequence[str]) -> list[Time]:
    """All candidates' times."""
    try:
        copies = Copies(inputs)
        copies.run(gm.forward)  # records its writes
        torch.manual_seed(0)
        wanted = copies.seen(gm.forward)
        torch.manual_seed(1)
        random = bool(_differs(copies.seen(gm.forward), wanted))
    except Exception as error:  # the call itself raises it again
        return [Time(name, out=f"eager raises {type(error).__name__}") for name in names]
    times, calls, samples = [Time(name) for name in names], {}, {}
    for one in times:
        row = _row(one.name)
        if random and not row.ours:
            one.out = "results are random and cannot be compared"
            continue
        try:
            call = row.backend(copy_of(gm), inputs)  # a backend may rewrite it
            found = [copies.seen(call) for _ in range(3)][-1]  # late builds have ended
            one.out = "" if random else _differs(found, wanted)
        except Exception as error:  # whatever a backend raises: it is out, and the table says why
            if config.strict and row.ours:
                raise
            one.out = f"{type(error).__name__}: {error}".splitlines()[0]
        if not one.out:
            calls[one.name], samples[one.name] = call, list[tuple[float, float]]()
    begin, rounds = time.perf_counter(), 0
    while rounds < LEAST or (rounds < MOST and time.perf_counter() - begin < config.auto_seconds):
        rounds += 1
        for name in list(calls)[:: 1 if rounds % 2 else -1]:
            samples[name].append(copies.run(calls[name])[2:])
    for one in times:
        if one.name in calls:
            one.forward, one.backward = (1e3 * median(column) for column in zip(*samples[one.name]))
    return times


def _differs(found: list[list[Any]], wanted: list[list[Any]]) -> str:
    """The difference from eager beyond rounding; "" for none."""
    if found[1] != wanted[1]:
        return "strides, memory or requires_grad of results are not eager's"
    numbers = [t.double() for t in wanted[0] if torch.is_tensor(t) and t.is_floating_point() and t.numel()]
    noise = NOISE * max((float(t.abs().max().nan_to_num(0.0, 0.0)) for t in numbers), default=0.0)
    for got, want in zip(*found[:1], *wanted[:1], strict=True):
        why = difference(got, want)
        if why and not (
            torch.is_tensor(want) and got.shape == want.shape and (got - want).abs().max() <= noise
        ):
            return why
    return ""
