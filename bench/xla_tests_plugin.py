"""A pytest plugin for `python -m bench xla_tests`: torch_xla stands for dynamotor.xla before a file is imported."""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
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


def pytest_collection_finish(session: pytest.Session) -> None:
    """Give each file the modules that it imports only where it is run as a program, as pytorch/xla runs it."""
    for module in dict.fromkeys(item.getparent(pytest.Module) for item in session.items):
        if module is not None:
            import_as_program(module.path, vars(module.obj))


def import_as_program(path: Path, names: dict[str, Any]) -> None:
    """Execute the imports below `if __name__ == "__main__":` that can be done here."""
    for block in ast.parse(path.read_text()).body:
        if isinstance(block, ast.If) and "__main__" in ast.unparse(block.test):
            for node in block.body:
                if isinstance(node, ast.Import | ast.ImportFrom):
                    with contextlib.suppress(ImportError):
                        exec(ast.unparse(node), names)


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
