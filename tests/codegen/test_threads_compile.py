"""Functions and backwards that several threads compile at once."""

import sys
import threading

import pytest
import torch

import dynamotor

PROGRAMS = [
    lambda x, w: ((x @ w).tanh() * x).softmax(-1) * w.exp(),
    lambda x, w: torch.nn.functional.layer_norm(x @ w.t(), (16,)).relu() * x.sigmoid(),
    lambda x, w: (x.cumsum(0) * w).logsumexp(1),
]


@pytest.fixture(autouse=True)
def _switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_first_calls_of_several_functions():
    wrong, together = [], threading.Barrier(3)

    def work(k: int) -> None:
        try:
            together.wait()
            for program in (PROGRAMS[k], PROGRAMS[k - 1]):
                mine = [torch.randn(16, 16, requires_grad=True) for _ in range(2)]
                other = [t.detach().clone().requires_grad_() for t in mine]
                dynamotor.compile(program)(*mine).sum().backward()
                program(*other).sum().backward()
                torch.testing.assert_close(
                    [t.grad for t in mine], [t.grad for t in other], rtol=1e-3, atol=1e-4
                )
        except Exception as error:  # a thread's own errors would be lost
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
