"""A pytest plugin for `python -m bench torch_tests`: each test method runs compiled.

TORCH_TESTS_BACKEND=aot_eager python -m pytest -p bench.torch_tests_plugin test_torch.py
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
import unittest
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal import common_utils

import dynamotor

from .rows_of_tests import (  # noqa: F401
    note,
    pytest_collection_modifyitems,
    pytest_pycollect_makemodule,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
)

# A CPU build of torch may have a torchvision beside it that does not load.
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
_BACKEND = os.environ.get("TORCH_TESTS_BACKEND", "")
_AS_IT_IS = "assertEqual assertNotEqual assertEqualIgnoreType assertExpected assertExpectedInline"
_THEIRS = tuple(os.path.dirname(module.__file__) for module in (torch, unittest))


def _cell(function: Any, seen: set[int]) -> Any:
    """The cell, in the closures of PyTorch's own decorators, that holds the function of the test file."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            inside = cell.cell_contents
            if not isinstance(inside, types.FunctionType | types.MethodType) or id(inside) in seen:
                continue
            seen.add(id(inside))
            if not _theirs(inside):
                return cell
            if (found := _cell(inside, seen)) is not None:
                return found
    return None


def _theirs(function: Any) -> bool:
    return function.__code__.co_filename.startswith(_THEIRS)


@contextlib.contextmanager
def _compiled(method: Any) -> Iterator[Any]:
    """The test method, of which the part that the test file wrote is compiled."""
    compiled = dynamotor.compile(backend=_BACKEND, options={"fallback_random": True, "exact": True})
    cell = _cell(method, set()) if _theirs(method) else None
    if cell is None:
        yield compiled(method)
        return
    inside, cell.cell_contents = cell.cell_contents, compiled(cell.cell_contents)
    try:
        yield method
    finally:
        cell.cell_contents = inside


def _call(test: Any, method: Any) -> Any:
    dynamotor.reset()
    dynamotor.counters.clear()
    try:
        with _compiled(method) as compiled:
            return compiled()
    finally:
        found = {name: dict(dynamotor.counters[name]) for name in ("frames", "breaks")}
        graphs = dynamotor.counters["capture"]["graphs"]
        note({"test": f"{type(test).__name__}.{test._testMethodName}", "graphs": graphs, **found})


def _set_up() -> None:
    """What compares runs as it is; what runs a function many times runs it compiled."""
    unittest.TestCase._callTestMethod = _call  # type: ignore[attr-defined]
    for cls in (common_utils.TestCase, unittest.TestCase):
        for name in set(_AS_IT_IS.split()) & vars(cls).keys():
            dynamotor.disable(vars(cls)[name])
    for function in (torch.testing.make_tensor, torch.testing.assert_close):
        dynamotor.disable(function)
    for function in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        dynamotor.disable(function, recursive=False)


if _BACKEND:
    _set_up()
