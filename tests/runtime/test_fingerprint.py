"""The hash sees every change of a tensor's content, however it was made."""

import pytest
import torch

from dynamotor.graph.spec import TensorSpec
from dynamotor.runtime.fingerprint import Fingerprint


@pytest.mark.parametrize("n", [1, 3, 15, 16, 17, 63, 64, 65, 1000, 16383, 16384, 16385, 100_001])
def test_any_single_element_changes_it(n):
    x = torch.randn(n)
    seen = Fingerprint([TensorSpec.of(x)])
    before = seen.of([x])
    assert seen.of([x.clone()]) == before
    for i in {0, n // 2, n - 1}:
        y = x.clone()
        y[i] += 1e-3
        assert seen.of([y]) != before


def test_order_and_signed_zeros_count():
    x = torch.randn(5000)
    seen = Fingerprint([TensorSpec.of(x)] * 2)
    assert seen.of([x, x.flip(0)]) != seen.of([x.flip(0), x])
    one = Fingerprint([TensorSpec.of(x)])
    assert one.of([x]) != one.of([x.flip(0)])
    assert len({one.of([x.roll(k)]) for k in (0, 1, 16, 64, 128, 4096)}) == 6
    assert one.of([torch.zeros(5000)]) != one.of([-torch.zeros(5000)])


def test_ways_to_change_a_parameter_that_keep_its_address():
    p = torch.nn.Parameter(torch.randn(300, 70))
    seen = Fingerprint([TensorSpec.of(p)])
    values = {seen.of([p])}
    p.data.mul_(2)
    values.add(seen.of([p]))
    p.detach().numpy()[3, 4] = 7
    values.add(seen.of([p]))
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], lr=0.1).step()
    values.add(seen.of([p]))
    assert len(values) == 4


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    x = torch.randint(0, 2, (1001,)).to(dtype)
    seen = Fingerprint([TensorSpec.of(x)])
    y = x.clone()
    y[-1] = 1 - y[-1].to(torch.int64)
    assert seen.of([x]) != seen.of([y])


def test_no_tensors_and_empty_tensors():
    assert Fingerprint([]).of([]) == Fingerprint([]).of([])
    empty = torch.empty(0, 3)
    assert Fingerprint([TensorSpec.of(empty)]).of([empty]) == Fingerprint([TensorSpec.of(empty)]).of([empty])
