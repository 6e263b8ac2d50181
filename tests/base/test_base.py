"""Settings, errors, events, the disk cache and registries."""

from __future__ import annotations

import ctypes
import os
import stat
import threading
from pathlib import Path

import pytest

from dynamotor.base import cache
from dynamotor.base.config import CompileOptions, Config, check_values, config
from dynamotor.base.errors import BuildError, DynamotorError, UsageError, UserLine
from dynamotor.base.events import collect, counters, emit
from dynamotor.base.registry import Registry
from dynamotor.runtime import cpp_build


@pytest.fixture
def cache_dir(tmp_path: Path):
    with config.patch(cache_dir=str(tmp_path), disk_cache=True):
        yield tmp_path


def test_patch_restores_the_settings_even_after_an_error():
    before = config.strict
    with pytest.raises(ZeroDivisionError), config.patch(strict=not before):
        assert config.strict is not before
        raise ZeroDivisionError
    assert config.strict is before


def test_an_unknown_setting_is_refused_with_the_known_ones():
    with pytest.raises(AttributeError, match="cache_size_limit"):
        config.update(cache_sise_limit=3)
    with pytest.raises(AttributeError):
        config.nonsense = 1


@pytest.mark.parametrize(
    "bad", [{"cache_size_limit": "many"}, {"check": "maybe"}, {"isa": 512}, {"pad": None}]
)
def test_a_setting_of_another_type_is_refused(bad):
    with pytest.raises(UsageError, match="DM123"), config.patch(**bad):
        pass
    with pytest.raises(UsageError, match="DM123"):
        CompileOptions(options=bad)


def test_every_default_is_of_its_own_type():
    check_values(vars(Config()))


def test_assignment_sets_a_field():
    with config.patch():
        config.cache_size_limit = 3
        assert config.snapshot().cache_size_limit == 3


def test_errors_name_code_line_cause_and_cure():
    error = BuildError(
        "DM302", "the build failed", why="bad code", cure="report it", where=UserLine(__file__, 1, "f")
    )
    assert isinstance(error, DynamotorError) and error.code == "DM302"
    for part in ("DM302", "the build failed", "bad code", "report it", __file__ + ":1", "disk cache"):
        assert part in str(error)


@pytest.mark.parametrize(
    "bad", [{"fullgraph": 1}, {"dynamic": "yes"}, {"mode": "fast"}, {"options": {"nope": 1}}]
)
def test_bad_compile_options_are_usage_errors(bad):
    with pytest.raises(UsageError) as caught:
        CompileOptions(**bad)
    assert caught.value.code.startswith("DM10")


def test_events_reach_collectors_only_while_they_listen():
    with collect("a") as events:
        emit("a", x=1)
        emit("b")
    emit("a", x=2)
    assert [e.data for e in events] == [{"x": 1}]


def test_a_stored_payload_is_loaded_again(cache_dir):
    key = cache.digest("source", b"flags")
    assert cache.load("lib", key) is None
    assert cache.store("lib", key, b"payload")
    assert cache.load("lib", key) == b"payload"


def test_digest_does_not_run_parts_together():
    assert cache.digest("ab", "c") != cache.digest("a", "bc")


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:10], lambda b: b"", lambda b: b[:-1] + bytes([b[-1] ^ 1])]
)
def test_a_damaged_entry_is_a_miss_and_is_removed(cache_dir, damage):
    key = cache.digest("x")
    cache.store("lib", key, b"payload" * 100)
    path = cache.entry_path("lib", key)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.load("lib", key) is None
    assert not path.exists()


def test_a_full_disk_leaves_no_entry_and_no_error(cache_dir, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    key = cache.digest("x")
    assert cache.store("lib", key, b"payload") is False
    monkeypatch.undo()
    with config.patch(cache_dir=str(cache_dir)):
        assert cache.load("lib", key) is None
        assert not [p for p in cache_dir.rglob("*") if p.is_file()]


def test_a_killed_writer_leaves_nothing_that_loads(cache_dir, monkeypatch):
    def killed(a, b):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    key = cache.digest("x")
    with pytest.raises(KeyboardInterrupt):
        cache.store("lib", key, b"payload")
    assert cache.load("lib", key) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_cache_is_reported_not_raised(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with config.patch(cache_dir=str(tmp_path / "sub")):
        assert cache.store("lib", cache.digest("x"), b"payload") is False


def test_the_cache_can_be_switched_off(cache_dir):
    with config.patch(disk_cache=False):
        assert cache.store("lib", "00ff", b"x") is False
        assert cache.load("lib", "00ff") is None


def test_counters_count_hits(cache_dir):
    counters["cache"].clear()
    key = cache.digest("y")
    cache.load("t", key)
    cache.store("t", key, b"1")
    cache.load("t", key)
    assert (counters["cache"]["t.miss"], counters["cache"]["t.hit"]) == (1, 1)


def test_a_rule_registered_twice_is_refused():
    rules = Registry("rule")
    rules.add("a", 1)
    with pytest.raises(KeyError, match="twice"):
        rules.register("a")(2)
    assert rules["a"] == 1 and "a" in rules and len(rules) == 1


def test_patches_of_several_threads_are_their_own():
    entered, left = threading.Barrier(3), threading.Barrier(3)
    seen = {}

    def work(n):
        with config.patch(cache_size_limit=n):
            entered.wait()
            seen[n] = config.cache_size_limit
            if n == 200:
                config.exact = True  # for the rest of this thread's patch
                seen["exact"] = config.exact
            left.wait()

    before = config.snapshot()
    threads = [threading.Thread(target=work, args=(n,)) for n in (100, 200)]
    for thread in threads:
        thread.start()
    entered.wait()
    assert config.snapshot() == before
    left.wait()
    for thread in threads:
        thread.join()
    assert seen == {100: 100, 200: 200, "exact": True} and config.snapshot() == before


def test_a_build_in_the_background_has_the_settings_of_who_started_it(tmp_path):
    with config.patch(cxx_flags=("-DANSWER=17",), cache_dir=str(tmp_path)):
        pending = cpp_build.start_build(
            'extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }'
        )
    assert ctypes.CFUNCTYPE(ctypes.c_int)(pending.result().address("answer"))() == 17
