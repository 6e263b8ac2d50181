"""What every program of a step relies on in the optimizer and the scaler: their structure, by which programs
are kept, and guards that say, in C, that the objects are still those that a program is bound to.

>>> facts = Facts.of(optimizer, scaler, inputs, alone=False)
>>> programs[facts.structure]; facts.hold()
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .. import _C
from ..capture.dispatch import compile_program
from ..capture.guards import (
    Absent,
    Ambient,
    Apart,
    ConstEquals,
    DictKeys,
    Guard,
    IdIs,
    Length,
    TensorIs,
    TensorMatch,
    TypeIs,
    is_constant,
    memory_range,
)
from ..capture.source import Attr, Const, DictItem, InstanceDict, SeqItem, Source, TypeAttr, lookup_type_attr
from ..graph.tensor_subclass import WrapperSpec, is_wrapper
from .step_trace import NotWhole, Path

_ZERO_GRAD = torch.optim.Optimizer.zero_grad
# Methods of a scaler that programs do instead of calling them.
_OF_SCALERS = """scale unscale_ step update _unscale_grads_ _maybe_opt_step is_enabled
    _check_scale_growth_tracker _lazy_init_scale_growth_tracker""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Facts:
    """structure: equal ones take the same programs. numbers: where Python numbers are, with their types: they
    may change at each step, so that guards on the objects would move at each step too.
    """

    structure: Any
    program: _C.GuardProgram
    optimizer: torch.optim.Optimizer
    parameters: tuple[torch.Tensor, ...]
    numbers: tuple[tuple[Path, Any], ...]

    @staticmethod
    def of(
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        inputs: Mapping[int, int],
        *,
        alone: bool,
    ) -> Facts:
        """The facts of now. `inputs`: numbers of the captured graph's inputs, by identity. `alone`: an update
        without forward and backward. NotWhole where a method that no program calls is not PyTorch's own.
        """
        walk = _Walk()
        root = Const(optimizer, "optimizer")
        own = InstanceDict(root)
        groups = walk.groups(DictItem(own, "param_groups"), optimizer.param_groups)
        parameters = tuple(p for group in optimizer.param_groups for p in group["params"])
        walk.places = {id(p): k for k, p in enumerate(parameters)}
        state = walk.state(DictItem(own, "state"), optimizer.state)
        if not alone:
            walk.is_stock(root, optimizer, "zero_grad", _ZERO_GRAD)
        places = tuple(map(inputs.get, walk.tensors))
        # A captured forward has guards on PyTorch's modes (autocast, grad mode, ...) of its own.
        modes = [Ambient.current()] if alone else []
        structure = type(optimizer), groups, state, walk.scaler(scaler), places, *modes
        if walk.tensors:
            NotWhole.when(_overlap(walk.tensors), "DM505", "parameters or state share memory")
            sources = tuple(walk.sources)
            walk.rows.append(Apart(sources[0], sources[1:], len(sources)))
        program = compile_program([*walk.rows, *modes], [])
        return Facts(structure, program, optimizer, parameters, tuple(walk.numbers))

    def hold(self) -> bool:
        """Whether all is as it was."""
        return self.program.check(()) is not None and all(
            _kind(self.value(path)) == kind for path, kind in self.numbers
        )

    def home(self, path: Path) -> tuple[Any, Any]:
        """The container at the end of a path, and the key in it."""
        kind, place, *rest = path
        if kind == "group":
            home: Any = self.optimizer.param_groups[place]
        else:
            home = self.optimizer.state
            rest = [self.parameters[place] if isinstance(place, int) else place, *rest]
        for key in rest[:-1]:
            home = _item(home, key)
        return home, rest[-1]

    def value(self, path: Path) -> Any:
        """The present value at a path."""
        home, key = self.home(path)
        return _item(home, key)


