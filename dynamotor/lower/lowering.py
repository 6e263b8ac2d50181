"""Lowering: walks an aten graph, asks one rule an op, and collects loop nodes and extern calls in order.

A rule is `@lowering(aten.relu.default) def _(ctx, x): return ctx.pointwise(lambda e: ..., x)`. It gets
`Value`s for tensors and plain Python for the rest, returns a Value, a tuple of them or a number, and raises
`Decline` to leave the op to aten. An op without a rule is an aten call too: counted in counters["fallback"],
never an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..base.config import config
from ..base.errors import InternalError
from ..base.events import counters, emit
from ..base.registry import Registry
from ..graph.info import GraphInfo
from ..graph.kernel_checks import sees_twice
from ..graph.layout import preserved_stride
from ..graph.nodes import arguments, function, operand, overload, spec_of
from ..graph.sizes import Dim, ShapeEnv, Size, equal, hint, leaves_in
from ..graph.spec import TensorSpec, contiguous_stride, numel
from .extern import BY_DESIGN, OUT_VARIANTS, Materialized, aten_call_target, is_layout_agnostic
from .index import Index, Var, is_one, is_zero
from .ir import (
    COMPUTE_TYPE,
    Body,
    Expr,
    ExternNode,
    Node,
    ReduceKind,
    cast,
    compare,
    const,
    loads_of,
    op,
    round_to,
    select,
    total_cost,
    walk,
)
from .program import Buffer, BufferKind, BufRef, ExternStep
from .value import Value, expand, is_dense

lowerings: Registry[Any, Callable[..., Any]] = Registry("lowering")
lowering = lowerings.register
Scalar = int | float | bool

# A value read in several places is computed again in each when it costs no more than this, otherwise it is
# kept.
CHEAP_COST, CHEAP_LOADS = 6, 2
# In half precision keeping rounds: a residual stream that is added up again from more parts is rounded less
# often.
CHEAP_HALF_COST, CHEAP_HALF_LOADS = 8, 4
# An expression larger than this becomes real even with one reader, so that kernels stay of a size that
# compiles fast.
MAX_COST, MAX_LOADS = 400, 12
COPY_ = torch.ops.aten.copy_.default
CLONE, CLONE_OUT = torch.ops.aten.clone.default, torch.ops.aten.clone.out
# Views pass their readers' count on to what they view.
VIEW_OPS = frozenset(
    [
        "view",
        "reshape",
        "_unsafe_view",
        "permute",
        "transpose",
        "t",
        "expand",
        "squeeze",
        "unsqueeze",
        "slice",
        "select",
        "alias",
        "detach",
        "split",
        "split_with_sizes",
        "unbind",
        "chunk",
    ]
)


# Ops that look at the shape alone of one operand.
SHAPE_ONLY: dict[Any, int] = {torch.ops.aten.nll_loss_backward.default: 1}

NEUTRAL: dict[str, int] = {"sum": 0, "prod": 1, "any": 0, "all": 1}


class Decline(Exception):
    """Raised by a rule that leaves this call to aten; the text says why."""


class Lowering:
    """The state of lowering one graph: buffers, loop nodes and extern calls so far."""

    def __init__(self, info: GraphInfo, env: ShapeEnv | None = None) -> None:
        self.info, self.env, self.is_symbolic = info, env, env is not None
        self.buffers: dict[str, Buffer] = {}
        self.schedule: list[Node | ExternNode] = []
        self.uses: dict[fx.Node, int] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        self.outputs: frozenset[fx.Node] = frozenset()
        self.node: fx.Node  # that is being lowered, and its spec
        self.spec: Any = None
        self.mutated: list[str] = []
        self.values: dict[str, BufRef] = {}
        self.on_gpu = config.target == "triton"  # or some tensor of the graph lies on one
        self._names: Counter[str] = Counter()

    # -- names and buffers -----------------------------------------------------------------------------------
    def new_buffer(
        self,
        spec: TensorSpec,
        kind: BufferKind = "temp",
        name: str | None = None,
        value: torch.Tensor | None = None,
    ) -> Buffer:
        """A buffer with a name of its own."""
        name = name or f"buf{len(self.buffers)}"
        self.buffers[name] = buffer = Buffer(name, spec, kind, value)
        return buffer

    # -- building values -------------------------------------------------------------------------------------
    def pointwise(
        self,
        fn: Callable[..., Expr],
        *inputs: Value | Scalar,
        shape: Sequence[Dim] | None = None,
        dtype: torch.dtype | None = None,
        compute: torch.dtype | None = None,
        common: torch.dtype | None = None,
    ) -> Value:
        """fn of the inputs' elements, broadcast to `shape`; operands come in `compute`, the result is cast to
        `dtype`.

        Defaults: shape and dtype of the aten result, compute type of that dtype. common: what aten converts
        operands to first (default `dtype`): integers wrap there, as a number that is too large for a tensor of
        uint8 does.
        """
        shape = tuple(self.spec.shape if shape is None else shape)
        dtype = dtype or self.spec.dtype
        compute = compute or COMPUTE_TYPE[dtype]
        common = common or dtype
        narrow = COMPUTE_TYPE[common] is not common and not common.is_floating_point
        rounded = "rounded" in self.node.meta  # by the partition
        operands: list[Value | Expr] = []
        for x in inputs:
            if isinstance(x, Value):
                if not equal(x.shape, shape) and hint(numel(x.shape)) < hint(numel(shape)):
                    self.keep_if_heavy(x)
                operands.append(expand(x, shape))
            else:
                operands.append(round_to(const(x, compute), common) if narrow else const(x, compute))
        result = COMPUTE_TYPE[dtype]

        def operand(x: Value, index: tuple[Index, ...]) -> Expr:
            e = cast(x.at(index), compute)
            wraps = narrow and x.dtype not in (common, torch.bool) and not x.dtype.is_floating_point
            return round_to(e, common) if wraps else e

        def body(index: tuple[Index, ...]) -> Expr:
            values = [operand(x, index) if isinstance(x, Value) else x for x in operands]
            return self.finish(cast(fn(*values), result), dtype, rounded)

        return Value(shape, dtype, body)

    @staticmethod
    def finish(e: Expr, dtype: torch.dtype, rounded: bool) -> Expr:
        """Wrap narrow integers always, round half precisions where asked to, at each op under `config.exact`."""
        wide = COMPUTE_TYPE[dtype] is dtype or (dtype.is_floating_point and not (rounded or config.exact))
        return e if wide else round_to(e, dtype)

    def generate(
        self,
        fn: Callable[[tuple[Index, ...]], Expr],
        shape: Sequence[Dim] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Value:
        """A value from a function of the index; the function gives the compute type of `dtype`."""
        return Value(self.spec.shape if shape is None else shape, dtype or self.spec.dtype, fn)

    def reduce(
        self,
        kind: ReduceKind,
        x: Value,
        dims: Iterable[int],
        *,
        keepdim: bool = False,
        dtype: torch.dtype | None = None,
        fn: Callable[[Expr], Expr] | None = None,
        compute: torch.dtype | None = None,
    ) -> Value:
        """Reduce some dimensions. `fn` maps each element (in `compute`, default that of `dtype`) first."""
        rank = len(x.shape)
        gone = sorted({d % rank for d in dims}) if rank else []
        kept = [d for d in range(rank) if d not in gone]
        dtype = dtype or x.dtype
        compute = compute or COMPUTE_TYPE[dtype]
        shape, reduced = tuple(x.shape[d] for d in kept), tuple(x.shape[d] for d in gone)
        if any(map(is_zero, reduced)):  # nothing to go through: the neutral element
            if kind not in NEUTRAL:
                raise Decline(f"{kind} of nothing")
            e = const(NEUTRAL[kind], COMPUTE_TYPE[dtype])
            return Value(
                tuple(1 if d in gone else x.shape[d] for d in range(rank)) if keepdim else shape,
                dtype,
                lambda index: e,
            )
        order = [kept.index(d) if d in kept else len(kept) + gone.index(d) for d in range(rank)]
        full = tuple(1 if d in gone else x.shape[d] for d in range(rank))
        picked = picked_element(x, gone[0]) if kind == "sum" and len(gone) == 1 and fn is None else None
        if picked is not None:  # a sum of zeros and one element is that element
            at, d = picked, gone[0]

            def body_of_picked(index: tuple[Index, ...]) -> Expr:
                return cast(at((*index[:d], *index[d + 1 :]) if keepdim else index), COMPUTE_TYPE[dtype])

            return Value(full if keepdim else shape, dtype, body_of_picked)

        def body(index: tuple[Index, ...]) -> Expr:
            e = cast(x.at(tuple(index[p] for p in order)), compute)
            return fn(e) if fn else e

        buffer = self.new_buffer(TensorSpec.dense(shape, dtype))
        self.add(
            Node(buffer.name, shape, body, buffer.spec.stride, dtype, kind, reduced, origin=str(self.node))
        )
        result = Value(shape, dtype, ref=BufRef.whole(buffer))
        if keepdim:
            stride = contiguous_stride(full)
            result = Value(full, dtype, ref=BufRef(buffer.name, full, stride, 0, dtype))
        return result

    def add(self, node: Node | ExternNode) -> None:
        """Append to the schedule."""
        if isinstance(node, Node):
            node.evaluate()
        self.schedule.append(node)

    # -- making values real ----------------------------------------------------------------------------------
    def realize(self, x: Value, stride: Sequence[Dim] | None = None) -> BufRef:
        """Give the value memory (with these strides when it is made now) and say where it lies."""
        ref = x.ref
        if ref is not None:
            return ref
        root = x.root()
        if root is not x and root.ref is None:
            self.realize(root)
            if x.ref is not None:
                return x.ref
        stride = tuple(stride or x.stride or contiguous_stride(x.shape))
        spec = TensorSpec(x.shape, stride, x.dtype)
        if not is_dense(spec):
            spec = TensorSpec.dense(x.shape, x.dtype)
        buffer = self.new_buffer(spec)
        body = x.base_body() if x.body is None else x.body
        self.add(Node(buffer.name, x.shape, body, spec.stride, x.dtype, origin=x.origin or str(self.node)))
        ref = BufRef.whole(buffer)
        x.become(ref)
        return ref

    def copy(self, x: Value, stride: Sequence[Dim]) -> BufRef:
        """A new buffer with exactly these strides, holding x."""
        spec = TensorSpec(x.shape, tuple(stride), x.dtype)
        buffer = self.new_buffer(spec)
        if x.dtype in COMPUTE_TYPE:
            self.add(Node(buffer.name, x.shape, x.at, spec.stride, x.dtype, origin=f"copy for {self.node}"))
        else:
            ref = self.realize(x)
            step = ExternStep(CLONE, (ref,), {}, (buffer.name,), CLONE_OUT)
            self.add(ExternNode(step, frozenset({ref.name}), (buffer.name,)))
        return BufRef.whole(buffer)

    def probe(self, x: Value) -> Expr:
        """The value's expression at an index of its own variables."""
        return x.at(tuple(Index.of(Var(f"p{d}", n)) for d, n in enumerate(x.shape)))

    def keep(self, x: Value) -> Value:
        """Make x real unless computing it again is cheap: for rules that read it in several loops."""
        if x.ref is None:
            if not _is_cheap(x, self.probe(x)):
                self.realize(x)
        return x

    def whole(self, x: Value) -> Value:
        """x, made real if it reads at computed positions: who reads a part of it would not look at the other
        positions.
        """
        if x.ref is None and any(e.op == "wrap_index" for e in walk(self.probe(x))):
            self.realize(x)
        return x

    def keep_if_heavy(self, x: Value) -> None:
        """Make x real when it costs more than a few additions: for readers that are larger than it."""
        if x.ref is None and total_cost(self.probe(x)) > CHEAP_COST:
            self.realize(x)

    def settle(self, x: Value, node: fx.Node) -> None:
        """Decide, when an op's value is made, whether it becomes real."""
        spec = node.meta["val"]
        if x.body is None:
            if node in self.outputs and x.ref is None:
                self.realize(x, spec.stride)
            return
        x.stride, x.origin = spec.stride, str(node)
        readers = self.readers[node]
        if node in self.outputs:
            self.realize(x)
            return
        if not readers:
            return
        e = self.probe(x)
        cost, count = total_cost(e), len(loads_of(e))
        shared = len(readers) > 1 and (not _is_cheap(x, e) or any(_is_call(r) for r in readers))
        if shared or cost > MAX_COST or count > MAX_LOADS:
            self.realize(x)

    # -- aten calls ------------------------------------------------------------------------------------------
    def extern(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        *,
        specs: Any = None,
        fallback: bool = False,
        agnostic: bool = False,
    ) -> Any:
        """Call aten. Gives Values like the call's results (specs: their TensorSpecs, default the current
        op's).
        """
        specs = self.spec if specs is None else specs
        reads: set[str] = set()

        def convert(x: Any) -> Any:
            if not isinstance(x, Value):
                return x
            ref = self.realize(x)
            if not agnostic and x.stride is not None and not _same_layout(ref, x.stride):
                ref = self.copy(x, x.stride) if is_dense(TensorSpec(x.shape, x.stride, x.dtype)) else ref
            reads.add(ref.name)
            return ref

        is_value = lambda x: isinstance(x, Value)  # noqa: E731
        new_args = pytree.tree_map(convert, tuple(args), is_leaf=is_value)
        new_kwargs = pytree.tree_map(convert, dict(kwargs or {}), is_leaf=is_value)
        flat = list(specs) if isinstance(specs, (tuple, list)) else [specs]
        out_variant = OUT_VARIANTS.get(target) if len(flat) == 1 and isinstance(flat[0], TensorSpec) else None
        call = target if out_variant is not None else aten_call_target(target)
        values: list[Any] = []
        outs: list[str | None] = []
        for spec in flat:
            if isinstance(spec, TensorSpec):
                stride = preserved_stride(spec) if isinstance(call, Materialized) else spec.stride
                buffer = self.new_buffer(TensorSpec(spec.shape, stride, spec.dtype, spec.device))
                values.append(Value(spec.shape, spec.dtype, ref=BufRef.whole(buffer)))
                outs.append(buffer.name)
            elif spec is None or type(spec) is Size and str(target).startswith("aten."):
                values.append(spec)  # lengths, that attention of a GPU hands on to its gradient
                outs.append(None)
            elif type(spec) is Size:
                raise Decline("a size that an op computes")
            else:
                buffer = self.new_buffer(
                    TensorSpec((), (), torch.float64 if isinstance(spec, float) else torch.int64)
                )
                values.append(NumberResult(buffer.name))
                outs.append(buffer.name)
        numbers = tuple(value.name for value in values if isinstance(value, NumberResult))
        where = self.node.meta.get("where")
        step = ExternStep(call, new_args, new_kwargs, tuple(outs), out_variant, (), fallback, numbers, where)
        self.add(ExternNode(step, frozenset(reads), tuple(o for o in outs if o)))
        return tuple(values) if isinstance(specs, (tuple, list)) else values[0]

    def fallback(self, node: fx.Node, args: Any, kwargs: Any, why: str) -> Any:
        """Leave the op to aten, and say so."""
        name = str(node.target)
        counters["fallback"][name] += 1
        emit("fallback", op=name, why=why, node=str(node))
        return self.extern(node.target, args, kwargs, fallback=True, agnostic=is_layout_agnostic(node.target))

    # -- the walk --------------------------------------------------------------------------------------------
    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Lower one call_function node."""
        rule = lowerings.get(node.target)
        if rule is None:
            return self.fallback(node, args, kwargs, "no lowering")
        if any(isinstance(a, NumberResult) for a in leaves_in((args, kwargs))):
            return self.fallback(node, args, kwargs, "a number computed at run time")
        any_dtype = overload(node).overloadpacket.__name__ in VIEW_OPS or node.target in BY_DESIGN
        if not any_dtype and any(dtype not in COMPUTE_TYPE for dtype in _dtypes(node, args)):
            return self.fallback(node, args, kwargs, "a dtype that loop kernels do not have")
        try:
            return rule(self, *args, **kwargs)
        except Decline as why:
            return self.fallback(node, args, kwargs, str(why))
        except (
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
            ValueError,
        ) as error:  # a rule that does not know this call
            if config.verify:
                raise
            return self.fallback(node, args, kwargs, f"the rule failed: {error!r}")


def _is_call(node: fx.Node) -> bool:
    """Whether the node becomes an aten call (or the output), which reads memory."""
    return node.target in BY_DESIGN or node.target not in lowerings


def _dtypes(node: fx.Node, args: Any) -> list[torch.dtype]:
    """The dtypes that an op reads and gives."""
    leaves = leaves_in((args, node.meta["val"]))
    return [leaf.dtype for leaf in leaves if isinstance(leaf, Value | TensorSpec)]


def picked_element(x: Value, dim: int) -> Body | None:
    """For a value that is zero but at one computed position along `dim`: that element, as a function of the
    other indices.
    """
    recipe, along = x.recipe, Var("along", x.shape[dim])
    if recipe is None or along.single:
        return None

    def element(index: tuple[Index, ...]) -> Expr | None:
        e = recipe((*index[:dim], Index.of(along), *index[dim:]))
        if e.op != "select" or e.args[0].op != "eq" or e.args[2].op != "const" or e.args[2].args[0] != 0:
            return None
        (here, place), value = e.args[0].args, e.args[1]
        if (
            here.op != "index"
            or here.args[0] != Index.of(along)
            or along in place.vars
            or along in value.vars
        ):
            return None
        inside = op(
            "and",
            compare("ge", place, const(0, place.dtype)),
            compare("lt", place, const(along.size, place.dtype)),
        )
        return select(inside, value, e.args[2])

    probe = tuple(Index.of(Var(f"p{d}", n)) for d, n in enumerate(x.shape) if d != dim)
    if element(probe) is None:
        return None

    def body(index: tuple[Index, ...]) -> Expr:
        found = element(index)
        assert found is not None  # that there is one does not depend on where
        return found

    return body


class NumberResult:
    """A number that an extern call gives at run time."""

    def __init__(self, name: str) -> None:
        self.name = name


def _same_layout(ref: BufRef, stride: Sequence[Dim]) -> bool:
    return all(equal(a, b) for n, a, b in zip(ref.shape, ref.stride, stride, strict=True) if not is_one(n))


def count_readers(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node the calls that read it, looking through views."""
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        found: list[fx.Node] = []
        for user in node.users:
            if user.target in SHAPE_ONLY and [n for n, a in enumerate(user.args) if a is node] == [
                SHAPE_ONLY[user.target]
            ]:
                continue
            packet = getattr(user.target, "overloadpacket", None)
            is_view = (
                packet is not None and packet.__name__ in VIEW_OPS
            ) or user.target.__class__.__name__ == "builtin_function_or_method"
            found += readers[user] if is_view and user.op == "call_function" else [user]
        readers[node] = found
    return readers


