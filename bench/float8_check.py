"""`python -m bench float8_check`: float8 on this machine's device: are casts eager's bit for bit, how fast are they,
and does a model trained in float8 follow its losses in bfloat16?

    python -m bench float8_check --json out/float8.json          # about four minutes on a GPU; losses need torchao
    python -m bench float8_check --parts casts --tiles 32x64x4,64x64x8,64x128x8,128x128x16   # rows, columns, warps
    python -m bench float8_check --device cpu --small            # on any machine

A cast reads its operand once, and writes bytes row-major and transposed. Losses of bfloat16 are of several first
weights: their range is the spread that float8's have to stay within.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

import dynamotor
from bench import float8, torchvision_stub
from bench.llm_rows import SMALL, model_of
from bench.tool import write_json
from bench.turns import turns
from bench.ways import compiler_of, finish
from dynamotor.base.config import config
from dynamotor.codegen.triton_plan import DEFAULT
from dynamotor.tools.tables import render

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SEEDS = 3  # of the runs in bfloat16


def main(argv: list[str] | None = None) -> int:
    """Run the parts; 1 if a bit differs, or losses leave the spread."""
    parser = argparse.ArgumentParser(
        prog="python -m bench float8_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", default="bits,casts,losses")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=200, help="of each loss curve")
    parser.add_argument("--recipes", default="tensorwise,rowwise")
    parser.add_argument("--tiles", default="", help="of casts that write bytes across, ROWSxCOLUMNSxWARPS")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each cast")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {"torch": torch.__version__, "device": args.device}
    failed = False
    for part in args.parts.split(","):
        rows = {"bits": bits, "casts": casts, "losses": losses}[part](args)
        found[part] = rows
        failed |= any(not row.get("ok", True) for row in rows)
        columns = [column for column in rows[0] if column != "curve"]
        print(render([[_text(row[c]) for c in columns] for row in rows], columns), flush=True)
        write_json(args.json, found)
    return int(failed)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def odd_numbers() -> torch.Tensor:
    """float32 at and next to each float8 number and each middle of two; ends, infinities, NaN, zeros."""
    known = torch.cat([torch.arange(256).to(torch.uint8).view(t).float() for t in TYPES.values()])
    ends = known[known.isfinite()].unique()
    far = torch.tensor([449.0, 464, 465, 480, 57344, 61440, 65536, 1e9, 3e38, 1e-40, torch.inf])
    x = torch.cat([ends, (ends[1:] + ends[:-1]) / 2, far, 2.0 ** torch.arange(-149.0, 128.0)])
    x = torch.cat([x, -x])
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    return torch.cat([x, x.nextafter(up), x.nextafter(down), x * torch.nan])


def bits(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Numbers whose float8 is not eager's on the same device."""
    halves = [torch.arange(1 << 16).to(torch.uint16).view(t) for t in (torch.bfloat16, torch.float16)]
    rows = []
    for name, dtype in TYPES.items():
        largest = torch.finfo(dtype).max
        for x in [odd_numbers(), *halves]:
            x = x.to(args.device)

            def cast(x: torch.Tensor, dtype: torch.dtype = dtype, largest: float = largest) -> Any:
                plain, clamped = x.to(dtype), x.float().clamp(-largest, largest).to(dtype)
                return (
                    plain,
                    clamped,
                    clamped.float(),
                    clamped[: len(x) // 2 * 2].view(-1, 2).t().contiguous(),
                )

            got, want = compiler_of("dynamotor", None)(cast)(x), cast(x)
            wrong = [_differing(a, b) for a, b in zip(got, want, strict=True)]
            row: dict[str, Any] = {
                "to": name,
                "of": str(x.dtype),
                "numbers": len(x),
                "wrong": sum(map(len, wrong)),
            }
            rows.append({**row, "ok": not row["wrong"], "first of each result": _told(wrong, got, want)})
    return rows


def _differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The places, of all elements in order, at which numbers differ."""
    a, b = a.float().flatten(), b.float().flatten()
    same = (a.isnan() & b.isnan()) | ((a == b) & (a.signbit() == b.signbit()))
    return (~same).nonzero().flatten()


def _told(wrong: list[torch.Tensor], got: Any, want: Any) -> str:
    """Of each result: how many differ, and place, number and eager's number of the first and the last ones."""
    found = []
    for places, a, b in zip(wrong, got, want, strict=True):
        ends = [*places[:3].tolist(), *places[-2:].tolist()] if len(places) else []
        shown = [f"{i}: {float(a.float().flatten()[i])} {float(b.float().flatten()[i])}" for i in ends]
        found.append(f"{len(places)} [{', '.join(shown)}]")
    return "; ".join(found) if any(map(len, wrong)) else ""


def casts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times of casts in both layouts beside torch.compile's, and of the memory that they have to touch."""
    config.program_cache = False  # tiles are no part of a program's key
    tiles = args.tiles.split(",") if args.tiles else ["x".join(map(str, DEFAULT.crossed_bytes))]
    rows: list[dict[str, Any]] = []
    for tile in tiles:
        object.__setattr__(DEFAULT, "crossed_bytes", tuple(map(int, tile.split("x"))))
        dynamotor.reset()
        rows += [{"tile": tile, **row} for row in _casts(args, [] if rows else ["torch.compile"])]
    return rows


def _casts(args: argparse.Namespace, others: list[str]) -> list[dict[str, Any]]:
    sizes = [(256, 512)] if args.small else [(8192, 4096), (8192, 14336), (14336, 4096), (4096, 4096)]
    rows = []
    for recipe in ("tensorwise", "rowwise"):
        for rows_n, columns in sizes:
            for dtype, to in ((torch.bfloat16, TYPES["e4m3"]), (torch.float32, TYPES["e4m3"])):
                x = torch.randn(rows_n, columns, device=args.device, dtype=dtype)
                cast = _both_layouts(recipe, to)
                ways = {way: compiler_of(way, None)(cast) for way in ("dynamotor", *others)}
                calls = {way: functools.partial(f, x) for way, f in ways.items()}
                torch.compiler.reset()
                times = turns(calls, seconds=args.seconds, finish=lambda: finish(args.device))
                medians = {way: 1e6 * statistics.median(t[way] for t in times) for way in ways}
                touched = x.numel() * (2 * x.element_size() + 2)  # for the largest number, and for the cast
                row = {"recipe": recipe, "size": f"{rows_n}x{columns}", "of": str(dtype)}
                row |= {f"{way} us": medians.get(way, float("nan")) for way in ("dynamotor", "torch.compile")}
                rows.append(row | {"TB/s of twice read, once written": touched / medians["dynamotor"] / 1e6})
    return rows


def _both_layouts(recipe: str, dtype: torch.dtype) -> Callable[[torch.Tensor], Any]:
    largest = torch.finfo(dtype).max

    def rounded(x: torch.Tensor, top: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = (largest / top.double().clamp(min=1e-12)).float()
        return (x.float() * scale).clamp(-largest, largest).to(dtype), scale

    def tensorwise(x: torch.Tensor) -> Any:
        small, scale = rounded(x, x.abs().max())
        return small, small.t().contiguous(), scale

    def rowwise(x: torch.Tensor) -> Any:
        first, scale = rounded(x, x.abs().amax(1, keepdim=True))
        second, other = rounded(x, x.abs().amax(0, keepdim=True))
        return first, second.t().contiguous(), scale, other

    return tensorwise if recipe == "tensorwise" else rowwise


def losses(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The curves of bfloat16 (eager, several seeds), and of float8 by each recipe, eager and compiled."""
    if float8.missing():
        return [{"way": "none", "why": float8.missing(), "ok": False}]
    plain = [_curve(args, "eager", float8.NONE, seed) for seed in range(SEEDS)]
    rows = [_row("eager", float8.NONE, curve, plain) for curve in plain]
    for recipe in args.recipes.split(","):
        for way in ("eager", "dynamotor", "compile_step"):
            rows.append(_row(way, recipe, _curve(args, way, recipe, 0), plain))
    return rows


def _row(way: str, recipe: str, curve: list[float], plain: list[list[float]]) -> dict[str, Any]:
    """A curve beside that of the same first weights in bfloat16; the widest that those of others are apart."""
    spread = max(max(at) - min(at) for at in zip(*plain, strict=True))
    away = max(abs(a - b) for a, b in zip(curve, plain[0], strict=True))
    ends = {"first": curve[0], "last": curve[-1], "away": away, "spread": spread, "ok": away <= spread}
    return {"way": way, "float8": recipe, **ends, "curve": curve[:: max(1, len(curve) // 20)]}


def _curve(args: argparse.Namespace, way: str, recipe: str, seed: int) -> list[float]:
    """Losses of a small Llama that learns eight batches by heart."""
    torchvision_stub.prepare()
    torch.manual_seed(seed)
    length, device = (32, args.device) if args.small else (512, args.device)
    config, model = model_of("llama-125m", length, SMALL if args.small else {})
    model = model.to(device).train()
    float8.convert(model, recipe, emulate=device != "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda")
    half = torch.autocast(device, torch.bfloat16)
    draw = torch.Generator().manual_seed(7)
    shape = (8, 2 if args.small else 8, length)
    pool = torch.randint(0, config.vocab_size, shape, generator=draw).to(device)

    def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
        return torch.nn.functional.cross_entropy(flat, ids[:, 1:].reshape(-1))

    if way == "compile_step":
        whole = dynamotor.compile_step(model, lambda out, ids: loss_of(out.logits, ids), optimizer)

        def step(ids: torch.Tensor) -> torch.Tensor:
            with half:
                return whole(ids, ids)

    else:
        forward = compiler_of(way, None)(lambda ids: loss_of(model(ids).logits, ids))

        def step(ids: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            with half:
                loss = forward(ids)
            loss.backward()
            optimizer.step()
            return loss.detach()

    return [float(loss) for loss in [step(pool[n % 8]) for n in range(args.steps)]]


if __name__ == "__main__":
    sys.exit(main())
