"""The interface for distributions that extend the compiler with a device or a backend, as dynamotor-xla does.

An extension imports the core from here only; `tests/test_architecture.py` checks it. Changes of a name listed
here are announced in the changelog. docs/backends.md shows how an extension registers its parts.
"""

from __future__ import annotations

# Backends: captured graphs to functional aten graphs, and symbols for sizes.
from .autograd.aot import aot_compile
from .autograd.functional import RESHAPED, SCATTERED_BY, UNDONE_BY, slices_of, turned_back
from .autograd.inplace import functional_form, types_of, without_out

# Errors, events, settings.
from .base import probe
from .base.config import CompileOptions, config
from .base.errors import (
    BuildError,
    CaptureError,
    DynamotorError,
    UserLine,
    XlaError,
    user_line,
)
from .base.events import Event, counters, emit, fall_back, listening, new_number, subscribe, timed, warn_once
from .base.narrowing import checked
from .base.registry import Deferred, MaybeNone, Registry

# Capture: how tensors of a class are captured, and what programs are guarded by.
from .capture.frontend import make_dispatcher
from .capture.guards import Ambient
from .capture.values.base import wrap_rule
from .capture.values.tensor import wrap_tensor

# Graphs: specs, symbolic sizes, shapes and facts of ops, padding.
from .graph import (
    ops,  # noqa: F401  (the definitions of ops)
    prims,
)
from .graph.bessel import J0_COSINE, J0_NEAR, J0_SINE, J0_ZEROS_SQUARED, Ratio
from .graph.bucket_padding import Axes, CannotPad, Padder, Run, Values, Written, is_padded
from .graph.kernel_checks import check as kernel_check, sees_twice
from .graph.module import copied, graph_module, writes
from .graph.nodes import reached
from .graph.op_facts import facts
from .graph.result_strides import is_dense, preserved_stride
from .graph.shapes import UnsupportedOp, infer_spec
from .graph.size_nodes import is_size
from .graph.sizes import DataDependent, Dim, Dims, Size, contiguous_stride, hint
from .graph.spec import CPU, Compiled, GraphInfo, TensorSpec

# Native libraries, whole steps, and `torch.compile`.
from .runtime.cpp_build import load_library
from .step import register_step
from .step.graph_step import allow_step_hook
from .torch_compile_adapter import answer, backend_for_torch_compile, capture_as_plain_tensor

__all__ = [
    "Ambient",
    "Axes",
    "BuildError",
    "CPU",
    "CannotPad",
    "CaptureError",
    "CompileOptions",
    "Compiled",
    "DataDependent",
    "Dim",
    "Dims",
    "Deferred",
    "DynamotorError",
    "Event",
    "GraphInfo",
    "J0_COSINE",
    "J0_NEAR",
    "J0_SINE",
    "J0_ZEROS_SQUARED",
    "MaybeNone",
    "Padder",
    "Ratio",
    "RESHAPED",
    "Registry",
    "Run",
    "SCATTERED_BY",
    "Size",
    "TensorSpec",
    "UNDONE_BY",
    "UnsupportedOp",
    "UserLine",
    "Values",
    "Written",
    "XlaError",
    "allow_step_hook",
    "answer",
    "aot_compile",
    "backend_for_torch_compile",
    "capture_as_plain_tensor",
    "checked",
    "config",
    "contiguous_stride",
    "copied",
    "counters",
    "emit",
    "facts",
    "fall_back",
    "functional_form",
    "graph_module",
    "hint",
    "infer_spec",
    "is_dense",
    "is_padded",
    "is_size",
    "kernel_check",
    "listening",
    "load_library",
    "make_dispatcher",
    "new_number",
    "preserved_stride",
    "prims",
    "probe",
    "reached",
    "register_step",
    "sees_twice",
    "slices_of",
    "subscribe",
    "timed",
    "turned_back",
    "types_of",
    "user_line",
    "warn_once",
    "without_out",
    "wrap_rule",
    "wrap_tensor",
    "writes",
]
