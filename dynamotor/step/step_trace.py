"""The trace of a whole training step: forward, loss, backward, changes of gradients, and the optimizer's
own Python.

The result is one graph of functional aten ops from parameters, state, numbers and the batch to the loss and
the new contents of all that the step writes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..autograd.aot import groups_of
from ..autograd.calls import no_autocast
from ..autograd.chunked_loss import with_chunked_losses
from ..autograd.extra_column import without_extra_columns
from ..autograd.functional import read
from ..autograd.joint import check_inputs, plan_outputs, run_torch_graph
from ..autograd.recipe import OutputPlan
from ..base import compat
from ..base.errors import RaisedWhen
from ..distributed.insert_reductions import BackwardRewriter
from ..distributed.wrapper import Reason
from ..graph.modes import preserved_modes
from ..graph.shape_tensor import ShapeTensor, recording
from ..graph.sizes import leaves_in, mapped
from ..graph.spec import TensorSpec, aten
from ..graph.tensor_subclass import WrapperSpec, flatten_all, is_wrapper
from . import host
from .numbers import TensorsOfNumbers, extremes_beside, kind_of, node_behind, traced
from .step_recorder import StepRecorder

Path = tuple[
    Any, ...
]  # how a tensor or number is found: ("state", parameter, key, ...), ("group", number, key, ...)


class NotWhole(RaisedWhen):
    """A step cannot be one program: `code` and reason."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class StateGrows(NotWhole):
    """The optimizer makes new state in this step (its first): such a step runs in eager."""


@dataclass
class Leaves:
    """Further inputs of the step beside the captured graph's: tensors by path, and numbers by path."""

    tensors: dict[Path, fx.Node] = field(default_factory=dict)
    numbers: dict[Path, fx.Node] = field(default_factory=dict)
    kinds: dict[Path, type] = field(default_factory=dict)  # of the numbers


@dataclass
class Traced:
    """A traced step.

    inputs: the captured graph's placeholders, then parameters and tensors by path. contents: new values of
    placeholders. numbers: new values of Python numbers by path. grads: by input, what remains in `.grad` (of
    `owned`, the optimizer's parameters and reduced gradients as a whole; of others the increments). found:
    whether a scaled gradient overflowed; `skipped` are the places that then stay as they were.
    """

    recorder: StepRecorder
    placeholders: list[fx.Node]
    parameters: list[tuple[int, fx.Node]]  # of the optimizer, not among the placeholders: (number, node)
    leaves: Leaves
    values: list[fx.Node]
    plans: list[OutputPlan]
    contents: dict[fx.Node, fx.Node]
    numbers: dict[Path, fx.Node]
    grads: dict[int, fx.Node]
    owned: frozenset[int]
    found: fx.Node | None
    skipped: set[fx.Node]


