"""`python -m bench decode`: tokens of a language model one at a time, eager beside torch.compile, dynamotor
and a hand-written loop, and the products of few rows that decoding consists of.

Each way runs in a process of its own. Weights are random, nothing is downloaded.

    python -m bench decode                                         # generate, batch 1
    python -m bench decode --rows products,layer,generate --batches 1,8
    python -m bench decode --rows generate --ways eager,dynamotor --profile
    python -m bench decode --device cpu --model llama-125m --weights int8     # or int4, torchao
    python -m bench decode --device cpu --small                    # seconds, on any machine
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench import torchvision_stub
from bench.decode_weights import SCHEMES, quantise
from bench.llm_rows import SMALL, model_of
from bench.measure import quartiles
from bench.tool import write_json
from bench.ways import compiler_of, in_process, print_kernels, timed
from dynamotor.tools.tables import render

WAYS = {
    "products": ("eager", "torch.compile", "dynamotor"),
    "generate": ("eager", "torch.compile", "dynamotor", "loop", "generate compiled"),
    "first": ("eager", "torch.compile", "dynamotor"),
    "cache": ("eager", "torch.compile", "dynamotor"),
    "attention": ("eager", "torch.compile", "dynamotor"),
}
SHAPES = (
    (2048, 2048),
    (2048, 512),
    (2048, 8192),
    (8192, 2048),
    (2048, 32000),
    (4096, 4096),
    (4096, 14336),
    (14336, 4096),
)
ATTENTION = ((8, 4, 64), (8, 4, 128), (32, 1, 128))  # heads of keys, queries of each, width
REPEATS = 64  # products in a call, on different weights: more memory than a cache holds
MODE = "reduce-overhead"


def main(argv: list[str] | None = None) -> int:
    """Run rows by batches by ways, print a table; --json writes the figures."""
    args = _arguments(argv)
    if args.worker:
        print(json.dumps(_worker(args)), flush=True)
        return 0
    results: list[dict[str, Any]] = []
    for row in args.rows.split(","):
        for batch in map(int, args.batches.split(",")):
            for way in args.ways.split(",") if args.ways else WAYS[row]:
                results.append(_in_process(args, row, batch, way))
                print(json.dumps(results[-1]), flush=True)
    facts = {"command": "python -m bench decode " + " ".join(sys.argv[1:]), "torch": torch.__version__}
    write_json(args.json, {**facts, "rows": results})
    print(render(_lines(results), ("row", "batch", "way", "of", "ms", "quartiles", "GB/s")))
    return int(any("error" in r for r in results))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", default="generate", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--model", default="llama-1.2b", help="a row of `bench llm`")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--ways", default="", help="default: each row's own")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each generation")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--positions", default="4096,32768", help="of the row `cache`")
    parser.add_argument("--times", type=int, default=5, help="timed generations")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--weights", default="", choices=["", *SCHEMES], help="of linear layers, instead of the dtype"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a way may take")
    parser.add_argument("--small", action="store_true", help="two narrow layers, few tokens")
    parser.add_argument(
        "--profile", action="store_true", help="print kernels and host time of one generation"
    )
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _in_process(args: argparse.Namespace, row: str, batch: int, way: str) -> dict[str, Any]:
    command = ["decode", "--worker", f"{row}:{batch}:{way}"]
    for name in ("model", "tokens", "prompt", "positions", "times", "dtype", "device", "weights"):
        command += [f"--{name}", str(getattr(args, name))]
    command += [f"--{name}" for name in ("small", "profile") if getattr(args, name)]
    row_of = {"row": row, "batch": batch, "way": way}
    return row_of | in_process(command, args.timeout, echo=args.profile)


def _worker(args: argparse.Namespace) -> dict[str, Any]:
    row, batch, way = args.worker.split(":")
    torchvision_stub.prepare()
    torch.manual_seed(0)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    rows = {"products": _products, "generate": _generate, "first": _first, "cache": _cache}
    return {"device": device} | {**rows, "attention": _attention}[row](args, int(batch), way)


# -- products ------------------------------------------------------------------------------------------------
class _Products(torch.nn.Module):
    """Products of x with each of the weights."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.linear(x, w) for w in self.weights], 1)


