"""Whole training steps as one program: forward, loss, backward, gradient clipping and the optimizer's update.

>>> step = dynamotor.compile_step(model, torch.nn.functional.cross_entropy, optimizer)
>>> for data, target in loader:
...     loss = step(data, target)

## Contract 9: whole steps (`step/`)

`compile_step` captures forward and loss with capture's guards; the dispatcher's backend gives a `GraphStep`,
which has the graph's inputs and results and does the whole step.
* `step_trace.py`: one `StepRecorder` sees the forward, PyTorch's engine running the backward, what clips, and
  the optimizer's own `step()` over `Shadows`: ShapeTensors in the place of parameters, gradients and state,
  `torch.SymFloat`s in the place of floating numbers. A state that is put in the place of another is a new
  content of that one; state that appears or goes makes the step run in eager (`StateGrows`); anything else
  that changes refuses it (`NotWhole`, a code).
* Numbers (`numbers.py`) are 0-d float64 nodes. A branch on one is answered as it is now and becomes a
  question that each call asks again (another answer: another program). Values computed from numbers and 0-d
  CPU
  state alone runs as Python on the host (`host.py`) and crosses into the program as one vector.
* `step_program.py` cuts out the graph (contract 3: trailing `copy_` into parameters, state and buffers) and
  compiles it as a "forward" without saved values.
* Around a DDP module the captured forward runs between DDP's `_pre_forward` and `_post_forward`; contract 6
  averages the gradients in the trace. Open questions between ranks are settled by the first step's compiled
  backward
  does.
* `reads.py` reads the functions of `clip` and `step()` before they run over the stand-ins: each look-up is
  guarded, or the step runs in pieces (DM510); `pure_functions.py` lists what needs no more guards,
  `instructions.py` walks the bytecode. A frame hook refuses functions that were not read.
* `facts.py` guards what all programs rely on (groups, their parameters and options, state, the scaler), in C.
  Its structure is the key under which programs are kept; new objects of the same structure are bound anew.
* `graph_step.py` looks at each call at gradients that are there and at hooks, and picks the program.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from ..api import SPECIAL, compile as compile_
from ..autograd.aot import aot_compile
from ..autograd.plain_inputs import with_plain_inputs
from ..backends import compile_native, resolve
from ..base import extensions
from ..base.compat import tree_map_only
from ..base.config import CompileOptions, Mode, Options, config
from ..base.errors import CaptureError, UsageError
from ..base.registry import Registry
from ..capture.frontend import make_dispatcher
from ..capture.marks import is_compiling
from ..codegen.captured import rewrite_captured
from ..distributed.averager import Averager, averager_of
from ..distributed.data_parallel import data_parallel
from ..distributed.prefetch import has_shards
from ..distributed.wrapper import has_module_hooks, why_not_whole
from ..graph.spec import Backend, GraphInfo
from .graph_step import CompileGraph, GraphStep, Update, fall_in_pieces, refuse_pieces
from .optimizer_step import OptimizerStep, optimizer_of

__all__ = ["compile_step"]

Clip = float | Callable[[list[torch.Tensor]], Any]

# Marks the loss in the captured graph.
torch.library.define("dynamotor::loss_of_step", "(Tensor loss) -> Tensor")
torch.library.impl("dynamotor::loss_of_step", "CompositeImplicitAutograd", lambda loss: loss.view_as(loss))
_loss_of_step = torch.ops.dynamotor.loss_of_step


class CompiledStep(Protocol):
    """The result of `compile_step`."""

    def __call__(self, *batch: Any) -> torch.Tensor: ...
    def explain(self) -> str: ...


def compile_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    clip: Clip | None = None,
    scaler: torch.amp.GradScaler | None = None,
    accumulate: int = 1,
    keep_grads: bool = False,
    n_inputs: int = 1,
    fullgraph: bool = False,
    backend: str = "native",
    mode: Mode | None = None,
    options: Options | None = None,
) -> CompiledStep:
    """A function `step(*batch) -> loss` that trains `model` for one step, as this loop would, in one program:

        loss = loss_fn(model(*batch[:n_inputs]), *batch[n_inputs:]); (loss / accumulate).backward()
        clip_grad_norm_(parameters, clip); optimizer.step(); optimizer.zero_grad()

    clip: the largest norm of all gradients together, or a function of the optimizer's parameters that changes
    their `.grad`. scaler: scales the loss, skips steps whose gradients overflow, and is updated. accumulate:
    the parameters are updated at each so many calls. keep_grads: `.grad` stays until the next step begins.
    fullgraph: raise CaptureError (DM520) instead of running a part of a step in eager PyTorch;
    `config.strict` does the same. mode, options: as `dynamotor.compile` has them. The returned loss is
    detached and not divided.

    Any `torch.optim.Optimizer` works: its own `step()` is traced; learning rates and other floating
    hyperparameters are inputs, so that schedulers compile nothing. State, `state_dict` and `load_state_dict`
    are the optimizer's; a state tensor that `step()` replaces is written in place. The first step, in which
    optimizers make their state, runs in eager PyTorch.

    The Python of the update (`clip`, `step()`, methods of the scaler) runs once for all steps. Constants that
    functions of yours look up in globals, closures, attributes and defaults are guarded; another value
    compiles anew, once. What looks up anything else, draws from `random`, appends to a list, sets an
    attribute, or is a hook or a method in place of PyTorch's runs at every step, behind a compiled forward
    and backward. So does whatever else cannot be one program; a warning, the log ("fallbacks"),
    `counters["fallback"]` and `step.explain()` say why (DM501 to DM511).

    A DistributedDataParallel model trains as in its eager loop: buckets are reduced as the backward makes
    them, each is updated when it is reduced (with clip or scaler: when all are), and of `accumulate`
    backwards only the last is synchronised (`no_sync`). Models on the XLA device take the same call.
    UsageError DM112 for wrong arguments.
    """
    _check(model, optimizer, accumulate)
    other = next((p.device.type for p in model.parameters() if p.device.type in _of_devices), None)
    if other is not None:
        return _of_devices[other](
            model,
            loss_fn,
            optimizer,
            n_inputs=n_inputs,
            clip=clip,
            scaler=scaler,
            accumulate=accumulate,
            keep_grads=keep_grads,
        )
    clipped = (
        clip
        if clip is None or callable(clip)
        else lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, clip)
    )
    update = Update(optimizer, clipped, scaler, accumulate, keep_grads)
    settings = CompileOptions(True, False, mode, types.MappingProxyType(dict(options or {})))
    return _Step(model, loss_fn, update, n_inputs, backend, settings, replace(settings, fullgraph=fullgraph))


# Devices with a `compile_step` of their own.
_of_devices: Registry[str, Callable[..., Any]] = Registry("step of a device")


def register_step(device: str, function: Callable[..., Callable[..., torch.Tensor]]) -> None:
    """Let `compile_step` of models on a type of device be this function of the same arguments, but for
    `backend`, `mode` and `options`. KeyError where the device has one.
    """
    _of_devices.add(device, function)


_LOOP_COMPILER = "native", "auto"
_OWN = *_LOOP_COMPILER, "eager", "aot_eager"  # backends whose graphs of a step are compiled here


def graph_compiler(backend: str | Backend, settings: dict[str, Any]) -> CompileGraph:
    """What compiles the graph of a step under these settings."""

    def compile_graph(graph: torch.fx.GraphModule, info: GraphInfo) -> Callable[..., tuple[Any, ...]]:
        with config.patch(**settings):
            if backend in _OWN:
                return compile_native(graph, info) if backend in _LOOP_COMPILER else graph.forward
        return _by_backend(resolve(backend), graph, settings)

    return compile_graph


def _by_backend(
    backend: Backend, graph: torch.fx.GraphModule, settings: dict[str, Any]
) -> Callable[..., tuple[Any, ...]]:
    """The graph compiled by a backend, which takes tensors: those of the first call."""
    compiled: list[Callable[..., Any]] = []

    def run(*tensors: torch.Tensor) -> tuple[Any, ...]:
        if not compiled:
            with config.patch(**settings):
                compiled.append(backend(graph, list(tensors)))
        return tuple(compiled[0](*tensors))

    return run


def _alone(method: Any, backend: Any, options: CompileOptions) -> OptimizerStep | None:
    """What `dynamotor.compile(optimizer.step)` gives; None for other callables, and for backends of
    extensions, whose devices have steps of their own."""
    optimizer = optimizer_of(method)
    if optimizer is None or backend in extensions.names(extensions.BACKENDS):
        return None
    with config.patch(**options.settings):  # gradients have other addresses at each step: nothing to replay
        settings = asdict(config.snapshot()) | {"cuda_graphs": False}
    compile_graph = graph_compiler(backend, settings)
    others = backend not in _OWN  # they see the whole update
    return OptimizerStep(method, optimizer, compile_graph, settings, options, numbers_inside=others)


SPECIAL.append(_alone)


def _check(model: Any, optimizer: Any, accumulate: Any) -> None:
    UsageError.when(
        not isinstance(model, torch.nn.Module),
        "DM112",
        f"compile_step() takes a module, not {type(model).__name__}",
    )
    UsageError.when(
        not isinstance(optimizer, torch.optim.Optimizer),
        "DM112",
        f"compile_step() takes a torch.optim.Optimizer, not {type(optimizer).__name__}",
    )
    UsageError.when(
        isinstance(optimizer, torch.optim.LBFGS),
        "DM112",
        "LBFGS evaluates the model several times a step, through a closure",
        cure="compile the model with dynamotor.compile and call optimizer.step(closure)",
    )
    if type(accumulate) is not int or accumulate < 1:
        raise UsageError("DM112", f"accumulate is a number of steps, not {accumulate!r}")


class _Step:
    """The callable that `compile_step` gives. `reasons`: why steps ran in pieces, (code, text) each."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        update: Update,
        n_inputs: int,
        backend: str,
        settings: CompileOptions,
        asked: CompileOptions,
    ) -> None:
        self.asked = asked
        self.update, self.settings, self.backend, self.name = update, settings, backend, type(model).__name__
        self.reasons: list[tuple[str, str]] = []
        self.graphs: list[GraphStep] = []

        ddp = model if isinstance(model, DistributedDataParallel) else None
        inside = model if ddp is None else ddp.module

        def forward(*batch: torch.Tensor) -> torch.Tensor:
            called = inside if is_compiling() else model
            return _loss_of_step(loss_fn(called(*batch[:n_inputs]), *batch[n_inputs:]))

        self.model, self.loss_fn, self.n_inputs = model, loss_fn, n_inputs
        self.averager: Averager | None = None
        self.captured: Any = make_dispatcher(forward, settings, self._graph, floats=True)
        self.compiled: Any = None
        reason = why_not_whole(model)
        if reason is not None:
            self._in_pieces("DM504", reason.text)
        elif ddp is not None:
            self.averager = averager_of(ddp)
        self.ddp = ddp

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        self.update.begin()
        if self.ddp is None:
            return self._step(batch)
        if self.ddp.device_ids:
            device, n = torch.device(self.ddp.device_type, self.ddp.device_ids[0]), self.n_inputs
            batch = (*tree_map_only(torch.Tensor, lambda t: t.to(device), batch[:n]), *batch[n:])
        if self.captured is not None and has_module_hooks(self.ddp):
            self._in_pieces("DM504", "the DistributedDataParallel module has hooks")
        with contextlib.nullcontext() if self.update.is_last else self.ddp.no_sync():
            return self._step(batch)

    def _step(self, batch: Sequence[Any]) -> torch.Tensor:
        if self.captured is not None:
            try:
                loss = self.captured(*batch)
            except CaptureError as error:
                if error.code == "DM520":
                    raise
                self._in_pieces("DM508", f"the forward pass is not captured as one graph: {error.what}")
            else:
                if (
                    loss.requires_grad
                ):  # the step is not one program, or its forward is none of the kept variants
                    self.update.in_pieces(loss)
                    self.update.end()
                return loss.detach()
        loss = self.loss_fn(self.compiled(*batch[: self.n_inputs]), *batch[self.n_inputs :])
        self.update.in_pieces(loss)
        self.update.end()
        return loss.detach()

    def explain(self) -> str:
        """How the steps so far ran: programs, and why not as one."""
        whole = sum(len(found) for graph in self.graphs for found in graph.programs.values())
        lines = [f"{len(self.graphs)} captured forward pass(es), {whole} whole step(s) as one program"]
        if whole and self.averager is not None and self.averager.plan is not None:
            at_once = self.update.clip is None and self.update.scaler is None
            when = (
                "each is updated when it is" if at_once else "all are before the update, which needs them all"
            )
            lines.append(f"reduced by the program: {self.averager.plan.summary}; {when} reduced")
        return "\n".join([*lines, *(f"in pieces [{code}]: {reason}" for code, reason in self.reasons)])

    def _in_pieces(self, code: str, reason: str) -> None:
        """From now on all steps are a compiled model and the rest in eager."""
        self._note(code, reason)
        self.captured = None
        same: dict[str, Any] = {"mode": self.settings.mode, "options": self.settings.options}
        self.compiled = compile_(self.model, backend=self.backend, **same)

    def _note(self, code: str, reason: str) -> None:
        what = f"compile_step({self.name}): forward and backward are compiled, the optimizer"
        refuse_pieces(code, reason, what, self.asked)
        if (code, reason) not in self.reasons:
            self.reasons.append((code, reason))
        fall_in_pieces(code, reason, self.name, what)

    def _graph(self, gm: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
        loss_at = next(
            i for i, node in enumerate(output.args[0]) if getattr(node, "target", None) is _loss_of_step
        )
        settings = self._settings()

        compile_graph = graph_compiler(self.backend, settings)

        def differentiated(gm: torch.fx.GraphModule, tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
            with config.patch(**settings):
                return aot_compile(
                    gm, tensors, compile_graph, static_inputs=gm.meta.get("static_inputs", frozenset())
                )

        pieces: Backend = differentiated
        sharded = has_shards(gm.graph)
        if self.averager is not None or sharded:
            pieces = data_parallel(differentiated, self.settings.options)

        whole: CompileGraph | str = compile_graph
        if self.backend not in ("native", "aot_eager"):
            whole = f"the backend {self.backend!r} takes no whole steps"
        if sharded:
            whole = "the parameters are sharded (fully_shard): they are updated behind the backward"
        plain, flat = with_plain_inputs(gm, examples)
        if self.backend in _LOOP_COMPILER:
            with config.patch(**settings):
                rewrite_captured(plain, examples if flat is None else flat(examples))
        step = GraphStep(plain, loss_at, self.update, whole, pieces, self._note, settings, self.averager)
        self.graphs.append(step)
        return step if flat is None else lambda *tensors: step(*flat(tensors))

    def _settings(self) -> dict[str, Any]:
        """The configuration under which this step's graphs are compiled."""
        with config.patch(**self.settings.settings):
            return asdict(config.snapshot())
