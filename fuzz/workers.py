"""Worker processes that run chunks of a fuzzer. The chunk of one that dies or hangs is run piece by piece.

A chunk is `{"fuzzer": name, "seed": s, "start": n, "count": k}`, its answer `{"tally": {}, "findings": []}`.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.json_worker import JsonWorker

PATIENCE = (
    180.0  # seconds of processor time that a chunk may take, and seconds that its processes may do nothing
)
RENEW = 40  # chunks after which a worker is replaced: loaded libraries are never unloaded
_WITH_EAGER = ("fusion", "operators", "modules")  # whose programs may also run with nothing compiled
Job = dict[str, Any]


@dataclass
class Report:
    """Results of the workers. findings: one a kind, with how often it came."""

    tally: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Count an answer; gives the findings of a new kind."""
        self.tally.update(answer.get("tally", {}))
        self.refused.update(answer.get("refused", {}))
        new = []
        for finding in answer.get("findings", ()):
            known = self.findings.setdefault(finding["signature"], {**finding, "times": 0})
            known["times"] += 1
            if known["times"] == 1:
                new.append(known)
        return new


class Workers:
    """`jobs` processes that take chunks until the time is up or there are none left."""

    def __init__(self, jobs: int, seconds: float, show: Any = print, patience: float = 100.0) -> None:
        """patience: seconds that a chunk with findings may take."""
        self.patience = patience
        self.jobs, self.deadline, self.show = jobs, time.monotonic() + seconds, show
        signal.signal(signal.SIGTERM, self._stop)
        self.report, self._lock = Report(), threading.Lock()
        self._again: queue.SimpleQueue[Job] = queue.SimpleQueue()

    def run(self, chunks: Iterator[Job]) -> Report:
        """Run the chunks; findings are shown as they come."""
        start, self._chunks = time.monotonic(), chunks
        with ThreadPoolExecutor(self.jobs) as pool:
            for running in [pool.submit(self._drive) for _ in range(self.jobs)]:
                running.result()
        self.report.seconds = time.monotonic() - start
        return self.report

    def _stop(self, *_: object) -> None:
        """No further chunks, and those that run are given up: findings are reported, also when a time limit
        ends the command.
        """
        self.deadline = 0.0

    def _next(self) -> Job | None:
        try:
            return self._again.get_nowait()
        except queue.Empty:
            with self._lock:
                return next(self._chunks, None)

    def _drive(self) -> None:
        worker, done = None, 0
        while time.monotonic() < self.deadline and (job := self._next()) is not None:
            if worker is None:
                worker, done = _start(), 0
            left = self.deadline - time.monotonic()
            worker.send(json.dumps({**job, "seconds": left, "patience": self.patience}))
            answer = self._answer(worker)
            if answer is None:
                if self.deadline:
                    self._died(worker, job)
                else:
                    self.show(f"# given up: {job} {worker.end(0.0)[-200:]!r}")
                worker = None
                continue
            self._take(answer)
            done += 1
            if done == RENEW:
                worker.end()
                worker = None
        if worker is not None:
            worker.end()

    def _answer(self, worker: JsonWorker) -> dict[str, Any] | None:
        """The answer to a chunk. On a loaded machine it may take long: what counts is the time that the worker
        computes.
        """
        begin = used = _processor_time(worker.process.pid)
        quiet = time.monotonic()
        while (
            self.deadline
            and worker.process.poll() is None
            and max(used - begin, time.monotonic() - quiet) < PATIENCE
        ):
            answer = worker.next(time.monotonic() + 5.0)
            if answer is not None:
                return answer
            now = _processor_time(worker.process.pid)
            if now > used:
                used, quiet = now, time.monotonic()
        return worker.next(time.monotonic() + 1.0) if self.deadline else None

    def _take(self, answer: dict[str, Any]) -> None:
        with self._lock:
            for finding in self.report.add(answer):
                self.show(finding["text"])

    def _died(self, worker: JsonWorker, job: Job) -> None:
        """Run the chunk in halves; a single program that kills its worker is a finding."""
        code = worker.process.poll()
        tail = worker.end(0.0)
        if job["count"] > 1:
            half = job["count"] // 2
            self._again.put({**job, "count": half})
            self._again.put({**job, "start": job["start"] + half, "count": job["count"] - half})
            return
        if job["fuzzer"] in _WITH_EAGER and self._dies_in_eager(job):
            self.show(f"# died in eager, too: {job} {tail[-200:]!r}")
            self._take({"tally": {"died in eager": 1}})
            return
        how = "no answer in time" if code is None else f"the process died ({code})"
        self._take(_reduced_elsewhere(job, how, tail))

    def _dies_in_eager(self, job: Job) -> bool:
        """Whether a program ends a new process in which nothing is compiled."""
        worker = _start()
        worker.send(json.dumps({**job, "target": "eager"}))
        answered = self._answer(worker) is not None
        code = worker.process.poll()
        worker.end(0.0)
        return not answered and code is not None and code < 0


def _reduced_elsewhere(job: Job, how: str, tail: str) -> dict[str, Any]:
    """The finding of a program that kills its process, cut down by processes that may die too."""
    from . import fuzzers

    return {"tally": {"wrong": 1}, "findings": [fuzzers.crash_finding(job, how, tail)]}


def _processor_time(pid: int) -> float:
    """Seconds that a process and its ended children have computed; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _start() -> JsonWorker:
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "DYNAMOTOR_VERIFY": "1",
        "TRITON_INTERPRET": "1",
    }
    return JsonWorker([sys.executable, "-W", "ignore", "-m", "fuzz", "worker"], env)


def work() -> None:
    """A worker: a chunk a line, its answer a line."""
    from . import fuzzers, trial

    trial.running.append(lambda name: print(name, file=sys.stderr, flush=True))
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(fuzzers.run(job)), flush=True)
