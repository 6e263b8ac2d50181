"""`python -m dynamotor bench --ddp`: models × modes × bandwidths of data-parallel training, all modes in
turns in one job.

On a CPU the ranks are joined by gloo; a bandwidth in Mbit/s puts each into a network namespace whose link is
shaped with `tc tbf` (needs root; such cells are skipped with that word elsewhere). On CUDA each rank has a
GPU and NCCL.

    python -m dynamotor bench --ddp --models bert4,resnet18 --bandwidths none,200,1000 --json ddp.json
    --picture ddp.svg
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.tool import write_json
from dynamotor.base.errors import UsageError

from .ddp_fit import Sample, calibrate
from .ddp_picture import lanes, timeline
from .ddp_worker import OURS
from .measure import quartiles
from .simulate import Link, Profile, simulate

MODES = ("eager", "inductor", *OURS, "step")
COLUMNS = (
    "model",
    "link",
    "mode",
    "ms",
    "vs eager",
    "spread",
    "vs inductor",
    "vs off",
    "exposed ms",
    "overlap",
    "first/last ready",
    "simulated ms",
    "note",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that only `--ddp` has; models, device, amp, batch, small, timeout and json are the
    bench's.
    """
    parser.add_argument(
        "--ddp", action="store_true", help="data-parallel training: models x modes x bandwidths"
    )
    parser.add_argument(
        "--modes", default="eager,inductor,ingraph,split,off", help="with --ddp: modes, comma-separated"
    )
    parser.add_argument("--bandwidths", default="none", help="with --ddp: Mbit/s or none, comma-separated")
    parser.add_argument("--rounds", type=int, default=15, help="with --ddp: rounds of all modes")
    parser.add_argument("--world", type=int, default=2, help="with --ddp: number of ranks")
    parser.add_argument("--bucket-mb", type=float, default=None, help="with --ddp: DDP's bucket_cap_mb")
    parser.add_argument("--picture", default=None, help="with --ddp: SVG of the bucket time lines")
    parser.add_argument(
        "--overlap", default=None, help="with --ddp: NAME.json, NAME.svg: communication beside computation"
    )
    parser.add_argument(
        "--update", action="store_true", help="with --ddp: steps with AdamW; mode step: compile_step's"
    )
    parser.add_argument(
        "--budget", type=float, default=None, help="with --ddp: seconds for everything; the rest is left out"
    )


# Links ------------------------------------------------------------------------------------------------------
def _sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def shaped(mbit: float, world: int) -> Iterator[list[list[str]]]:
    """A network namespace for each rank, joined by a switch, each sending at this rate; gives how a rank's
    command begins.
    """
    switch, *ranks = names = [f"dm{os.getpid() % 10000}{side}" for side in ("s", *range(world))]
    at_switch = ("ip", "netns", "exec", switch, "ip", "link")
    try:
        for name in names:
            _sh("ip", "netns", "add", name)
        _sh(*at_switch, "add", "bridge", "type", "bridge")
        _sh(*at_switch, "set", "bridge", "up")
        for i, name in enumerate(ranks):
            inside = ("ip", "netns", "exec", name)
            _sh(
                "ip",
                "link",
                "add",
                name,
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                name,
                "netns",
                switch,
            )
            _sh(*at_switch, "set", name, "master", "bridge", "up")
            _sh(*inside, "ip", "addr", "add", f"10.77.0.{i + 1}/24", "dev", name)
            _sh(*inside, "ip", "link", "set", name, "up")
            _sh(*inside, "ip", "link", "set", "lo", "up")
            _sh(
                *inside,
                "tc",
                "qdisc",
                "add",
                "dev",
                name,
                "root",
                "tbf",
                "rate",
                f"{mbit}mbit",
                "burst",
                "128kb",
                "latency",
                "400ms",
            )
        yield [["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={name}"] for name in ranks]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextlib.contextmanager
