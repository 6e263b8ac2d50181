"""Training steps of speech models as transformers trains them, with layer drop and SpecAugment, whose random
choices break every graph: eager, torch.compile and dynamotor in turns in one process, and the compiled share of both.

python -m bench speech --json speech.json [--models whisper-base,wav2vec2-base] [--device cpu --small]

A step is forward, loss and backward under bf16 autocast on a GPU (float32 on a CPU). Models compile side by side in
processes with caches of their own and are timed one after the other. Before each step all generators get the seed of
the round, the same for each way.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dynamotor
from dynamotor.base.events import counters

from . import share, torchvision_stub
from .gpu_programs import profile
from .json_worker import JsonWorker
from .measure import quartiles
from .turns import turns

WAYS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "eager": lambda model: model,
    "dynamotor": dynamotor.compile,
    "torch.compile": torch.compile,
}
DROP = 0.1  # of the layers
WARM = 12  # steps: choices differ from step to step, and both compilers compile for some of them
SHARE_STEPS = 2
TURN = {"cuda": 0.5, "cpu": 0.2}  # seconds

_WHISPER = {
    "encoder_layerdrop": DROP,
    "decoder_layerdrop": DROP,
    "dropout": 0.1,
    "apply_spec_augment": True,
    "mask_feature_prob": 0.05,
}
_WAV2VEC2 = {
    "layerdrop": DROP,
    "mask_time_prob": 0.05,
    "mask_feature_prob": 0.004,
    "ctc_loss_reduction": "mean",
}


def _size(width: int, layers: int, heads: int) -> dict[str, int]:
    sides = ("encoder", "decoder")
    each = {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * width}
    return {"d_model": width} | {f"{side}_{key}": value for side in sides for key, value in each.items()}


# Name -> class and configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "whisper-base": ("WhisperForConditionalGeneration", _WHISPER | _size(512, 6, 8)),
    "whisper-small": ("WhisperForConditionalGeneration", _WHISPER | _size(768, 12, 12)),
    "wav2vec2-base": ("Wav2Vec2ForCTC", _WAV2VEC2),
}
_SMALL = {
    "WhisperForConditionalGeneration": _size(64, 4, 2)
    | {"vocab_size": 200, "num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 32}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
    "Wav2Vec2ForCTC": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    }
    | {"conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
}


def model_and_batch(name: str, batch: int, small: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model with random weights in training mode, and inputs with labels."""
    torchvision_stub.prepare()
    import transformers

    kind, settings = MODELS[name]
    settings = settings | (_SMALL[kind] if small else {})
    config = getattr(transformers, kind.split("For")[0] + "Config")(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).train()
    if kind.startswith("Whisper"):
        positions = 2 * config.max_source_positions
        inputs = {"input_features": torch.randn(batch, config.num_mel_bins, positions)}
        length = config.max_target_positions // (2 if small else 4)
    else:
        inputs = {"input_values": torch.randn(batch, 8000 if small else 80000)}
        length = 6 if small else 40
    return model, inputs | {"labels": torch.randint(4, config.vocab_size, (batch, length))}


