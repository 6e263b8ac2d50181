"""Softmax and cross entropy over rows that do not fit registers: how often memory is read, and the odd
values.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed")

from triton_launches import check

import dynamotor
from bench.triton_interpret import available
from dynamotor.base.config import config
from dynamotor.codegen import gpu_program, triton
from dynamotor.codegen.triton_plan import GpuTuning

pytestmark = pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1")
triton_expand = triton.expand
LONG = GpuTuning().whole_row + 100


def passes(functions):
    return sum(
        f.source.count("for base") - f.source.count("edge = ") for f in functions
    )  # the edge is part of its pass


@pytest.mark.parametrize("programs", [2, GpuTuning().programs])
def test_maximum_and_sum_of_exponentials_take_one_pass(programs):
    tuning = GpuTuning(programs=programs)
    x = torch.randn(2, LONG)
    x[0, 5] = x[1, :3000] = -float("inf")
    functions = check(lambda x: torch.softmax(x, -1), x, tuning=tuning)
    assert passes(functions) == (
        2 if programs == 2 else 1
    )  # the quotient is another pass, or a kernel of its own
    check(lambda x: torch.log_softmax(x, -1), x, tuning=tuning)
    check(lambda x: torch.softmax(x, -1), x.double(), tolerance=1e-12, tuning=tuning)
    check(lambda x: torch.softmax(x, -1), x.bfloat16(), tolerance=1e-2, tuning=tuning)


@pytest.mark.parametrize("programs", [2, GpuTuning().programs])
def test_rows_of_infinities_and_nan_are_eagers(programs):
    tuning = GpuTuning(programs=programs)
    x = torch.randn(4, LONG)
    x[0] = -float("inf")
    x[1, 3], x[2, 7], x[3, 9], x[3, 12] = float("nan"), float("inf"), float("inf"), float("nan")
    check(lambda x: torch.softmax(x, -1), x, tuning=tuning)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_touches_the_logits_three_times(monkeypatch, dtype):
    programs = []
    monkeypatch.setattr(
        gpu_program.triton, "expand", lambda p: programs.append(triton_expand(p)) or programs[-1]
    )
    x, t = torch.randn(3, LONG, dtype=dtype, requires_grad=True), torch.tensor([5, -100, LONG - 1])
    with config.patch(target="triton", strict=True):
        loss = dynamotor.compile(lambda x, t: F.cross_entropy(x, t))(x, t)
        loss.backward()
    exact = x.detach().double().requires_grad_()
    want = F.cross_entropy(exact, t)
    want.backward()
    tolerance = (
        1e-6 if dtype is torch.float32 else 5e-2
    )  # eager rounds the logarithm to bfloat16 before exp, and so do we
    torch.testing.assert_close(loss.double(), want, rtol=tolerance, atol=0)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=tolerance, atol=1e-10)
    steps = [(p, s) for p in programs for s in p.steps]
    reads = [s for p, s in steps if any(p.buffers[a].spec.numel == x.numel() for a in s.reads)]
    writes = [s for p, s in steps if any(p.buffers[a].spec.numel == x.numel() for a in s.writes)]
    assert len(writes) == 1 and len(reads) == 3  # forward; one element a row for the loss; backward
    assert passes([s.function for _, s in steps]) == 1


def test_a_gradient_with_one_element_a_row_is_not_summed():
    x, t = torch.randn(4, 50), torch.tensor([0, 49, 7, 7])
    y = torch.log_softmax(x, 1)

    def gradient(g, y, x, t):
        total = torch.tensor(4.0)
        d = torch.ops.aten.nll_loss_backward(g, x, t, None, 1, -100, total)
        return torch.ops.aten._log_softmax_backward_data(d, y, 1, torch.float32)

    functions = check(gradient, torch.tensor(1.0), y, x, t)
    assert all("tl.sum" not in f.source for f in functions)
