"""The compiler's warnings: `text_of(recwarn)`."""

from __future__ import annotations

import pytest

from dynamotor import DynamotorWarning


def text_of(recwarn: pytest.WarningsRecorder) -> str:
    """The messages of the compiler's own warnings, a line each."""
    return "\n".join(str(row.message) for row in recwarn if issubclass(row.category, DynamotorWarning))
