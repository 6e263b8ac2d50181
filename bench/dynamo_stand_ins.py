"""A pytest plugin for `python -m bench dynamo_tests`: notes what became of each test and, under
DYNAMO_TESTS_WAY=dynamotor, answers torch.compile's capture by ours.

    python -m pytest -p bench.dynamo_stand_ins test_misc.py
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.test_case
import torch._dynamo.testing
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import dynamotor
from dynamotor import _C, BackendError, CaptureError, UsageError
from dynamotor.api import plain
from dynamotor.base import events

from .rows_of_tests import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_pycollect_makemodule,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
)

try:
    importlib.import_module("torchvision")
except Exception:  # made for another PyTorch: what asks whether it is there must hear that it is not
    sys.modules["torchvision"] = None  # type: ignore[assignment]

_config = torch._dynamo.config


# -- questions of a program to torch._dynamo, answered by dynamotor -------------------------------------------
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
    """`torch._dynamo.optimize`: a decorator, or a region. Its hooks on guards are Dynamo's own."""
    return _Region(compile, backend=backend, fullgraph=nopython, dynamic=dynamic, disable=disable)


class _Region(functools.partial):  # type: ignore[type-arg]
    """`with optimize(backend):`, the form of 2022: functions that are entered inside are compiled, as those are
    that a break enters."""

    def __enter__(self) -> None:
        assert not _config.raise_on_ctx_manager_usage
        frames = self(lambda: None).miss.__self__.inner
        self.before = _C.set_frame_hook(frames._hook)

    def __exit__(self, *_: object) -> None:
        _C.set_frame_hook(self.before)


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
                gm = make_fx(torch.fx.Interpreter(gm).run, how.get("decomposition_table"))(*inputs)
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


def _count(event: events.Event) -> None:
    """What torch._dynamo.utils.counters says of a capture or a break, said of ours."""
    theirs = torch._dynamo.utils.counters
    if event.kind == "break":
        theirs["graph_break"][event.data["reason"].what] += 1
        return
    theirs["frames"].update(("total", "ok"))
    if event.data["graph"] is not None:
        calls = [node for node in event.data["graph"].graph.nodes if node.op.startswith("call")]
        theirs["stats"].update({"unique_graphs": 1, "calls_captured": len(calls)})


def _stand_in() -> None:
    events.subscribe(_count, "capture", "break")
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


if not hasattr(_config, "cache_size_limit"):
    _config.cache_size_limit = _DEFAULT_LIMIT
if os.environ.get("DYNAMO_TESTS_WAY") == "dynamotor":
    _stand_in()


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: Any) -> None:
    """A hook of another version's guards."""
    if hasattr(item.cls, "guard_manager_clone_hook_fn"):
        item.cls.guard_manager_clone_hook_fn = lambda *_: None
