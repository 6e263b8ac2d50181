"""Whole training steps, and optimizer steps, as one executable each, with parameters and state donated.

>>> step = compile_step(model, torch.nn.functional.cross_entropy, optimizer)
>>> for data, target in loader:
...     loss = step(data, target)

The first call runs on the lazy device (optimizers make their state there), the second is recorded, later ones only run.
Hyperparameters are inputs of the executable: a changed learning rate is recorded anew and compiles nothing.
"""

from __future__ import annotations

import contextlib
import operator
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
from .ir import Cut, Lane, Meta, Node, XlaError, lock
from .tensor import Alias, XLATensor, is_xla, value


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
    modules = [m for m in (model, loss_fn) if isinstance(m, torch.nn.Module)]

    def state_of(walked: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
        return [*_tensors_of(walked), *_state_of(optimizer)]

    replayed = _Replayed(lambda: state_of(_walk(modules)))

    def body(*batch: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(model(*batch[:n_inputs]), *batch[n_inputs:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def step(*batch: torch.Tensor) -> torch.Tensor:
        _check_device((f"batch[{i}]", t) for i, t in enumerate(batch))
        walked = _walk(modules)
        training = tuple([m.training for m in walked])
        trained = tuple([p.requires_grad for m in walked for p in m._parameters.values() if p is not None])
        shapes = tuple([(t.shape, t.dtype) for t in batch])
        return replayed((shapes, training, trained), _hyperparameters(optimizer), body, batch, state_of(walked))

    return step


def compile_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A function `step()` that does `optimizer.step()` as one executable: for `dynamotor.compile(model, backend="xla")`."""
    _check_device((f"parameter {i}", p) for i, p in enumerate(_parameters_of(optimizer)))
    replayed = _Replayed(lambda: [*_parameters_of(optimizer), *_state_of(optimizer)])

    def body(*grads: torch.Tensor) -> None:
        optimizer.step()

    def step() -> None:
        parameters = _parameters_of(optimizer)
        grads = [p.grad for p in parameters]
        missing = tuple([g is None for g in grads])
        state = [*parameters, *_state_of(optimizer)]
        replayed(missing, _hyperparameters(optimizer), body, [g for g in grads if g is not None], state)

    return step


class _Replayed:
    """Runs a body on tensors and state: first lazily, then recorded, then as an executable.

    `state()` lists what the body reads and writes beside its arguments. It is known by object: when somebody puts another tensor
    in its place (`optimizer.load_state_dict`, a new parameter), all begins anew. While there are numbers on the CPU among it,
    each call is recorded, since an executable cannot see them.
    """

    def __init__(self, state: Callable[[], list[torch.Tensor]]) -> None:
        self._state = state
        self._programs: dict[tuple, Program] = {}  # by what was recorded
        self._known: list[torch.Tensor] = []
        self._warm: set[Any] = set()  # structures that have run with the known state: they have made theirs
        self._calls: dict[Any, tuple[Program, list[Any], Any, list[XLATensor]]] = {}

    def __call__(self, structure: Any, settings: Any, body: Callable, arguments: Sequence[Any], state: list[torch.Tensor]) -> Any:
        """Run for what a recording depends on beside tensors: a `structure` (shapes, modes), and the numbers in `settings`.

        `state` is what `state()` would list now; the caller has walked its modules for the structure already.
        """
        if not _same(state, self._known):
            self._known = state
            self._warm.clear()
            self._calls.clear()
        if structure not in self._warm:
            return self._run_lazily(structure, body, arguments)
        found = self._calls.get((structure, settings)) if all(map(is_xla, state)) else None
        if found is None:
            taken = {id(t) for t in arguments}
            read = list({id(t): t for t in state if is_xla(t) and id(t) not in taken}.values())
            found = self._calls[structure, settings] = *self._record(body, arguments, read), read
        program, program.constants, program.draws, read = found
        return program(*arguments, *read)[0]

    def _run_lazily(self, structure: Any, body: Callable, arguments: Sequence[Any]) -> Any:
        result = body(*arguments)
        for lane in devices.lanes():
            sync.flush(lane, "compile_step")
        self._known = self._state()
        self._warm.add(structure)
        return result

    def _record(self, body: Callable, arguments: Sequence[Any], state: Sequence[XLATensor]) -> tuple[Program, list[Any], Any]:
        """Record the body on leaves in the place of all tensors; what was recorded before keeps its executable."""
        tensors = [*arguments, *state]
        lane = Lane(devices.lane_of(tensors[0].device).device, recording=True)
        with lock, _stand_ins(lane, tensors) as first:
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
            if not _same(self._state(), self._known):
                raise XlaError(
                    "DM618",
                    "the training step cannot be recorded as one graph",
                    why="it puts new tensors in the place of its state (an optimizer that replaces what it keeps)",
                    where=metrics.user_line(),
                    cure="make the optimizer anew, and train with the lazy device",
                )
            updates = [(i, t._alias.node) for i, t in enumerate(tensors) if t._alias.version]
            at = value(result._alias).position if type(result) is XLATensor else None
            recorded = (tuple(lane.key), tuple([(i, node.position) for i, node in updates]), at)
            program = self._programs.get(recorded)
            if program is None:
                program = self._programs[recorded] = Program(lane, first, [result], updates, donate=True)
        program.set_scalars(lane.scalars)
        program.set_draws(lane)
        return program, program.constants, program.draws


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


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


def _walk(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """All modules inside, each once; `Module.modules()` takes ten times as long, and this runs at every step."""
    found: dict[int, torch.nn.Module] = {}
    waiting: list[torch.nn.Module | None] = [*reversed(modules)]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            waiting += reversed(module._modules.values())
    return list(found.values())


def _tensors_of(walked: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Parameters, buffers, and gradients that the step adds to."""
    own = [own for m in walked for own in (m._parameters, m._buffers)]
    tensors = [t for tensors in own for t in tensors.values() if t is not None]
    return [*tensors, *[t.grad for t in tensors if t.is_leaf and t.grad is not None]]


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    nested = [t for v in values if isinstance(v, (list, tuple, dict)) for t in tree_leaves(v) if isinstance(t, torch.Tensor)]
    return [*[v for v in values if isinstance(v, torch.Tensor)], *nested]


def _hyperparameters(optimizer: torch.optim.Optimizer) -> tuple:
    return tuple(
        [tuple([(name, _frozen(v)) for name, v in group.items() if name != "params"]) for group in optimizer.param_groups]
    )


def _frozen(setting: Any) -> Any:
    """A hyperparameter as part of a key; tensors (a learning rate on the device) are read by the graph."""
    if isinstance(setting, torch.Tensor):
        return "tensor", id(setting)
    return tuple(setting) if isinstance(setting, list) else setting
