"""A pytest plugin for `python -m bench dynamo_tests`: notes what became of each test and, under
DYNAMO_TESTS_WAY=dynamotor, answers torch.compile's capture by ours.

    python -m pytest -p bench.dynamo_stand_ins test_misc.py
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import json
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.test_case
import torch._dynamo.testing
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import dynamotor
from dynamotor import BackendError, CaptureError, UsageError
from dynamotor.api import plain

SECONDS = 60  # for one test
try:
    importlib.import_module("torchvision")
except Exception:  # made for another PyTorch: what asks whether it is there must hear that it is not
    sys.modules["torchvision"] = None  # type: ignore[assignment]
_config = torch._dynamo.config


# -- what a program asks of torch._dynamo, answered by dynamotor -------------------------------------------
def compile(model: Any = None, *, backend: Any = "inductor", **arguments: Any) -> Any:  # noqa: A001
    """`torch.compile`. Its settings that mean something here are read from torch._dynamo.config."""
    options = dict(arguments.pop("options", None) or {})
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        arguments["disable"] = True
    if _config.verify_correctness:
        options["check"] = True
    if not _config.automatic_dynamic_shapes and arguments.get("dynamic") is None:
        options.setdefault("symbolic_sizes", False)
    limit = arguments.pop("recompile_limit", None) or _config.recompile_limit
    if limit != _DEFAULT_LIMIT:
        options.setdefault("cache_size_limit", limit)
    for name in ("name", "isolate_recompiles", "shapes_spec"):
        arguments.pop(name, None)
    name = "native" if backend in (None, "inductor") else backend
    made = dynamotor.compile(backend=name, options=options, **arguments)
    return made if model is None else made(plain(model))


_DEFAULT_LIMIT = _config.recompile_limit


def optimize(
    backend: Any = "inductor",
    *,
    nopython: bool = False,
    dynamic: bool | None = None,
    disable: bool = False,
    **_hooks: Any,
) -> Any:
    """`torch._dynamo.optimize`: a decorator. Its hooks on guards are Dynamo's own."""
    return functools.partial(compile, backend=backend, fullgraph=nopython, dynamic=dynamic, disable=disable)


def optimize_assert(backend: Any, *, dynamic: bool | None = None, **hooks: Any) -> Any:
    """`torch._dynamo.optimize_assert`."""
    return optimize(backend, nopython=True, dynamic=dynamic, **hooks)


def disable(fn: Any = None, recursive: bool = True, **_why: Any) -> Any:
    """`torch._dynamo.disable`."""
    return dynamotor.disable(fn, recursive=recursive)


def run(fn: Any = None) -> Any:
    """`torch._dynamo.run`."""
    return dynamotor.run if fn is None else dynamotor.run(fn)


def reset() -> None:
    """`torch._dynamo.reset`; theirs too, for what tests look at."""
    _reset()
    dynamotor.reset()


_reset = torch._dynamo.reset


def export(f: Callable[..., Any], *extra: Any, aten_graph: bool = False, **how: Any) -> Any:
    """`torch._dynamo.export`: one graph as a function of the same arguments, whatever their values are."""

    def captured(*args: Any, **kwargs: Any) -> Any:
        assert aten_graph or not (how.get("decomposition_table") or how.get("tracing_mode") == "symbolic")
        kept: list[Any] = []

        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            def call(*tensors: Any) -> Any:
                outs = gm(*tensors)
                kept[:] = [gm, tensors, outs]
                return outs

            return call

        result = compile(f, backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)
        gm, inputs, outs = kept or (torch.fx.symbolic_trace(lambda: ()), (), ())
        if aten_graph and kept:
            with torch.fx.traceback.preserve_node_meta():
                gm = make_fx(gm, how.get("decomposition_table"))(*inputs)
        return torch._dynamo.eval_frame.ExportResult(_again(gm, inputs, outs, result, (args, kwargs)), [])

    if extra:  # as it was called in 2022
        names = ("decomposition_table", "tracing_mode", "dynamic_shapes", "same_signature")
        return captured(*extra, **{name: value for name, value in how.items() if name not in names})
    return captured


def _gives(out: torch.Tensor, value: Any) -> bool:
    """Whether a result is an output of the graph, or its number."""
    return out is value or type(value) in (int, float) and out.numel() == 1 and out.item() == value


