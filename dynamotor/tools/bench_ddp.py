"""`python -m dynamotor bench --ddp`: models × modes × bandwidths of data-parallel training, all modes in turns in one job.

On a CPU the ranks are joined by gloo; a bandwidth in Mbit/s puts each into a network namespace whose link is shaped with `tc tbf`
(needs root; such cells are skipped with that word elsewhere). On CUDA each rank has a GPU and NCCL.

    python -m dynamotor bench --ddp --models bert4,resnet18 --bandwidths none,200,1000 --json ddp.json --picture ddp.svg
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
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..base.errors import UsageError
from ..distributed.simulate import Link, Profile, Sample, calibrate, simulate
from .bench_ddp_worker import OURS
from .ddp_picture import timeline
from .measure import quartiles

MODES = ("eager", "inductor", *OURS)
COLUMNS = ("model", "link", "mode", "ms", "vs eager", "spread", "vs inductor", "vs off", "exposed ms", "first/last ready",
           "simulated ms", "note")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that only `--ddp` has; models, device, amp, batch, small, timeout and json are the bench's."""
    parser.add_argument("--ddp", action="store_true", help="data-parallel training: models x modes x bandwidths")
    parser.add_argument("--modes", default="eager,inductor,ingraph,split,off", help="with --ddp: modes, comma-separated")
    parser.add_argument("--bandwidths", default="none", help="with --ddp: Mbit/s or none, comma-separated")
    parser.add_argument("--rounds", type=int, default=15, help="with --ddp: rounds of all modes")
    parser.add_argument("--world", type=int, default=2, help="with --ddp: number of ranks")
    parser.add_argument("--bucket-mb", type=float, default=None, help="with --ddp: DDP's bucket_cap_mb")
    parser.add_argument("--picture", default=None, help="with --ddp: SVG of the bucket time lines")


# Links -------------------------------------------------------------------------------------------------------------------------
def _sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def shaped(mbit: float, world: int) -> Iterator[list[list[str]]]:
    """A network namespace for each rank, joined by a switch, each sending at this rate; gives how a rank's command begins."""
    switch, *ranks = names = [f"dm{os.getpid() % 10000}{side}" for side in ("s", *range(world))]
    at_switch = ("ip", "netns", "exec", switch, "ip", "link")
    try:
        for name in names:
            _sh("ip", "netns", "add", name)
        _sh(*at_switch, "add", "bridge", "type", "bridge")
        _sh(*at_switch, "set", "bridge", "up")
        for i, name in enumerate(ranks):
            inside = ("ip", "netns", "exec", name)
            _sh("ip", "link", "add", name, "netns", name, "type", "veth", "peer", "name", name, "netns", switch)
            _sh(*at_switch, "set", name, "master", "bridge", "up")
            _sh(*inside, "ip", "addr", "add", f"10.77.0.{i + 1}/24", "dev", name)
            _sh(*inside, "ip", "link", "set", name, "up")
            _sh(*inside, "ip", "link", "set", "lo", "up")
            _sh(*inside, "tc", "qdisc", "add", "dev", name, "root", "tbf", "rate", f"{mbit}mbit", "burst", "128kb",
                "latency", "400ms")
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


# Cells -------------------------------------------------------------------------------------------------------------------------
def run_cell(job: dict[str, Any], where: str, timeout: float) -> dict[str, Any]:
    """Train one model with every mode over one link, in fresh processes; {"error": ...} or {"skipped": ...} when it cannot be."""
    try:
        with link(where, job["world"]) as (prefixes, init):
            commands = [[*prefix, sys.executable, "-m", "dynamotor.tools.bench_ddp_worker",
                         json.dumps(dict(job, rank=rank, init=init))] for rank, prefix in enumerate(prefixes)]
            return _run_ranks(commands, timeout)
    except (subprocess.CalledProcessError, FileNotFoundError, PermissionError) as error:
        text = getattr(error, "stderr", "") or str(error)
        return {"skipped": f"no shaped link here: {text.strip().splitlines()[-1] if text.strip() else error}"}


