"""Two threads that are the first to run a compiled backward: the second one found its graph gone."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


def test_threads_share_the_first_backward() -> None:
    compiled = dynamotor.compile(lambda x: (x.sin() * x).sum())
    x = torch.randn(7)
    leaves = [x.clone().requires_grad_() for _ in range(4)]
    outs = [compiled(leaf) for leaf in leaves]
    together = threading.Barrier(len(outs))

    def backward(out: torch.Tensor) -> None:
        together.wait()
        out.backward()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=backward, args=(out,)) for out in outs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    for leaf in leaves:
        torch.testing.assert_close(leaf.grad, x.cos() * x + x.sin())
