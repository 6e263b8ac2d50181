"""The end of a lowered graph: its results, as views of buffers, and its copies into inputs."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from ..graph.kernel_checks import sees_twice
from ..graph.nodes import operand, spec_of
from ..graph.sizes import equal
from ..graph.spec import TensorSpec, contiguous_stride
from .claim import memory_of
from .index_expr import Index, Var
from .ir import (
    COMPUTE_TYPE,
    ExternNode,
    LoopNode,
    loads_of,
    round_to,
)
from .lowering import LoopBuilder, NumberResult
from .pass_helpers import looks_at_another
from .program import BufRef, ExternStep
from .realize import same_layout
from .value import LoopValue, is_dense

COPY_ = torch.ops.aten.copy_.default


def returned(
    ctx: LoopBuilder, n: Any, env: dict[fx.Node, Any], overwritten: set[str], owners: dict[str, fx.Node]
) -> Any:
    """One output: a view of a buffer that no input's new value overwrites, or a plain value.

    owners: of the buffers that outputs are in, the tensor that they are views of. Another tensor may be in
    one, too (a part that was updated in place, beside the whole): it is copied.
    """
    if not isinstance(n, fx.Node):
        return n
    value = env[n]
    if isinstance(value, NumberResult):
        return BufRef(value.name, (), (), 0, ctx.buffers[value.name].spec.dtype)
    if not isinstance(value, LoopValue):
        return value
    spec = n.meta["val"]
    ref = ctx.realize(value, spec.stride)
    base = _base(n)
    if memory_of(ctx.claimed, ref.name) in overwritten or owners.setdefault(ref.name, base) is not base:
        return ctx.copy(value, spec.stride if _can_be_laid_out(spec) else contiguous_stride(spec.shape))
    if not same_layout(ref, spec.stride):
        return ctx.copy(value, spec.stride) if _can_be_laid_out(spec) else ref
    # Strides of dimensions of size 1 say nothing about the layout, but the user can see them.
    return (
        ref
        if equal(ref.stride, spec.stride)
        else BufRef(ref.name, ref.shape, spec.stride, ref.offset, ref.dtype)
    )


def _base(node: fx.Node) -> fx.Node:
    """The tensor of which a node is a view, of views, or itself."""
    while looks_at_another(node) or node.target is operator.getitem:
        node = operand(node, 0)
    return node


def _can_be_laid_out(spec: TensorSpec) -> bool:
    """Whether a kernel can write a tensor with these strides: also with holes between elements, which users
    can see.
    """
    return is_dense(spec) or not sees_twice(spec)


def write_inputs(ctx: LoopBuilder, copies: list[fx.Node], env: dict[fx.Node, Any], targets: set[str]) -> None:
    """Trailing copies into inputs: each runs after everything that reads the input's old value."""
    values: list[LoopValue] = []
    for node in copies:
        written = operand(node, 0)
        ctx.node, ctx.spec = node, written.meta["val"]
        source = env[operand(node, 1)]
        own = env[written].ref.name
        if _is_left_to_aten(node):
            ref = ctx.realize(source)
            values.append(
                LoopValue(
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
    readers = _Readers(ctx.schedule)
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
        after = readers.of(ref.name)
        ctx.add(
            LoopNode(ref.name, spec.shape, value.at, spec.stride, spec.dtype, after=after, origin=str(node))
        )


class _Readers:
    """The buffers made by what reads a buffer, of a schedule that grows: each entry is looked at once."""

    def __init__(self, schedule: list[LoopNode | ExternNode]) -> None:
        self.schedule, self.seen = schedule, 0
        self.makers: defaultdict[str, set[str]] = defaultdict(set)

    def of(self, name: str) -> frozenset[str]:
        for entry in self.schedule[self.seen :]:
            made = (entry.buffer,) if isinstance(entry, LoopNode) else entry.makes
            for read in entry.reads:
                self.makers[read].update(made)
        self.seen = len(self.schedule)
        return frozenset(self.makers[name])


def _is_left_to_aten(copy: fx.Node) -> bool:
    """Whether a copy into an input reads or writes a dtype that loop kernels do not have."""
    return any(spec_of(node).dtype not in COMPUTE_TYPE for node in copy.args[:2])


def _reads_elsewhere(value: LoopValue, target: LoopValue) -> bool:
    """Whether the new value reads the old one at another element than the one it replaces."""
    index = tuple(Index.of(Var(f"p{d}", n)) for d, n in enumerate(value.shape))
    own = target.at(index)
    return any(e.args[0] == own.args[0] and e is not own for e in loads_of(value.at(index)))
