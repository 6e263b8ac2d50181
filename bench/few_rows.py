"""`python -m bench few_rows`: products of few rows, whose time is that of reading the weights: dynamotor beside
the library's in a CUDA graph, by shape, rows and kind of weights, and under other cuts.

    python -m bench few_rows --check                                       # right or wrong, every kind
    python -m bench few_rows --rows 1,8,64 --weights bf16,int8,int4 --json few.json
    python -m bench few_rows --cuts "outputs=32;outputs=128,warps=8;stages=5" # beside the rule's own
    python -m bench few_rows --device cpu --small                          # seconds, on any machine

GB/s are those of the stored weights with their scales. A call multiplies with many weights in turn, more memory
than a cache holds; several calls are timed together, or the host's part of each would count.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import dynamotor
from bench import verification  # noqa: F401  (registers Triton's interpreter)
from bench.decode import MODE, graphed
from bench.decode_weights import quantise
from bench.measure import quartiles
from bench.numerics import relative_error
from bench.tool import write_json
from bench.ways import timed
from dynamotor.base.config import config
from dynamotor.codegen import triton_batch, triton_plan
from dynamotor.lower import few_rows
from dynamotor.tools.tables import render

SHAPES = "2048x2048,2048x8192,8192x2048,4096x14336"  # inner x outputs
BYTES = 1 << 28  # of weights in a call
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


class Products(nn.Module):
    """Products with each of the weights, one after the other as in a model: of the result before, or of rows of
    its own where that has another size. Products of the same rows would become one launch.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *x: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for n, layer in enumerate(self.layers):
            given = x[n % len(x)]
            found.append(layer(found[-1] if found and found[-1].shape == given.shape else given))
        return found


def layers_of(weights: str, inner: int, outputs: int, count: int, bias: bool, device: str) -> Products:
    """So many linear layers with weights of a kind."""
    dtype = torch.float16 if weights == "f16" else torch.bfloat16
    layers = [nn.Linear(inner, outputs, bias, device, dtype) for _ in range(count)]
    model = Products(layers)  # type: ignore[arg-type]
    quantise(model, "" if weights in ("bf16", "f16") else weights)
    return model


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all weights, scales included."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


@contextlib.contextmanager
def cut_as(cut: str) -> Iterator[None]:
    """Products are cut by the rule with these changes; "one=1": a single row of bytes is a product too;
    "bytes=1024": so many of them a program sums; "joined=1": products of different rows may share a launch.
    """
    changes = {key: int(value) for key, value in (word.split("=") for word in cut.split(",") if word)}
    real, fewest, tuning = few_rows.cut_of, few_rows.FEWEST_NARROW, triton_plan.DEFAULT
    few_rows.FEWEST_NARROW = 1 if changes.pop("one", fewest == 1) else 2
    most = triton_batch.MOST_PROGRAMS
    triton_batch.MOST_PROGRAMS = most if changes.pop("joined", 0) else 0
    if "bytes" in changes:
        object.__setattr__(tuning, "bytes", changes.pop("bytes"))  # it is a default of functions
    few_rows.cut_of = lambda *given, **more: replace(real(*given, **more), **changes)  # type: ignore[assignment]
    try:
        yield
    finally:
        few_rows.cut_of, few_rows.FEWEST_NARROW = real, fewest
        object.__setattr__(tuning, "bytes", triton_plan.GpuTuning().bytes)
        triton_batch.MOST_PROGRAMS = most


def compiled(model: nn.Module, device: str) -> Callable[..., list[torch.Tensor]]:
    """The model compiled; on a CPU its kernels run in Triton's interpreter."""
    dynamotor.reset()
    if device == "cuda":
        return dynamotor.compile(model, mode=MODE)  # type: ignore[no-any-return]
    call = dynamotor.compile(model)

    def interpreted(*x: torch.Tensor) -> list[torch.Tensor]:
        with config.patch(target="triton"):
            return call(*x)  # type: ignore[no-any-return]

    return interpreted


