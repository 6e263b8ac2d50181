"""Coded errors of the device, with the line of the user's program.

>>> require(index < count, "DM607", f"there is no device xla:{index}", cure="use a lower index")
"""

from __future__ import annotations

from typing import Any

from dynamotor.extension_api import XlaError, user_line


def require(holds: Any, code: str, what: str, *, why: str = "", cure: str = "") -> None:
    """Raise the XlaError that the rest describes, unless it holds."""
    if not holds:
        raise XlaError(code, what, why=why, cure=cure, where=user_line())
