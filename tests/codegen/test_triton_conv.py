"""Generated convolutions with their epilogues, in Triton's interpreter, against eager in float64."""

import random

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed")

from disassembly import sass

import dynamotor
from bench.triton_interpret import available
from dynamotor.base.config import config
from dynamotor.base.events import collect
from dynamotor.codegen import gpu_program
from dynamotor.codegen.triton_gemm import Tiling, emit_product
from dynamotor.codegen.triton_gemm_sites import find_sites, put
from dynamotor.codegen.triton_ops import HELPERS
from dynamotor.codegen.triton_product import ConvWindow, Operand, Product
from dynamotor.runtime.triton_build import TritonJob, start_kernel, stop_workers

pytestmark = pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1")
BF16, F16 = torch.bfloat16, torch.float16
SMALL = Tiling(32, 16, 16, group=2)


def images(*shape, dtype=BF16):
    return torch.randn(*shape).to(dtype).to(memory_format=torch.channels_last)


@pytest.fixture
def convolve(monkeypatch):
    """Compile with templates, compare with eager in float64; gives the labels of the templates and the
    generated text.
    """

    def run(fn, *inputs, tiling=SMALL, tolerance=2e-2):
        labels = []

        def choose(program, gpu, tune=None):
            sites = find_sites(program)
            labels.extend(site.label() for site in sites)
            return put(program, [(site, tiling) for site in sites])

        monkeypatch.setattr(gpu_program.triton_gemm_choice, "choose", choose)
        with torch.no_grad(), config.patch(target="triton", strict=True), collect("code") as events:
            got = dynamotor.compile(lambda *given: fn(*given), dynamic=False)(*inputs)
            want, eager = fn(*(t.double() for t in inputs)), fn(*inputs)
        assert got.dtype == eager.dtype and got.stride() == eager.stride()
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
        return labels, events[0].data["python"] + events[0].data["triton"]

    return run


def weights(n, c, *kernel, dtype=BF16):
    return images(n, c, *kernel, dtype=dtype) / (c * kernel[0] * kernel[1]) ** 0.5


@pytest.mark.slow
def test_random_convolutions(convolve):
    for _ in range(12):
        pick = random.choice
        c, n, kernel = pick([16, 17, 24, 40]), pick([1, 5, 16, 33]), (pick([1, 2, 3, 5]), pick([1, 3]))
        place = {"stride": (pick([1, 2, 3]), pick([1, 2])), "padding": (pick([0, 1, 2]), pick([0, 1, 4])),
                 "dilation": (pick([1, 2]), pick([1, 2, 3]))}  # fmt: skip
        x, w = images(pick([1, 2, 3]), c, pick([9, 10, 13]), pick([7, 8, 12])), weights(n, c, *kernel)
        through = pick([False, True])
        tiling = Tiling(
            32, 16, pick([16, 32]), group=2, persistent=pick([False, True]), tma=through, tma_store=through
        )
        labels, text = convolve(lambda x, w: F.relu(F.conv2d(x, w, **place)) * 2, x, w, tiling=tiling)  # noqa: B023
        assert len(labels) == 1 and "convolution(" not in text and "k1(" not in text, (
            place,
            x.shape,
            w.shape,
        )


def test_bias_batch_norm_and_residual_are_part_of_the_launch(convolve):
    x, w, r = images(2, 16, 8, 8), weights(24, 16, 3, 3), images(2, 24, 8, 8)
    bias, scale, shift, mean = (torch.randn(24).to(BF16) for _ in range(4))
    variance = torch.rand(24).to(BF16) + 0.5

    def fn(x, w, r, bias, scale, shift, mean, variance):
        return F.relu(F.batch_norm(F.conv2d(x, w, bias, padding=1), mean, variance, scale, shift) + r)

    labels, text = convolve(fn, x, w, r, bias, scale, shift, mean, variance, tolerance=6e-2)
    assert (
        labels[0].startswith("bf16 1x128x24x144 nt window 3x3 of 8x8 padding 1x1")
        and " > add" in labels[0]
        and "convolution(" not in text
    )


