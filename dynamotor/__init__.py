"""dynamotor: a compiler for PyTorch that you can read.

>>> import dynamotor
>>> fast = dynamotor.compile(model)
"""

from .base import platform as _platform  # noqa: F401  # isort: skip  (first: raises a coded error where nothing can work)
from .base import importing as _importing  # isort: skip  (before whatever takes time)
from .base import c_extension as _c_extension  # noqa: F401  # isort: skip  (before the first use of the extension)
from .api import compile, compile_fx, cudagraph_mark_step_begin, disable, reset
from .backends import list_backends, register_backend
from .base import extensions as _extensions
from .base.artifacts import load_cache_artifacts, save_cache_artifacts
from .base.config import Options, config
from .base.errors import (
    BackendError,
    BuildError,
    CaptureError,
    CompatibilityWarning,
    DistributedError,
    DynamotorError,
    DynamotorWarning,
    EagerWarning,
    InternalError,
    RecompileWarning,
    SettingWarning,
    UsageError,
    XlaError,
)
from .base.events import counters
from .capture.marks import (
    allow_in_graph,
    assume_constant_result,
    disallow_in_graph,
    is_compiling,
    nested_compile_region,
)
from .capture.stance import run, set_stance
from .capture.symbolic_inputs import mark_dynamic, mark_static
from .step import compile_step
from .tools.explain import explain
from .tools.exported import export, package
from .tools.lowered import lower
from .tools.package import load
from .tools.replace import replace_torch_compile
from .tools.report import report
from .tools.stream import install as _install

__version__ = "0.2.0"

__all__ = [
    "BackendError",
    "BuildError",
    "CaptureError",
    "CompatibilityWarning",
    "DistributedError",
    "DynamotorError",
    "DynamotorWarning",
    "EagerWarning",
    "InternalError",
    "Options",
    "RecompileWarning",
    "SettingWarning",
    "UsageError",
    "XlaError",
    "allow_in_graph",
    "assume_constant_result",
    "compile",
    "compile_fx",
    "compile_step",
    "config",
    "counters",
    "cudagraph_mark_step_begin",
    "disable",
    "disallow_in_graph",
    "explain",
    "export",
    "is_compiling",
    "list_backends",
    "load",
    "load_cache_artifacts",
    "lower",
    "mark_dynamic",
    "mark_static",
    "nested_compile_region",
    "package",
    "register_backend",
    "replace_torch_compile",
    "report",
    "reset",
    "run",
    "save_cache_artifacts",
    "set_stance",
]

_extensions.install()
_install()
_importing.done()
