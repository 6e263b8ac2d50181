"""Generated matrix products with their epilogues, in Triton's interpreter, against eager: shapes, layouts,
types, fused ops.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed")

from disassembly import sass

import dynamotor
from bench.triton_interpret import available
from dynamotor.base.config import config
from dynamotor.base.errors import BuildError
from dynamotor.base.events import collect, counters
from dynamotor.codegen import gpu_program, triton_gemm_choice
from dynamotor.codegen.triton_gemm import Tiling, emit_product
from dynamotor.codegen.triton_gemm_sites import find_sites, put
from dynamotor.codegen.triton_ops import HELPERS
from dynamotor.codegen.triton_product import Operand, Product
from dynamotor.runtime.triton_build import TritonJob, start_kernel, stop_workers

pytestmark = pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1")
BF16, F16 = torch.bfloat16, torch.float16
SMALL = Tiling(16, 32, 16, group=2)


@pytest.fixture
def templates(monkeypatch):
    """Compile with a template at every product; the list fills with the labels of those that were put in."""
    labels = []

    def use(tiling=SMALL, casts=False):
        def choose(program, gpu, tune=None):
            sites = [site if casts else site.variants()[-1] for site in find_sites(program, tf32=True)]
            labels.extend(site.label() for site in sites)
            return put(program, [(site, tiling) for site in sites])

        monkeypatch.setattr(gpu_program.triton_gemm_choice, "choose", choose)
        for module in (triton_gemm_choice, gpu_program):
            monkeypatch.setattr(module, "tf32", lambda: True)
        return labels

    return use


def compare(fn, *inputs, tolerance=1e-5):
    with torch.no_grad(), config.patch(target="triton", strict=True), collect("code") as events:
        got = dynamotor.compile(fn)(*inputs)
        want = fn(*inputs)
    for a, b in zip(
        got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True
    ):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        size = (
            b.abs().max().item() if b.numel() else 1.0
        )  # terms of a sum that cancel leave their own rounding
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, size))
    return events[0].data["python"]


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize(
    "size", [(16, 32, 16), (1, 1, 1), (17, 33, 19), (50, 70, 40), (3, 100, 257), (64, 5, 16)]
)
@pytest.mark.parametrize("persistent", [False, True])
def test_products_of_any_size(templates, size, persistent):
    templates(Tiling(16, 32, 16, group=2, persistent=persistent))
    m, n, k = size
    text = compare(lambda a, b: a @ b, randn(m, k), randn(k, n))
    assert "mm(" not in text


@pytest.mark.parametrize("dtype, tolerance", [(BF16, 1e-2), (F16, 2e-3)])
def test_half_precisions_round_as_the_library(templates, dtype, tolerance):
    labels = templates()
    a, b, bias = randn(40, 48, dtype=dtype), randn(56, 48, dtype=dtype), randn(56, dtype=dtype)
    compare(lambda a, b, c: F.linear(a, b, c), a, b, bias, tolerance=tolerance)
    assert labels == [f"{'bf16' if dtype is BF16 else 'f16'} 1x40x56x48 nt+bias"]
    x = torch.full((16, 16), 1 / 3, dtype=dtype)
    exact = (x.float() @ x.float()).to(dtype).float()  # the epilogue sees the rounded product
    with torch.no_grad(), config.patch(target="triton", strict=True):
        got = dynamotor.compile(lambda x: (x @ x).float() * 3)(x)
    assert torch.equal(got, exact * 3)


def test_operands_may_lie_in_any_way(templates):
    labels = templates()
    a, b = randn(30, 40), randn(50, 40)
    compare(lambda a, b: a.t() @ b[:30], randn(30, 20), randn(40, 24))
    compare(lambda a, b: a @ b.t(), a, b)
    compare(lambda a, b: a[::2, 3:33] @ b[5:35, ::2], randn(50, 60), randn(40, 60))
    compare(lambda a, b: a.expand(20, 30) @ b, randn(1, 30), randn(30, 8))
    assert [label.split()[2] for label in labels][:2] == ["tn", "nt"]


def test_batches_and_broadcast_batches(templates):
    templates()
    compare(lambda a, b: torch.bmm(a, b), randn(3, 20, 18), randn(3, 18, 40))
    compare(lambda a, b: a @ b, randn(2, 3, 17, 16), randn(16, 9))
    compare(lambda a, b: a @ b * 2, randn(5, 1, 17, 16), randn(1, 4, 16, 9))
    compare(lambda a, b: torch.relu(a.transpose(1, 2) @ b), randn(3, 20, 18), randn(3, 20, 5))


def test_epilogues_are_part_of_the_launch(templates):
    labels = templates()
    x, w, b, r = randn(40, 48), randn(72, 48), randn(72), randn(40, 72)
    for act in (F.gelu, F.relu, F.silu, torch.tanh):
        text = compare(lambda x, w, b, r: act(F.linear(x, w, b)) + r, x, w, b, r)  # noqa: B023
        assert text.count("k0(") == 1 and "k1(" not in text and "mm(" not in text
    assert labels[0] == "f32 1x40x72x48 nt+bias > add,erf,mul reads f32 writes f32" and len(set(labels)) == 4


def test_a_product_that_others_read_is_stored_too(templates):
    labels = templates()
    x, w = randn(20, 16), randn(16, 40)

    def fn(x, w):
        y = x @ w
        return F.gelu(y), y, y @ w.t()

    compare(fn, x, w, tolerance=1e-4)
    assert "keep" in labels[0]


def test_a_permuted_result_goes_where_it_belongs(templates):
    labels = templates()
    x, w = randn(2 * 12, 16), randn(16, 4 * 8)
    text = compare(lambda x, w: (x @ w).view(2, 12, 4, 8).transpose(1, 2).contiguous() * 2, x, w)
    assert "k1(" not in text and ">" in labels[0]
    compare(lambda x, w, p: (x @ w).view(2, 12, 32) + p, x, w, randn(12, 32))


def test_reductions_and_other_shapes_stay_kernels_of_their_own(templates):
    labels = templates()
    compare(lambda x, w: torch.softmax(x @ w, -1), randn(20, 16), randn(16, 40))
    compare(lambda x, w: (x @ w)[:8] + 1, randn(20, 16), randn(16, 40))
    compare(lambda x, w: (x @ w).cumsum(0), randn(20, 16), randn(16, 40))
    assert len(labels) == 3 and not any(">" in label for label in labels)


def test_columns_that_nobody_reads_are_not_computed(templates):
    labels = templates()
    compare(lambda x, w: (x @ w)[:, :8] + 1, randn(20, 16), randn(16, 40))
    compare(
        lambda x, w, r: (x @ w).view(4, 5, 40)[..., :30].relu() * r,
        randn(20, 16),
        randn(16, 40),
        randn(4, 5, 30),
    )
    assert [label.split(" > ")[0] for label in labels] == ["f32 1x20x8x16 nn", "f32 1x20x30x16 nn"]
    labels.clear()
    compare(lambda x, w: (F.relu((x @ w)[:, :8]), (x @ w)[:, 8:] * 2), randn(20, 16), randn(16, 40))
    compare(lambda x, w: (x @ w)[:, 1:9] + 1, randn(20, 16), randn(16, 40))
    compare(lambda x, w: torch.bmm(x, w)[:, :10, :8] + 1, randn(3, 20, 16), randn(3, 16, 40))
    assert not any(">" in label for label in labels)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "tiling", [SMALL, Tiling(16, 32, 16, persistent=True, tma=True)], ids=["pointers", "descriptors"]
)
@config.patch(pad_products_from=8)
def test_logits_of_a_padded_vocabulary_go_straight_to_the_user(templates, bias, tiling):
    labels = templates(tiling)
    x, w, b = randn(2, 12, 32, dtype=BF16), randn(45, 32, dtype=BF16), randn(45, dtype=BF16) if bias else None
    text = compare(lambda x, w, b: F.linear(F.relu(x), w, b), x, w, b, tolerance=1e-2)
    assert labels == [f"bf16 1x24x45x32 nt{'+bias' if bias else ''} > copy reads nothing writes bf16"]
    # relu (with the bias in one launch), and the product
    assert "mm(" not in text and text.count("k0(") == 1 and "k1(" in text and "k2(" not in text
    labels.clear()
    compare(
        lambda x, w: ((y := F.linear(x, w)), y.logsumexp(-1)), x, w, tolerance=1e-2
    )  # another reads the padded product
    assert not any(">" in label for label in labels) or "keep" in labels[0]


def test_casts_of_operands_happen_as_they_are_read(templates):
    labels = templates(casts=True)
    x, w = randn(20, 16), randn(40, 16)

    def fn(x, w):
        with torch.autocast("cpu", BF16):
            return F.gelu(F.linear(x, w))

    text = compare(fn, x, w, tolerance=2e-2)
    assert "k1(" not in text and labels[0].count("cast f32") == 2


def test_a_cast_between_half_precisions_happens_as_pointers_are_read(templates):
    labels = templates(TMA, casts=True)  # a descriptor's tile is in memory's order
    for left, right in ((F16, BF16), (BF16, F16), (F16, F16)):
        x, w = torch.full((16, 32), 1 / 3).to(left), randn(32, 40).to(right)
        with torch.no_grad(), config.patch(target="triton", strict=True), collect("code") as events:
            got = dynamotor.compile(lambda x, w: x.to(BF16) @ w.to(BF16) * 2)(x, w)
        exact = (x.to(BF16).double() @ w.to(BF16).double()).to(BF16) * 2
        assert (got != exact).double().mean() < 0.02 and "a_all" not in events[0].data["triton"]
    assert [label.count("cast f16") for label in labels] == [1, 1, 2]


def test_a_product_of_one_element(templates):
    templates()
    compare(lambda x: F.relu(x.t() @ x) * 2, randn(40, 1))
    compare(lambda x: F.relu(x.transpose(1, 2) @ x) * 2, randn(3, 40, 1))


def test_two_products_that_one_kernel_reads(templates):
    templates()
    compare(lambda x, w, v: torch.relu(x @ w + x @ v), randn(20, 16), randn(16, 40), randn(16, 40))
    compare(lambda x: F.relu(x @ x.t()), randn(20, 16))


def test_operands_that_are_written_meanwhile_are_read_before(templates):
    templates()

    def fn(x, w, y):
        y = y.clone()
        product = y @ w
        y.add_(x)
        return torch.relu(product + y), y

    compare(fn, randn(16, 16), randn(16, 16), randn(16, 16))


def test_dropout_in_an_epilogue_is_the_kernels_own(templates):
    x, w = torch.ones(24, 16), torch.ones(16, 40)
    results = []
    for use in (False, True):
        if use:
            labels = templates()
        torch.manual_seed(5)
        with config.patch(target="triton", strict=True):
            results.append(dynamotor.compile(lambda x, w: F.dropout(x @ w, 0.5))(x, w))
    assert torch.equal(*results) and 0.3 < (results[0] != 0).float().mean() < 0.7 and ">" in labels[0]


def test_a_training_step_is_eagers(templates):
    labels = templates()
    module = torch.nn.Sequential(
        torch.nn.Linear(16, 40), torch.nn.GELU(), torch.nn.Linear(40, 16), torch.nn.LayerNorm(16)
    )
    plain = copy.deepcopy(module)
    x = randn(24, 16)
    with config.patch(target="triton", strict=True):
        dynamotor.compile(module)(x).square().mean().backward()
    plain(x).square().mean().backward()
    for a, b in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    assert len(labels) >= 5


def test_tf32_templates_are_left_when_tf32_is_no_longer_allowed(templates, monkeypatch):
    templates()
    x = randn(16, 16)
    with config.patch(target="triton", strict=True):
        call = dynamotor.compile(lambda x: torch.relu(x @ x))
        call(x)
        monkeypatch.setattr(gpu_program, "tf32", lambda: False)
        with collect("code") as events:
            torch.testing.assert_close(call(x), torch.relu(x @ x))
    assert len(events) == 1 and "mm(" in events[0].data["python"]


def test_the_library_takes_the_place_of_a_template_that_does_not_build(templates, monkeypatch):
    templates()
    interpreted = gpu_program.interpreted

    def build(f, ints):
        if f.name.startswith("g"):
            raise BuildError(
                "DM305", "a kernel cannot be loaded", why="it asks for too much shared memory", cure="none"
            )
        return interpreted(f, ints)

    monkeypatch.setattr(gpu_program, "interpreted", build)
    before = counters["fallback"]["template.DM305"]
    x = randn(16, 16)
    with config.patch(target="triton", strict=True), collect("code", "fallback") as events:
        call = dynamotor.compile(lambda x: torch.relu(x @ x))
        for _ in range(2):
            torch.testing.assert_close(call(x), torch.relu(x @ x))
    assert [e.kind for e in events] == ["code", "fallback", "code"] and "mm(" in events[2].data["python"]
    assert counters["fallback"]["template.DM305"] == before + 1


TMA = Tiling(16, 32, 16, group=2, tma=True, tma_store=True)


def labels_and_text(fn, *inputs, tolerance=2e-2):
    """The Triton text of a product's kernels, which has been compared with eager."""
    with torch.no_grad(), config.patch(target="triton", strict=True), collect("code") as events:
        got = dynamotor.compile(fn)(*inputs)
    torch.testing.assert_close(
        got.double(), fn(*(t.double() for t in inputs)).double(), rtol=tolerance, atol=tolerance
    )
    return events[0].data["triton"]


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "tiling", [TMA, replace(TMA, persistent=True), replace(TMA, tma_store=False, persistent=True)]
)
@pytest.mark.parametrize("size", [(16, 32, 16), (48, 64, 32), (40, 72, 56), (24, 200, 264), (33, 40, 24)])
def test_operands_may_be_read_through_descriptors(templates, tiling, size):
    templates(tiling)
    m, n, k = size
    text = labels_and_text(lambda a, b: a @ b.t(), randn(m, k, dtype=BF16), randn(n, k, dtype=BF16) / k)
    assert (
        text.count("make_tensor_descriptor") == (3 if tiling.tma_store else 2)
        and "_all.store" in text
        or not tiling.tma_store
    )
    text = labels_and_text(lambda a, b: F.relu(a @ b) * 2, randn(m, k, dtype=F16), randn(k, n, dtype=F16) / k)
    assert "b_all.load([k, tn" in text
    if m % 8 == 0:
        text = labels_and_text(
            lambda a, b: (a.t() @ b).float(), randn(k, m, dtype=BF16), randn(k, n, dtype=BF16) / k
        )
        assert "a_all.load([k, tm * 16]).T" in text


