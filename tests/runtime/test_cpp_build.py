"""The build cache: stored entries, refused entries, and that nothing damaged ever loads."""

import contextvars
import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dynamotor.base import cache
from dynamotor.base.config import config
from dynamotor.base.errors import BuildError
from dynamotor.base.events import counters
from dynamotor.runtime import cpp_build

TWO = 'extern "C" __attribute__((visibility("default"))) int two() { return %d; }'


@pytest.fixture(autouse=True)
def _own_cache(tmp_path):
    cpp_build._libraries.clear()
    counters.clear()
    with config.patch(cache_dir=str(tmp_path / "cache"), disk_cache=True):
        yield
    cpp_build._libraries.clear()


def run(library):
    return ctypes.CFUNCTYPE(ctypes.c_int)(library.address("two"))()


def forget():
    cpp_build._libraries.clear()


def test_builds_once_and_loads_from_the_cache_afterwards():
    assert run(cpp_build.load_library(TWO % 2)) == 2
    forget()
    assert run(cpp_build.load_library(TWO % 2)) == 2
    assert counters["build"]["compiled"] == 1 and counters["cache"]["build.hit"] == 1


def test_equal_sources_share_one_library_in_a_process():
    assert cpp_build.load_library(TWO % 3) is cpp_build.load_library(TWO % 3)


def test_flags_are_part_of_the_key():
    source = 'extern "C" __attribute__((visibility("default"))) int two() { return N; }'
    assert run(cpp_build.load_library(source, ("-DN=4",))) == 4
    assert run(cpp_build.load_library(source, ("-DN=5",))) == 5


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_entry_is_rebuilt(damage):
    library = cpp_build.load_library(TWO % 6)
    path = cache.entry_path("build", library.key)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes(
        b"" if damage == "empty" else bytes(data[: len(data) // 2] if damage == "truncate" else data)
    )
    forget()
    assert run(cpp_build.load_library(TWO % 6)) == 6
    assert counters["build"]["compiled"] == 2 and counters["cache"]["build.damaged"] == 1


def test_an_entry_that_is_no_library_is_rebuilt():
    library = cpp_build.load_library(TWO % 7)
    cache.store("build", library.key, b"not a library")
    forget()
    assert run(cpp_build.load_library(TWO % 7)) == 7


def test_a_full_disk_builds_without_the_cache(monkeypatch):
    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    assert run(cpp_build.load_library(TWO % 8)) == 8
    assert counters["cache"]["store_failed"] == 1


def test_a_full_temporary_folder_loads_from_memory(monkeypatch):
    library = cpp_build.load_library(TWO % 9)
    forget()

    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cpp_build.tempfile, "mkstemp", refuse)
    assert run(cpp_build.load_library(TWO % 9)) == 9
    assert library.key in {key for _, key in cpp_build._libraries}


def test_an_unwritable_build_folder_is_a_coded_error(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cpp_build.tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(BuildError, match="DM303.*") as error:
        cpp_build.load_library(TWO % 10)
    assert "No space left" in str(error.value)


@pytest.mark.parametrize("name", ["/no/such/compiler", "nosuchcompiler"])
def test_a_missing_compiler_says_what_to_do(name):
    with config.patch(cxx=name), pytest.raises(BuildError) as error:
        cpp_build.load_library(TWO % 11)
    assert error.value.code == "DM301" and name in str(error.value) and "config.cxx" in str(error.value)


def test_a_compiler_that_does_not_run_is_a_missing_compiler(tmp_path):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with config.patch(cxx=str(broken)), pytest.raises(BuildError, match="DM301"):
        cpp_build.load_library(TWO % 12)


def test_a_compiler_with_arguments():
    with config.patch(cxx="g++ -DN=15"):
        assert run(cpp_build.load_library(TWO.replace("%d", "N"))) == 15
    with config.patch(cxx="g++ -DN=16"):
        assert run(cpp_build.load_library(TWO.replace("%d", "N"))) == 16


def test_refused_source_names_the_error_and_the_kept_source():
    with pytest.raises(BuildError) as error:
        cpp_build.load_library("int broken( { return 1; }")
    text = str(error.value)
    assert error.value.code == "DM302" and "error" in text
    kept = text.split("source: ")[1].split("\n")[0]
    assert Path(kept).read_text() == "int broken( { return 1; }"
    mine = [entry for entry in cache.entries() if str(entry.path) == kept]
    assert (
        len(mine) == 1 and mine[0].is_whole()
    )  # so that the cache's bound counts it, and `prune` removes it


def test_a_failed_build_is_tried_again():
    flags = ("-DOK=" + config.cache_dir,)
    with config.patch(cxx_flags=("-DBROKEN",)), pytest.raises(BuildError):
        cpp_build.load_library("#ifdef BROKEN\n#error no\n#endif\n" + TWO % 13, flags)
    assert run(cpp_build.load_library("#ifdef BROKEN\n#error no\n#endif\n" + TWO % 13, flags)) == 13


def test_a_slow_compiler_times_out(tmp_path):
    slow = tmp_path / "slow++"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] && echo slow && exit 0\nexec sleep 30\n')
    slow.chmod(0o755)
    start = time.monotonic()
    with config.patch(cxx=str(slow), build_seconds=0.2), pytest.raises(BuildError, match="DM303"):
        cpp_build.load_library(TWO % 14)
    assert time.monotonic() - start < 10


def test_threads_build_different_sources_at_once():
    with ThreadPoolExecutor(4) as pool:
        inside = [contextvars.copy_context() for _ in range(4)]  # a patch is a thread's own
        values = list(
            pool.map(
                lambda c, n: c.run(lambda: run(cpp_build.load_library(TWO % n))), inside, [20, 21, 20, 21]
            )
        )
    assert values == [20, 21, 20, 21] and counters["build"]["compiled"] == 2


def test_a_link_in_the_temporary_folder_is_not_written_through(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr(cpp_build.tempfile, "tempdir", str(tmp_path))
    source = "int broken( { return 2; }"
    key = cpp_build.build_key(source, ())
    (tmp_path / f"dynamotor-{key[:16]}.cpp").symlink_to(victim)
    (tmp_path / "blocked").write_text("")
    with config.patch(cache_dir=str(tmp_path / "blocked" / "cache")), pytest.raises(BuildError) as error:
        cpp_build.load_library(source)
    kept = Path(str(error.value).split("source: ")[1].split("\n")[0])
    assert victim.read_text() == "mine" and kept.read_text() == source and kept.stat().st_mode & 0o077 == 0
