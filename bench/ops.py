"""`python -m bench ops`: pointwise ops, reductions and data movement on a CPU, one op a program: eager,
`torch.compile` and ours in turns, worst first.

Six dtypes, four layouts, three sizes (a core's first cache, its second cache, memory). Pointwise ops and
reductions come from PyTorch's database of operators, data movement from the table below. `--jobs`
processes, each with `--threads` threads, take the ops one by one.

>>> python -m bench ops --ops sin,argmax --dtypes float32 --peer inductor
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dynamotor
from bench.turns import geometric_mean, turns
from dynamotor.tools.tables import render

DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "uint8")
LAYOUTS = ("dense", "transposed", "strided", "broadcast")
SIZES = {"L1": (64, 64), "L2": (512, 512), "memory": (2048, 2048)}
COLUMNS = ("op", "dtype", "layout", "size", "eager µs", "peer µs", "ours µs", "ours / eager")

MOVEMENT: dict[str, Callable[[Tensor], Any]] = {
    "t_contiguous": lambda x: x.t().contiguous(),
    "permute_3d": lambda x: x.view(x.shape[0], 8, -1).permute(1, 0, 2).contiguous(),
    "roll_rows": lambda x: x.roll(3, 0),
    "roll_columns": lambda x: x.roll(3, 1),
    "flip_rows": lambda x: x.flip(0),
    "flip_columns": lambda x: x.flip(1),
    "repeat": lambda x: x.repeat(1, 2),
    "tile": lambda x: x.tile(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "cat_rows": lambda x: torch.cat([x, x]),
    "cat_columns": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x], -1),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "tril": lambda x: x.tril(),
    "slice_step": lambda x: x[:, ::2].contiguous(),
    "gather": lambda x: x.gather(1, _places(x.shape, x.shape[1])),
    "index_select": lambda x: x.index_select(0, _places(x.shape[:1], x.shape[0])),
    "advanced_index": lambda x: x[_places(x.shape[:1], x.shape[0])],
    "scatter": lambda x: x.scatter(1, _places(x.shape, x.shape[1]), x),
    "index_add": lambda x: x.index_add(0, _places(x.shape[:1], x.shape[0]), x),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1),
    "max_dim": lambda x: x.max(1),
    "min_dim": lambda x: x.min(0),
    "sort_rows": lambda x: x.sort(1),
    "topk": lambda x: x.topk(4, 1),
    "cumsum_columns": lambda x: x.cumsum(1),
    "cumsum_rows": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(1),
    "cummax": lambda x: x.cummax(1),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "to_float32": lambda x: x.to(torch.float32),
    "to_bfloat16": lambda x: x.to(torch.bfloat16),
    "to_int8": lambda x: x.to(torch.int8),
}
_PLACES: dict[tuple[Any, int], Tensor] = {}


def _places(shape: Any, count: int) -> Tensor:
    """Positions below `count`, the same at each call: a constant of the program."""
    key = tuple(int(n) for n in shape), int(count)
    if key not in _PLACES:
        _PLACES[key] = torch.randint(0, key[1], key[0], generator=torch.Generator().manual_seed(1))
    return _PLACES[key]


@dataclass(frozen=True)
class Case:
    """One op as a function of `operands` tensors; low, high: the values for which it is defined."""

    name: str
    function: Callable[..., Any]
    operands: int = 1
    low: float | None = None
    high: float | None = None


@functools.cache
def cases() -> list[Case]:
    """Every op, by PyTorch's database of operators and `MOVEMENT`."""
    return [*_database(), *(Case(name, function) for name, function in MOVEMENT.items())]


def _database() -> Iterator[Case]:
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo

    from fuzz.databases import operator_infos

    for info in operator_infos():
        name = f"{info.name}.{info.variant_test_name}".rstrip(".")
        if isinstance(info, UnaryUfuncInfo):
            yield Case(name, info.op, 1, *info.domain)
        elif isinstance(info, BinaryUfuncInfo):
            yield Case(name, info.op, 2)
        elif isinstance(info, ReductionOpInfo):
            for dim in (1, 0, None):
                reduce = (
                    (lambda x, op=info.op: op(x))
                    if dim is None
                    else (lambda x, op=info.op, d=dim: op(x, dim=d))
                )
                yield Case(f"{name}({'' if dim is None else dim})", reduce)


def operand(case: Case, dtype: torch.dtype, layout: str, shape: tuple[int, int]) -> Tensor:
    """Values inside of the op's domain, as a tensor of a shape in a layout."""
    rows, columns = shape
    held = {"transposed": (columns, rows), "strided": (rows, 2 * columns), "broadcast": (1, columns)}
    low, high = -4 if case.low is None else case.low + 0.1, 4 if case.high is None else case.high - 0.1
    values = torch.rand(held.get(layout, shape), dtype=torch.float64) * (high - low) + low
    if not dtype.is_floating_point:
        values = values.abs().ceil().clamp(1, 100)
    x = values.to(dtype)
    return {
        "transposed": lambda: x.t(),
        "strided": lambda: x[:, ::2],
        "broadcast": lambda: x.expand(shape),
    }.get(layout, lambda: x)()


