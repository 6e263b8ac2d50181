"""Whole training steps, and optimizer steps, as one executable each, with parameters and state donated.

>>> step = compile_step(model, torch.nn.functional.cross_entropy, optimizer)
>>> for data, target in loader:
...     loss = step(data, target)

The forward pass is captured as `dynamotor.compile` captures it, with its guards: facts that the model and
the loss read (attributes, hooks, modes, autocast) are checked before each step. The first call of a
captured step runs on the lazy device (optimizers make their state there), the second is recorded, later ones
only run. Hyperparameters are inputs of the executable: a changed learning rate is recorded anew and compiles
nothing.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dynamotor.extension_api import (
    CaptureError,
    CompileOptions,
    make_dispatcher,
    new_number,
    register_step,
    warn_once,
)

from . import (
    device as devices,
    metrics,
    start,  # noqa: F401  (registers the device)
    sync,
)
from .bridge import Inputs, Program
from .compat import tree_leaves
from .errors import require
from .ir import Cut, Lane, Meta, Node, XlaError, lock
from .recent import Recent
from .tensor import Alias, XLATensor, is_xla, value

_KEPT = 64  # programs, and settings (learning rates) of programs, that one step keeps

# Marks the loss in the captured graph.
torch.library.define("dynamotor_xla::loss_of_step", "(Tensor loss) -> Tensor")
torch.library.impl("dynamotor_xla::loss_of_step", "CompositeImplicitAutograd", lambda loss: loss * 1)


def compile_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    n_inputs: int = 1,
    clip: float | Callable[[list[torch.Tensor]], Any] | None = None,
    scaler: Any = None,
    accumulate: int = 1,
    keep_grads: bool = False,
) -> Callable[..., torch.Tensor]:
    """A function `step(*batch) -> loss` that trains `model` for one step.

    The first `n_inputs` tensors of the batch go to the model, the rest, after the model's output, to
    `loss_fn`. Gradients are cleared at the end of a step. Optimizers that keep numbers on the CPU (Adam
    without `capturable=True`) are recorded at each step: right, slower; so is a forward pass that cannot be
    captured as a whole (a warning says why). One that reads data (`if labels.max() >= n`) trains on the lazy
    device, with a warning; the Python of its forward pass runs twice in the second step. clip, scaler,
    accumulate, keep_grads: as `dynamotor.compile_step` has them; a clip that is a function, and the other
    three, keep the step on the lazy device, which records it at each call: what their Python reads may
    change. XlaError DM617 when the model has parameters that are not on the device, DM618 when the update
    cannot be recorded.
    """
    _check_device(model.named_parameters())

    def forward(*batch: torch.Tensor) -> torch.Tensor:
        return torch.ops.dynamotor_xla.loss_of_step(loss_fn(model(*batch[:n_inputs]), *batch[n_inputs:]))

    if callable(clip) or scaler is not None or accumulate != 1 or keep_grads:
        return _LazyStep(forward, optimizer, clip, scaler, accumulate, keep_grads)
    learn = functools.partial(_learn, optimizer=optimizer, clip=clip)
    options = CompileOptions(True, None, None, types.MappingProxyType({}))
    captured: Any = make_dispatcher(forward, options, lambda gm, _: _whole_step(gm, optimizer, learn))
    as_python = _python_step(
        forward, [m for m in (model, loss_fn) if isinstance(m, torch.nn.Module)], optimizer, learn
    )

    def step(*batch: torch.Tensor) -> torch.Tensor:
        nonlocal captured
        _check_device((f"batch[{i}]", t) for i, t in enumerate(batch))
        if captured is None:
            return as_python(*batch)
        try:
            loss = captured(*batch)
        except CaptureError as error:
            warn_once(
                f"xla.step.{new_number()}",
                f"compile_step records each step anew, since it could not be captured: {error}",
            )
            captured = None
            return as_python(*batch)
        if loss.requires_grad:  # more variants than are kept: this one was not captured
            learn(loss)
            sync.sync()
        return loss.detach()

    return step


register_step("xla", compile_step)


def _python_step(
    forward: Callable[..., torch.Tensor],
    modules: Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer,
    learn: Callable[[torch.Tensor], None],
) -> Callable[..., torch.Tensor]:
    """A step that is recorded at each call, since no guards cover the reads of its Python; its executables
    are
    kept.
    """

    def state() -> list[torch.Tensor]:
        tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())] + _parameters_of(optimizer)
        grads = [t.grad for t in tensors if t.is_leaf and t.grad is not None]
        return [*tensors, *grads, *_state_of(optimizer)]

    def body(*batch: torch.Tensor) -> list[torch.Tensor]:
        loss = forward(*batch)
        learn(loss)
        return [loss.detach()]

    replayed = _Replayed(state)
    return lambda *batch: replayed(tuple([(t.shape, t.dtype) for t in batch]), None, body, batch, state())[0]


class _LazyStep:
    """A step on the lazy device: what clip, scaler and accumulation read and write is Python's, at each
    call."""

    def __init__(
        self,
        forward: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        clip: Any,
        scaler: Any,
        accumulate: int,
        keep_grads: bool,
    ) -> None:
        self.forward, self.optimizer, self.clip = forward, optimizer, clip
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.accumulate, self.keep_grads, self.calls = accumulate, keep_grads, 0

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        _check_device((f"batch[{i}]", t) for i, t in enumerate(batch))
        if self.keep_grads and self.calls % self.accumulate == 0:
            self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward(*batch)
        part = loss / self.accumulate if self.accumulate > 1 else loss
        (part if self.scaler is None else self.scaler.scale(part)).backward()
        self.calls += 1
        if self.calls % self.accumulate == 0:
            self._update()
        sync.sync()
        return loss.detach()

    def _update(self) -> None:
        if self.scaler is not None and self.clip is not None:
            self.scaler.unscale_(self.optimizer)
        _clip(self.clip, self.optimizer)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if not self.keep_grads:
            self.optimizer.zero_grad(set_to_none=True)


def _clip(clip: Any, optimizer: torch.optim.Optimizer) -> None:
    if callable(clip):
        clip(_parameters_of(optimizer))
    elif clip is not None:
        torch.nn.utils.clip_grad_norm_(_parameters_of(optimizer), clip)


def _learn(loss: torch.Tensor, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
    with _as_a_whole():
        loss.backward()
        _clip(clip, optimizer)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _whole_step(
    gm: torch.fx.GraphModule, optimizer: torch.optim.Optimizer, learn: Callable[[torch.Tensor], None]
) -> Callable[..., Any]:
    """The step around one captured forward pass: has the graph's arguments and results, without
    gradients.
    """
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    loss_at = next(
        i for i, node in enumerate(output.args[0]) if getattr(node, "target", None) is _loss_of_step
    )

    replayed = _Replayed(lambda: [*_parameters_of(optimizer), *_state_of(optimizer)])

    def run(*tensors: torch.Tensor) -> Sequence[Any]:
        parameters = _parameters_of(optimizer)
        trained = {id(t): t for t in (*tensors, *parameters) if t.is_leaf}
        grads = [t.grad for t in trained.values()]  # which the step adds to
        missing = tuple([g is None for g in grads])

        def body(*arguments: torch.Tensor) -> list[Any]:
            results = gm.forward(*arguments[: len(tensors)])
            learn(results[loss_at])
            return [r.detach() if isinstance(r, torch.Tensor) else r for r in results]

        return replayed(
            missing,
            _hyperparameters(optimizer),
            body,
            [*tensors, *[g for g in grads if g is not None]],
            [*parameters, *_state_of(optimizer)],
        )

    return run


_loss_of_step = torch.ops.dynamotor_xla.loss_of_step


@contextlib.contextmanager
def _as_a_whole() -> Iterator[None]:
    """Around what changes gradients and state, and so cannot begin again on the lazy device."""
    try:
        yield
    except Cut as cut:
        raise _not_whole(str(cut)) from cut


def _not_whole(why: str) -> XlaError:
    return XlaError(
        "DM618",
        "the training step cannot be recorded as one graph",
        why=why,
        where=metrics.user_line(),
        cure="train with the lazy device, or move the offending code out of the step",
    )


def compile_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A function `step()` that does `optimizer.step()` as one executable: for `dynamotor.compile(model,
    backend="xla")`.
    """
    _check_device((f"parameter {i}", p) for i, p in enumerate(_parameters_of(optimizer)))
    replayed = _Replayed(lambda: [*_parameters_of(optimizer), *_state_of(optimizer)])

    def body(*grads: torch.Tensor) -> list[Any]:
        with _as_a_whole():
            optimizer.step()
        return []

    def step() -> None:
        parameters = _parameters_of(optimizer)
        grads = [p.grad for p in parameters]
        missing = tuple([g is None for g in grads])
        state = [*parameters, *_state_of(optimizer)]
        replayed(missing, _hyperparameters(optimizer), body, [g for g in grads if g is not None], state)

    return step


