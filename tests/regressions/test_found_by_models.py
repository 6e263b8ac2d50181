"""Small cases of what whole models broke: each names the model."""

from __future__ import annotations

import typing
from typing import List  # noqa: UP035

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dynamotor

BACKENDS = ["eager", "aot_eager", "native"]


def same(fn, *args, backend):
    compiled = dynamotor.compile(fn, backend=backend, fullgraph=True)
    for _ in range(2):
        ours, theirs = compiled(*args), fn(*args)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return ours, theirs


@pytest.mark.parametrize("backend", BACKENDS)
def test_adaptive_pooling_of_channels_last_inputs(backend):
    """convnext: PyTorch restrides the mean in place."""
    x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
    same(lambda t: F.adaptive_avg_pool2d(t, 1) * 2, x, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fourier_transforms(backend):
    """FNetForMaskedLM: complex intermediates have no loop kernels."""

    def fn(t):
        return torch.fft.fftn(t, dim=(1, 2)).real + torch.fft.irfft(torch.fft.rfft(t) * 2)

    same(fn, torch.randn(2, 4, 8), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [8, 7])
def test_grouped_matrix_products(backend, width):
    """MixtralForCausalLM: the rows of the result are aligned."""
    if width % 4 and backend == "native":
        pytest.skip("eager asks for aligned operands")
    x, weight = torch.randn(10, 12), torch.randn(3, width, 12).transpose(1, 2)
    offsets = torch.tensor([3, 6, 10], dtype=torch.int32)
    ours, theirs = same(lambda a, w, o: F.grouped_mm(a, w, offs=o), x, weight, offsets, backend=backend)
    assert ours.stride() == theirs.stride()


class Deep(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.a_submodule_with_a_long_name = Deep(depth - 1) if depth else nn.Linear(3, 3)
        self.another_submodule_with_a_long_name = nn.Linear(3, 3)

    def forward(self, x):
        return self.another_submodule_with_a_long_name(self.a_submodule_with_a_long_name(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_paths_to_parameters(backend):
    """SwinForImageClassification: graph inputs whose names agree in what is kept of them."""
    same(Deep(4), torch.randn(2, 3), backend=backend)


def test_typing_aliases_in_the_forward():
    """crossvit: torch.jit.annotate(List[torch.Tensor], [])."""

    def fn(x):
        found = torch.jit.annotate(List[torch.Tensor], [])  # noqa: UP006
        found.append(x + 1)
        return typing.cast(torch.Tensor, found[0])

    same(fn, torch.randn(3), backend="eager")


def test_default_attributes_of_generated_modules_in_a_slice():
    """LlamaForCausalLM iterates over a slice of its ModuleList."""
    layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])

    def fn(x):
        part = layers[1:]
        for layer in part:
            x = layer(x)
        return x, len(part), part.training

    out, n, training = dynamotor.compile(fn, backend="eager", fullgraph=True)(torch.ones(2, 3))
    assert n == 3 and training and torch.equal(out, fn(torch.ones(2, 3))[0])


def test_a_module_that_decides_once():
    """ViTForImageClassification sets config.problem_type at its first call: the second compiles once more."""

    class Model(nn.Module):
        kind = None

        def forward(self, x):
            if self.kind is None:
                self.kind = "single"
            return x * (2 if self.kind == "single" else 3)

    graphs = []
    compiled = dynamotor.compile(
        Model(), backend=lambda gm, inputs: graphs.append(gm) or gm.forward, fullgraph=True
    )
    x = torch.randn(3)
    for _ in range(5):
        assert torch.equal(compiled(x), x * 2)
    assert len(graphs) == 2