class _Walk:
    """Collects guards, and gives for each value what stands for it in the structure."""

    def __init__(self) -> None:
        self.rows: list[Guard] = []
        self.numbers: list[tuple[Path, Any]] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self.order: dict[int, int] = {}
        self.sources: list[Source] = []
        self.places: dict[int, int] = {}

    def groups(self, source: Source, groups: Any) -> Any:
        """The groups: which parameters are in each, and its options."""
        self.rows += [TypeIs(source, type(groups)), Length(source, len(groups))]
        found = []
        for k, group in enumerate(groups):
            held = SeqItem(source, k)
            self.rows += [TypeIs(held, type(group)), DictKeys(held, tuple(group))]
            parameters = self.value(DictItem(held, "params"), group["params"], (), True)
            options = [
                (key, self.value(DictItem(held, key), value, ("group", k, key), False))
                for key, value in group.items()
                if key != "params"
            ]
            found.append((parameters, *options))
        return tuple(found)

    def state(self, source: Source, state: Any) -> Any:
        """The state, by the parameter's number."""
        self.rows += [TypeIs(source, type(state)), DictKeys(source, tuple(state))]
        found: list[Any] = []
        for key, entries in state.items():
            place = self.places.get(id(key)) if isinstance(key, torch.Tensor) else key
            if isinstance(key, torch.Tensor) and place is None:
                found.append("of a parameter that has left")
                continue
            found.append((place, self.value(DictItem(source, key), entries, ("state", place), True)))
        return tuple(found)

    def value(self, source: Source, value: Any, path: Path, whole: bool) -> Any:
        """Any value; `whole`: integers are counts, not settings."""
        if isinstance(value, torch.Tensor):
            return self.tensor(source, value, whole)
        kind = _kind(value)
        if kind is float or type(kind) is tuple or whole and kind is int:
            self.numbers.append((path, kind))
            return kind
        if type(value) in (list, tuple):
            self.rows += [TypeIs(source, type(value)), Length(source, len(value))]
            inner = [self.value(SeqItem(source, k), v, (*path, k), whole) for k, v in enumerate(value)]
            return type(value), *inner
        if type(value) is dict:
            self.rows += [TypeIs(source, dict), DictKeys(source, tuple(value))]
            items = [(k, self.value(DictItem(source, k), v, (*path, k), whole)) for k, v in value.items()]
            return dict, *items
        if is_constant(value):
            self.rows.append(ConstEquals(source, value))
            return type(value), value
        self.rows.append(IdIs(source, value))
        return "an object", id(value)

    def tensor(self, source: Source, tensor: torch.Tensor, of_state: bool) -> Any:
        """A tensor: which of the tensors so far it is, and how it is laid out."""
        if is_wrapper(tensor):
            return self.wrapper(source, tensor, of_state)
        NotWhole.when(
            of_state and id(tensor) in self.tensors, "DM505", "two parameters, or two states, are one tensor"
        )
        self.rows.append(TensorIs.of(source, tensor))
        if tensor.layout is not torch.strided:
            return tensor.layout, type(tensor)
        if id(tensor) not in self.tensors:
            self.tensors[id(tensor)] = tensor
            self.sources.append(source)
        row = TensorMatch.of(source, tensor)
        self.rows.append(row)
        facts = row.cls, row.shape, row.stride, row.dtype, row.device, row.requires_grad, row.keys
        return self.order.setdefault(id(tensor), len(self.order)), facts

    def wrapper(self, source: Source, tensor: torch.Tensor, of_state: bool) -> tuple[object, ...]:
        """A tensor of a wrapper subclass: its class and context, and the tensors inside of it."""
        spec = WrapperSpec.of(tensor)
        parts = [getattr(tensor, name) for name in spec.names]
        held = not all(isinstance(part, torch.Tensor) for part in parts)  # a DTensor holds its mesh
        NotWhole.when(held, "DM502", f"a {type(tensor).__name__} is trained")
        self.rows.append(IdIs(source, tensor))
        inner = [self.tensor(Attr(source, name), x, of_state) for name, x in zip(spec.names, parts)]
        return spec.cls, spec.names, repr(spec.context), *inner

    def is_stock(self, root: Const, owner: Any, name: str, stock: Any = None) -> None:
        """A method that programs do instead of calling it."""
        own, inherited = DictItem(InstanceDict(root), name), TypeAttr(Const(type(owner), str(root)), name)
        found = lookup_type_attr(type(owner), name)
        module = found.__globals__["__name__"] if type(found) is types.FunctionType else ""
        amp = module.startswith(("torch.amp.", "torch.cuda.amp.", "torch.cpu.amp."))
        is_stock = amp if stock is None else found is stock
        NotWhole.when(
            not is_stock or name in vars(owner),
            "DM510",
            f"{type(owner).__name__}.{name} is not PyTorch's own",
        )
        self.rows += [Absent(own), IdIs(inherited, found)]

    def scaler(self, scaler: torch.amp.GradScaler | None) -> Any:
        """Of a scaler: its methods, and the scale."""
        if scaler is None:
            return None
        root = Const(scaler, "scaler")
        for name in _OF_SCALERS:
            self.is_stock(root, scaler, name)
        if not scaler.is_enabled():
            return "scaler, off"
        scale = DictItem(InstanceDict(root), "_scale")
        return "scaler", self.value(scale, scaler._scale, (), False)


def _item(container: Any, key: object) -> object:
    """An item of a container, or a tensor inside of a wrapper."""
    return getattr(container, str(key)) if isinstance(container, torch.Tensor) else container[key]


def _kind(value: Any) -> Any:
    """The type of a number, or the types in a tuple of floating numbers."""
    if type(value) is tuple and value and all(type(v) is float for v in value):
        return tuple, len(value)
    return type(value)


def _overlap(tensors: dict[int, torch.Tensor]) -> bool:
    """Whether any two of the tensors share memory."""
    ranges = sorted(r for r in map(memory_range, tensors.values()) if r[0] < r[1])
    return any(a[1] > b[0] for a, b in zip(ranges, ranges[1:]))
