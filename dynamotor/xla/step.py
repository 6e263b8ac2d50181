"""One executable for a whole training step: forward, loss, backward and optimizer, with parameters and state donated.

>>> step = compile_step(model, torch.nn.functional.cross_entropy, optimizer)
>>> for data, target in loader:
...     loss = step(data, target)

The first call runs on the lazy device (optimizers make their state there), the second is recorded, later ones only run. Hyperparameters
are inputs of the executable: a changed learning rate is recorded anew and compiles nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from . import device as devices
from . import metrics, sync
from . import start  # noqa: F401  (registers the device)
from .bridge import Program
from .ir import Cut, Lane, Meta, Node, XlaError
from .tensor import Alias, XLATensor, value, wrap


def compile_step(model: torch.nn.Module, loss_fn: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, *,
                 n_inputs: int = 1) -> CompiledStep:
    """A function `step(*batch) -> loss` that trains `model` for one step.

    The first `n_inputs` tensors of the batch go to the model, the rest, after the model's output, to `loss_fn`. Gradients are cleared at
    the end of a step. Optimizers that keep numbers on the CPU (Adam without `capturable=True`) are recorded at each step: right, slower.
    XlaError DM617 when the model has parameters that are not on the device, DM618 when the step cannot be recorded as a whole.
    """
    return CompiledStep(model, loss_fn, optimizer, n_inputs)


class CompiledStep:
    """Made by `compile_step`; call it with a batch."""

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, n_inputs: int) -> None:
        self.model, self.loss_fn, self.optimizer, self.n_inputs = model, loss_fn, optimizer, n_inputs
        outside = next((name for name, p in model.named_parameters() if type(p) is not XLATensor), None)
        if outside is not None:
            raise XlaError("DM617", f"parameter {outside} is not on the XLA device", cure='move the model first: model.to("xla"), then make the optimizer')
        self._programs: dict[tuple, Program] = {}  # by what was recorded
        self._calls: dict[Any, tuple[Program, list[Any], list[XLATensor]]] = {}  # by batch, modes and hyperparameters
        self._warm = False

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        if not self._warm:
            loss = self._step(batch)
            sync.flush(devices.lane_of(loss.device), "compile_step")
            self._warm = True
            return loss
        key = self._key(batch)
        found = self._calls.get(key)
        if found is None or self._counts_on_cpu():
            found = self._calls[key] = self._record(batch)
        program, scalars, state = found
        program.constants = scalars
        (loss,) = program(*batch, *state)
        return loss

    def _step(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        """The step as a user writes it."""
        loss = self.loss_fn(self.model(*batch[:self.n_inputs]), *batch[self.n_inputs:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _key(self, batch: Sequence[torch.Tensor]) -> Any:
        """What a recording depends on beside tensors: shapes, modes, hyperparameters."""
        shapes = tuple([(tuple(t.shape), t.dtype) for t in batch])
        modes = tuple([m.training for m in self.model.modules()])
        groups = tuple([tuple([(name, _frozen(v)) for name, v in group.items() if name != "params"]) for group in self.optimizer.param_groups])
        return shapes, modes, groups

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Everything that a step may read or write beside its batch."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        if isinstance(self.loss_fn, torch.nn.Module):
            yield from self.loss_fn.parameters()
            yield from self.loss_fn.buffers()
        for state in self.optimizer.state.values():
            yield from (t for t in tree_leaves(state) if isinstance(t, torch.Tensor))

    def _counts_on_cpu(self) -> bool:
        return any(t.device.type == "cpu" for state in self.optimizer.state.values() for t in tree_leaves(state) if isinstance(t, torch.Tensor))

    def _record(self, batch: Sequence[torch.Tensor]) -> tuple[Program, list[Any], list[XLATensor]]:
        """Record a step on leaves in the place of all tensors; a step that was recorded before keeps its executable."""
        state = list({id(t): t for t in self._tensors() if type(t) is XLATensor}.values())
        lane = Lane(devices.lane_of(state[0].device).device, recording=True)
        with _stand_ins(lane, batch, state) as (inputs, first):
            try:
                with devices.using_lane(lane):
                    loss = self._step(inputs)
            except Cut as cut:
                raise XlaError("DM618", "the training step cannot be recorded as one graph", why=str(cut), where=metrics.user_line(),
                               cure="train with the lazy device, or take what reads data out of the step") from cut
            tensors = [*inputs, *state]
            updates = [(i, t._alias.node) for i, t in enumerate(tensors) if type(t) is XLATensor and t._alias.version]
            recorded = (tuple(lane.key), tuple([(i, node.position) for i, node in updates]), value(loss._alias).position)
            program = self._programs.get(recorded)
            if program is None:
                program = self._programs[recorded] = Program(lane, first, [loss], updates, donate=True)
        program.set_scalars(lane.scalars)
        return program, program.constants, state


@contextlib.contextmanager
def _stand_ins(lane: Lane, batch: Sequence[torch.Tensor], state: Sequence[XLATensor]) -> Iterator[tuple[list[XLATensor], list[Node]]]:
    """While on, the state tensors stand for leaves of a lane; yields tensors like the batch's, and the leaves of batch and state."""
    kept = [t._alias for t in state]
    if any(alias.root is not None for alias in kept) or len({id(alias) for alias in kept}) < len(kept):
        raise XlaError("DM618", "the training step cannot be recorded as one graph", why="two parameters, buffers or states share memory",
                       cure="use one tensor object for tied weights, or train with the lazy device")
    first = [lane.leaf(None, Meta.of(t.shape, t.dtype)) for t in [*batch, *state]]
    inputs = [wrap(Alias(node)) for node in first[:len(batch)]]
    for tensor, node in zip(state, first[len(batch):]):
        tensor._alias = Alias(node)
    try:
        yield inputs, first
    finally:
        for tensor, alias in zip(state, kept):
            tensor._alias = alias


def _frozen(value: Any) -> Any:
    """A hyperparameter as part of a key; tensors (a learning rate on the device) are read by the graph."""
    if isinstance(value, torch.Tensor):
        return "tensor", id(value)
    return tuple(value) if isinstance(value, list) else value