def _again(gm: Any, inputs: Any, outs: Any, result: Any, given: Any) -> Any:
    """The graph behind the arguments and results of the call that it was captured in."""
    leaves = pytree.tree_leaves(given)
    places = [next((k for k, leaf in enumerate(leaves) if leaf is t), None) for t in inputs]
    flat, structure = pytree.tree_flatten(result)
    made = [next((k for k, out in enumerate(outs) if _gives(out, value)), None) for value in flat]
    passed = [next((k for k, leaf in enumerate(leaves) if leaf is value), None) for value in flat]

    def call(*args: Any, **kwargs: Any) -> Any:
        now = pytree.tree_leaves((args, kwargs))
        got = gm(*[t if k is None else now[k] for k, t in zip(places, inputs, strict=True)])
        values = [
            (got[m] if torch.is_tensor(v) else got[m].item()) if m is not None else v if p is None else now[p]
            for m, p, v in zip(made, passed, flat, strict=True)
        ]
        return pytree.tree_unflatten(values, structure)

    call.graph, call.code, call.print_readable = gm.graph, gm.code, gm.print_readable  # type: ignore[attr-defined]
    return call


def _stand_in() -> None:
    names = {
        "optimize": optimize,
        "optimize_assert": optimize_assert,
        "disable": disable,
        "run": run,
        "reset": reset,
        "export": export,
        "explain": dynamotor.explain,
        "allow_in_graph": dynamotor.allow_in_graph,
        "disallow_in_graph": dynamotor.disallow_in_graph,
        "assume_constant_result": dynamotor.assume_constant_result,
        "mark_dynamic": dynamotor.mark_dynamic,
        "maybe_mark_dynamic": dynamotor.mark_dynamic,
        "mark_static": dynamotor.mark_static,
        "set_stance": dynamotor.set_stance,
    }
    for module in (torch._dynamo, torch._dynamo.testing, torch._dynamo.test_case, torch._dynamo.eval_frame):
        for name, ours in names.items():
            if hasattr(module, name):
                setattr(module, name, ours)
    for name in ("disable", "reset", "allow_in_graph", "assume_constant_result", "set_stance"):
        setattr(torch.compiler, name, names[name])
    torch.compile = compile  # type: ignore[assignment]
    raised = torch._dynamo.exc
    raised.Unsupported = raised.ArgsMismatchError = raised.UserError = CaptureError  # type: ignore[misc, assignment]
    raised.BackendCompilerFailed = raised.InvalidBackend = BackendError  # type: ignore[misc, assignment]
    raised.RecompileError = raised.FailOnRecompileLimitHit = UsageError  # type: ignore[misc, assignment]


# -- names of other versions that tests import --------------------------------------------------------------
class _Absent:
    """What this version lacks: no, and a decorator that changes nothing."""

    def __bool__(self) -> bool:
        return False

    def __call__(self, fn: Any = None, *_: Any, **__: Any) -> Any:
        return fn if callable(fn) else self

    def __getattr__(self, name: str) -> Any:
        return self


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Before a test file is imported: give PyTorch's modules the names that it imports from them."""
    for node in ast.parse(module_path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
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


if not hasattr(_config, "cache_size_limit"):
    _config.cache_size_limit = _DEFAULT_LIMIT
if os.environ.get("DYNAMO_TESTS_WAY") == "dynamotor":
    _stand_in()


# -- what became of each test -------------------------------------------------------------------------------
def _note(row: dict[str, Any]) -> None:
    path = os.environ.get("DYNAMO_TESTS_ROWS")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out what ran before (a test that ends the process is not run again), and what is not asked for."""
    done = set(filter(None, os.environ.get("DYNAMO_TESTS_DONE", "").split("\n")))
    wanted = os.environ.get("DYNAMO_TESTS_ONLY", "").split()
    for item in items:
        if hasattr(item.cls, "guard_manager_clone_hook_fn"):  # a hook of another version's guards
            item.cls.guard_manager_clone_hook_fn = lambda *_: None
    names = {item: f"{item.cls.__name__ if item.cls else ''}.{item.originalname}" for item in items}
    items[:] = [
        item
        for item in items
        if names[item] not in done and (not wanted or item.originalname in wanted or names[item] in wanted)
    ]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """A limit for each test."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    _note({"test": f"{item.cls.__name__ if item.cls else ''}.{item.originalname}", "started": True})
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
    _note(
        {
            "test": f"{item.cls.__name__ if item.cls else ''}.{item.originalname}",
            "outcome": report.outcome,
            "why": text,
        }
    )


def _short(excinfo: Any) -> str:
    """The last line of the test file on the stack, and the error."""
    if excinfo is None:
        return ""
    here = [entry for entry in excinfo.traceback if "/test/" in str(entry.path)]
    where = f"{here[-1].path.name}:{here[-1].lineno + 1}: " if here else ""
    text = str(excinfo.value).replace(f"{Path.cwd()}/", "").partition("\n\nTo execute this test")[0]
    return f"{where}{excinfo.typename}: {text}"[:400]