def lower_nodes(gm: fx.GraphModule, info: GraphInfo) -> tuple[Lowering, list[str], tuple[Any, ...]]:
    """Run the rules over the graph; gives the state, the input buffers' names and the outputs."""
    ctx = Lowering(info, gm.meta.get("shape_env"))
    ctx.on_gpu = ctx.on_gpu or any(_is_on_gpu(node) for node in gm.graph.nodes)
    ctx.readers = count_readers(gm.graph)
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    returned = arguments(output)[0]
    flat_outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
    ctx.outputs = frozenset(n for n in flat_outputs if isinstance(n, fx.Node))
    env: dict[fx.Node, Any] = {}
    inputs: list[str] = []
    copies: list[fx.Node] = []
    for node in gm.graph.nodes:
        ctx.node, ctx.spec = node, node.meta.get("val")
        if node.op == "placeholder":
            name = f"arg{len(inputs)}" if type(ctx.spec) is not Size else str(ctx.spec)
            inputs.append(name)
            if isinstance(ctx.spec, TensorSpec):
                buffer = ctx.new_buffer(ctx.spec, "input", name)
                env[node] = Value(
                    ctx.spec.shape,
                    ctx.spec.dtype,
                    ref=BufRef(name, ctx.spec.shape, ctx.spec.stride, 0, buffer.spec.dtype),
                )
                env[node].stride = ctx.spec.stride
            else:
                env[node] = ctx.spec
        elif node.op == "get_attr":
            env[node] = _constant(ctx, gm, node)
        elif node.op == "call_function" and node.target is COPY_ and operand(node, 0).op == "placeholder":
            copies.append(node)
        elif node.op == "call_function":
            env[node] = _lower_call(ctx, node, env)
        elif node.op != "output":
            raise InternalError(
                "DM910",
                f"a node of kind {node.op} in an aten graph",
                why=str(node.format_node()),
                cure="report this graph",
            )
    ctx.node, ctx.spec = output, None
    targets = {env[operand(n, 0)].ref.name for n in copies}
    outputs = tuple(_output(ctx, n, env, targets) for n in flat_outputs)
    _mutate(ctx, copies, env, targets)
    ctx.values = {
        n.name: v.ref
        for n, v in env.items()
        if isinstance(v, Value) and v.ref is not None and n.op != "placeholder"
    }
    return ctx, inputs, outputs


