"""The Triton kernels of `dynamotor::attend`, in Triton's interpreter: compiled programs with CPU tensors."""

import pytest
import torch
import torch.nn.functional as F

import bench.verification  # noqa: F401  (registers the interpreter)
import dynamotor
from bench.triton_interpret import available
from dynamotor import config
from dynamotor.codegen import attend_gpu, attend_triton

pytestmark = pytest.mark.skipif(not available(), reason="Triton is not there as an interpreter")
attention = F.scaled_dot_product_attention


@pytest.mark.parametrize("heads", [1, 6])  # four programs share a head's keys, or one goes through them
@pytest.mark.parametrize("filled", [0, 40, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_programs_that_share_a_head_s_keys_agree_with_eager(dtype, filled, heads):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, n, width, generator=generator).to(dtype)
        for n, width in ((4, 40), (300, 40), (300, 24))
    )
    mask = (torch.arange(300) < filled)[None, None, None]
    with torch.no_grad(), config.patch(target="triton"):
        found = dynamotor.compile(attention)(query, key, value, mask)
    want = attention(query.double(), key.double(), value.double(), mask)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", [1, 100, 129, 192, 256, 257])
@pytest.mark.parametrize("width, dtype", [(64, torch.bfloat16), (128, torch.float16), (128, torch.float32)])
def test_few_keys_are_one_block_of_more_warps(length, width, dtype):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 3, n, width, generator=generator).to(dtype) for n in (3, length, length)
    )
    mask = torch.rand(2, 1, 3, length, generator=generator) > 0.3
    mask[1, 0, 2] = False
    with torch.no_grad(), config.patch(target="triton"):
        found = dynamotor.compile(attention)(query, key, value, mask)
    want = attention(query.double(), key.double(), value.double(), mask)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), want, rtol=tolerance, atol=tolerance)
    block, warps = attend_triton.tile_of(dtype, (width, width), length)
    least = attend_triton.block_of(dtype, (width, width))
    assert (block >= length) == (length <= (128 if dtype is torch.float32 else 256))
    assert warps * least == 4 * block


def test_a_block_holds_about_as_many_bytes_for_each_type_and_width():
    widths = (16, 64, 128, 256)
    blocks = [attend_triton.block_of(torch.bfloat16, (n, n)) for n in widths]
    assert blocks == [128, 128, 64, 32]
    assert [attend_triton.block_of(torch.float32, (n, n)) for n in widths] == [128, 64, 32, 16]


def test_what_is_broadcast_is_read_with_a_stride_of_zero():
    shape, strides = (1, 1, 1, 32), (32, 32, 32, 1)
    assert attend_gpu._strides([(shape, strides, torch.float32)], (9, 9, 9, 9)) == [
        *(0, 0, 0, 1),
        *[0] * 12,
        *[9] * 4,
    ]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["none", "filled", "window", "holes", "by row", "nothing"])
def test_blocks_outside_of_the_keys_that_a_mask_shows_are_not_read(kind, rows):
    length, places, width = 1700, torch.arange(1700), 160
    mask = {
        "none": None,
        "filled": places < 900,
        "window": (places > 700) & (places < 1000),
        "holes": places // 100 % 3 == 1,
        "by row": (places - 400 * torch.arange(rows)[:, None]).abs() < 150,
        "nothing": places < 0,
    }[kind]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, n, width, generator=generator) for n in (rows, length, length))
    assert key.nbytes > attend_gpu.FEW
    if kind == "filled":
        key[:, :, 1100:] = value[:, :, 1100:] = torch.nan  # of memory that was never written
    added = None
    if mask is not None:
        added = torch.where(mask, 0.0, -torch.inf).expand(1, 1, rows, length)
    found = torch.empty_like(query)
    attend_gpu.attend(query, key, value, added, width**-0.5, query.stride(), out=found)
    n = 1100 if kind == "filled" else length
    given = (t[:, :, :n].double() for t in (key, value))
    mask = mask if mask is None else mask.expand(rows, length)[:, :n]
    want = attention(query.double(), *given, mask)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
