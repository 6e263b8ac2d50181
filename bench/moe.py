"""`python -m bench moe`: products of groups (`torch._grouped_mm`) on a GPU: errors of the generated kernels
beside eager's, both against float64 (`--check`), then their times under several tiles beside aten's (`--tune`).

Sizes are those of a mixture of 8 experts, 16,384 rows (4 x 2048 tokens, 2 experts each) of 2,048 numbers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from typing import Any

import torch

from bench.tool import write_json
from dynamotor.api import compile as compile_
from dynamotor.base.config import config
from dynamotor.codegen import grouped_gpu
from dynamotor.codegen.gpu_kernels import job_of, launch
from dynamotor.codegen.grouped_triton import Tile
from dynamotor.runtime import triton_build, triton_launch
from dynamotor.tools.tables import render

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ROWS, WIDTH, EXPERTS = 16384, 2048, 8
COLUMNS = ("form", "columns", "type", "products", "tile", "ms", "TFLOP/s", "times aten")
_F32_TILES = (
    (128, 128, 32, 8, 3),
    (128, 128, 32, 8, 3, 8, True),
    (128, 128, 64, 8, 2, 8, True),
    (128, 64, 32, 4, 3),
    (128, 64, 32, 4, 3, 8, True),
    (64, 128, 32, 4, 3, 8, True),
    (64, 64, 64, 4, 3, 8, True),
)
_HALF_TILES = ((128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 64, 8, 3), (256, 128, 64, 8, 3))
CANDIDATES = {
    "tf32x3": _F32_TILES,
    "bf16x6": _F32_TILES,
    "ieee": ((128, 128, 32, 8, 3), (128, 64, 32, 4, 3)),
    "tf32": ((128, 128, 32, 8, 3), (128, 128, 32, 4, 4), (128, 256, 32, 8, 3)),
    grouped_gpu.HALF: _HALF_TILES,
}


def ends(counts: list[int], device: str) -> torch.Tensor:
    """The ends of groups of so many rows."""
    return torch.tensor(counts).cumsum(0).to(device, torch.int32)


def operands(
    form: str, dtype: torch.dtype, device: str, sizes: tuple[int, int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands of a form, sizes: groups, rows, width, columns. "rows": weights as they are; "turned": as
    views of [groups, columns, width]; "weights": rows summed over; "columns": groups of columns.
    """
    groups, rows, width, columns = sizes

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    if form == "weights":
        return randn(rows, width).t(), randn(rows, columns)
    x = randn(rows, width)
    if form == "rows":
        return x, randn(groups, width, columns)
    w = randn(groups, columns, width)
    return (w, x.t()) if form == "columns" else (x, w.transpose(1, 2))


# Root mean square and largest error; of float32 otherwise twice eager's.
ALLOWED = {"tf32": (2e-3, 2e-2), BF16: (4e-3, 4e-2), F16: (5e-4, 5e-3)}
FORMS = ("rows", "turned", "weights", "columns")