class Job:
    """One model in a process of its own."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.device = job, torch.device(job["device"])
        model, batch = model_and_batch(job["model"], job["batch"], job["small"])
        self.model = model.to(self.device)
        self.batch = {key: t.to(self.device) for key, t in batch.items()}
        self.row: dict[str, Any] = {"model": job["model"], "batch": job["batch"], "ways": {}}
        self.steps: dict[str, Callable[[], object]] = {}

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step_of(self, compile_: Callable[[torch.nn.Module], Any]) -> Callable[[], object]:
        """A training step of a copy of the model."""
        import numpy

        model = copy.deepcopy(self.model)
        compiled, count, parameters = compile_(model), iter(range(10**9)), list(model.parameters())

        def step() -> None:
            seed = next(count)
            for sow in (torch.manual_seed, random.seed, numpy.random.seed):
                sow(seed)
            with share.aside():  # a step may write its batch
                batch = {key: t.clone() for key, t in self.batch.items()}
            on_gpu = self.device.type == "cuda"
            with torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext():
                loss = compiled(**batch).loss
            loss.backward()
            for parameter in parameters:
                parameter.grad = None

        return step

    def compile(self) -> None:
        """First calls, and steps until the choices have been met."""
        for way, compile_ in WAYS.items():
            step, seconds = self.step_of(compile_), []
            try:
                for _ in range(WARM):
                    start = time.perf_counter()
                    step()
                    self.sync()
                    seconds.append(time.perf_counter() - start)
            except Exception as error:
                self.row["ways"][way] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
                continue
            self.row["ways"][way] = {"first_s": seconds[0], "warm_s": sum(seconds[1:])}
            self.steps[way] = step
            if way == "dynamotor":
                self.row |= {
                    "graphs": counters["capture"]["graphs"],
                    "breaks": dict(counters["breaks"]),
                    "fallbacks": dict(counters["fallback"]),
                    "reported_share": dict(counters["compiled share"]),
                }
            print(json.dumps({**self.row, "part": way}), flush=True)

    def time(self) -> None:
        """Milliseconds of a step of each way, and the ratios."""
        before = counters["capture"]["graphs"]
        rounds = turns(
            self.steps,
            seconds=self.job["seconds"],
            finish=self.sync,
            turn=TURN[self.device.type],
        )
        self.row["rounds"], self.row["graphs_while_timed"] = (
            len(rounds),
            counters["capture"]["graphs"] - before,
        )
        for way in self.steps:
            self.row["ways"][way]["ms"] = 1e3 * statistics.median(r[way] for r in rounds)
        if "dynamotor" in self.steps:
            for way in self.steps:
                self.row[f"over_{way}"] = quartiles([r[way] / r["dynamotor"] for r in rounds])

    def profiles(self) -> None:
        """The GPU's kernels in some steps of each way, and the host's time in them without waiting."""
        for way, step in self.steps.items():
            start = time.perf_counter()
            for _ in range(WARM):
                step()
            host = time.perf_counter() - start
            self.sync()
            whole = time.perf_counter() - start
            found = profile(step, self.device.type, WARM)
            self.row["ways"][way] |= {
                "host_ms": 1e3 * host / WARM,
                "whole_ms": 1e3 * whole / WARM,
                "profile": found,
            }

    def shares(self) -> None:
        """The compiled share of some steps, by both compilers' captures."""

        def program(compile_: Callable[..., Any]) -> None:
            step = self.step_of(compile_)
            for _ in range(SHARE_STEPS):
                step()

        for way, calls in share.shares(program):
            if isinstance(calls, Exception):
                self.row["ways"][way]["share_error"] = f"{type(calls).__name__}: {str(calls)[:300]}"
            else:
                self.row["ways"][way] |= {"share": calls.share, "outside": dict(calls.eager.most_common(12))}


def work(job: dict[str, Any]) -> None:
    """The process of a model: compiles, waits for a line, measures; a line of JSON after each part."""
    task = Job(job)
    for part in (task.compile, task.time, task.shares):
        part()
        if part == task.time and job["profile"]:
            task.profiles()
        print(json.dumps({**task.row, "part": part.__name__}), flush=True)
        sys.stdin.readline()


def measured(jobs: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """The rows of all models: compiled side by side, timed one after the other, shares side by side again."""
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        workers, rows = [], []
        for job in jobs:
            cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamotor-speech-"))
            folders = {"DYNAMOTOR": "dynamotor", "TORCHINDUCTOR": "inductor", "TRITON": "triton"}
            env = {f"{key}_CACHE_DIR": f"{cache}/{name}" for key, name in folders.items()}
            command = [sys.executable, "-m", "bench.speech", "--work", json.dumps(job)]
            workers.append(JsonWorker(command, {**os.environ, **env, "HF_HUB_OFFLINE": "1"}))
            rows.append({"model": job["model"]})
        for part in ("compile", "time", "shares"):
            for row, worker in zip(rows, workers):
                if part == "time":
                    worker.send(part)
                while row.get("part") != part and (message := worker.next(end)) is not None:
                    row.update(message)
            if part == "time":
                for worker in workers:
                    worker.send("shares")
        for row, worker in zip(rows, workers):
            tail = worker.end(0.0)
            if row.pop("part", "") != "shares":
                row["error"] = f"no end in time, or an error: {tail[-300:]}"
    return rows


def printed(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    lines = [f"{row['model']}: {row.get('graphs')} graphs, breaks {row.get('breaks')} {row.get('error', '')}"]
    for way, found in row.get("ways", {}).items():
        low, middle, high = row.get(f"over_{way}", (float("nan"),) * 3)
        times = (
            f"{found.get('ms', float('nan')):.1f} ms, first call {found.get('first_s', float('nan')):.1f} s"
        )
        about = found.get("error") or times
        part = f", share {found['share']:.1%}" if found.get("share") is not None else ""
        lines.append(f"  {way}: {about}{part}; dynamotor {middle:.3f} times as fast ({low:.3f}-{high:.3f})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="speech.json")
    parser.add_argument("--models", default="whisper-base,wav2vec2-base", help=", ".join(MODELS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--profile", action="store_true", help="also the kernels of a GPU")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the timing of each model")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds in all")
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(json.loads(options.work))
        return
    common = {key: getattr(options, key) for key in ("device", "batch", "small", "seconds", "profile")}
    rows = measured([common | {"model": name} for name in options.models.split(",")], options.timeout)
    found = {
        "command": " ".join(sys.argv[1:]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "rows": rows,
    }
    Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(map(printed, rows)))


if __name__ == "__main__":
    main()
