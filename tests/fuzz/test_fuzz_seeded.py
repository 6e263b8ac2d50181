"""The fuzzers of one program a seed: their programs are right, and each finds the faults that a removed mechanism lets through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynamotor.autograd import aten_recorder, randomness, variants
from dynamotor.capture.values import late_numbers, torch_function
from dynamotor.graph import kernel_checks
from dynamotor.lower import ops_reduce
from dynamotor.step import host
from dynamotor.tools import entry
from fuzz import distributions, fuzzers, invalid, numbers, observers, offsets, options, packages

aten = torch.ops.aten


@pytest.mark.parametrize("name", list(fuzzers.SEEDED))
def test_a_few_programs_are_right(name: str) -> None:
    count = 60 if name in ("numbers", "packages") else 4
    found = fuzzers.run({"fuzzer": name, "seed": 3, "start": 0, "count": count})
    assert not found["findings"] and found["tally"]["right"] == count


def finds(fuzzer: Any, contains: str, most: int, write: Callable[[int], Any] | None = None) -> bool:
    """Whether one of the first programs with a text in them is wrong."""
    text = write or fuzzer.write
    seeds = (n for n in range(4000) if contains in str(text(n)))
    return any(fuzzer.problems(seed) for seed, _ in zip(seeds, range(most)))


def test_observers_see_effects_at_another_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_function, "check_op", lambda trace, target: None)
    assert finds(observers, "x = see(x)", 10)


def test_draws_of_one_stream_are_correlated(monkeypatch: pytest.MonkeyPatch) -> None:
    uniform = randomness.uniform

    def first(recorder: Any, *args: Any) -> Any:
        recorder.streams = 0
        return uniform(recorder, *args)

    monkeypatch.setattr(randomness, "uniform", first)
    assert finds(distributions, "torch.rand(32768, dtype=torch.float32)", 2)


def test_float64_draws_of_24_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(recorder: Any, shape: Any, device: Any, dtype: Any) -> Any:
        return recorder.call(aten._to_copy.default, randomness.uniform(recorder, shape, device), dtype=dtype)

    monkeypatch.setattr(randomness, "_uniform_of", short)
    assert finds(distributions, "torch.rand(32768, dtype=torch.float64)", 4)


def test_a_rounded_mean_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    total = ops_reduce.total

    def without_the_rest(ctx: Any, x: Any, dims: Any, keep: bool, compute: Any) -> Any:
        found = total(ctx, x, dims, keep, compute)
        if rest.setdefault(id(ctx), 0) % 3 == 2:  # the sum of the differences
            found = ctx.pointwise(lambda e: ops_reduce.like(0, e), found, shape=found.shape, dtype=compute)
        rest[id(ctx)] += 1
        return found

    rest: dict[int, int] = {}
    monkeypatch.setattr(ops_reduce, "total", without_the_rest)
    assert finds(offsets, "x.var(", 12)
    assert offsets.rounding_decides(*offsets.write(1000093))  # one element of 0.001 beside a mean of -1e4


def test_pythons_order_of_numbers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(host.OPS, aten.maximum.default, max)
    assert finds(numbers, "aten.maximum", 40)


def test_missing_checks_of_symbolic_sizes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten_recorder.GraphRecorder, "refuse_overlap", lambda *args: None)
    monkeypatch.setattr(kernel_checks, "_check_memory", lambda *args: None)  # both have to miss it
    monkeypatch.setattr(
        kernel_checks, "_checks", kernel_checks._checks.__wrapped__
    )  # other tests filled the cache
    assert finds(invalid, "overlapping(x)", 6, lambda seed: invalid.write(seed)[0].rpartition("def call")[2])


def test_missing_checks_at_the_entry_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(self: Any, given: Any) -> tuple[dict[int, torch.Tensor], dict[Any, int]]:
        values = [value for _, value in entry.flatten(given)]
        return {k: values[k] for k in self.tensor_nodes()}, {}

    monkeypatch.setattr(entry.ArgumentChecks, "tensors", unchecked)
    packaged = (n for n in range(0, 400, 4) if "k" in packages.write(n))
    assert any(packages.problems(seed) for seed, _ in zip(packaged, range(30)))


def test_strides_of_formulas_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_numbers, "_laid_out", lambda trace, call, given, found: found)
    assert finds(options, "x.shape[-1:], eps=k)', torch.float32, 'transposed'", 4)


def test_numbers_that_wrap_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "_ask_kernels", lambda stage, arguments: None)
    assert finds(options, "x.index_fill(0, torch.tensor([0]), k)', torch.int8", 4)
