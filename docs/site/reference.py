"""Reference pages made from the package itself: the public names from their docstrings, the settings from the
comments of `Config`.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
import api_examples  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/dynamotor/dynamotor/blob/main"

GROUPS = {
    "Compile": (
        "compile",
        "compile_step",
        "compile_fx",
        "disable",
        "reset",
        "run",
        "set_stance",
        "is_compiling",
    ),
    "Marks": (
        "mark_dynamic",
        "mark_static",
        "allow_in_graph",
        "disallow_in_graph",
        "assume_constant_result",
        "nested_compile_region",
        "cudagraph_mark_step_begin",
    ),
    "Inspect": ("explain", "lower", "report", "counters"),
    "Export and caches": ("export", "package", "load", "save_cache_artifacts", "load_cache_artifacts"),
    "Backends": ("register_backend", "list_backends", "replace_torch_compile"),
    "Settings": ("config", "Options"),
}


def api_page() -> str:
    """Signature, docstring and source of each public name."""
    import dynamotor

    kinds = {"Errors": Exception, "Warnings": Warning}
    rest = [name for name in dynamotor.__all__ if isinstance(getattr(dynamotor, name), type)]
    groups = dict(GROUPS)
    for title, kind in kinds.items():
        groups[title] = tuple(
            name
            for name in rest
            if issubclass(getattr(dynamotor, name), kind)
            and (kind is Warning or not issubclass(getattr(dynamotor, name), Warning))
        )
    lines = ["# API", "", "Generated from the docstrings of the public names.", ""]
    for title, names in groups.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += [*_entry(name, getattr(dynamotor, name)), ""]
    return "\n".join(lines)


def examples() -> dict[str, Callable[[], None]]:
    """The examples by the lower-case name that they are of."""
    return {
        name.removesuffix("_example"): value
        for name, value in vars(api_examples).items()
        if name.endswith("_example")
    }


def _entry(name: str, value: Any) -> list[str]:
    lines = [f"### `dynamotor.{name}` {{: #{name.lower().replace('_', '-')} }}", ""]
    if inspect.isfunction(value):
        lines += ["```python", f"{name}{_signature(value)}", "```", ""]
    described = inspect.getdoc(value) if callable(value) else _COMMENTS.get(name, "")
    lines += [_as_markdown(described or "")]
    if example := examples().get(name.lower()):
        lines += ["", "```python", inspect.getsource(example).partition("\n")[2], "```"]
        lines[-2] = textwrap.dedent(lines[-2]).rstrip()
    if inspect.isfunction(value) or inspect.isclass(value):
        path = Path(inspect.getsourcefile(inspect.unwrap(value)) or "").resolve().relative_to(ROOT)
        line = inspect.getsourcelines(inspect.unwrap(value))[1]
        lines += ["", f"[source]({REPOSITORY}/{path}#L{line})"]
    return lines


_COMMENTS = {
    "counters": "Counts by group and name since the start or `reset()`: `counters['frames']['captured']`, `counters['breaks']['DM211']`, "
    "`counters['fallback'][...]`, `counters['cache'][...]`.",
    "config": "The settings as attributes; `config.patch(name=value)` sets them for a `with` block or a decorated function, "
    "`config.update(name=value)` for the process, `config.snapshot()` gives all. See [settings](settings.md).",
}


def _signature(function: Any) -> str:
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))
    return (
        text
        if len(text) < 90
        else re.sub(r", (?=\*?\*?\w+(:|=|,|\)))", ",\n    ", text).replace("(", "(\n    ", 1)
    )


def _as_markdown(text: str) -> str:
    """A docstring; indented blocks stay as they are."""
    return re.sub(r"^(\w[\w, ]*): ", r"- **\1**: ", text, flags=re.M)


def settings_page() -> str:
    """A row for each field of `Config`: default, environment variable and comment."""
    from dynamotor.base.config import Config

    source = (ROOT / "dynamotor/base/config.py").read_text()
    body = source[source.index("class Config:") :].partition("\n\n\n")[0]
    variables = set(re.findall(r"DYNAMOTOR_\w+", source))
    lines = [
        "# Settings",
        "",
        "Fields of `dynamotor.config`, generated from `dynamotor/base/config.py`. Set one for a callable with `options={...}`, for a block with",
        "`with dynamotor.config.patch(...)`, for the process with `dynamotor.config.name = value`, or by its environment variable.",
        "",
        "| setting | default | environment | meaning |",
        "|---|---|---|---|",
    ]
    comment: list[str] = []
    for line in body.split("\n"):
        field = re.match(r"    (\w+): .* = ", line)
        if line.startswith("    # "):
            comment.append(line[6:])
        elif field:
            name = field[1]
            variable = f"DYNAMOTOR_{name.upper()}"
            environment = f"`{variable}`" if variable in variables else ""
            meaning = " ".join(comment).replace("|", "\\|")
            lines.append(f"| `{name}` | `{getattr(Config, name)!r}` | {environment} | {meaning} |")
        if field is None and not line.startswith("    # ") or field and not _shares(body, line):
            comment = []
    return "\n".join(lines) + "\n"


def _shares(body: str, line: str) -> bool:
    """Whether the next line is a field without a comment of its own, which the same comment describes."""
    following = body.partition(line + "\n")[2].partition("\n")[0]
    return re.match(r"    \w+: ", following) is not None