def link(name: str, world: int) -> Iterator[tuple[list[list[str]], str]]:
    """What each rank's command begins with, and where rank 0 listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    if name == "none":
        yield [[]] * world, f"tcp://127.0.0.1:{port}"
        return
    with shaped(float(name), world) as prefixes:
        yield prefixes, f"tcp://10.77.0.1:{port}"


# Cells ------------------------------------------------------------------------------------------------------
Progress = Callable[[dict[str, Any]], None]


def run_cell(
    job: dict[str, Any], where: str, timeout: float, progress: Progress = lambda cell: None
) -> dict[str, Any]:
    """Train one model with every mode over one link, in fresh processes; {"skipped": ...} where no link can
    be shaped. With an "error", whatever was known before it is there too. `progress` gets the cell each time
    that more is known."""
    try:
        with link(where, job["world"]) as (prefixes, init):
            commands = [
                [
                    *prefix,
                    sys.executable,
                    "-m",
                    "bench.ddp_worker",
                    json.dumps(dict(job, rank=rank, init=init)),
                ]
                for rank, prefix in enumerate(prefixes)
            ]
            return _run_ranks(commands, timeout, progress)
    except (subprocess.CalledProcessError, FileNotFoundError, PermissionError) as error:
        text = getattr(error, "stderr", "") or str(error)
        return {"skipped": f"no shaped link here: {text.strip().splitlines()[-1] if text.strip() else error}"}


def _run_ranks(commands: list[list[str]], timeout: float, progress: Progress) -> dict[str, Any]:
    environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    end = time.monotonic() + timeout
    cell: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        printed, complaints = Path(folder, "out"), Path(folder, "err")
        with printed.open("a") as out, complaints.open("a") as err:
            ranks = [
                subprocess.Popen(c, env=environment, stdout=out if i == 0 else err, stderr=err)
                for i, c in enumerate(commands)
            ]
        seen = 0
        try:
            while True:
                codes = [rank.poll() for rank in ranks]
                seen = _take_lines(printed.read_bytes(), seen, cell, progress)
                if all(code == 0 for code in codes):
                    return cell
                if any(codes) or time.monotonic() > end:
                    last = (complaints.read_text(errors="replace").strip().splitlines() or ["no message"])[-1]
                    return cell | {
                        "error": (last if any(codes) else f"no more within {timeout:.0f} s; {last}")[:500]
                    }
                time.sleep(0.2)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def _take_lines(printed: bytes, seen: int, cell: dict[str, Any], progress: Progress) -> int:
    """Put what rank 0 has printed since `seen` into the cell; gives the place up to which it was read."""
    end = printed.rfind(b"\n") + 1
    for line in printed[seen:end].splitlines():
        if line.startswith(b"{"):
            cell |= json.loads(line)
            progress(cell)
    return max(seen, end)


def rows_of(
    job: dict[str, Any], where: str, cell: dict[str, Any], fitted: Link | None
) -> list[dict[str, Any]]:
    """One row a mode."""
    about = {"model": job["model"], "link": where}
    rows = [
        {**about, "mode": mode, "note": text, "ok": mode not in OURS}
        for mode, text in cell.get("errors", {}).items()
    ]
    if "times" not in cell or "error" in cell or "skipped" in cell:
        note = cell.get("error") or cell.get("skipped", "nothing")
        rows.insert(0, {**about, "mode": "-", "note": note, "ok": "skipped" in cell})
    if "times" not in cell:
        return rows
    eager = cell["times"].get("eager", {}).get("step")
    for mode, times in cell["times"].items():
        step = times["step"]
        row: dict[str, Any] = {**about, "mode": mode, "note": "", "ok": True}
        row["ms"] = _median(step) * 1e3
        if eager:
            row["low"], row["vs_eager"], row["high"] = quartiles([e / s for e, s in zip(eager, step)])
        for other in ("inductor", "off"):
            if other in cell["times"]:
                row[f"vs_{other}"] = _median([o / s for o, s in zip(cell["times"][other]["step"], step)])
        profile = cell.get("profile", {}).get(mode)
        if times["alone"]:
            row["exposed_ms"] = max(0.0, _median([s - a for s, a in zip(step, times["alone"])])) * 1e3
        elif profile:
            row["exposed_ms"] = profile["collectives_ms"] - profile["both_ms"]
        if profile:
            row["overlap"] = profile["share"]
        stamps = [s for s in cell.get("stamps", {}).get(mode, ()) if "ready" in s]
        if len(stamps) > 1:
            row["ready_fraction"] = stamps[0]["ready"] / stamps[-1]["ready"]
        if mode in (*OURS, "step") and not cell["compiled"].get(mode):
            row |= {"ok": False, "note": f"not compiled in this mode: {cell['compiled']} {cell['fallback']}"}
        if mode == "ingraph" and fitted is not None and where != "none" and cell.get("stamps"):
            row["simulated_ms"] = predicted(cell, fitted.at(float(where) * 1e6 / 8, 0.0), job["world"]) * 1e3
        rows.append(row)
    return rows


def predicted(cell: dict[str, Any], link_: Link, world: int) -> float:
    """Seconds of a step by the simulator, from the step without communication and the buckets' positions in
    it.
    """
    times, stamps = (
        cell["times"]["ingraph"],
        cell["stamps"]["ingraph"],
    )  # on a CPU alone: links of GPUs are not shaped
    forward = _median(times["forward"])
    backward = _median(times["alone"]) - forward
    scale = backward / max(s["ready"] for s in stamps)
    profile = Profile(forward, backward, tuple(s["ready"] * scale for s in stamps), tuple(cell["nbytes"]))
    return simulate(profile, link_, world).seconds


def _median(values: list[float]) -> float:
    return quartiles(values)[1]


def calibration(cells: list[tuple[str, dict[str, Any]]], world: int) -> Link | None:
    """The link fitted to the measured all-reduces of shaped cells; with three bandwidths or more the middle
    one is held out.
    """
    samples = {
        where: [Sample(world, n, float(where) * 1e6 / 8, 0.0, s) for n, s in cell["link"]]
        for where, cell in cells
        if where != "none" and "link" in cell
    }
    if not samples:
        return None
    order = sorted(samples, key=float)
    held_out = order[len(order) // 2] if len(order) > 2 else None
    fitted = [s for where in order if where != held_out for s in samples[where]]
    return calibrate(fitted, samples[held_out] if held_out else ())


def table_row(row: dict[str, Any]) -> list[str]:
    """A row of the printed table."""

    def number(key: str, form: str = ".1f") -> str:
        return format(row[key], form) if row.get(key) is not None else "-"

    spread = f"{row['low']:.2f}-{row['high']:.2f}" if "low" in row else "-"
    where = "unshaped" if row["link"] == "none" else f"{row['link']} Mbit/s"
    return [
        row["model"],
        where,
        row["mode"],
        number("ms"),
        number("vs_eager", ".3f"),
        spread,
        number("vs_inductor", ".3f"),
        number("vs_off", ".3f"),
        number("exposed_ms", ".2f"),
        number("overlap", ".2f"),
        number("ready_fraction", ".2f"),
        number("simulated_ms"),
        row["note"][:90],
    ]


def render(rows: list[list[str]]) -> str:
    """A plain text table."""
    lines = [list(COLUMNS), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines)


class Report:
    """Everything that is known so far, written whenever there is more."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.cells: list[tuple[dict[str, Any], str, dict[str, Any]]] = []

    @property
    def link(self) -> Link | None:
        return calibration([(where, cell) for _, where, cell in self.cells], self.args.world)

    def rows(self) -> list[dict[str, Any]]:
        fitted = self.link
        return [row for job, where, cell in self.cells for row in rows_of(job, where, cell, fitted)]

    def write(self) -> None:
        """The JSON file, and the pictures that were asked for."""
        args, fitted = self.args, self.link
        about = {
            "command": " ".join(sys.argv[1:]),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name()
            if args.device == "cuda"
            else torch.backends.cpu.get_cpu_capability(),
        }
        cells = [{"model": job["model"], "where": where, **cell} for job, where, cell in self.cells]
        small = [{key: value for key, value in cell.items() if key != "profile"} for cell in cells]
        link = asdict(fitted) if fitted else None
        write_json(args.json, {**about, "rows": self.rows(), "link": link, "cells": small})
        if args.picture:
            _put(
                args.picture,
                timeline([(f"{c['model']}, {c['where']}", c["stamps"]) for c in cells if c.get("stamps")]),
            )
        if args.overlap:
            found = [{"model": c["model"], "modes": c["profile"]} for c in cells if c.get("profile")]
            _put(
                f"{args.overlap}.json",
                json.dumps({**about, "batch": args.batch, "amp": args.amp, "cells": found}),
            )
            _put(f"{args.overlap}.svg", lanes([(c["model"], c["modes"]) for c in found]))


