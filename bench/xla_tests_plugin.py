"""A pytest plugin for `python -m bench xla_tests`: torch_xla stands for dynamotor.xla before a file is imported."""

from __future__ import annotations

import contextlib
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


def _import_torchvision() -> None:
    """Where torchvision's library does not fit this PyTorch, its models are there, and its ops have names."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float limit) -> Tensor"
            )


def _parse_no_flags() -> None:
    """absl's tests read flags, which their own main function would have parsed."""
    importlib.import_module("absl.testing.absltest")
    importlib.import_module("absl.flags").FLAGS.mark_as_parsed()


for prepare in (_import_torchvision, _parse_no_flags):
    with contextlib.suppress(ImportError):
        prepare()
dynamotor.xla.install_as_torch_xla()
del sys.argv[1:]  # the test files read options of their own
