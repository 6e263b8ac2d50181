"""A GPU's products of few rows come in parts that templates compute, weights in bytes as they are stored; in
Triton's interpreter, against float64.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed")

import dynamotor
from bench import few_rows as tool
from bench.triton_interpret import available
from dynamotor.base.config import config
from dynamotor.base.events import collect, counters
from dynamotor.codegen.gpu_kernels import job_of
from dynamotor.codegen.gpu_program import GpuProgram
from dynamotor.codegen.triton_plan import DEFAULT
from dynamotor.lower import few_rows as rule
from dynamotor.runtime.triton_build import start_kernel, stop_workers

pytestmark = pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1")
BF16, F16 = torch.bfloat16, torch.float16
GENERATOR = torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def _in_triton():
    with config.patch(target="triton", strict=True, program_cache=False):
        yield


def randn(*shape, dtype=BF16, scale=1.0):
    return (torch.randn(*shape, generator=GENERATOR) * scale).to(dtype)


def integers(low, high, *shape, dtype=torch.int8):
    return torch.randint(low, high, shape, dtype=dtype, generator=GENERATOR)


def run(function, *inputs, exact=None, in_parts=1, **options):
    """The call program; the result is as near to float64 as eager's, or half a unit more."""
    dynamotor.reset()  # functions of one code share programs
    before = counters["templates"]["gemm"]
    with torch.no_grad(), collect("code") as events:
        ours, eager = dynamotor.compile(function, **options)(*inputs), function(*inputs)
        exact = (
            function(*(t.double() if t.is_floating_point() else t for t in inputs))
            if exact is None
            else exact
        )
    assert (ours.dtype, ours.stride(), ours.shape) == (eager.dtype, eager.stride(), eager.shape)
    error, allowed = (ours - exact).abs().max(), (eager - exact).abs().max()
    assert error <= 1.5 * allowed + torch.finfo(ours.dtype).eps * exact.abs().max()
    assert counters["templates"]["gemm"] - before == in_parts
    text = events[0].data["python"]
    assert ("in parts" in text) == bool(in_parts) and "atomic" not in events[0].data["triton"]
    return text


@pytest.mark.parametrize("rows", [2, 3, 8, 16])
@pytest.mark.parametrize("outputs, inner", [(1056, 512), (1601, 328), (256, 2048), (1000, 1056)])
def test_layers_of_few_rows_are_as_exact_as_the_librarys(rows, outputs, inner):
    if rows == 16 and outputs != 1056:
        pytest.skip("sizes of tiles are tried with other rows")
    w, b = randn(outputs, inner, scale=inner**-0.5), randn(outputs)
    text = run(lambda x, w, b: F.linear(x, w, b), randn(rows, inner), w, b)
    assert "mm(" not in text


@pytest.mark.parametrize("rows, outputs, inner", [(33, 1056, 512), (64, 256, 2048), (2, 2**14 + 1, 2**11)])
def test_more_rows_and_weights_of_halves_are_the_librarys(rows, outputs, inner):
    w = randn(outputs, inner, scale=inner**-0.5)
    assert "mm(" in run(lambda x, w: F.linear(x, w), randn(rows, inner), w, in_parts=0)


@pytest.mark.parametrize(
    "size", [(5, 70, 77, 1), (2, 33, 96, 4), (64, 129, 36, 2), (16, 64, 7, 7), (1, 1, 1, 1)]
)
@pytest.mark.parametrize("matrices", [1, 2, 3])
def test_parts_of_any_size(size, matrices):
    rows, outputs, inner, parts = size
    x = randn(matrices, rows, inner)
    weights = [randn(outputs, inner).t() if n != 1 else randn(inner, outputs) for n in range(matrices)]

    def function(x, *weights):
        if x.dtype is torch.double:
            found = [
                a.unflatten(1, (parts, -1)).transpose(0, 1) @ w.unflatten(0, (parts, -1))
                for a, w in zip(x, weights)
            ]
            return sum(found)
        return torch.ops.dynamotor.few_rows_product(x, weights, parts)

    run(function, x, *weights)


