"""The fuzzers by name: the function that a worker runs for a chunk, and the list of chunks."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

import bench.verification  # noqa: F401  # registers the costly checks
import dynamotor
from dynamotor.base.events import counters

from . import (
    distributions,
    fusion,
    invalid,
    late,
    modules,
    numbers,
    objects,
    observers,
    offsets,
    operators,
    options,
    packages,
    programs,
    report,
    shapes,
    sizes,
    steps,
    subclasses,
    threads,
    writes,
)
from .compare import AROUND
from .databases import module_infos, operator_infos
from .program import Program
from .python_program import write
from .reduce import kind, reduce
from .trial import UNBATCHED, Trial, Verdict, examine, tally

Job = dict[str, Any]
Answer = dict[str, Any]
Chunks = Callable[[int, int, list[str]], Iterator[Job]]
MOST_OF_A_MODULE = 150  # trials of one chunk
MOST_REDUCED = 3  # findings of one chunk that are cut down; the others are only counted


def run(job: Job) -> Answer:
    """Run a chunk in this process."""
    torch.set_num_threads(1)
    return FUZZERS[job["fuzzer"]][0](job)


def run_fusion(job: Job) -> Answer:
    """Programs start .. start + count for one target."""
    target, until = job["target"], time.monotonic() + _spare(job)
    generated = GENERATORS[job["fuzzer"]]
    programs = [generated(job["seed"], n, target) for n in range(job["start"], job["start"] + job["count"])]
    verdicts = fusion.judged(programs, target)
    answer = counted(verdicts, target)
    kinds: set[str] = set()
    for program, verdict in zip(programs, verdicts, strict=True):
        first = kind(verdict.problems[0]) if verdict.problems else ""
        if first and first not in kinds and len(kinds) < MOST_REDUCED:
            kinds.add(first)
            seconds = max(3.0, (until - time.monotonic()) / MOST_REDUCED)
            small = reduce(program, lambda some: fusion.problems(some, target), seconds)
            again = fusion.problems([small], target)[0]
            answer["findings"].append(finding(small, again or verdict.problems))
    return answer


def _spare(job: Job) -> float:
    """Seconds that a chunk with findings may take, cutting them down included."""
    return min(job.get("seconds", 60.0), job.get("patience", 100.0))


def counted(verdicts: list[Verdict], what: str) -> Answer:
    """The answer of a chunk without its findings."""
    refused = Counter(reason for v in verdicts for reason in set(v.refused))
    return {
        "tally": {f"{what} {k}": n for k, n in tally(verdicts).items()},
        "refused": refused,
        "findings": [],
    }


def finding(program: Program, problems: list[str]) -> dict[str, Any]:
    """A finding. The signature names the way of failing and the ops; each is told once."""
    ops = sorted(
        {name for step in program.steps for name in re.findall(r"\w+(?=\()|[-+*/@%<>=&|^~]+|\[", step.text)}
    )
    target = program.target if program.target in fusion.SLOW else "cpp"
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
    what = " ".join(str(job[key]) for key in ("dtype", "training", "target") if key in job)
    text = "\n# ".join([f"# {job['fuzzer']} {name} {what}: {how}", *tail[-600:].splitlines()])
    if job["fuzzer"] in GENERATORS:
        program = GENERATORS[job["fuzzer"]](job["seed"], job["start"], job["target"])
        text += "\n" + report.test_of(program, [how])
    return {"signature": f"{job['fuzzer']} {how} {name}", "name": name, "problems": [how], "text": text}


def fusion_chunks(seed: int, count: int, names: list[str]) -> Iterator[Job]:
    """Chunks of one target after another; few for the interpreter, which is slow."""
    start = 0
    for name in itertools.cycle(names):
        if start >= count:
            return
        size = min(count - start, fusion.SLOW.get(name, fusion.BATCH))
        yield {"fuzzer": "fusion", "seed": seed, "start": start, "count": size, "target": name}
        start += size


def writes_chunks(seed: int, count: int, names: list[str]) -> Iterator[Job]:
    """As those of fusion; each third one calls its programs at many sizes."""
    for n, job in enumerate(fusion_chunks(seed, count, names)):
        changing = n % 3 == 2 and job["target"] not in UNBATCHED
        yield {**job, "fuzzer": "writes at sizes" if changing else "writes"} | (
            {"count": min(job["count"], FAMILIES)} if changing else {}
        )


def run_operators(job: Job) -> Answer:
    """Ops start .. start + count of the database in one dtype; without a dtype, compositions by seed."""
    numbers = range(job["start"], job["start"] + job["count"])
    if job["dtype"]:
        made = [t for n in numbers for t in operators.trials(n, job["dtype"])]
    else:
        made = [t for n in numbers if (t := operators.composition(job["seed"] * 1_000_003 + n)) is not None]
    return _told_by_name(made, job, job["dtype"] or "composed")


def operators_chunks(seed: int, count: int, names: list[str]) -> Iterator[Job]:
    """The whole database in a random order, then compositions."""
    cells = [(n, dtype) for n in range(0, len(operator_infos()), 3) for dtype in operators.DTYPES]
    random.Random(seed).shuffle(cells)
    for (start, dtype), target in zip(cells[:count], itertools.cycle(names)):
        size = min(3, len(operator_infos()) - start)
        yield {
            "fuzzer": "operators",
            "seed": seed,
            "start": start,
            "count": size,
            "dtype": dtype,
            "target": target,
        }
    for start, target in zip(range(0, count - len(cells), 24), itertools.cycle(names)):
        yield {
            "fuzzer": "operators",
            "seed": seed,
            "start": start,
            "count": 24,
            "dtype": "",
            "target": target,
        }


def run_modules(job: Job) -> Answer:
    """A module of the database in one dtype and mode: its trials, or a draw from them where there are
    thousands (LinearCrossEntropyLoss has 2,571).
    """
    numbers = range(job["start"], job["start"] + job["count"])
    made = [t for n in numbers for t in modules.trials(n, job["dtype"], job["training"])]
    if len(made) > MOST_OF_A_MODULE:
        made = random.Random(job["seed"]).sample(made, MOST_OF_A_MODULE)
    return _told_by_name(made, job, f"{job['dtype']} {'training' if job['training'] else 'evaluation'}")


def modules_chunks(seed: int, count: int, names: list[str]) -> Iterator[Job]:
    """The whole database in a random order."""
    cells = list(itertools.product(range(len(module_infos())), modules.DTYPES, (True, False)))
    random.Random(seed).shuffle(cells)
    targets = itertools.cycle([name for name in names if name != "cuda"])  # modules are made on the CPU
    for (start, dtype, training), target in zip(cells[:count], targets):
        yield {
            "fuzzer": "modules",
            "seed": seed,
            "start": start,
            "count": 1,
            "dtype": dtype,
            "training": training,
            "target": target,
        }


def _told_by_name(made: list[Trial], job: Job, what: str) -> Answer:
    """The answer for trials that cannot be cut down: their names say how to run them again."""
    try:
        verdicts = examine(made, job["target"])
    finally:
        dynamotor.reset()
    answer = counted(verdicts, what)
    for verdict in verdicts:
        if verdict.problems:
            name, first = verdict.trial.name, verdict.problems[0]
            lines = [f"# {first}", *(f"# {line}" for line in verdict.trial.source.rstrip().splitlines())]
            lines += [f"assert fuzz.{job['fuzzer']}.is_right({name!r}, {job['target']!r})", ""]
            answer["findings"].append(
                {
                    "signature": f"{job['fuzzer']} {name.split()[0]} {kind(first)}",
                    "name": name,
                    "target": job["target"],
                    "problems": verdict.problems[:3],
                    "text": "\n".join(lines),
                }
            )
    return answer


def run_shapes(job: Job) -> Answer:
    """Predictions for the ops of tensor programs, or of the database's trials in a dtype."""
    numbers, seen = range(job["start"], job["start"] + job["count"]), shapes.Foretold()
    if job["dtype"]:
        runs = [trial.prepare(False) for n in numbers for trial in operators.trials(n, job["dtype"])]
    else:
        runs = [fusion.trial(fusion.generated(job["seed"], n, "")).prepare(False) for n in numbers]
    AROUND.append(lambda: seen)
    try:
        for run_once in runs:
            run_once()
    finally:
        AROUND.pop()
    found = [
        {
            "signature": f"shapes {op}",
            "name": f"{job['seed']}:{job['start']}",
            "problems": [problem],
            "text": f"# {op}: {problem}\n",
        }
        for op, problem in seen.wrong.items()
    ]
    tally = Counter({"ops right": seen.count - len(found), "ops foretold wrong": len(found)})
    return {"tally": tally, "refused": seen.refused, "findings": found}