def exact(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The result in float64, zeros where no group is."""
    a, b, start, parts = a.double(), b.double(), 0, []
    for g, end in enumerate(offs.tolist()):
        parts.append(
            a[start:end] @ b[g]
            if b.dim() == 3
            else a[g] @ b[:, start:end]
            if a.dim() == 3
            else a[:, start:end] @ b[start:end]
        )
        start = end
    if a.dim() == b.dim():
        return torch.stack(parts)
    missing = (a.shape[0] if b.dim() == 3 else b.shape[1]) - start
    found = torch.cat(parts, 0 if b.dim() == 3 else 1)
    return torch.nn.functional.pad(found, (0, 0, 0, missing) if b.dim() == 3 else (0, missing))


def run(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The generated kernel under the current settings; its memory is full of NaN before."""
    groups = (len(offs),) if a.dim() == b.dim() else ()
    out = torch.full((*groups, a.shape[-2], b.shape[-1]), float("nan"), dtype=a.dtype, device=a.device)
    return grouped_gpu.grouped_product(a, b, offs, out=out)


def aten(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """PyTorch's own."""
    return torch._grouped_mm(a, b, offs=offs)


def far(found: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """Root of the mean square of the error and the largest one, relative to the result's size."""
    size = wanted.square().mean().sqrt().clamp_min(1e-30)
    error = (found.double() - wanted).abs() / size
    return float(error.square().mean().sqrt()), float(error.max())


def checks(device: str, small: bool = False) -> Iterator[dict[str, Any]]:
    """A row for each form, type and way to multiply: errors against float64, ours and eager's."""
    counts = {
        "odd": [33, 0, 1, 200, 0, 77, 129, 0],
        "rows without a group": [64, 0, 65, 1, 0, 0, 7, 0],
        "one": [0, 0, 0, 440, 0, 0, 0, 0],
    }
    sizes = {"odd": (8, 440, 72, 104), "deep": (8, 4 if small else 440, 2048, 136)}
    for dtype, how in [(F32, "tf32x3"), (F32, "bf16x6"), (F32, "ieee"), (F32, "tf32"), (BF16, ""), (F16, "")]:
        for form in FORMS:
            for size, given in sizes.items():
                for kind, of in counts.items():
                    few = [min(n, 1) for n in of] if small and size == "deep" else of
                    few = few if sum(few) <= given[1] else [1, 0, 1, 0, 2, 0, 0, 0]
                    yield check(dtype, how, form, f"{size} {kind}", given, ends(few, device))


def check(
    dtype: torch.dtype,
    how: str,
    form: str,
    name: str,
    sizes: tuple[int, int, int, int],
    offs: torch.Tensor,
) -> dict[str, Any]:
    """One product."""
    a, b = operands(form, dtype, str(offs.device), sizes)
    before = torch.backends.cuda.matmul.allow_tf32
    wanted = exact(a, b, offs)
    try:
        # PyTorch's kernels for halves end the process where a group's bytes are no multiple of 16.
        eager = aten(a, b, offs) if dtype == F32 or a.device.type == "cpu" else wanted.to(dtype)
        torch.backends.cuda.matmul.allow_tf32 = how == "tf32"
        with config.patch(grouped_float32="ieee" if how in ("", "tf32") else how):
            found, again = run(a, b, offs), run(a, b, offs)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    if form != "weights":  # what aten leaves behind the last group is memory as it was
        last = int(offs[-1])
        (eager[last:] if form != "columns" else eager[:, last:]).zero_()
    ours, theirs = far(found, wanted), far(eager, wanted)
    allowed = ALLOWED.get(how or dtype) or tuple(2 * e + 1e-7 for e in theirs)
    return {
        "check": f"{str(dtype)[6:]} {how} {form} {name}",
        "error": ours,
        "eager": theirs,
        "ok": bool(torch.equal(found, again)) and all(e <= limit for e, limit in zip(ours, allowed)),
    }


def behaviour(device: str) -> Iterator[dict[str, Any]]:
    """Values that are not finite; no wait for the device; recording; gradients of a compiled function."""
    x, w = operands("rows", F32, device, (3, 100, 64, 48))
    offs = ends([50, 20, 30], device)
    x[7, 3], x[60, 5], w[2, 9, 4] = float("inf"), float("nan"), float("inf")
    for how in ("tf32x3", "bf16x6", "ieee"):
        with config.patch(grouped_float32=how):
            found, wanted = run(x, w, offs), exact(x, w, offs).float()
        same = torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isinf(), wanted.isinf())
        yield {"check": f"not finite, {how}", "ok": same}

    def loss(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x.relu(), w, offs=offs).square().mean()

    given = [t.requires_grad_() for t in operands("turned", F32, device, (3, 100, 64, 48))]
    target = "triton" if device == "cpu" else ""
    with config.patch(target=target):
        found = torch.autograd.grad(compile_(loss)(*given, offs), given)
    wide = [t.detach().double().requires_grad_() for t in given]
    wanted = torch.autograd.grad(exact(wide[0].relu(), wide[1], offs).square().mean(), wide)
    error = max(far(f, e)[1] for f, e in zip(found, wanted))
    yield {"check": "gradients", "error": error, "ok": error < 1e-5}
    yield sinks(device)
    if device == "cpu":
        return
    x, w = operands("turned", F32, device, (3, 100, 64, 48))
    out = run(x, w, offs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped_gpu.grouped_product(x, w, offs, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gpu.grouped_product(x, w, offs, out=out)
    offs.copy_(ends([0, 99, 1], device))
    graph.replay()
    error = far(out, exact(x, w, offs))[1]
    yield {"check": "recorded, other groups", "error": error, "ok": error < 1e-5}


def sinks(device: str, length: int = 300) -> dict[str, Any]:
    """Attention's softmax with a column more, as transformers' GptOss computes it: gradients, too."""

    def loss(q: torch.Tensor, k: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.125
        c = torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(2, -1, length, -1)], dim=-1)
        c = c - c.max(dim=-1, keepdim=True).values
        p = torch.nn.functional.softmax(c, dim=-1, dtype=c.dtype)[..., :-1]
        return torch.matmul(p, k).square().mean()

    given = [torch.randn(*shape, device=device) for shape in ((2, 4, length, 64), (2, 4, length, 64), (4,))]
    given = [t.requires_grad_() for t in given]
    with config.patch(target="triton" if device == "cpu" else ""):
        found = torch.autograd.grad(compile_(loss)(*given), given)
    wide = [t.detach().double().requires_grad_() for t in given]
    error = max(far(f, e)[1] for f, e in zip(found, torch.autograd.grad(loss(*wide), wide)))
    return {"check": "a softmax with sinks", "error": error, "ok": error < 1e-3}


def timed(call: Callable[[], Any], times: int = 5) -> float:
    """Milliseconds, a median of a few."""
    call()
    found = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def tune(device: str, only: list[str]) -> Iterator[dict[str, Any]]:
    """Times of forms, types and tiles, aten's first."""
    torch.manual_seed(0)
    chosen = torch.multinomial(torch.rand(EXPERTS) + 0.5, ROWS, replacement=True)
    offs = ends(torch.bincount(chosen, minlength=EXPERTS).tolist(), device)
    cases = [(form, columns, dtype) for dtype in (F32, BF16) for columns in (4096,) for form in FORMS[:3]]
    keys = [(*case, how, Tile(*tile)) for case in cases for how, tile in _candidates(case[2], only)]
    made = {key: _function(*key, device)[0] for key in keys}
    arch = triton_launch.arch(torch.cuda.current_device())
    for function in {f.name: f for f in made.values()}.values():
        triton_build.start_kernel(job_of(function, arch))
    for form, columns, dtype in cases:
        a, b = operands(form, dtype, device, (EXPERTS, ROWS, WIDTH, columns))
        base = {"form": form, "columns": columns, "type": str(dtype)[6:]}
        usual = timed(partial(aten, a, b, offs))
        yield _row(base, "aten", "", usual, usual)
        for key in [key for key in keys if key[:3] == (form, columns, dtype)]:
            try:
                call = _call(key, a, b, offs)
                yield _row(base, key[3], str(astuple(key[4])), timed(call), usual)
            except Exception as error:
                yield {**base, "products": key[3], "tile": str(astuple(key[4])), "error": str(error)[:200]}


def _candidates(dtype: torch.dtype, only: list[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for how, tiles in CANDIDATES.items():
        if (how == grouped_gpu.HALF) == (dtype != F32) and (not only or how in only):
            yield from ((how, tile) for tile in tiles)


def _function(form: str, columns: int, dtype: torch.dtype, how: str, tile: Tile, device: str) -> Any:
    a, b = operands(form, dtype, "meta", (EXPERTS, ROWS, WIDTH, columns))
    shape = (EXPERTS, WIDTH, columns) if form == "weights" else (ROWS, columns)
    out = torch.empty(shape, dtype=dtype, device="meta")
    return grouped_gpu.function_of(dtype, how, *((tuple(t.shape), t.stride()) for t in (a, b, out)), tile)


def _call(key: Any, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> Callable[[], None]:
    function, numbers, turned = _function(*key, str(a.device))
    kernel = launch(torch.device("cuda", torch.cuda.current_device()), function, 4, numbers)
    out = torch.empty_like(aten(a, b, offs))
    stream = torch.cuda.current_stream().cuda_stream
    given = (b, a) if turned else (a, b)
    return lambda: kernel(*given, offs, out, stream)


def _row(base: dict[str, Any], how: str, tile: str, ms: float, usual: float) -> dict[str, Any]:
    flops = 2 * ROWS * WIDTH * base["columns"]
    return {
        **base,
        "products": how,
        "tile": tile,
        "ms": ms,
        "TFLOP/s": flops / ms / 1e9,
        "times aten": usual / ms,
    }


def main(argv: list[str] | None = None) -> int:
    """Checks, then times; 0 when no check failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench moe", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--only", default="", help="of tf32x3, bf16x6, ieee, tf32, half, comma-separated")
    parser.add_argument("--small", action="store_true", help="checks of a few rows")
    parser.add_argument("--json", help="file for the rows")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    wrong = 0
    if args.check:
        torch.manual_seed(0)
        for row in (*checks(args.device, args.small), *behaviour(args.device)):
            rows.append(row)
            wrong += not row["ok"]
            print("ok" if row["ok"] else "WRONG", *(f"{k} {_short(v)}" for k, v in row.items() if k != "ok"))
    if args.tune:
        shown = []
        for row in tune(args.device, [name for name in args.only.split(",") if name]):
            rows.append(row)
            shown.append([_short(row.get(name, "-")) for name in COLUMNS])
            print(row["error"] if "error" in row else " ".join(shown[-1]), flush=True)
        print(render(shown, COLUMNS))
    write_json(args.json, rows)
    print(f"{wrong} wrong")
    return 1 if wrong else 0


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(_short(v) for v in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
