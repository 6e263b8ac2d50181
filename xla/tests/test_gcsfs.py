"""The GCS module against fsspec's memory filesystem."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("jax")
memory = pytest.importorskip("fsspec.implementations.memory")

from dynamotor.base.errors import DynamotorError  # noqa: E402
from dynamotor.xla.utils import gcsfs  # noqa: E402


@pytest.fixture(autouse=True)
def bucket(monkeypatch):
    fs = memory.MemoryFileSystem()
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    monkeypatch.setattr(gcsfs, "_filesystem", lambda: fs)
    return fs


def test_write_and_read_bytes_strings_and_files(tmp_path):
    gcsfs.write("gs://b/x/one", "grüße")
    gcsfs.write("gs://b/x/two", b"\x00\xff")
    gcsfs.write("gs://b/x/three", io.BytesIO(b"z" * 3_000_000))
    gcsfs.write("gs://b/x/four", io.StringIO("text" * 400_000))
    assert gcsfs.read("gs://b/x/one").decode() == "grüße"
    assert gcsfs.read("gs://b/x/two") == b"\x00\xff"
    assert gcsfs.read("gs://b/x/three") == b"z" * 3_000_000
    assert gcsfs.read("gs://b/x/four") == b"text" * 400_000


def test_open_modes():
    with gcsfs.open("gs://b/t", "w", encoding="latin-1") as f:
        f.write("é\n")
    assert gcsfs.read("gs://b/t") == b"\xe9\n"
    with gcsfs.open("gs://b/t", encoding="latin-1") as f:
        assert f.readlines() == ["é\n"]
    with gcsfs.open("gs://b/t", "ab") as f:
        f.write(b"more")
    with gcsfs.open("gs://b/t", "rb") as f:
        assert f.read() == b"\xe9\nmore"
    with gcsfs.open("gs://b/t", "r+b") as f:
        f.write(b"E")
    assert gcsfs.read("gs://b/t") == b"E\nmore"
    with gcsfs.open("gs://b/new", "a") as f:
        f.write("a")
    assert gcsfs.read("gs://b/new") == b"a"
    with pytest.raises(FileNotFoundError):
        gcsfs.open("gs://b/none", "r+")
    with pytest.raises(FileNotFoundError):
        gcsfs.open("gs://b/none")


def test_list_stat_remove():
    for name in ("d/a.txt", "d/b.bin", "d/e/c.txt", "f"):
        gcsfs.write(f"gs://b/{name}", name)
    blobs = gcsfs.list("gs://b/d")
    assert [(b.path, b.isdir) for b in blobs] == [
        ("gs://b/d/a.txt", False),
        ("gs://b/d/b.bin", False),
        ("gs://b/d/e", True),
    ]
    assert blobs[0].size == 7 and blobs[0].mtime > 1e9
    assert [b.path for b in gcsfs.list("gs://b/d/*.txt")] == ["gs://b/d/a.txt"]
    assert gcsfs.list("gs://b/nothing") == []
    assert gcsfs.stat("gs://b/f") == gcsfs.GcsBlob("gs://b/f", 1, gcsfs.stat("gs://b/f").mtime, False)
    gcsfs.remove("gs://b/f")
    with pytest.raises(FileNotFoundError):
        gcsfs.stat("gs://b/f")
    with pytest.raises(FileNotFoundError):
        gcsfs.remove("gs://b/f")


def test_rmtree_of_a_folder_and_of_a_pattern():
    for name in ("d/a.txt", "d/b.bin", "d/e/c.txt", "f"):
        gcsfs.write(f"gs://b/{name}", name)
    gcsfs.rmtree("gs://b/d/*.txt")
    assert [b.path for b in gcsfs.list("gs://b/d")] == ["gs://b/d/b.bin", "gs://b/d/e"]
    gcsfs.rmtree("gs://b/d")
    gcsfs.rmtree("gs://b/d")
    assert [b.path for b in gcsfs.list("gs://b")] == ["gs://b/f"]


@pytest.mark.parametrize("where", ["gs://b/deep/er/x", "local/deep/er/x"])
def test_generic_functions(where, tmp_path):
    path = where if gcsfs.is_gcs_path(where) else str(tmp_path / where)
    gcsfs.generic_write("text", path, makedirs=True)
    assert gcsfs.generic_read(path) == b"text"
    gcsfs.generic_write(b"bytes", path)
    assert gcsfs.generic_read(path) == b"bytes"
    with gcsfs.generic_open(path) as f:
        assert f.read() == "bytes"
    with gcsfs.generic_open(path, "wb") as f:
        f.write(b"new")
    with gcsfs.generic_open(path, "rb") as f:
        assert f.read() == b"new"


def test_a_path_that_is_none_of_gcs():
    with pytest.raises(DynamotorError, match="DM651"):
        gcsfs.read("/tmp/x")


def test_blobs_as_gcs_describes_them():
    blob = gcsfs._blob({"name": "b/x", "size": 3, "type": "file", "updated": "2026-01-02T03:04:05.678Z"})
    assert blob.path == "gs://b/x" and blob.mtime == pytest.approx(1767323045.678) and not blob.isdir


def test_the_missing_library_is_a_coded_error(monkeypatch):
    import sys

    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    gcsfs._filesystem.cache_clear()
    with pytest.raises(DynamotorError, match=r"DM650.*(\n.*)*dynamotor\[gcs\]"):
        gcsfs.read("gs://b/x")
