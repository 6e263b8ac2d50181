"""Rows that products read are moved apart where their starts are not aligned, and results stay eager's."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed")

import dynamotor
from bench.triton_interpret import available
from dynamotor.base.config import config
from dynamotor.base.events import collect
from dynamotor.codegen import gpu_program

pytestmark = pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1")
R = torch.randn


@pytest.fixture
def programs(monkeypatch):
    """Compile as for a GPU, with small tensors counted too; the list fills with the programs after
    padding.
    """
    found = []
    monkeypatch.setattr(gpu_program, "_is_gpu", lambda device: True)
    real = gpu_program.pad_rows.pad_rows
    monkeypatch.setattr(
        gpu_program.pad_rows, "pad_rows", lambda program: found.append(real(program, 32, 64)) or found[-1]
    )
    with config.patch(target="triton", strict=True):
        yield found


def padded(program):
    """Strides of buffers that have gaps."""
    return {
        b.spec.shape: b.spec.stride
        for b in program.buffers.values()
        if b.kind == "temp" and b.spec.stride[-2:-1] > b.spec.shape[-1:]
    }


def compare(fn, *inputs, tolerance=1e-4):
    with torch.no_grad():
        got, want = dynamotor.compile(fn)(*inputs), fn(*inputs)
    for a, b in zip(
        got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True
    ):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_a_softmax_between_two_products(programs):
    compare(lambda x, w, v: torch.softmax(x @ w, -1) @ v, R(20, 16), R(16, 45), R(45, 8))
    assert set(padded(programs[0]).values()) == {(48, 1)} and len(programs[0].buffers) - 3 > 1


def test_transposed_and_sliced_operands_and_flat_maps(programs):
    compare(lambda x, y: torch.relu(x).t() @ y, R(20, 45), R(20, 8))
    compare(lambda x, y: (x * 2)[4:, 3:43] @ y, R(24, 45), R(40, 8))
    compare(lambda x, y: (x.tanh() + 1).view(6, 4, 45) @ y, R(24, 45), R(45, 8))
    assert all(padded(p) for p in programs)


def test_batches(programs):
    compare(
        lambda q, k, v: torch.softmax(q @ k.transpose(1, 2), -1) @ v, R(3, 33, 8), R(3, 33, 8), R(3, 33, 8)
    )
    assert (33 * 36, 36, 1) in padded(programs[0]).values()


def test_the_gradient_of_a_loss_over_odd_many_words(programs):
    x, w, t = R(24, 16, requires_grad=True), R(45, 16, requires_grad=True), torch.randint(0, 45, (24,))
    call = dynamotor.compile(lambda x, w, t: F.cross_entropy(F.linear(x, w) * 2, t))
    call(x, w, t).backward()
    got, x.grad, w.grad = (x.grad, w.grad), None, None
    F.cross_entropy(F.linear(x, w) * 2, t).backward()
    torch.testing.assert_close(got, (x.grad, w.grad), rtol=1e-4, atol=1e-5)
    assert (48, 1) in padded(programs[1]).values()


def test_what_the_user_sees_and_what_others_touch_keeps_its_strides(programs):
    def fn(x, w):
        y = x @ w
        return y, (y + 1).sort(1)[0], torch.relu(y) @ w.t()

    compare(fn, R(20, 16), R(16, 45))
    assert set(padded(programs[0])) <= {(20, 45)} and len(padded(programs[0])) <= 1
    compare(lambda x, w: (x * 2) @ w, R(20, 48), R(48, 8))  # aligned as it is
    assert not padded(programs[1])


def test_steps_that_shared_memory_do_not_any_more(programs):
    def fn(x, w, r):
        y = x @ w
        z = torch.sigmoid(y) + r
        return z @ w.t(), (z * 3).sum()

    with collect("code"):
        compare(fn, R(20, 16), R(16, 45), R(20, 45))
    names = {b.name for b in programs[0].buffers.values() if b.spec.stride[-2:-1] == (48,)}
    assert names and not any(
        n in names for s in programs[0].steps for pair in getattr(s, "inplace", ()) for n in pair
    )
