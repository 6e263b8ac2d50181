"""The cache is bounded, many processes write it at once, and one that is killed or has no space leaves
nothing wrong.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from warned import text_of

from dynamotor.__main__ import main
from dynamotor.base import cache
from dynamotor.base.config import config
from dynamotor.base.events import counters, forget_warnings

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path):
    counters.clear()
    forget_warnings()
    with config.patch(cache_dir=str(tmp_path / "cache"), disk_cache=True):
        yield


def key(n):
    return cache.digest(str(n))


def test_what_was_used_longest_ago_goes_first():
    for n in range(4):
        cache.store("build", key(n), bytes(100))
        os.utime(cache.entry_path("build", key(n)), (1000 + n, 1000 + n))
    assert cache.load("build", key(0)) is not None  # used now
    assert cache.prune(2 * 132) == 2
    assert [cache.load("build", key(n)) is not None for n in range(4)] == [True, False, False, True]


def test_a_process_that_writes_much_keeps_the_bound():
    with config.patch(cache_megabytes=1):
        for n in range(30):
            cache.store("build", key(n), bytes(100_000))
        assert sum(entry.nbytes for entry in cache.entries()) <= 1_250_000


def test_what_killed_processes_left_is_pruned():
    cache.store("build", key(1), b"x")
    left = cache.entry_path("build", key(1)).with_name(".writing-abc")
    left.write_bytes(b"half")
    assert cache.prune(1 << 20) == 0  # a process may be writing it
    os.utime(left, (1000, 1000))
    assert cache.prune(1 << 20) == 1 and cache.load("build", key(1)) == b"x"


def test_the_command_shows_prunes_and_verifies(capsys):
    cache.store("program", key(1), b"one")
    cache.store("build", key(2), b"two")
    assert main(["cache"]) == 0
    text = capsys.readouterr().out
    assert "program" in text and "build" in text
    assert main(["cache", "verify"]) == 0
    path = cache.entry_path("program", key(1))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert main(["cache", "verify"]) == 1 and not path.exists()
    assert main(["cache", "prune", "--megabytes", "0"]) == 0 and not list(cache.entries())


WRITER = """
import importlib.util, sys, types
for name in ("dynamotor", "dynamotor.base"):  # the room alone: no torch
    sys.modules[name] = types.ModuleType(name); sys.modules[name].__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
from dynamotor.base import cache
from dynamotor.base.config import config
config.update(cache_dir=sys.argv[2])
print("ready", flush=True)
n = 0
while True:
    for k in range(8):
        with cache.exclusive("program", cache.digest(str(k)), 5):
            cache.store("program", cache.digest(str(k)), bytes([k]) * 300_000)
"""


def test_processes_that_are_killed_leave_whole_entries_or_none(tmp_path):
    rng = random.Random(0)
    command = [sys.executable, "-c", WRITER, str(ROOT), config.cache_dir]
    for _ in range(8):
        writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
        for writer in writers:
            writer.stdout.readline()
        time.sleep(rng.random() * 0.02)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
        for k in range(8):
            assert cache.load("program", key(k)) in (None, bytes([k]) * 300_000)
    assert not counters["cache"]["program.damaged"] and counters["cache"]["program.hit"]
    cache.prune(0)
    for k in range(8):
        with cache.exclusive("program", key(k), 1) as waited:  # the dead hold no lock
            assert not waited


def test_a_full_disk_is_no_entry_and_no_error(monkeypatch, recwarn):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not cache.store("program", key(1), b"x")
    assert cache.load("program", key(1)) is None and not list(cache.entries())
    assert "DM310" in text_of(recwarn)


def test_an_entry_made_between_the_look_and_the_lock_is_looked_for_again():
    assert cache.load("program", key(1)) is None
    cache.store("program", key(1), b"x")  # by another process, whose lock is gone again
    with cache.exclusive("program", key(1), 5) as may_be_there:
        assert may_be_there
