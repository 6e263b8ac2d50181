"""Reads TFRecord files and the `tf.train.Example` messages in them, without TensorFlow; local paths and
`gs://` paths. Needs `pip install dynamotor[tfrecord]`.

>>> reader = TfRecordReader("train.tfrecord", compression="GZIP", transforms={"name": "STR"})
>>> while example := reader.read_example():
...     image, label = example["image"], example["label"]
"""

from __future__ import annotations

import functools
import gzip
import importlib
import io
import struct
import zlib
from collections.abc import Callable
from typing import IO, Any

import numpy as np
import torch

from dynamotor.extension_api import XlaError

from ..errors import require
from .gcsfs import generic_open

STR = "STR"


class TfRecordReader:
    """Reads records, or examples, one after the other.

    path: the file, local or `gs://`. compression: "" for none, "ZLIB" or "GZIP". buffer_size: bytes read at a
    time. transforms: feature name -> a callable applied to that feature's tensor, or "STR" to get a string
    from its bytes.
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
            require(
                callable(transform) or transform == STR,
                "DM652",
                f"the transform of {name!r} is {transform!r}",
                why='it must be a callable or "STR"',
            )
        self._position = 0  # of the record that is read next, in uncompressed bytes
        try:
            self._file = _open(path, compression, buffer_size)
        except zlib.error as error:
            raise self._damaged(f"it cannot be decompressed ({error})") from error

    def read_record(self) -> bytes | None:
        """The bytes of the next record, or None at the end of the file. DM653 where the file is damaged or
        cut off.
        """
        header = self._read(12, at_record_start=True)
        if not header:
            return None
        length, length_crc = struct.unpack("<QI", header)
        if _masked_crc32c(header[:8]) != length_crc:
            raise self._damaged("the checksum of a record's length is wrong")
        data = self._read(length)
        (crc,) = struct.unpack("<I", self._read(4))
        if _masked_crc32c(data) != crc:
            raise self._damaged("the checksum of a record's data is wrong")
        self._position += 16 + length
        return data

    def read_example(self) -> dict[str, Any] | None:
        """The next record as an example: feature name -> tensor; None at the end of the file.

        Floats come as float32 [n], integers as int64 [n], one bytes value as int8 [its length], several as a
        list of such tensors.
        """
        record = self.read_record()
        if record is None:
            return None
        try:
            example = parse_example(record)
        except ValueError as error:
            raise self._damaged(f"a record is no tf.train.Example ({error})") from None
        return {name: self._transformed(name, value) for name, value in example.items()}

    def _transformed(self, name: str, value: Any) -> Any:
        transform = self._transforms.get(name, lambda tensor: tensor)
        if callable(transform):
            return transform(value)
        texts = [v.numpy().tobytes().decode() for v in (value if isinstance(value, list) else [value])]
        return texts if isinstance(value, list) else texts[0]

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
            cure="fetch or write the file again; check `compression` (GZIP and ZLIB files must be named as "
            "such)",
        )


def _open(path: str, compression: str, buffer_size: int) -> IO[bytes]:
    require(
        compression in ("", "ZLIB", "GZIP"),
        "DM652",
        f"unknown compression {compression!r}",
        why='it is "", "ZLIB" or "GZIP"',
        cure="use one of them",
    )
    file = generic_open(path, "rb")
    if compression == "GZIP":
        return io.BufferedReader(gzip.GzipFile(fileobj=file), buffer_size)
    if compression == "ZLIB":
        with file:
            return io.BytesIO(zlib.decompressobj().decompress(file.read()))
    return io.BufferedReader(file, buffer_size)  # type: ignore[type-var]


def parse_example(record: bytes) -> dict[str, Any]:
    """A serialised `tf.train.Example` as feature name -> tensor (see `read_example`). ValueError where it is
    none.
    """
    messages = _library("tfrecord.example_pb2")
    message = messages.Example()
    try:
        message.ParseFromString(record)
    except _library("google.protobuf.message").DecodeError as error:
        raise ValueError(str(error)) from None
    found = {name: _feature(feature) for name, feature in message.features.feature.items()}
    return {name: value for name, value in found.items() if value is not None}


def _feature(feature: Any) -> Any:
    """One feature's tensor; None where it holds nothing."""
    kind = feature.WhichOneof("kind")
    if kind is None:
        return None
    values = getattr(feature, kind).value
    if kind == "bytes_list":
        tensors = [torch.from_numpy(np.frombuffer(v, np.int8).copy()) for v in values]
        return tensors[0] if len(tensors) == 1 else tensors
    return torch.from_numpy(np.array(values, np.float32 if kind == "float_list" else np.int64))


def _masked_crc32c(data: bytes) -> int:
    """The checksum that TFRecord stores: CRC-32C, masked (a file of CRCs would otherwise have CRCs of
    CRCs).
    """
    crc = _library("crc32c").crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        why = f"{name.partition('.')[0]} is not installed"
        raise XlaError(
            "DM677", "TFRecord files need a library", why=why, cure="pip install dynamotor[tfrecord]"
        ) from None
