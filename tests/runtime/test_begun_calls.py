"""Calls that begin before they are sure to come, while a device computes the bool that decides."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.capture import cut
from dynamotor.runtime.cuda_graphs import WARM_UP, GraphedCall

CPU = torch.device("cpu")


class Recorder:
    """Records a call as itself; `replay` runs it on the recording's inputs into its results."""

    def record(self, call: Any) -> tuple[Any, tuple[Any, ...], Any]:
        results = tuple(r.clone() for r in call())

        def replay() -> None:
            for result, new in zip(results, call(), strict=True):
                result.copy_(new)

        return replay, results, None

    def stream(self) -> int:
        return 0

    def is_ours(self, tensor: torch.Tensor) -> bool:
        return True


def graphed() -> GraphedCall:
    call = GraphedCall(
        lambda x, y: (x * 2 + y,), frozenset(), frozenset(), CPU, n_copied=1, recorder=Recorder()
    )
    for _ in range(WARM_UP + 2):
        call(torch.ones(3), torch.ones(3))
    return call


def test_inputs_that_were_copied_ahead_are_those_of_the_call() -> None:
    call, x, y = graphed(), torch.tensor([1.0, 2, 3]), torch.ones(3)
    call.begin(x, y)
    other = call(torch.zeros(3), y)[0]  # another call comes first
    assert torch.equal(other, y)
    assert torch.equal(call(x, y)[0], x * 2 + y)
    call.begin(x, y)
    assert torch.equal(call(x, y)[0], x * 2 + y)


def test_a_forgotten_call_copies_its_inputs_again() -> None:
    call, x, y = graphed(), torch.ones(3), torch.ones(3)
    forget = call.begin(x, y)
    forget()
    x.fill_(5)
    assert torch.equal(call(x, y)[0], x * 2 + y)


def test_the_end_of_a_call_does_not_forget_the_next() -> None:
    call, x, y = graphed(), torch.ones(3), torch.ones(3)
    forget = call.begin(x, y)
    call(x, y)
    z = torch.full((3,), 4.0)
    call.begin(z, y)
    forget()
    z.fill_(9)  # the call reads the copy
    assert torch.equal(call(z, y)[0], torch.full((3,), 9.0))
    call.begin(z, y)
    assert [r.begun is not None for r in call._recordings] == [True]


def test_another_thread_may_begin_meanwhile() -> None:
    call, x, y, z = graphed(), torch.ones(3), torch.ones(3), torch.full((3,), 7.0)
    call.begin(x, y)
    thread = threading.Thread(target=call.begin, args=(z, z))
    thread.start()
    thread.join()
    assert torch.equal(call(x, y)[0], x * 2 + y) and torch.equal(call(z, z)[0], z * 3)


def decode(ids: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, end: int) -> torch.Tensor:
    """Appends columns until one of them is `end`."""
    done = False
    while not done:
        hidden = table[ids[:, -1:]]
        for _ in range(12):
            hidden = torch.tanh(hidden) * 0.5 + hidden
        cache.add_(hidden.mean())
        token = (ids[:, -1:] + 1) % 10
        ids = torch.cat([ids, token], 1)
        done = (token == end).all().item()
    return ids


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_a_loop_until_a_bool_of_a_tensor_does_what_eager_does(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut.LateBool, "devices", ("cpu",))
    begun = []
    begin = cut.Continuation.begin
    monkeypatch.setattr(cut.Continuation, "begin", lambda self: (begun.append(self), begin(self)))
    compiled = dynamotor.compile(decode, backend=backend)
    table = torch.randn(10, 4)
    for first, end in [(0, 9), (3, 1), (0, 9), (2, 8)]:
        caches = [torch.zeros(3) for _ in range(2)]
        ids = torch.full((2, 3), first)
        ours, theirs = compiled(ids, caches[0], table, end), decode(ids, caches[1], table, end)
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(*caches)
    assert len(begun) > 5
    assert all(c.ready is None for c in begun)  # nothing is kept


def test_a_wrong_guess_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut.LateBool, "devices", ("cpu",))
    seen: list[float] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        if (x.sum() > 0).item():
            x.add_(1)
            seen.append(1.0)
            return x * 2
        x.sub_(1)
        seen.append(-1.0)
        return x * 3

    compiled = dynamotor.compile(program)
    for value in (1.0, 2.0, 3.0, 4.0, -1.0, 5.0, -2.0, -3.0, -4.0, -5.0, 6.0):
        x, y = torch.full((3,), value), torch.full((3,), value)
        assert torch.equal(compiled(x), program(y)) and torch.equal(x, y)
        assert seen[-1] == seen[-2]
