"""The fuzzers by name: what a worker runs for a chunk, and which chunks there are."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import fusion, report
from .program import Program
from .reduce import kind, reduce
from .trial import Verdict, tally

Job = dict[str, Any]
Answer = dict[str, Any]
MOST_REDUCED = 3  # findings of one chunk that are cut down; the others are only counted


def run(job: Job) -> Answer:
    """Run a chunk in this process."""
    torch.set_num_threads(1)
    return _RUN[job["fuzzer"]](job)


def run_fusion(job: Job) -> Answer:
    """Programs start .. start + count for one target."""
    target, until = job["target"], time.monotonic() + min(job.get("seconds", 60.0), 100.0)
    programs = [
        fusion.generated(job["seed"], n, target) for n in range(job["start"], job["start"] + job["count"])
    ]
    verdicts = fusion.judged(programs, target)
    answer = counted(verdicts, target)
    kinds: set[str] = set()
    for program, verdict in zip(programs, verdicts, strict=True):
        first = kind(verdict.problems[0]) if verdict.problems else ""
        if first and first not in kinds and len(kinds) < MOST_REDUCED:
            kinds.add(first)
            seconds = max(5.0, (until - time.monotonic()) / MOST_REDUCED)
            small = reduce(program, lambda some: fusion.problems(some, target), seconds)
            again = fusion.problems([small], target)[0]
            answer["findings"].append(finding(small, again or verdict.problems))
    return answer


def counted(verdicts: list[Verdict], what: str) -> Answer:
    """The answer of a chunk without its findings."""
    refused = Counter(reason for v in verdicts for reason in set(v.refused))
    return {
        "tally": {f"{what} {k}": n for k, n in tally(verdicts).items()},
        "refused": refused,
        "findings": [],
    }


def finding(program: Program, problems: list[str]) -> dict[str, Any]:
    """What is reported. The signature names the way of failing and the ops; each is told once."""
    ops = sorted(
        {name for step in program.steps for name in re.findall(r"\w+(?=\()|[-+*/@%<>=&|^~]+|\[", step.text)}
    )
    target = "triton" if program.target == "triton" else "cpp"
    text = f"# {program.name} {program.target}: {problems[0]}\n{report.test_of(program, problems)}"
    return {
        "signature": f"{target} {kind(problems[0])} {' '.join(ops)}",
        "name": program.name,
        "target": program.target,
        "problems": problems[:3],
        "text": text,
    }


def crash_finding(job: Job, how: str, tail: str) -> dict[str, Any]:
    """The finding of a program that ended its process."""
    name = f"{job['seed']}:{job['start']}"
    text = f"# {job['fuzzer']} {name} {job.get('target', '')}: {how}\n# {tail[-300:]}"
    if job["fuzzer"] == "fusion":
        program = fusion.generated(job["seed"], job["start"], job["target"])
        text += "\n" + report.test_of(program, [how])
    return {"signature": f"{job['fuzzer']} {how} {name}", "name": name, "problems": [how], "text": text}


def fusion_chunks(seed: int, count: int, names: list[str]) -> Iterator[Job]:
    """Chunks of one target after another; few for the interpreter, which is slow."""
    start = 0
    for name in itertools.cycle(names):
        if start >= count:
            return
        size = min(count - start, fusion.BATCH if name != "triton" else fusion.SLOW_BATCH)
        yield {"fuzzer": "fusion", "seed": seed, "start": start, "count": size, "target": name}
        start += size


def chunks(name: str, seed: int, count: int, targets: list[str]) -> Iterator[Job]:
    """The chunks of a fuzzer, without end unless `count` programs are reached."""
    return fusion_chunks(seed, count, targets)


_RUN: dict[str, Callable[[Job], Answer]] = {"fusion": run_fusion}