def shapes_chunks(seed: int, count: int, names: list[str]) -> Iterator[Job]:
    """The operator database, then tensor programs without end."""
    for start, dtype in itertools.product(range(0, len(operator_infos()), 6), operators.DTYPES):
        size = min(6, len(operator_infos()) - start)
        yield {"fuzzer": "shapes", "seed": seed, "start": start, "count": size, "dtype": dtype}
    for start in range(0, count, 100):
        yield {"fuzzer": "shapes", "seed": seed, "start": start, "count": 100, "dtype": ""}


FAMILIES = 16  # programs of one chunk, each called at many sizes


def run_sizes(job: Job) -> Answer:
    """Tensor programs start .. start + count for one target, each at many sizes."""
    target, until = job["target"], time.monotonic() + min(job.get("seconds", 60.0), 100.0)
    numbers = range(job["start"], job["start"] + job["count"])
    kept, generated = job["fuzzer"] == "kept", GENERATORS.get(job["fuzzer"], fusion.generated)
    programs = [generated(job["seed"], n, target) for n in numbers]
    families, seen = sizes.judged(programs, target, kept)
    answer: Answer = {"tally": Counter(), "refused": seen, "findings": []}
    told: set[str] = set()
    for n, family in zip([*numbers, *numbers], families):
        answer["tally"][f"{target} {'wrong' if family.problems else 'right'}"] += 1
        way = kind(family.problems[0]) if family.problems else ""
        if way and way not in told and len(told) < MOST_REDUCED:
            told.add(way)
            program = generated(job["seed"], n, target)
            seconds = max(5.0, (until - time.monotonic()) / MOST_REDUCED)
            small = reduce(program, lambda some: sizes.problems(some, target, kept), seconds)
            found = sizes.problems([small], target, kept)[0] or family.problems
            told_ops = finding(small, found)
            text = f"# {job['seed']}:{n} {target}\n{sizes.test_of(small, found)}"
            answer["findings"].append(
                {**told_ops, "signature": "sizes " + told_ops["signature"], "text": text}
            )
    return answer


