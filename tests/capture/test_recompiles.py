"""The log of breaks and recompiles: the user's stack, compilation IDs, and each recompile once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.base.events import collect
from dynamotor.capture.recompiles import by_reason


def block(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    print(end="")
    return x.cos()


def two_blocks(x: torch.Tensor) -> torch.Tensor:
    first = block(x)
    second = block(first)
    return first + second


def logged(channel: str, capsys: pytest.CaptureFixture[str], fn: Any, *calls: tuple[Any, ...]) -> list[str]:
    compiled = dynamotor.compile(fn, backend="eager", dynamic=False)
    with dynamotor.config.patch(log=channel):
        for args in calls:
            compiled(*args)
    return re.split(rf"^.*?\[dynamotor:{channel}\] ", capsys.readouterr().err, flags=re.MULTILINE)[1:]


def test_breaks_in_equal_blocks_name_their_callers(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = logged("breaks", capsys, two_blocks, (torch.ones(2),))
    for text, line in ((first, "first = block(x)"), (second, "second = block(first)")):
        assert 'print(end="")' in text and f"in two_blocks: {line}" in text and "/errors/#dm211" in text


def test_a_break_inside_pytorch_names_the_users_line(capsys: pytest.CaptureFixture[str]) -> None:
    linear = torch.nn.Linear(2, 2)
    linear.register_forward_hook(lambda *_: print(end=""))
    model = torch.nn.Sequential(linear)
    reasons = dynamotor.explain(lambda x: model(x).sin(), backend="eager")(torch.ones(2)).break_reasons
    assert reasons and all(__file__ in f"{reason.own_line}" for reason in reasons)


def broken(x: torch.Tensor, n: int, facts: dict[str, int]) -> torch.Tensor:
    y = x * n
    print(end="")
    return y + facts["a"]


def test_a_recompile_is_reported_once_in_terms_of_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    x, facts = torch.ones(2, 3), {"a": 1}
    calls = [
        (x, 1, facts),
        (x[:1].repeat(3, 1), 1, facts),
        (x, 2, facts),
        (x.double(), 1, facts),
        (x, 1, {"a": 2}),
    ]
    sized, counted, typed, rest = logged("recompiles", capsys, broken, *calls)
    new, of, old, *_ = re.match(r"(\d+/1) broken is compiled again as (\S+): .*\((\d+/0)\)$", sized).groups()  # type: ignore[union-attr]
    assert (
        sized
        == f"{new} broken is compiled again as {new}: argument `x` has size 3 at dimension 0, was 2 ({old})\n"
    )
    assert of == new and new[:-1] == old[:-1] and f"was 1 ({old})" in counted
    assert "argument `n` is 2, was 1" in counted
    assert typed.count("torch.float64") == 1
    assert "`facts['a']` is 2, was 1" in rest and "broken, resumed at line" in rest


def test_events_and_explain_name_the_programs_that_fail_and_the_new_one() -> None:
    compiled = dynamotor.compile(lambda x: x + 1, backend="eager", dynamic=False)
    with collect("recompile", "capture") as events:
        for n in (2, 3, 4):
            compiled(torch.ones(n))
    first, second, third = (e.compile_id for e in events if e.kind == "capture")
    assert [e.info.data.compile_id for e in compiled.entries] == [third, second, first]
    last = events[-2]
    assert (last.kind, last.compile_id, last.data["new"]) == ("recompile", third, third)
    assert last.data["failed"] == [second, first] and len(last.data["reasons"]) == 2

    found = dynamotor.explain(compiled)(torch.ones(5))
    (new,) = found.compile_ids
    assert f"compile IDs: {new}\ncompiled again as {new}: " in str(found)
    assert f"was 4 ({third}); " in str(found) and f"was 2 ({first})" in str(found)
    again = dynamotor.explain(compiled)(torch.ones(3))
    assert again.compile_ids == [second] and not again.recompiles
    with dynamotor.config.patch(cache_size_limit=1):
        full = dynamotor.explain(compiled)(torch.ones(6))
    assert not full.compile_ids and "in eager PyTorch, since there are as many programs" in str(full)


def test_equal_reasons_are_said_once() -> None:
    reasons = ["`n` is 3, was 2", "`x` is gone", "`n` is 3, was 2"]
    assert by_reason(reasons, ["0/2", "0/1", "0/0"]) == "`n` is 3, was 2 (0/2, 0/0); `x` is gone (0/1)"


def test_modes_are_on_or_off(capsys: pytest.CaptureFixture[str]) -> None:
    compiled = dynamotor.compile(block, backend="eager")
    with dynamotor.config.patch(log="recompiles"):
        compiled(torch.ones(2))
        with torch.no_grad():
            compiled(torch.ones(2))
    assert "grad mode is off, was on" in capsys.readouterr().err


def test_guards_are_printed_without_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    compiled = dynamotor.compile(torch.nn.Linear(2, 2), backend="eager")
    with dynamotor.config.patch(log="guards"):
        compiled(torch.ones(1, 2))
    text = capsys.readouterr().err
    assert "a Parameter of" in text and "weakref" not in text and "0x" not in text


class Logs:
    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.lengths: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.losses.append(x.sum())
        self.lengths += [len(self.losses)]
        self.losses.extend((self.lengths[-1], 0.5))
        return x + len(self.lengths) if self.losses else x


@pytest.mark.regression
def test_lists_that_only_grow_take_one_program() -> None:
    dynamotor.reset()
    eager, fast = Logs(), Logs()
    compiled = dynamotor.compile(fast.__call__, backend="eager")
    for k in range(6):
        torch.testing.assert_close(compiled(torch.ones(2) * k), eager(torch.ones(2) * k))
    torch.testing.assert_close((fast.losses, fast.lengths), (eager.losses, eager.lengths))
    assert dynamotor.counters["frames"]["captured"] <= 3


@pytest.mark.regression
@pytest.mark.parametrize("same", [False, True])
def test_a_grown_list_is_read_behind_its_growth(same: bool) -> None:
    def fn(x: torch.Tensor, a: list[Any], b: list[Any]) -> Any:
        a.append(x)
        n = len(b)
        b.append(n)
        return x + n, a[-1], list(b), a == b

    compiled, given, expected = dynamotor.compile(fn, backend="eager"), ([], []), ([], [])  # type: ignore[var-annotated]
    for k in range(4):
        args = [(pair[0], pair[0] if same else pair[1]) for pair in (given, expected)]
        x = torch.full((), float(k))
        torch.testing.assert_close(compiled(x, *args[0]), fn(x, *args[1]))
        torch.testing.assert_close(given, expected)
