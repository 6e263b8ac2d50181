"""The C++ text that every translation unit starts with: the sections of prelude.h that its functions need."""

from __future__ import annotations

import re
from pathlib import Path

_TEXT = Path(__file__).with_name("prelude.h").read_text()
_SECTIONS = dict(re.findall(r"^// == (\w+):.*\n((?:(?!// == ).*\n)*)", _TEXT, re.MULTILINE))


def prelude(widths: set[int], random: bool, sizes: bool = False) -> str:
    """The parts that functions with these vector widths need; sizes: some are known only at the call."""
    parts = [
        _SECTIONS["types"],
        *(_SECTIONS["width"].replace("@", str(w)) for w in sorted(widths)),
        _SECTIONS["core"],
        *([_SECTIONS["sizes"]] if sizes else []),
        _SECTIONS["math"],
        _SECTIONS["keep"],
        *([_SECTIONS["random"]] if random else []),
    ]
    return "".join(parts)
