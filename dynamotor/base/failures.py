"""Where internal errors leave a script that repeats them: a room above registers what writes it.

>>> failures.writer = write_script      # (graph, inputs, error) -> path
>>> failures.note(gm, inputs, error)    # the error's text now says where the script is
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import DynamotorError

writer: Callable[[Any, Sequence[Any], Exception], Path] | None = None
_said = "script that repeats it"


def note(graph: Any, inputs: Sequence[Any] | None, error: Exception) -> None:
    """Write a script for a graph that failed on these inputs, and say in the error where it is; once an
    error.
    """
    if (
        writer is None
        or graph is None
        or inputs is None
        or not isinstance(error, DynamotorError)
        or _said in str(error)
    ):
        return
    try:
        path = writer(graph, inputs, error)
    except (
        OSError,
        RuntimeError,
        ValueError,
        TypeError,
        ImportError,
    ) as why:  # the error itself matters more
        error.add(f"no {_said} could be written: {why}")
    else:
        error.add(f"a {_said}: {path} (python -m dynamotor minify {path} makes it small)")
