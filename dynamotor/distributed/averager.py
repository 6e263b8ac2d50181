"""Averages the gradients of one DistributedDataParallel module over a plan that all ranks agreed on, in place
of DDP's reducer.

A plan fixes what goes over the wire: its buckets, in order, once in each synchronised backward. A rank
fulfils it inside its compiled backward or, when a graph or its surroundings do not allow that, right after
the backward; the others cannot tell.

>>> averager = averager_of(ddp)
>>> averager.adopt(plan)
>>> compiled = averager.around(compiled_backward, slots)        # reduces while it runs
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import _C
from ..base import compat
from ..base.errors import DistributedError, user_line
from ..base.events import counters, emit, log
from ..base.narrowing import checked
from ..runtime.memory import ResultPool, new_pool
from .agreement import next_number, tell_all
from .ops import number_of
from .plan import BucketPlan
from .rank_failures import install, told, watch_gpu
from .reduce_step import ReduceStep
from .wrapper import Reason, has_gradient_hooks, reduced_parameters, wire_settings

_KEY = "_dynamotor_averager"
_all: weakref.WeakSet[Averager] = weakref.WeakSet()


def averager_of(ddp: Any) -> Averager:
    """The module's averager; the first call attaches it."""
    found = ddp.__dict__.get(_KEY)
    if found is None:
        module = ddp._orig_mod if hasattr(type(ddp), "_dynamotor") else ddp
        install(module.process_group)
        found = Averager(module)
        ddp.__dict__[_KEY] = found
        ddp.__dict__["_pre_forward"], ddp.__dict__["_post_forward"] = found.pre_forward, found.post_forward
    return found


class _Idle:
    """Stands in for DDP's reducer while a forward ends whose gradients it shall not reduce."""

    def prepare_for_backward(self, outputs: Any) -> None:
        pass


