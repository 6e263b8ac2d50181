"""The native compiler: aten graph in, callable out.

## Contract 4: the program (lower → codegen), continued

* `codegen/cpp.py`: `emit_kernel(kernel) -> CFunction(name, source, params)`; structural memo: kernels equal
  up to names share one function.
* `codegen/call_program.py`: `CallProgram(program, info, failed)`, called with tensors: plans memory, builds
  the translation unit through `runtime.build`, and writes the call program as readable Python text.
* On an NVIDIA GPU (`codegen/gpu_program.py`; `config.target = "triton"` runs the same on CPU tensors, in
  Triton's interpreter): `codegen/triton.py` replaces each `LoopStep` by launches (`TritonStep`, with buffers
  for what one launch leaves for the next), `triton_plan.py` chooses tiles and where rows are shared by
  programs, `triton_vectors.py` lets tiles of long rows start at 16 bytes wherever the row does,
  `triton_kernel.py` and `triton_body.py` write a draft in which numbers that follow from sizes are marked,
  `triton_sizes.py` settles which of them are literals and which arguments, `triton_ops.py` has a row an op.
  `triton_batch.py` runs small maps whose drafts are equal but for those numbers (updates of parameters, casts
  of weights) as one launch; steps move for that.
  Where sizes differ between calls, each loop step is a `triton_family.Family` of variants: planned and
  written with symbols when a call first needs them, chosen by their conditions on sizes, their sizes
  arguments and their grids expressions; a program binds them once for each set of sizes
  (`GpuProgram._instance`). Templates and moved rows stay with fixed sizes, and
  `runtime.cuda_graphs.GraphedSizes` keeps recordings by sizes; where few calls see sizes that change, the
  others are recorded once (`size_parts.py`). `runtime.triton_build` makes cubins in worker
  processes (disk cached; no worker starts and triton is not imported when all are there),
  `runtime.triton_launch` loads them and gives `_C.GpuKernel` callables of tensors and a stream; code for
  aligned pointers has a twin for others, built when it is first needed. `runtime.device_memory` keeps scratch
  blocks by device and stream. `runtime.cuda_graphs.GraphedCall` replays a warm call as one CUDA graph
  (docs/gpu.md has the guarantees). `triton_gemm_sites.py` finds matrix products that a template
  (`triton_gemm.py`) could compute together with the map behind it (operands by pointers, or through
  descriptors of the tensor memory accelerator, `triton_tma.py`: their memory is a buffer of the program, and
  a launch with pointers that are no multiples of 16 takes another function, of small tiles and without them;
  `triton_conv.py` reads channels-last images as the rows of a product), `triton_gemm_choice.py` takes those
  that `gemm_table.py` names (measured on such a GPU, also for the same layer with about as many
  samples) or, under `config.max_autotune`, that `autotune.py` times faster.
* Every result of an aten call passes through `_C.Expect` (sizes, strides, dtype, device); what differs is
  laid out anew or DM404.
* `config.check` (`DYNAMOTOR_CHECK=1`, `codegen/checked.py`): `StepChecks` poisons planned memory before a
  buffer's first and after its last step and looks at guard bytes behind each live buffer after each step;
  `Checked` compares each call's results and written inputs with the aten graph as it was before the passes,
  and on a difference repeats the call with every buffer compared (`Program.values`: where the values of the
  graph's nodes are). Graphs with collectives, custom ops or a `torch.Generator` are not run twice.
  `memory.verify_plan` (`config.verify`) proves planned lifetimes apart.
* `runtime.build.load_library(source: str, flags) -> CDLL-like`: compile with g++ (disk cached), load.
  `runtime.build`: C function pointers called with tensors' data pointers through `dynamotor._C` without
  ctypes' cost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..base.config import config
from ..base.errors import BuildError, EagerWarning
from ..base.events import counters, fall_back, timed, warn_once
from ..base.probe import GPU, why_off
from ..graph.module import copy_of
from ..graph.op_facts import meets_ranks
from ..graph.size_nodes import is_size
from ..graph.spec import GraphInfo, TensorSpec
from ..lower.ir import lowering_lock
from ..lower.lower_graph import lower_graph
from ..lower.lowering import Decline
from ..lower.outputs import COPY_
from ..lower.passes import optimise
from ..runtime import triton_build
from ..runtime.cuda_graphs import GraphedCall, GraphedSizes
from . import host_parts, size_parts
from .call_program import CallProgram
from .checked import Checked, checkable
from .folded import FoldedCall, Part
from .gpu_program import GpuProgram, Meanwhile

Compiled = Callable[..., tuple[Any, ...]]


def compile_aten(gm: fx.GraphModule, info: GraphInfo, cuda_graphs: bool = False) -> Compiled:
    """Compile one aten graph (contract 3); `gm` is rewritten in place. The result takes and returns real
    tensors.

    cuda_graphs: on a GPU, warm calls are replayed as one CUDA graph.

    The steps: passes over the graph → lowering and fusion → kernels built in the background (C++ for a CPU,
    Triton for an NVIDIA GPU), call program written. When kernels cannot be built, the graph runs on aten
    kernels, with one warning; under `config.strict` that is a BuildError.
    """
    device, why_not = device_of(gm)
    if device.type == "cuda":
        why_not = why_not or why_off(GPU)
    if why_not:
        parts = host_parts.split(gm, info)
        if parts is not None and not device_of(parts.device.gm)[1]:
            return parts.around(compile_aten(parts.device.gm, parts.info, cuda_graphs))
        return _on_aten_kernels(gm, device, why_not)
    if device.type == "cpu" or cuda_graphs and device.type == "cuda":
        of_sizes = size_parts.split(gm, info)
        if of_sizes is not None:
            return of_sizes.around(compile_aten)
    with lowering_lock:
        return _checked(gm, info, device, cuda_graphs)


def _checked(gm: fx.GraphModule, info: GraphInfo, device: torch.device, cuda_graphs: bool) -> Compiled:
    """Compiled, and under `config.check` run beside the graph as it was."""
    if config.check and not cuda_graphs and checkable(gm):
        original = copy_of(gm)
        return Checked(_compile_aten(gm, info, device, cuda_graphs), original, gm)
    return _compile_aten(gm, info, device, cuda_graphs)


def _compile_aten(gm: fx.GraphModule, info: GraphInfo, device: torch.device, cuda_graphs: bool) -> Compiled:
    on_gpu = device.type == "cuda" or config.target == "triton"
    with timed("passes"):
        optimised = optimise(gm, info, on_gpu=on_gpu)
    with timed("lower"):
        program = lower_graph(optimised.gm, optimised.info)
    failed = functools.partial(_build_failed, optimised.gm, info, config.strict)
    with timed("codegen"):
        if on_gpu:
            try:
                which = "none" if cuda_graphs else config.run_while_building  # recordings keep their launches
                runs = which == "all" or which == "general" and program.env is not None
                # ranks must meet in one order
                meanwhile = Meanwhile(optimised.gm) if runs and not _meets_ranks(gm) else None
                gpu_program = GpuProgram(program, optimised.info, device, failed, meanwhile=meanwhile)
                return replayed(gpu_program, optimised.gm, optimised.info) if cuda_graphs else gpu_program
            except Decline as why:
                return _on_aten_kernels(optimised.gm, device, str(why))
        call: Compiled = CallProgram(program, optimised.info, failed)
        if optimised.fold is not None:
            call = FoldedCall(call, Part.of(optimised.fold, gm))
    return call


def replayed(call: Compiled, gm: fx.GraphModule, info: GraphInfo) -> Compiled:
    """The call of a graph, replayed as one CUDA graph once it is warm; without a GPU the call as it is, said
    once.
    """
    device, why_not = device_of(gm)
    if _meets_ranks(gm):
        fall_back(
            "cudagraphs.collectives",
            what="cudagraphs",
            reason="the graph holds collectives, whose handles live on the host",
        )
        return call
    if device.type != "cuda" or why_not:
        warn_once("cudagraphs", why_not or "there are no CUDA graphs without a GPU: calls run as they are")
        counters["fallback"]["cudagraphs"] += 1
        return call
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    written = {node.args[0] for node in gm.graph.nodes if node.op == "call_function" and node.target is COPY_}
    mutated = frozenset(i for i, node in enumerate(placeholders) if node in written)
    n_copied = 0 if info.kind == "backward" else info.n_outputs
    make = functools.partial(GraphedCall, call, info.static_inputs, mutated, device, n_copied)
    symbols = [i for i, node in enumerate(placeholders) if is_size(node)]
    return GraphedSizes(make, symbols, config.cuda_graph_sizes) if symbols else make()


def _meets_ranks(gm: fx.GraphModule) -> bool:
    """Whether there are collectives in a graph."""
    return any(node.op == "call_function" and meets_ranks(node.target) for node in gm.graph.nodes)


def device_of(gm: fx.GraphModule) -> tuple[torch.device, str]:
    """The device of a graph's tensors, and why no code can be generated for it (empty when it can).

    Single numbers on the CPU, and values made of them alone, may take part in a GPU's computations.
    """
    found: dict[torch.device, bool] = {}  # whether tensors must be on it
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        seen = any(user.op == "output" or user.target is COPY_ for user in node.users)
        for spec in val if isinstance(val, (tuple, list)) else (val,):
            if isinstance(spec, TensorSpec):
                fixed = seen or (node.op != "call_function" and bool(spec.shape))
                found[spec.device] = found.get(spec.device, False) or fixed
    device = next((d for d in found if d.type != "cpu"), torch.device("cpu"))
    if any(fixed for d, fixed in found.items() if d != device) or sum(d.type != "cpu" for d in found) > 1:
        return device, f"the graph has tensors on {' and '.join(str(d) for d in found)}"
    if device.type == "cuda" and not triton_build.triton_version():
        return device, "triton is not installed (pip install triton)"
    return device, "" if device.type in (
        "cpu",
        "cuda",
    ) else f"there is no code generator for {device.type} yet"


def _on_aten_kernels(gm: fx.GraphModule, device: torch.device, why: str) -> Compiled:
    """The graph op by op; said once and counted. With symbols: it compiled with numbers instead ("graph")."""
    warn_once(f"device-{device.type}-{why}", f"{why}: such graphs run on aten kernels", EagerWarning)
    what = "graph" if "shape_env" in gm.meta else "device"
    fall_back(f"device.{device.type}", what=what, name=device.type, reason=why)
    gm.recompile()
    return gm.forward


def _build_failed(gm: fx.GraphModule, info: GraphInfo, strict: bool, error: BuildError) -> Compiled:
    """What happens when the C++ cannot be built: the error under `strict`, the graph on aten kernels
    otherwise.
    """
    if strict:
        raise error
    warn_once("build-failed", f"{error}\n  such graphs run on aten kernels instead", EagerWarning)
    fall_back(f"build.{error.code}", what="build", name=info.name, reason=str(error), code=error.code)
    gm.recompile()
    return gm.forward