def exact(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A layer in float64."""
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    if weight.dtype == torch.int8:
        weight = weight.double() * layer.scale.double()[:, None]  # type: ignore[operator,union-attr,index]
    elif weight.dtype == torch.uint8:
        numbers = torch.stack([weight & 15, weight >> 4], -1).double() - 8
        weight = (numbers.view(weight.shape[0], -1, 32) * layer.scale.double()).flatten(1)  # type: ignore[operator,union-attr]
    bias = layer.bias
    return nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())  # type: ignore[operator]


@torch.no_grad()
def check(weights: str, rows: int, inner: int, outputs: int, bias: bool, device: str) -> dict[str, Any]:
    """One product against float64, twice, with new numbers the second time."""
    model = layers_of(weights, inner, outputs, 1, bias, device)
    call, errors, same = compiled(model, device), [], True
    for _ in range(4 if device == "cuda" else 1):
        dtype = torch.float16 if weights == "f16" else torch.bfloat16
        x = torch.randn(rows, inner, device=device, dtype=dtype)
        result = call(x)[0].clone()
        same = same and torch.equal(result, call(x)[0])
        errors.append(relative_error(result, exact(model.layers[0], x)))
    return {"error": max(errors), "ok": same and max(errors) < TOLERANCE[x.dtype]}


def checks(device: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name and work of each check."""
    for weights in ("bf16", "f16", "int8", "int4"):
        for rows, inner, outputs in (
            (1, 2048, 512),
            (2, 2048, 2048),
            (3, 1056, 1001),
            (8, 8192, 512),
            (17, 768, 1000),
            (33, 1024, 17000),
            (64, 4096, 1024),
        ):
            job = functools.partial(check, weights, rows, inner, outputs, rows % 2 == 1, device)
            yield f"{weights}, {rows} rows, {inner}x{outputs}", job


@torch.no_grad()
def measure(
    weights: str, shape: str, rows: int, way: str, cut: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Microseconds of a product, and GB/s of its weights."""
    inner, outputs = map(int, shape.split("x"))
    one = stored_bytes(layers_of(weights, inner, outputs, 1, False, args.device))
    count = 2 if args.small else max(4, min(64, BYTES // one))
    model = layers_of(weights, inner, outputs, count, False, args.device)
    different = 1 if inner == outputs else count
    x = [torch.randn(rows, inner, device=args.device, dtype=torch.bfloat16) for _ in range(different)]
    with cut_as(cut):
        if way == "torch.compile":
            call = torch.compile(model, mode=MODE)
        elif way == "library":
            call = graphed(lambda _: model(*x), x[0]) if args.device == "cuda" else model
        else:
            call = compiled(model, args.device)
        for _ in range(5 if args.device == "cuda" else 1):
            result = call(*x)
    error = relative_error(result[0], exact(model.layers[0], x[0]))

    def calls() -> None:  # several, so that the host runs ahead
        for _ in range(args.calls):
            call(*x)

    times = [1e3 * t / count / args.calls for t in timed(calls, args.times, args.device)]
    low, middle, high = quartiles(times)
    row = {"weights": weights, "shape": shape, "rows": rows, "way": way, "cut": cut}
    return row | {"us": [low, middle, high], "GB/s": one / middle / 1e3, "error": error}


def main() -> int:
    """Check, or time rows until the budget is over; the exit status."""
    args = _arguments()
    config.program_cache = False  # a cut is no part of a program's key
    found: list[dict[str, Any]] = []
    start = time.monotonic()
    for job in _checks(args) if args.check else _rows(args):
        if time.monotonic() - start > args.budget:
            print("stopped: the budget is over", flush=True)
            break
        try:
            found.append(job())
        except Exception as error:  # the other rows are wanted still
            found.append({"error": f"{type(error).__name__}: {str(error)[:200]}", "ok": False})
        print(json.dumps(found[-1]), flush=True)
        write_json(args.json, {"torch": torch.__version__, "rows": found})
    if args.check:
        wrong = [row for row in found if not row["ok"]]
        print(f"{len(found) - len(wrong)} of {len(found)} products are right")
        return int(bool(wrong))
    shown = [r for r in found if "us" in r]
    lines = [
        [
            r["weights"],
            r["shape"],
            str(r["rows"]),
            r["way"],
            r["cut"],
            f"{r['us'][1]:.2f}",
            f"{r['GB/s']:.0f}",
        ]
        for r in shown
    ]
    print(render(lines, ("weights", "inner x outputs", "rows", "way", "cut", "us", "GB/s")))
    print(f"largest error {max((r['error'] for r in shown), default=0.0):.4f}")
    return int(len(shown) < len(found))


def _checks(args: argparse.Namespace) -> Iterator[Callable[[], dict[str, Any]]]:
    for name, job in checks(args.device):
        if not args.small or name.endswith(("2048x2048", "1056x1001")):
            yield lambda name=name, job=job: {"name": name, **job()}  # type: ignore[misc]


def _rows(args: argparse.Namespace) -> Iterator[Callable[[], dict[str, Any]]]:
    ways = [(way, "") for way in args.ways.split(",")]
    cuts = [("ours", cut) for cut in args.cuts.split(";") if cut]
    for shape in args.shapes.split(","):
        for weights in args.weights.split(","):
            for rows in map(int, args.rows.split(",")):
                here = [("ours", found) for _, cut in cuts if (found := _cut_for(cut, weights, rows))]
                for way, cut in (*ways, *here):
                    if way != "library" or weights == "bf16" or args.small:  # no library reads bytes
                        yield functools.partial(measure, weights, shape, rows, way, cut, args)


def _cut_for(cut: str, weights: str, rows: int) -> str:
    """The changes of "int8,8,outputs=32", which are for these weights and rows; "" for others."""
    words = cut.split(",")
    only = {word for word in words if "=" not in word}
    kinds, numbers = {w for w in only if not w.isdigit()}, {w for w in only if w.isdigit()}
    if kinds and weights not in kinds or numbers and str(rows) not in numbers:
        return ""
    return ",".join(word for word in words if "=" in word)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench few_rows",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="right or wrong; nothing is timed")
    parser.add_argument("--rows", default="1,2,8,16,32,64")
    parser.add_argument("--weights", default="bf16,int8,int4", help="of bf16, int8, int4")
    parser.add_argument("--shapes", default=SHAPES, help="inner x outputs, ...")
    parser.add_argument("--ways", default="ours,library", help="of ours, library, torch.compile")
    parser.add_argument("--cuts", default="", help='changes of the rule: "outputs=32,inner=256;int8,1,one=1"')
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--calls", type=int, default=10, help="between two waits for the device")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no row is begun")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="two layers, few checks")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    return args


if __name__ == "__main__":
    sys.exit(main())
