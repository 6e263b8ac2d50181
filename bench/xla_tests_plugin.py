"""A pytest plugin for `python -m bench xla_tests`: torch_xla stands for dynamotor.xla before a file is imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

import dynamotor.xla

from .rows_of_tests import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_collectreport,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    stand_in,
)


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Before a test file is imported: its other tests run, too, where a name that it imports is missing."""
    stand_in(module_path, ("torch_xla",))


def pytest_collection_finish() -> None:
    """Before tests run: options that they define with absl have their defaults."""
    if "absl.flags" in sys.modules:
        sys.modules["absl.flags"].FLAGS([sys.argv[0]])


def give_torchvision_its_operators() -> None:
    """Its models need only names of its operators, which are missing where its library is for another
    PyTorch."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float threshold) -> Tensor")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


give_torchvision_its_operators()
dynamotor.xla.install_as_torch_xla()
del sys.argv[1:]  # the test files read options of their own
