"""Generated Triton kernels of every kind, run in Triton's interpreter on CPU tensors, against eager."""

import operator

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed")

from triton_launches import check, launches, run

from bench.triton_interpret import available
from dynamotor.codegen import triton, triton_ops, triton_plan
from dynamotor.codegen.triton_plan import GpuTuning
from dynamotor.lower.index_expr import Index, Var, flatten
from dynamotor.lower.ir import Kernel, Phase, Reduce, Store, compare, const, load, make, op
from dynamotor.runtime import triton_build
from dynamotor.runtime.triton_build import TritonJob, start_kernel

pytestmark = [
    pytest.mark.sweep(4),
    pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1"),
]
R = torch.randn


def test_a_map_is_one_launch_without_division_where_memory_is_flat():
    (function,) = check(lambda x: torch.tanh(x) * 2 + 1, R(7, 33))
    assert "//" not in function.source and function.grid == 2


def test_a_transposed_copy_has_tiles_of_two_axes():
    (function,) = check(lambda x: x.t().contiguous() + 1, R(64, 80))
    assert "[:, None]" in function.source and "[None, :]" in function.source


def test_softmax_keeps_its_row_in_registers_and_loops_over_a_long_one():
    (short,) = check(lambda x: torch.softmax(x, -1), R(6, 40))
    tuning = GpuTuning(programs=2)
    (long,) = check(lambda x: torch.softmax(x, -1), R(2, 20000), tuning=tuning)
    assert "for " not in short.source and long.source.count("for base") == 2


@pytest.mark.slow
def test_few_long_rows_take_launches_for_each_pass():
    functions = check(lambda x: torch.softmax(x, -1), R(2, 20000))
    assert len(functions) == 3 and max(f.grid for f in functions) > 4
    x, w = R(3, 2, 9000), R(2)
    norm = torch.ops.aten._native_batch_norm_legit_functional
    check(lambda x, w: norm(x, w, w, w, w, True, 0.1, 1e-5), x, w, tolerance=1e-4)


def test_long_sums_are_shared_by_programs():
    first, second = check(lambda x: x.sum(), R(64, 4800), tolerance=1e-3)
    assert first.grid > 1 and second.grid == 1
    first, second = check(lambda x: x.sum(0), R(5000, 3), tolerance=1e-3)
    assert first.grid > 1


def test_row_statistics_and_column_sums_together():
    w = torch.ones(32)
    x, g = R(70, 32), R(70, 32)
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, [32], w, w, 1e-5)
    backward = torch.ops.aten.native_layer_norm_backward
    functions = check(
        lambda g, x, m, r, w: backward(g, x, [32], m, r, w, w, [True, True, True]), g, x, mean, rstd, w
    )
    assert len(functions) == 2 and "for step" in functions[0].source


def test_a_value_along_the_row_alone_gets_a_launch_of_its_own():
    check(lambda x, b: (torch.softmax(x + b, -1), b * 2), R(6, 40), R(40))


@pytest.mark.parametrize("size", [50, 20000])
def test_positions_of_ties_and_nan_are_eagers(size):
    x = torch.randint(0, 5, (3, size)).float()
    x[1, 7] = x[1, 9] = float("nan")
    x[2] = -float("inf")
    check(lambda x: (x.argmax(1), x.argmin(1), x.amax(1), x.amin(1)), x)


def test_positions_in_rows_of_one_element():
    fn = lambda x: (x.argmax(1), x.argmin(1), x.amax(1), torch.cummax(x, 1)[1])  # noqa: E731
    check(fn, R(5, 1))
    tuning = GpuTuning(whole_row=0, loop_tile=0, long_tile=1)
    check(fn, R(5, 1), tuning=tuning)


def test_reads_at_computed_positions_are_checked():
    w, i = R(10, 8), torch.randint(-10, 10, (5,))
    check(lambda w, i: w[i] * 2, w, i)
    program = launches(lambda w, i: w[i] * 2, w, i)
    with pytest.raises(IndexError):
        run(program, w, torch.tensor([0, 1, 10, 2, 3]))


def test_half_precision_is_computed_in_float32():
    for dtype in (torch.bfloat16, torch.float16):
        x = R(9, 70, dtype=dtype)
        (function,) = check(lambda x: F.gelu(x) + 1, x, tolerance=2e-2)
        assert ".to(tl.float32)" in function.source


