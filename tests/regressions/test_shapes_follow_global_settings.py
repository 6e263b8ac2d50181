"""Shape inference remembers answers; what an answer reads besides its arguments is part of the question."""

import pytest
import torch

import dynamotor
from dynamotor.graph.shapes import infer_spec
from dynamotor.graph.spec import TensorSpec

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _settings_come_back():
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


PROGRAMS = [
    lambda i: i / 2,
    lambda i: i.sqrt(),
    lambda i: torch.full((2,), 0.5),
    lambda i: torch.arange(0.0, 3.0) + i[0],
    lambda i: i.float().mean() * torch.ones(3),
    lambda i: i.sigmoid(),
    lambda i: torch.zeros(2) + i[0],
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_default_dtype(program):
    i = torch.arange(1, 5)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        want, got = program(i), dynamotor.compile(program)(i)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want)


def test_the_default_device():
    for device in ("cpu", "meta", "cpu"):
        with torch.device(device):
            spec = infer_spec(aten.full.default, ([2], 1.0), {})
        assert spec.device.type == device


def test_onednn_switched_off_and_on():
    """A convolution's result is channels-last where oneDNN computes it, row-major where it does not."""
    x = torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last)
    w = torch.randn(16, 8, 3, 3)
    args = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    for on in (True, False, True):
        with torch.backends.mkldnn.flags(enabled=on):
            want = aten.convolution(x, w, *args).stride()
            assert (
                infer_spec(aten.convolution.default, (TensorSpec.of(x), TensorSpec.of(w), *args), {}).stride
                == want
            )
