"""The hash sees every change of a tensor's content, however it was made."""

import random
from collections.abc import Iterator

import pytest
import torch

from dynamotor._C import fingerprint

words = pytest.mark.parametrize("words", [2, 4, 8])  # of a vector: portable, AVX2, AVX-512


@words
@pytest.mark.parametrize("n", [1, 3, 15, 16, 17, 63, 64, 65, 1000, 16383, 16384, 16385, 100_001])
def test_any_single_element_changes_it(n, words):
    x = torch.randn(n)
    before = fingerprint([x], words)
    assert fingerprint([x.clone()], words) == before
    for i in {0, n // 2, n - 1}:
        y = x.clone()
        y[i] += 1e-3
        assert fingerprint([y], words) != before


@pytest.mark.parametrize("n", [100_001, 1 << 20])
def test_threads_do_not_change_it(n):
    x, threads = torch.randn(n), torch.get_num_threads()
    found = set()
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.add(fingerprint([x, x[7:]]))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


def test_order_and_signed_zeros_count():
    x = torch.randn(5000)
    assert fingerprint([x, x.flip(0)]) != fingerprint([x.flip(0), x])
    assert fingerprint([x]) != fingerprint([x.flip(0)])
    assert len({fingerprint([x.roll(k)]) for k in (0, 1, 16, 64, 128, 4096)}) == 6
    assert fingerprint([torch.zeros(5000)]) != fingerprint([-torch.zeros(5000)])


def test_ways_to_change_a_parameter_that_keep_its_address():
    p = torch.nn.Parameter(torch.randn(300, 70))
    values = {fingerprint([p])}
    p.data.mul_(2)
    values.add(fingerprint([p]))
    p.detach().numpy()[3, 4] = 7
    values.add(fingerprint([p]))
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], lr=0.1).step()
    values.add(fingerprint([p]))
    assert len(values) == 4


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    x = torch.randint(0, 2, (1001,)).to(dtype)
    y = x.clone()
    y[-1] = 1 - y[-1].to(torch.int64)
    assert fingerprint([x]) != fingerprint([y])


def test_no_tensors_and_empty_tensors():
    assert fingerprint([]) == fingerprint([])
    empty = torch.empty(0, 3)
    assert fingerprint([empty]) == fingerprint([empty])


def put(x: torch.Tensor, places: list[int] | torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A copy with other elements in some places."""
    return x.clone().index_copy_(0, torch.as_tensor(places), values)


def edits(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Structured changes of a tensor's contents: linear ones, sparse ones, and permutations."""
    n, bits = x.numel(), x.view(torch.int32)
    for factor in (-1, 2, 4, 8, 0.5, 1 / 1024, -2):
        yield f"times {factor}", x * factor
    for stride in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        for start in range(0, min(stride, 40), 3):
            four = [start + k * stride for k in range(4)]
            if four[-1] < n:
                yield "two signs", put(x, four[:2], -x[four[:2]])
                yield "two elements swapped", put(x, four[:2], x[four[1::-1]])
                yield "signs + - - +", put(x, four, x[four].abs() * torch.tensor([1, -1, -1, 1]))
                yield "signs - + + -", put(x, four, x[four].abs() * torch.tensor([-1, 1, 1, -1]))
                yield "signs of a lane", put(x, torch.arange(start, n, stride), -x[start::stride])
    for _ in range(150):
        places = torch.randperm(n)[: random.choice([2, 2, 3, 4, 8, 16])]
        yield "signs", put(x, places, -x[places])
        yield "bits", put(bits, places, bits[places] ^ (1 << random.randrange(31))).view(torch.float32)
        yield "moved", put(x, places, x[places.roll(1)])
        yield "powers of two", put(x, places, x[places] * random.choice([2.0, 4.0, 0.5, 256.0]))
        i, j = random.sample(range(16), 2)
        yield "rows swapped", put(x.view(16, -1), [i, j], x.view(16, -1)[[j, i]]).view(-1)


@pytest.mark.sweep(9)
@words
@pytest.mark.parametrize("n", [128, 1024, 4096, 16384, 80_000])
@pytest.mark.parametrize("kind", ["normal", "ones", "signs", "few values"])
def test_structured_edits_change_it(n, kind, words):
    torch.manual_seed(n)
    random.seed(n)
    x = {
        "normal": torch.randn(n),
        "ones": torch.ones(n),
        "signs": torch.randn(n).sign(),
        "few values": torch.randint(-3, 3, (n,)).float(),
    }[kind]
    before = fingerprint([x], words)
    same = [
        name
        for name, y in edits(x)
        if not torch.equal(y.view(torch.int32), x.view(torch.int32)) and fingerprint([y], words) == before
    ]
    assert not same