class Averager:
    """State of one DDP module: undecided, native (DDP reduces; `reason` says why), or with a `plan`."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        self.plan: BucketPlan | None = None
        self.reason: Reason | None = None
        self.parameters: dict[str, torch.Tensor] = {}
        self.pool: ResultPool | None = None
        self.step: ReduceStep | _Local | None = None  # of the backward that runs now
        self.late: Reason | None = None  # why this rank reduces after the backward from now on
        self._open = (
            0  # forwards since the last reduction: the next backward reduces, once, however many they are
        )
        self._ran = False  # a graph that reduces ran in this forward
        self._scheduled = False
        self._armed: Any = None
        self._order = 0  # among the modules of this group
        _all.add(self)
        self._before: dict[str, bytes] = {}  # of the gradients, when the forward ended
        self._topic = ""  # of this module in the group's store

    def __reduce__(self) -> Any:
        return Averager, (self.ddp,)  # a copied or unpickled module decides anew

    @property
    def decided(self) -> bool:
        return self.plan is not None or self.reason is not None

    @property
    def group(self) -> torch.distributed.ProcessGroup:
        return self.ddp.process_group

    @property
    def number(self) -> int:
        """What stands for this averager in a graph."""
        return number_of(self)

    # The decision -------------------------------------------------------------------------------------------
    def agree(self, proposal: BucketPlan | Reason) -> None:
        """Settle with the other ranks how gradients are reduced: a plan if all have the same, natively if any
        cannot.
        """
        mine = (
            {"plan": proposal.digest, "text": proposal.summary}
            if isinstance(proposal, BucketPlan)
            else {"reason": proposal.code, "text": proposal.text}
        )
        mine["ddp"] = wire_settings(self.ddp)
        self._order = next_number(self.group)
        self._topic = f"ddp/{self._order}"
        notes = tell_all(self.group, self._topic, mine)
        refusing = [rank for rank, note in enumerate(notes) if "reason" in note]
        if refusing:
            self._refuse_others(notes, "ddp", "ddp")
            rank = self.group.rank() if isinstance(proposal, Reason) else refusing[0]
            text = (
                notes[rank]["text"] if isinstance(proposal, Reason) else f"rank {rank}: {notes[rank]['text']}"
            )
            self.reason = Reason(notes[rank]["reason"], text)
            return
        self._refuse_others(notes, "plan", "text")
        self.adopt(checked(BucketPlan, proposal))

    def _refuse_others(self, notes: Sequence[Mapping[str, Any]], key: str, text: str) -> None:
        """DM701 unless all ranks told the same under `key`."""
        mine = notes[self.group.rank()]
        other = next((rank for rank, note in enumerate(notes) if note[key] != mine[key]), None)
        if other is not None:
            raise DistributedError(
                "DM701",
                f"rank {self.group.rank()} and rank {other} would reduce different gradient buckets",
                why=f"{mine[text]} here, {notes[other][text]} there",
                cure="give every rank the same model, the same arguments of DistributedDataParallel "
                "and the same program",
                where=user_line(),
            )

    def adopt(self, plan: BucketPlan) -> None:
        """Reduce by this plan from now on."""
        self.plan = plan
        named = reduced_parameters(self.ddp)
        self.parameters = {name: named[name] for name in plan.names}
        kinds = Counter(
            (bucket.nbytes, bucket.dtype) for bucket in plan.buckets if bucket.device.type == "cpu"
        )
        self.pool = new_pool({kind: 2 * count for kind, count in kinds.items()})
        emit("ddp", mode="ingraph", plan=plan)

    def reduce_after_backward(self, reason: Reason) -> None:
        """From now on this rank reduces right after the backward; the buckets and their order stay."""
        if self.late is None:
            self.late = reason
            counters["fallback"][f"ddp.{reason.code}"] += 1
            emit("ddp", mode="late", reason=reason)
            log("fallbacks", f"gradients are reduced after the backward: {reason.text}")

    # Around DDP's forward -----------------------------------------------------------------------------------
    def note_run(self) -> None:
        """A graph whose backward reduces has run in this forward."""
        self._ran = True

    def reduces_now(self) -> bool:
        """Whether the forward that runs now is one whose gradients the plan covers."""
        ddp = self.ddp
        return (
            self.plan is not None
            and ddp.require_backward_grad_sync
            and torch.is_grad_enabled()
            and not ddp._join_config.enable
            and not ddp._comm_hooks
        )

    def pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """DDP's own, with codes for its complaint about parameters without gradients and for a rank that is
        gone.
        """
        with told("before a forward, while the ranks synchronised"):
            return type(self.ddp)._pre_forward(self.ddp, *inputs, **kwargs)

    def post_forward(self, output: Any) -> Any:
        """DDP's own, with its reducer left out where the plan takes its place."""
        ran, self._ran = self._ran, False
        original = type(self.ddp)._post_forward
        if not self.reduces_now():
            self._open += (
                self.plan is None and self.ddp.require_backward_grad_sync and torch.is_grad_enabled()
            )
            return original(self.ddp, output)
        self._disarm()
        self._scheduled = False
        self._open += 1
        if not ran or self.late is not None or self._open > 1:
            self._arm()
        reducer = self.ddp.__dict__["reducer"]
        self.ddp.__dict__["reducer"] = _Idle()
        try:
            return original(self.ddp, output)
        finally:
            self.ddp.__dict__["reducer"] = reducer

    # Around a whole step ------------------------------------------------------------------------------------
    def forward(self, call: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Any:
        """What DDP's own forward does, around a graph that ends with the loss; `pre_forward` has run."""
        with self.ddp._inside_ddp_forward():
            output = call(*inputs)
        return self.ddp._post_forward(output)

    def takes_step(self) -> bool | Reason:
        """Whether the step that runs now may reduce and update in one program (gradients to reduce after a
        backward does not then), or why none will.
        """
        if self.ddp._comm_hooks:
            return Reason("comm_hook", "a communication hook is registered")
        if not self.reduces_now():
            return self.reason or False
        self._disarm()
        return self.late or True

    @contextlib.contextmanager
    def whole_step(self) -> Iterator[None]:
        """Around a program that is forward, backward and update and waits for its buckets itself."""
        self.note_run()
        self.post_forward(None)
        self._disarm()
        self.step = self._new_step()
        try:
            with told("in a training step, while gradients were reduced"):
                yield
        finally:
            self.step = None
        self._close()
        watch_gpu()

    # Inside the compiled backward ---------------------------------------------------------------------------
    def around(
        self, compiled: Callable[..., Any], names: Sequence[str | None]
    ) -> Callable[..., tuple[Any, ...]]:
        """The rewritten backward, fit to be called by autograd. `names`: whose gradient each result is."""
        call = getattr(compiled, "boxed", None) or (lambda given: compiled(*given))

        def boxed(given: list[torch.Tensor]) -> tuple[Any, ...]:
            step = self.step = self._new_step() if self._may_start() else _Local()
            try:
                outs = call(given)
            finally:
                self.step = None
            return outs if isinstance(step, _Local) else self._gradients(step, names, outs)

        def backward(*inputs: torch.Tensor) -> tuple[Any, ...]:
            return boxed(list(inputs))

        backward.__dict__["boxed"] = boxed  # saved values are freed as it goes here too
        return backward

    def _new_step(self) -> ReduceStep:
        return ReduceStep(checked(BucketPlan, self.plan), self.parameters, self.group, self.pool)

    def finish(self, bucket: int) -> list[torch.Tensor]:
        """Called by the graph where it needs a bucket's averages."""
        return self._running().finish(bucket)

    def start(self, bucket: int, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Called by the graph once a bucket's gradients are written."""
        return self._running().start(bucket, grads)

    def _running(self) -> ReduceStep | _Local:
        assert self.step is not None
        return self.step

    def _may_start(self) -> bool:
        """Whether the gradients of this backward may be reduced as they come. Ranks may answer differently:
        all reduce the plan's buckets once, in order."""
        if (
            not self._open
        ):  # as in DDP: one reduction for what ran forward, a second backward adds to the gradients
            return False
        if (
            self._armed is None
            and self.late is None
            and any(map(has_gradient_hooks, self.parameters.values()))
        ):
            self.reduce_after_backward(Reason("param_hook", "a parameter has gradient hooks"))
        beside = any(
            other._open and other is not self and other.group is self.group and other._accumulates()
            for other in _all
        )
        if beside or self._armed is not None or self.late is not None:
            if beside or self._open > 1:
                counters["fallback"]["ddp.several_modules" if beside else "ddp.several_forwards"] += 1
            self._schedule()
            return False
        return self._accumulates()

    def _close(self) -> None:
        """This module's gradients are reduced; what DDP's reducers of other modules had to do, they have
        done.
        """
        self._open = 0
        for other in _all:
            if other.plan is None:
                other._open = 0

    def _accumulates(self) -> bool:
        """Whether the backward that runs adds to `.grad`: `torch.autograd.grad` and `backward(inputs=...)` do
        not.
        """
        parameters = self.parameters or reduced_parameters(self.ddp)
        nodes = (
            torch.autograd.graph.get_gradient_edge(p).node for p in parameters.values() if p.requires_grad
        )
        try:
            return any(map(compat.engine_will_run, nodes))
        except RuntimeError:  # so it answers for leaves under torch.autograd.grad
            return False

    def _gradients(
        self, step: ReduceStep, names: Sequence[str | None], outs: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """What autograd gets of the results. A gradient that a parameter holds is written in place, autograd
        gets None.
        """
        given: Any = dict(zip(names, outs, strict=True))
        kept: dict[Any, torch.Tensor] = self._write_back({name: given[name] for name in self.parameters})
        self._close()
        compat.execution_engine.get().queue_callback(
            functools.partial(self._check, step, _C.tensor_stamps(list(kept.values())))
        )
        return tuple([out if kept.get(name, out) is out else None for name, out in zip(names, outs)])

    def _write_back(self, averages: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The gradients that parameters hold, written in place; the averages themselves where they hold
        none.
        """
        held = {name: self.parameters[name].grad for name in averages}
        pairs = [(gradient, averages[name]) for name, gradient in held.items() if gradient is not None]
        if pairs:
            torch._foreach_copy_([gradient for gradient, _ in pairs], [average for _, average in pairs])
        return {name: averages[name] if gradient is None else gradient for name, gradient in held.items()}

    # After the backward -------------------------------------------------------------------------------------
    def _check(self, done: ReduceStep, stamps: bytes) -> None:
        """See whether gradients are the step's results; more may have come from outside of the graph, not
        averaged.
        """
        missing = [name for name, p in self.parameters.items() if p.grad is None]
        if missing:
            raise self._without_gradient(missing)
        if _C.tensor_stamps([p.grad for p in self.parameters.values() if p.grad is not None]) == stamps:
            return
        with torch.no_grad():
            self.reduce_after_backward(
                Reason("outside", "parameters also get gradients from outside of the compiled graph")
            )
            tell_all(self.group, f"{self._topic}/outside", {})
            self._average_rest([slot.of(flat) for slot, flat in done.slots()])

    def _average_rest(self, given: Sequence[torch.Tensor]) -> None:
        """Average the parameters' gradients beyond `given`, which is averaged already."""
        step = self._new_step()
        known = iter(given)
        for bucket in step.plan.buckets:
            flat = step.memory(bucket)
            for slot in bucket.slots:
                whole: Any = self.parameters[slot.name].grad
                torch.sub(whole, next(known), out=slot.of(flat)).mul_(1.0 / self.group.size())
            step.send(flat)
        for before, (name, more) in zip(given, step.wait().items(), strict=True):
            self.parameters[name].grad = before + more

    def _arm(self) -> None:
        """Reduce after the next backward, whatever it runs through."""
        self._before = self._stamps()
        self._armed = torch.autograd.graph.register_multi_grad_hook(
            tuple(self.parameters.values()), lambda grad: self._schedule(), mode="any"
        )

    def _stamps(self) -> dict[str, bytes]:
        """What changes with each gradient that arrives."""
        return {
            name: b"" if p.grad is None else _C.tensor_stamps([p.grad]) for name, p in self.parameters.items()
        }

    def _disarm(self) -> None:
        if self._armed is not None:
            self._armed.remove()
            self._armed = None

    def _schedule(self) -> None:
        if not self._scheduled and self._accumulates():
            self._scheduled = True
            compat.execution_engine.get().queue_callback(_reduce_scheduled)

    def _reduce_all(self) -> None:
        """Average the accumulated gradients, bucket by bucket."""
        self._scheduled = False
        self._close()
        self._disarm()
        stamps = self._stamps()
        missing = [name for name, stamp in stamps.items() if stamp == self._before.get(name)]
        step = self._new_step()
        with torch.no_grad():
            for i, bucket in enumerate(step.plan.buckets):
                step.start(i, [None] * len(bucket.slots))
            for name, kept in self._write_back(step.wait()).items():
                self.parameters[name].grad = kept
        if missing:
            raise self._without_gradient(missing)

    def _without_gradient(self, names: Sequence[str]) -> DistributedError:
        return DistributedError(
            "DM704",
            f"{', '.join(names[:5])} of the DistributedDataParallel module got no gradient in this step",
            why="the loss does not depend on them",
            cure="DistributedDataParallel(..., find_unused_parameters=True), "
            "or freeze them with requires_grad_(False)",
        )


def _reduce_scheduled() -> None:
    """Reduce what waited for the end of the backward, module by module in an order that all ranks share."""
    for averager in sorted((a for a in _all if a._scheduled), key=lambda a: (a._order, a.group.group_name)):
        averager._reduce_all()


class _Local:
    """Keeps the gradients of a backward that may not reduce as it goes."""

    def __init__(self) -> None:
        self.grads: list[list[torch.Tensor]] = []

    def start(self, bucket: int, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        self.grads.append([g.clone() for g in grads])  # their memory may be used again by the program
        return grads[0].new_empty(0)

    def finish(self, bucket: int) -> list[torch.Tensor]:
        """Give them back."""
        return self.grads[bucket]
