"""Compile a plain function's aten graph by the native compiler and compare it with eager."""

import torch
from aten_graphs import aten_graph

from dynamotor.base.config import config
from dynamotor.base.events import collect
from dynamotor.codegen import compile_aten
from dynamotor.graph.info import GraphInfo
from dynamotor.lower.lower import lower_graph
from dynamotor.lower.program import LoopStep


def compiled(fn, *inputs):
    """(callable, texts of the loop kernels, names of the ops left to aten)."""
    with config.patch(strict=True), collect("kernel", "fallback") as events:
        call = compile_aten(aten_graph(fn, *inputs), GraphInfo("inference", "test", frozenset()))
    kernels = [e.data["text"] for e in events if e.kind == "kernel"]
    return call, kernels, [e.data["op"] for e in events if e.kind == "fallback" and "op" in e.data]


def check(fn, *inputs, kernels=None, fallbacks=(), tolerance=None, strides=True):
    """Compile fn for these inputs and compare values, dtypes and strides with eager's; gives the kernels'
    texts.
    """
    with torch.no_grad():
        want = fn(*inputs)
        call, texts, left = compiled(fn, *inputs)
        got = call(*inputs)
    want = want if isinstance(want, (tuple, list)) else (want,)
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
        torch.testing.assert_close(a, b, rtol=loose, atol=loose, equal_nan=True)
    if kernels is not None:
        assert len(texts) == kernels, "\n".join(texts)
    if fallbacks is not None:
        assert sorted(set(left)) == sorted(fallbacks)
    return texts


def lowered(fn, *inputs):
    """The program of a function."""
    with torch.no_grad():
        return lower_graph(aten_graph(fn, *inputs), GraphInfo("inference", "test", frozenset()))


def loop_steps(program):
    """Its loop kernels."""
    return [s for s in program.steps if isinstance(s, LoopStep)]
