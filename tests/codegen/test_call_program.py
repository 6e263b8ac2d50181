"""The call program: text, memory, static inputs, outputs, mutation, threads. Kernels are written by hand
here.
"""

import gc
import threading
import weakref

import pytest
import torch

import dynamotor
from dynamotor.base import compat
from dynamotor.base.config import config
from dynamotor.base.errors import BackendError, BuildError
from dynamotor.base.events import counters
from dynamotor.codegen import call_program, cpp
from dynamotor.codegen.cpp import CFunction
from dynamotor.graph.spec import GraphInfo, TensorSpec
from dynamotor.lower.program import Buffer, BufRef, ExternStep, LoopStep, Program
from dynamotor.runtime import memory

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _hand_written_kernels(monkeypatch, tmp_path):
    monkeypatch.setattr(cpp, "emit_kernel", lambda kernel: kernel)
    monkeypatch.setattr(
        cpp, "emit_unit", lambda functions: "typedef long int64_t;\n" + "\n".join(f.source for f in functions)
    )
    gc.collect()
    memory.release_all()
    with config.patch(cache_dir=str(tmp_path)):
        yield


def loop(name, expression, n, n_in):
    """A kernel that sets its last argument to an expression of in0[i], in1[i], ..."""
    ins = " ".join(f"float* in{i} = (float*)p[{i}];" for i in range(n_in))
    return CFunction(
        name,
        f'extern "C" void {name}(void** p, const int64_t* ints) {{ {ins} float* out = (float*)p[{n_in}]; '
        f"for (int i = 0; i < {n}; i++) out[i] = {expression}; }}",
        ("float",) * (n_in + 1),
    )


def step(kernel, *args, inplace=()):
    return LoopStep(kernel, args, args[:-1], args[-1:], inplace)


def f32(*shape):
    return TensorSpec.dense(shape, torch.float32)


def make(buffers, steps, outputs, static=(), mutations=(), on_error=None):
    buffers = {name: Buffer(name, spec, kind) for name, (spec, kind) in buffers.items()}
    inputs = tuple(name for name, b in buffers.items() if b.kind == "input")
    refs = tuple(BufRef.whole(buffers[o]) if isinstance(o, str) else o for o in outputs)
    program = Program("graph0", inputs, buffers, steps, refs, tuple(mutations))
    info = GraphInfo("inference", "graph0", frozenset(static))

    def refuse(error):
        raise error

    return call_program.CallProgram(program, info, on_error or refuse)


def whole(name, *shape):
    spec = f32(*shape)
    return BufRef(name, spec.shape, spec.stride, 0, torch.float32)


N = 64


def double_then_square():
    twice, square = loop("twice", "in0[i] * 2", N, 1), loop("square", "in0[i] * in0[i]", N, 1)
    return make(
        {"x": (f32(N), "input"), "t": (f32(N), "temp"), "u": (f32(N), "temp"), "y": (f32(N), "output")},
        [step(twice, "x", "t"), step(twice, "t", "u"), step(square, "u", "y")],
        ["y"],
    )


def test_kernels_run_over_scratch_memory_and_give_fresh_results():
    program = double_then_square()
    x = torch.randn(N)
    first, second = program(x)[0], program(x + 1)[0]
    torch.testing.assert_close(first, (4 * x) ** 2)
    torch.testing.assert_close(second, (4 * (x + 1)) ** 2)
    assert program.source.startswith("def call(x):") and "k0(x, t)" in program.source


def test_a_program_without_memory_of_its_own_is_called_without_a_block(monkeypatch):
    once = step(loop("once", "in0[i] + 1", N, 1), "x", "y")
    with config.patch(check=False):
        program = make({"x": (f32(N), "input"), "y": (f32(N), "output")}, [once], ["y"])
    program(torch.zeros(N))
    monkeypatch.setattr(program, "_arena", None)  # asked by programs with temporaries
    x = torch.randn(N)
    first, second = program(x)[0], program(x)[0]
    torch.testing.assert_close(first, x + 1)
    assert first.data_ptr() != second.data_ptr()
    with torch.inference_mode():
        assert program(x)[0].is_inference()
    monkeypatch.undo()
    with torch.profiler.profile() as profile:
        program(x)
    assert [event.key for event in profile.key_averages()] == ["dynamotor::once"]


def test_equal_kernels_are_one_function():
    program = double_then_square()
    assert program.source.count("k0(") == 2 and program.cpp_source.count("void twice(") == 1


