"""Reads TFRecord files and the `tf.train.Example` messages in them, without TensorFlow; local paths and `gs://` paths.

>>> reader = TfRecordReader("train.tfrecord", compression="GZIP", transforms={"name": "STR"})
>>> while example := reader.read_example():
...     image, label = example["image"], example["label"]
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np
import torch

from ...base.errors import XlaError
from .crc32c import masked_crc32c
from .gcsfs import generic_open

STR = "STR"


class TfRecordReader:
    """Reads records, or examples, one after the other.

    path: the file, local or `gs://`. compression: "" for none, "ZLIB" or "GZIP". buffer_size: bytes read at a time.
    transforms: feature name -> a callable applied to that feature's tensor, or "STR" to get a string from its bytes.
    """

    def __init__(
        self,
        path: str,
        compression: str = "",
        buffer_size: int = 16 * 1024 * 1024,
        transforms: dict[str, Callable[[Any], Any] | str] | None = None,
    ) -> None:
        self._path, self._transforms = path, transforms or {}
        for name, transform in self._transforms.items():
            if not callable(transform) and transform != STR:
                raise XlaError("DM652", f"the transform of {name!r} is {transform!r}", why='it must be a callable or "STR"')
        self._file = _open(path, compression, buffer_size)
        self._position = 0  # of the record that is read next, in uncompressed bytes

    def read_record(self) -> bytes | None:
        """The bytes of the next record, or None at the end of the file. DM653 where the file is damaged or cut off."""
        header = self._read(12, at_record_start=True)
        if not header:
            return None
        length, length_crc = struct.unpack("<QI", header)
        if masked_crc32c(header[:8]) != length_crc:
            raise self._damaged("the checksum of a record's length is wrong")
        data = self._read(length)
        (crc,) = struct.unpack("<I", self._read(4))
        if masked_crc32c(data) != crc:
            raise self._damaged("the checksum of a record's data is wrong")
        self._position += 16 + length
        return data

    def read_example(self) -> dict[str, Any] | None:
        """The next record as an example: feature name -> tensor; None at the end of the file.

        Floats come as float32 [n], integers as int64 [n], one bytes value as int8 [its length], several as a list of
        such tensors.
        """
        record = self.read_record()
        if record is None:
            return None
        try:
            example = parse_example(record)
        except (ValueError, IndexError, struct.error) as error:
            raise self._damaged(f"a record is no tf.train.Example ({error})") from None
        return {name: self._transformed(name, value) for name, value in example.items()}

    def _transformed(self, name: str, value: Any) -> Any:
        transform = self._transforms.get(name)
        if transform is None:
            return value
        if callable(transform):
            return transform(value)
        if isinstance(value, list):
            return [v.numpy().tobytes().decode() for v in value]
        return value.numpy().tobytes().decode()

    def _read(self, count: int, at_record_start: bool = False) -> bytes:
        try:
            data = self._file.read(count)
        except (EOFError, OSError, zlib.error) as error:
            raise self._damaged(f"it cannot be decompressed ({error})") from error
        if len(data) != count and not (at_record_start and not data):
            raise self._damaged("it ends inside a record")
        return data

    def _damaged(self, why: str) -> XlaError:
        return XlaError(
            "DM653",
            f"the TFRecord file {self._path} is damaged at byte {self._position}",
            why=why,
            cure="fetch or write the file again; check `compression` (GZIP and ZLIB files must be named as such)",
        )


class _ZlibFile(io.RawIOBase):
    """The decompressed bytes of a zlib stream."""

    def __init__(self, file: IO[bytes], chunk: int) -> None:
        self._file, self._chunk, self._engine = file, chunk, zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            compressed = self._engine.unconsumed_tail or self._file.read(self._chunk)
            data = self._engine.decompress(compressed, len(buffer)) if compressed else self._engine.flush(len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)
            if not compressed:
                if not self._engine.eof:
                    raise EOFError("the stream has no end")
                return 0


def _open(path: str, compression: str, buffer_size: int) -> IO[bytes]:
    if compression not in ("", "ZLIB", "GZIP"):
        raise XlaError("DM652", f"unknown compression {compression!r}", why='it is "", "ZLIB" or "GZIP"', cure="use one of them")
    file = generic_open(path, "rb")
    if compression == "GZIP":
        return io.BufferedReader(gzip.GzipFile(fileobj=file), buffer_size)  # type: ignore[type-var,return-value]
    if compression == "ZLIB":
        return io.BufferedReader(_ZlibFile(file, 1 << 20), buffer_size)  # type: ignore[type-var,return-value]
    return io.BufferedReader(file, buffer_size)  # type: ignore[type-var,return-value]


# ---- tf.train.Example on the wire: Example{1: Features{1: map<string, Feature{1: bytes, 2: float, 3: int64 lists}>}}


def parse_example(record: bytes) -> dict[str, Any]:
    """A serialised `tf.train.Example` as feature name -> tensor (see `read_example`). ValueError where it is none."""
    example: dict[str, Any] = {}
    for number, features in _fields(memoryview(record)):
        if number != 1:
            continue
        for _, entry in _fields(features):
            parts = dict(_fields(entry))
            name = bytes(parts.get(1, b"")).decode()
            value = _feature(parts.get(2, memoryview(b"")))
            if value is not None:
                example[name] = value
    return example


def _feature(message: memoryview) -> Any:
    """One feature's tensor; None where it holds nothing."""
    for kind, values in _fields(message):
        if kind == 1:
            tensors = [torch.from_numpy(np.frombuffer(v, np.int8).copy()) for _, v in _fields(values)]
            return tensors[0] if len(tensors) == 1 else tensors
        if kind == 2:
            return torch.from_numpy(np.array([x for _, v in _fields(values) for x in _floats(v)], np.float32))
        if kind == 3:
            return torch.from_numpy(np.array([x for _, v in _fields(values) for x in _integers(v)], np.int64))
    return None


def _floats(value: Any) -> np.ndarray:
    return np.frombuffer(value, "<f4")  # a packed run, or the four bytes of a single one


def _integers(value: Any) -> list[int]:
    if isinstance(value, int):
        return [_signed(value)]
    found, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(_signed(number))
    return found


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is longer than 64 bits")


def _fields(message: Any) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protobuf message: bytes for lengths and fixed widths, int for varints."""
    if isinstance(message, int):
        raise ValueError("a number stands where a message belongs")
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > len(message):
            raise ValueError("a field is longer than its message")
        yield number, message[at : at + size]
        at += size
