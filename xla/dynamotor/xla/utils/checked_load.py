"""Loads files of `torch.save` so that damage is found, and so that nothing but data is unpickled unless
asked.

A zip of torch.save carries a CRC-32 of each record, which torch.load does not look at: a flipped bit in a
weight would go unnoticed.

>>> checked_load("model.pt", "checkpoint")
"""

from __future__ import annotations

import contextlib
import io
import pickle
import zipfile
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np
import torch

from dynamotor.extension_api import XlaError

# What numpy pickles its arrays and scalars with: data only.
_NUMPY: list[Any] = [bytes, np.ndarray, np.dtype, np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]]
_NUMPY += [type(np.dtype(code)) for code in "?bBhHiIlLqQefdFDSU"]


@contextlib.contextmanager
def with_checksums() -> Iterator[None]:
    """Within this, torch.save writes checksums even where the program switched them off."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def checked_load(
    source: str | bytes, what: str, weights_only: bool = True, allowed: Sequence[Any] = ()
) -> Any:
    """What torch.save wrote, on the CPU.

    source: a path or the bytes themselves; what: how an error calls it. weights_only: refuse (DM655) whatever
    is no tensor, number, string or container of them; `allowed` lists further harmless classes. DM654 where
    the file is damaged; FileNotFoundError.
    """
    name = f"the {what}" if isinstance(source, bytes) else f"the {what} {source}"
    file: Any = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
        if bad is not None:
            raise damaged(name, f"the checksum of its record {bad} is wrong")
        with torch.serialization.safe_globals([*_NUMPY, *allowed]):
            return torch.load(_rewound(file), map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise damaged(name, str(error)) from error
        raise XlaError(
            "DM655",
            f"{name} holds objects that are no tensors, numbers, strings or containers of them",
            why=_first_reason(str(error)),
            cure="load with weights_only=False if you trust whoever wrote it: unpickling can run any code",
        ) from None
    except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError, UnicodeDecodeError) as error:
        if isinstance(error, XlaError):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise damaged(name, f"it cannot be read ({reason})") from error


def damaged(name: str, why: str) -> XlaError:
    """The error for a file that is cut off or changed."""
    return XlaError("DM654", f"{name} is damaged", why=why, cure="use another copy or an earlier checkpoint")


def _rewound(file: str | IO[bytes]) -> str | IO[bytes]:
    if not isinstance(file, str):
        file.seek(0)
    return file


def _first_reason(message: str) -> str:
    """The line of torch's long text that names the class."""
    for line in message.splitlines():
        if "GLOBAL" in line or "Unsupported" in line:
            return line.strip().removeprefix("WeightsUnpickler error: ").split(" was not an allowed")[0]
    return message.splitlines()[0] if message else "unknown"
