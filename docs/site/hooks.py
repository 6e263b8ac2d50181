"""What the site makes of the repository: a page a room from its docstring, the changelog, and the dashboard
from docs/results.
"""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
import charts  # noqa: E402
import reference  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


def room_page(room: Path) -> str:
    """The contract of a room, from the docstring of its package, and what its modules say of themselves."""
    doc = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    lines = [f"# {room.name}", "", doc, "", "## Modules", "", "| module | |", "|---|---|"]
    for path in sorted(room.glob("*.py")):
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        if path.name != "__init__.py":
            lines.append(f"| `{path.name}` | {first.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def rooms() -> list[Path]:
    """The rooms of the package, of both distributions."""
    found = sorted(path.parent for path in (ROOT / "dynamotor").glob("*/__init__.py"))
    return [*found, ROOT / "xla" / "dynamotor" / "xla"]


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def dashboard() -> str:
    """Pass rates, geometric means, first calls and peak memory by suite and phase, from the committed files
    alone.
    """
    lines = [
        "# Dashboard",
        "",
        "Made from the files of `docs/results`; [Results](results/README.md) has their commands.",
        "",
        *(f"![{chart.title}](pictures/{name}.svg){{: .chart }}" for name, chart in charts.charts().items()),
        "",
        "| suite | phase | models | right | times eager | peer, times eager | first call, s | peer | MB: eager | ours |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [row(*suite) for suite in [*cpu_suites(), *gpu_suites()]]
    lines += [
        "",
        "Means are geometric, over the models that are right; MB: the largest amount of memory.",
        "The peer is `torch.compile` where a run had it.",
        "",
        "## Operators",
        "",
        "| suite | dtype | cells | right |",
        "|---|---|---|---|",
    ]
    for name, dtype, cells, passed in operators():
        lines.append(f"| {name} | {dtype} | {cells} | {passed} ({100 * passed / cells:.1f} %) |")
    return "\n".join(lines) + "\n"


def row(suite: str, phase: str, models: int, right: int, numbers: dict[str, list[float]]) -> str:
    cells = [
        f"{geometric_mean(numbers[k]):.{digits}f}" if numbers.get(k) else "-"
        for k, digits in (
            ("ours", 2),
            ("peer", 2),
            ("cold", 2),
            ("peer_cold", 1),
            ("eager_mb", 0),
            ("ours_mb", 0),
        )
    ]
    return f"| {suite} | {phase} | {models} | {right} | {' | '.join(cells)} |"


def cpu_suites() -> list[tuple[Any, ...]]:
    found = []
    for name in ("cpu-bert-resnet18", "cpu-twelve"):
        rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        for phase in ("infer", "train"):
            ours = [r for r in rows if r["phase"] == phase and r["compiler"] == "dynamotor"]
            peer = [r for r in rows if r["phase"] == phase and r["compiler"] == "inductor"]
            count, ours = len(ours), [r for r in ours if r["pass"]]
            found.append(
                (
                    f"`{name}`",
                    phase,
                    count,
                    len(ours),
                    {
                        "ours": [r["timing"]["speedup"] for r in ours],
                        "peer": [r["timing"]["speedup"] for r in peer],
                        "cold": [r["first_call_s"] for r in ours],
                        "peer_cold": [r["first_call_s"] for r in peer],
                    },
                )
            )
    return found


def gpu_suites() -> list[tuple[Any, ...]]:
    found = []
    rows = json.loads((RESULTS / "h200-gpu.json").read_text())["rows"].values()
    for phase in ("infer", "train"):
        own = [r for r in rows if r["mode"] == phase and "ms" in r]
        found.append(
            (
                "`h200-gpu`",
                phase,
                len(own),
                len(own),
                {
                    "ours": [r["speedup"] for r in own],
                    "peer": [r["peer_speedup"] for r in own],
                    "cold": [r["cold_s"]["ours"] for r in own],
                    "peer_cold": [r["cold_s"]["peer"] for r in own],
                    "eager_mb": [r["peak_mb"]["eager"] for r in own],
                    "ours_mb": [r["peak_mb"]["ours"] for r in own],
                },
            )
        )
    models = json.loads((RESULTS / "h200-gpu-models.json").read_text())["models"]
    for phase in sorted({name.rsplit(" ", 1)[1] for name in models}):
        own = [r for name, r in models.items() if name.endswith(f" {phase}") and "ok" in r]
        found.append(("`h200-gpu-models` (reduced)", phase, len(own), sum(bool(r["ok"]) for r in own), {}))
    return found


def operators() -> list[tuple[str, str, int, int]]:
    xla = json.loads((RESULTS / "xla-opinfo.json").read_text())["summary"]
    gpu = json.loads((RESULTS / "h200-gpu-opinfo.json").read_text())["summary"]
    found = [("xla device, OpInfo", dtype, cell["cells"], cell["passed"]) for dtype, cell in xla.items()]
    return found + [("CUDA, OpInfo", dtype, sum(cell.values()), cell["pass"]) for dtype, cell in gpu.items()]


def pages() -> dict[str, str]:
    """The generated pages, by path."""
    found = {f"rooms/{room.name}.md": room_page(room) for room in rooms()}
    found |= {"api.md": reference.api_page(), "settings.md": reference.settings_page()}
    return found | {"dashboard.md": dashboard(), "changelog.md": (ROOT / "CHANGELOG.md").read_text()}


def on_files(files: Any, config: Any) -> Any:
    """MkDocs asks for the site's files."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def with_anchors(text: str) -> str:
    """The table of error codes, each code with an anchor: messages link to `errors/#dm211`."""
    return re.sub(r"^\| (DM\d{3}) \|", lambda m: f'| <a id="{m[1].lower()}"></a>{m[1]} |', text, flags=re.M)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs asks for a page's text. Search leads users to settings first, and not to notes of the design."""
    if page.file.src_uri.startswith("decisions"):
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri == "settings.md":
        page.meta["search"] = {"boost": 5}
    return with_anchors(markdown) if page.file.src_uri == "errors.md" else markdown
