"""What the documents say holds: snippets run, links and names of files lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import dynamotor

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs/results/README.md"]


@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
def test_a_snippet_of_the_readme_runs(snippet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exec(compile(snippet, "README.md", "exec"), {"__name__": "readme"})
    dynamotor.reset()
    torch.compiler.reset()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    named = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith("http")]
    missing = [name for name in named if name and not (page.parent / name).exists()]
    files = set(re.findall(r"`((?:docs|tests|tools|examples|fuzz|dynamotor)/[\w./-]+\.(?:py|md|sh|c|h|json|svg))`", text))
    missing += [name for name in files if not (ROOT / name).exists() and not (ROOT / "dynamotor" / name).exists()]
    assert not missing
