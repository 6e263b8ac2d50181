"""`python -m bench llm`: training steps of language models on one device, eager beside torch.compile and
dynamotor (`compile` with the optimizer in eager, and `compile_step`), and attention with transformers' masks.

Each way of each row runs in a process of its own, so that memory is that way's alone and a failure ends one
figure. Weights are random, nothing is downloaded.

    python -m bench llm                                    # rows of the acceptance table that one GPU takes
    python -m bench llm --rows llama-1.2b --sizes 4x2048 --ways torch.compile,dynamotor --steps 12
    python -m bench llm --rows attention --sizes 4x2048,1x16384
    python -m bench llm --rows llama-8b-slice --float8 none,tensorwise,rowwise  # needs torchao
    python -m bench llm --device cpu --small               # seconds, on any machine
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import float8, torchvision_stub
from bench.llm_rows import ATTENTION, DEFAULT_SIZES, MODELS, SMALL, masked_attention, model_of
from bench.measure import quartiles
from bench.tool import write_json
from bench.turns import geometric_mean
from bench.ways import compiler_of, finish, in_process, timed
from dynamotor.tools.tables import render

WAYS = ("eager", "torch.compile", "dynamotor", "compile_step")
PEAK = 990e12  # bf16 operations a second of an H100, without sparsity
COLUMNS = (
    "row",
    "size",
    "way",
    "float8",
    "ms",
    "quartiles",
    "of torch.compile's time",
    "share of peak",
    "reserved GiB",
    "loss",
)


def main(argv: list[str] | None = None) -> int:
    """Run rows by sizes by ways, print a table; --json writes the figures."""
    args = _arguments(argv)
    if args.worker:
        print(json.dumps(_worker(args)), flush=True)
        return 0
    rows: list[dict[str, Any]] = []
    for name in args.rows.split(","):
        for size in (args.sizes or DEFAULT_SIZES.get(name, "4x2048")).split(","):
            for recipe, way in itertools.product(args.float8.split(","), args.ways.split(",")):
                if name in ATTENTION and (way == "compile_step" or recipe != float8.NONE):
                    continue
                rows.append(_in_process(args, name, size, recipe, way))
                print(json.dumps(rows[-1]), flush=True)
                _write(args, rows)
    print(render([_line(rows, row) for row in rows], COLUMNS))
    print("geometric means of torch.compile's time over ours:", json.dumps(_means(rows)))
    return int(any("error" in row for row in rows))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench llm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", default="llama-1.2b,llama-8b-slice", help=f"of {', '.join([*MODELS, *ATTENTION])}"
    )
    parser.add_argument(
        "--sizes", default="", help="BATCHxLENGTH, several with commas; default: each row's own"
    )
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each way")
    parser.add_argument("--warm", type=int, default=4, help="steps before them")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--loss", choices=("inside", "outside"), default="inside", help="of the compiled program"
    )
    parser.add_argument("--mode", default=None, help="mode of both compilers, as reduce-overhead")
    parser.add_argument(
        "--float8",
        default=float8.NONE,
        help=f"with commas, of {', '.join(float8.RECIPES)}: torchao's recipes",
    )
    parser.add_argument("--timeout", type=float, default=420.0, help="seconds a way of a row may take")
    parser.add_argument("--small", action="store_true", help="two narrow layers and short sequences")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    unknown = [name for name in args.rows.split(",") if name not in MODELS and name not in ATTENTION]
    unknown += [way for way in args.ways.split(",") if way not in WAYS]
    unknown += [recipe for recipe in args.float8.split(",") if recipe not in float8.RECIPES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    if args.float8 != float8.NONE and float8.missing():
        parser.error(float8.missing())
    return args


def _in_process(args: argparse.Namespace, name: str, size: str, recipe: str, way: str) -> dict[str, Any]:
    """One figure, taken by a process of its own."""
    command = ["llm", "--worker", f"{name}:{size}:{way}", "--loss", args.loss, "--float8", recipe]
    command += ["--steps", str(args.steps), "--warm", str(args.warm), "--device", args.device]
    command += [*(["--small"] if args.small else []), *(["--mode", args.mode] if args.mode else [])]
    head = {"row": name, "size": size, "way": way, "float8": recipe}
    return head | in_process(command, args.timeout)


def _worker(args: argparse.Namespace) -> dict[str, Any]:
    name, size, way = args.worker.split(":")
    torchvision_stub.prepare()
    batch, length = [int(n) for n in size.split("x")]
    if args.small:
        batch, length = min(batch, 2), min(length, 64)
    torch.manual_seed(0)
    if name in ATTENTION:
        return _time_attention(args, name, way, batch, length)
    return _time_steps(args, name, way, batch, length)


def _time_steps(args: argparse.Namespace, name: str, way: str, batch: int, length: int) -> dict[str, Any]:
    with torch.device(args.device):  # a host takes 15 s for the weights of a billion
        config, model = model_of(name, length, SMALL if args.small else {})
    model.train()
    float8.convert(model, args.float8, emulate=args.device != "cuda")
    parameters = sum(p.numel() for n, p in model.named_parameters() if "embed_tokens" not in n)
    step = _step(args, way, model, torch.randint(0, config.vocab_size, (batch, length), device=args.device))
    start = time.perf_counter()
    losses = [float(step())]
    first = time.perf_counter() - start
    for _ in range(args.warm):
        step()
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = timed(step, args.steps, args.device)
    losses.append(float(step()))
    tokens = batch * length
    work = 6 * parameters * tokens + 6 * config.num_hidden_layers * config.hidden_size * length * tokens
    found = {"ms": quartiles(times), "first_s": first, "loss": losses, "steps": len(times)}
    return found | {"share_of_peak": work / (statistics.median(times) / 1e3) / PEAK} | _memory(args.device)


def _step(args: argparse.Namespace, way: str, model: Any, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A training step under autocast: forward, loss, backward, AdamW."""
    half = torch.autocast(args.device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=args.device == "cuda")

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
        return torch.nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1))

    if way == "compile_step":
        import dynamotor

        whole = dynamotor.compile_step(
            model, lambda out, labels: loss_of(out.logits, labels), optimizer, mode=args.mode
        )

        def one() -> torch.Tensor:
            with half:
                return whole(ids, ids)

        return one

    def forward(ids: torch.Tensor) -> torch.Tensor:
        return loss_of(model(ids).logits, ids)

    compiler = compiler_of(way, args.mode)
    compiled = compiler(forward if args.loss == "inside" else model)

    def plain() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with half:
            loss = compiled(ids) if args.loss == "inside" else loss_of(compiled(ids).logits, ids)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return plain


