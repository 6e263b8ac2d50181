"""dynamotor: a compiler for PyTorch that you can read.

>>> import dynamotor
>>> fast = dynamotor.compile(model)
"""

from .base import platform as _platform  # noqa: F401  # isort: skip  (first: raises a coded error where nothing can work)
from .api import compile, compile_fx, disable, reset
from .backends import list_backends, register_backend
from .base.config import config
from .base.errors import BackendError, BuildError, CaptureError, DynamotorError, UsageError
from .base.events import counters
from .capture.sizes import mark_dynamic, mark_static
from .tools.explain import explain

__version__ = "0.1.0"

__all__ = [
    "BackendError", "BuildError", "CaptureError", "DynamotorError", "UsageError", "compile", "compile_fx", "config", "counters",
    "disable", "explain", "list_backends", "mark_dynamic", "mark_static", "register_backend", "reset",
]
