"""`dynamotor.compile(optimizer.step)`: the update alone as one program, for loops that are the user's own.

>>> update = dynamotor.compile(optimizer.step)
>>> loss.backward(); update(); optimizer.zero_grad()

It is a whole step (`graph_step.py`) without forward and backward: the parameters are the inputs of an empty
graph, and their gradients are there already.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._C import tensor_layouts
from ..base.config import CompileOptions
from ..capture.optimizer_frames import is_around_step
from ..capture.stance import stance
from ..graph.module import graph_module
from ..graph.tensor_subclass import is_wrapper
from .graph_step import (
    CompileGraph,
    GraphStep,
    Update,
    are_same,
    fall_in_pieces,
    has_step_hooks,
    refuse_pieces,
)

# Runs a step in eager PyTorch: (why it is no program, the step) -> its result.
Natively = Callable[[str, Callable[[], Any]], Any]
LAYOUTS = 8  # of parameters and gradients, that programs are kept for


def optimizer_of(method: Any) -> torch.optim.Optimizer | None:
    """The optimizer whose `step` a callable is, also behind a scheduler's count; None of others."""
    found = getattr(method, "__self__", None)
    if getattr(method, "_wrapped_by_lr_sched", False) and method.__closure__ is not None:
        cells = dict(zip(method.__code__.co_freevars, method.__closure__, strict=True))
        found = cells["opt_ref"].cell_contents() if "opt_ref" in cells else None
    is_step = isinstance(found, torch.optim.Optimizer) and getattr(method, "__name__", "") == "step"
    return found if is_step else None


