"""`python -m bench.flex`: `flex_attention` on a GPU, ours beside torch.compile's, in turns: causal, a sliding
window, documents, ALiBi; forward, and forward with backward. 16 x 16 heads of 4,096 positions in bfloat16.

`--tune` times tiles for each of our kernels alone and prints them in order.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.measure import quartiles
from bench.tool import write_json
from bench.turns import geometric_mean, turns
from dynamotor.api import compile as compile_
from dynamotor.codegen import flex_attention as ours, flex_kernels
from dynamotor.tools.tables import render

WINDOW = 256
COLUMNS = (
    "case",
    "width",
    "phase",
    "ms",
    "torch.compile ms",
    "times as fast",
    "spread",
    "error",
    "its error",
)


def cases(length: int, heads: int, device: str) -> dict[str, tuple[Any, Any]]:
    """score_mod and mask_mod by name."""
    documents = torch.randint(0, 12, (length,), device=device).sort().values
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device=device) / heads)

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    def window(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j < WINDOW)

    def document(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (documents[i] == documents[j]) & (i >= j)

    def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + slopes[h] * (j - i)

    return {
        "causal": (None, causal),
        "window": (None, window),
        "document": (None, document),
        "alibi": (alibi, causal),
    }


def measure(name: str, args: argparse.Namespace, width: int) -> list[dict[str, Any]]:
    """The rows of a case: forward, and forward with backward."""
    torch.manual_seed(0)
    torch.compiler.reset()  # else it reaches its limit of recompilations, and runs without a kernel
    score, mask = cases(args.length, args.heads, args.device)[name]
    shape = (args.batch, args.heads, args.length, width)
    q, k, v, grad = (torch.randn(shape, device=args.device, dtype=torch.bfloat16) for _ in range(4))
    block = create_block_mask(mask, None, None, args.length, args.length, device=args.device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, k, v, score_mod=score, block_mask=block)  # type: ignore[return-value]

    def exact() -> list[torch.Tensor]:
        """Of two heads of the first sample, in float32."""
        few = [t[:1, :2].float().requires_grad_() for t in (q, k, v)]
        out = attend(*few)
        return [out.detach(), *torch.autograd.grad(out, few, grad[:1, :2].float())]

    programs = {"ours": compile_(attend), "peer": torch.compile(attend)}
    wanted, rows = exact(), []
    finish = torch.cuda.synchronize
    for phase in ("forward", "backward"):
        given = [t.clone().requires_grad_(phase == "backward") for t in (q, k, v)]

        def run(
            call: Callable[..., torch.Tensor], given: list[torch.Tensor] = given, phase: str = phase
        ) -> Any:
            out = call(*given)
            return [out] if phase == "forward" else [out, *torch.autograd.grad(out, given, grad)]

        errors = {
            who: max(
                float((a[:1, :2].float() - b).norm() / b.norm())
                for a, b in zip(run(call), wanted, strict=False)
            )
            for who, call in programs.items()
        }
        calls = {who: (lambda call=call: run(call)) for who, call in programs.items()}  # type: ignore[misc]
        rounds = turns(calls, seconds=args.seconds, finish=finish, turn=0.1)
        ratio = quartiles([r["peer"] / r["ours"] for r in rounds])
        ms = {who: statistics.median(r[who] for r in rounds) * 1e3 for who in calls}
        rows.append(
            {"case": name, "width": width, "phase": phase, "ms": ms, "times": ratio, "errors": errors}
        )
    return rows


def tune(name: str, args: argparse.Namespace, width: int) -> list[dict[str, Any]]:
    """Times of each kernel for many tiles, the quickest first."""
    score, mask = cases(args.length, args.heads, args.device)[name]
    shape = (args.batch, args.heads, args.length, width)
    q, k, v, grad = (torch.randn(shape, device=args.device, dtype=torch.bfloat16) for _ in range(4))
    block = create_block_mask(mask, None, None, args.length, args.length, device=args.device)
    found: list[Any] = []
    original = ours.FusedAttention.__init__

    def noted(self: Any, *rest: Any) -> None:
        original(self, *rest)
        found.append(self.case)

    ours.FusedAttention.__init__ = noted  # type: ignore[method-assign]
    compile_(lambda q, k, v: flex_attention(q, k, v, score_mod=score, block_mask=block))(q, k, v)
    ours.FusedAttention.__init__ = original  # type: ignore[method-assign]
    case = found[-1]
    free = [] if score is None else [torch.rand(args.heads, device=args.device)]
    if name == "document":
        free = [torch.zeros(args.length, dtype=torch.int64, device=args.device)]
    by_row = [block.kv_num_blocks, block.kv_indices, block.full_kv_num_blocks, block.full_kv_indices]
    by_column = [block.q_num_blocks, block.q_indices, block.full_q_num_blocks, block.full_q_indices]
    out, lse = torch.empty_like(q), torch.randn(shape[:3], device=args.device)
    less, dq, dk, dv = lse.clone(), *(torch.empty_like(q) for _ in range(3))
    tensors = {
        "forward": [q, k, v, out, lse, *by_row, *free],
        "queries": [q, k, v, grad, lse, less, dq, *by_row, *free],
        "keys": [q, k, v, grad, lse, less, dk, dv, *by_column, *free],
    }
    rows = []
    for what, given in tensors.items():
        tiles = [
            (m, n, warps, stages)
            for m, n, warps, stages in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
            if 32 * 64 <= m * n <= 128 * 128
        ]
        names = (what, "scored", "reading") if what == "forward" else (what,)
        before = {name: flex_kernels.TILES[name] for name in names}
        made: dict[Any, Any] = {}
        for one in tiles:  # all are being built side by side
            flex_kernels.TILES |= dict.fromkeys(names, {64: one, 128: one, 256: one})
            made[one] = ours.Kernels(case, (what,))
        flex_kernels.TILES |= before
        times = []
        for one, kernels in made.items():
            try:
                kernels(what, *given)
                torch.cuda.synchronize()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                best = []
                for _ in range(5):
                    start.record()
                    kernels(what, *given)
                    end.record()
                    torch.cuda.synchronize()
                    best.append(start.elapsed_time(end))
                times.append((statistics.median(best), one))
            except Exception as error:  # a tile that wants more shared memory than there is
                print(f"{what} {one}: {type(error).__name__}", file=sys.stderr)
        times.sort()
        print(name, width, what, [(round(ms, 3), one) for ms, one in times[:6]], flush=True)
        rows.append({"case": name, "width": width, "kernel": what, "times": times})
    return rows


def main() -> int:
    """Print a table and write JSON; 0 when every row is at least as fast as torch.compile's."""
    parser = argparse.ArgumentParser(prog="python -m bench.flex")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", default="causal,window,document,alibi")
    parser.add_argument("--widths", default="64,128", help="of a head")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for width, name in itertools.product(map(int, args.widths.split(",")), args.cases.split(",")):
        rows += (tune if args.tune else measure)(name, args, width)
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        result = {"gpu": gpu, "torch": torch.__version__, "command": " ".join(sys.argv[1:]), "rows": rows}
        write_json(args.json, result)
        if not args.tune:
            print(render(list(map(_cells, rows[-2:])), COLUMNS), flush=True)
    if args.tune:
        return 0
    print(f"geometric mean: {geometric_mean([row['times'][1] for row in rows]):.2f} times as fast")
    return int(any(row["times"][1] < 1 for row in rows))


def _cells(row: dict[str, Any]) -> list[str]:
    low, mid, high = row["times"]
    ms, errors = row["ms"], row["errors"]
    return [
        row["case"],
        str(row["width"]),
        row["phase"],
        f"{ms['ours']:.3f}",
        f"{ms['peer']:.3f}",
        f"{mid:.2f}",
        f"{low:.2f}-{high:.2f}",
        f"{errors['ours']:.4f}",
        f"{errors['peer']:.4f}",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