class _Replayed:
    """Runs a body on tensors and state: first lazily, then recorded, then as an executable.

    `state()` lists the tensors that the body reads and writes beside its arguments. It is known by object:
    when something
    puts another tensor in its place (`optimizer.load_state_dict`, a new parameter), all begins anew. While
    there are numbers on the CPU among it, each call is recorded, since an executable cannot see them. A body
    that reads data before it writes any stays on the lazy device.
    """

    def __init__(self, state: Callable[[], list[torch.Tensor]]) -> None:
        self._state = state
        self._programs = Recent(_KEPT)  # by the record
        self._known: list[torch.Tensor] = []
        self._warm: set[Any] = set()  # structures that have run with the known state: they have made theirs
        self._lazy: set[Any] = set()  # structures that cannot be recorded
        self._calls = Recent(_KEPT)  # (Program, Inputs, tensors beside the arguments)

    def __call__(
        self,
        structure: Any,
        settings: Any,
        body: Callable,
        arguments: Sequence[Any],
        state: list[torch.Tensor],
    ) -> Any:
        """Run for each fact that a recording depends on beside tensors: a `structure` (shapes, modes), and
        the numbers in `settings`.

        `settings` None: each call is recorded. `state` is what `state()` would list now.
        """
        if not _same(state, self._known):
            self._known = state
            self._warm.clear()
            self._calls.clear()
        cold = structure not in self._warm or structure in self._lazy
        if cold or not all(map(is_xla, arguments)):  # a constant on the CPU may change
            return self._run_lazily(structure, body, arguments)
        found = (
            self._calls.get((structure, settings))
            if settings is not None and all(map(is_xla, state))
            else None
        )
        if found is None:
            taken = {id(t) for t in arguments}
            read = list({id(t): t for t in state if is_xla(t) and id(t) not in taken}.values())
            try:
                found = self._calls[structure, settings] = *self._record(body, arguments, read), read
            except Cut as cut:
                self._lazy.add(structure)
                why = f"since its forward pass cannot be recorded: {cut}"
                warn_once(f"xla.step.{new_number()}", f"compile_step trains on the lazy device, {why}")
                return self._run_lazily(structure, body, arguments)
        program, inputs, read = found
        program.take(inputs)
        return program(*arguments, *read)

    def _run_lazily(self, structure: Any, body: Callable, arguments: Sequence[Any]) -> Any:
        results = body(*arguments)
        for lane in devices.lanes():
            sync.flush(lane, "compile_step")
        self._known = self._state()
        self._warm.add(structure)
        return results

    def _record(
        self, body: Callable, arguments: Sequence[Any], state: Sequence[XLATensor]
    ) -> tuple[Program, Inputs]:
        """Record the body on leaves in the place of all tensors; earlier records keep their
        executable.
        """
        tensors = [*arguments, *state]
        lane = Lane(devices.lane_of(tensors[0].device).device, recording=True)
        with lock, _stand_ins(lane, tensors) as first:
            with devices.using_lane(lane):
                results = body(*arguments)
            if not _same(self._state(), self._known):
                raise _not_whole(
                    "it puts new tensors in the place of its state (an optimizer that replaces its state)"
                )
            updates = [(i, t._alias.node) for i, t in enumerate(tensors) if t._alias.version]
            at = tuple([value(r._alias).position if type(r) is XLATensor else repr(r) for r in results])
            inputs = Inputs(lane, first)
            recorded = (tuple(lane.key), inputs.order, tuple([(i, node.position) for i, node in updates]), at)
            program = self._programs.get(recorded)
            if program is None:
                program = self._programs[recorded] = Program(lane, first, results, updates, donate=True)
            lane.clear()  # nodes name their lane: a cycle, and each step may record one
        return program, inputs


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


