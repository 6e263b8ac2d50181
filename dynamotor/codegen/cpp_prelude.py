"""The text before the functions of a C++ unit: of `prelude.h`, the sections whose functions the unit calls.

>>> text = prelude(functions_text, widths={16}, random=False, sizes=False)

Functions that no section computes come from SLEEF, one row each: the library for vectors that PyTorch itself
uses and exports. They are looked up when a unit is loaded, so nothing is linked.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch

from .cpp_kernel import isa, machine_width
from .cpp_narrow import NarrowLanes

# SLEEF's name of a function's error bound, in units of the last place.
ONE_OPERAND = {
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan"), "_u10"),
    **dict.fromkeys(("asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"), "_u10"),
    **dict.fromkeys(("erf", "lgamma"), "_u10"),
    "erfc": "_u15",
}
TWO_OPERANDS = {"pow": "_u10", "atan2": "_u10", "hypot": "_u05", "fmod": ""}

_TEXT = Path(__file__).with_name("prelude.h").read_text()
_SECTIONS = dict(re.findall(r"^// == ([\w ]+):.*\n((?:(?!// == ).*\n)*)", _TEXT, re.MULTILINE))
_CALLED = {title: title.split() for title in _SECTIONS if title.endswith("_")}
if torch.__version__ < "2.14":  # whose vectors of floats are SLEEF's: infinite where these are not
    del _CALLED["sinh_ cosh_"]
_OWN = {name for names in _CALLED.values() for name in names}
_NAME = re.compile(r"\b(\w+_(?:library)?)\(")


def prelude(functions: str, widths: set[int], random: bool = False, sizes: bool = False) -> str:
    """The parts that these functions need; widths: of their vectors, sizes: some are known only at the
    call.
    """
    math, names = [], set(_NAME.findall(functions))
    for title in reversed(_CALLED):  # each calls only those before it
        if names.intersection(_CALLED[title]):
            math.append(_SECTIONS[title])
            names |= set(_NAME.findall(_SECTIONS[title]))
    library = _library(names)
    return "".join(
        (
            _SECTIONS["types"],
            *(_width(w) for w in sorted(widths | _room(bool(library)) | _pieces(names))),
            _SECTIONS["core"],
            *([_SECTIONS["sizes"]] if sizes else []),
            *([_SECTIONS["threads"]] if "over(" in functions else []),
            _SECTIONS["math"],
            *([_SECTIONS["library"], library] if library else []),
            *reversed(math),
            _SECTIONS["keep"],
            *([_SECTIONS["random"]] if random else []),
        )
    )


def _width(lanes: int) -> str:
    section: str = _SECTIONS["narrow" if type(lanes) is NarrowLanes else "width"]
    return section.replace("@", f"{lanes:d}")


def _library(names: set[str]) -> str:
    """The rows of the library that a text with these names calls."""
    rows = []
    for operands, table in (("x", ONE_OPERAND), ("x,y", TWO_OPERANDS)):
        for name, error in table.items():
            called = f"{name}_" in names and f"{name}_" not in _OWN
            if called or f"{name}_library" in names:
                count = operands.count(",") + 1
                rows.append(f"LIBRARY{count}({name},{error})\n")
            if called:
                typed = ",".join(f"T {x}" for x in operands.split(","))
                rows.append(
                    f"template<class T> INL T {name}_({typed}){{ return {name}_library({operands}); }}\n"
                )
    return "".join(rows)


def _pieces(names: set[str]) -> set[int]:
    """The width of the vectors in which functions are computed by pieces (`piece_`)."""
    return {16} if "piece_" in names and machine_width() == 16 else set()


def _room(library: bool) -> set[int]:
    """The widths of the vectors in which the library computes numbers and narrow vectors (`ROOM`)."""
    if not library:
        return set()
    if machine_width() >= 8:
        return {8, 4}
    return {4, 2} if platform.machine() == "aarch64" or isa().name in ("asimd", "sve") else set()