class OptimizerStep:
    """The stand-in for `optimizer.step`, with its signature. `original`: the method. `ops`: calls in the
    programs that ran so far. `numbers_inside`: whether graphs calculate step counts, too.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        compile_graph: CompileGraph,
        settings: dict[str, Any],
        asked: CompileOptions,
        *,
        numbers_inside: bool,
    ) -> None:
        self.original, self.optimizer, self.asked = original, optimizer, asked
        self.update, self.hooked = _apart(original, self._step)
        self.compile_graph, self.settings = compile_graph, settings
        self.numbers_inside = numbers_inside
        self.steps: dict[Any, _Alone] = {}
        self.last: _Alone | None = None
        self.running = False
        self.ops = 0
        self.natively: Natively = _plainly
        self.reasons: list[tuple[str, str]] = []
        functools.update_wrapper(self, original, updated=())

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function of the method, which a scheduler binds to the optimizer anew to count calls."""

        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step; where it is no program, that of eager PyTorch."""
        vars(self.optimizer)["_opt_called"] = True  # schedulers ask for it
        if self.running:
            return self.original(*args, **kwargs)
        self.running = True  # the trace calls `optimizer.step()`, which may be this object
        try:
            hooked = self.hooked if has_step_hooks(self.optimizer) else None
            if hooked is not None and _calls_hooks_again(self.original):
                self.note("DM503", "a step inside of its step calls the optimizer's hooks again")
                return self.natively("step hooks", functools.partial(self.original, *args, **kwargs))
            return self._step(*args, **kwargs) if hooked is None else hooked(self.optimizer, *args, **kwargs)
        finally:
            self.running = False

    def call(self, natively: Natively, *args: Any, **kwargs: Any) -> Any:
        """One step; `natively` runs closures, and a step that is no program."""
        before, self.natively = self.natively, natively
        try:
            return self(*args, **kwargs)
        finally:
            self.natively = before

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """The update; with arguments other than a closure, that of eager PyTorch."""
        closure, *others = (*args, *kwargs.values()) or (None,)
        if closure is None and not others:
            return self._update()
        captured = self.natively is not _plainly
        if others or not captured or not _calls_closure_first(self.optimizer):
            self.note("DM521", "it is given a closure")
            return self.natively("a closure", functools.partial(self.update, *args, **kwargs))
        with torch.enable_grad():
            loss = self.natively("a closure", closure)
        self._update()
        return loss

    def eagerly(self, reason: str) -> Any:
        """One step in eager PyTorch."""
        return self.natively(reason, self.update)

    def _update(self) -> Any:
        if (holds := stance()) == "force_eager":
            return self.eagerly(f"the stance is {holds}")
        learning = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = [p.grad for p in learning]
        last = self.last
        if last is not None and last.lies_as_before(learning, grads):
            return last(*learning)
        key = tuple([(id(p), *_lies(p), *_lies(g)) for p, g in zip(learning, grads)])
        step = self.steps.get(key)
        if step is None:
            if not key:
                return self.eagerly("no parameter has a gradient")
            if not all(map(_takes, (*learning, *grads))):
                return self._refused("a parameter or gradient is sparse, a wrapper, or on another device")
            if len(self.steps) == LAYOUTS:
                return self._refused(f"parameters and gradients had more than {LAYOUTS} layouts")
            step = self.steps[key] = _Alone(self, len(learning))
        if {p.untyped_storage()._cdata for p in learning} & {g.untyped_storage()._cdata for g in grads}:
            return self._refused("a gradient shares memory with a parameter")
        step.note_layouts(learning, grads)
        self.last = step
        return step(*learning)

    def _refused(self, reason: str) -> Any:
        """This step is no program."""
        self.note("DM521", reason)
        return self.eagerly(reason)

    def explain(self) -> str:
        """How the steps so far ran."""
        whole = sum(len(found) for step in self.steps.values() for found in step.programs.values())
        lines = [f"{whole} program(s) of {type(self.optimizer).__name__}.step"]
        return "\n".join([*lines, *(f"in eager PyTorch [{code}]: {why}" for code, why in self.reasons)])

    def note(self, code: str, reason: str) -> None:
        """Say why steps run in eager PyTorch."""
        step = f"{type(self.optimizer).__name__}.step"
        refuse_pieces(code, reason, step, self.asked)
        if (code, reason) not in self.reasons:
            self.reasons.append((code, reason))
        fall_in_pieces(code, reason, step, step)


class _Alone(GraphStep):
    """A whole step over an empty graph."""

    def __init__(self, of: OptimizerStep, n: int) -> None:
        graph = torch.fx.Graph()
        for i in range(n):
            graph.placeholder(f"parameter_{i}")
        graph.output(([],))
        gm = graph_module(graph)
        gm.meta["static_inputs"] = frozenset(range(n))
        update = Update(of.optimizer, None, None, 1, keep_grads=False)
        super().__init__(gm, None, update, of.compile_graph, _no_pieces, of.note, of.settings, None)
        self.of, self.step, self.numbers_inside = of, of.update, of.numbers_inside
        self.learning: list[torch.Tensor] = []
        self.noted_layout: Any = None
        self.result: Any = None  # of a step in eager

    def __call__(self, *tensors: torch.Tensor) -> Any:
        self.result = None
        if not self.update.began and not self.update.optimizer.state:
            self.update.began = make_state(self.update.optimizer)
        super().__call__(*tensors)
        return self.result

    def note_layouts(self, learning: list[torch.Tensor], grads: list[Any]) -> None:
        """Remember the layout of parameters and gradients, to compare at the next call."""
        own, given = tensor_layouts(learning), tensor_layouts(grads)
        self.learning, self.noted_layout = learning, None
        if isinstance(own, bytes) and isinstance(given, bytes):
            self.noted_layout = (
                own,
                frozenset(_storages(own, _starts(own))[0]),
                _starts(given),
                _storages(given, _starts(given))[1],
            )

    def lies_as_before(self, learning: list[torch.Tensor], grads: list[Any]) -> bool:
        """Whether all is laid out as noted, gradients anywhere outside of parameters' memory."""
        if self.noted_layout is None or not are_same(learning, self.learning):
            return False
        own, mine, starts, layouts = self.noted_layout
        given = tensor_layouts(grads)
        if not isinstance(given, bytes) or len(given) != len(layouts) or tensor_layouts(learning) != own:
            return False
        storages, rest = _storages(given, starts)
        return rest == layouts and mine.isdisjoint(storages)

    def _in_pieces(self, tensors: Sequence[torch.Tensor], forward: Any = None) -> list[Any]:
        self.update.began = True
        self.result = self.of.eagerly(self.why_not or "it makes or replaces state")
        return []

    def _run(self, bound: Any, tensors: Sequence[torch.Tensor], numbers: list[float]) -> Any:
        self.of.ops += bound.program.ops
        return super()._run(bound, tensors, numbers)

    def _step_hooks(self) -> bool:
        return self.of.hooked is None and super()._step_hooks()

    def _held(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
        if self._step_hooks():
            return self._refuse("DM503", "the optimizer has step hooks")
        return tuple(range(len(tensors)))


def _apart(
    original: Callable[..., Any], step: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """The update of an optimizer's `step` without the hooks around it, and these around `step`; the method
    itself and None where they cannot be told apart."""
    function: Any = getattr(original, "__func__", None)
    if not isinstance(original, types.MethodType) or not is_around_step(function):
        return original, None
    update = types.MethodType(function.__wrapped__, original.__self__)

    def run(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return update, torch.optim.Optimizer.profile_hook_step(run)


def _calls_hooks_again(original: Any) -> bool:
    """Whether a base of an optimizer's class has hooks around its `step`, too: PyTorch puts them there when
    it makes the first optimizer of that class, and `super().step()` then calls hooks once more. A base whose
    `step` is inherited has its hooks around the same function (AdamW made before Adam): none is called again.
    """
    own = inspect.unwrap(original.__func__)
    steps = [vars(cls).get("step") for cls in type(original.__self__).__mro__]
    return any(is_around_step(step) and inspect.unwrap(step) is not own for step in steps if step is not None)


def _calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step(closure)` is the closure with gradients enabled, then `step()`."""
    return _is_torchs(optimizer) and not isinstance(optimizer, torch.optim.LBFGS)


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def make_state(optimizer: torch.optim.Optimizer) -> bool:
    """Let an optimizer of PyTorch's make its state, as its first step does; False for others."""
    begin = getattr(type(optimizer), "_init_group", None)
    if begin is None or not _is_torchs(optimizer):
        return False
    lists = list(inspect.signature(begin).parameters)[2:]  # of parameters, gradients and states
    with torch.no_grad():
        for group in optimizer.param_groups:
            begin(optimizer, group, *([] for _ in lists))
    return True


def _plainly(reason: str, step: Callable[[], Any]) -> Any:
    return step()


def _takes(tensor: torch.Tensor) -> bool:
    """Whether programs take such a tensor."""
    return tensor.device.type in ("cpu", "cuda") and not tensor.is_sparse and not is_wrapper(tensor)


def _lies(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, None if tensor.is_sparse else tensor.stride(), tensor.dtype, tensor.device


def _starts(layouts: bytes) -> list[int]:
    """At which word each layout starts: (storage, lazy, dtype and device, ndim, *sizes, *strides)."""
    words, starts, at = memoryview(layouts).cast("q"), [], 0
    while at < len(words):
        starts.append(at)
        at += 4 + 2 * words[at + 3]
    return starts


def _storages(layouts: bytes, starts: list[int]) -> tuple[list[int], bytearray]:
    """The tensors' storages, and the layouts without them."""
    rest = bytearray(layouts)
    words = memoryview(rest).cast("q")
    storages = [words[at] for at in starts]
    for at in starts:
        words[at] = 0
    return storages, rest


def _no_pieces(gm: torch.fx.GraphModule, tensors: Any) -> Callable[..., Any]:
    raise AssertionError("an update alone has no forward")
