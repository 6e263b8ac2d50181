"""Fourier transforms have eager's values and layouts."""

from __future__ import annotations

import pytest
import torch
from every_backend import BACKENDS, same


@pytest.mark.regression
@pytest.mark.parametrize("backend", BACKENDS)
def test_fourier_transforms(backend):
    """FNetForMaskedLM: complex intermediates have no loop kernels."""

    def fn(t):
        return torch.fft.fftn(t, dim=(1, 2)).real + torch.fft.irfft(torch.fft.rfft(t) * 2)

    same(fn, torch.randn(2, 4, 8), backend=backend)
