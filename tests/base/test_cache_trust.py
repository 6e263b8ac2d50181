"""The cache holds code: what others could have written is neither loaded nor stored, and that is said."""

import os
from pathlib import Path

import pytest
from children import run_forked
from warned import text_of

from dynamotor.base import cache
from dynamotor.base.config import config
from dynamotor.base.events import counters, forget_warnings

KEY = "ab" * 32


@pytest.fixture(autouse=True)
def _own_cache(tmp_path):
    counters.clear()
    forget_warnings()
    with config.patch(cache_dir=str(tmp_path / "cache"), disk_cache=True):
        yield


def test_folders_and_entries_are_made_for_this_user_alone():
    before = os.umask(0o002)
    try:
        assert cache.store("build", KEY, b"code")
    finally:
        os.umask(before)
    path = cache.entry_path("build", KEY)
    assert [folder.stat().st_mode & 0o022 for folder in (path, *path.parents[:3])] == [0] * 4
    assert cache.load("build", KEY) == b"code"


@pytest.mark.parametrize("up", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_may_write_is_refused(up, mode, recwarn):
    cache.store("build", KEY, b"code")
    place = [cache.entry_path("build", KEY), *cache.entry_path("build", KEY).parents][up]
    place.chmod(place.stat().st_mode | mode)
    assert cache.load("build", KEY) is None and counters["cache"]["refused"]
    text = text_of(recwarn)
    assert "DM307" in text and str(place) in text and "DYNAMOTOR_CACHE_DIR" in text
    assert cache.store("build", KEY, b"other") is (up == 0)  # a file of its own replaces a loose file


def test_another_owner_is_refused(monkeypatch):
    cache.store("build", KEY, b"code")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    path = cache.entry_path("build", KEY)
    if path.stat().st_uid == 0:  # root's entries are trusted by everybody
        os.chown(path, 54321, -1)
    assert cache.load("build", KEY) is None and counters["cache"]["refused"]


def test_a_link_in_an_entrys_place_is_not_followed(tmp_path):
    cache.store("build", KEY, b"code")
    path = cache.entry_path("build", KEY)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert cache.load("build", KEY) is None


def test_one_at_a_time_and_the_lock_ends():
    with cache.exclusive("build", KEY, 5.0) as waited:
        assert not waited
        with cache.exclusive("build", KEY, 0.1) as second:
            assert second  # the time was over
    with cache.exclusive("build", KEY, 5.0) as waited:
        assert not waited
    assert not [
        name for name in os.listdir(cache.entry_path("build", KEY).parent) if name.endswith(".making")
    ]


@pytest.mark.parametrize("folder", ["missing/cache", "file/cache"])
def test_a_lock_that_cannot_be_made_keeps_nobody_waiting(tmp_path, folder):
    (tmp_path / "file").write_text("")
    with config.patch(cache_dir=str(tmp_path / folder)), cache.exclusive("build", KEY, 5.0) as waited:
        assert not waited


@pytest.mark.slow
def test_import_without_a_home_or_a_name(tmp_path):
    code = (
        "import pwd\ndef nobody(uid): raise KeyError(uid)\npwd.getpwuid = nobody\n"
        "from dynamotor.base.config import config; print(config.cache_dir)"
    )
    homeless = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "DYNAMOTOR_CACHE_DIR"))
    done = run_forked(code, **homeless, TMPDIR=str(tmp_path))
    assert Path(done.stdout.strip()) == tmp_path / f"dynamotor-{os.geteuid()}"