def test_padding_touches_no_memory_outside():
    check(lambda x: F.pad(x, (1, 2, 3, 4), value=2.0) + 1, R(5, 6))


def test_what_a_condition_on_columns_does_not_change_is_read_once_a_row():
    tuning = GpuTuning(programs=2)
    x, y, t = R(9, 5001), R(9, 1), torch.randint(0, 9, (9, 1))
    fn = lambda x, y, t: F.pad(x * y + y[t.squeeze(1)] * y[0], (0, 7), value=3.0)  # noqa: E731
    (function,) = check(fn, x, y, t, tuning=tuning)
    assert function.source.count("tl.load(") == 5 and "r * 0" not in function.source
    check(lambda x, y, t: F.pad(F.pad(x * y, (2, 3)) * y[0], (-4, 5, 1, 0)), x, y, t, tuning=tuning)
    check(lambda x, y, t: torch.cat([x[:, :3] * y, x[:, 3:] + y[t.squeeze(1)]], 1), x, y, t, tuning=tuning)


def test_random_numbers_are_those_of_the_graph():
    seed = torch.tensor([(123456789 << 20) + 17])
    for count in (5, 1000):
        check(lambda s: torch.ops.dynamotor.rand(s, 3, [count]), seed, tolerance=0)  # noqa: B023


def test_random_numbers_that_only_some_elements_want():
    def fn(s, x):
        return torch.select_scatter(x * torch.ops.dynamotor.rand(s, 3, [33, 8]), torch.ones(33), 1, 0)

    check(fn, torch.tensor([1234567]), R(33, 8), tolerance=1e-6)


@pytest.mark.parametrize(
    "limit", [-1.0, 0.0, 2.0**-24, 2.0**-25, 0.1, 0.37, 0.5, 0.9, 1 - 2.0**-24, 1.0, 2.0, float("nan")]
)
def test_a_random_number_against_a_constant_is_compared_by_its_bits(limit):
    rand = torch.ops.dynamotor.rand
    seed = torch.tensor([-123456789012345])
    functions = check(
        lambda s: [getattr(rand(s, 3, [500]), op)(limit) for op in ("lt", "le", "gt", "ge")],
        seed,
        tolerance=0,
    )
    assert all(("uniform(" in f.source) != (0 < limit < 1 - 2.0**-24) for f in functions)
    (both,) = check(lambda s: rand(s, 3, [500]) * (rand(s, 3, [500]) < limit), seed, tolerance=0)
    assert both.source.count("random_words(") == 1
    check(lambda s: rand(s, 3, [7, 5])[:, 3] >= limit, seed, tolerance=0)


