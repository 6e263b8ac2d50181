"""Graphs whose sizes differ between calls are run op by op while a GPU's kernels for new sizes are built."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import dynamotor
from bench.triton_interpret import available
from dynamotor.base.errors import BuildError
from dynamotor.base.events import counters
from dynamotor.codegen.gpu_program import GpuProgram

pytestmark = pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1")
COUNT = "calls while they are built"


@pytest.fixture
def builds(monkeypatch) -> list[Future[Any]]:
    """Builds that end when the test says so."""
    dynamotor.reset()
    counters.clear()
    made: list[Future[Any]] = []

    def start(program: GpuProgram, f: Any) -> None:
        if f.name not in program.builds:
            future: Future[Any] = Future()
            made.append(future)
            program.builds[f.name] = (None, future)

    monkeypatch.setattr(GpuProgram, "_start", start)
    return made


def end(builds: list[Future[Any]]) -> None:
    for future in builds:
        if not future.done():
            future.set_result(None)


def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.softmax(-1).t() * 2, x.sum(0)


def compiled(**more: Any) -> Any:
    return dynamotor.compile(fn, options={"target": "triton", **more}, dynamic=True)


def check(call: Any, *shape: int) -> None:
    x = torch.randn(shape)
    for a, b in zip(call(x), fn(x), strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


def test_calls_run_op_by_op_until_the_kernels_are_there(builds):
    call = compiled()
    for n in (5, 6, 7):
        check(call, n, 40)
    assert counters["kernels"][COUNT] == 3 and not counters["fallback"]
    end(builds)
    for n in (5, 6, 7):
        check(call, n, 40)
    assert counters["kernels"][COUNT] == 3
    n = len(builds)
    check(call, 32, 4096)  # another variant
    assert len(builds) > n and counters["kernels"][COUNT] == 4
    end(builds)
    check(call, 32, 4096)
    assert counters["kernels"][COUNT] == 4


def test_calls_wait_where_the_settings_say_so(builds):
    for more in ({"run_while_building": "none"}, {"cuda_graphs": True}):
        check(compiled(**more), 5, 40)
    check(dynamotor.compile(fn, options={"target": "triton"}), 5, 40)  # sizes are numbers
    assert not counters["kernels"][COUNT]


def test_all_graphs_may_run_meanwhile(builds):
    call = dynamotor.compile(fn, options={"target": "triton", "run_while_building": "all"})
    check(call, 5, 40)
    assert counters["kernels"][COUNT] == 1
    end(builds)
    check(call, 5, 40)
    assert counters["kernels"][COUNT] == 1


@pytest.mark.runs_eager
def test_a_build_that_fails_is_told_as_ever(builds, monkeypatch):
    call = compiled()
    check(call, 5, 40)
    error = BuildError("DM305", "no kernel")
    for future in builds:
        future.set_exception(error)

    def kernel(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(GpuProgram, "_kernel", kernel)
    check(call, 5, 40)
    assert counters["fallback"]["build.DM305"] == 1


@pytest.mark.parametrize("first", ["forward", "backward", "both"])
def test_halves_of_a_training_step_fit_together(builds, first):
    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).transpose(0, 1).contiguous().softmax(-1).transpose(0, 1)
        return (torch.nn.functional.gelu(y) * x).sum()

    call = dynamotor.compile(loss, options={"target": "triton"}, dynamic=True)
    w = torch.randn(24, 24)
    for n in (5, 9):
        found = []
        for run in (call, loss):
            x, own = torch.randn(n, 24, generator=torch.Generator().manual_seed(n)), w.clone()
            x.requires_grad_()
            own.requires_grad_()
            out = run(x, own)
            if run is call and first == "forward":
                end(builds)
            out.backward()
            if run is call and first == "backward":
                end(builds)
            found.append((out, x.grad, own.grad))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert counters["kernels"][COUNT]


def test_writes_into_inputs(builds):
    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y.softmax(-1))
        return x * 2

    call = dynamotor.compile(write, options={"target": "triton"}, dynamic=True)
    for n in (5, 6):
        x, y = torch.randn(n, 40), torch.randn(n, 40)
        want_x = x.clone()
        want = write(want_x, y)
        torch.testing.assert_close(call(x, y), want)
        torch.testing.assert_close(x, want_x)
    assert counters["kernels"][COUNT] == 2


def test_graphs_with_collectives_wait(builds, monkeypatch):
    from dynamotor import codegen

    monkeypatch.setattr(codegen, "meets_ranks", lambda target: True)
    check(compiled(), 5, 40)
    assert not counters["kernels"][COUNT]


def test_kernels_that_draw_numbers_are_waited_for(builds):
    call = dynamotor.compile(
        lambda x: torch.nn.functional.dropout(x, 0.5), options={"target": "triton"}, dynamic=True
    )
    call(torch.randn(5, 40))
    assert not counters["kernels"][COUNT]


def test_warming_up_waits_for_variants(builds):
    import threading

    call = dynamotor.compile(fn, options={"target": "triton"}, dynamic=True)
    compiler = call.miss.__self__
    timer = threading.Timer(0.2, lambda: end(builds))
    timer.start()
    x = torch.randn(5, 40)
    assert not compiler.warm_up(call, x) and all(future.done() for future in builds)
    timer.join()
    check(call, 5, 40)
    assert not counters["kernels"][COUNT]
