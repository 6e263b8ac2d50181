"""`python -m bench masks`: attention with the masks that transformers writes into a graph, as `scaled_dot_product_attention`
under dynamotor.compile, beside `flex_attention` under torch.compile with a block mask that it is given, and
beside cuDNN's kernels where they know the mask without a matrix.

A call runs several layers that share a mask. Ours computes the mask from its formula in each call.

    python -m bench masks --jobs 12                                  # all on a GPU; 12 processes compile side by side
    python -m bench masks --lengths 2048 --kinds causal,window
    python -m bench masks --device cpu --small                       # the interpreter: right or not
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import bench.verification  # noqa: F401  (registers the interpreter)
from bench.measure import quartiles
from bench.tool import write_json
from bench.turns import geometric_mean, turns
from bench.ways import finish, print_kernels
from dynamotor.base.config import config
from dynamotor.base.events import counters
from dynamotor.tools.tables import render

TOKENS = 32768  # of a call, in one sequence or several
LAYERS = 4
PHASES = ("forward", "both")
HEADS = {64: (32, 8), 128: (16, 4)}  # by width: heads of queries, and of keys
COLUMNS = (
    "mask",
    "length",
    "width",
    "phase",
    "ms",
    "flex ms",
    "times as fast",
    "cuDNN ms",
    "mask MB",
    "peak MB",
    "error",
)


@dataclass(frozen=True)
class Places:
    """The terms of a mask's formula: positions, documents, and whether a key is no padding."""

    q: Any
    k: Any
    document_q: Any
    document_k: Any
    real_k: Any