def test_numbers_on_both_sides_of_a_limit_compare_as_floats():
    for word in (0, 255, 256, 3865470463, 3865470464, 2**32 - 1):
        u = (word >> 8) * 2.0**-24
        for limit in (u, u + 2.0**-25, u + 2.0**-24):
            number = make("rand", (const(0, torch.int64), 0, Index({}, 0)), torch.float32)
            for name in ("lt", "le", "gt", "ge"):
                found = triton_ops.word_test(compare(name, number, const(limit, torch.float32)))
                value = torch.tensor(limit, dtype=torch.float32).item()
                assert found is None or eval(found[1].format(word)) == getattr(operator, name)(u, value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_in_half_precision_is_as_near_as_eagers(dtype):
    x = torch.cat([R(3000) * 2, torch.tensor([0.0, -0.0, 30.0, -30.0, float("inf"), float("nan")])]).to(dtype)
    exact = F.gelu(x.double())
    (got,) = run(launches(F.gelu, x), x)
    ours, eagers = (((y.double() - exact).abs() / exact.abs().clamp(min=1e-4))[:-2] for y in (got, F.gelu(x)))
    assert ours.max() <= eagers.max() and ours.mean() <= eagers.mean() * 1.001
    assert got[-2] == float("inf") and got[-1].isnan()
    (grad,) = run(launches(torch.ops.aten.gelu_backward, x, x), x, x)
    torch.testing.assert_close(grad, torch.ops.aten.gelu_backward(x, x), equal_nan=True)


def test_equal_kernels_share_one_function():
    program = launches(
        lambda x, y: ((x * 2).sum(1, keepdim=True).exp(), (y * 2).sum(1, keepdim=True).exp()),
        R(4, 8),
        R(4, 8),
    )
    names = [s.function.name for s in program.steps]
    assert len(names) == 2 and len(set(names)) == 1


def test_positions_behind_two_to_the_31_are_64_bit():
    i, j = Var("i", 1 << 16), Var("j", 1 << 16)
    at = flatten([Index.of(i), Index.of(j)], (1 << 16, 1))
    x = load("x", at, torch.uint8)
    kernel = Kernel(
        "rows",
        (i,),
        (),
        (j,),
        (Phase((Store("y", at, x, torch.uint8),)),),
        params=(("x", torch.uint8, False),),
    )
    (piece,) = triton_plan.plan_kernel(kernel, lambda spec: "none")
    assert ".to(tl.int64)" in triton.emit_piece(piece).source


def test_parts_of_any_length_are_joined_in_one_launch():
    a, b, c = R(3, 5), R(3, 7), R(3, 1)
    check(lambda a, b, c: torch.cat([a * 2, b.exp(), c], 1).relu(), a, b, c)
    assert len(check(lambda a, b, c: torch.cat([a, b, c], 1), a, b, c)) == 1
    assert len(check(lambda *x: torch.stack(x, 1) + 1, *(R(4, 3) for _ in range(6)))) == 1


@pytest.mark.parametrize(("shape", "dim"), [((3, 300), 1), ((150, 9), 0)])
def test_running_results_are_carried_from_tile_to_tile(shape, dim):
    tuning = GpuTuning(loop_tile=128)
    x = torch.randint(0, 9, shape).float()
    (function,) = check(lambda x: torch.cumsum(x, dim), x, tuning=tuning)
    assert "for base" in function.source
    check(lambda x: torch.cumprod(x * 0.2, dim), x, tuning=tuning)
    check(lambda x: torch.cummax(x, dim), x.long(), tuning=tuning)
    x[1, 2], x[2] = float("nan"), -float("inf")
    check(lambda x: (*torch.cummax(x, dim), *torch.cummin(x, dim)), x, tuning=tuning)
    check(lambda x: torch.logcumsumexp(x, dim), x[:, :5] if dim else x[:, :2], tuning=tuning)


def layer_norm_gradients(rows, row, dtype=torch.float32):
    backward = torch.ops.aten.native_layer_norm_backward
    x, g, more, w = R(rows, row), R(rows, row, dtype=dtype), R(rows, row), R(row)
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, [row], w, w, 1e-5)

    def gradients(g, x, mean, rstd, w, more):
        dx, dw, db = backward(g.float(), x, [row], mean, rstd, w, w, [True, True, True])
        out = dx + more
        half = out.to(dtype)
        return out, half, half.float().sum(0), dw, db

    return gradients, (g, x, mean, rstd, w, more)


@pytest.mark.parametrize(("rows", "row"), [(70, 32), (67, 128), (41, 200), (50, 768), (9, 5000), (30, 49)])
def test_few_rows_at_a_time_are_summed_both_ways(rows, row):
    tuning = GpuTuning(programs=2)
    gradients, inputs = layer_norm_gradients(rows, row, torch.bfloat16)
    functions = check(gradients, *inputs, tolerance=1e-2, tuning=tuning)
    assert "num_stages" in functions[0].source
    gradients, inputs = layer_norm_gradients(rows, row)
    check(gradients, *inputs, tolerance=1e-4, tuning=tuning)