class Shadows:
    """Stand-ins for an optimizer's parameters, state and hyperparameters, put in their place while `step()`
    is traced.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        optimizer: torch.optim.Optimizer,
        known: dict[int, ShapeTensor],
        scaled: bool,
    ) -> None:
        self.recorder, self.optimizer, self.leaves = recorder, optimizer, Leaves()
        self.scaled = scaled  # only the GPU knows whether the step is skipped: numbers on it stay there
        self.made: list[tuple[int, fx.Node]] = []
        self.parameters: list[ShapeTensor] = []
        self.of: dict[int, ShapeTensor] = dict(known)  # by the tensor's id
        self.real: dict[int, torch.Tensor] = {}
        self.inside: dict[
            int, tuple[object, dict[str, object]]
        ] = {}  # stand-ins of wrappers, with those inside
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if id(p) not in self.of:
                self.of[id(p)] = recorder.input(
                    f"parameter_{len(self.parameters)}", TensorSpec.of(p), p.requires_grad
                )
                self.made.append((len(self.parameters), self.of[id(p)].note.node))
            self.parameters.append(self.of[id(p)])
        self.groups = [self._group(k, group) for k, group in enumerate(optimizer.param_groups)]
        self.state = self._state()

    def _tensor(self, path: Path, tensor: torch.Tensor) -> Any:
        if is_wrapper(tensor):
            return self._wrapper(path, tensor)
        known = self.of.get(id(tensor))
        if known is None:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
                raise NotWhole(
                    "DM505", f"the optimizer keeps a {type(tensor).__name__} ({tensor.layout}) at {path[2:]}"
                )
            known = self.of[id(tensor)] = self.recorder.input("state", TensorSpec.of(tensor))
            self.leaves.tensors[path] = known.note.node
            self.real[id(tensor)] = tensor
            if host.is_number(known.note.node) and (tensor.device.type == "cpu" or not self.scaled):
                self.recorder.known[known.note.node] = float(tensor)
        return known

    def _wrapper(self, path: Path, tensor: torch.Tensor) -> object:
        """A wrapper around stand-ins of the tensors inside."""
        spec = WrapperSpec.of(tensor)
        inner = {name: self._tensor((*path, name), getattr(tensor, name)) for name in spec.names}
        with recording(self.recorder), torch.no_grad():
            made = spec.around(dict(inner))
        self.inside[id(made)] = made, inner
        return made

    def _parts(self, leaf: object) -> Iterator[object]:
        """A stand-in, or those inside of a wrapper's, as they were before the step."""
        if id(leaf) not in self.inside:
            yield leaf
            return
        for part in self.inside[id(leaf)][1].values():
            yield from self._parts(part)

    def _number(self, path: Path, value: float) -> torch.SymFloat:
        node = self.recorder.input("number", TensorSpec.dense((), torch.float64)).note.node
        self.leaves.numbers[path] = node
        self.recorder.known[node] = float(value)
        self.leaves.kinds[path] = type(value)
        return traced(node, self.recorder, type(value))

    def _stand_in(self, path: Path, value: Any, whole: bool) -> Any:
        """whole: whether integers are numbers too (counts that optimizers keep) or settings."""
        if isinstance(value, torch.Tensor):
            return self._tensor(path, value)
        if type(value) is float or whole and type(value) is int:
            return self._number(path, value)
        if type(value) in (list, tuple):
            return type(value)([self._stand_in((*path, k), v, whole) for k, v in enumerate(value)])
        if type(value) is dict:
            return {k: self._stand_in((*path, k), v, whole) for k, v in value.items()}
        return value

    def _group(self, number: int, group: dict[str, Any]) -> dict[str, Any]:
        stand_ins = {
            key: self._stand_in(("group", number, key), value, False)
            for key, value in group.items()
            if key != "params"
        }
        if stand_ins.get("fused"):
            stand_ins["fused"] = False
        return {**stand_ins, "params": [self.of[id(p)] for p in group["params"]]}

    def _state(self) -> defaultdict[Any, Any]:
        numbers = {
            id(p): k
            for k, p in enumerate(p for group in self.optimizer.param_groups for p in group["params"])
        }
        made: defaultdict[Any, Any] = defaultdict(dict)
        for key, entries in self.optimizer.state.items():
            if isinstance(key, torch.Tensor) and id(key) not in numbers:
                continue  # state of a parameter that has left
            place = numbers[id(key)] if isinstance(key, torch.Tensor) else key
            made[self.of[id(key)] if isinstance(key, torch.Tensor) else key] = self._stand_in(
                ("state", place), entries, True
            )
        return made

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The optimizer works on the stand-ins; what else it changes of itself is refused."""
        optimizer, before = self.optimizer, dict(vars(self.optimizer))
        vars(optimizer).update(_copied(before))
        optimizer.param_groups, optimizer.state = self.groups, self.state
        self.kept_groups = [
            {k: v if k == "params" else _copied(v) for k, v in g.items()} for g in self.groups
        ]
        self.kept_state = {k: _copied(v) for k, v in self.state.items()}
        try:
            yield
        finally:
            self.groups, self.state = optimizer.param_groups, optimizer.state
            after = dict(vars(optimizer))
            vars(optimizer).clear()
            vars(optimizer).update(before)
        for k, v in after.items():
            held = [before.get(k, self), v]
            first, second = ([id(leaf) for leaf in leaves_in(value)] for value in held)
            if first != second and k not in ("param_groups", "state", "_opt_called"):
                raise NotWhole("DM505", f"optimizer.step() sets {k!r} of the optimizer")

    def results(self, grads: Iterable[ShapeTensor]) -> tuple[dict[fx.Node, ShapeTensor], dict[Path, Any]]:
        """Replacements of state by the step: new tensors by placeholder, new numbers by path."""
        StateGrows.when(
            [g.keys() for g in self.groups] != [g.keys() for g in self.kept_groups]
            or self.state.keys() != self.kept_state.keys(),
            "DM505",
            "the optimizer adds or removes state at each step",
        )
        tensors: dict[fx.Node, ShapeTensor] = {}
        numbers: dict[Path, Any] = {}
        for k, (group, old) in enumerate(zip(self.groups, self.kept_groups, strict=True)):
            for key, value in group.items():
                if key != "params":
                    self._differences(("group", k, key), old[key], value, tensors, numbers)
        places = {id(shadow): k for k, shadow in reversed(list(enumerate(self.parameters)))}
        for key, entries in self.state.items():
            path = ("state", places.get(id(key), key))
            self._differences(path, self.kept_state[key], entries, tensors, numbers)
        self._check_aliases(grads)
        return tensors, numbers

    def _check_aliases(self, grads: Iterable[ShapeTensor]) -> None:
        """Tensors of the state that were apart still are, and those that were one still are one; none is in
        the memory of a parameter or gradient.
        """
        kept = leaves_in([self.kept_groups, list(self.kept_state.values())])
        then = [part for leaf in kept for part in self._parts(leaf)]
        now = flatten_all(leaves_in([self.groups, list(self.state.values())]))
        pairs = {(id(a), id(b)) for a, b in zip(then, now, strict=True) if type(b) is ShapeTensor}
        others = [*self.parameters, *grads]
        pairs |= {(id(p), id(p)) for p in others}
        held = {id(b): b for b in (*now, *others) if type(b) is ShapeTensor}
        places = [id(tensor.note.memory) for tensor in held.values()]
        NotWhole.when(
            len({a for a, _ in pairs}) < len(pairs)
            or len({b for _, b in pairs}) < len(pairs)
            or len(set(places)) < len(places),
            "DM505",
            "the optimizer keeps one tensor, or its memory, at two places",
        )

    def _differences(
        self, path: Path, old: Any, new: Any, tensors: dict[Any, Any], numbers: dict[Any, Any]
    ) -> None:
        if id(old) in self.inside and type(new) is type(old):
            for name, part in self.inside[id(old)][1].items():
                self._differences((*path, name), part, getattr(new, name), tensors, numbers)
            return
        if new is old:
            return
        if type(new) is ShapeTensor and type(old) is ShapeTensor:
            same = (new.spec.shape, new.spec.dtype, new.spec.device) == (
                old.spec.shape,
                old.spec.dtype,
                old.spec.device,
            )
            if not same or path not in self.leaves.tensors:
                raise StateGrows("DM505", f"the optimizer puts another tensor at {path[2:]}")
            tensors[self.leaves.tensors[path]] = new
        elif (
            path in self.leaves.numbers
            and isinstance(new, (float, int, torch.SymFloat))
            and kind_of(new) is self.leaves.kinds[path]
        ):
            numbers[path] = new
        elif type(new) is type(old) and type(new) in (list, tuple) and len(new) == len(old):
            before = len(numbers)
            for k, (a, b) in enumerate(zip(old, new)):
                self._differences((*path, k), a, b, tensors, numbers)
            if type(new) is tuple and len(numbers) > before:
                raise NotWhole("DM505", f"the optimizer puts another tuple at {path[2:]}")
        elif type(new) is dict and type(old) is dict and new.keys() == old.keys():
            for k in new:
                self._differences((*path, k), old[k], new[k], tensors, numbers)
        elif type(new) is type(old) in (bool, int, str) and new == old:
            return
        else:
            raise StateGrows("DM505", f"the optimizer replaces its state at {path[2:] or path}")


def uncompiled() -> contextlib.AbstractContextManager[object]:
    """Within this, functions that `torch.compile` made (torchao's optimizers have one) run as they are."""
    loaded = "torch._dynamo" in sys.modules  # without it nothing is compiled
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()


# Containers are copied, their items are not.
_copied = functools.partial(mapped, lambda leaf: leaf)


def trace_step(
    gm: fx.GraphModule,
    examples: Sequence[torch.Tensor],
    loss_at: int | None,
    optimizer: torch.optim.Optimizer,
    *,
    step: Callable[[], Any],
    watch: Callable[[Callable[[], None]], None],
    clip: Callable[[list[Any]], Any] | None,
    scale: torch.Tensor | None,
    accumulate: int,
    held: Sequence[int] = (),
    keep_grads: bool = False,
    rewriter: BackwardRewriter | None = None,
) -> Traced:
    """Trace one step. `held`: the inputs whose `.grad` exists and is added to (the last of several
    accumulated backwards). `loss_at`: None for the update alone. `rewriter`: has gradients averaged over
    ranks, together with what `.grad` holds. `watch`: runs the update's Python (`clip` and `step`).

    Raises NotWhole, UnsupportedOp or PyTorch's own errors for steps that cannot be one program.
    """
    NotWhole.when(any(map(is_wrapper, examples)), "DM502", "a tensor subclass is trained")
    trace = _StepTrace(gm, examples, optimizer, scale, held)
    with recording(trace.recorder), preserved_modes():
        results = trace.forward(gm, examples)
        NotWhole.when(any(map(is_wrapper, results)), "DM502", "a tensor subclass leaves the step as a result")
        if loss_at is not None:
            trace.backward(results[loss_at], accumulate)
    trace.reduce(rewriter)
    trace.update(optimizer, step, clip, watch)
    NotWhole.when(
        loss_at is None and any(grad.note.memory.version for grad in trace.held.values()),
        "DM505",
        "optimizer.step() writes gradients, which stay",
    )
    return trace.finish(results, keep_grads)


class _StepTrace:
    """The phases of the trace of a step. `grads`: by input, of those that have one; `mine`: those of the
    optimizer's among them.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        examples: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        scale: torch.Tensor | None,
        held: Sequence[int],
    ) -> None:
        self.recorder = recorder = StepRecorder()
        names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
        self.graded = [t.requires_grad for t in examples]
        NotWhole.when(
            any(needs and not t.is_leaf for needs, t in zip(self.graded, examples)),
            "DM502",
            "the batch has a history: its gradient flows on outside of the step",
        )
        self.feed = [
            recorder.input(name, TensorSpec.of(t), needs)
            for name, t, needs in zip(names, examples, self.graded, strict=True)
        ]
        self.placeholders = list(recorder.graph.nodes)
        self.held = {
            i: recorder.input("grad", TensorSpec.of(grad))
            for i in held
            if (grad := examples[i].grad) is not None
        }
        self.scaled = None if scale is None else recorder.input("scale", TensorSpec.of(scale))
        known = {id(t): tensor for t, tensor in zip(examples, self.feed)}
        self.shadows = Shadows(recorder, optimizer, known, scale is not None)
        tensors = self.shadows.leaves.tensors
        tensors.update({("grad", i): tensor.note.node for i, tensor in self.held.items()})
        if self.scaled is not None:
            tensors["scale",] = self.scaled.note.node
        self.grads: dict[int, ShapeTensor] = {}
        self.averages: dict[int, ShapeTensor] = {}
        self.found: ShapeTensor | None = None

    def forward(self, gm: fx.GraphModule, examples: Sequence[torch.Tensor]) -> Sequence[Any]:
        """The captured graph's results."""
        changed = with_chunked_losses(without_extra_columns(gm), self.graded)
        results = run_torch_graph(changed, self.recorder, self.feed)
        torch.clear_autocast_cache()
        inputs = dict(enumerate(self.feed))
        aliases = {i: tensor.note for i, tensor in inputs.items()}
        check_inputs(inputs, aliases, self.graded, groups_of(examples))
        return results

    def backward(self, loss: Any, accumulate: int) -> None:
        """The gradients of a loss, of which `accumulate` are added up."""
        NotWhole.when(
            loss.dim() or not loss.requires_grad or not loss.is_floating_point(),
            "DM502",
            "the loss is not one floating number with a gradient",
        )
        self.recorder.stage, self.recorder.where = "backward", None
        with no_autocast():
            root = loss if accumulate == 1 else loss / accumulate
            root = root if self.scaled is None else root * self.scaled.to(root.dtype)
            self.grads = _gradients(self.recorder, root, self.feed, self.graded)

    def reduce(self, rewriter: BackwardRewriter | None) -> None:
        """Averages over ranks, and what `.grad` holds already."""
        if rewriter is not None:
            self.averages = _averages(self.recorder, rewriter, self.grads, self.graded)
        sums = {
            i: self.averages[i] if i in self.averages else _sum_with(self.recorder, grad, self.held.get(i))
            for i, grad in self.grads.items()
        }
        self.grads = sums | {i: grad for i, grad in self.held.items() if i not in sums}

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], Any],
        clip: Callable[[list[Any]], Any] | None,
        watch: Callable[[Callable[[], None]], None],
    ) -> None:
        """Changes of the gradients of the optimizer's parameters, then `optimizer.step()`."""
        feed, shadows = self.feed, self.shadows
        owned = {id(shadow) for shadow in shadows.parameters}
        self.mine = {i: grad for i, grad in self.grads.items() if id(feed[i]) in owned}
        self.recorder.updates = True
        with recording(self.recorder), torch.no_grad():
            if self.scaled is not None:
                with no_autocast():
                    self.found = _unscale(self.mine, self.scaled)
            self.versions = {id(s): s.note.memory.version for s in shadows.parameters}
            for i, grad in self.mine.items():
                feed[i].grad = grad

            def run() -> None:
                if clip is not None:
                    clip(list(dict.fromkeys(shadows.parameters)))
                step()

            with shadows.in_place(), TensorsOfNumbers(), extremes_beside(type(optimizer).step), uncompiled():
                watch(run)  # under the autocast of the call, as an eager loop in that region
            torch.clear_autocast_cache()
            if self.recorder.raised is not None:
                raise self.recorder.raised
            NotWhole.when(
                any(feed[i].grad is not grad for i, grad in self.mine.items()),
                "DM505",
                "optimizer.step() replaces gradients",
            )
            NotWhole.when(
                any(feed[i].note.memory.version == self.versions[id(feed[i])] for i in self.mine),
                "DM505",
                "optimizer.step() leaves a parameter with a gradient as it is",
            )

    def finish(self, results: Sequence[Any], keep_grads: bool) -> Traced:
        """The trace, with the new contents of all that was written."""
        recorder, shadows = self.recorder, self.shadows
        written, numbers = shadows.results(self.mine.values())
        contents, skipped = self._contents(written)
        recorder.updates = False
        with recording(recorder):
            detached = [r.detach() if type(r) is ShapeTensor else r for r in results]
        plans, sources = plan_outputs(detached, dict(enumerate(self.feed)))
        return Traced(
            recorder=recorder,
            placeholders=self.placeholders,
            parameters=shadows.made,
            leaves=shadows.leaves,
            values=[read(alias, recorder.emit) for alias, _ in sources],
            plans=plans,
            contents=contents,
            grads={i: recorder.node_of(g) for i, g in self.grads.items() if keep_grads or i not in self.mine},
            numbers={path: self._number(value) for path, value in numbers.items()},
            owned=frozenset({*self.mine, *self.averages}),
            found=None if self.found is None else recorder.node_of(self.found),
            skipped=skipped,
        )

    def _contents(self, written: dict[fx.Node, ShapeTensor]) -> tuple[dict[fx.Node, fx.Node], set[fx.Node]]:
        """New values by placeholder; and which of them a step that overflowed leaves as they were."""
        contents: dict[fx.Node, fx.Node] = {}
        skipped: set[fx.Node] = set()
        shadows = self.shadows
        state = set(shadows.leaves.tensors.values()) | {node for _, node in shadows.made}
        seen = {id(tensor): tensor for tensor in [*self.feed, *shadows.of.values()]}
        with recording(self.recorder), torch.no_grad():
            # Read before any is written: states may have changed places.
            fresh = {k: self.recorder.tensor(self.recorder.node_of(new)) for k, new in written.items()}
            for tensor in seen.values():
                memory = tensor.note.memory
                place, new = memory.input, fresh.get(memory.input)
                if new is None and memory.version == 0:
                    continue
                contents[place] = self.recorder.node_of(tensor if new is None else tensor.copy_(new))
                if place in state or memory.version > self.versions.get(id(tensor), memory.version):
                    skipped.add(place)
        return contents, skipped

    def _number(self, value: Any) -> fx.Node:
        node = node_behind(value)
        if isinstance(node, fx.Node):
            return node
        options = {"dtype": torch.float64, "device": torch.device("cpu")}
        return self.recorder.emit(aten.full.default, ([], float(node)), options)


