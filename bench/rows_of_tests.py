"""What became of each test of a file of PyTorch's tests, a line of JSON each: hooks for pytest plugins.

A plugin imports those that it wants: `from .rows_of_tests import pytest_runtest_makereport  # noqa: F401`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FILE = "file"  # the row of a file that cannot be imported
SECONDS = int(os.environ.get("DYNAMO_TESTS_SECONDS", "60"))  # for one test


_PACKAGES = ("torch", "functorch")


# -- names of other versions that tests import --------------------------------------------------------------
class _Absent:
    """What this version lacks: no, and a decorator that changes nothing."""

    def __bool__(self) -> bool:
        return False

    def __call__(self, fn: Any = None, *_: Any, **__: Any) -> Any:
        return fn if callable(fn) else self

    def __getattr__(self, name: str) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Before a test file is imported: give PyTorch's modules the names that it imports from them."""
    stand_in(module_path, _PACKAGES)


def stand_in(module_path: Path, packages: tuple[str, ...]) -> None:
    """Give modules of these packages the names that a test file imports from them and that are missing."""
    for node in ast.parse(module_path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in packages:
            name = str(node.module)
            try:
                module = importlib.import_module(name)
            except ImportError:
                module = sys.modules[name] = types.ModuleType(name)
            for alias in node.names:
                with contextlib.suppress(ImportError):
                    importlib.import_module(f"{name}.{alias.name}")
                if not hasattr(module, alias.name):
                    setattr(module, alias.name, _Absent())


class Late(BaseException):
    """A test took too long. No compiler may take that for an error of the program."""


# -- what became of each test -------------------------------------------------------------------------------
def name_of(item: Any) -> str:
    """A test's name: "Class.test"."""
    return f"{item.cls.__name__ if item.cls else ''}.{item.originalname}"


def note(row: dict[str, Any]) -> None:
    """Write a row for the process that asked."""
    path = os.environ.get("DYNAMO_TESTS_ROWS")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out tests that ran before (one that ends the process is not run again) or are not asked for."""
    done = set(filter(None, os.environ.get("DYNAMO_TESTS_DONE", "").split("\n")))
    wanted = set(os.environ.get("DYNAMO_TESTS_ONLY", "").split())
    every = int(os.environ.get("DYNAMO_TESTS_EVERY", "1"))
    items[:] = [
        item
        for item in items[::every]
        if name_of(item) not in done and (not wanted or {item.originalname, name_of(item)} & wanted)
    ]


def pytest_collectreport(report: Any) -> None:
    """A row for a file that cannot be imported, with the last line of the error."""
    if report.failed:
        error = [line[1:].strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
        note({"test": FILE, "outcome": "failed", "why": " ".join(error)[:400]})


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """A limit for each test."""

    def late(*_: Any) -> None:
        raise Late(f"more than {SECONDS} s")

    note({"test": name_of(item), "started": True})
    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    """One row for a test that ran, or failed before or after."""
    report = (yield).get_result()
    if report.when != "call" and report.outcome == "passed":
        return
    text = "" if report.outcome == "passed" else _short(call.excinfo)
    if report.outcome == "failed" and "Unexpected success" in str(
        report.longrepr
    ):  # marked as failing with Dynamo
        report.outcome, text = "passed", "which the test does not expect"
    note({"test": name_of(item), "outcome": report.outcome, "why": text})


def _short(excinfo: Any) -> str:
    """The last line of the test file on the stack, and the error."""
    if excinfo is None:
        return ""
    here = [entry for entry in excinfo.traceback if "/test/" in str(entry.path)]
    where = f"{here[-1].path.name}:{here[-1].lineno + 1}: " if here else ""
    text = str(excinfo.value).replace(f"{Path.cwd()}/", "").partition("\n\nTo execute this test")[0]
    return f"{where}{excinfo.typename}: {text}"[:400]