@pytest.mark.parametrize("onto", ["x", "y"])
def test_loads_run_ahead_of_no_store_to_their_memory(onto):
    i, j = Var("i", 5000), Var("j", 128)
    at = flatten([Index.of(i), Index.of(j)], (128, 1))
    x = load("x", at, torch.float32)
    sums = (Reduce(0, "sum", x), Reduce(1, "sum", x, across=True))
    square = Store(onto, at, op("mul", x, x), torch.float32)
    total = Store("total", Index.of(j), make("acc", (1, "final", None), torch.float32), torch.float32)
    params = (("x", torch.float32, onto == "x"), ("y", torch.float32, True), ("total", torch.float32, True))
    kernel = Kernel("rows", (i,), (), (j,), (Phase(sums), Phase((square,))), (total,), params=params)
    first, *_ = triton_plan.plan_kernel(kernel, lambda spec: "none")
    assert ("num_stages" in triton.emit_piece(first).source) == (onto == "y")


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("rows", "row"), [(70, 96), (301, 768), (1000, 64), (33, 1000), (5, 20000), (300, 7)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_columns_alone_are_tiled_over_columns_too(rows, row, dtype):
    tuning = GpuTuning(programs=8)
    backward = torch.ops.aten.gelu_backward

    def gradients(g, x):
        h = backward(g.float(), x.float())  # eager would sum rounded values
        return h.to(g.dtype), h.sum(0), (h * x).sum(0)

    check(
        gradients,
        R(rows, row, dtype=dtype),
        R(rows, row, dtype=dtype),
        tolerance=1e-3 if dtype is torch.float32 else 5e-2,
        tuning=tuning,
    )


def test_runs_are_named_where_types_differ_and_the_axis_is_one_variable():
    heads = R(3, 20, 4, 7, 32, dtype=torch.bfloat16)

    def joined(t):
        y = t.permute(1, 3, 0, 2, 4).clone(memory_format=torch.contiguous_format).view(140, 384)
        return y, y.sum(0, dtype=torch.float32)

    assert "max_contiguous" not in check(joined, heads, tolerance=1e-2)[0].source
    x = R(140, 384)
    mixed = check(lambda x: (x * 2, x.to(torch.bfloat16), x.sum(0)), x, tolerance=1e-2)
    assert "tl.max_contiguous(tl.arange(0, 128), 4)" in mixed[0].source


@pytest.mark.skipif(not triton_build.triton_version(), reason="triton is not installed")
@pytest.mark.slow
def test_a_loop_over_rows_gets_a_pipeline_that_fits_a_multiprocessor():
    for rows, row in ((12000, 128), (3000, 768), (600, 4096)):
        gradients, inputs = layer_norm_gradients(rows, row, torch.bfloat16)
        f = launches(gradients, *inputs).steps[0].function
        code = start_kernel(
            TritonJob(triton_ops.HELPERS + f.source, f.name, f.signature, f.warps, arch=90)
        ).result()
        assert 1 << 12 < code.shared <= GpuTuning().shared * f.warps // 16 + 4096


def test_the_negative_of_zero_has_a_sign():
    """Triton's is 0 - x."""
    x = torch.tensor([0.0, -0.0, 1.5, torch.inf, -torch.inf]).repeat(7)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        (got,) = run(launches(lambda x: -x, x.to(dtype)), x.to(dtype))
        assert torch.equal(got.signbit(), (-x).signbit()) and torch.equal(got, -x.to(dtype))


def test_few_rows_take_many_warps_and_load_what_follows_their_sum_ahead():
    def norm(x, w):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w

    (few,) = check(norm, R(3, 2048), R(2048))
    assert few.warps == 16 and few.source.rindex("tl.load") < few.source.index("tl.sum")
    (many,) = check(norm, R(140, 2048), R(2048))
    assert many.warps == 4 and many.source.rindex("tl.load") > many.source.index("tl.sum")


def test_a_row_that_was_written_is_not_loaded_ahead():
    def steps(x, w):
        y = x - x.sum(-1, keepdim=True)
        w = w + y[0]
        return y, w, (x * w).amax(-1)

    check(steps, R(3, 96), R(96), tolerance=1e-4)


def test_a_row_keeps_its_program_whatever_follows_its_reduction():
    def step(x, flags, more):
        token = x.argmax(-1)
        return token * flags + more * (1 - flags), flags & (token != 2).long()

    (one,) = check(step, R(32, 5000), torch.ones(32, dtype=torch.long), torch.arange(32))
    assert one.grid == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_programs_share_a_long_row_whose_positions_are_asked_for(dtype):
    x = torch.randint(-3, 4, (4, 70000)).to(dtype)
    x[1, 69999], x[2, [40000, 69000]] = 5, -5
    if dtype.is_floating_point:
        x[3, [60000, 65000]] = torch.nan
        x[0] = -torch.inf
    first, second = check(lambda x: x.argmax(1) + 1, x)
    assert first.grid == 20 and second.grid <= 4
    check(lambda x: (*x.max(1), x.argmin(1), x.nan_to_num().clamp(-9).long().sum(1)), x)