@contextlib.contextmanager
def _stand_ins(lane: Lane, tensors: Sequence[XLATensor]) -> Iterator[list[Node]]:
    """While on, the tensors stand for leaves of a lane, which are yielded."""
    kept = [t._alias for t in tensors]
    if len({id(alias.root or alias) for alias in kept}) < len(kept):
        raise _not_whole("two of its tensors share memory (use one tensor object for tied weights)")
    first = [lane.leaf(None, Meta.of(t.shape, t.dtype)) for t in tensors]
    for tensor, alias, node in zip(tensors, kept, first):
        tensor._alias = Alias(node, stride=alias.stride, offset=alias.offset)
    try:
        yield first
    finally:
        for tensor, alias in zip(tensors, kept):
            tensor._alias = alias


def _check_device(tensors: Any) -> None:
    outside = next((name for name, t in tensors if type(t) is not XLATensor), None)
    require(
        outside is None,
        "DM617",
        f"{outside} is not on the XLA device",
        cure='move the model first (model.to("xla")), then make the optimizer; move the batch too',
    )


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    nested = [
        t
        for v in values
        if isinstance(v, (list, tuple, dict))
        for t in tree_leaves(v)
        if isinstance(t, torch.Tensor)
    ]
    return [*[v for v in values if isinstance(v, torch.Tensor)], *nested]


def _hyperparameters(optimizer: torch.optim.Optimizer) -> tuple:
    return tuple(
        [
            tuple([(name, _frozen(v)) for name, v in group.items() if name != "params"])
            for group in optimizer.param_groups
        ]
    )


def _frozen(setting: Any) -> Any:
    """A hyperparameter as part of a key; tensors (a learning rate on the device) are read by the graph."""
    if isinstance(setting, torch.Tensor):
        return "tensor", id(setting)
    return tuple(setting) if isinstance(setting, list) else setting
