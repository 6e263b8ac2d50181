"""Each call hears of its own positions only, however many threads run the same kernel at once."""

import threading

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


@pytest.mark.parametrize(
    "program",
    [
        lambda w, i: torch.nn.functional.embedding(i, w) * 2,
        lambda w, i: w.index_select(0, i) + 1,
        lambda w, i: w[i].cumsum(1),
        lambda w, i: w[i].sum(0),
    ],
)
def test_valid_calls_never_raise_and_invalid_ones_always_do(program):
    fast = dynamotor.compile(program)
    w = torch.randn(50, 600, dtype=torch.float64)
    good, bad = torch.arange(50).repeat(8), torch.arange(400)
    want = program(w, good)
    torch.testing.assert_close(fast(w, good), want)
    wrong: list[str] = []

    def work(which: int) -> None:
        for _ in range(60):
            try:
                result = fast(w, bad if which else good)
            except IndexError:
                if not which:
                    wrong.append("a valid call raised")
            else:
                if which:
                    wrong.append("wrong rows came back")
                elif not torch.allclose(result, want):
                    wrong.append("wrong values")

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, sorted(set(wrong))
