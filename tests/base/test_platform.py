"""Where the compiler cannot work it says so with a code."""

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from types import SimpleNamespace

import pytest

from dynamotor import _C
from dynamotor.base import platform
from dynamotor.base.c_extension import SOURCES, check_extension
from dynamotor.base.errors import CaptureError


def test_another_python_is_refused(monkeypatch):
    for name, version in (("cpython", (3, 15, 0)), ("cpython", (3, 10, 2)), ("pypy", (3, 11, 0))):
        text = f"{version[0]}.{version[1]} x"
        fake = SimpleNamespace(implementation=SimpleNamespace(name=name), version_info=version, version=text)
        monkeypatch.setattr(platform, "sys", fake)
        with pytest.raises(CaptureError, match="DM201.*3.1") as caught:
            platform.check_platform()
        assert "CPython 3.11, 3.12, 3.13 or 3.14" in str(caught.value)


def test_a_free_threaded_build_is_refused(monkeypatch):
    fake = SimpleNamespace(
        implementation=sys.implementation, version_info=(3, 14, 0), version="3.14.0 x", abiflags="t"
    )
    monkeypatch.setattr(platform, "sys", fake)
    with pytest.raises(ImportError, match="DM160.*free-threaded"):
        platform.check_platform()


def test_a_missing_extension_is_refused(monkeypatch):
    monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CaptureError, match="DM202"):
        platform.check_platform()


def test_a_source_tree_that_hides_the_installed_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: None)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "dynamotor").mkdir()
    (tmp_path / "dynamotor" / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    (tmp_path / "dynamotor-9.dist-info").mkdir()
    (tmp_path / "dynamotor-9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: dynamotor\nVersion: 9\n"
    )
    with pytest.raises(CaptureError, match="DM202") as raised:
        platform.check_platform()
    assert f"hides the package installed in {tmp_path}" in str(raised.value)
    (tmp_path / "dynamotor" / f"_C{EXTENSION_SUFFIXES[0]}").unlink()
    with pytest.raises(CaptureError) as raised:
        platform.check_platform()
    assert str(tmp_path) not in str(raised.value)


@pytest.mark.parametrize("built_from", ["0123456789abcdef", None])
def test_an_extension_of_other_sources_is_refused(built_from):
    with pytest.raises(ImportError, match="DM695.*other sources(.|\n)*build_ext --inplace --force"):
        check_extension(built_from, SOURCES)


def test_an_extension_without_sources_or_digest_is_taken(tmp_path):
    check_extension(_C.built_from, SOURCES)
    check_extension("", SOURCES)
    check_extension("0123456789abcdef", tmp_path)
    (tmp_path / "a.c").write_text("int a;")
    with pytest.raises(CaptureError, match="DM695"):
        check_extension("0123456789abcdef", tmp_path)


def test_this_python_is_fine():
    platform.check_platform()
    assert sys.version_info[:2] in platform.SUPPORTED_PYTHONS
