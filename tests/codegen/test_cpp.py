"""The C++ text: goldens for a few kernels at 8 lanes, equal structures share a function, width and grain
choices.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from aten_graphs import aten_graph

import dynamotor
from dynamotor.base.config import config
from dynamotor.base.errors import UsageError
from dynamotor.codegen import cpp, cpp_kernel
from dynamotor.graph.spec import GraphInfo
from dynamotor.lower.lower_graph import lower_graph
from dynamotor.lower.program import LoopStep
from dynamotor.runtime.cpp_text import laid_out

GOLDEN = Path(__file__).with_name("golden")


def kernels(fn, *inputs):
    """The loop kernels of a function."""
    with torch.no_grad():
        program = lower_graph(aten_graph(fn, *inputs), GraphInfo("inference", "test"))
    return [s.kernel for s in program.steps if isinstance(s, LoopStep)]


def text(kernel):
    """A kernel's C++, a statement a line, without the name that hashes it."""
    function = cpp.emit_kernel(kernel)
    return laid_out(function.source.replace(function.name, "kernel"))


CASES = {
    "softmax": (lambda s, m: torch.softmax(s * 0.125 + m, -1), (6, 40), (40,)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (32,), w), (5, 32), (32,)),
    "bias_gradient": (lambda g: g.sum(0), (64, 48)),
    "transpose_add": (lambda x, y: x.view(8, 3, 16).transpose(0, 1) + y, (8, 48), (3, 8, 16)),
    "bool_and_bfloat16": (lambda x, y: (x > 0) & (y.bfloat16() < x), (50,), (50,)),
}


@pytest.mark.parametrize("name", CASES)
def test_text_is_the_golden(name, update_golden):
    fn, *shapes = CASES[name]
    with config.patch(isa="avx2"):
        got = "\n".join(text(k) for k in kernels(fn, *(torch.zeros(s) for s in shapes)))
    path = GOLDEN / f"{name}.cpp"
    if update_golden:
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(got)
    assert got == path.read_text()


def test_equal_kernels_share_one_function():
    def layer(x, w):
        return torch.tanh(x @ w) * 2 + 1

    found = kernels(
        lambda x, w, v: layer(layer(x, w), v), torch.zeros(8, 8), torch.zeros(8, 8), torch.zeros(8, 8)
    )
    functions = [cpp.emit_kernel(k) for k in found]
    assert len(functions) == 2 and functions[0] is functions[1]
    assert cpp.emit_unit(functions).count('extern "C" void') == 1


def test_kernels_that_differ_in_a_constant_or_a_size_do_not_share():
    names = {
        cpp.emit_kernel(kernels(fn, torch.zeros(n))[0]).name
        for fn, n in (
            (lambda x: x * 2, 64),
            (lambda x: x * 3, 64),
            (lambda x: x * 2, 65),
            (lambda x: x.double() * 2, 64),
        )
    }
    assert len(names) == 4


def test_small_kernels_run_on_one_thread_and_large_ones_in_parallel():
    small, large = (
        cpp.emit_kernel(kernels(lambda x: x + 1, torch.zeros(n))[0]).source for n in (1000, 1_000_000)
    )
    assert "over(" not in small and "over(true," in large


@pytest.mark.parametrize("name", CASES)
def test_what_is_laid_out_is_the_same_program(name):
    fn, *shapes = CASES[name]
    unit = cpp.emit_unit([cpp.emit_kernel(k) for k in kernels(fn, *(torch.zeros(s) for s in shapes))])
    shown = laid_out(unit)
    assert shown.split() != unit.split() and "".join(shown.split()) == "".join(unit.split())
    assert laid_out(shown) == shown
    depth = 0
    for line in shown[shown.index('extern "C" void ') :].splitlines():
        depth -= line.lstrip().startswith("}")
        assert line.startswith("#") or not line or line == "    " * depth + line.strip()
        depth += line.endswith("{")