@pytest.mark.slow
def test_weights_may_be_read_through_a_descriptor(convolve):
    through = Tiling(32, 16, 16, group=2, tma=True, tma_store=True)
    for c, wanted in ((32, True), (24, False)):  # 24 channels are no whole tiles of 16
        x, w = images(2, c, 9, 8), weights(40, c, 3, 3)
        _, text = convolve(lambda x, w: F.relu(F.conv2d(x, w, padding=1)), x, w, tiling=through)
        assert ("b_all.load([tn * 16, place" in text) == wanted and "a_all" not in text


def test_one_by_one_is_a_plain_product(convolve):
    x, w = images(2, 32, 8, 8), weights(24, 32, 1, 1)
    through = Tiling(32, 16, 16, group=2, tma=True)
    labels, text = convolve(lambda x, w: F.silu(F.conv2d(x, w)), x, w, tiling=through)
    assert labels[0].startswith("bf16 1x128x24x32 nt > ")
    convolve(lambda x, w: F.relu(F.conv2d(x[:, 8:24, 2:4], w[:, 4:20])), x, weights(24, 32, 1, 1))
    labels, _ = convolve(lambda x, w: F.relu(F.conv2d(x, w, stride=2)), x, w)
    assert labels[0].startswith("bf16 1x32x24x32 nt window 1x1 of 8x8 stride 2x2 > ")
    labels, _ = convolve(lambda x, w: F.relu(F.conv2d(x[:, :, :1, :1], w)), x, w)
    assert labels[0].startswith("bf16 1x2x24x32 nt > ")


def test_other_layouts_types_and_kinds_stay_the_librarys(convolve):
    relu, x, w = F.relu, images(2, 32, 8, 8), weights(32, 32, 3, 3)
    for fn, given in [
        (lambda x, w: relu(F.conv2d(x, w[:, :8], groups=4)), (x, w)),
        (lambda x, w: relu(F.conv_transpose2d(x, w)), (x, w)),
        (lambda x, w: relu(F.conv1d(x[:, :, 0], w[:, :, 0])), (x, w)),
        (lambda x, w: relu(F.conv2d(x[:, :3], w[:, :3])), (x, w)),
        (lambda x, w: relu(F.conv2d(x, w)), (x.float(), w.float())),
        (lambda x, w: F.conv2d(x, w), (x, w)),  # nothing is fused
        (lambda x, w: F.conv2d(x, w).sum((2, 3)), (x, w)),
    ]:
        labels, text = convolve(fn, *given, tolerance=0.3)
        assert not labels and "convolution" in text


def test_float16_and_a_result_that_others_read(convolve):
    x, w = images(2, 16, 7, 7, dtype=F16), weights(16, 16, 3, 3, dtype=F16)

    def fn(x, w):
        y = F.conv2d(x, w, padding=1)
        return F.conv2d(F.relu(y), w, padding=1).sigmoid() + y

    labels, _ = convolve(fn, x, w)
    assert len(labels) == 2 and "keep" in labels[0]


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.slow
def test_a_window_builds_for_a_gpu_that_is_not_there(tmp_path, through):
    m, n, k = 32 * 28 * 28, 128, 9 * 128
    window = ConvWindow(
        128, (28, 28), (28, 28), (3, 3), (1, 1), (1, 1), (1, 1), (28 * 28 * 128, 28 * 128, 128)
    )
    a, b, out = (
        Operand("a", BF16, 0, (0, 128, 1)),
        Operand("b", BF16, 0, (0, 1, k)),
        Operand("c", BF16, 0, (0, n, 1)),
    )
    tiling = Tiling(128, 128, 64, warps=8, stages=3, tma=through)
    f = emit_product(Product((1, m, n, k), a, b, None, out, BF16, window=window), tiling)
    with config.patch(cache_dir=str(tmp_path)):
        job = TritonJob(
            HELPERS + f.source, f.name, f.signature, f.warps, 90, stages=f.stages, scratch=f.scratch
        )
        code = start_kernel(job).result()
        stop_workers()
    text = sass(code.cubin)
    copies = [line for line in text.splitlines() if "LDGSTS" in line]
    assert (
        "HGMMA" in text
        and ("UTMALDG" in text) == through
        and len(copies) == (12 if through else 24)
        and all(".128" in line for line in copies)
    )  # 16 bytes at a time
