"""A captured forward pass and the update behind it, as it runs: one program where it can be, in pieces where
not.

`GraphStep` is called by the dispatcher in the place of a captured graph. It checks unguarded state (the
optimizer's state and settings, gradients that are there already), runs the program that fits, and traces one
when none does.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import GetSetDescriptorType
from typing import Any

import torch
import torch.optim.optimizer

from .. import _C
from ..autograd.calls import call_without_autocast
from ..base.collector import collector_paused
from ..base.config import CompileOptions, config
from ..base.errors import CaptureError, DynamotorError, EagerWarning, is_mistake
from ..base.events import counters, emit, fall_back, log, warn_once
from ..base.narrowing import checked
from ..capture.stance import may_compile
from ..distributed.averager import Averager
from ..distributed.insert_reductions import BackwardRewriter
from ..distributed.shard_group import reductions
from ..distributed.wrapper import Reason, reduced_parameters
from ..graph.shape_tensor import unseen_by_hooks
from ..graph.spec import GraphInfo
from .facts import Facts
from .host import Mirror
from .reads import Lookups, Reads
from .sharded_update import updated_behind_reductions
from .step_program import StepProgram, build_step
from .step_trace import NotWhole, Path, StateGrows, trace_step

_ALLOWED_HOOKS: set[Callable[..., Any]] = set()


def allow_step_hook(hook: Callable[..., Any]) -> None:
    """Let steps be whole beside this hook of all optimizers, which does nothing to models that they train."""
    _ALLOWED_HOOKS.add(hook)


CompileGraph = Callable[[torch.fx.GraphModule, GraphInfo], Callable[..., tuple[Any, ...]]]
optim = sys.modules["torch.optim.optimizer"]  # torch.optim hides it behind a name of its own
PROGRAMS = 16  # of one captured graph: other settings, other answers of the optimizer's branches
CHANGES = 1  # of a look-up outside of the optimizer, that programs are made for
GROWTHS = 3  # steps in a row that may make new state


class Update:
    """What follows a forward pass: the loss's backward, clipping, the scaler, the optimizer. `count` goes up
    to `accumulate`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[list[torch.Tensor]], Any] | None,
        scaler: torch.amp.GradScaler | None,
        accumulate: int,
        keep_grads: bool,
    ) -> None:
        self.optimizer, self.clip, self.scaler = optimizer, clip, scaler
        self.accumulate, self.keep_grads, self.count = accumulate, keep_grads, 0
        self.mirror = Mirror()
        self.began = False  # whether the optimizer has had a step to make its state in

    @property
    def scales(self) -> bool:
        """Whether a scaler does something now."""
        return self.scaler is not None and self.scaler.is_enabled()

    def parameters(self) -> list[torch.Tensor]:
        """The optimizer's, in order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def begin(self) -> None:
        """Before a forward pass: gradients that the last step kept go."""
        if self.keep_grads and self.count == 0:
            self.optimizer.zero_grad()

    @property
    def is_last(self) -> bool:
        """Whether the parameters are updated behind this forward pass."""
        return self.count + 1 == self.accumulate

    def end(self) -> None:
        """After a forward pass and what follows it."""
        self.count = (self.count + 1) % self.accumulate

    def in_pieces(self, loss: torch.Tensor) -> None:
        """Backward and, behind the last of several, the update: as an eager loop does it."""
        loss = loss if self.accumulate == 1 else loss / self.accumulate
        reductions.arrived = [] if self.is_last and self.scaler is None and self.clip is None else None
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if not self.is_last:
            return
        first, self.began = not self.began, True
        with _memory_apart(loss.device) if first and loss.is_cuda else contextlib.nullcontext():
            self._update()
        if not self.keep_grads:
            self.optimizer.zero_grad()

    def _update(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clip is not None:
            self.clip(list(dict.fromkeys(self.parameters())))
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return
        with updated_behind_reductions(self.optimizer):
            self.optimizer.step()


@contextlib.contextmanager
def _memory_apart(device: torch.device) -> Iterator[None]:
    """Allocate tensors made inside apart from all others, as PyTorch's allocator does for another stream: the
    optimizer's state would fill holes between gradients, and keep their memory when they go.
    """
    current, other = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    other.wait_stream(current)
    with torch.cuda.stream(other):
        yield
    current.wait_stream(other)


@dataclass
class _Bound:
    """A program with the tensors and the numbers' homes that it reads and writes now. `grads`: where among
    the extra tensors the gradients of which inputs go. `reads`: the look-ups of the update's Python.
    """

    program: StepProgram
    reads: Lookups
    extra: list[torch.Tensor | None]
    grads: list[tuple[int, Any]]
    read: list[Callable[[], float]]
    write: list[Callable[[float], None]]
    on_device: list[torch.Tensor]
    on_host: list[torch.Tensor]
    pointers: Any

    @property
    def moved(self) -> bool:
        """Whether `.data` of a number was set."""
        return _C.data_ptrs(self.on_host) != self.pointers

    def numbers(self) -> list[float] | None:
        """The numbers of a step now; None where the program is not for them."""
        return self.program.values([read() for read in self.read])


class GraphStep:
    """The step around one captured graph; `loss_at`: which of its outputs is the loss. `settings`: under
    which it is compiled. `averager`: of the DDP module around the model.
    """

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        loss_at: int | None,
        update: Update,
        compile_graph: CompileGraph | str,
        pieces: Callable[[torch.fx.GraphModule, Any], Callable[..., Any]],
        note: Callable[[str, str], None],
        settings: dict[str, Any],
        averager: Averager | None,
    ) -> None:
        self.averager = averager
        self.numbers_inside = False  # whether the graph calculates step counts and other numbers
        self.gm, self.loss_at, self.update, self.note, self.settings = gm, loss_at, update, note, settings
        self.compile_graph, self.make_pieces = compile_graph, pieces
        self.pieces: Callable[..., Any] | None = None
        self.static = gm.meta.get("static_inputs", frozenset())
        self.step: Callable[[], Any] | None = (
            None  # what updates; None: the method that the optimizer has then
        )
        self.programs: dict[Any, list[tuple[StepProgram, Lookups]]] = {}
        self.facts: Facts | None = None
        self.bound: list[_Bound] = []
        self.held: tuple[int, ...] = ()
        self.scales = False
        self.fixed: list[int] = []  # the inputs that are no batch, and which tensors those are
        self.inputs: list[torch.Tensor] = []
        self.watched: tuple[torch.Tensor, ...] | None = None  # whose gradients a quick look covers
        self.growths, self.why_not = 0, ""
        self.storages: set[int] = set()

    def __call__(self, *tensors: torch.Tensor) -> Any:
        update = self.update
        if self.averager is not None:
            self.averager.ddp._pre_forward(None)  # with device_ids it wants something to move
        found = self._whole(tensors) if update.is_last and not self.why_not else None
        return self._in_pieces(tensors) if found is None else found

    # -- in pieces -------------------------------------------------------------------------------------------
    def _in_pieces(
        self, tensors: Sequence[torch.Tensor], forward: Callable[..., Any] | None = None
    ) -> list[Any]:
        """The compiled forward. Its backward and the update follow where the loss arrives (`_Step`), behind
        the effects that the forward has on Python objects: hooks, `clip` and the optimizer may look at these.
        """
        forward = forward or self._pieces
        results = list(
            forward(*tensors) if self.averager is None else self.averager.forward(forward, tensors)
        )
        assert self.loss_at is not None
        if not results[self.loss_at].requires_grad:
            results[self.loss_at].backward()  # PyTorch's error
        return results

    def _pieces(self, *tensors: torch.Tensor) -> Any:
        if self.pieces is None:
            self.pieces = self.make_pieces(self.gm, list(tensors))
        return self.pieces(*tensors)

    def _step(self) -> None:
        """The update itself; its result is for the caller of an update alone."""
        found = (self.step or self.update.optimizer.step)()
        NotWhole.when(found is not None and self.loss_at is None, "DM510", "optimizer.step() returns a value")

    # -- as a whole ------------------------------------------------------------------------------------------
    def _whole(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The step as one program; None where it is to run in pieces."""
        optimizer = self.update.optimizer
        if isinstance(self.compile_graph, str):
            return self._refuse("DM504", self.compile_graph)
        reduced = True if self.averager is None else self.averager.takes_step()
        if isinstance(reduced, Reason):
            return self._refuse("DM504", reduced.text)
        if not reduced:  # the compiled backward of this step settles open questions between ranks
            return None
        is_bound = self._is_quiet() and self._is_bound(tensors, ())
        held = () if is_bound else self._held(tensors)
        if held is None:
            return None
        if not optimizer.state and not self.update.began:  # optimizers make their state in the first step
            return self._in_pieces(tensors, self.gm.forward)
        try:
            if not is_bound and not self._is_bound(tensors, held):
                self._bind_all(tensors, held)
        except NotWhole as no:
            return self._refuse(no.code, str(no))
        if self.storages.intersection(
            [t.untyped_storage()._cdata for i, t in enumerate(tensors) if i not in self.static]
        ):
            return self._not_now("the batch shares memory with a parameter")
        changed: list[str] = []
        for bound in self.bound:
            if not bound.reads.hold():
                changed.append(bound.reads.changed())
                continue
            numbers = bound.numbers()
            if numbers is not None:
                return self._run(bound, tensors, numbers)
        if len(changed) > CHANGES:
            return self._refuse("DM511", f"the update's Python reads a changing value: {changed[-1]}")
        if not may_compile(f"{type(optimizer).__name__}.step"):
            return None
        if sum(map(len, self.programs.values())) >= PROGRAMS:
            return self._refuse(
                "DM507",
                f"more than {PROGRAMS} programs: settings of the optimizer, or answers of its branches "
                "on numbers, differ from step to step",
            )
        return self._trace(tensors, held)

    def _is_bound(self, tensors: Sequence[torch.Tensor], held: tuple[int, ...]) -> bool:
        """Whether optimizer, scaler and the graph's inputs are the objects that programs are bound to."""
        facts = self.facts
        same = self.update.scales == self.scales and held == self.held
        if facts is None or not same or not are_same([tensors[i] for i in self.fixed], self.inputs):
            return False
        return facts.hold() and not any(bound.moved for bound in self.bound)

    def _bind_all(self, tensors: Sequence[torch.Tensor], held: tuple[int, ...]) -> None:
        """Look at everything anew, and bind the programs for it."""
        self.facts, self.bound, self.held, self.scales = None, [], held, self.update.scales
        self.fixed = [i for i, t in enumerate(tensors) if i in self.static or t.requires_grad]
        self.inputs = [tensors[i] for i in self.fixed]
        learning = [t for t in self.inputs if t.requires_grad]
        watched = {id(t): t for t in (*learning, *self.update.parameters())}
        self.watched = tuple(watched.values()) if all(map(_is_plain, watched.values())) else None
        inputs = {id(tensors[i]): i for i in reversed(self.fixed)}
        facts = Facts.of(self.update.optimizer, self.update.scaler, inputs, alone=self.loss_at is None)
        self.facts, self.structure = facts, (held, facts.structure)
        self.bound = [self._bind(*found) for found in self.programs.setdefault(self.structure, [])]

    def _is_quiet(self) -> bool:
        """Whether no gradient is there, and no hook sees one: a quick answer to what `_held` asks, for the
        tensors that the programs are bound to."""
        if self.watched is None or self._step_hooks():
            return False
        return _C.are_none(self.watched, _GRADIENT)

    def _held(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
        """The inputs that hold gradients which this step adds to; None where something wants to see the
        backward pass.
        """
        parameters = self.update.parameters()
        mine = set(map(id, parameters))
        held = []
        for i, t in enumerate(tensors):
            if t.requires_grad and t.is_leaf:
                if t._backward_hooks or getattr(t, "_post_accumulate_grad_hooks", None):
                    return self._refuse("DM503", "a parameter has hooks on its gradient")
                if id(t) in mine and t.grad is not None:
                    held.append(i)
        if self.update.accumulate == 1 and held:
            return self._not_now("parameters have gradients before the step, which it adds to")
        learns = {id(t) for t in tensors if t.requires_grad}
        if any(p.grad is not None for p in parameters if id(p) not in learns):
            return self._not_now(
                "a parameter that the loss does not train has a gradient, which the optimizer uses"
            )
        return (
            tuple(held) if not self._step_hooks() else self._refuse("DM503", "the optimizer has step hooks")
        )

    def _step_hooks(self) -> bool:
        """Whether hooks run before or after the optimizer's step."""
        return has_step_hooks(self.update.optimizer)

    def _refuse(self, code: str, reason: str) -> Any:
        """From now on this graph's steps run in pieces."""
        self.note(code, reason)
        self.why_not = reason

    def _not_now(self, reason: str) -> Any:
        """This step runs in pieces."""
        self.note("DM521", reason)

    def _trace(self, tensors: Sequence[torch.Tensor], held: tuple[int, ...]) -> Any:
        update, averager = self.update, self.averager
        if any(isinstance(value, torch.optim.Optimizer) for value in vars(update.optimizer).values()):
            return self._refuse("DM505", "the optimizer has another optimizer inside, which no trace sees")
        scaler = update.scaler if update.scales else None
        if scaler is not None and scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(tensors[0].device)
            self._bind_all(tensors, held)
        reads = Reads(update.optimizer)
        try:
            with config.patch(**self.settings), collector_paused(), unseen_by_hooks():
                reads.update(self.step, update.clip)
                traced = trace_step(
                    self.gm,
                    tensors,
                    self.loss_at,
                    update.optimizer,
                    step=self._step,
                    watch=reads.watch,
                    clip=update.clip,
                    scale=None if scaler is None else scaler._scale,
                    accumulate=update.accumulate,
                    held=held,
                    keep_grads=update.keep_grads,
                    rewriter=None
                    if averager is None
                    else BackwardRewriter(averager, tensors, reduced_parameters(averager.ddp)),
                )
                device = next((t.device for t in tensors if t.requires_grad), torch.device("cpu"))
                assert not isinstance(self.compile_graph, str)
                inside = self.numbers_inside
                program = build_step(traced, self.compile_graph, self.static, device, numbers_inside=inside)
        except StateGrows as grows:
            self.growths += 1
            if self.growths > GROWTHS:
                return self._refuse(grows.code, str(grows))
            return self._in_pieces(tensors, self.gm.forward)
        except NotWhole as no:
            return self._refuse(no.code, str(no))
        except Exception as error:  # of the optimizer's Python, which ran on stand-ins: it can be run itself
            if config.verify and is_mistake(error):
                raise
            code = error.code if isinstance(error, DynamotorError) else "DM501"
            log("fallbacks", f"the step is not one program: {error!r}")
            return self._refuse(
                code, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
        if device.type == "cuda":  # the memory of a step in eager is no use to the program's one block
            torch.cuda.empty_cache()
        self.growths = 0
        self.programs[self.structure].append((program, reads.lookups()))
        self.bound.append(self._bind(*self.programs[self.structure][-1]))
        counters["step"]["programs"] += 1
        emit("step", whole=True)
        bound = self.bound[-1]
        numbers = bound.numbers()
        if numbers is None:
            return self._refuse("DM506", "the optimizer's numbers have changed since it was traced")
        return self._run(bound, tensors, numbers)

    def _bind(self, program: StepProgram, reads: Lookups) -> _Bound:
        assert self.facts is not None
        value, parameters = self.facts.value, self.facts.parameters
        extra: list[torch.Tensor | None] = [parameters[k] for k in program.parameters]
        grads = [(len(extra) + k, path[1]) for k, path in enumerate(program.tensors) if path[0] == "grad"]
        extra += [None if path[0] == "grad" else self._tensor(path) for path in program.tensors]
        read = [self._reader(path) for path in program.reads]
        written = [(path, value(path)) for path in program.writes]
        write = [self._writer(path) for path, held in written if not _is_on_device(held)]
        on_device = [held for _, held in written if _is_on_device(held)]
        values = [value(path) for path in program.reads]
        on_host = [held for held in values if isinstance(held, torch.Tensor) and not _is_on_device(held)]
        self.storages = {t.untyped_storage()._cdata for t in [*parameters, *extra] if t is not None}
        return _Bound(program, reads, extra, grads, read, write, on_device, on_host, _C.data_ptrs(on_host))

    def _tensor(self, path: Path) -> torch.Tensor:
        held: Any = self.update.scaler if path == ("scale",) else self.facts
        return held._scale if path == ("scale",) else held.value(path)

    def _reader(self, path: Path) -> Callable[[], float]:
        """Reads a number: tensors in place (`_Bound.holds` sees to it), Python's own wherever they are
        at the call.
        """
        facts = self.facts
        assert facts is not None
        value = facts.value(path)
        if _is_on_device(value):
            return functools.partial(self.update.mirror.read, value)
        return value.numpy().item if isinstance(value, torch.Tensor) else functools.partial(facts.value, path)

    def _writer(self, path: Path) -> Callable[[float], None]:
        facts = self.facts
        assert facts is not None
        home, key = facts.home(path)
        if isinstance(home[key], torch.Tensor):
            return home[key].numpy().fill
        kind = type(home[key])

        def write(number: float) -> None:
            home, key = facts.home(path)
            home[key] = kind(number)

        return write

    def _run(self, bound: _Bound, tensors: Sequence[torch.Tensor], numbers: list[float]) -> Any:
        program, update = bound.program, self.update
        arguments: list[Any] = [*tensors, *bound.extra]
        for at, i in bound.grads:
            arguments[len(tensors) + at] = tensors[i].grad
        arguments += program.constants
        n = len(program.numbers)
        k = n + len(bound.write)
        if n:
            _fill(program.room, numbers[:n])
            arguments += program.numbers
        around = contextlib.nullcontext() if self.averager is None else self.averager.whole_step()
        with around, torch.no_grad():
            results = call_without_autocast(program.compiled, tuple(arguments))
        vars(update.optimizer)["_opt_called"] = True  # schedulers ask for it
        found = results[-1] if program.scaled else None
        if bound.write and (found is None or not found.item()):
            for write, value in zip(bound.write, numbers[n:k], strict=True):
                write(value)
        if bound.on_device:
            update.mirror.write(bound.on_device, numbers[k:])
        if found is not None:
            scaler = checked(torch.amp.GradScaler, update.scaler)
            states = scaler._per_optimizer_states[id(update.optimizer)]
            states["found_inf_per_device"] = {found.device: found.float()}
            scaler.update()
        if update.accumulate > 1 and not update.keep_grads:
            update.optimizer.zero_grad()
        for n, i in enumerate(program.grads):
            _leave(tensors[i], results[program.n_values + n], i in program.owned)
        update.end()
        values = results[: program.n_values]
        return values if program.rebuild is None else program.rebuild(tensors, values)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run before or after an optimizer's step."""
    hooks = (
        getattr(optimizer, "_optimizer_step_pre_hooks", {}),  # wrappers may have none
        getattr(optimizer, "_optimizer_step_post_hooks", {}),
        optim._global_optimizer_pre_hooks,
        optim._global_optimizer_post_hooks,
    )
    return any(hook not in _ALLOWED_HOOKS for found in hooks for hook in found.values())


_OF_GRADIENTS = ("grad", "_backward_hooks", "_post_accumulate_grad_hooks")
# PyTorch's descriptors of these; one that a version lacks makes every step ask in `_held`.
_GRADIENT: tuple[Any, ...] = tuple(getattr(torch.Tensor, name, None) for name in _OF_GRADIENTS)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a leaf whose class has PyTorch's own attributes for its gradient, which C can ask."""
    own = [getattr(type(tensor), name, None) for name in _OF_GRADIENTS]
    return tensor.is_leaf and all(
        found is one and isinstance(one, GetSetDescriptorType) for found, one in zip(own, _GRADIENT)
    )


def are_same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(values) == len(others) and all(map(operator.is_, values, others))


def _leave(tensor: torch.Tensor, grad: torch.Tensor, owned: bool) -> None:
    """A gradient that the user may look at; what no optimizer takes adds up, as in an eager loop."""
    if tensor.grad is None or owned:
        tensor.grad = grad
    else:
        tensor.grad.add_(grad)


def _fill(room: torch.Tensor, numbers: list[float]) -> None:
    """Put the numbers of a step where its program finds them."""
    if room.device.type == "cpu":
        room.numpy()[:, 0] = numbers
    else:
        on_host = torch.zeros(room.shape, dtype=room.dtype, device="cpu")
        on_host.numpy()[:, 0] = numbers
        room.copy_(on_host, non_blocking=True)


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def refuse_pieces(code: str, reason: str, what: str, asked: CompileOptions) -> None:
    """Raise CaptureError (DM520) for a step that is not one program, where that was asked for."""
    CaptureError.when(
        asked.fullgraph or bool(asked.settings.get("strict", config.strict)),
        "DM520",
        f"{what} would run in eager PyTorch",
        why=f"[{code}] {reason}",
        cure="remove the named part from the step, or accept it (fullgraph=False, strict=False)",
    )


def fall_in_pieces(code: str, reason: str, name: str, what: str) -> None:
    """Count, and say once, that something of a step runs in eager PyTorch."""
    fall_back(f"step.{code}", what="step", name=name, reason=reason, code=code)
    warn_once(
        f"step.{name}.{code}.{reason}", f"[{code}] {what} runs in eager PyTorch: {reason}", EagerWarning
    )
