"""Whatever eager raises, a compiled function raises: PyTorch's own error inputs, and operators' samples in
other dtypes.

    python -m fuzz.errors            # all of it, some minutes; `--part 0/4` a quarter
    python -m fuzz.errors add roll   # these operators

A program that is captured although eager raises is compiled for real; what then raises another class of error
is printed.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

import dynamotor

from .databases import operator_infos

DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float64, torch.float16, torch.complex64)
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def error_of(fn: Callable[..., Any], *args: Any) -> Exception | None:
    """The exception of a call, or None."""
    try:
        fn(*args)
    except Exception as error:
        return error
    return None


class Captured(Exception):
    """The backend was reached."""


def only_capture(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """A backend whose graphs say that there is one."""

    def run(*tensors: torch.Tensor) -> Any:
        raise KeyboardInterrupt(Captured())  # no class of error that a program or the capture handles

    return run


def is_captured(fn: Callable[..., Any], call: Call) -> bool:
    """Whether some of the call becomes a graph."""
    try:
        error_of(dynamotor.compile(fn, backend=only_capture), *call)
    except KeyboardInterrupt as interrupt:
        if interrupt.args and isinstance(interrupt.args[0], Captured):
            return True
        raise
    return False


def with_dtype(value: Any, which: int, dtype: torch.dtype, seen: list[int]) -> Any:
    """The value with its tensor number `which` (-1: all) in another dtype, without gradients."""
    if isinstance(value, torch.Tensor):
        seen[0] += 1
        return value.detach().to(dtype) if which in (-1, seen[0] - 1) else value.detach()
    if isinstance(value, list | tuple):
        return type(value)(with_dtype(item, which, dtype, seen) for item in value)
    return value


def calls_of(op: Any) -> Iterator[tuple[str, Call]]:
    """Error inputs, and samples with changed dtypes; most of the latter are right."""
    if op.error_inputs_func is not None:
        try:
            for number, wrong in enumerate(op.error_inputs(torch.device("cpu"))):
                sample = wrong.sample_input
                yield f"error input {number}", (sample.input, tuple(sample.args), sample.kwargs)
        except AttributeError:  # two of torch's generators do not take the device that the others need
            pass
    if torch.float32 not in op.dtypes:
        return
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32), 0, 3, 2):
        for which, dtype in itertools.product((-1, 0, 1, 2), DTYPES):
            seen = [0]
            args = with_dtype((sample.input, *sample.args), which, dtype, seen)
            kwargs = {name: with_dtype(value, which, dtype, seen) for name, value in sample.kwargs.items()}
            if which < seen[0]:
                yield f"tensor {which} as {dtype}", (args[0], args[1:], kwargs)


def check(op: Any, counts: Counter[str]) -> Iterator[str]:
    """The operator's findings, one a way of changing it."""

    def fn(x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return op.op(x, *args, **kwargs)

    told = set()
    for what, call in calls_of(op):
        want = error_of(fn, *call)
        if want is None or what in told:
            continue
        counts["eager raises"] += 1
        dynamotor.reset()
        if not is_captured(fn, call):
            continue
        counts["captured"] += 1
        dynamotor.reset()
        got = error_of(dynamotor.compile(fn), *call)
        if type(got) is not type(want):
            counts["wrong"] += 1
            told.add(what)
            yield (
                f"{op.name} {op.variant_test_name}, {what}: eager {type(want).__name__} ({str(want)[:90]}), "
                f"ours {type(got).__name__}"
            )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.errors", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--part", default="0/1")
    chosen = parser.parse_args()
    part, parts = map(int, chosen.part.split("/"))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for op in operator_infos()[part::parts]:
        if not chosen.names or op.name in chosen.names:
            for found in check(op, counts):
                print(found, flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
