"""A copy of the repository's packages with text added to some files, for tests that extend the compiler."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
PARTS = ("dynamotor", "xla", "bench", "docs/errors.md", "tests/test_architecture.py")


Line = tuple[str, str]  # a line of a file, and the text that goes behind it


def overlay(folder: Path, added: Mapping[str, str], inserted: Mapping[str, Sequence[Line]]) -> dict[str, str]:
    """Copy the packages into `folder`; `added` text goes to the end of files, `inserted` behind lines.

    Returns the environment of processes that import the copy.
    """
    for part in PARTS:
        target = folder / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, target)
        else:
            shutil.copy2(ROOT / part, target)
    for name, text in added.items():
        with (folder / name).open("a") as file:
            file.write(text)
    for name, lines in inserted.items():
        whole = (folder / name).read_text()
        for line, text in lines:
            assert line in whole, f"{name} has no line {line!r}"
            whole = whole.replace(line, line + text)
        (folder / name).write_text(whole)
    path = os.pathsep.join(map(str, (folder, folder / "xla", SUPPORT)))
    return {**os.environ, "PYTHONPATH": path}
