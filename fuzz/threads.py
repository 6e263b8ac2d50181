"""Compiled functions called from several threads, in forked children and by several processes on one cache.

Each caller has numbers of its own and compares with eager by itself; the first calls come at the same time.

>>> problems("threads", seed=3)
"""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

import dynamotor

from .bounds import spread
from .compare import differences, observe
from .fusion import generated
from .program import Program

WAYS = ("threads", "threads", "threads", "fork", "processes")
CALLERS, ROUNDS = 4, 3
PATIENCE = 60  # seconds that children may take
Check = Callable[[int], list[str]]
_generator = threading.Lock()  # inputs are drawn from PyTorch's one generator


def cases(seed: int, count: int) -> list[Program]:
    """Programs that eager can run."""
    found: list[Program] = []
    n = 0
    while len(found) < count:
        program = generated(seed, n, "")
        n += 1
        if observe(program.function(), program.make_inputs(), program.cotangents).error is None:
            found.append(program)
    return found


def checker(program: Program) -> Check:
    """A check of the compiled program on the numbers of a caller: what differs from eager."""
    compiled = dynamotor.compile(program.function())

    def check(caller: int) -> list[str]:
        mine = replace(program, seed=program.seed + caller)
        with _generator:
            given, again = mine.make_inputs(), mine.make_inputs()
        want = observe(mine.function(), given, mine.cotangents, caller)
        return differences(want, observe(compiled, again, mine.cotangents, caller))

    return check


def explained(program: Program, caller: int) -> list[str]:
    """What differs when one thread alone does it, rounding set aside: not the threads' fault."""
    mine, call = replace(program, seed=program.seed + caller), dynamotor.compile(program.function())

    def eager() -> Any:
        return observe(mine.function(), mine.make_inputs(), mine.cotangents, caller)

    got = observe(call, mine.make_inputs(), mine.cotangents, caller)
    return differences(eager(), got) or differences(eager(), got, functools.partial(spread, eager))


def in_threads(programs: list[Program]) -> list[str]:
    """Every thread calls every program; the first calls of all meet."""
    found = []
    for program in programs:
        check, barrier = checker(program), threading.Barrier(CALLERS)

        def call(
            caller: int, check: Check = check, barrier: threading.Barrier = barrier
        ) -> list[tuple[int, str]]:
            torch.set_num_threads(1)
            barrier.wait(PATIENCE)
            numbers = [caller + CALLERS * again for again in range(ROUNDS)]
            return [(number, problem) for number in numbers for problem in check(number)]

        with ThreadPoolExecutor(CALLERS) as pool:
            answers = [answer for part in pool.map(call, range(CALLERS)) for answer in part]
        found += [f"{program.name}: {p}" for number, p in answers[:4] if not explained(program, number)]
    return found


def in_children(programs: list[Program]) -> list[str]:
    """Children of a fork call what their parent compiled, and compile the last program themselves."""
    checks = [checker(program) for program in programs]
    alone = [check(0) for check in checks[:-1]]  # the parent's calls, before the fork
    children = []
    for caller in range(2):
        child = os.fork()
        if child == 0:
            code = 2
            try:
                code = int(
                    any(check(caller) for check, known in zip(checks, [*alone, []], strict=True) if not known)
                )
            finally:
                os._exit(code)
        children.append(child)
    found = [f"child: {how}" for child in children if (how := _ended(child))]
    return [] if found and any(explained(p, c) for p in programs for c in range(2)) else found


def _ended(child: int) -> str:
    """Wait for a child; how it failed, or nothing."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return "" if code == 0 else "other results than eager's" if code == 1 else f"ended with {code}"
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "no end in time"


def in_processes(seed: int, programs: list[Program]) -> list[str]:
    """Three new processes start at once on an empty cache, and a fourth on the cache that they leave."""
    with tempfile.TemporaryDirectory(prefix="dynamotor-fuzz-") as folder:
        env = {**os.environ, "DYNAMOTOR_CACHE_DIR": folder}
        command = [sys.executable, "-W", "ignore", "-m", "fuzz.threads", str(seed), str(len(programs))]

        def start() -> subprocess.Popen[str]:
            return subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )

        found = []
        for group in ([start() for _ in range(3)], [start()]):
            for process in group:
                said, _ = process.communicate(timeout=4 * PATIENCE)
                if process.returncode:
                    last = (said.strip() or str(process.returncode)).splitlines()[-1]
                    found.append(f"process: {last[:200]}")
        return found


def problems(way: str, seed: int) -> list[str]:
    """What went wrong when the programs of a seed are run in a way."""
    try:
        programs = cases(seed, 3)
        if way == "threads":
            return in_threads(programs)
        return in_children(programs) if way == "fork" else in_processes(seed, programs)
    finally:
        dynamotor.reset()


def way_of(seed: int) -> str:
    return random.Random(seed).choice(WAYS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    programs = cases(int(sys.argv[1]), int(sys.argv[2]))
    wrong = [p for program in programs for p in checker(program)(0) if not explained(program, 0)]
    print(wrong[:1] or "right")
    raise SystemExit(bool(wrong))
