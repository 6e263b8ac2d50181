"""The recorder: writes every op of a traced run as functional aten nodes of one fx graph.

It stands below PyTorch's autograd, so the ops of the backward arrive here too. In-place ops become values
(`functional.py`), random ops draws from a seed (`randomness.py`), composites smaller ops
(`decompositions.py`).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ..base import compat
from ..base.compat import OpOverload
from ..base.errors import UserLine
from ..base.registry import Registry
from ..graph.custom_writes import functional_op, written_counts
from ..graph.kernel_checks import sees_twice
from ..graph.op_facts import VIEW_FORMS, facts, is_custom, written_names
from ..graph.result_strides import is_dense
from ..graph.save_policy import PolicyRun, SavePolicy
from ..graph.shape_tensor import DataDependent, ShapeTensor, UnsupportedOp, infer, recording, set_spec
from ..graph.shapes import infer_spec
from ..graph.size_nodes import SizeNodes
from ..graph.sizes import ShapeEnv, Size, equal, leaves_in
from ..graph.spec import CPU, TensorSpec, aten
from ..graph.sym_int import from_torch, to_torch
from . import inplace
from .functional import (
    LAZY_FLAGS,
    TracedAlias,
    TracedMemory,
    base,
    like,
    moved,
    read,
    slices_of,
    source_of,
    touch,
    write,
)
from .inplace import functional_form, refuse_overlap

# One row an op: (recorder, func, *args, **kwargs) -> result. `NotImplemented` leaves the case to the general
# rule.
record_rules: Registry[OpOverload, Any] = Registry("record")
record_rule = record_rules.register


class GraphRecorder:
    """Records ops on ShapeTensors into `graph`; `where` is noted on the nodes, `stage` too ("forward" or
    "backward").
    """

    backward_may_run_again = True

    def __init__(self, env: ShapeEnv | None = None) -> None:
        self.graph = torch.fx.Graph()
        self.sizes = None if env is None else SizeNodes(self.graph)
        self.where: UserLine | None = None
        self.stage = "forward"
        self.recompute: bool | SavePolicy = False  # whether the torch call is one of a checkpoint's
        self.policies: dict[SavePolicy, PolicyRun] = {}
        self.constants: list[tuple[torch.fx.Node, torch.Tensor]] = []
        self.seeds: dict[torch.device, ShapeTensor] = {}
        self.streams = 0
        self.made: list[
            tuple[int, torch.fx.Node]
        ] = []  # autograd's count of its nodes after each call of the torch graph
        self.applied: list[tuple[TracedAlias, torch.fx.Node]] = []  # views that custom functions gave
        self.failed: int | None = None  # the number of the autograd node whose backward could not be recorded
        # The gradient on which the next zeros depend, once for each of them.
        self.arrived: list[ShapeTensor] = []
        self.graded = False  # whether an input asks for a gradient
        self.once: list[torch.fx.Node] = []  # results of calls that a second derivative does not repeat
        self.wrote: list[torch.Tensor] = []  # by users' ops of the torch graph's node that runs
        self._constant_nodes: dict[int, TracedAlias] = {}
        self._last_placeholder: torch.fx.Node | None = None

    # -- inputs ----------------------------------------------------------------------------------------------
    def input(self, name: str, spec: TensorSpec | Size, requires_grad: bool = False) -> Any:
        """A placeholder and the ShapeTensor (for a symbol: the `torch.SymInt`) that stands for it."""
        if type(spec) is Size:
            assert self.sizes is not None
            self.sizes.bind(spec, self._placeholder(name, spec))
            return to_torch(spec)
        tensor = ShapeTensor.make(spec, requires_grad)
        tensor.note = self._input(name, spec)
        self.graded |= requires_grad
        return tensor

    def _placeholder(self, name: str, spec: TensorSpec | Size) -> torch.fx.Node:
        anchor = self._last_placeholder
        with (
            self.graph.inserting_after(anchor)
            if anchor is not None
            else self.graph.inserting_before(next(iter(self.graph.nodes)) if len(self.graph.nodes) else None)
        ):
            node = self.graph.placeholder(name)
        node.target = node.name  # unique, where `name` need not be
        node.meta["val"], node.meta["stage"] = spec, self.stage
        self._last_placeholder = node
        return node

    def _input(self, name: str, spec: TensorSpec) -> TracedAlias:
        node = self._placeholder(name, spec)
        return base(spec, node, input_node=node)

    def _constant(self, tensor: torch.Tensor) -> TracedAlias:
        """A real tensor met in the trace becomes an extra placeholder that is bound to it."""
        alias = self._constant_nodes.get(id(tensor))
        if alias is None:
            alias = self._constant_nodes[id(tensor)] = self._input("constant", TensorSpec.of(tensor))
            self.constants.append((read(alias, self.emit), tensor))
        return alias

    # -- nodes -----------------------------------------------------------------------------------------------
    def emit(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any = None
    ) -> torch.fx.Node:
        """A node for a functional op on nodes; `val` is inferred when not given."""
        if self.sizes is not None:
            args, kwargs = self.sizes.nodes(args), {k: self.sizes.nodes(v) for k, v in kwargs.items()}
        if val is None:
            val = infer_spec(
                func, _specs(args), {k: _specs(v) for k, v in kwargs.items()} if kwargs else kwargs
            )
        return self.add(func, args, kwargs, val)

    def add(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], val: Any
    ) -> torch.fx.Node:
        """A node for a call of a function, which gives `val`."""
        node = self.graph.create_node("call_function", func, args, kwargs)
        node.meta["val"] = val
        node.meta["stage"] = self.stage
        if self.recompute:
            node.meta["recompute"] = True
        where = self.where if self.stage != "backward" else self._line_of_running()
        if where is not None:
            node.meta["where"] = where
        return node

    def _line_of_running(self) -> UserLine | None:
        """The line whose backward PyTorch's engine runs now."""
        running = compat.current_node()
        at = (
            len(self.made)
            if running is None
            else bisect.bisect(self.made, running._sequence_nr(), key=operator.itemgetter(0))
        )
        return self.made[at][1].meta.get("where") if at < len(self.made) else None

    def _item(self, node: torch.fx.Node, index: int) -> torch.fx.Node:
        """One result of a multi-output op; made when it is first read."""
        made = self.add(operator.getitem, (node, index), {}, node.meta["val"][index])
        if "saved" in node.meta:
            _mark_saved(made)
        return made

    def alias_of(self, tensor: torch.Tensor) -> TracedAlias:
        """The alias that a tensor stands for."""
        if isinstance(tensor, ShapeTensor):
            UnsupportedOp.when(
                tensor.note is None, "DM240", "a tensor from outside the trace", cure="pass it as an argument"
            )
            return tensor.note
        return self._constant(tensor)

    def node_of(self, tensor: torch.Tensor) -> torch.fx.Node:
        """The node of a tensor's current value."""
        return read(self.alias_of(tensor), self.emit)

    def nodes(self, value: Any) -> Any:
        """Arguments with nodes in the place of tensors."""
        kind = type(value)
        if kind is ShapeTensor or isinstance(value, torch.Tensor):
            return self.node_of(value)
        return [self.nodes(v) for v in value] if kind is list or kind is tuple else value

    def tensor(self, node: torch.fx.Node) -> ShapeTensor:
        """A ShapeTensor for a node that gives new memory."""
        made = ShapeTensor.make(node.meta["val"])
        made.note = base(made.spec, node)
        return made

    def _outputs(self, node: torch.fx.Node) -> Any:
        """ShapeTensors for a node's result; getitem nodes are made when they are read."""
        val = node.meta["val"]
        if isinstance(val, TensorSpec):
            return self.tensor(node)
        if not isinstance(val, tuple):
            return val
        outs = []
        for index, spec in enumerate(val):
            if isinstance(spec, TensorSpec):
                made = ShapeTensor.make(spec)
                made.note = base(spec, None, get=functools.partial(self._item, node, index))
                outs.append(made)
            elif isinstance(spec, tuple):
                raise UnsupportedOp("DM239", f"{node.target} returns nested lists", cure="use another op")
            else:
                outs.append(to_torch(spec))
        return tuple(outs)

    # -- recording -------------------------------------------------------------------------------------------
    def record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one op and give its result."""
        try:
            if self.stage == "forward" and isinstance(self.recompute, SavePolicy):
                return self._record_by_policy(self.recompute, func, args, kwargs)
            return self._record(func, args, kwargs)
        except Exception:
            running = compat.current_node()
            self.failed = self.failed if running is None else running._sequence_nr()
            raise

    def _record_by_policy(
        self, policy: SavePolicy, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record one op of a selective checkpoint: its nodes are marked where the result is to be saved."""
        last = next(iter(reversed(self.graph.nodes)), None)
        result = self._record(func, args, kwargs)
        if policy not in self.policies:
            self.policies[policy] = policy.started()
        if func is not aten.detach.default and self.policies[policy].saves(func, args, kwargs, result):
            for node in itertools.takewhile(lambda node: node is not last, reversed(self.graph.nodes)):
                _mark_saved(node)
        return result

    def arrives(self, zeros: int, gradient: ShapeTensor) -> None:
        """A hook of a result whose gradient formula makes so many zeros without reading this gradient."""
        self.arrived = [gradient] * zeros

    def is_gradient(self, tensor: ShapeTensor) -> bool:
        """Whether the backward made it: zeros in its place depend on it, and where it is absent are none."""
        return self.stage == "backward" and self.node_of(tensor).meta.get("stage") == "backward"

    def forward_of_failed(self) -> torch.fx.Node | None:
        """The torch graph's node whose backward could not be recorded."""
        if self.failed is None:
            return None
        return next((node for after, node in self.made if self.failed < after), None)

    def refuse_late_draw(self, func: OpOverload) -> None:
        """A backward draws when it runs, each time anew: a recorded one would draw once, with the forward."""
        UnsupportedOp.when(
            self.stage == "backward" and self.backward_may_run_again,
            "DM251",
            f"a backward draws random numbers ({func})",
            cure="draw them in the forward and save them",
        )

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.sizes is not None:
            args, kwargs = from_torch(args), {k: from_torch(v) for k, v in kwargs.items()}
        about = facts(func)
        if about.random and "attention" not in func._schema.name:
            self.refuse_late_draw(func)
        rule = record_rules.get(func)
        if rule is not None:
            result = rule(self, func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if about.changes_metadata:
            return self._record_new_metadata(func, args, kwargs)
        if about.writes:
            return self._record_write(func, args, kwargs)
        return self._record_view(func, args, kwargs) if about.is_view else self.plain(func, args, kwargs)

    def plain(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the op as it is, whatever the rules say."""
        node = self.emit(
            func,
            tuple([self.nodes(a) for a in args]),
            {k: self.nodes(v) for k, v in kwargs.items()} if kwargs else {},
        )
        made = self._outputs(node)
        if func in _KEEP_HOLES:  # those of the tensor, which its present value may not have
            spec = infer_spec(
                func,
                tuple([self.alias_of(a).spec if isinstance(a, torch.Tensor) else a for a in args]),
                kwargs,
            )
            if not equal((spec.stride, spec.offset), (made.spec.stride, made.spec.offset)):
                made = ShapeTensor.make(spec)
                made.note = base(spec, node)
        return made

    def call(self, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """`record` with the op's own calling convention: what decompositions are written with."""
        return self.record(func, args, kwargs)

    def _record_view(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source, rest = args[0], args[1:]
        parent = self.alias_of(source)
        parent.memory.viewed = True
        value = source_of(func, parent, self.emit)
        have = value.meta["val"]
        node = self.emit(func, (value, *moved(func, rest, have.offset - parent.spec.offset)), kwargs)
        val = node.meta["val"]
        if (have.stride, have.offset) != (parent.spec.stride, parent.spec.offset):  # written, without holes
            val = infer_spec(func, (parent.spec, *rest), kwargs)
        memory = source.memory if isinstance(source, ShapeTensor) else None
        if isinstance(val, TensorSpec):
            return self._view(parent, memory, val, node, None, func, rest, kwargs)
        steps = slices_of(func, parent.spec, rest, kwargs, val)
        made = []
        for index, (spec, (step, step_args)) in enumerate(zip(val, steps, strict=True)):
            made.append(
                self._view(
                    parent,
                    memory,
                    spec,
                    None,
                    functools.partial(self._item, node, index),
                    step,
                    step_args,
                    {},
                )
            )
            made[-1].note.one_of = (index, func, rest, kwargs)
        return made

    def _view(
        self,
        parent: TracedAlias,
        memory: Any,
        spec: TensorSpec,
        node: torch.fx.Node | None,
        get: Any,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> ShapeTensor:
        made = ShapeTensor.make(spec, memory=memory)
        made.note = TracedAlias(
            parent.memory, spec, node, parent=parent, func=func, args=args, kwargs=kwargs, get=get
        )
        return made

    def _record_new_metadata(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ShapeTensor:
        """`t_` and its like: the tensor becomes a view of its former self."""
        UnsupportedOp.when(
            func not in VIEW_FORMS or not isinstance(args[0], ShapeTensor),
            "DM241",
            f"{func} changes a tensor's shape or storage in place",
            cure="use the out-of-place op",
        )
        memory = self.alias_of(args[0]).memory
        viewed, memory.turned = memory.viewed, memory.turned or memory.viewed
        view = self.record(VIEW_FORMS[func], args, kwargs)
        memory.viewed = viewed
        self._check_views(memory, written=not args[0]._is_view())  # autograd counts it as a write of the base
        args[0].note = view.note
        return set_spec(args[0], view.spec)

    def _check_views(self, memory: TracedMemory, written: bool) -> None:
        """Behind a write, autograd makes the history of a view again: with ShapeTensors by the view's op on
        its base as that is now. Where that got another shape in place, in eager by addresses.
        """
        UnsupportedOp.when(
            self.graded and memory.turned and (written or memory.version),
            "DM241",
            "a tensor whose memory other views show is written, and changes its shape in place",
            cure="use the out-of-place op",
        )

    def _record_custom_write(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A user's op that writes, as one that gives what would be written."""
        given = inplace.all_arguments(func, args, kwargs)
        counts = written_counts(func, given)
        form = functional_op(func, counts)
        written = [t for name in written_names(func) for t in leaves_in([given[name]]) if t is not None]
        tensors = [t for t in leaves_in(list(given.values())) if isinstance(t, ShapeTensor)]
        shown = Counter(self.alias_of(t).memory for t in tensors)
        UnsupportedOp.when(
            any(isinstance(t, ShapeTensor) and shown[self.alias_of(t).memory] > 1 for t in written),
            "DM229",
            f"{func} writes memory that another argument shares",
            cure="clone() the argument",
        )
        made = self.record(form, tuple(given.values()), {})
        results = list(made) if isinstance(made, (tuple, list)) else [made]
        new = results[: len(results) - len(written)]
        for target, value in zip(written, results[len(new) :], strict=True):
            self.assign(target, value)
        self.wrote += written
        return inplace.with_written(func, new, given)

    def _record_write(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.name.startswith(
            "aten::_foreach_"
        ):  # PyTorch's slow kernel writes one tensor after the other
            with recording(self):
                return func._op_dk(compat.composite_explicit, *args, **kwargs)
        if facts(func).writes == ("out",) and self._written_whole(func, args, kwargs):
            return kwargs["out"]
        try:
            form = functional_form(func)
        except UnsupportedOp:
            if is_custom(func):
                return self._record_custom_write(func, args, kwargs)
            raise
        self.refuse_overlap(form, args)
        result = self.record(form, _with_defaults(form, args), kwargs)
        self.assign(args[0], result)
        return args[0]

    def _written_whole(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Write the result of `func` into its `out`, where that has the result's own size and type."""
        out, form = kwargs["out"], inplace.without_out(func)
        if form is None or facts(form).random or not isinstance(out, ShapeTensor):
            return False
        rest = {name: value for name, value in kwargs.items() if name != "out"}
        self.refuse_overlap(form, (out, *leaves_in([args, rest])))
        result = self.record(form, args, rest)
        if not isinstance(result, ShapeTensor) or (result.shape, result.dtype) != (out.shape, out.dtype):
            return False
        self.assign(out, result)
        return True

    def refuse_overlap(self, func: OpOverload, args: tuple[Any, ...]) -> None:
        """Leave writes that eager refuses to eager. Of symbolic sizes it asks, which makes guards."""
        if isinstance(args[0], ShapeTensor):
            target, *others = [self.alias_of(a) for a in args if isinstance(a, ShapeTensor)]
            refuse_overlap(
                func, target.spec, [other.spec for other in others if other.memory is target.memory]
            )

    def assign(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Make `value` the contents of `target`, as `target.copy_(value)` does."""
        UnsupportedOp.when(
            not isinstance(target, ShapeTensor),
            "DM237",
            "a write into a tensor made of constants",
            cure="clone it first",
        )
        alias = self.alias_of(target)
        if sees_twice(alias.memory.base.spec):  # also the elements that the view leaves out change
            raise UnsupportedOp(
                "DM229",
                "a write into memory that an input sees more than once",
                cure="clone() the tensor first",
            )
        source = self.node_of(value)
        if source is read(alias, self.emit):
            touch(alias)
        else:
            write(alias, like(source, alias.spec, lambda: read(alias, self.emit), self.emit), self.emit)
        self._check_views(alias.memory, written=True)


def _with_defaults(form: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments that the in-place op defaults and its functional form requires (bernoulli's p)."""
    return (*args, 0.5) if form is aten.bernoulli.p and len(args) == 1 else args


# Their result has the argument's memory layout, holes between elements included.
_KEEP_HOLES = frozenset(
    (aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default)
)


def _specs(value: Any) -> Any:
    kind = type(value)
    if kind is torch.fx.Node:
        return value.meta["val"]
    return kind([_specs(v) for v in value]) if kind is list or kind is tuple else value


@record_rule(aten.detach.default, aten.alias.default)
def _same_value(recorder: GraphRecorder, func: OpOverload, source: torch.Tensor) -> ShapeTensor:
    alias = recorder.alias_of(source)
    made = ShapeTensor.make(alias.spec, memory=source.memory if isinstance(source, ShapeTensor) else None)
    made.note = alias
    return made


@record_rule(aten.lift_fresh.default, aten.lift.default)
def _lift(recorder: GraphRecorder, func: OpOverload, source: torch.Tensor) -> ShapeTensor:
    """A literal of the traced program: scalars, and what has no elements, are folded into the graph, others
    become bound placeholders.
    """
    if isinstance(source, ShapeTensor):
        return _same_value(recorder, func, source)
    if source.numel() <= 1:
        value = source.item() if source.numel() else 0
        return recorder.call(
            aten.full.default, list(source.shape), value, dtype=source.dtype, device=source.device
        )
    return recorder.call(aten.clone.default, source)


@record_rule(aten._local_scalar_dense.default, aten.equal.default, aten._fused_sdp_choice.default)
def _answers(recorder: GraphRecorder, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Ops that give plain numbers, not tensors."""
    return infer(func, args, kwargs)


@record_rule(aten.mkldnn_rnn_layer_backward.default)
def _opaque_workspace(recorder: GraphRecorder, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The forward hands it a buffer whose size no shape rule knows."""
    raise UnsupportedOp(
        "DM238", f"{func} needs oneDNN's own workspace", cure="train RNNs in float64, or uncompiled"
    )


@record_rule(aten._conj.default, aten._neg_view.default)
def _lazy_sign(recorder: GraphRecorder, func: OpOverload, source: torch.Tensor | complex) -> Any:
    """Lazy conjugates and negatives are views with a flag; here they are values, computed."""
    if isinstance(source, complex):  # of a formula of gradients: a number reaches Python without its tensor
        value = source.conjugate() if func is aten._conj.default else -source
        return recorder.call(aten.scalar_tensor.default, value, dtype=torch.complex128, device=CPU)
    parent = recorder.alias_of(source)
    node = recorder.emit(LAZY_FLAGS[func], (read(parent, recorder.emit),), {})
    return recorder._view(
        parent,
        source.memory if isinstance(source, ShapeTensor) else None,
        node.meta["val"],
        node,
        None,
        func,
        (),
        {},
    )


@record_rule(aten.copy_.default)
def _copy(
    recorder: GraphRecorder,
    func: OpOverload,
    target: torch.Tensor,
    source: torch.Tensor,
    non_blocking: bool = False,
) -> torch.Tensor:
    recorder.refuse_overlap(func, (target, source))
    recorder.node_of(source).meta["copied"] = True  # its value is in two tensors: eager may save either
    recorder.assign(target, source)
    return target


@record_rule(aten.zero_.default)
def _zero(recorder: GraphRecorder, func: OpOverload, target: ShapeTensor) -> torch.Tensor:
    return _fill(recorder, func, target, 0)


@record_rule(aten.fill_.Scalar)
def _fill(recorder: GraphRecorder, func: OpOverload, target: ShapeTensor, value: Any) -> torch.Tensor:
    spec = target.spec
    recorder.assign(
        target,
        recorder.call(aten.full.default, list(spec.shape), value, dtype=spec.dtype, device=spec.device),
    )
    return target


@record_rule(aten.fill_.Tensor, aten.fill.Tensor)
def _fill_with_tensor(
    recorder: GraphRecorder, func: OpOverload, target: ShapeTensor, value: torch.Tensor
) -> torch.Tensor:
    filled = recorder.call(aten.expand.default, value, list(target.shape))
    if func is aten.fill_.Tensor:
        recorder.assign(target, filled)
        return target
    return recorder.call(aten.copy.default, target, filled)


@record_rule(aten.as_strided.default)
def _as_strided(
    recorder: GraphRecorder,
    func: OpOverload,
    source: torch.Tensor,
    size: Any,
    stride: Any,
    offset: int | None = None,
) -> Any:
    """as_strided addresses the storage, so its parent is the base of the memory."""
    alias = recorder.alias_of(source)
    if alias.parent is None or not isinstance(source, ShapeTensor):
        return NotImplemented
    UnsupportedOp.when(
        alias.memory.input is not None or not is_dense(alias.memory.base.spec),
        "DM237",
        "as_strided on a view of an input or of memory with holes",
        cure="use select, slice or view",
    )
    whole = ShapeTensor.make(alias.memory.base.spec, memory=source.memory)
    whole.note = alias.memory.base
    view = recorder._record_view(
        func, (whole, size, stride, source.spec.offset if offset is None else offset), {}
    )
    view.note.asked = alias
    return view


@record_rule(aten.as_strided_copy.default)
def _as_strided_copy(
    recorder: GraphRecorder, func: OpOverload, source: torch.Tensor, *place: Any, **named: Any
) -> Any:
    """A copy of such a view: its elements may be outside of `source`, which is the only tensor known
    there.
    """
    view = _as_strided(recorder, aten.as_strided.default, source, *place, **named)
    if view is NotImplemented:
        return view
    return recorder.call(aten.clone.default, view, memory_format=torch.contiguous_format)


__all__ = ["DataDependent", "GraphRecorder", "record_rule", "record_rules"]


def _mark_saved(node: torch.fx.Node) -> None:
    node.meta.pop("recompute", None)
    node.meta["saved"] = True