def _gradients(
    recorder: StepRecorder, root: ShapeTensor, feed: list[ShapeTensor], graded: list[bool]
) -> dict[int, ShapeTensor]:
    """The gradients of the inputs that want one, each in memory of its own, as autograd leaves them."""
    wanted = [i for i, needs in enumerate(graded) if needs]
    one = torch.ones_like(root)
    found = compat.execution_engine.get().run_backward(
        (root,),
        (one,),
        False,
        False,
        tuple(feed[i] for i in wanted),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return {
        i: recorder.tensor(recorder.node_of(g)) for i, g in zip(wanted, found, strict=True) if g is not None
    }


def _averages(
    recorder: StepRecorder, rewriter: BackwardRewriter, grads: dict[int, ShapeTensor], graded: list[bool]
) -> dict[int, ShapeTensor]:
    """The averages over ranks, of those gradients that are reduced."""
    wanted = [i for i, needs in enumerate(graded) if needs]
    nodes = [recorder.node_of(grads[i]) if i in grads else None for i in wanted]
    found = zip(wanted, nodes, rewriter.averages(recorder.graph, nodes), strict=True)
    if isinstance(rewriter.found, Reason):
        raise NotWhole("DM504", rewriter.found.text)
    return {i: recorder.tensor(new) for i, node, new in found if new is not None and new is not node}


def _sum_with(recorder: StepRecorder, grad: ShapeTensor, held: ShapeTensor | None) -> ShapeTensor:
    if held is None:
        return grad
    return recorder.tensor(recorder.node_of(recorder.call(aten.add.Tensor, held, grad)))


def _unscale(grads: dict[int, ShapeTensor], scale: ShapeTensor) -> ShapeTensor:
    """What `GradScaler.unscale_` does; whether any gradient is not finite."""
    inverse = scale.double().reciprocal().float()
    overflow: torch.Tensor | None = None
    for grad in grads.values():
        bad = torch.logical_not(torch.isfinite(grad)).any()
        overflow = bad if overflow is None else torch.logical_or(overflow, bad)
        grad.mul_(inverse)
    if not isinstance(overflow, ShapeTensor):
        raise NotWhole("DM502", "no parameter of the optimizer has a gradient")
    return overflow
