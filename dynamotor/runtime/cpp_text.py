"""C++ as text: loops for those who write it, and lines with indentation for those who read it.

>>> loop("i", "n", "x[i]=y[i];")
'for(i64 i=0;i<n;i++){x[i]=y[i];}'
>>> print(laid_out('extern "C" void f(void**P){float*x=(float*)P[0];for(i64 i=0;i<9;i++){x[i]=1;}}'), end="")
extern "C" void f(void**P) {
    float*x = (float*)P[0];
    for (i64 i = 0; i<9; i++) {
        x[i] = 1;
    }
}
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_KERNEL = re.compile(r'^extern "C" void \w+\(void\*\*P', re.MULTILINE)
# A closing brace with what belongs to it; a statement or the head of a block; a line that the compiler reads.
_PIECES = re.compile(
    r"\}(?:\s*else\s*\{|[);,]*)|(?:for ?\([^;{}]*;[^;{}]*;[^;{}]*?\)|=\s*\{\}|[^{};\n])*[{;]|[^{};\n]+"
)
_SPACED = (
    (re.compile(r"\b(for|if|while)\("), r"\1 ("),
    (re.compile(r"(?<=[\w\])])([-+*]?=)(?=[^=])"), r" \1 "),
    (re.compile(r"([,;])(?=[^\s)])"), r"\1 "),
    (re.compile(r"(\+\+\))(?=\w)|(?<=\w|\))(?=\{)|(?<=\})(?=else)|(?<=else)(?=\{)"), r"\1 "),
)


def loop(name: str, end: str, body: str | Iterable[str], *, start: str | None = "0", step: int = 1) -> str:
    """A loop of `name` over the steps that end before or at `end`; start None: it is declared already."""
    first = "" if start is None else f"i64 {name}={start}"
    test, on = (f"{name}<{end}", f"{name}++") if step == 1 else (f"{name}+{step}<={end}", f"{name}+={step}")
    return f"for({first};{test};{on}){{{''.join(body)}}}"


def laid_out(text: str) -> str:
    """The same program, a statement a line, what stands in braces indented; lines before the first function
    stay as they are.
    """
    start = _KERNEL.search(text)
    if start is None:
        return text
    lines: list[str] = []
    depth = 0
    for piece in filter(None, map(str.strip, _PIECES.findall(text[start.start() :]))):
        depth -= piece.startswith("}")
        line = piece if piece.startswith("#") else "    " * depth + _spaced(piece)
        depth += piece.endswith("{")
        lines += [line] if depth or lines[-1:] == [""] or piece != "}" else [line, ""]
    return text[: start.start()] + "\n".join(lines).rstrip() + "\n"


def _spaced(line: str) -> str:
    for pattern, spaced in _SPACED:
        line = pattern.sub(spaced, line)
    return line
