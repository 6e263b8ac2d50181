"""Compile a plain function's aten graph by the native compiler and compare it with eager."""

import contextlib

import torch
from aten_graphs import aten_graph

from dynamotor.base.config import config
from dynamotor.base.events import collect
from dynamotor.codegen import compile_aten
from dynamotor.graph.spec import GraphInfo
from dynamotor.lower.lower_graph import lower_graph
from dynamotor.lower.program import LoopStep
from fuzz.batch import Batch

_batch = None  # of the running test, with the comparisons to make at its end
_waiting = []


@contextlib.contextmanager
def together():
    """The kernels of all `check`s within are built by one run of the compiler, and compared at the end."""
    global _batch
    _batch = Batch()
    try:
        yield
        _batch.build()
        for compare in _waiting:
            compare()
    finally:
        _batch = None
        _waiting.clear()


def compiled(fn, *inputs):
    """(callable, texts of the loop kernels, names of the ops left to aten)."""
    with config.patch(strict=True), collect("kernel", "fallback") as events:
        call = compile_aten(aten_graph(fn, *inputs), GraphInfo("inference", "test", frozenset()))
    kernels = [e.data["text"] for e in events if e.kind == "kernel"]
    return call, kernels, [e.data["op"] for e in events if e.kind == "fallback" and "op" in e.data]


def check(fn, *inputs, kernels=None, fallbacks=(), tolerance=None, strides=True):
    """Compile fn for these inputs and compare values, dtypes and strides with eager's; gives the kernels'
    texts. Tensors are inputs: the graph has none of its own.
    """
    batch = _batch or contextlib.nullcontext()
    with torch.no_grad(), batch:
        want = fn(*inputs)
        call, texts, left = compiled(fn, *inputs)
    if kernels is not None:
        assert len(texts) == kernels, "\n".join(texts)
    if fallbacks is not None:
        assert sorted(set(left)) == sorted(fallbacks)
    line = fn.__code__.co_firstlineno if hasattr(fn, "__code__") else fn

    def compare():
        with torch.no_grad(), batch:
            got = call(*inputs)
        _same(got, want if isinstance(want, (tuple, list)) else (want,), tolerance, strides, line)

    _waiting.append(compare) if _batch else compare()
    return texts


def _same(got, want, tolerance, strides, line):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype is b.dtype and a.shape == b.shape
        if strides:
            assert all(
                s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True) if n > 1 and b.numel()
            )
        loose = (
            {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(a.dtype, 1e-12)
            if tolerance is None
            else tolerance
        )
        torch.testing.assert_close(
            a, b, rtol=loose, atol=loose, equal_nan=True, msg=lambda text: f"function of line {line}: {text}"
        )


def lowered(fn, *inputs):
    """The program of a function."""
    with torch.no_grad():
        return lower_graph(aten_graph(fn, *inputs), GraphInfo("inference", "test", frozenset()))


def loop_steps(program):
    """Its loop kernels."""
    return [s for s in program.steps if isinstance(s, LoopStep)]
