"""A pytest plugin for `python -m bench xla_tests`: torch_xla stands for dynamotor.xla before a file is imported."""

from __future__ import annotations

import sys
from pathlib import Path

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


dynamotor.xla.install_as_torch_xla()
del sys.argv[1:]  # the test files read options of their own
