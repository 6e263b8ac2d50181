"""TFRecords written by the independent `tfrecord` package, read by ours; and the errors of a damaged file."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("jax")
writer = pytest.importorskip("tfrecord.writer")

from dynamotor.base.errors import DynamotorError  # noqa: E402
from dynamotor.xla.utils.tf_record_reader import TfRecordReader, parse_example  # noqa: E402

ROWS = [
    (np.random.default_rng(i).random(40 + i).astype(np.float32), list(range(-i, 5 * i + 1)), b"name%d" % i)
    for i in range(7)
]


@pytest.fixture
def path(tmp_path):
    out = str(tmp_path / "a.tfrecord")
    w = writer.TFRecordWriter(out)
    for floats, ints, name in ROWS:
        w.write({"x": (floats, "float"), "n": (ints, "int"), "name": (name, "byte")})
    w.close()
    return out


def compressed(path: str, kind: str) -> str:
    data = Path(path).read_bytes()
    out = path + "." + kind
    Path(out).write_bytes({"GZIP": gzip.compress, "ZLIB": zlib.compress, "": bytes}[kind](data))
    return out


@pytest.mark.parametrize("kind", ["", "GZIP", "ZLIB"])
@pytest.mark.parametrize("buffer_size", [64, 16 * 1024 * 1024])
def test_examples_come_back(path, kind, buffer_size):
    reader = TfRecordReader(compressed(path, kind), compression=kind, buffer_size=buffer_size)
    for floats, ints, name in ROWS:
        example = reader.read_example()
        assert torch.equal(example["x"], torch.from_numpy(floats)) and example["x"].dtype == torch.float32
        assert example["n"].tolist() == ints and example["n"].dtype == torch.int64
        assert example["name"].dtype == torch.int8 and example["name"].numpy().tobytes() == name
    assert reader.read_example() is None and reader.read_record() is None


def test_transforms(path):
    reader = TfRecordReader(path, transforms={"name": "STR", "x": lambda x: x * 2})
    example = reader.read_example()
    assert example["name"] == "name0" and torch.equal(example["x"], torch.from_numpy(ROWS[0][0]) * 2)
    with pytest.raises(DynamotorError, match="DM652"):
        TfRecordReader(path, transforms={"name": "INT"})


def test_several_bytes_values_are_a_list():
    # Example{features{feature{"k": bytes_list{"ab", "cde"}}}} by hand
    feature = b"\x0a\x09" + b"\x0a\x02ab" + b"\x0a\x03cde"
    entry = b"\x0a\x01k" + b"\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    example = parse_example(b"\x0a" + bytes([len(features)]) + features)
    assert [t.numpy().tobytes() for t in example["k"]] == [b"ab", b"cde"]


def test_unpacked_numbers():
    feature = b"\x1a\x04" + b"\x08\x05\x08\x07"  # int64_list with two single values
    entry = b"\x0a\x01k" + b"\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    assert parse_example(b"\x0a" + bytes([len(features)]) + features)["k"].tolist() == [5, 7]


@pytest.mark.parametrize("where", [0, 9, 30, -2])
def test_a_flipped_bit_is_found(path, where):
    data = bytearray(Path(path).read_bytes())
    data[where] ^= 4
    Path(path).write_bytes(data)
    reader = TfRecordReader(path)
    with pytest.raises(DynamotorError, match="DM653"):
        while reader.read_record() is not None:
            pass


@pytest.mark.parametrize("kind", ["", "GZIP", "ZLIB"])
def test_a_cut_file_is_found(path, kind):
    file = compressed(path, kind)
    data = Path(file).read_bytes()
    Path(file).write_bytes(data[:-9])
    reader = TfRecordReader(file, compression=kind)
    with pytest.raises(DynamotorError, match="DM653"):
        while reader.read_record() is not None:
            pass


def test_the_wrong_compression_is_an_error(path):
    with pytest.raises(DynamotorError, match="DM653"):
        TfRecordReader(path, compression="GZIP").read_record()
    with pytest.raises(DynamotorError, match="DM653"):
        TfRecordReader(compressed(path, "GZIP")).read_record()
    with pytest.raises(DynamotorError, match="DM652"):
        TfRecordReader(path, compression="LZ4")


def test_a_missing_library_is_a_coded_error(path, monkeypatch):
    import sys

    from dynamotor.xla.utils import tf_record_reader

    tf_record_reader._library.cache_clear()
    monkeypatch.setitem(sys.modules, "crc32c", None)
    with pytest.raises(DynamotorError, match=r"DM677.*(\n.*)*dynamotor\[tfrecord\]"):
        TfRecordReader(path).read_record()
