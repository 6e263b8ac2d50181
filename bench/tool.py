"""A tool of this folder as a program: its options, its errors as messages, and its figures in the file that
`--json` names.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamotor.base.errors import DynamotorError


def run_tool(
    name: str,
    text: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    main: Callable[[argparse.Namespace], int],
) -> int:
    """Parse the command line, run; the exit status."""
    parser = argparse.ArgumentParser(
        prog=f"python -m dynamotor {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    try:
        return main(parser.parse_args())
    except DynamotorError as error:
        print(error, file=sys.stderr)
        return 2


def read_json(path: str | Path | None) -> Any:
    """An earlier run's figures, whose rows are replaced when asked for again; {} without a file."""
    return json.loads(Path(path).read_text()) if path and Path(path).exists() else {}


def write_json(path: str | Path | None, figures: Any, indent: int = 1, **how: Any) -> None:
    """Write figures to the file that `--json` named; nothing without one.

    The file is replaced at once, so that a run cut off leaves the figures of the write before.
    """
    if path:
        partial = Path(f"{path}.part")
        partial.write_text(json.dumps(figures, indent=indent, **how) + "\n")
        partial.replace(path)