def test_a_matmul_writes_planned_memory_and_a_view_of_a_parameter_is_made_once():
    weight = torch.randn(5, 4, requires_grad=True)
    view = BufRef("w", (4, 5), (1, 4), 0, torch.float32)
    relu = loop("relu15", "in0[i] > 0 ? in0[i] : 0", 15, 1)
    program = make(
        {
            "x": (f32(3, 4), "input"),
            "w": (f32(5, 4), "input"),
            "m": (f32(3, 5), "temp"),
            "y": (f32(3, 5), "output"),
        },
        [
            ExternStep(aten.mm.default, (whole("x", 3, 4), view), {}, ("m",), aten.mm.out),
            step(relu, "m", "y"),
        ],
        ["y"],
        static=[1],
    )
    x = torch.randn(3, 4)
    torch.testing.assert_close(program(x, weight)[0], (x @ weight.detach().t()).relu())
    with torch.no_grad():
        weight.mul_(-1)
    torch.testing.assert_close(program(x, weight)[0], (x @ weight.detach().t()).relu())
    weight.data = torch.randn(5, 4)
    torch.testing.assert_close(program(x, weight)[0], (x @ weight.detach().t()).relu())
    assert "mm(x, w_v0, out=m)" in program.source


def test_an_allocating_call_with_other_strides_is_laid_out_as_compiled():
    spec = f32(2, 3, 4)
    program = make(
        {"x": (f32(2, 4, 3), "input"), "t": (spec, "temp"), "y": (spec, "output")},
        [
            ExternStep(lambda x: x.transpose(1, 2).clone(), (whole("x", 2, 4, 3),), {}, ("t",)),
            step(loop("copy24", "in0[i]", 24, 1), "t", "y"),
        ],
        ["y"],
    )
    x = torch.randn(2, 4, 3)
    torch.testing.assert_close(program(x)[0], x.transpose(1, 2).contiguous())


def test_a_wrong_shape_is_an_error_and_not_a_wrong_read():
    program = make(
        {"x": (f32(4), "input"), "y": (f32(4), "output")},
        [ExternStep(lambda x: x[:2].view(2, 1), (whole("x", 4),), {}, ("y",))],
        ["y"],
    )
    with pytest.raises(BackendError, match="DM404"):
        program(torch.ones(4))


def test_results_of_several_kinds():
    program = make(
        {"x": (f32(N), "input"), "y": (f32(N), "output")},
        [step(loop("neg", "-in0[i]", N, 1), "x", "y")],
        ["y", None, 3, 2.5, float("inf"), "x", "y", BufRef("y", (2, 3), (32, 1), 5, torch.float32)],
    )
    x = torch.randn(N)
    y, none, three, real, inf, same, again, view = program(x)
    assert (none, three, real, inf) == (None, 3, 2.5, float("inf")) and same is x and again is not y
    torch.testing.assert_close(y, -x)
    torch.testing.assert_close(again, y)
    torch.testing.assert_close(view, torch.as_strided(-x, (2, 3), (32, 1), 5))


def test_several_results_of_one_call():
    program = make(
        {
            "x": (f32(4, 6), "input"),
            "v": (f32(4), "output"),
            "i": (TensorSpec.dense((4,), torch.int64), "output"),
        },
        [ExternStep(aten.max.dim, (whole("x", 4, 6), 1), {}, ("v", "i"))],
        ["i", "v"],
    )
    x = torch.randn(4, 6)
    i, v = program(x)
    torch.testing.assert_close((v, i), tuple(x.max(1)))
    program = make(
        {
            "x": (f32(4, 6), "input"),
            "v": (f32(4), "output"),
            "i": (TensorSpec.dense((4,), torch.int64), "output"),
        },
        [ExternStep(aten.max.dim, (whole("x", 4, 6), 1), {}, ("v", "i"), aten.max.dim_max)],
        ["i", "v"],
    )
    i, v = program(x)
    torch.testing.assert_close((v, i), tuple(x.max(1)))
    assert "max_values=i" in program.source


