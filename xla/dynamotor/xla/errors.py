"""Coded errors of the device, with the line of the user's program.

>>> require(index < count, "DM607", f"there is no device xla:{index}", cure="use a lower index")
"""

from __future__ import annotations

from typing import Any

from dynamotor.extension_api import XlaError, user_line


class XlaValueError(XlaError, ValueError):
    """Arguments do not fit together: programs for torch_xla catch a ValueError there."""


class XlaTraceError(XlaError, AssertionError):
    """DM669: a function cannot be traced. torch_xla's loops fail an assertion there."""


_KINDS = {"DM669": XlaTraceError, "DM671": XlaValueError, "DM674": XlaValueError}


def coded(code: str, what: str, **more: Any) -> XlaError:
    """The error of a code, as the class that programs may catch it by."""
    return _KINDS.get(code, XlaError)(code, what, **more)


def require(holds: Any, code: str, what: str, *, why: str = "", cure: str = "") -> None:
    """Raise the XlaError that the rest describes, unless it holds."""
    if not holds:
        raise coded(code, what, why=why, cure=cure, where=user_line())
