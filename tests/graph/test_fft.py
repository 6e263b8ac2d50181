"""Fourier transforms have eager's values and layouts."""

from __future__ import annotations

import pytest
import torch

import dynamotor

BACKENDS = ["eager", "aot_eager", "native"]


def same(fn, *args, backend):
    compiled = dynamotor.compile(fn, backend=backend, fullgraph=True)
    for _ in range(2):
        ours, theirs = compiled(*args), fn(*args)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return ours, theirs


@pytest.mark.regression
@pytest.mark.parametrize("backend", BACKENDS)
def test_fourier_transforms(backend):
    """FNetForMaskedLM: complex intermediates have no loop kernels."""

    def fn(t):
        return torch.fft.fftn(t, dim=(1, 2)).real + torch.fft.irfft(torch.fft.rfft(t) * 2)

    same(fn, torch.randn(2, 4, 8), backend=backend)