def test_scratch_is_not_reused_while_a_view_made_by_aten_shows_it():
    twice = loop("twice", "in0[i] * 2", N, 1)
    buffers = {
        "x": (f32(N), "input"),
        "t": (f32(N), "temp"),
        "s": (TensorSpec((N // 2,), (2,), torch.float32), "temp"),
        "u": (f32(N), "temp"),
        "y": (f32(N // 2), "output"),
        "z": (f32(N), "output"),
    }
    program = make(
        buffers,
        [
            step(twice, "x", "t"),
            ExternStep(aten.slice.Tensor, (whole("t", N), 0, 0, N, 2), {}, ("s",)),
            step(twice, "x", "u"),
            step(twice, "u", "z"),
            ExternStep(
                aten.neg.default, (BufRef("s", (N // 2,), (2,), 0, torch.float32),), {}, ("y",), aten.neg.out
            ),
        ],
        ["y", "z"],
    )
    x = torch.randn(N)
    y, z = program(x)
    torch.testing.assert_close(y, -2 * x[::2])
    torch.testing.assert_close(z, 4 * x)


def test_a_result_that_shows_scratch_memory_is_copied():
    program = make(
        {"x": (f32(N), "input"), "t": (f32(N), "temp"), "s": (f32(N // 2), "output")},
        [
            step(loop("twice", "in0[i] * 2", N, 1), "x", "t"),
            ExternStep(aten.slice.Tensor, (whole("t", N), 0, 0, N // 2), {}, ("s",)),
        ],
        ["s"],
    )
    x = torch.randn(N)
    first = program(x)[0]
    program(x * 0)
    torch.testing.assert_close(first, 2 * x[: N // 2])


def test_scratch_that_a_result_shows_is_kept_until_it_is_copied():
    twice = loop("twice", "in0[i] * 2", N, 1)
    buffers = {
        "x": (f32(N), "input"),
        "t": (f32(N), "temp"),
        "s": (f32(N // 2), "output"),
        "u": (f32(N), "temp"),
        "y": (f32(N), "output"),
    }
    program = make(
        buffers,
        [
            step(twice, "x", "t"),
            ExternStep(aten.slice.Tensor, (whole("t", N), 0, 0, N // 2), {}, ("s",)),
            step(loop("other", "in0[i] + 7", N, 1), "x", "u"),
            step(twice, "u", "y"),
        ],
        ["s", "y"],
    )
    x = torch.randn(N)
    s, y = program(x)
    torch.testing.assert_close(s, 2 * x[: N // 2])
    torch.testing.assert_close(y, 2 * (x + 7))


def test_mutated_inputs_move_their_version():
    program = make(
        {"x": (f32(N), "input"), "y": (f32(N), "input")},
        [step(loop("twice", "in0[i] * 2", N, 1), "x", "y")],
        [],
        mutations=["y"],
    )
    x, y = torch.randn(N), torch.zeros(N)
    version = y._version
    assert program(x, y) == ()
    torch.testing.assert_close(y, 2 * x)
    assert y._version > version
    with torch.inference_mode():
        frozen = torch.zeros(N)
    program(x, frozen)
    torch.testing.assert_close(frozen.clone(), 2 * x)


def test_inference_mode_and_normal_mode_share_a_program():
    program = double_then_square()
    x = torch.randn(N)
    with torch.inference_mode():
        inside = program(x)[0]
    outside = program(x)[0]
    assert inside.is_inference() and not outside.is_inference()
    torch.testing.assert_close(inside.clone(), outside)


def test_threads_and_reentrancy_get_memory_of_their_own():
    program = None

    def again(x):
        if x[0] > 0:
            program(torch.full((N,), -1.0))
        return x.clone()

    twice = loop("twice", "in0[i] * 2", N, 1)
    program = make(
        {"x": (f32(N), "input"), "t": (f32(N), "temp"), "e": (f32(N), "temp"), "y": (f32(N), "output")},
        [
            step(twice, "x", "t"),
            ExternStep(again, (whole("t", N),), {}, ("e",)),
            step(loop("sum", "in0[i] + in1[i]", N, 2), "t", "e", "y"),
        ],
        ["y"],
    )
    wrong = []

    def work(seed):
        for i in range(200):
            x = torch.full((N,), float(seed * 1000 + i))
            if not torch.equal(program(x)[0], 4 * x):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_large_results_are_recycled_only_when_nobody_holds_them():
    n = 100_000
    program = make(
        {"x": (f32(n), "input"), "y": (f32(n), "output")},
        [step(loop("twice", "in0[i] * 2", n, 1), "x", "y")],
        ["y"],
    )
    x = torch.randn(n)
    held = program(x)[0]
    array = program(x + 1)[0].numpy()
    view = program(x + 2)[0][10:20]
    for _ in range(12):
        program(x * 0)
    torch.testing.assert_close(held, 2 * x)
    torch.testing.assert_close(torch.from_numpy(array), 2 * (x + 1))
    torch.testing.assert_close(view, 2 * (x + 2)[10:20])
    del held
    places = {program(x)[0].data_ptr() for _ in range(10)}
    assert len(places) <= 2


def test_exceptions_release_the_scratch_block():
    def fail(x):
        raise ValueError("no")

    program = make(
        {"x": (f32(N), "input"), "y": (f32(N), "output")},
        [ExternStep(fail, (whole("x", N),), {}, ("y",))],
        ["y"],
    )
    for _ in range(3):
        with pytest.raises(ValueError):
            program(torch.ones(N))
    assert len(memory.arena._idle) == 1


def test_exceptions_restore_the_keys_that_calls_of_aten_pass_over():
    seen = []

    def note(x):
        seen.append(compat.excluded_keys().raw_repr())
        if float(x[0]) > 1:
            raise ValueError("no")
        return x.clone()

    program = make(
        {"x": (f32(N), "input"), "y": (f32(N), "output")},
        [ExternStep(note, (whole("x", N),), {}, ("y",))],
        ["y"],
    )
    before = compat.excluded_keys().raw_repr()
    for _ in range(3):
        program(torch.ones(N))
        with pytest.raises(ValueError):
            program(torch.ones(N) * 2)
        assert compat.excluded_keys().raw_repr() == before
    with compat.BelowViews():
        wanted = compat.excluded_keys().raw_repr()
        program(torch.ones(N))
        assert compat.excluded_keys().raw_repr() == wanted
    assert set(seen) == {wanted} and wanted != before


def test_a_program_takes_no_keywords():
    once = step(loop("once", "in0[i] + 1", N, 1), "x", "y")
    program = make({"x": (f32(N), "input"), "y": (f32(N), "output")}, [once], ["y"])
    with pytest.raises(TypeError):
        program(x=torch.zeros(N))


def test_a_dead_program_frees_its_memory(monkeypatch):
    monkeypatch.setattr(memory, "arena", memory.Arena())  # other tests' programs are users of the real one
    program = double_then_square()
    program(torch.ones(N))
    assert memory.arena.nbytes() > 0
    died = weakref.ref(program)
    del program
    gc.collect()
    assert died() is None and memory.arena.nbytes() == 0


def test_a_failed_build_asks_for_a_replacement():
    bad = CFunction("bad", "this is not C++", ("float",))
    seen = []

    def fallback(error):
        seen.append(error.code)
        return lambda x: (x + 1,)

    program = make(
        {"x": (f32(N), "input"), "y": (f32(N), "output")}, [step(bad, "x", "y")], ["y"], on_error=fallback
    )
    x = torch.randn(N)
    for _ in range(2):
        torch.testing.assert_close(program(x)[0], x + 1)
    assert seen == ["DM302"]
    with pytest.raises(BuildError):
        make({"x": (f32(N), "input"), "y": (f32(N), "output")}, [step(bad, "x", "y")], ["y"])(x)


def test_constants_and_views_of_them():
    value = torch.arange(6.0).view(2, 3)
    buffers = {"x": (f32(3, 2), "input"), "c": (f32(2, 3), "const"), "y": (f32(3, 2), "output")}
    made = {
        name: Buffer(name, spec, kind, value if kind == "const" else None)
        for name, (spec, kind) in buffers.items()
    }
    transposed = BufRef("c", (3, 2), (1, 3), 0, torch.float32)
    steps = [ExternStep(aten.add.Tensor, (whole("x", 3, 2), transposed), {}, ("y",), aten.add.out)]
    program = call_program.CallProgram(
        Program("g", ("x",), made, steps, (BufRef.whole(made["y"]), BufRef.whole(made["c"]))),
        GraphInfo("inference", "g"),
        lambda e: None,
    )
    x = torch.randn(3, 2)
    y, c = program(x)
    torch.testing.assert_close(y, x + value.t())
    c.zero_()
    torch.testing.assert_close(program(x)[1], torch.arange(6.0).view(2, 3))


def test_the_code_of_a_long_text_is_read_from_the_disk_by_the_next_compilation():
    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(300):
            x = x @ w
        return x

    x, w = torch.randn(4, 4), torch.eye(4) + 0.01 * torch.randn(4, 4)
    with dynamotor.config.patch(program_cache=False, disk_cache=True):
        before = counters["cache"]["python.hit"]
        torch.testing.assert_close(dynamotor.compile(chain)(x, w), chain(x, w))
        again = dynamotor.compile(lambda x, w: chain(x, w))
        torch.testing.assert_close(again(x, w), chain(x, w))
    assert counters["cache"]["python.hit"] == before + 1


@pytest.mark.regression
def test_an_op_whose_name_is_a_keyword_of_python():
    compiled = dynamotor.compile(lambda x: x.random_(3, 4) + 1, backend="aot_eager")
    assert compiled(torch.zeros(2)).tolist() == [4, 4]