@torch.no_grad()
def _products(args: argparse.Namespace, batch: int, way: str) -> dict[str, Any]:
    """Milliseconds of a product of `batch` rows with weights (outputs x inputs), by shape."""
    dtype, found = getattr(torch, args.dtype), {}
    for inner, outer in SHAPES[:2] if args.small else SHAPES:
        repeats = 2 if args.small else max(4, min(REPEATS, (1 << 30) // (2 * inner * outer)))
        weights = [
            torch.randn(outer, inner, dtype=dtype, device=args.device) / inner**0.5 for _ in range(repeats)
        ]
        x = torch.randn(batch, inner, dtype=dtype, device=args.device)

        module = _Products(weights)
        compiled = (
            graphed(module, x) if way == "eager" and args.device == "cuda" else compiler_of(way, MODE)(module)
        )
        for _ in range(5):
            result = compiled(x)
        exact = torch.cat([x.double() @ w.double().t() for w in weights[:2]], 1)
        error = float((result[:, : 2 * outer].double() - exact).abs().max())
        times = [t / repeats for t in timed(partial(compiled, x), 4 * args.times, args.device)]
        size = weights[0].nbytes
        found[f"{inner}x{outer}"] = {
            "ms": quartiles(times),
            "GB/s": size / quartiles(times)[1] / 1e6,
            "error": error,
        }
    return {"shapes": found}


class _Attentions(torch.nn.Module):
    """Attention of a few queries over several caches."""

    def __init__(self, caches: Sequence[torch.Tensor], mask: torch.Tensor | None) -> None:
        super().__init__()
        self.caches, self.mask = list(caches), mask

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        found = [F.scaled_dot_product_attention(q, keys, values, self.mask) for keys, values in self.caches]
        return torch.cat(found, 2)


@torch.no_grad()
def _attention(args: argparse.Namespace, batch: int, way: str) -> dict[str, Any]:
    """Milliseconds of an attention of a few queries over a cache, by shape, positions and mask."""
    dtype, found = getattr(torch, args.dtype), {}
    for heads, rows, width in ATTENTION[:1] if args.small else ATTENTION:
        for positions in map(int, args.positions.split(",")):
            nbytes = 2 * batch * heads * positions * width * dtype.itemsize
            caches = [
                torch.randn(2, batch, heads, positions, width, dtype=dtype, device=args.device)
                for _ in range(2 if args.small else max(2, min(16, (1 << 29) // nbytes)))
            ]
            q = torch.randn(batch, heads, rows, width, dtype=dtype, device=args.device)
            for filled in (0, positions, positions // 8):  # 0: no mask
                places = torch.arange(positions, device=args.device)
                mask = torch.where(places < filled, 0.0, -torch.inf).to(dtype)[None, None, None]
                module = _Attentions(caches, mask if filled else None)
                graphed = way == "eager" and args.device == "cuda"
                call = graphed(module, q) if graphed else compiler_of(way, MODE)(module)
                for _ in range(5):
                    call(q)
                times = [t / len(caches) for t in timed(partial(call, q), 4 * args.times, args.device)]
                name = f"{heads}x{rows}x{width}, {filled or 'all'} of {positions}"
                found[name] = {"ms": quartiles(times), "GB/s": nbytes / quartiles(times)[1] / 1e6}
    return {"shapes": found}


def graphed(call: Callable[..., Any], x: torch.Tensor) -> Callable[..., Any]:
    """The library's products as one CUDA graph, so that launches do not count."""
    call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(x)

    def replay(*_: torch.Tensor) -> torch.Tensor:
        graph.replay()
        return result

    return replay


# -- generation ----------------------------------------------------------------------------------------------
def _task(args: argparse.Namespace, batch: int, tokens: int) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """A model, prompts, and how `generate` is called: so many greedy tokens over a static cache."""
    import transformers

    with torch.device(args.device):
        _, model = model_of(args.model, args.prompt + tokens, SMALL if args.small else {})
    model = model.to(args.device, getattr(torch, args.dtype)).eval()
    quantise(model, args.weights)
    model.config.use_cache = True
    ids = torch.randint(0, model.config.vocab_size, (batch, args.prompt), device=args.device)
    settings = transformers.GenerationConfig(
        disable_compile=True,
        pad_token_id=0,
        cache_implementation="static",
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
    )
    return model, ids, {"attention_mask": torch.ones_like(ids), "generation_config": settings}


def _generate(args: argparse.Namespace, batch: int, way: str) -> dict[str, Any]:
    """Milliseconds a token of greedy generation, first call aside."""
    tokens = 8 if args.small else args.tokens
    model, ids, options = _task(args, batch, tokens)
    reference = model.generate(ids, **options)
    generate = model.generate
    if way == "generate compiled":
        generate = compiler_of(way, MODE)(model.generate)
    elif way == "loop":
        return _loop(args, model, ids, tokens, reference)
    else:
        model.forward = compiler_of(way, MODE)(model.forward)

    def call() -> torch.Tensor:
        return generate(ids, **options)

    start = time.perf_counter()
    ours = call()
    first = time.perf_counter() - start
    call()
    times = [t / tokens for t in timed(call, args.times, args.device)]
    if args.profile:
        _profile(call, tokens, args.device)
    return {
        "ms": quartiles(times),
        "first_s": first,
        "tokens": tokens,
        **_agreement(ours, reference, args.prompt),
        **_counts(),
    }


def _first(args: argparse.Namespace, batch: int, way: str) -> dict[str, Any]:
    """Milliseconds until a process that has its model and its compiler has two tokens of the whole `generate`.
    Run it twice: the second process finds the first one's programs.
    """
    model, ids, options = _task(args, batch, 2)
    model.generate(ids, **options)  # PyTorch's own kernels are loaded
    generate = compiler_of(way, MODE if way == "dynamotor" else None)(model.generate)
    return {"ms": quartiles(timed(lambda: generate(ids, **options), 1, args.device)), **_counts()}


def _counts() -> dict[str, Any]:
    if "dynamotor" not in sys.modules:
        return {}
    from dynamotor.base.events import counters

    return {"cudagraphs": dict(counters["cudagraphs"]), "fallbacks": dict(counters["fallback"])}


def _agreement(ours: torch.Tensor, reference: torch.Tensor, prompt: int) -> dict[str, Any]:
    """How many tokens were eager's before the first other one (half precision: ties may fall differently)."""
    same = (ours[:, prompt:] == reference[:, prompt:]).all(0).long().cumprod(0).sum()
    return {"tokens as in eager": int(same)}


@torch.no_grad()
def _loop(
    args: argparse.Namespace, model: Any, ids: torch.Tensor, tokens: int, reference: torch.Tensor
) -> dict[str, Any]:
    """Generation by a hand-written loop over one compiled step, which avoids transformers' host time."""
    import transformers

    import dynamotor

    batch, prompt = ids.shape
    cache = transformers.StaticCache(config=model.config, max_cache_len=prompt + tokens)
    head = torch.arange(prompt, device=args.device)
    model(ids, past_key_values=cache, position_ids=head[None], use_cache=True)

    def one(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        logits = model(token, past_key_values=cache, position_ids=position[None], use_cache=True).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    step = dynamotor.compile(one, mode=MODE)

    def call() -> torch.Tensor:
        cache.reset()
        logits = model(ids, past_key_values=cache, position_ids=head[None], use_cache=True).logits
        token, position = logits[:, -1].argmax(-1, keepdim=True), head[-1:] + 1
        made = [ids, token]
        for _ in range(tokens - 1):
            token, position = step(token, position).clone(), position + 1
            made.append(token)
        return torch.cat(made, 1)

    ours = call()
    call()
    times = [t / tokens for t in timed(call, args.times, args.device)]
    if args.profile:
        _profile(call, tokens, args.device)
    return {"ms": quartiles(times), "tokens": tokens, **_agreement(ours, reference, prompt), **_counts()}


@torch.no_grad()
def _cache(args: argparse.Namespace, batch: int, way: str) -> dict[str, Any]:
    """Milliseconds of one step over a static cache, by its positions and how many of them are filled."""
    import transformers

    _, model = model_of(args.model, 1 << 16, SMALL if args.small else {})
    model = model.to(args.device, getattr(torch, args.dtype)).eval()
    token, found = torch.ones((batch, 1), dtype=torch.long, device=args.device), {}
    step = compiler_of(way, MODE if way == "dynamotor" else None)(
        model
    )  # torch.compile's mode of that name raises
    for positions in map(int, args.positions.split(",")):
        for filled in (positions - args.tokens, positions // 8):
            cache = transformers.StaticCache(config=model.config, max_cache_len=positions)
            call = partial(step, token, past_key_values=cache, use_cache=True)
            call()
            for layer in cache.layers:
                layer.keys.normal_()
                layer.values.normal_()
                layer.cumulative_length.fill_(filled)
            call()
            times = timed(call, min(args.times * 4, args.tokens - 4), args.device)
            found[f"{filled} of {positions}"] = {"ms": quartiles(times)}
    return {"shapes": found, **_counts()}


def _profile(call: Callable[[], object], tokens: int, device: str) -> None:
    """Print a call's kernels, and the functions that take the host's time, by token."""
    import cProfile
    import pstats

    print_kernels(call, device, tokens)
    host = cProfile.Profile()
    host.runcall(call)
    pstats.Stats(host).sort_stats("tottime").print_stats(16)


def _lines(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    lines = []
    for r in results:
        head = [r["row"], str(r["batch"]), r["way"]]
        if "error" in r:
            lines.append([*head, r["error"][:60], "", "", ""])
            continue
        for name, one in r.get("shapes", {"": r}).items():
            low, middle, high = one["ms"]
            rate = f"{one['GB/s']:.0f}" if "GB/s" in one else ""
            lines.append([*head, name, f"{middle:.4f}", f"{low:.4f} to {high:.4f}", rate])
    return lines


if __name__ == "__main__":
    sys.exit(main())
