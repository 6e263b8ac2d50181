"""The joint between the compiler and DDP: a captured graph is compiled for where it runs, bare or inside a
DDP module.

>>> # the same contract: (gm, example_inputs) -> callable
>>> backend = data_parallel(native, mode=lambda: "auto")
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..autograd.simplify import PASSES
from ..base import compat
from ..base.collector import collector_paused
from ..base.config import config
from ..base.events import counters, emit, log
from ..base.probe import DDP, lost
from ..graph.module import copy_of
from ..graph.spec import Backend, Compiled
from ..lower.passes import added
from . import shard_capture  # noqa: F401  (it registers its rules)
from .averager import Averager, averager_of
from .beside import order_collectives
from .collectives import has_collectives, overlap, sink_waits
from .insert_reductions import BackwardRewriter
from .prefetch import BYTES_AHEAD, has_shards, prefetch
from .rank_order import keep_rank_order
from .shard_ops import Unshard, without_gradients
from .split import cut
from .wrapper import Reason, bucket_caps, is_reducing, reduced_parameters, why_not_ingraph

PASSES.append(("rows in the order of ranks", keep_rank_order))
added.append(("products beside collectives", order_collectives))


@dataclass(frozen=True, slots=True)
class CompiledForDdp:
    """A graph compiled for one DDP module. `reduces`: its backward follows the plan."""

    call: Compiled
    reduces: bool


def data_parallel(backend: Backend, options: Mapping[str, Any]) -> Backend:
    """The backend, its training graphs aware of a DDP module around them. `options` are those of the compiled
    callable.
    """
    if lost(DDP):
        return backend

    def compile_graph(gm: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Compiled:
        if has_shards(gm.graph):
            prefetch(gm.graph, BYTES_AHEAD)
            gm.recompile()
            counters["fsdp"]["graphs"] += 1
        if has_collectives(gm.graph):
            sink_waits(gm.graph)
            gm.recompile()
        if has_shards(gm.graph) or has_collectives(gm.graph):
            gm.meta["on_backward"] = _Overlapping.of_part(gm, example_inputs)
        if not _may_record(gm) or not any(
            isinstance(t, torch.Tensor) and t.requires_grad for t in example_inputs
        ):
            return backend(gm, example_inputs)
        return DdpVariants(gm, backend, options).prepare(example_inputs)

    return compile_graph


def _may_record(gm: fx.GraphModule) -> bool:
    """Whether autograd records anything: the rest of a function after a break may begin without gradients and
    turn them on.
    """
    return torch.is_grad_enabled() or any(
        node.target is compat.set_grad_enabled and node.args[0] for node in gm.graph.nodes
    )


class DdpVariants:
    """One captured graph: compiled plainly for calls outside of DDP and under `no_sync`, and once more for
    each DDP module.
    """

    def __init__(self, gm: fx.GraphModule, backend: Backend, options: Mapping[str, Any]) -> None:
        self.gm, self.backend, self.options = gm, backend, options
        self.plain: Compiled | None = None
        self.forms: weakref.WeakKeyDictionary[Averager, CompiledForDdp] = weakref.WeakKeyDictionary()

    def prepare(self, inputs: Sequence[torch.Tensor]) -> Compiled:
        """Compile the parts that the captured call needs; the rest is compiled when it is called for."""
        averager = self._averager()
        if averager is None:
            self._plain(inputs)
        else:
            self._form(averager, inputs)
        return self._call

    def _call(self, *inputs: torch.Tensor) -> Any:
        ddp = compat.active_ddp_module.get()
        if ddp is None or not ddp.require_backward_grad_sync:
            return (self.plain or self._plain(inputs))(*inputs)
        averager = self._averager()
        if averager is None:
            return (self.plain or self._plain(inputs))(*inputs)
        form = self.forms.get(averager) or self._form(averager, inputs)
        if averager.plan is not None:
            if (
                not averager.reduces_now()
            ):  # DDP's reducer does: a join is going on, or a hook was registered since
                return (self.plain or self._plain(inputs))(*inputs)
            if form.reduces:
                averager.note_run()
        return form.call(*inputs)

    def _averager(self) -> Averager | None:
        """That of the DDP module whose forward runs and whose gradients are to be synchronised."""
        ddp = compat.active_ddp_module.get()
        if ddp is None or not ddp.require_backward_grad_sync or not is_reducing(ddp):
            return None
        return averager_of(ddp)

    def _plain(self, inputs: Sequence[torch.Tensor]) -> Compiled:
        with collector_paused():
            self.plain = self.backend(copy_of(self.gm), list(inputs))
        return self.plain

    # For a DDP module ---------------------------------------------------------------------------------------
    def _form(self, averager: Averager, inputs: Sequence[torch.Tensor]) -> CompiledForDdp:
        with collector_paused():
            form = self._compile(averager, inputs)
        self.forms[averager] = form
        return form

    def _compile(self, averager: Averager, inputs: Sequence[torch.Tensor]) -> CompiledForDdp:
        parameters = reduced_parameters(averager.ddp)
        held = {id(p) for p in parameters.values()}
        if not any(id(t) in held for t in inputs):
            return CompiledForDdp(self.plain or self._plain(inputs), False)
        if not averager.decided:
            form = self._decide(averager, inputs, parameters)
            if form is not None:
                return form
        if averager.plan is None:
            return self._native(averager, inputs, parameters)
        call, found = self._in_graph(averager, inputs, parameters)
        if isinstance(found, Reason):
            averager.reduce_after_backward(found)
        _note("ingraph" if not isinstance(found, Reason) else "late", found)
        return CompiledForDdp(call, not isinstance(found, Reason))

    def _decide(
        self, averager: Averager, inputs: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor]
    ) -> CompiledForDdp | None:
        """Propose a plan of this graph's gradients, or why there is none, and settle it with the other
        ranks.
        """
        mode = self.options.get("ddp", config.ddp)
        asked = Reason("asked", f"options={{'ddp': {mode!r}}}") if mode in ("split", "off") else None
        proposal: Any = asked or why_not_ingraph(averager.ddp)
        call = None
        if proposal is None:
            call, proposal = self._in_graph(averager, inputs, parameters)
        averager.agree(proposal)
        if averager.plan is None or call is None:
            return None
        _note("ingraph", averager.plan)
        return CompiledForDdp(call, True)

    def _in_graph(
        self, averager: Averager, inputs: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor]
    ) -> tuple[Any, ...]:
        gm = copy_of(self.gm)
        rewriter = gm.meta["on_backward"] = BackwardRewriter(averager, inputs, parameters)
        call = self.backend(gm, list(inputs))
        return call, rewriter.found

    def _native(
        self, averager: Averager, inputs: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor]
    ) -> CompiledForDdp:
        """DDP's own reducer does the work: cut at its buckets, so that its hooks fire in time."""
        if self.options.get("ddp", config.ddp) == "off":
            _note("off", averager.reason)
            return CompiledForDdp(self.plain or self._plain(inputs), False)
        stages = cut(
            copy_of(self.gm), inputs, list(parameters.values()), bucket_caps(averager.ddp), self.backend
        )
        _note("split", averager.reason)
        return CompiledForDdp(stages if stages is not None else self.plain or self._plain(inputs), False)


