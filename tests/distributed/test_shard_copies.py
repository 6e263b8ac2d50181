"""One kernel packs tensors into a message of ranks' parts, or unpacks it; here in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from bench.triton_interpret import available
from dynamotor.codegen.gpu_kernels import job_of
from dynamotor.distributed import shard_copies
from dynamotor.distributed.shard_copies import Layout, copied
from dynamotor.runtime.triton_build import start_kernel

interpreted = pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1")
# Elements of a tensor, of a rank's padded part, and where that begins: even, padded, of one rank alone, empty, odd.
PARTS = ((200, 100, 0), (9, 8, 100), (4, 4, 108), (0, 0, 112), (258, 129, 112))
LAYOUT = Layout(PARTS, 241, 2, block=64)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_copies, "_has_kernels", lambda device: True)
    shard_copies._kernel.cache_clear()


def _layout() -> Layout:
    return dataclasses.replace(LAYOUT, kernels={})


def _message(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    message = torch.zeros(2, 241, dtype=dtype)
    for tensor, (numel, part, offset) in zip(tensors, PARTS, strict=True):
        padded = torch.zeros(2 * part, dtype=dtype)
        padded[:numel] = tensor
        message[:, offset : offset + part] = padded.view(2, part)
    return message.view(-1)


@interpreted
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float64,) * 2]
)
def test_tensors_are_packed_with_zeros_behind_them_and_unpacked(
    kernels: None, dtypes: tuple[torch.dtype, ...]
) -> None:
    given, sent = dtypes
    tensors = [torch.randn(numel).to(given) for numel, _, _ in PARTS]
    message, layout = torch.full((482,), 7.0, dtype=sent), _layout()
    assert copied(layout, True, tensors, message)
    assert torch.equal(message, _message(tensors, sent))
    back = [torch.empty(numel, dtype=given) for numel, _, _ in PARTS]
    assert copied(layout, False, back, message)
    assert all(torch.equal(a, b.to(sent).to(given)) for a, b in zip(back, tensors, strict=True))


@interpreted
def test_tensors_of_other_types_and_strides_are_left_to_pytorch(kernels: None) -> None:
    layout, message = Layout(((8, 8, 0), (8, 8, 8)), 16, 1), torch.empty(16)
    a, b = torch.randn(8), torch.randn(8)
    assert copied(layout, True, [a, b], message)
    assert not copied(layout, True, [a, b.double()], message)
    assert not copied(layout, True, [a, torch.randn(16)[::2]], message)


def test_there_are_no_kernels_on_a_cpu_and_for_very_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    message = torch.empty(80)
    many = Layout(tuple((1, 1, i) for i in range(80)), 80, 1)
    assert not copied(many, True, [torch.zeros(1)] * 80, message)
    monkeypatch.setattr(shard_copies, "_has_kernels", lambda device: True)
    assert not copied(dataclasses.replace(many, kernels={}), True, [torch.zeros(1)] * 80, message)


@pytest.mark.slow
@pytest.mark.parametrize("packs", [True, False])
def test_kernels_are_built_for_a_gpu(packs: bool) -> None:
    function = LAYOUT.function(packs, torch.bfloat16, torch.float32)
    assert start_kernel(job_of(function, 90)).result().cubin