def test_float16_and_what_stands_around():
    x, residual = (randn(6, 512, dtype=F16) for _ in range(2))
    gate, up = (randn(1032, 512, dtype=F16, scale=1 / 24) for _ in range(2))
    down = randn(512, 1032, dtype=F16, scale=1 / 32)

    def block(x, gate, up, down, residual):
        h = F.silu(F.linear(x, gate)) * F.linear(x, up)
        h = F.linear(h, down) + residual
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)

    text = run(block, x, gate, up, down, residual, in_parts=3)
    assert "mm(" not in text and text.count("in parts") == 3


def test_operands_may_lie_in_any_way():
    w = randn(1032, 520, scale=1 / 24)
    run(lambda x, w: F.linear(x[:, 3:515], w[:, :512]), randn(9, 520), w)
    run(lambda x, w: F.linear(x.t(), w), randn(520, 5), w)
    run(lambda x, w: F.linear(x[::2, ::2], w), randn(12, 1040), w)
    run(lambda x, w: F.linear(x.expand(7, 520), w), randn(1, 520), w)
    run(lambda x, w: F.linear(x, w[5:1030, 1:513]), randn(4, 512), w)
    run(lambda x, w: F.linear(x, w), randn(2, 3, 520), w)
    run(lambda x, w: F.linear(x, w), randn(9 * 520 + 1)[1:].view(9, 520), w)
    run(lambda x, w: F.linear(x, w), randn(9, 520), randn(1032 * 520 + 1, scale=1 / 24)[1:].view(1032, 520))


def test_what_is_not_worth_it_or_does_not_fit_is_the_librarys():
    w = randn(1032, 512, scale=1 / 24)
    for rows in (1, 65):
        run(lambda x, w: F.linear(x, w), randn(rows, 512), w, in_parts=0)
    run(lambda x, w: x @ w, randn(8, 1032), w, in_parts=0)  # weights by columns
    run(lambda x, w: F.linear(x, w[:, 1:]), randn(8, 513), randn(1032, 514), in_parts=0)  # no whole vectors
    run(lambda x, w: F.linear(x, w), randn(8, 512, dtype=torch.float32), w.float(), in_parts=0)
    run(lambda x, w: F.linear(x, w), randn(8, 512), w[:900], in_parts=0)


def test_a_number_of_rows_that_differs_goes_to_the_library():
    w = randn(1032, 512, scale=1 / 24)
    compiled = dynamotor.compile(lambda x: F.linear(x, w), dynamic=True)
    before = counters["templates"]["gemm"]
    for rows in (3, 8, 40):
        x = randn(rows, 512)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), F.linear(x, w), rtol=2e-2, atol=2e-2)
    assert counters["templates"]["gemm"] == before


OUTPUTS = 1032
BYTES = integers(-127, 128, OUTPUTS, 512)
SCALE = randn(OUTPUTS).abs() / 100
GROUPED = randn(OUTPUTS, 16, 1).abs() / 10
PACKED = integers(0, 256, OUTPUTS, 256, dtype=torch.uint8)


def scaled_behind(x, w, s):
    return F.linear(x, w.to(x.dtype)) * s


def scaled_before(x, w, s):
    return F.linear(x, w.to(x.dtype) * s[:, None])


def in_groups(x, w, s):
    return F.linear(x, (w.to(x.dtype).view(OUTPUTS, -1, 32) * s).flatten(1))


def with_zero_points(x, w, s):
    return F.linear(x, ((w.to(x.dtype).view(OUTPUTS, -1, 32) - s * 3) * s).flatten(1))


@pytest.mark.parametrize("rows", [2, 9, 40])
@pytest.mark.parametrize(
    "function, scale",
    [(scaled_behind, SCALE), (scaled_before, SCALE), (in_groups, GROUPED), (with_zero_points, GROUPED)],
)
def test_bytes_are_converted_where_they_are_multiplied(function, scale, rows):
    text = run(function, randn(rows, 512), BYTES, scale)
    assert "in parts of" in text and "int8" in text and "k2(" not in text and "mm(" not in text


