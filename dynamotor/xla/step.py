"""Whole training steps, and optimizer steps, as one executable each, with parameters and state donated.

>>> step = compile_step(model, torch.nn.functional.cross_entropy, optimizer)
>>> for data, target in loader:
...     loss = step(data, target)

The first call runs on the lazy device (optimizers make their state there), the second is recorded, later ones only run.
Hyperparameters are inputs of the executable: a changed learning rate is recorded anew and compiles nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from . import device as devices
from . import (
    metrics,
    start,  # noqa: F401  (registers the device)
    sync,
)
from .bridge import Program
from .ir import Cut, Lane, Meta, Node, XlaError
from .tensor import Alias, XLATensor, value


def compile_step(
    model: torch.nn.Module, loss_fn: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, *, n_inputs: int = 1
) -> Callable[..., torch.Tensor]:
    """A function `step(*batch) -> loss` that trains `model` for one step.

    The first `n_inputs` tensors of the batch go to the model, the rest, after the model's output, to `loss_fn`. Gradients are
    cleared at the end of a step. Optimizers that keep numbers on the CPU (Adam without `capturable=True`) are recorded at each
    step: right, slower. XlaError DM617 when the model has parameters that are not on the device, DM618 when the step cannot be
    recorded as a whole.
    """
    _check_device(model.named_parameters())
    replayed = _Replayed(lambda: [*_tensors_of(model), *_tensors_of(loss_fn), *_state_of(optimizer)])

    def body(*batch: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(model(*batch[:n_inputs]), *batch[n_inputs:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def step(*batch: torch.Tensor) -> torch.Tensor:
        _check_device((f"batch[{i}]", t) for i, t in enumerate(batch))
        key = (
            tuple([(t.shape, t.dtype) for t in batch]),
            tuple([m.training for m in model.modules()]),
            _hyperparameters(optimizer),
        )
        return replayed(key, body, batch, keep=not _counts_on_cpu(optimizer))

    return step


def compile_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A function `step()` that does `optimizer.step()` as one executable: for `dynamotor.compile(model, backend="xla")`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    _check_device((f"parameter {i}", p) for i, p in enumerate(parameters))
    replayed = _Replayed(lambda: [*parameters, *_state_of(optimizer)])

    def body(*grads: torch.Tensor) -> None:
        optimizer.step()

    def step() -> None:
        grads = [p.grad for p in parameters if p.grad is not None]
        key = tuple([p.grad is None for p in parameters]), _hyperparameters(optimizer)
        replayed(key, body, grads, keep=not _counts_on_cpu(optimizer))

    return step


class _Replayed:
    """Runs a body on tensors and state: first lazily, then recorded, then as an executable. `state()` lists what it reads and
    writes beside its arguments."""

    def __init__(self, state: Callable[[], list[torch.Tensor]]) -> None:
        self._state = state
        self._programs: dict[tuple, Program] = {}  # by what was recorded
        self._calls: dict[Any, tuple[Program, list[Any], list[XLATensor]]] = {}
        self._warm = False

    def __call__(self, key: Any, body: Callable, arguments: Sequence[Any], keep: bool) -> Any:
        """Run for `key`, which holds all that a recording depends on beside tensors; `keep=False` records at each call."""
        if not self._warm:
            self._warm = True
            result = body(*arguments)
            for lane in devices.lanes():
                sync.flush(lane, "compile_step")
            return result
        found = self._calls.get(key) if keep else None
        if found is None:
            found = self._calls[key] = self._record(body, arguments)
        program, scalars, state = found
        program.constants = scalars
        return program(*arguments, *state)[0]

    def _record(self, body: Callable, arguments: Sequence[Any]) -> tuple[Program, list[Any], list[XLATensor]]:
        """Record the body on leaves in the place of all tensors; what was recorded before keeps its executable."""
        taken = {id(t) for t in arguments}
        state = list({id(t): t for t in self._state() if type(t) is XLATensor and id(t) not in taken}.values())
        tensors = [*arguments, *state]
        lane = Lane(devices.lane_of(tensors[0].device).device, recording=True)
        with _stand_ins(lane, tensors) as first:
            try:
                with devices.using_lane(lane):
                    result = body(*arguments)
            except Cut as cut:
                raise XlaError(
                    "DM618",
                    "the training step cannot be recorded as one graph",
                    why=str(cut),
                    where=metrics.user_line(),
                    cure="train with the lazy device, or take what reads data out of the step",
                ) from cut
            updates = [(i, t._alias.node) for i, t in enumerate(tensors) if t._alias.version]
            at = value(result._alias).position if type(result) is XLATensor else None
            recorded = (tuple(lane.key), tuple([(i, node.position) for i, node in updates]), at)
            program = self._programs.get(recorded)
            if program is None:
                program = self._programs[recorded] = Program(lane, first, [result], updates, donate=True)
        program.set_scalars(lane.scalars)
        return program, program.constants, state


@contextlib.contextmanager
def _stand_ins(lane: Lane, tensors: Sequence[XLATensor]) -> Iterator[list[Node]]:
    """While on, the tensors stand for leaves of a lane, which are yielded."""
    kept = [t._alias for t in tensors]
    if len({id(alias.root or alias) for alias in kept}) < len(kept):
        raise XlaError(
            "DM618",
            "the training step cannot be recorded as one graph",
            why="two of its tensors share memory",
            cure="use one tensor object for tied weights, or train with the lazy device",
        )
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
    if outside is not None:
        raise XlaError(
            "DM617",
            f"{outside} is not on the XLA device",
            where=metrics.user_line(),
            cure='move the model first (model.to("xla")), then make the optimizer; move the batch too',
        )


def _tensors_of(module: Any) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()] if isinstance(module, torch.nn.Module) else []


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t for state in optimizer.state.values() for t in tree_leaves(state) if isinstance(t, torch.Tensor)]


def _counts_on_cpu(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changes numbers that an executable cannot see."""
    return any(t.device.type == "cpu" for t in _state_of(optimizer))


def _hyperparameters(optimizer: torch.optim.Optimizer) -> tuple:
    return tuple(
        [tuple([(name, _frozen(v)) for name, v in group.items() if name != "params"]) for group in optimizer.param_groups]
    )


def _frozen(setting: Any) -> Any:
    """A hyperparameter as part of a key; tensors (a learning rate on the device) are read by the graph."""
    if isinstance(setting, torch.Tensor):
        return "tensor", id(setting)
    return tuple(setting) if isinstance(setting, list) else setting
