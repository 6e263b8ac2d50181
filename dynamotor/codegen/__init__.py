"""The native compiler: aten graph in, callable out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ..base.config import config
from ..base.errors import BuildError
from ..base.events import counters, emit, timed
from ..base.log import warn_once
from ..graph.info import GraphInfo
from ..lower.lower import lower_graph
from ..lower.passes import optimise
from .folded import FoldedCall
from .program import build_program

Compiled = Callable[..., tuple[Any, ...]]


def compile_aten(gm: fx.GraphModule, info: GraphInfo) -> Compiled:
    """Compile one aten graph (contract 3); `gm` is rewritten in place. The result takes and returns real tensors.

    The steps: passes over the graph → lowering and fusion → C++ built in the background, call program written. When the C++
    cannot be built, the graph runs on aten kernels, with one warning; under `config.strict` that is a BuildError.
    """
    with timed("passes"):
        optimised = optimise(gm, info)
    with timed("lower"):
        program = lower_graph(optimised.gm, optimised.info)
    with timed("codegen"):
        call: Compiled = build_program(program, optimised.info, _build_failed(optimised.gm, info, strict=config.strict))
        if optimised.fold is not None:
            call = FoldedCall(call, optimised.fold, gm, optimised.info)
    return call


def _build_failed(gm: fx.GraphModule, info: GraphInfo, strict: bool) -> Callable[[BuildError], Compiled]:
    """What happens when the C++ cannot be built: the error under `strict`, the graph on aten kernels otherwise."""

    def replace(error: BuildError) -> Compiled:
        if strict:
            raise error
        warn_once("build-failed", f"{error}\ndynamotor: running such graphs on aten kernels instead")
        counters["fallback"][f"build.{error.code}"] += 1
        emit("fallback", what="build", name=info.name, reason=str(error), code=error.code)
        gm.recompile()
        return gm.forward

    return replace
