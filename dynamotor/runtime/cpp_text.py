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

_TOKENS = re.compile(r"[{}();\n]|[^{}();\n]+")
_SPACED = (
    (re.compile(r"\b(for|if|while)\("), r"\1 ("),
    (re.compile(r"(?<=[\w\])])([-+*]?=)(?=[^=])"), r" \1 "),
    (re.compile(r"([,;])(?=[^\s)])"), r"\1 "),
    (re.compile(r"(\+\+\))(?=\w)"), r"\1 "),
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
    start = re.search(r'^extern "C" void \w+\(void\*\*P', text, re.MULTILINE)
    if start is None:
        return text
    lines: list[str] = []
    line, depths = "", [0]  # of parentheses, in each block that is open

    def end() -> None:
        nonlocal line
        if line.strip():
            lines.append("    " * (0 if line.startswith("#") else len(depths) - 1) + _spaced(line.strip()))
        line = ""

    for token in _TOKENS.findall(text[start.start() :]):
        if token == "{" and line.endswith("=") or token == "}" and line.endswith("={"):
            line += token  # an initialiser
        elif token == "{":
            if line == "}":
                end()
            line += token if not line or line.endswith(" ") else " {"
            end()
            depths.append(0)
        elif token == "}":
            end()
            depths.pop()
            line = token
        elif token == "\n":
            if not depths[-1]:
                end()
                lines += [""] * (len(depths) == 1)
        else:
            if line == "}" and not re.match(r"[;),]", token):
                if token.startswith("else"):
                    line += " "
                else:
                    end()
            depths[-1] += {"(": 1, ")": -1}.get(token, 0)
            line += token
            if token == ";" and not depths[-1]:
                end()
    end()
    return text[: start.start()] + "\n".join(lines).rstrip() + "\n"


def _spaced(line: str) -> str:
    if line.startswith("#"):
        return line
    for pattern, spaced in _SPACED:
        line = pattern.sub(spaced, line)
    return line
