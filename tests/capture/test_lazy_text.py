# ruff: noqa: UP031
"""Numbers that differ between calls and are only shown need no program of their own, and give eager's texts."""

import contextlib
import io

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters

SHOWN = {
    "f-string": lambda x, n: f"step {n}",
    "spec": lambda x, n: f"{n:5d}|{n:<4}|{n:+.2f}",
    "quotient": lambda x, n: f"{n / 7:.3f}",
    "converted": lambda x, n: f"{n!r} {n!s}",
    "percent": lambda x, n: "at %d" % n,
    "percents": lambda x, n: "%s of %5.1f%%" % (n, n * 2),
    "format": lambda x, n: "{1} {k:.1f} {0}".format(n, "a", k=n + 1),
    "str": lambda x, n: str(n) + " steps, " + repr(n * 2),
    "added": lambda x, n: "a" + f"{n}" + "b",
    "size": lambda x, n: f"{x.shape[0]} rows, {x.numel()} numbers",
}
LOOKED_AT = {
    "length": lambda x, n: len(f"{n}"),
    "compared": lambda x, n: f"{n}" == "7",
    "key": lambda x, n: {f"k{n}": 1},
    "method": lambda x, n: f"{n}".zfill(4),
    "refused": lambda x, n: f"{n:d}" if isinstance(n, int) else f"{n:.1e}",
    "inside": lambda x, n: "1" in f"{n}",
}


def outcome(function, *args):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        result = function(*args)
    return repr(result), out.getvalue()


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("name", [*SHOWN, *LOOKED_AT])
def test_texts_are_eagers(name, kind):
    show = (SHOWN | LOOKED_AT)[name]
    if kind is float and name in ("spec",):
        pytest.skip("no integer")

    def printed(x, n):
        y = x.relu() * 2
        print(show(x, n))
        return y + 1, show(x, n)

    def returned(x, n):
        return {"text": show(x, n)}, x.relu() * 2

    for program in (printed, returned):
        dynamotor.reset()
        compiled = dynamotor.compile(program)
        for i in range(8):
            x = torch.randn(2 + i, 3)
            assert outcome(compiled, x, kind(i + 2)) == outcome(program, x, kind(i + 2))
        assert name in LOOKED_AT or counters["frames"]["captured"] <= 6, counters["frames"]


def test_a_text_that_is_read_behind_the_break_is_eagers():
    def program(x, n):
        text = f"<{n}>"
        print(text, end="")
        return x * len(text)

    compiled = dynamotor.compile(program, backend="eager")
    for n in (5, 50, 500, 7, 70):
        assert outcome(compiled, torch.ones(2), n) == outcome(program, torch.ones(2), n)


def test_a_text_kept_by_an_object():
    class Log:
        def __init__(self):
            self.lines = []

        def __call__(self, x, n):
            self.lines.append(f"step {n}: {x.shape[0]}")
            self.last = f"{n}"
            return x * 2

    ours, eager = Log(), Log()
    compiled = dynamotor.compile(ours.__call__, dynamic=True)
    for n in range(6):
        x = torch.ones(n + 2)
        assert torch.equal(compiled(x, n + 3), eager(x, n + 3))
    assert (ours.lines, ours.last) == (eager.lines, eager.last)


@pytest.mark.regression
def test_a_text_that_is_passed_on_takes_one_program() -> None:
    def fn(x: torch.Tensor, name: str) -> tuple[torch.Tensor, str, str]:
        return x + 1, f"{name}/loss", name

    def looks(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * len(name) if name.startswith("b") else x + 1

    dynamotor.reset()
    passes, reads = (dynamotor.compile(f, backend="eager") for f in (fn, looks))
    for name in ("a", "bc", "", "b%s{}"):
        assert passes(torch.ones(2), name)[1:] == (f"{name}/loss", name)
        assert torch.equal(reads(torch.ones(2), name), looks(torch.ones(2), name))
    assert len(passes.entries) == 2