def test_sixty_four_bit_values_halve_the_lanes():
    with config.patch(isa="avx512"):
        for dtype, width in ((torch.float32, 16), (torch.float64, 8)):
            x = torch.zeros(256, dtype=dtype)
            assert cpp.emit_kernel(kernels(lambda x: x.exp(), x)[0]).widths == {width}
            assert cpp.emit_kernel(kernels(lambda x: x + 1, x)[0]).widths == {width // 2}  # waits for memory
        assert cpp.emit_kernel(kernels(lambda x: x + 1, torch.zeros(256, dtype=torch.uint8))[0]).widths == {
            32
        }
        assert cpp.emit_kernel(kernels(lambda x: -x, torch.zeros(256).bfloat16())[0]).widths == {32}
        uneven = cpp.emit_kernel(kernels(lambda x: -x, torch.zeros(259).bfloat16())[0])
        assert uneven.widths == {32, 16} and "ld<F16>" in uneven.source


def test_the_unit_includes_nothing():
    unit = cpp.emit_unit([cpp.emit_kernel(kernels(lambda x: x.exp(), torch.zeros(256))[0])])
    assert "#include" not in unit


@pytest.mark.parametrize("isa", cpp_kernel.ISAS)
def test_other_instruction_sets_get_right_code_too(isa):
    from dynamotor.codegen import compile_aten

    if not cpp_kernel.ISAS[isa].is_here:
        pytest.skip("this machine has no such vectors")

    def fn(x, y):
        return torch.softmax(x * y, -1), (x > y).sum(0), (x * x).bfloat16(), x.argmax(1), x.sum(0)

    x, y = torch.randn(20, 50), torch.randn(50)
    with config.patch(isa=isa):
        assert cpp_kernel.machine_width() == cpp_kernel.ISAS[isa].width
        call = compile_aten(aten_graph(fn, x, y), GraphInfo("inference", "test"))
    for a, b in zip(call(x, y), fn(x, y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_an_instruction_set_that_the_processor_lacks_is_an_error(monkeypatch):
    """Not a SIGILL at the first call."""
    monkeypatch.setattr(
        Path, "read_text", lambda self: "flags : sse4_2 avx2"
    )  # /proc/cpuinfo of an older machine
    cpp_kernel.processor_features.cache_clear()
    try:
        with config.patch(isa="avx512"), pytest.raises(UsageError, match="DM109.*does not have"):
            cpp.flags("int f();")
    finally:
        monkeypatch.undo()
        cpp_kernel.processor_features.cache_clear()


def test_an_unknown_instruction_set_is_an_error():
    with config.patch(isa="mmx"), pytest.raises(UsageError, match="DM109"):
        cpp.flags("")


@pytest.mark.parametrize("name", ["amax", "amin"])
@pytest.mark.parametrize("first", [0.0, -0.0])
def test_the_first_of_zeros_is_the_extreme(name, first):
    """As in eager, along rows, across them, and of all elements, in vectors and behind them."""
    for columns in (2, 64, 101):
        x = torch.tensor([first, -first]).repeat(3, columns)[:, :columns].contiguous()
        for fn in (
            lambda t: getattr(t, name)(1),
            lambda t: getattr(t, name)(),
            lambda t: getattr(t.t().contiguous(), name)(0),
        ):
            assert torch.equal(dynamotor.compile(fn)(x).signbit(), fn(x).signbit())


def test_an_extreme_with_a_nan_anywhere_is_nan():
    for columns in (5, 64, 101, 512):
        for at in {0, 1, columns // 2, columns - 2, columns - 1}:
            x = torch.randn(3, columns)
            x[1, at] = torch.nan
            for name in ("amax", "amin"):
                got = dynamotor.compile(lambda t, name=name: getattr(t, name)(1))(x)
                assert torch.equal(got.isnan(), torch.tensor([False, True, False]))


@pytest.mark.parametrize("isa", ["", "avx2"])
def test_a_costly_map_takes_several_vectors_a_turn(isa):
    """Their stores come last, so that the compiler may mix their operations."""
    with config.patch(isa=isa):
        (kernel,) = kernels(lambda x: F.gelu(x), torch.zeros(64, 512))
        lines = text(kernel).splitlines()
        stored = [n for n, line in enumerate(lines) if line.strip().startswith("st<")]
        assert len(stored) == 4 and stored[-1] - stored[0] == 3
        for size in (7, 64, 100, 4096 + 65):
            x = torch.randn(size)
            torch.testing.assert_close(dynamotor.compile(F.gelu)(x), F.gelu(x))
            assert torch.equal(dynamotor.compile(F.gelu)(x[: size - 3]), dynamotor.compile(F.gelu)(x)[:-3])


@pytest.mark.parametrize("source", [torch.int64, torch.float64])
def test_64_bits_that_are_only_converted_take_full_vectors(source):
    """cosh of int64 was computed in vectors of 8 floats where there are 16."""
    with config.patch(isa="avx512"):
        (kernel,) = kernels(lambda x: x.float().cosh(), torch.zeros(64, 512, dtype=source))
        assert "F16" in text(kernel)
        (kernel,) = kernels(lambda x: (x + 1).float(), torch.zeros(64, 512, dtype=source))
        assert "F16" not in text(kernel)
    x = (torch.randn(7, 101) * 4).to(source)
    for fn in (
        lambda x: x.float().exp(),
        lambda x: x.to(torch.int8),
        lambda x: x.bool(),
        lambda x: x.to(torch.bfloat16) + x.float(),
        lambda x: x[:, ::2].float().sum(1),
        lambda x: (x.float() * 2, x.to(torch.int32)),
    ):
        torch.testing.assert_close(dynamotor.compile(fn)(x), fn(x))