def _put(path: str, text: str) -> None:
    Path(path).write_text(text + "\n" * (not text.endswith("\n")))


def run_cells(args: argparse.Namespace, names: list[str], modes: list[str], report: Report) -> None:
    """One cell after the other; each has its share of the time that is left."""
    end = time.monotonic() + args.budget if args.budget else None
    pairs = [(name, where) for name in names for where in args.bandwidths.split(",")]
    for i, (name, where) in enumerate(pairs):
        seconds = (
            args.timeout if end is None else min(args.timeout, (end - time.monotonic()) / (len(pairs) - i))
        )
        job = {
            "model": name,
            "small": args.small,
            "batch": args.batch,
            "modes": modes,
            "rounds": args.rounds,
            "world": args.world,
            "device": args.device,
            "amp": args.amp,
            "bucket_mb": args.bucket_mb,
            "update": args.update,
            "threads": 1,
            "timeout": max(seconds, 10.0),
            "profile": bool(args.overlap),
            "deadline": None if end is None else time.time() + seconds - 5.0,
        }
        print(f"{name}, {where}: {seconds:.0f} s at most ...", file=sys.stderr, flush=True)
        report.cells.append((job, where, {}))

        def known(cell: dict[str, Any], job: dict[str, Any] = job, where: str = where) -> None:
            report.cells[-1] = (job, where, cell)
            report.write()

        known(run_cell(job, where, seconds, known))
        for row in rows_of(job, where, report.cells[-1][2], None):
            print("  ".join(table_row(row)), file=sys.stderr, flush=True)


def main(args: argparse.Namespace) -> int:
    """Run the cells, print the table, write JSON and the pictures; 0 when every cell that could run did what
    it should.
    """
    modes = [m for m in args.modes.split(",") if m]
    known = MODES if args.update else MODES[:-1]
    if bad := [m for m in modes if m not in known]:
        raise UsageError("DM712", f"unknown mode {bad[0]!r}", cure="use some of " + ", ".join(known))
    report = Report(args)
    run_cells(
        args,
        ["bert4", "resnet18"] if args.models == "twelve" else [m for m in args.models.split(",") if m],
        modes,
        report,
    )
    rows, fitted = report.rows(), report.link
    print(render([table_row(row) for row in rows]))
    if fitted is not None and fitted.error is not None:
        print(
            f"\nlink: efficiency {fitted.efficiency:.2f}, {fitted.overhead * 1e6:.0f} µs a message, mean error of all-reduces "
            f"held out {fitted.error:.0%}; 'simulated' is computed from it, not measured"
        )
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":  # python -m bench.ddp FILE: the table of an earlier run, finished or not
    print(render([table_row(row) for row in json.loads(Path(sys.argv[1]).read_text())["rows"]]))
