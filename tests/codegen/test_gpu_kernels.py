"""Triton functions as jobs for a GPU: their launches overlap."""

import re

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from disassembly import sass

from dynamotor.base.config import config
from dynamotor.codegen.attend_triton import parts
from dynamotor.codegen.gpu_kernels import job_of
from dynamotor.codegen.triton_gemm import Tiling, emit_product
from dynamotor.codegen.triton_kernel import TritonFunction
from dynamotor.codegen.triton_product import Operand, Product
from dynamotor.runtime.triton_build import start_kernel, stop_workers

BF16 = torch.bfloat16
SUM = """
@triton.jit
def row_sums(p0, p1):
    x = tl.program_id(0)
    r = tl.arange(0, 4096)
    tl.store(p1 + x, tl.sum(tl.load(p0 + x * 4096 + r).to(tl.float32), 0))
"""


def product(**tiling):
    a, b, out = (
        Operand("a", BF16, 0, (0, 256, 1)),
        Operand("b", BF16, 0, (0, 1, 256)),
        Operand("c", BF16, 0, (0, 512, 1)),
    )
    return emit_product(Product((1, 512, 512, 256), a, b, None, out, BF16), Tiling(128, 128, 64, **tiling))


FUNCTIONS = {
    "sums": lambda: TritonFunction("row_sums", SUM, ("*bf16", "*fp32"), 8, 4),
    "attention": lambda: parts(BF16, BF16, 4, (64, 64), (64,) * 20, 8, 0.125, early=True),
    "product": product,
    "product by descriptors": lambda: product(persistent=True, tma=True, tma_store=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_read_or_written_before_the_kernels_before_have_ended(tmp_path, name):
    with config.patch(cache_dir=str(tmp_path)):
        job = job_of(FUNCTIONS[name](), 90)
        text = sass(start_kernel(job).result().cubin)
        stop_workers()
    assert job.overlaps
    before, _, behind = text.partition("ACQBULK")
    touched = re.compile(r"\b(LDG|LDGSTS|STG|ATOMG|RED|UTMALDG|UTMASTG|UTMACCTL)\b")
    assert "PREEXIT" in before and touched.search(behind) and not touched.search(before)


def test_launches_of_older_gpus_do_not_overlap():
    job = job_of(FUNCTIONS["sums"](), 80)
    assert not job.overlaps and "overlap()" not in job.source.partition("def row_sums")[2]