def _run_ranks(commands: list[list[str]], timeout: float) -> dict[str, Any]:
    environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    ranks = [subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    try:
        out, err = ranks[0].communicate(timeout=timeout)
        if ranks[0].returncode:
            return {"error": (err.strip().splitlines() or ["no message"])[-1]}
        return json.loads(out.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {timeout:.0f} s"}
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def rows_of(job: dict[str, Any], where: str, cell: dict[str, Any], fitted: Link | None) -> list[dict[str, Any]]:
    """One row a mode."""
    if "times" not in cell:
        return [{"model": job["model"], "link": where, "mode": "-", "note": cell.get("error") or cell["skipped"],
                 "ok": "skipped" in cell}]
    eager = cell["times"].get("eager", {}).get("step")
    rows = [{"model": job["model"], "link": where, "mode": mode, "note": text, "ok": mode not in OURS}
            for mode, text in cell.get("errors", {}).items()]
    for mode, times in cell["times"].items():
        step = times["step"]
        row: dict[str, Any] = {"model": job["model"], "link": where, "mode": mode, "note": "", "ok": True}
        row["ms"] = _median(step) * 1e3
        if eager:
            row["low"], row["vs_eager"], row["high"] = quartiles([e / s for e, s in zip(eager, step)])
        for other in ("inductor", "off"):
            if other in cell["times"]:
                row[f"vs_{other}"] = _median([o / s for o, s in zip(cell["times"][other]["step"], step)])
        row["exposed_ms"] = max(0.0, _median([s - a for s, a in zip(step, times["alone"])])) * 1e3
        stamps = [s for s in cell["stamps"][mode] if "ready" in s]
        if len(stamps) > 1:
            row["ready_fraction"] = stamps[0]["ready"] / stamps[-1]["ready"]
        if mode in OURS and not cell["compiled"].get(mode):
            row |= {"ok": False, "note": f"not compiled in this mode: {cell['compiled']} {cell['fallback']}"}
        if mode == "ingraph" and fitted is not None and where != "none":
            row["simulated_ms"] = predicted(cell, fitted.at(float(where) * 1e6 / 8, 0.0), job["world"]) * 1e3
        rows.append(row)
    return rows


def predicted(cell: dict[str, Any], link_: Link, world: int) -> float:
    """Seconds of a step by the simulator, from the step without communication and the buckets' positions in it."""
    times, stamps = cell["times"]["ingraph"], cell["stamps"]["ingraph"]
    forward = _median(times["forward"])
    backward = _median(times["alone"]) - forward
    scale = backward / max(s["ready"] for s in stamps)
    profile = Profile(forward, backward, tuple(s["ready"] * scale for s in stamps), tuple(cell["nbytes"]))
    return simulate(profile, link_, world).seconds


def _median(values: list[float]) -> float:
    return quartiles(values)[1]


def calibration(cells: list[tuple[str, dict[str, Any]]], world: int) -> Link | None:
    """The link fitted to the measured all-reduces of shaped cells; with three bandwidths or more the middle one is held out."""
    samples = {where: [Sample(world, n, float(where) * 1e6 / 8, 0.0, s) for n, s in cell["link"]]
               for where, cell in cells if where != "none" and "link" in cell}
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
    return [row["model"], where, row["mode"], number("ms"), number("vs_eager", ".3f"), spread, number("vs_inductor", ".3f"),
            number("vs_off", ".3f"), number("exposed_ms"), number("ready_fraction", ".2f"), number("simulated_ms"),
            row["note"][:90]]


def render(rows: list[list[str]]) -> str:
    """A plain text table."""
    lines = [list(COLUMNS), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines)


def main(args: argparse.Namespace) -> int:
    """Run the cells, print the table, write JSON and the picture; 0 when every cell that could run did what it should."""
    modes = [m for m in args.modes.split(",") if m]
    if bad := [m for m in modes if m not in MODES]:
        raise UsageError("DM712", f"unknown mode {bad[0]!r}", cure="use some of " + ", ".join(MODES))
    names = ["bert4", "resnet18"] if args.models == "twelve" else [m for m in args.models.split(",") if m]
    cells = []
    for name in names:
        for where in args.bandwidths.split(","):
            job = {"model": name, "small": args.small, "batch": args.batch, "modes": modes, "rounds": args.rounds,
                   "world": args.world, "device": args.device, "amp": args.amp, "bucket_mb": args.bucket_mb, "threads": 1,
                   "timeout": args.timeout}
            print(f"{name}, {where} ...", file=sys.stderr, flush=True)
            cells.append((job, where, run_cell(job, where, args.timeout)))
    fitted = calibration([(where, cell) for _, where, cell in cells], args.world)
    rows = [row for job, where, cell in cells for row in rows_of(job, where, cell, fitted)]
    print(render([table_row(row) for row in rows]))
    if fitted is not None and fitted.error is not None:
        print(f"\nlink: efficiency {fitted.efficiency:.2f}, {fitted.overhead * 1e6:.0f} µs a message, mean error of all-reduces "
              f"held out {fitted.error:.0%}; 'simulated' is computed from it, not measured")
    result = {"command": " ".join(sys.argv[1:]), "torch": torch.__version__, "python": platform.python_version(),
              "device": torch.cuda.get_device_name() if args.device == "cuda" else torch.backends.cpu.get_cpu_capability(),
              "rows": rows, "link": asdict(fitted) if fitted else None,
              "cells": [{"model": job["model"], "where": where, **cell} for job, where, cell in cells]}
    Path(args.json or "dynamotor-bench-ddp.json").write_text(json.dumps(result, indent=1))
    if args.picture:
        Path(args.picture).write_text(timeline([(f"{job['model']}, {where}", cell["stamps"]) for job, where, cell in cells
                                                if "stamps" in cell]))
    return 0 if all(row["ok"] for row in rows) else 1
