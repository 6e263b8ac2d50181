"""Shape inference remembers answers; settings that an answer depends on are part of the question."""

import pytest
import torch

import dynamotor
from dynamotor.graph.shapes import infer_spec
from dynamotor.graph.spec import TensorSpec

pytestmark = pytest.mark.regression

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


AROUND = [
    lambda x: ((x @ x.t()).exp().cumsum(0) @ x).relu(),
    lambda x: x.sum().item() * 2,
    lambda x: torch.nn.functional.interpolate(x[None, None], scale_factor=1.7),
    lambda x: (x.long() // 3, x.to(torch.uint8) + 1, x.clone().fill_(2).add_(x, alpha=2)),
    lambda x: torch.nn.functional.cross_entropy(x, x.argmax(1)),
    lambda x: torch.func.grad(lambda y: (y**3).sum())(x),
    lambda x: float(x.detach().numpy().sum()),
]


def _under_meta(function, x):
    with torch.device("meta"):
        out = function(x)
        return (out, *torch.autograd.grad(out.sum(), x)) if getattr(out, "requires_grad", False) else out


@pytest.mark.parametrize("graded", [False, True])
def test_what_the_compiler_makes_is_on_the_host(graded):
    """DM401: constants and memory of the compiler were made on the program's default device."""
    x = torch.linspace(-1, 2, 12).reshape(3, 4).requires_grad_(graded)
    for function in AROUND:
        compiled = dynamotor.compile(function)
        for _ in range(2):
            torch.testing.assert_close(_under_meta(compiled, x), _under_meta(function, x))
