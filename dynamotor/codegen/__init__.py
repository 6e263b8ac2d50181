"""The native compiler: aten graph in, callable out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..base.config import config
from ..base.errors import BuildError
from ..base.events import counters, emit, timed
from ..base.log import warn_once
from ..graph.info import GraphInfo
from ..graph.spec import TensorSpec
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
    device = _other_device(gm)
    if device is not None:
        text = f"there is no code generator for {device.type} yet: graphs with such tensors run on aten kernels"
        warn_once(f"device-{device.type}", text)
        counters["fallback"][f"device.{device.type}"] += 1
        return gm.forward
    with timed("passes"):
        optimised = optimise(gm, info)
    with timed("lower"):
        program = lower_graph(optimised.gm, optimised.info)
    with timed("codegen"):
        call: Compiled = build_program(program, optimised.info, _build_failed(optimised.gm, info, strict=config.strict))
        if optimised.fold is not None:
            call = FoldedCall(call, optimised.fold, gm, optimised.info)
    return call


def _other_device(gm: fx.GraphModule) -> torch.device | None:
    """The first device in the graph that no code is generated for."""
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        for spec in val if isinstance(val, (tuple, list)) else (val,):
            if isinstance(spec, TensorSpec) and spec.device.type != "cpu":
                return spec.device
    return None


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
