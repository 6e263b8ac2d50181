"""Makes `import timm` and `import transformers` work where torch is a CPU build.

The registry's torchvision is built for CUDA: next to a CPU build of torch its compiled operators do not load,
and its import then fails because two operator schemas are missing. `prepare()` declares those two schemas;
the operators themselves stay unavailable.

>>> prepare(); import timm
"""

from __future__ import annotations

import importlib
import sys

import torch

_libraries: list[torch.library.Library] = []  # a library's schemas live as long as the object


def prepare() -> None:
    """Make torchvision importable; does nothing where it is absent or its operators load."""
    if _libraries:
        return
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except Exception:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)