def nibbles(x, w, s):
    numbers = torch.stack([w & 15, w >> 4], -1).to(x.dtype) - 8
    return F.linear(x, (numbers.view(OUTPUTS, -1, 32) * s).flatten(1))


def high_nibbles_first(x, w, s):
    numbers = torch.stack([w >> 4, w & 15], -1).view(OUTPUTS, -1, 32)
    return F.linear(x, ((numbers.to(x.dtype) - 8) * s).flatten(1))


def with_offsets(x, w, s):
    numbers = torch.stack([w & 15, w >> 4], -1).to(x.dtype).view(OUTPUTS, -1, 32)
    return F.linear(x, (numbers * s + s).flatten(1)).relu()


def pairs_of_bits(x, w, s):
    numbers = torch.stack([(w >> n) & 3 for n in (0, 2, 4, 6)], -1).view(OUTPUTS, -1).to(x.dtype)
    return F.linear(x, numbers - 1) * s.view(OUTPUTS, -1)[:, 0]


@pytest.mark.parametrize("rows", [2, 9, 40])
@pytest.mark.parametrize(
    "function, inner, scale",
    [
        (nibbles, 512, GROUPED),
        (high_nibbles_first, 512, GROUPED),
        (with_offsets, 512, GROUPED),
        (pairs_of_bits, 1024, GROUPED),
    ],
)
def test_numbers_of_a_byte_are_taken_apart_where_they_are_multiplied(function, inner, scale, rows):
    text = run(function, randn(rows, inner), PACKED, scale)
    assert "uint8" in text and "k3(" not in text and "mm(" not in text


def test_one_row_of_packed_numbers_is_one_sum():
    text = run(nibbles, randn(1, 512), PACKED, GROUPED, in_parts=0)
    assert "mm(" not in text and "k2(" not in text


def test_bytes_by_columns_and_in_halves_of_a_step():
    columns = integers(-127, 128, 512, OUTPUTS)
    run(lambda x, w, s: x @ w.to(x.dtype) * s, randn(4, 512), columns, SCALE)
    text = run(scaled_behind, randn(4, 520), integers(-127, 128, OUTPUTS, 520), SCALE)
    assert "in parts of" not in text  # 32 does not divide 520: converted in memory


def test_weights_that_are_cast_or_kept_too():
    w = randn(OUTPUTS, 512, dtype=torch.float32, scale=1 / 24)
    run(lambda x, w: F.linear(x, w.to(x.dtype)), randn(5, 512), w)

    def both(x, w):
        dense = w.to(x.dtype)
        return F.linear(x, dense) + dense.sum(1)

    run(both, randn(5, 512), integers(-9, 9, OUTPUTS, 512))


