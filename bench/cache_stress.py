"""`python -m bench cache_stress`: many processes, kills, full disks and other owners against the disk cache.

Each row is one way to disturb it: programs run in forked processes, are compared with eager, and say what
they built and their warnings. The status is 1 when a row is not as it must be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import dynamotor
from bench.tool import write_json
from dynamotor.base import cache
from dynamotor.base.config import config
from dynamotor.base.events import counters
from dynamotor.tools.tables import render

COLUMNS = ("row", "right", "how", "found")
Found = dict[str, Any]


# -- what runs -----------------------------------------------------------------------------------------------
def programs(salt: float) -> dict[str, Any]:
    """Functions of two tensors whose kernels no earlier run has built: `salt` is a constant in them."""
    norm = torch.nn.functional.layer_norm
    return {
        "rows": lambda x, w: (norm(x, x.shape[1:]) * salt).softmax(-1) @ w,
        "columns": lambda x, w: (torch.nn.functional.gelu(x @ w) + salt).square().mean(0),
        "scan": lambda x, w: (x * salt).cumsum(1).sin() + w.sum(0),
    }


def run_programs(salt: float) -> Found:
    """Run them as a new process does, forward and backward: whether they were right, and the number of builds."""
    right = True
    for fn in programs(salt).values():
        inputs = [torch.randn(16, 16) for _ in range(2)]
        results = []
        for one in (fn, dynamotor.compile(fn)):
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = one(*leaves)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        right &= all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*results))
    return {"right": right, "built": counters["build"]["compiled"], "cache": dict(counters["cache"])}


class Child:
    """A forked process that does `job` with the cache in `folder`; its output and result are files beside it."""

    def __init__(self, folder: Path, job: Callable[[], Found | None]) -> None:
        self.notes = Path(tempfile.mkdtemp(prefix="cache-stress-"))
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                said = os.open(self.notes / "said", os.O_WRONLY | os.O_CREAT)
                sys.stdout = sys.stderr = os.fdopen(said, "w", buffering=1)
                dynamotor.reset()
                with config.patch(cache_dir=str(folder), disk_cache=True, verify=False, check=False):
                    given = job()
                (self.notes / "found").write_text(json.dumps(given))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)

    def kill(self) -> None:
        """End it at once, and forget it."""
        os.kill(self.pid, signal.SIGKILL)
        self.result()

    def result(self) -> Found:
        """Its findings, once it has ended, with the codes of its warnings."""
        _, status = os.waitpid(self.pid, 0)
        said = (self.notes / "said").read_text() if (self.notes / "said").exists() else ""
        found = json.loads((self.notes / "found").read_text()) if status == 0 else {"right": False}
        shutil.rmtree(self.notes)
        words = said.replace("[", " ").replace("]", " ").split()
        return {**found, "codes": sorted({w for w in words if w.startswith("DM")}), "said": said}


def whole(folder: Path) -> bool:
    """Whether every entry of a cache is what its checksum says."""
    with config.patch(cache_dir=str(folder)):
        return all(e.is_whole() for e in cache.entries() if not e.path.name.startswith(".writing-"))


# -- the rows ------------------------------------------------------------------------------------------------
def at_once(folder: Path, processes: int) -> list[Found]:
    """Processes that start together on an empty cache: one builds each kernel, the others wait for it."""
    salt, start = random.random(), time.time() + 0.3

    def job() -> Found:
        time.sleep(max(0.0, start - time.time()))
        return run_programs(salt)

    found = [one.result() for one in [Child(folder, job) for _ in range(processes)]]
    kernels, built = len(list(folder.glob("build/??/*"))), sum(one.get("built", 0) for one in found)
    right = all(one["right"] for one in found) and built == kernels > 0 and whole(folder)
    return [{"row": "at once", "how": f"{processes} processes", "right": right,
             "found": f"{kernels} kernels, {built} builds"}]  # fmt: skip


def killed_writing(folder: Path, times: int) -> list[Found]:
    """kill -9 at a random moment of writing: an entry is whole or not there."""
    payloads = {cache.digest(str(k)): bytes([k]) * 300_000 for k in range(8)}

    def write() -> None:
        while True:
            for key, payload in payloads.items():
                with cache.exclusive("program", key, 5):
                    cache.store("program", key, payload)

    wrong = hits = 0
    for _ in range(0, times, 2):
        writers = [Child(folder, write) for _ in range(2)]
        time.sleep(random.random() * 0.05)
        for writer in writers:
            writer.kill()
        with config.patch(cache_dir=str(folder), disk_cache=True):
            read = [(cache.load("program", key), payload) for key, payload in payloads.items()]
        wrong += sum(data not in (None, payload) for data, payload in read)
        hits += sum(data is not None for data, _ in read)
    return [{"row": "killed while writing", "how": f"{times} kills", "right": not wrong and hits > 0 and whole(folder),
             "found": f"{hits} whole entries read, {wrong} wrong"}]  # fmt: skip


def killed_compiling(folder: Path, times: int) -> list[Found]:
    """kill -9 at a random moment of a first call: the remaining files serve the next process, and are right."""
    salt, right = random.random(), True
    for _ in range(times):
        child = Child(folder, lambda: run_programs(salt))
        time.sleep(random.random() * 1.5)
        child.kill()
        right &= whole(folder)
    after = Child(folder, lambda: run_programs(salt)).result()
    again = Child(folder, lambda: run_programs(salt)).result()
    right &= after["right"] and again["right"] and not again["built"]
    return [{"row": "killed while compiling", "how": f"{times} kills", "right": right,
             "found": f"{after.get('built')} builds left, then {again.get('built')}"}]  # fmt: skip


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[bool]:
    """A disk of its own at the folder; gives False where mounting is not allowed."""
    folder.mkdir(exist_ok=True, mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)]
    mounted = not subprocess.run(command, capture_output=True, check=False).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def full_disks(folder: Path) -> list[Found]:
    """Disks on which nothing, little or not everything fits, for the cache alone and for all files."""
    rows = []
    for size, everything in (("4k", False), ("32k", False), ("100k", False), ("4k", True), ("100k", True)):
        with small_disk(folder, size) as mounted:

            def job(mounted: bool = mounted, size: str = size, everything: bool = everything) -> Found:
                if everything:
                    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
                if not mounted:  # files that cannot grow beyond it
                    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size[:-1]) << 10,) * 2)
                return run_programs(random.random())

            found = Child(folder, job).result()
            row = _told(found, "DM310")
            row["right"] &= found["built"] > 0 or "DM303" in found["codes"]
            row["right"] &= whole(folder)
        where = "cache and temporary files" if everything else "cache"
        rows.append(
            {"row": f"full disk: {where}", "how": f"{'tmpfs' if mounted else 'RLIMIT_FSIZE'} {size}", **row}
        )
        shutil.rmtree(folder)
    return rows


def _spoil(path: Path) -> str:
    """Make a path one that others may write; how."""
    if os.geteuid() == 0:
        os.chown(path, 54321, -1)
        return "another owner"
    path.chmod(0o777)
    return "mode 777"


def foreign_owners(folder: Path) -> list[Found]:
    """The folder, a folder in it, or the entries belong to another user, or are no folder at all."""
    rows = []
    for what, pattern in (
        ("folder", ""),
        ("its kinds", "*"),
        ("entries", "*/??/*"),
    ):
        salt = random.random()
        Child(folder, lambda: run_programs(salt)).result()  # noqa: B023
        how = [_spoil(path) for path in ([folder] if not pattern else list(folder.glob(pattern)))]
        found = Child(folder, lambda: run_programs(salt)).result()  # noqa: B023
        row = _told(found, "DM307")
        row["right"] &= found.get("built", 0) > 0
        rows.append({"row": f"others own: {what}", "how": how[0], **row})
        shutil.rmtree(folder)
    folder.write_text("")
    row = _told(Child(folder, lambda: run_programs(random.random())).result(), "DM310")
    rows.append({"row": "no folder", "how": "a file in its place", **row})
    folder.unlink()
    return rows


def _told(found: Found, code: str) -> Found:
    """A row's answer: right, and the user was told."""
    right = found["right"] and code in found["codes"]
    text = f"{found.get('built')} builds, {' '.join(found['codes']) or 'nothing said'}"
    return {"right": right, "found": text, **({} if right else {"said": found["said"]})}


def run(processes: int = 8, kills: int = 200, compiling: int = 40, faults: bool = True) -> list[Found]:
    """All rows, each with a cache of its own."""
    rows: list[Found] = []
    asked = [(at_once, processes), (killed_writing, kills), (killed_compiling, compiling)]
    jobs = [(lambda f, row=row, n=n: row(f, n)) for row, n in asked if n]
    with tempfile.TemporaryDirectory(prefix="cache-stress-") as place:
        for k, job in enumerate([*jobs, *([full_disks, foreign_owners] if faults else [])]):
            rows += job(Path(place, str(k)))
    return rows


def main() -> int:
    """Run all rows, print a table, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench cache_stress", description=__doc__)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    rows = run(args.processes, args.kills)
    print(render([["yes" if v is True else str(v) for v in map(row.get, COLUMNS)] for row in rows], COLUMNS))
    for row in rows:
        if "said" in row:
            print(f"\n{row['row']}, {row['how']}:\n{row['said']}")
    write_json(args.json, rows)
    return int(not all(row["right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
