"""Aten graph in, program out: rules, fusion, kernels, steps.

>>> program = lower_graph(aten_gm, GraphInfo("inference", "graph0"))
>>> print(program)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import fx

from ..base import compat, development
from ..base.config import config
from ..base.events import emit, listening, log
from ..graph.op_facts import facts, is_collective
from ..graph.sizes import Size, Symbol
from ..graph.spec import GraphInfo
from . import (  # noqa: F401  (rules register themselves)
    ops_index,
    ops_loss,
    ops_norm,
    ops_pointwise,
    ops_pool,
    ops_reduce,
    ops_scatter,
    ops_upsample,
    ops_view,
    pointwise_functions,
)
from .fusion import RULES, Group, Rule, fuse
from .in_place import Sharing, share_memory, verify_in_place
from .index_expr import is_zero
from .instance import instances, nodes_at
from .ir import ExternNode, LoopNode, forget_expressions
from .kernel_text import kernel_text
from .lowering import LoopBuilder
from .program import Buffer, BufRef, LoopStep, Program, Step, touches
from .schedule import build_kernel, in_place_pairs
from .verify_program import verify_nodes, verify_program
from .walk import lower_nodes
from .write_back import write_back


def lower_graph(gm: fx.GraphModule, info: GraphInfo, rules: Sequence[Rule] = RULES) -> Program:
    """Lower a functional aten graph (contract 3) to a program (contract 4)."""
    forget_expressions()
    ctx, inputs, outputs = lower_nodes(gm, info)
    wanted = {o.name for o in outputs if isinstance(o, BufRef)} | set(ctx.mutated)
    schedule = _needed(ctx.schedule, wanted)
    if config.verify:
        for nodes, specs in nodes_at(ctx.env, schedule, ctx.buffers):
            verify_nodes(nodes, specs)
    returned = {o.name for o in outputs if isinstance(o, BufRef)}
    schedule, sharing = share_memory(ctx, schedule, returned)
    items = fuse(schedule, ctx.mutated, rules)
    verify_in_place(items, sharing, returned)
    outputs = tuple(sharing.renamed(o) for o in outputs)
    returned, wanted = ({sharing.memory(name) for name in names} for names in (returned, wanted))
    steps = _steps(ctx, items, wanted)
    if not ctx.is_symbolic:
        steps = write_back(steps, ctx.buffers, ctx.mutated, wanted - set(ctx.mutated))
    used = {name for step in steps for name in touches(step)} | set(inputs) | wanted
    buffers = {name: _with_kind(b, returned) for name, b in ctx.buffers.items() if name in used}
    program = Program(
        info.name,
        tuple(inputs),
        buffers,
        steps,
        outputs,
        tuple(dict.fromkeys(ctx.mutated)),
        ctx.env,
        {
            name: sharing.renamed(ref)
            for name, ref in ctx.values.items()
            if _stays(ref.name, sharing, buffers)
        },
    )
    for instance in instances(program, everywhere=config.verify):
        verify_program(instance)
    log(
        "graphs",
        lambda: "\n".join(
            [
                f"kernels of {info.name}\n{program}",
                *(kernel_text(s.kernel) for s in steps if isinstance(s, LoopStep)),
            ]
        ),
    )
    return program


def _with_kind(buffer: Buffer, returned: set[str]) -> Buffer:
    if buffer.kind == "temp" and buffer.name in returned:
        return Buffer(buffer.name, buffer.spec, "output", buffer.value)
    return buffer


def _stays(name: str, sharing: Sharing, buffers: Collection[str]) -> bool:
    """Whether a value is in its buffer at the end."""
    return sharing.memory(name) in buffers and sharing.lasts(name)


def _needed(schedule: list[LoopNode | ExternNode], wanted: set[str]) -> list[LoopNode | ExternNode]:
    """Without nodes of unread results."""
    live = set(wanted)
    kept: list[LoopNode | ExternNode] = []
    for entry in reversed(schedule):
        if isinstance(entry, LoopNode):
            if entry.buffer not in live or any(map(is_zero, entry.shape)):
                continue
            live |= entry.reads
        else:
            if not (live & set(entry.makes)) and not entry.mutates and not _has_effect(entry):
                continue
            live |= entry.reads
        kept.append(entry)
    return kept[::-1]


def _has_effect(entry: ExternNode) -> bool:
    target = getattr(entry.step.target, "target", entry.step.target)
    if isinstance(target, compat.OpOverload) and facts(target).asserts:
        return True
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) or is_collective(target)


def _steps(ctx: LoopBuilder, items: list[Group | ExternNode], wanted: set[str]) -> list[Step]:
    """A step for each item; a group stores only results that are read outside of it."""
    readers: dict[str, set[int]] = {}
    for n, item in enumerate(items):
        for name in (
            item.reads
            if isinstance(item, ExternNode)
            else {name for m in item.members for name in m.node.reads}
        ):
            readers.setdefault(name, set()).add(n)
    sizes = {name: (b.spec.numel, b.spec.dtype) for name, b in ctx.buffers.items()}
    steps: list[Step] = []
    for n, item in enumerate(items):
        if isinstance(item, ExternNode):
            steps.append(item.step)
            continue
        stored = {
            m.node.buffer
            for m in item.members
            if m.node.buffer in wanted or readers.get(m.node.buffer, set()) - {n}
        }
        stored = {
            name for name in stored if not is_zero(sizes[name][0])
        }  # nothing is computed for an empty tensor
        if not stored:
            continue
        kernel = build_kernel(item, stored)
        development.verify("verify_schedule", item, kernel, stored)
        if ctx.is_symbolic:
            kernel = replace(kernel, symbols=_symbols(kernel.sizes()))
        note = ", ".join(dict.fromkeys(m.node.origin for m in item.members))
        steps.append(LoopStep.of(kernel, in_place_pairs(kernel, sizes), note))
        if listening("kernel"):
            emit(
                "kernel",
                name=ctx.info.name,
                fused=[m.node.origin for m in item.members],
                template=kernel.template,
                text=kernel_text(kernel),
            )
    return steps


def _symbols(sizes: Iterable[Size]) -> tuple[Symbol, ...]:
    """What sizes are made of, in the order in which the program's symbols were made."""
    return tuple(
        sorted({symbol for size in set(sizes) for symbol in size.symbols}, key=lambda symbol: symbol.order)
    )