def row(case: Case, dtype: str, layout: str, size: str, peer: str, seconds: float) -> dict[str, Any] | None:
    """Times of one op for one kind of input; None where eager refuses it, or its result has no data."""
    shape = SIZES[size]
    x = operand(case, getattr(torch, dtype), layout, shape)
    inputs = [x] if case.operands == 1 else [x, operand(case, getattr(torch, dtype), "dense", shape)]
    try:
        result = case.function(*inputs)
    except (RuntimeError, TypeError, NotImplementedError, ValueError, AssertionError):
        return None
    if isinstance(result, Tensor) and result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        return None
    ways = {"eager": case.function, "ours": dynamotor.compile(case.function, dynamic=False)}
    if peer:
        ways["peer"] = torch.compile(case.function, backend=peer, dynamic=False)
    about = {"op": case.name, "dtype": dtype, "layout": layout, "size": size}
    calls = {way: (lambda call=call: call(*inputs)) for way, call in ways.items()}
    try:
        with torch.no_grad():
            rounds = turns(calls, seconds=seconds, finish=lambda: None, least=7, turn=seconds / 40)
    except Exception as error:  # noqa: BLE001 (a row that fails is a result)
        return about | {"failed": f"{type(error).__name__}: {error}"[:200]}
    finally:
        dynamotor.reset()
        torch._dynamo.reset()
    micro = {way: 1e6 * statistics.median(one[way] for one in rounds) for way in ways}
    return about | {"us": micro, "ratio": statistics.median(one["ours"] / one["eager"] for one in rounds)}


def rows_of(number: int, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """All rows of the op of that number in `cases`, in this process."""
    torch.set_num_threads(plan["threads"])
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    case = cases()[number]
    kinds = [(d, k, s) for d in plan["dtypes"] for k in plan["layouts"] for s in plan["sizes"]]
    chosen = kinds[(number + plan["offset"]) % plan["every"] :: plan["every"]]
    found = [row(case, *kind, plan["peer"], plan["seconds"]) for kind in chosen]
    return [one for one in found if one is not None]


def results(numbers: list[int], plan: dict[str, Any], jobs: int) -> Iterator[list[dict[str, Any]]]:
    """The rows of each op as they are done, in this process or in several."""
    if jobs == 1:
        yield from (rows_of(number, plan) for number in numbers)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(rows_of, number, plan) for number in numbers]):
            yield done.result()


def summary(rows: list[dict[str, Any]], most: int) -> str:
    """The worst rows as a table, and the means over all."""
    timed = sorted((r for r in rows if "us" in r), key=lambda r: -r["ratio"])
    number = lambda r, way: f"{r['us'][way]:.1f}" if way in r["us"] else ""  # noqa: E731
    lines = [
        [
            r["op"],
            r["dtype"],
            r["layout"],
            r["size"],
            *(number(r, w) for w in ("eager", "peer", "ours")),
            f"{r['ratio']:.2f}",
        ]
        for r in timed[:most]
    ]
    peers = [r["us"]["ours"] / r["us"]["peer"] for r in timed if "peer" in r["us"]]
    failed = [f"failed: {r}" for r in rows if "failed" in r]
    means = [_mean(name, [r for r in timed if r["size"] == name]) for name in SIZES] + [_mean("all", timed)]
    if peers:
        means.append(f"ours / peer: {geometric_mean(peers):.3f}")
    return "\n".join([render(lines, COLUMNS), *failed, *filter(None, means)])


def _mean(name: str, rows: list[dict[str, Any]]) -> str:
    """The mean of some rows, and how many are slower than eager by more than a share."""
    ratios = [r["ratio"] for r in rows]
    above = ", ".join(f"{sum(r > least for r in ratios)} above {least}" for least in (1.05, 1.2, 1.5))
    return f"{name}: {len(rows)} rows, ours / eager {geometric_mean(ratios):.3f}, {above}" if rows else ""


def main(argv: list[str] | None = None) -> None:
    """Time the ops, write a line of JSON for each row, print the worst."""
    parser = argparse.ArgumentParser(prog="python -m bench ops", description=__doc__)
    parser.add_argument("--ops", default="", help="names, all without")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--every", type=int, default=1, help="one in so many kinds of inputs of each op")
    parser.add_argument(
        "--offset", type=int, default=0, help="with --every: of the first kind, for other samples"
    )
    parser.add_argument("--peer", default="", help="a backend of torch.compile, as inductor")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--worst", type=int, default=60, help="rows to print")
    parser.add_argument("--json", default=os.devnull, help="file for the figures: a line for each row")
    given = parser.parse_args(argv)
    plan = {name: getattr(given, name) for name in ("every", "offset", "peer", "seconds", "threads")}
    plan |= {name: getattr(given, name).split(",") for name in ("dtypes", "layouts", "sizes")}
    names = set(filter(None, given.ops.split(",")))
    numbers = [n for n, case in enumerate(cases()) if not names or case.name.split("(")[0] in names]
    rows: list[dict[str, Any]] = []
    with Path(given.json).open("w") as file:  # a line as soon as it is known: a run may be cut off
        for found in results(numbers, plan, given.jobs):
            rows += found
            file.writelines(json.dumps(one) + "\n" for one in found)
            file.flush()
    print(summary(rows, given.worst))


if __name__ == "__main__":
    main()