def _is_cheap(x: Value, e: Expr) -> bool:
    half = x.dtype.is_floating_point and x.dtype.itemsize == 2
    cost, loads = (CHEAP_HALF_COST, CHEAP_HALF_LOADS) if half else (CHEAP_COST, CHEAP_LOADS)
    return total_cost(e) <= cost and len(loads_of(e)) <= loads


def _is_on_gpu(node: fx.Node) -> bool:
    spec = node.meta.get("val")
    return any(
        isinstance(s, TensorSpec) and s.device.type == "cuda"
        for s in (spec if isinstance(spec, tuple) else (spec,))
    )


def _constant(ctx: Lowering, gm: fx.GraphModule, node: fx.Node) -> Value:
    tensor: Any = gm
    for part in str(node.target).split("."):
        tensor = getattr(tensor, part)
    spec = TensorSpec.of(tensor)
    buffer = ctx.new_buffer(spec, "const", value=tensor.detach())
    value = Value(spec.shape, spec.dtype, ref=BufRef(buffer.name, spec.shape, spec.stride, 0, spec.dtype))
    value.stride = spec.stride
    return value


def _lower_call(ctx: Lowering, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    args = fx.map_arg(node.args, lambda n: env[n])
    kwargs = fx.map_arg(node.kwargs, lambda n: env[n])
    if type(node.meta.get("val")) is Size:
        value = node.meta["val"]  # a size, computed while the graph was recorded
    elif not isinstance(node.target, torch._ops.OpOverload):
        value = function(node)(*args, **kwargs)  # operator.getitem and arithmetic on numbers
    elif node.target._schema.is_mutable:
        raise InternalError(
            "DM912",
            f"{node.target} changes its operand inside an aten graph",
            why="lowering takes functional graphs",
            cure="report the program; backend='eager' runs it",
        )
    else:
        value = ctx.call(node, args, kwargs)
    if isinstance(value, Value):
        _check(value, node)
        ctx.settle(value, node)
        if value.stride is None:
            value.stride = node.meta["val"].stride
    return value


def _check(value: Value, node: fx.Node) -> None:
    spec = node.meta["val"]
    if isinstance(spec, TensorSpec) and (
        value.dtype != spec.dtype or not (equal(value.shape, spec.shape) or tuple(value.shape) == spec.shape)
    ):  # the latter may follow from a guard
        raise InternalError(
            "DM911",
            f"the lowering of {node.target} gives {value.dtype}{list(value.shape)}, aten gives {spec}",
            why="a wrong rule in dynamotor.lower",
            cure="report this; config.backend='aot_eager' avoids it",
        )


def _mutate(ctx: Lowering, copies: list[fx.Node], env: dict[fx.Node, Any], targets: set[str]) -> None:
    """Trailing copies into inputs: each runs after everything that reads the input's old value."""
    values: list[Value] = []
    for node in copies:
        written = operand(node, 0)
        ctx.node, ctx.spec = node, written.meta["val"]
        source = env[operand(node, 1)]
        own = env[written].ref.name
        if _is_left_to_aten(node):
            ref = ctx.realize(source)
            values.append(
                Value(
                    source.shape,
                    source.dtype,
                    ref=ctx.copy(source, source.stride) if ref.name in targets else ref,
                )
            )
            continue
        value = ctx.pointwise(lambda e, dtype=ctx.spec.dtype: round_to(e, dtype), source)
        if any(
            e.args[0] in targets and e.args[0] != own for e in loads_of(ctx.probe(value))
        ) or _reads_elsewhere(value, env[written]):
            ctx.realize(value)
        values.append(value)
    for node, value in zip(copies, values, strict=True):
        ctx.node = node
        written = operand(node, 0)
        spec, ref = written.meta["val"], env[written].ref
        ctx.mutated.append(ref.name)
        if _is_left_to_aten(node):
            source = ctx.realize(value)
            step = ExternStep(COPY_, (ref, source), {}, (), mutates=(ref.name,))
            ctx.add(ExternNode(step, frozenset({source.name}), (), step.mutates))
            continue
        after = frozenset(e.buffer for e in ctx.schedule if isinstance(e, Node) and ref.name in e.reads)
        after |= frozenset(
            name
            for e in ctx.schedule
            if isinstance(e, ExternNode) and ref.name in e.reads
            for name in e.makes
        )
        ctx.add(Node(ref.name, spec.shape, value.at, spec.stride, spec.dtype, after=after, origin=str(node)))


def _is_left_to_aten(copy: fx.Node) -> bool:
    """Whether a copy into an input reads or writes a dtype that loop kernels do not have."""
    return any(spec_of(node).dtype not in COMPUTE_TYPE for node in copy.args[:2])


def _reads_elsewhere(value: Value, target: Value) -> bool:
    """Whether the new value reads the old one at another element than the one it replaces."""
    index = tuple(Index.of(Var(f"p{d}", n)) for d, n in enumerate(value.shape))
    own = target.at(index)
    return any(e.args[0] == own.args[0] and e is not own for e in loads_of(value.at(index)))


def _can_be_laid_out(spec: TensorSpec) -> bool:
    """Whether a kernel can write a tensor with these strides: also with holes between elements, which users
    can see.
    """
    return is_dense(spec) or not sees_twice(spec)


def _output(ctx: Lowering, n: Any, env: dict[fx.Node, Any], overwritten: set[str]) -> Any:
    if not isinstance(n, fx.Node):
        return n
    value = env[n]
    if isinstance(value, NumberResult):
        return BufRef(value.name, (), (), 0, ctx.buffers[value.name].spec.dtype)
    if not isinstance(value, Value):
        return value
    spec = n.meta["val"]
    ref = ctx.realize(value, spec.stride)
    if ref.name in overwritten:
        return ctx.copy(value, spec.stride if _can_be_laid_out(spec) else contiguous_stride(spec.shape))
    if not _same_layout(ref, spec.stride):
        return ctx.copy(value, spec.stride) if _can_be_laid_out(spec) else ref
    # Strides of dimensions of size 1 say nothing about the layout, but the user can see them.
    return (
        ref
        if equal(ref.stride, spec.stride)
        else BufRef(ref.name, ref.shape, spec.stride, ref.offset, ref.dtype)
    )
