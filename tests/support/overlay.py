"""A copy of the repository's packages with text added to some files, for tests that extend the compiler."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
PARTS = ("dynamotor", "xla", "bench", "docs/errors.md", "tests/test_architecture.py")

# The first lines of a program that imports the copy and runs in its folder.
IN_COPY = "import os, sys; sys.path[:0] = sys.argv[1:]; os.chdir(sys.argv[1])\n"

Line = tuple[str, str]  # a line of a file, and the text that goes behind it


def overlay(folder: Path, added: Mapping[str, str], inserted: Mapping[str, Sequence[Line]]) -> list[str]:
    """Copy the packages into `folder`; `added` text goes to the end of files, `inserted` behind lines.

    Returns the arguments of a program that begins with `IN_COPY`.
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
    return [str(path) for path in (folder, folder / "xla", SUPPORT)]