def test_bytes_that_change_later_are_read_before():
    def function(x, w):
        y = F.linear(x, w.to(x.dtype))
        w.add_(1)
        return y

    x, w = randn(4, 512), integers(-9, 9, OUTPUTS, 512)
    want, given = F.linear(x, w.bfloat16()), w.clone()
    with torch.no_grad():
        got = dynamotor.compile(function)(x, given)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=0.5)
    assert torch.equal(given, w + 1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_every_byte_becomes_its_own_number(dtype):
    info = torch.iinfo(dtype)
    w = torch.arange(info.min, info.max + 1).to(dtype)

    def numbers(w):
        return w.float(), (w & 15).half(), (w >> 4).float(), (w.int() * 2).float(), (w.int() + 300).float()

    with torch.no_grad(), collect("code") as events:
        for got, want in zip(dynamotor.compile(numbers)(w), numbers(w), strict=True):
            assert torch.equal(got, want)
    assert "float_of_byte" in events[0].data["triton"]


@pytest.mark.parametrize(
    "outputs, inner", [(2113, 1024), (2112, 1000), (1060, 4096), (40, 8192), (600, 9000)]
)
@pytest.mark.parametrize("rows", ["several", "one"])
def test_one_row_of_bytes_sums_several_rows_in_a_program(outputs, inner, rows):
    w, s, b = integers(-127, 128, outputs, inner), randn(outputs).abs() / 100, randn(outputs)

    def layer(x, w, s, b):
        return F.linear(x, w.to(x.dtype)) * s + b

    with tool.cut_as("" if rows == "several" else "bytes=1024"):
        text = run(layer, randn(1, inner), w, s, b, in_parts=0)
    assert "mm(" not in text and text.count("k0(") == 1 and "k1(" not in text


def test_equal_sums_of_several_rows_of_bytes_are_one_launch():
    weights = [integers(-127, 128, outputs, 1024) for outputs in (512, 2048, 512, 3072)]
    scales = [randn(len(w)).abs() / 100 for w in weights]

    def layers(x, *given):
        return torch.cat([F.linear(x, w.to(x.dtype)) * s for w, s in zip(given[:4], given[4:])], 1)

    text = run(layers, randn(1, 1024), *weights, *scales, in_parts=0)
    assert "4 times" in text


def test_equal_products_of_few_rows_are_one_launch():
    weights = [randn(1032, 512, scale=1 / 24) for _ in range(4)]
    numbers = [integers(-127, 128, OUTPUTS, 512) for _ in range(4)]

    def layers(x, *weights):
        found = [F.linear(x, w.to(x.dtype)) for w in weights]
        return torch.cat([found[0].sigmoid() * found[1], found[2], found[3]], 1)

    for given in (weights, numbers):
        text = run(layers, randn(9, 512), *given, in_parts=4)
        assert "4 times: " in text and text.count("in parts") == 1
    whole = [randn(1032 * 512 + 1, scale=1 / 24) for _ in range(4)]  # one lies between vectors
    apart = [w[n == 1 :][: 1032 * 512].view(1032, 512) for n, w in enumerate(whole)]
    run(layers, randn(9, 512), *apart, in_parts=4)


def test_products_of_few_rows_wait_for_one_another():
    weights = [randn(512, 512, scale=1 / 24) for _ in range(8)]

    def chain(x, *weights):
        for first, second in zip(weights[::2], weights[1::2], strict=True):
            x = F.linear(x, first) + F.linear(x, second).relu()
        return x

    with torch.no_grad(), collect("code") as events:
        got = dynamotor.compile(chain)(randn(5, 512), *weights)
    assert got.shape == (5, 512) and "times" not in events[0].data["python"]  # too small for parts
    weights = [randn(1024, 1024, scale=1 / 32) for _ in range(8)]
    text = run(chain, randn(5, 1024), *weights, in_parts=8)
    assert text.count("2 times: ") == 4


def test_a_rows_own_numbers_that_the_kernel_writes_are_read_behind_it():
    def function(x, total, scale):
        total.mul_(2)
        scale.add_((x * total).sum(1, keepdim=True))
        return x.sum(1, keepdim=True) * scale + total

    given = [torch.randn(70, 96), torch.randn(70, 1), torch.randn(70, 1)]
    copies = [t.clone() for t in given]
    with torch.no_grad():
        got, want = dynamotor.compile(function)(*given), function(*copies)
    torch.testing.assert_close(got, want)
    for ours, eager in zip(given, copies, strict=True):
        torch.testing.assert_close(ours, eager)


def test_parts_fill_the_gpu_and_divide_the_sums():
    cut = rule.FewRowsCut()
    for outputs in (512, 2048, 8192, 128256):
        for inner in (1024, 2048, 2080, 8192, 14336):
            parts = cut.parts(outputs, inner)
            assert inner % (parts * rule.STEP) == 0 or parts == 1
            assert inner // parts >= cut.least and parts <= rule.MOST_PARTS
    assert cut.parts(2048, 8192) == 8 and cut.parts(128256, 2048) == 1


def test_the_library_computes_parts_where_no_template_is(monkeypatch):
    monkeypatch.setattr("dynamotor.codegen.triton_gemm_choice.find_sites", lambda *given, **more: [])
    with torch.no_grad():
        for function, inner, weights, scale in (
            (scaled_behind, 512, BYTES, SCALE),
            (nibbles, 512, PACKED, GROUPED),
        ):
            x = randn(5, inner)
            got = dynamotor.compile(function)(x, weights, scale)
            want = function(x.double(), weights, scale.double())
            torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


def test_the_benchs_layers_are_those_that_it_checks():
    for weights, rows in (("bf16", 8), ("f16", 3), ("int8", 8), ("int4", 8), ("int4", 1)):
        assert tool.check(weights, rows, 512, OUTPUTS, rows == 3, "cpu")["ok"]
    with tool.cut_as("one=1,outputs=32,inner=64,bytes=1024"):
        assert DEFAULT.bytes == 1024
        assert tool.check("int4", 1, 512, OUTPUTS, False, "cpu")["ok"]
    assert rule.FEWEST_NARROW == 2 and DEFAULT.bytes == 8192


@pytest.mark.slow
@pytest.mark.parametrize("kind, rows", [("bf16", 8), ("int8", 8), ("int8", 64), ("int4", 8), ("int4", 64)])
def test_templates_build_for_a_gpu_that_is_not_there(kind, rows, monkeypatch):
    built = []
    real = GpuProgram._kernel

    def kernel(self, f, *given):
        built.append(f)
        return real(self, f, *given)

    monkeypatch.setattr(GpuProgram, "_kernel", kernel)
    tool.check(kind, rows, 2048, 256, False, "cpu")
    try:
        (template,) = [f for f in built if "tl.dot" in f.source]
        code = start_kernel(job_of(template, 90)).result()
        assert code.shared * 2 <= 227 * 1024 if rows == 8 else code.shared <= 227 * 1024
    finally:
        stop_workers()


@pytest.fixture
def in_one_part():
    with tool.cut_as("outputs=32,programs=1"):
        yield


@pytest.mark.parametrize("rows, outputs, inner", [(2, 1032, 512), (8, 1601, 328), (16, 1056, 512)])
def test_both_products_of_a_gate_are_one_launch(in_one_part, rows, outputs, inner):
    gate, up = (randn(outputs, inner, scale=inner**-0.5) for _ in range(2))
    b, c = randn(outputs), randn(rows, outputs)

    def gated(x, gate, up, b, c):
        return F.silu(F.linear(x, gate, b)) * F.linear(x, up) + c

    text = run(gated, randn(rows, inner), gate, up, b, c)
    assert "mm(" not in text and "twice" in text and text.count("in parts") == 1


def test_products_that_others_read_or_of_other_rows_are_launches_of_their_own(in_one_part):
    weights = [randn(1032, 512, scale=1 / 24) for _ in range(3)]
    x, y = randn(8, 512), randn(8, 512)

    def unlike(x, y, gate, up, _):
        return F.silu(F.linear(x, gate)) * F.linear(y, up)

    def shared(x, y, gate, up, _):
        g, u = F.linear(x, gate), F.linear(x, up)
        return torch.cat([F.silu(g) * u, u.flip(1)])

    def twice(x, y, gate, *_):
        return F.linear(x, gate) * F.linear(x, gate * 1)

    def three(x, y, *weights):
        a, b, c = (F.linear(x, w) for w in weights)
        return F.silu(a) * b + c

    assert "twice" not in run(unlike, x, y, *weights, in_parts=2)
    assert "twice" not in run(shared, x, y, *weights, in_parts=2)
    assert "twice" not in run(twice, x, y, *weights, in_parts=2)
    assert "twice" in run(three, x, y, *weights, in_parts=2)


def test_a_gate_without_alignment_and_of_weights_in_other_orders(in_one_part):
    def gated(x, gate, up):
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    apart = randn(1032 * 520 + 1, scale=1 / 24)[1:].view(1032, 520)
    run(gated, randn(9, 520), apart, randn(1032, 520, scale=1 / 24))
    wide, narrow = randn(1032, 1040, scale=1 / 24), randn(1032, 512, scale=1 / 24)
    assert "twice" not in run(gated, randn(9, 512), wide[:, :512], narrow, in_parts=2)

    def halves(x, w):
        return F.silu(F.linear(x, w[:, :512])) * F.linear(x, w[:, 512:1024])

    assert "twice" in run(halves, randn(9, 512), wide)