def test_views_batches_and_epilogues_through_descriptors(templates):
    templates(TMA)
    x, w, b, r = (randn(*shape, dtype=BF16) / 4 for shape in ((40, 64), (72, 64), (72,), (40, 72)))
    text = labels_and_text(lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r, x, w, b, r)
    assert text.count("_all.store") == 1 and "tl.store" not in text.split("@triton.jit")[-1]
    text = labels_and_text(lambda x, w: x[8:, 16:48] @ w.t()[16:48, ::1] * 2, x, w)
    assert "make_tensor_descriptor(p0 + 528, [32, 32], [64, 1]" in text
    batched = [randn(3, 24, 32, dtype=BF16) / 4, randn(3, 32, 40, dtype=BF16)]
    assert "z * 768" in labels_and_text(lambda a, b: torch.bmm(a, b), *batched)
    templates(replace(TMA, persistent=True))
    assert "descriptor" not in labels_and_text(lambda a, b: torch.bmm(a, b), *batched)


def test_operands_that_do_not_qualify_are_read_by_pointers(templates):
    templates(TMA)
    for a, b in [
        (randn(40, 30, dtype=BF16), randn(30, 64, dtype=BF16)),  # rows of 60 bytes
        (randn(40, 64, dtype=BF16)[:, ::2], randn(32, 64, dtype=BF16)),
        (randn(1, 32, dtype=BF16), randn(32, 64, dtype=BF16)),
        (randn(1, 32, dtype=BF16).expand(40, 32), randn(32, 64, dtype=BF16)),
        (randn(40, 32), randn(32, 64)),
    ]:
        assert "descriptor" not in labels_and_text(lambda a, b: (a @ b) / 8, a, b)
    a, b = randn(40, 64, dtype=BF16), randn(32, 64, dtype=BF16)
    assert "descriptor" not in labels_and_text(lambda a, b: (a[:, 4:36] @ b) / 8, a, b)  # starts at byte 8