def sizes_chunks(seed: int, count: int, names: list[str]) -> Iterator[Job]:
    """Chunks of one C++ target after another."""
    targets = itertools.cycle([name for name in names if name not in UNBATCHED])
    for start in itertools.takewhile(lambda n: n < count, itertools.count(0, FAMILIES)):
        size = min(FAMILIES, count - start)
        yield {"fuzzer": "sizes", "seed": seed, "start": start, "count": size, "target": next(targets)}


def kept_chunks(seed: int, count: int, names: list[str]) -> Iterator[Job]:
    """Small chunks of this machine's own target: each program builds its libraries."""
    for start in itertools.takewhile(lambda n: n < count, itertools.count(0, 4)):
        yield {"fuzzer": "kept", "seed": seed, "start": start, "count": 4, "target": names[0]}


PROGRAMS = 40  # Python programs of one chunk


def run_programs(job: Job) -> Answer:
    """Random Python programs start .. start + count."""
    answer: Answer = {"tally": Counter(), "refused": Counter(), "findings": []}
    until, told = time.monotonic() + _spare(job), set()
    for n in range(job["start"], job["start"] + job["count"]):
        program = write(job["seed"] * 1_000_003 + n)
        try:
            found = programs.problems(program)
        except programs.Endless:
            answer["tally"]["endless in eager"] += 1
            continue
        except programs.Refused as refused:
            answer["tally"]["refused"] += 1
            answer["refused"][str(refused)] += 1
            continue
        answer["tally"]["wrong" if found else "right"] += 1
        way = programs.kind(found[0]) if found else ""
        if found and way not in told:
            told.add(way)
            small = programs.reduce(program, _problems_of_smaller, until)
            found = programs.problems(small) or found
            shape = re.sub(r"\d+", "", "".join(small.source().split("FLAG\n")[-1].split()))
            answer["findings"].append(
                {
                    "signature": f"programs {way} {shape}",
                    "name": f"{job['seed']}:{n}",
                    "problems": found,
                    "text": f"# {job['seed']}:{n}\n{programs.test_of(small, found)}",
                }
            )
    return answer