Rule = Callable[[Places], Any]
KINDS: dict[str, Rule] = {
    "causal": lambda p: p.k <= p.q,
    "window": lambda p: (p.k <= p.q) & (p.k > p.q - 1024),
    "chunks": lambda p: (p.k <= p.q) & (p.k // 1024 == p.q // 1024),
    "window both ways": lambda p: (p.k - p.q <= 512) & (p.q - p.k <= 512),
    "prefix": lambda p: (p.k <= p.q) | (p.k < 256),
    "documents": lambda p: (p.k <= p.q) & (p.document_k == p.document_q),
    "documents both ways": lambda p: p.document_k == p.document_q,
    "padding behind": lambda p: (p.k <= p.q) & p.real_k,
    "padding before": lambda p: (p.k <= p.q) & p.real_k,
    "padding both ways": lambda p: p.real_k,
    "window and padding": lambda p: (p.k <= p.q) & (p.k > p.q - 1024) & p.real_k,
    "window and documents": lambda p: (p.k <= p.q) & (p.k > p.q - 1024) & (p.document_k == p.document_q),
}


def tensors(kind: str, args: argparse.Namespace, length: int, width: int) -> list[torch.Tensor]:
    """q, k, v with gradients; documents and padding, a row each sequence."""
    batch = max(1, (512 if args.small else TOKENS) // length)
    heads, groups = (4, 2) if args.small else HEADS[width]
    dtype = torch.bfloat16
    shapes = [(batch, n, length, width) for n in (heads, groups, groups)]
    found = [torch.randn(shape, device=args.device, dtype=dtype, requires_grad=True) for shape in shapes]
    generator = torch.Generator().manual_seed(1)
    places = torch.arange(length)
    cuts = torch.randint(1, length, (batch, 7), generator=generator)
    documents = (places[None, :, None] >= cuts[:, None, :]).sum(2)
    least = torch.randint(length // 2, length, (batch, 1), generator=generator)
    real = places[None] >= length - least if kind == "padding before" else places[None] < least
    return [*found, documents.to(args.device), real.to(args.device)]


def ours(rule: Rule, length: int, device: str) -> Callable[..., torch.Tensor]:
    """Layers of attention as transformers writes them where it is compiled."""

    def layers(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor, real: torch.Tensor
    ) -> torch.Tensor:
        at = torch.arange(length, device=device)
        given = documents[:, None, :, None], documents[:, None, None, :], real[:, None, None, :]
        mask = rule(Places(at[None, None, :, None], at[None, None, None, :], *given))
        mask = mask.expand(q.shape[0], 1, length, length)
        k, v = [
            t[:, :, None].expand(-1, -1, q.shape[1] // k.shape[1], -1, -1).reshape(q.shape) for t in (k, v)
        ]
        for _ in range(LAYERS):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return q

    return layers


def flex(rule: Rule, length: int, given: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same layers by torch.compile's `flex_attention`."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    documents, real = given[3:]

    def shown(b: Any, h: Any, q: Any, k: Any) -> Any:
        return rule(Places(q, k, documents[b, q], documents[b, k], real[b, k]))

    batch, device = given[0].shape[0], given[0].device
    block = create_block_mask(shown, batch, None, length, length, device=str(device))

    def layers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        for _ in range(LAYERS):
            q = flex_attention(q, k, v, block_mask=block, enable_gqa=True)  # type: ignore[assignment]
        return q

    return torch.compile(layers)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """Causal layers without a matrix, by cuDNN alone."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        for _ in range(LAYERS):
            q = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return q


def programs(kind: str, args: argparse.Namespace, length: int, given: list[torch.Tensor]) -> dict[str, Any]:
    """What runs in turns, by name."""
    import dynamotor

    torch.compiler.reset()  # its limit of recompilations counts all masks together
    if length == int(args.lengths.split(",")[0]):  # other lengths are the second, third ... of one function
        dynamotor.reset()
    found: dict[str, Any] = {"ours": dynamotor.compile(ours(KINDS[kind], length, args.device))}
    if args.device == "cuda":
        found["flex"] = flex(KINDS[kind], length, given)
        if kind == "causal":
            found["cudnn"] = cudnn
    else:
        found["flex"] = ours(KINDS[kind], length, args.device)
    return found


def measure(kind: str, args: argparse.Namespace, length: int, width: int) -> list[dict[str, Any]]:
    """The rows of a mask: forward, and forward with backward."""
    torch.manual_seed(0)
    given = tensors(kind, args, length, width)
    grad, calls = torch.randn_like(given[0]), programs(kind, args, length, given)

    def run(call: Callable[..., torch.Tensor], phase: str) -> list[torch.Tensor]:
        if phase == "forward":
            with torch.no_grad():
                return [call(*given)]
        out = call(*given)
        return [out, *torch.autograd.grad(out, given[:3], grad)]

    before = counters["attention masks"].copy()
    found, peer = run(calls["ours"], "both"), run(calls["flex"], "both")
    error = max(
        float((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm())
        for a, b in zip(found, peer, strict=True)
    )
    read = {name: n - before[name] for name, n in counters["attention masks"].items() if n != before[name]}
    del found, peer
    head = {"mask": kind, "length": length, "width": width, "error": error, "read": read}
    head |= {"mask_MB": given[0].shape[0] * length * length / 1e6}
    by_phase: dict[str, dict[str, Callable[[], Any]]] = {
        phase: {n: partial(run, c, phase) for n, c in calls.items()} for phase in PHASES
    }
    for call in itertools.chain(*(of.values() for of in by_phase.values())):
        call()  # compiles
    finish(args.device)
    for (phase, of), who in itertools.product(by_phase.items(), calls if args.profile else ()):
        print(f"{kind} {length} {width} {phase} {who}")
        print_kernels(of[who], args.device, LAYERS)
    with _alone(bool(args.part)):
        return [head | _timed(of, phase, args) for phase, of in by_phase.items()]


def _timed(calls: dict[str, Callable[[], Any]], phase: str, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of each in turns, and the memory that ours takes beyond its tensors."""
    calls["ours"]()
    peak = 0.0
    if args.device == "cuda":
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        calls["ours"]()
        peak = (torch.cuda.max_memory_allocated() - held) / 1e6
    rounds = turns(calls, seconds=args.seconds, finish=lambda: finish(args.device), turn=0.03)
    ms = {who: statistics.median(r[who] for r in rounds) * 1e3 for who in calls}
    return {
        "phase": phase,
        "ms": ms,
        "times": quartiles([r["flex"] / r["ours"] for r in rounds]),
        "peak_MB": peak,
    }


def main(argv: list[str] | None = None) -> int:
    """Print a table and write JSON; 0 when every row is right and at least as fast as torch.compile's."""
    args = _arguments(argv)
    found = (part.split(",") for part in (args.kinds, args.widths, args.lengths))
    cases = [(kind, int(length), int(width)) for kind, width, length in itertools.product(*found)]
    rows: list[dict[str, Any]] = []
    for row in _side_by_side(argv, args.jobs) if args.jobs else _rows(args, cases):
        rows.append(row)
        print(json.dumps(row), flush=True)
        gpu = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        facts = {
            "gpu": gpu,
            "torch": torch.__version__,
            "command": "python -m bench masks " + " ".join(sys.argv[1:]),
        }
        write_json(args.json, {**facts, "layers": LAYERS, "rows": rows})
    if args.part:
        return 0
    rows.sort(key=lambda row: cases.index((row["mask"], row["length"], row["width"])))
    print(render(list(map(_cells, rows)), COLUMNS))
    print(f"geometric mean: {geometric_mean([row['times'][1] for row in rows]):.2f} times as fast")
    return int(any(row["times"][1] < 1 or row["error"] > 0.02 for row in rows))


def _rows(args: argparse.Namespace, cases: list[tuple[str, int, int]]) -> Iterator[dict[str, Any]]:
    """The rows that this process measures: all lengths of some masks and widths."""
    part, parts = map(int, (args.part or "0/1").split("/"))
    several = [list(of) for _, of in itertools.groupby(cases, lambda case: (case[0], case[2]))]
    with config.patch(target="triton" if args.device == "cpu" else ""):
        for kind, length, width in itertools.chain(*several[part::parts]):
            yield from measure(kind, args, length, width)


def _side_by_side(argv: list[str] | None, jobs: int) -> Iterator[dict[str, Any]]:
    """The rows of several processes: all compile a case each, then one after the other times its own."""
    given = argv if argv is not None else sys.argv[1:]
    command = [sys.executable, "-m", "bench", "masks", *given, "--jobs", "0", "--json", ""]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    running = [subprocess.Popen([*command, "--part", f"{n}/{jobs}"], env=env, **pipes) for n in range(jobs)]
    while running:
        running = yield from _until("compiled", running)
        timed = []
        for process in running:
            _go(process)
            timed += yield from _until("timed", [process])
        for process in timed:
            _go(process)
        running = timed


def _until(word: str, processes: list[subprocess.Popen[str]]) -> Generator[dict[str, Any], None, list[Any]]:
    """The processes that say a word before they end; yields rows that come before."""
    found = []
    for process in processes:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
            elif line.strip() == word:
                found.append(process)
                break
    return found


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")


@contextlib.contextmanager
def _alone(is_part: bool) -> Iterator[None]:
    """Where no other process of this run compiles or computes anything."""
    if is_part:
        print("compiled", flush=True)
        sys.stdin.readline()
    yield
    if is_part:
        print("timed", flush=True)
        sys.stdin.readline()


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench masks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="several with commas")
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--widths", default="64,128", help="of a head")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a row")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile side by side")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a few heads of 300 positions")
    parser.add_argument(
        "--profile", action="store_true", help="print each way's kernels, by layer (no --jobs)"
    )
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.small:
        args.lengths, args.widths = "300", "16"
    return args


def _cells(row: dict[str, Any]) -> list[str]:
    low, mid, high = row["times"]
    ms = row["ms"]
    return [
        row["mask"],
        str(row["length"]),
        str(row["width"]),
        row["phase"],
        f"{ms['ours']:.3f}",
        f"{ms['flex']:.3f}",
        f"{mid:.2f} ({low:.2f}-{high:.2f})",
        f"{ms['cudnn']:.3f}" if "cudnn" in ms else "",
        f"{row['mask_MB']:.0f}",
        f"{row['peak_MB']:.0f}",
        f"{row['error']:.4f}",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
