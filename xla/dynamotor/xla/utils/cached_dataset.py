"""A data set that keeps each sample in a file once it was computed, in a local folder or a `gs://` one.

>>> train = CachedDataset(slow_dataset, "/data/cache")  # computes missing samples
>>> train.warmup()                                      # all of it
>>> elsewhere = CachedDataset(None, "/data/cache")      # the cache alone
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from typing import Any

import torch

from dynamotor.extension_api import XlaError

from .. import compat
from ..core import xla_model as xm
from ..errors import require
from . import gcsfs
from .checked_load import checked_load, with_checksums

_GZIP_MAGIC = b"\x1f\x8b"


class CachedDataset(torch.utils.data.Dataset):
    """Wraps a map-style data set; a sample is computed once, then read from its file, by this and by later
    programs.

    data_set: the data set to be cached; None where all its samples are in `path` already (a cache can be
    packed and unpacked elsewhere). path: the cache's folder, local or `gs://`; must be writable unless it is
    complete. max_files_per_folder: no folder of the cache gets more files; with data_set=None the value that
    the cache was made with. compress: whether samples are compressed (smaller files, more work for the CPU);
    with data_set=None the value that the cache was made with. weights_only: samples are tensors, numpy
    arrays, numbers, strings and containers of them; False allows any object, and runs whatever code a file
    brings with it.
    """

    def __init__(
        self,
        data_set: torch.utils.data.Dataset | None,
        path: str,
        max_files_per_folder: int = 1000,
        compress: bool = True,
        weights_only: bool = True,
    ) -> None:
        super().__init__()
        self._data_set, self._path, self._weights_only = data_set, path, weights_only
        if data_set is not None:
            meta = {
                "count": len(data_set),  # type: ignore[arg-type]  # a Dataset need not have a length: its TypeError says so
                "compress": compress,
                "max_files_per_folder": max_files_per_folder,
            }
            self._write_metadata(meta)
        else:
            meta = self._read_metadata()
        self._count, self._compress = meta["count"], meta["compress"]
        self._per_folder = max(2, meta["max_files_per_folder"])
        self._levels = len(_digits(self._count, self._per_folder)) - 1

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        """The sample `index` (negative: from the end). DM657 where it is neither in the cache nor can be
        computed.
        """
        torch._check_index(-self._count <= index < self._count, lambda: f"sample {index} of {self._count}")
        index %= self._count
        path = self._sample_path(index)
        try:
            return self._load(path)
        except FileNotFoundError:
            if self._data_set is None:
                raise XlaError(
                    "DM657",
                    f"sample {index} is not in the cache {self._path}",
                    why="the data set was given as None, so it cannot be computed",
                    cure="run warmup() where the data set is, and copy the whole folder",
                ) from None
        except XlaError as error:
            if self._data_set is None or error.code != "DM654":
                raise
        sample = self._data_set[index]
        self._save(sample, path)
        return sample

    def warmup(self) -> None:
        """Compute and store every sample that is missing, so that the cache is complete."""
        for index in range(self._count):
            self[index]

    def _sample_path(self, index: int) -> str:
        folders = _digits(index // self._per_folder, self._per_folder)
        folders = ([0] * self._levels + folders)[len(folders) :]
        return _join(self._path, *map(str, folders), f"{index}.pt")

    def _save(self, sample: Any, path: str) -> None:
        buffer = io.BytesIO()
        with with_checksums():  # of a row of a large tensor, without the other rows
            torch.save(
                compat.tree_map_only(torch.Tensor, lambda t: t.clone() if t._is_view() else t, sample),
                buffer,
            )
        data = buffer.getvalue()
        gcsfs.generic_write(gzip.compress(data, 6) if self._compress else data, path, makedirs=True)

    def _load(self, path: str) -> Any:
        data = gcsfs.generic_read(path)
        if data.startswith(_GZIP_MAGIC):
            try:
                data = gzip.decompress(data)
            except (EOFError, OSError, zlib.error):
                data = b""  # the check that follows names the fault
        return checked_load(data, f"cached sample {path}", self._weights_only)

    def _write_metadata(self, meta: dict[str, Any]) -> None:
        try:
            old = self._read_metadata()
        except XlaError:
            old = None
        require(
            old is None or old["count"] == meta["count"],
            "DM656",
            f"the cache {self._path} belongs to another data set",
            why=f"it has {old and old['count']} samples, the data set given has {meta['count']}",
            cure="use another folder, or remove this one",
        )
        if old != meta and xm.is_master_ordinal(local=not gcsfs.is_gcs_path(self._path)):
            gcsfs.generic_write(json.dumps(meta), _join(self._path, "METADATA"), makedirs=True)

    def _read_metadata(self) -> dict[str, Any]:
        path = _join(self._path, "METADATA")
        try:
            meta = json.loads(gcsfs.generic_read(path))
            kinds = {"count": int, "compress": bool, "max_files_per_folder": int}
            return {name: kind(meta[name]) for name, kind in kinds.items()}
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise XlaError(
                "DM656",
                f"{self._path} is no cached data set",
                why=f"{path} is missing"
                if isinstance(error, FileNotFoundError)
                else f"{path} cannot be read ({error})",
                cure="give the folder that CachedDataset wrote, or the data set itself",
            ) from None


def _digits(number: int, base: int) -> list[int]:
    """A number's digits in a base, the highest first; one digit for zero."""
    digits = [number % base]
    while number := number // base:
        digits.append(number % base)
    return digits[::-1]


def _join(*parts: str) -> str:
    return (
        "/".join((parts[0].rstrip("/"), *parts[1:])) if gcsfs.is_gcs_path(parts[0]) else os.path.join(*parts)
    )
