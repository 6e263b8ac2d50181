"""`flex_attention` on a GPU: nodes of a graph become calls of kernels that write no matrix of scores.

>>> fuse_attention(gm)          # nodes that have such kernels; the others stay
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from ..base import compat
from ..base.events import fall_back
from ..graph.control_flow import ControlFlow, Tensors, laid_out
from ..graph.flex import FlexAttention
from ..graph.shape_tensor import ShapeTensor
from ..graph.spec import TensorSpec, copy_as
from ..lower.lowering import Decline, decline_if
from ..runtime import triton_build, triton_launch
from . import flex_kernels
from .flex_body import F32, TileFunction
from .flex_kernels import Blocks, Case
from .gpu_kernels import interpreted, job_of
from .triton_kernel import TritonFunction
from .triton_ops import POINTER

_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_LENGTHS = 32  # of which a program holds kernels
OWN = 3  # so many have kernels of their own; the others share those whose lengths are arguments
_NUMBERS = (F32, *[torch.int64] * 4)  # arguments of a score function; a mask's are the last four


def fuse_attention(gm: fx.GraphModule) -> None:
    """Replace the targets of nodes; one that has no kernels says why in an event "fallback"."""
    for node in gm.graph.nodes:
        if type(node.target) is FlexAttention and node.target.on_gpu:
            specs = [a.meta["val"] for a in node.args]
            try:
                node.target = FusedAttention(node.target, specs, node.meta["val"])
                gm.recompile()
            except Decline as why:
                fall_back(
                    "flex_attention", what="op", name="flex_attention", reason=f"scores are a matrix: {why}"
                )


class FusedAttention(ControlFlow):
    """A node's target: as `FlexAttention`, but for `Case`s that kernels can be written for."""

    operator = "flex_attention"

    def __init__(self, of: FlexAttention, specs: list[TensorSpec], results: tuple[TensorSpec, ...]) -> None:
        super().__init__([], results, len(specs))
        self.of = of
        self.lengths = 0
        self.kernels(*[spec.hinted() for spec in specs])

    def _run(self, *tensors: torch.Tensor) -> Tensors:
        case, kernels = self.kernels(*map(TensorSpec.of, tensors))
        n = len(case.free)
        found: Sequence[torch.Tensor] = _Attention.apply(
            kernels, case, tensors[3 : 3 + n], tensors[3 + n :], *tensors[:3]
        )
        return found

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if any(type(tensor) is ShapeTensor for tensor in tensors):
            return super().__call__(*tensors)
        return tuple(
            laid_out(result, spec) for result, spec in zip(self._run(*tensors), self.specs, strict=True)
        )

    @functools.lru_cache(maxsize=_LENGTHS)  # noqa: B019  # it lives as long as the program
    def kernels(self, *specs: TensorSpec) -> tuple[Case, Kernels]:
        """The case of tensors with these sizes and strides, and its kernels; being built."""
        case = _case(self.of, list(specs))
        self.lengths += 1
        case = replace(case, general=self.lengths > OWN)
        return case, Kernels(case)


def _case(of: FlexAttention, specs: list[TensorSpec]) -> Case:
    query, key, value, *rest = specs
    n_blocks = 2 * sum(found is not None for found in of.blocks)
    free, blocks = rest[: len(rest) - n_blocks], rest[len(rest) - n_blocks :]
    n_score = 0 if of.score is None else of.score.n_free
    decline_if(
        query.dtype not in _TYPES or {key.dtype, value.dtype} != {query.dtype},
        f"{query.dtype}, {key.dtype} and {value.dtype}",
    )
    decline_if(
        key.shape[0] != query.shape[0]
        or max(query.shape[3], value.shape[3]) > 256
        or 0 in (*query.shape, *key.shape, *value.shape),
        "keys of another batch, wide heads, or nothing at all",
    )
    decline_if(
        any(spec.dtype not in POINTER for spec in free), "a function that reads tensors of other types"
    )
    numbers = [TensorSpec.dense((), dtype, query.device) for dtype in _NUMBERS]
    limits = [int(n) for n in (*query.shape[:3], key.shape[2])]
    score = None if of.score is None else TileFunction(of.score, [*numbers, *free[:n_score]], limits, True)
    mask = None if of.mask is None else TileFunction(of.mask, [*numbers[1:], *free[n_score:]], limits, False)
    given = iter(blocks)
    found = [None if name is None else Blocks(next(given), next(given)) for name in of.blocks]
    usable = (
        found
        and all(b.dtype == torch.int32 for b in blocks)
        and all(n >= 16 and n & (n - 1) == 0 for n in of.block)
    )
    rows, columns = (
        (None, None) if not usable else [None if a is None else (a, b) for a, b in (found[:2], found[2:])]
    )
    block = of.block if usable else (0, 0)
    return Case(query, key, value, of.scale, score, mask, tuple(free), n_score, block, rows, columns)


