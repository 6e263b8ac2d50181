"""Long rows that start anywhere in memory: whole vectors inside, elements at the edges, and nothing of the
neighbours.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton_launches import check, launches, run

from bench.triton_interpret import available, make_interpreted
from dynamotor.base.config import config
from dynamotor.codegen import triton_plan
from dynamotor.codegen.triton import emit_piece
from dynamotor.codegen.triton_ops import HELPERS
from dynamotor.codegen.triton_plan import GpuTuning
from dynamotor.codegen.triton_vectors import vectors_of
from dynamotor.lower.index_expr import Index, Var
from dynamotor.lower.ir import Kernel, Phase, Store, load
from dynamotor.runtime.triton_build import TritonJob, start_kernel, stop_workers

pytestmark = [
    pytest.mark.sweep(4),
    pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1"),
]
R = torch.randn
ODD = 20001
FEW = GpuTuning(programs=2)  # a few rows are work for all of them


@pytest.fixture(autouse=True)
def promises(monkeypatch):
    """What kernels tell the compiler about positions holds; the interpreter itself ignores it."""
    seen = []

    def check_promise(handle, name, values):
        run = handle.data.reshape(-1, values[-1])
        assert (run[:, 0] % values[-1] == 0).all() and (run == run[:, :1] + np.arange(values[-1])).all(), (
            f"{name} {values}"
        )
        seen.append(name)

    monkeypatch.setattr("triton.runtime.interpreter.TensorHandle.set_attr", check_promise)
    return seen


def by_vectors(functions):
    return [f for f in functions if "lead = " in f.source]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [ODD, ODD + 378, 5 * 4096 - 1, 5 * 4096 + 6])
def test_softmax_of_rows_of_any_length(dtype, size):
    x = R(9, size).to(dtype)
    x[3, :5000] = x[4] = x[8, -5:] = -float("inf")
    x[6, 0], x[7, size - 1] = float("nan"), float("inf")
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype]
    functions = check(lambda x: torch.softmax(x, -1), x, tolerance=tolerance, tuning=FEW)
    assert bool(by_vectors(functions)) == (size * dtype.itemsize % 16 != 0)
    check(
        lambda x: torch.log_softmax(x, -1),
        x,
        tolerance=2e-2 if dtype is torch.bfloat16 else tolerance,
        tuning=FEW,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_reductions_with_and_without_positions(dtype):
    x = (R(8, ODD) * 20).to(dtype)
    x[:, 700] = x[:, -1] = x.max()
    functions = check(lambda x: (x.argmax(-1), x.amin(-1), (x > 0).sum(-1)), x, tuning=FEW)
    functions += check(lambda x: x.argmin(-1), x, tuning=FEW)
    assert by_vectors(functions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_map_over_many_long_rows_computes_row_values_once(dtype):
    tuning = GpuTuning(programs=2, long_row=1000)
    x = (R(11, 9001) * 3).to(dtype)
    row, column = R(11, 1), R(9001)
    (function,) = check(lambda x, a, b: (x * a + b, x == 0), x, row, column, tolerance=1e-4, tuning=tuning)
    assert by_vectors([function]) and "//" not in function.source.split("for base")[1]


@pytest.mark.parametrize("rows, size", [(1, 70001), (3, 50257), (5, 4 * 8192 + 3), (2, 65536 + 8)])
def test_programs_that_share_a_row_have_vectors_too(promises, rows, size):
    tuning = GpuTuning(programs=16)
    x = R(rows, size).bfloat16()
    functions = check(
        lambda x: (x.float().logsumexp(-1), x.amax(-1), x.float().sum(-1)), x, tolerance=1e-3, tuning=tuning
    )
    assert bool(by_vectors(functions)) == bool(size % 8) and functions[0].grid > rows
    assert bool(promises) == bool(size % 8)


@pytest.mark.slow
def test_rows_of_several_dimensions_and_of_views():
    tuning = GpuTuning(programs=2, long_row=1000)
    x = R(3, 5, 9003).bfloat16()
    check(lambda x: x[:, 1:] * 2 + 1, x, tuning=tuning)
    check(lambda x: x[:, 1:, 5:] + x[:, :-1, 2:-3], x, tuning=tuning)
    check(lambda x: torch.softmax(x[:, :4].float(), -1), R(3, 5, ODD), tuning=tuning)
    check(lambda x: x[..., :-1].float().logsumexp(-1), R(3, 5, ODD).bfloat16(), tuning=tuning)
    check(lambda x: x.t().softmax(0), R(8, ODD), tuning=tuning)
    check(lambda x: x.softmax(-1) + 1, R(ODD, 8).t(), tuning=tuning)


def test_what_a_condition_guards_is_computed_before_the_loop_where_no_loop_changes_it():
    tuning = GpuTuning(programs=2, long_row=1000)
    x, row, place = R(3, 4, 9001), R(3, 4), torch.tensor([[0, 8, 5, 7]] * 3)

    def padded(x, row, place):
        hit = torch.arange(9001) == place[..., None]
        return torch.nn.functional.pad(torch.where(hit, x.exp() * row[..., None], x), (0, 0, 0, 1), value=2.0)

    (function,) = check(padded, x, row, place, tolerance=1e-4, tuning=tuning)
    before, *loops = function.source.split("for base")
    assert before.count("tl.load(") == 2 and all(loop.count("tl.load(") == 1 for loop in loops)


def test_memory_that_does_not_start_at_a_vector_is_read_by_elements():
    whole = torch.full((8 * ODD + 3,), float("nan")).bfloat16()
    x = whole[1 : 8 * ODD + 1].view(8, ODD)
    x.copy_(R(8, ODD))
    program = launches(lambda x: torch.softmax(x.float(), -1), R(8, ODD).bfloat16(), tuning=FEW)
    assert by_vectors([step.function for step in program.steps])
    torch.testing.assert_close(run(program, x)[0], torch.softmax(x.float(), -1))


def test_writes_touch_nothing_but_the_row():
    """Rows of 9,001 in rows of 9,010: the gap stays."""
    x, r = Var("i", 7), Var("j", 9001)
    for apart in (9010, 9016):
        for dtype in (torch.float32, torch.bfloat16):
            place = Index({x: apart, r: 1}, 3)
            from_ = Index({x: 9001, r: 1})
            store = Store("out", place, load("in", from_, dtype), dtype)
            kernel = Kernel(
                "rows",
                (x,),
                (),
                (r,),
                (Phase((store,)),),
                params=(("in", dtype, False), ("out", dtype, True)),
            )
            found = vectors_of(kernel, (r,))
            assert found.start == Index({x: apart % found.unit}, 3)  # stores decide
            check_store(kernel, apart, dtype)


def check_store(kernel, apart, dtype):
    planner = triton_plan.Planner(lambda spec: "none", FEW)
    plan = planner.by_vectors(kernel, planner.loop_plan(kernel.outer, kernel.inner, False))
    f = emit_piece(triton_plan._piece(kernel, plan))
    given, out = R(7, 9001).to(dtype), torch.full((7 * apart + 8,), 7.0).to(dtype)
    want = out.clone()
    want[3:].as_strided((7, 9001), (apart, 1)).copy_(given)
    make_interpreted(HELPERS + f.source, f.name, f.grid)(given, out)
    assert torch.equal(out, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.slow
def test_kernels_of_both_kinds_of_pointers_build_for_a_gpu(dtype, tmp_path):
    with config.patch(cache_dir=str(tmp_path)):
        x = R(8, ODD).to(dtype)
        programs = [
            launches(lambda x: (torch.softmax(x, -1), x.argmax(-1)), x, tuning=FEW),
            launches(lambda x: x.logsumexp(-1), x[:1], tuning=FEW),
        ]
        functions = by_vectors([step.function for program in programs for step in program.steps])
        jobs = [
            TritonJob(HELPERS + f.source, f.name, f.signature, f.warps, 90, aligned)
            for f in functions
            for aligned in (True, False)
        ]
        assert len(jobs) >= 4 and all(
            pending.result().cubin for pending in [start_kernel(job) for job in jobs]
        )
    stop_workers()