def _problems_of_smaller(program: Any) -> list[str]:
    """A smaller program may lack what ended its loop."""
    try:
        return programs.problems(program)
    except (programs.Endless, programs.Refused):
        return []


def run_objects(job: Job) -> Answer:
    """Statements over objects that are made inside of the function, and over those of outside."""
    answer: Answer = {"tally": Counter(), "refused": {}, "findings": []}
    for n in range(job["start"], job["start"] + job["count"]):
        lines, outside = objects.write(job["seed"] * 1_000_003 + n // 2), bool(n % 2)
        found = objects.problems(lines, outside)
        answer["tally"]["wrong" if found else "right"] += 1
        if found:
            small = objects.reduce(lines, outside)
            found = objects.problems(small, outside) or found
            statements = " ; ".join(re.sub(r"\b[abc]\b", "_", line) for line in small[len(objects.NAMES) :])
            answer["findings"].append(
                {
                    "signature": f"objects {statements}",
                    "name": f"{job['seed']}:{n}",
                    "problems": found,
                    "text": f"# {found[0]}\nassert fuzz.objects.problems({small!r}, {outside}) == []\n",
                }
            )
    dynamotor.reset()
    return answer


def run_late(job: Job) -> Answer:
    """Code of backwards and regions, over objects that change; the tally is of their changes."""
    answer: Answer = {"tally": Counter(), "refused": Counter(), "findings": []}
    for n in range(job["start"], job["start"] + job["count"]):
        program, backend = late.write(job["seed"] * 1_000_003 + n), late.BACKENDS[n % len(late.BACKENDS)]
        found = late.problems(program, backend, lambda code: answer["refused"].update([code]))
        if not found:
            answer["tally"]["right"] += program.changes
            continue
        answer["tally"]["wrong"] += 1
        small = late.reduce(program, backend)
        found = late.problems(small, backend) or found
        places = " ; ".join(f"{one.name}: {one.read}, {one.effect}" for one in small.places)
        answer["findings"].append(
            {
                "signature": f"late {places}",
                "name": f"{job['seed']}:{n}",
                "problems": found,
                "text": f"# {found[0][:300]}\nassert fuzz.late.problems({small!r}, {backend!r}) == []\n",
            }
        )
    dynamotor.reset()
    return answer


def run_subclasses(job: Job) -> Answer:
    """Programs over tensors of wrapper subclasses."""
    answer: Answer = {"tally": Counter(), "refused": Counter(), "findings": []}
    for n in range(job["start"], job["start"] + job["count"]):
        program = subclasses.write(job["seed"] * 1_000_003 + n)
        backend = subclasses.BACKENDS[n % len(subclasses.BACKENDS)]
        before = counters["fallback"].copy()
        found = subclasses.problems(program, backend)
        answer["refused"].update((counters["fallback"] - before).keys())
        answer["tally"]["wrong" if found else "right"] += 1
        if found:
            small = subclasses.reduce(program, backend)
            answer["findings"].append(
                {
                    "signature": f"subclasses {' ; '.join(small.lines)}",
                    "name": f"{job['seed']}:{n}",
                    "problems": found,
                    "text": f"# {found[0][:300]}\nassert fuzz.subclasses.problems({small!r}, {backend!r}) == []\n",
                }
            )
    dynamotor.reset()
    return answer


def run_threads(job: Job) -> Answer:
    """Functions that are called from several threads, children or processes."""
    answer: Answer = {"tally": Counter(), "refused": {}, "findings": []}
    for n in range(job["start"], job["start"] + job["count"]):
        seed = job["seed"] * 1_000_003 + n
        way = threads.way_of(seed)
        found = threads.problems(way, seed)
        answer["tally"][f"{way} {'wrong' if found else 'right'}"] += 1
        if found:
            text = f"# {found[0]}\nassert fuzz.threads.problems({way!r}, {seed}) == []\n"
            way_of_failing = kind(found[0].partition(": ")[2])
            answer["findings"].append(
                {
                    "signature": f"threads {way} {way_of_failing}",
                    "name": f"{job['seed']}:{n}",
                    "problems": found[:3],
                    "text": text,
                }
            )
    return answer


def run_steps(job: Job) -> Answer:
    """Training steps start .. start + count; the tally is of the changes between them."""
    answer: Answer = {"tally": Counter(), "refused": Counter(), "findings": []}
    for n in range(job["start"], job["start"] + job["count"]):
        seed = job["seed"] * 1_000_003 + n
        backend, before = steps.backend_of(seed), Counter(counters["fallback"])
        found = steps.problems(seed, backend)
        answer["refused"] += Counter(counters["fallback"]) - before
        if not found:
            answer["tally"][f"{backend} right"] += sum(map(len, steps.changes(seed)))
        else:
            answer["tally"][f"{backend} wrong"] += 1
            between = steps.reduce(seed, backend)
            text = f"# {steps.describe(seed)}: {found[0]}\n"
            text += f"assert fuzz.steps.problems({seed}, {backend!r}, {between}) == []\n"
            answer["findings"].append(
                {
                    "signature": f"steps {' '.join(itertools.chain(*between))}",
                    "name": f"{job['seed']}:{n}",
                    "problems": found,
                    "text": text,
                }
            )
        dynamotor.reset()
    return answer


# Fuzzers of one program a seed: its faults, and how many a chunk has.
SEEDED: dict[str, tuple[Callable[[int], list[str]], int]] = {
    "observers": (observers.problems, 40),
    "distributions": (distributions.problems, 20),
    "offsets": (offsets.problems, 20),
    "numbers": (numbers.problems, 200),
    "options": (options.problems, 10),
    "invalid": (invalid.problems, 20),
    "packages": (packages.problems, 40),
}


def run_seeded(job: Job) -> Answer:
    """Programs start .. start + count of a fuzzer of `SEEDED`."""
    answer: Answer = {"tally": Counter(), "refused": {}, "findings": []}
    name, seeds = job["fuzzer"], range(job["start"], job["start"] + job["count"])
    problems, _ = SEEDED[name]
    for seed in (job["seed"] * 1_000_003 + n for n in seeds):
        found = problems(seed)
        answer["tally"]["wrong" if found else "right"] += 1
        if found:
            first, *lines = found[0].splitlines()
            text = "\n# ".join([f"# {first}", *lines])
            answer["findings"].append(
                {
                    "signature": f"{name} {kind(first)} {' '.join(lines)}",
                    "name": f"{job['seed']}:{seed}",
                    "problems": found[:3],
                    "text": f"{text}\nassert fuzz.{name}.problems({seed}) == []\n",
                }
            )
    dynamotor.reset()
    return answer


def in_chunks(size: int, name: str) -> Chunks:
    """Chunks of so many programs of a fuzzer."""

    def chunks(seed: int, count: int, names: list[str]) -> Iterator[Job]:
        for start in range(0, count, size):
            yield {"fuzzer": name, "seed": seed, "start": start, "count": min(size, count - start)}

    return chunks


# Fuzzers of tensor programs: the n-th program of a seed.
GENERATORS = {
    "fusion": fusion.generated,
    "writes": writes.generated,
    "writes at sizes": writes.generated,
}
FUZZERS: dict[str, tuple[Callable[[Job], Answer], Chunks]] = {
    "fusion": (run_fusion, fusion_chunks),
    "writes": (run_fusion, writes_chunks),
    "writes at sizes": (run_sizes, writes_chunks),
    "operators": (run_operators, operators_chunks),
    "modules": (run_modules, modules_chunks),
    "programs": (run_programs, in_chunks(PROGRAMS, "programs")),
    "shapes": (run_shapes, shapes_chunks),
    "sizes": (run_sizes, sizes_chunks),
    "kept": (run_sizes, kept_chunks),
    "threads": (run_threads, in_chunks(4, "threads")),
    "objects": (run_objects, in_chunks(200, "objects")),
    "steps": (run_steps, in_chunks(20, "steps")),
    "late": (run_late, in_chunks(40, "late")),
    "subclasses": (run_subclasses, in_chunks(100, "subclasses")),
    **{name: (run_seeded, in_chunks(size, name)) for name, (_, size) in SEEDED.items()},
}


def chunks(name: str, seed: int, count: int, targets: list[str]) -> Iterator[Job]:
    """The chunks of a fuzzer, in an order that the seed decides."""
    return FUZZERS[name][1](seed, count, targets)
