"""LoopBuilder, by which lowerings build values, and the call of the lowering of each op.

A rule is `@lowering(aten.relu.default) def _(ctx, x): return ctx.pointwise(lambda e: ..., x)`. It gets
`LoopValue`s for tensors and plain Python for the rest, returns one, a tuple of them or a number, and raises
`Decline` to leave the op to aten. An op without a rule is an aten call too: counted in counters["fallback"],
never an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from ..base.compat import tree_map
from ..base.config import config
from ..base.errors import RaisedWhen
from ..base.events import fall_back
from ..base.registry import Registry
from ..graph.custom_writes import written_by
from ..graph.nodes import overload
from ..graph.op_facts import is_collective
from ..graph.result_strides import preserved_stride
from ..graph.sizes import Dim, Dims, Size, equal, hint, leaves_in
from ..graph.spec import TensorSpec, aten, contiguous_stride, numel
from .extern import BY_DESIGN, OUT_VARIANTS, Materialized, aten_call_target, is_layout_agnostic
from .index_expr import ZERO, Index, Var, is_zero
from .ir import (
    COMPUTE_TYPE,
    Body,
    Expr,
    ExternNode,
    LoopNode,
    ReduceKind,
    cast,
    compare,
    const,
    op,
    round_to,
    select,
)
from .program import BufRef, ExternStep
from .realize import VIEW_OPS, Realizer, same_layout
from .value import LoopValue, expand, is_dense
from .writing_calls import aten_in_place, write_in_place

lowerings: Registry[Any, Callable[..., Any]] = Registry("lowering")
Rule = TypeVar("Rule", bound=Callable[..., Any])


def lowering(*targets: Any) -> Callable[[Rule], Rule]:
    """Decorator: the function is the lowering of each op."""

    def add(rule: Rule) -> Rule:
        for target in targets:
            lowerings.add(target, rule)
        return rule

    return add


Scalar = int | float | bool
# Ops whose rules take numbers that are moved as bytes, or decline themselves.
MOVES = (aten._to_copy.default, aten.clone.default)
IDEMPOTENT = ("max", "min", "any", "all")  # of equal elements they are that element
NEUTRAL: dict[str, int] = {"sum": 0, "prod": 1, "any": 0, "all": 1}


class Decline(RaisedWhen):
    """Raised to leave a call, a kernel or a function to aten; the text says why."""


def converted_first(x: LoopValue, common: torch.dtype) -> bool:
    """Whether aten converts integers of this tensor to `common` before it computes, and that changes some of
    them: in a narrow integer type they wrap, in a half they are rounded (a tensor without dimensions is not
    converted to a half).
    """
    if x.dtype in (common, torch.bool) or x.dtype.is_floating_point:
        return False
    if common.is_floating_point:
        return bool(x.shape) and x.dtype.itemsize > 1 and COMPUTE_TYPE[common] is not common
    return COMPUTE_TYPE[common] is not common


def decline_if(bad: Any, why: str) -> None:
    """Leave the op to aten if `bad`, for the reason `why`."""
    Decline.when(bad, why)


class LoopBuilder(Realizer):
    """Builds values of loops and of aten calls for the op that is being lowered."""

    def pointwise(
        self,
        fn: Callable[..., Expr],
        *inputs: LoopValue | Scalar,
        shape: Sequence[Dim] | None = None,
        dtype: torch.dtype | None = None,
        compute: torch.dtype | None = None,
        common: torch.dtype | None = None,
    ) -> LoopValue:
        """fn of the inputs' elements, broadcast to `shape`; operands come in `compute`, the result is cast to
        `dtype`.

        Defaults: shape and dtype of the aten result, compute type of that dtype. common: the dtype to which
        aten converts operands first (default `dtype`). Integers wrap in it, also a number that is too large
        for a tensor of uint8.
        """
        shape = tuple(self.spec.shape if shape is None else shape)
        dtype = dtype or self.spec.dtype
        compute = compute or COMPUTE_TYPE[dtype]
        common = common or dtype
        narrow = COMPUTE_TYPE[common] is not common and not common.is_floating_point
        converted = [isinstance(x, LoopValue) and converted_first(x, common) for x in inputs]
        rounded = "rounded" in self.node.meta  # by the partition
        operands: list[LoopValue | Expr] = []
        for x in inputs:
            if isinstance(x, LoopValue):
                if not equal(x.shape, shape) and hint(numel(x.shape)) < hint(numel(shape)):
                    self.keep_if_heavy(x)
                operands.append(expand(x, shape))
            else:
                operands.append(round_to(const(x, compute), common) if narrow else const(x, compute))
        result = COMPUTE_TYPE[dtype]

        def operand(x: LoopValue, index: tuple[Index, ...], first: bool) -> Expr:
            e = cast(x.at(index), compute)
            return round_to(e, common) if first else e

        def body(index: tuple[Index, ...]) -> Expr:
            values = [
                operand(x, index, first) if isinstance(x, LoopValue) else x
                for x, first in zip(operands, converted, strict=True)
            ]
            return self.finish(cast(fn(*values), result), dtype, rounded)

        return LoopValue(shape, dtype, body)

    @staticmethod
    def finish(e: Expr, dtype: torch.dtype, rounded: bool) -> Expr:
        """Wrap narrow integers always, round halves where asked to, at each op under `config.exact`."""
        wide = COMPUTE_TYPE[dtype] is dtype or (dtype.is_floating_point and not (rounded or config.exact))
        return e if wide else round_to(e, dtype)

    def generate(
        self,
        fn: Callable[[tuple[Index, ...]], Expr],
        shape: Sequence[Dim] | None = None,
        dtype: torch.dtype | None = None,
    ) -> LoopValue:
        """A value from a function of the index; the function gives the compute type of `dtype`."""
        return LoopValue(self.spec.shape if shape is None else shape, dtype or self.spec.dtype, fn)

    def reduce(
        self,
        kind: ReduceKind,
        x: LoopValue,
        dims: Iterable[int],
        *,
        keepdim: bool = False,
        dtype: torch.dtype | None = None,
        fn: Callable[[Expr], Expr] | None = None,
        compute: torch.dtype | None = None,
    ) -> LoopValue:
        """Reduce some dimensions. `fn` maps each element (in `compute`, default that of `dtype`) first."""
        rank = len(x.shape)
        gone = sorted({d % rank for d in dims}) if rank else []
        kept = [d for d in range(rank) if d not in gone]
        dtype = dtype or x.dtype
        compute = compute or COMPUTE_TYPE[dtype]
        shape, reduced = tuple(x.shape[d] for d in kept), tuple(x.shape[d] for d in gone)
        if any(map(is_zero, reduced)):  # nothing to go through: the neutral element
            decline_if(kind not in NEUTRAL, f"{kind} of nothing")
            e = const(NEUTRAL[kind], COMPUTE_TYPE[dtype])
            return LoopValue(
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

            return LoopValue(full if keepdim else shape, dtype, body_of_picked)

        def body(index: tuple[Index, ...]) -> Expr:
            e = cast(x.at(tuple(index[p] for p in order)), compute)
            return fn(e) if fn else e

        if kind in IDEMPOTENT and self._repeats(body, shape, reduced):
            first = (ZERO,) * len(reduced)

            def body_of_one(index: tuple[Index, ...]) -> Expr:
                own = tuple(index[d] for d in kept) if keepdim else index
                return cast(body((*own, *first)), COMPUTE_TYPE[dtype])

            return LoopValue(full if keepdim else shape, dtype, body_of_one)
        buffer = self.new_buffer(TensorSpec.dense(shape, dtype))
        self.add(
            LoopNode(
                buffer.name, shape, body, buffer.spec.stride, dtype, kind, reduced, origin=str(self.node)
            )
        )
        result = LoopValue(shape, dtype, ref=BufRef.whole(buffer))
        if keepdim:
            stride = contiguous_stride(full)
            result = LoopValue(full, dtype, ref=BufRef(buffer.name, full, stride, 0, dtype))
        return result

    @staticmethod
    def _repeats(body: Body, shape: Dims, reduced: Dims) -> bool:
        """Whether all elements that are reduced together are one, which is repeated."""
        own = [Var(f"p{d}", n) for d, n in enumerate((*shape, *reduced))]
        gone = {*own[len(shape) :]}
        fixed = all(type(n) is int for n in reduced)
        return fixed and gone.isdisjoint(body(tuple(map(Index.of, own))).vars)

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
            if not isinstance(x, LoopValue):
                return x
            ref = self.realize(x)
            if not agnostic and x.stride is not None and not same_layout(ref, x.stride):
                ref = self.copy(x, x.stride) if is_dense(TensorSpec(x.shape, x.stride, x.dtype)) else ref
            reads.add(ref.name)
            return ref

        is_value = lambda x: isinstance(x, LoopValue)  # noqa: E731
        new_args = tree_map(convert, tuple(args), is_leaf=is_value)
        new_kwargs = tree_map(convert, dict(kwargs or {}), is_leaf=is_value)
        flat = list(specs) if isinstance(specs, (tuple, list)) else [specs]
        out_variant = OUT_VARIANTS.get(target) if len(flat) == 1 and isinstance(flat[0], TensorSpec) else None
        call = target if out_variant is not None else aten_call_target(target)
        values: list[Any] = []
        outs: list[str | None] = []
        for spec in flat:
            if isinstance(spec, TensorSpec):
                stride = preserved_stride(spec) if isinstance(call, Materialized) else spec.stride
                buffer = self.new_buffer(TensorSpec(spec.shape, stride, spec.dtype, spec.device))
                values.append(LoopValue(spec.shape, spec.dtype, ref=BufRef.whole(buffer)))
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
        custom = written_by(node.target)
        name = str(node.target if custom is None else custom[0])
        fall_back(name, op=name, why=why, node=str(node))
        if custom is not None:
            return write_in_place(self, node, args, *custom)
        in_place = aten_in_place(self, node, args, kwargs)
        if in_place is not None:
            return in_place
        return self.extern(node.target, args, kwargs, fallback=True, agnostic=is_layout_agnostic(node.target))

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Lower one call_function node."""
        rule = lowerings.get(node.target)
        if rule is None:
            return self.fallback(node, args, kwargs, "no lowering")
        if any(isinstance(a, NumberResult) for a in leaves_in((args, kwargs))):
            return self.fallback(node, args, kwargs, "a number computed at run time")
        any_dtype = (
            overload(node).overloadpacket.__name__ in VIEW_OPS
            or node.target in BY_DESIGN
            or node.target in MOVES
            or is_collective(node.target)
        )
        if not any_dtype and any(dtype not in COMPUTE_TYPE for dtype in _dtypes(node, args)):
            return self.fallback(node, args, kwargs, "a dtype that loop kernels do not have")
        try:
            return rule(self, *args, **kwargs)
        except Decline as why:
            return self.fallback(node, args, kwargs, str(why))
        except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            # The rule does not know arguments of this call.
            if config.verify:
                raise
            return self.fallback(node, args, kwargs, f"the rule failed: {error!r}")

    def calls_aten(self, node: fx.Node) -> bool:
        return node.target in BY_DESIGN or node.target not in lowerings


def _dtypes(node: fx.Node, args: Any) -> list[torch.dtype]:
    """The dtypes that an op reads and gives."""
    leaves = leaves_in((args, node.meta["val"]))
    return [leaf.dtype for leaf in leaves if isinstance(leaf, LoopValue | TensorSpec)]


def picked_element(x: LoopValue, dim: int) -> Body | None:
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


# -- ops that are aten calls by design -----------------------------------------------------------------------


def _rule(target: Any, ctx: LoopBuilder, /, *args: Any, **kwargs: Any) -> Any:
    return ctx.extern(target, args, kwargs, agnostic=is_layout_agnostic(target))


for _target in BY_DESIGN:
    lowerings.add(_target, functools.partial(_rule, _target))