def _anchors(gm: fx.GraphModule, inputs: Sequence[Any]) -> frozenset[int]:
    """The places, among the gradients, of anchors of sharded parameters: these gradients are empty."""
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    graded = [node for node, t in zip(nodes, inputs, strict=True) if getattr(t, "requires_grad", False)]
    return frozenset(
        i for i, node in enumerate(graded) if any(isinstance(u.target, Unshard) for u in node.users)
    )


@dataclass(frozen=True)
class _Overlapping:
    """What autograd calls with a backward graph: communication in it runs beside what does not need it."""

    anchors: frozenset[int]

    @classmethod
    def of_part(cls, gm: fx.GraphModule, inputs: Sequence[Any]) -> _Overlapping:
        """That of a graph, or of a part into which it is cut."""
        return cls(_anchors(gm, inputs))

    def __call__(self, backward: fx.GraphModule) -> Callable[[Compiled], Compiled]:
        prefetch(backward.graph, 0)
        overlap(backward)
        return lambda compiled: without_gradients(compiled, self.anchors) if self.anchors else compiled


def _note(mode: str, found: Any) -> None:
    counters["ddp"][mode] += 1
    if isinstance(found, Reason):
        if found.code != "asked" and mode != "late":
            counters["fallback"][f"ddp.{found.code}"] += 1
            log("fallbacks", f"gradients are reduced by DDP ({mode}): {found.text}")
        emit("ddp", mode=mode, reason=found)