def _time_attention(args: argparse.Namespace, name: str, way: str, batch: int, length: int) -> dict[str, Any]:
    """Forward and backward of attention alone, with the mask and heads that transformers gives it."""
    attend, tensors = masked_attention(name, batch, length, args.device, args.small)
    call = compiler_of(way, args.mode)(attend)
    grads = torch.randn_like(tensors[0])

    def both() -> None:
        for t in tensors[:3]:
            t.grad = None
        call(*tensors).backward(grads)

    def forward() -> None:
        with torch.no_grad():
            call(*tensors)

    start = time.perf_counter()
    both(), forward()
    first = time.perf_counter() - start
    for _ in range(args.warm):
        both(), forward()
    finish(args.device)
    found: dict[str, Any] = {"first_s": first, "steps": args.steps, "loss": []}
    found["forward_ms"] = quartiles(timed(forward, args.steps, args.device))
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return found | {"ms": quartiles(timed(both, args.steps, args.device))} | _memory(args.device)


def _memory(device: str) -> dict[str, Any]:
    if device != "cuda":
        return {"device": device}
    return {
        "device": torch.cuda.get_device_name(),
        "reserved_GiB": torch.cuda.max_memory_reserved() / 2**30,
        "allocated_GiB": torch.cuda.max_memory_allocated() / 2**30,
    }


def _peer(rows: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any] | None:
    wanted = {**row, "way": "torch.compile"}
    same = [r for r in rows if all(r[key] == wanted[key] for key in ("row", "size", "way", "float8"))]
    return same[0] if same and "ms" in same[0] else None


def _line(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[str]:
    head = [row["row"], row["size"], row["way"], row["float8"]]
    if "error" in row:
        return [*head, row["error"][:60], "", "", "", "", ""]
    low, middle, high = row["ms"]
    peer = _peer(rows, row)
    ratio = (
        ""
        if peer is None
        else f"{middle / peer['ms'][1]:.3f} ({low / peer['ms'][2]:.3f} to {high / peer['ms'][0]:.3f})"
    )
    share, reserved = row.get("share_of_peak"), row.get("reserved_GiB")
    numbers = ["" if share is None else f"{share:.3f}", "" if reserved is None else f"{reserved:.2f}"]
    loss = " to ".join(f"{value:.4f}" for value in row["loss"])
    return [*head, f"{middle:.2f}", f"{low:.2f} to {high:.2f}", ratio, *numbers, loss]


def _means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """For each of our ways, torch.compile's time over its time: the geometric mean over rows and sizes."""
    found = {}
    for way in WAYS[2:]:
        pairs = [(_peer(rows, row), row) for row in rows if row["way"] == way and "ms" in row]
        ratios = [peer["ms"][1] / row["ms"][1] for peer, row in pairs if peer is not None]
        if ratios:
            found[way] = geometric_mean(ratios)
    return found


def _write(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    facts = {"command": "python -m bench llm " + " ".join(sys.argv[1:]), "torch": torch.__version__}
    facts |= {"loss": args.loss, "mode": args.mode, "times as fast as torch.compile": _means(rows)}
    write_json(args.json, {**facts, "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
