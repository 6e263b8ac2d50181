"""PyTorch's database of ops with samples of jagged tensors, compiled beside eager: results and gradients.

    python -m bench jagged_ops --part 0/2 --json part.json      # every second op
    python -m bench jagged_ops --only "softmax|sum"

A sample is right if results and gradients have eager's classes, types, offsets and, to a tolerance of 1e-4, values.
Samples that eager refuses, and ops that draw random numbers, are left out.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.opinfo.definitions.nested import njt_op_db
from torch.utils import _pytree as pytree

import dynamotor
from bench.tool import write_json
from dynamotor.base.events import counters

DRAWS = re.compile("rand|dropout|bernoulli|multinomial|normal")
ENDS_THE_PROCESS = ("split_with_sizes",)  # its gradient in eager, PyTorch 2.13
TOLERANCE = 1e-4


def main() -> None:
    """Run the samples, print the counts and each wrong one."""
    parser = argparse.ArgumentParser(prog="python -m bench jagged_ops", description=__doc__)
    parser.add_argument("--part", default="0/1", help="k/n: each n-th op from the k-th on")
    parser.add_argument("--only", default="", help="a pattern of names")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    k, n = map(int, args.part.split("/"))
    counts: Counter[str] = Counter()
    left: Counter[str] = Counter()
    wrong: list[str] = []
    for op in njt_op_db[k::n]:
        name = op.full_name
        if not re.search(args.only, name) or DRAWS.search(name) or name in ENDS_THE_PROCESS:
            continue
        for graded in (False, True)[: 1 + op.supports_autograd]:
            for sample in _samples(op, graded):
                outcome, why = judge(op.op, sample)
                counts[outcome] += 1
                if outcome in ("wrong", "raises"):
                    wrong.append(
                        f"{name}, {sample.name}{', with gradients' if graded else ''}: {outcome} {why}"
                    )
                left.update(why.split() if outcome == "right" else ())
    print("\n".join(wrong))
    print(dict(counts), "samples with calls left to eager:", dict(left.most_common(12)))
    figures = {
        "torch": torch.__version__,
        "samples": dict(counts),
        "wrong": wrong,
        "left to eager": dict(left),
    }
    write_json(args.json, figures)


def _samples(op: Any, graded: bool) -> list[Any]:
    try:
        return list(op.sample_inputs("cpu", torch.float32, requires_grad=graded))
    except (NotImplementedError, RuntimeError):  # the database has none
        return []


def judge(op: Callable[..., Any], sample: Any) -> tuple[str, str]:
    """The outcome of a sample, and why; of a right one, the reasons why calls were left to eager."""
    try:
        want = _run(op, sample)
    except Exception:
        return "eager raises", ""
    before = Counter(counters["fallback"])
    compiled = dynamotor.compile(lambda *args, **kwargs: op(*args, **kwargs))
    try:
        got = _run(compiled, sample)
    except Exception as error:
        return "raises", f"{type(error).__name__}: {str(error)[:200]}"
    if not _same(want, got):
        return "wrong", ""
    return "right", " ".join(key.replace(" ", "_") for key in Counter(counters["fallback"]) - before)


def _run(fn: Callable[..., Any], sample: Any) -> Any:
    result = fn(sample.input, *sample.args, **sample.kwargs)
    given, made = (
        [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for tree in ((sample.input, sample.args, sample.kwargs), result)
    )
    if not given or not made:
        return result, ()
    loss = sum((leaf.values() if leaf.is_nested else leaf).abs().sum() for leaf in made)
    return result, torch.autograd.grad(loss, given, allow_unused=True)


def _same(want: Any, got: Any) -> bool:
    pairs = list(zip(pytree.tree_leaves(want), pytree.tree_leaves(got), strict=False))
    return len(pairs) == len(pytree.tree_leaves(want)) and all(_same_leaf(one, other) for one, other in pairs)


def _same_leaf(want: Any, got: Any) -> bool:
    if not isinstance(want, torch.Tensor):
        return isinstance(want, torch.SymInt) or want == got
    if type(want) is not type(got) or (want.dtype, want.requires_grad) != (got.dtype, got.requires_grad):
        return False
    if want.is_nested:
        if want._ragged_idx != got._ragged_idx or not torch.equal(want.offsets(), got.offsets()):
            return False
        want, got = want._values, got._values
    return want.shape == got.shape and torch.allclose(want, got, TOLERANCE, TOLERANCE, equal_nan=True)


if __name__ == "__main__":
    main()