class Kernels:
    """A case's functions; being built, those of a backward where gradients are on."""

    def __init__(self, case: Case, which: Sequence[str] = ("forward", "delta", "queries", "keys")) -> None:
        masked = case.rows is not None and case.mask is not None
        self.forward = "" if masked and "forward" in which else "forward"
        which = which if self.forward else ("partial", *which)
        self.device = case.query.device
        self._functions = {what: getattr(flex_kernels, what)(case) for what in which}
        self._made: dict[str, Callable[..., None]] = {}
        if self.device.type == "cuda":
            arch = triton_launch.arch(self.device.index)
            self._jobs = {what: job_of(f, arch) for what, f in self._functions.items()}
            forwards = [what for what in which if what in ("partial", "forward")]
            for what in which if torch.is_grad_enabled() or not forwards else forwards:
                triton_build.start_kernel(self._jobs[what])

    def forward_for(self, by_row: Tensors) -> str:
        """Which forward suits a mask: by the first one's share of blocks that are masked in part."""
        if not self.forward and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "forward"
        if not self.forward:
            part, full = int(by_row[0].sum()), int(by_row[2].sum()) if len(by_row) > 2 else 0
            self.forward = "partial" if part > full else "forward"
        return self.forward

    def __call__(self, what: str, *tensors: torch.Tensor) -> None:
        """Run one of the functions on its tensors."""
        kernel = self._made.get(what)
        if kernel is None:
            kernel = self._made[what] = self._make(what, self._functions[what], len(tensors))
        if self.device.type == "cuda":
            kernel(*tensors, compat.current_raw_stream(self.device.index))
        else:
            kernel(*tensors)

    def _make(self, what: str, function: TritonFunction, count: int) -> Callable[..., None]:
        if self.device.type != "cuda":
            return interpreted(function, function.numbers)
        code = triton_build.start_kernel(self._jobs[what]).result()
        return triton_launch.make_gpu_kernel(
            self._jobs[what], code, self.device, int(function.grid), count, function.numbers
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: Kernels,
        case: Case,
        free: Tensors,
        blocks: Tensors,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=F32)
        by_row, by_column = _split(case, blocks)
        run(run.forward_for(by_row), q, k, v, out, lse, *by_row, *free)
        ctx.run, ctx.case, ctx.counts = run, case, (len(free), len(by_row))
        ctx.save_for_backward(q, k, v, out, lse, *free, *by_row, *by_column)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        n_free, n_rows = ctx.counts
        free, by_row, by_column = rest[:n_free], rest[n_free : n_free + n_rows], rest[n_free + n_rows :]
        gradients = backward(ctx.run, (q, k, v, grad, out, lse), grad_lse, by_row, by_column, free)
        return None, None, None, None, *gradients


def backward(
    run: Kernels, given: Tensors, grad_lse: torch.Tensor, by_row: Tensors, by_column: Tensors, free: Tensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of queries, keys and values, each laid out as these. given: they, then the output's
    gradient, the output and the logarithms of its sums.
    """
    q, k, v, grad, out, lse = given
    less = torch.empty_like(lse)
    grad = grad if grad.stride() == out.stride() else copy_as(grad, out.stride())
    run("delta", out, grad, grad_lse.contiguous(), less)
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    given = q, k, v, grad, lse, less
    run("queries", *given, dq, *by_row, *free)
    run("keys", *given, dk, dv, *by_column, *free)
    return dq, dk, dv


def _split(case: Case, blocks: Tensors) -> tuple[Tensors, Tensors]:
    """The tensors of a mask's blocks that kernels along rows take, and along columns."""
    if not case.block[0]:
        return (), ()
    n = 0 if case.rows is None else 2 * sum(b is not None for b in case.rows)
    return blocks[:n], blocks[n:]