def test_pointers_that_are_not_aligned_take_the_other_function(templates):
    templates(TMA)
    call, store = dynamotor.compile(lambda a, b: F.relu(a @ b)), randn(40 * 64 + 1, dtype=BF16)
    b = randn(64, 32, dtype=BF16) / 8
    with torch.no_grad(), config.patch(target="triton", strict=True):
        for start in (0, 1):
            a = torch.as_strided(store, (40, 64), (64, 1), start)
            torch.testing.assert_close(call(a.detach(), b), F.relu(a @ b), rtol=2e-2, atol=2e-2)


def test_only_stores_of_whole_rows_that_nobody_reads_go_through_descriptors(templates):
    templates(TMA)
    x, w, r = randn(40, 64, dtype=BF16) / 8, randn(64, 48, dtype=BF16), randn(40, 48, dtype=BF16)
    text = labels_and_text(lambda x, w: (x @ w).view(5, 8, 6, 8).transpose(1, 2).contiguous() * 2, x, w)
    assert "_all.load" in text and "_all.store" not in text

    def fn(x, w, r):
        return r.clone().add_(x @ w)

    assert "_all.load" in labels_and_text(fn, x, w, r)


@pytest.mark.parametrize("form", [{}, {"persistent": True}])
@pytest.mark.slow
def test_descriptors_build_for_a_gpu_that_is_not_there(tmp_path, form):
    a, b, out = (
        Operand("a", BF16, 0, (0, 256, 1)),
        Operand("b", BF16, 0, (0, 1, 256)),
        Operand("c", BF16, 0, (0, 512, 1)),
    )
    product = Product((1, 512, 512, 256), a, b, None, out, BF16)
    f = emit_product(product, Tiling(128, 128, 64, warps=4, stages=3, tma=True, tma_store=True, **form))
    assert f.scratch == 3 * 128 and f.fallback.scratch == 0 and "descriptor" not in f.fallback.source
    with config.patch(cache_dir=str(tmp_path)):
        job = TritonJob(
            HELPERS + f.source, f.name, f.signature, f.warps, 90, stages=f.stages, scratch=f.scratch
        )
        code = start_kernel(job).result()
        with pytest.raises(BuildError, match="memory or clusters"):
            start_kernel(replace(job, scratch=128)).result()
        stop_workers()
    assert code.warps == 4
    assert code.extra == 2 and 3 * (128 * 64 + 64 * 128) * 2 <= code.shared <= 227 << 10
    text = sass(code.cubin)
    assert "UTMALDG" in text and "UTMASTG" in text and "HGMMA" in text


@pytest.mark.slow
def test_calls_that_are_not_aligned_take_tiles_that_fit_into_registers(tmp_path):
    a, b, out = (
        Operand("a", BF16, 0, (0, 256, 1)),
        Operand("b", BF16, 0, (0, 1, 256)),
        Operand("c", BF16, 0, (0, 512, 1)),
    )
    product = Product((1, 4096, 512, 256), a, b, None, out, BF16)
    pending = []
    with config.patch(cache_dir=str(tmp_path)):
        for tiling in (
            Tiling(256, 128, 64, warps=8, persistent=True),
            Tiling(256, 128, 64, warps=8, stages=3, tma=True),
        ):
            f = emit_product(product, tiling).fallback
            assert f.grid == 64 * 8 and f.fallback is None
            source = HELPERS + f.source
            pending.append(
                start_kernel(
                    TritonJob(source, f.name, f.signature, f.warps, 90, aligned=False, stages=f.stages)
                )
            )
        for built in pending:
            text = sass(built.result().cubin)
            assert "HGMMA" in text and text.count("STL") < 32  # stores of registers that did not suffice
    stop_workers()


def test_a_template_builds_for_a_gpu_that_is_not_there(templates, tmp_path):
    templates(Tiling(64, 64, 64, warps=4, stages=3))
    x, w = randn(64, 128, dtype=BF16), randn(128, 64, dtype=BF16)
    with torch.no_grad(), config.patch(target="triton", strict=True), collect("code") as events:
        dynamotor.compile(lambda x, w: F.relu(x @ w))(x, w)
    source = events[0].data["triton"]
    name = source.rsplit("def g", 1)[1].split("(")[0]
    with config.patch(cache_dir=str(tmp_path)):
        code = start_kernel(
            TritonJob(source, f"g{name}", ("*bf16", "*bf16", "*bf16", "i64"), 4, 90, stages=3)
        ).result()
        stop_workers()
    assert (
        code.cubin[:4] == b"\x7fELF" and code.shared == 3 * (64 * 64 + 64 * 64) * 2
    )  # as many stages as were asked for
