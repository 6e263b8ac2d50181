"""The documents are right: snippets run, links lead somewhere, names of files and functions exist, the
site builds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from kernels import forget_kernels

import dynamotor
from bench import torchvision_stub
from dynamotor import __main__, config
from dynamotor.base import errors
from dynamotor.codegen import cpp_ops

ROOT = Path(__file__).parents[1]
SITE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Documentation"]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Pages whose Python runs as it stands, the programs of several ranks with one; others show parts of programs.
RUN = [
    "README.md",
    "docs/index.md",
    "docs/how-it-works.md",
    "docs/from-torch-compile.md",
    "docs/backends.md",
    "docs/packages.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs/guide").glob("*.md"))),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs/debug").glob("*.md"))),
]
SNIPPETS = [
    (page, n, text)
    for page in RUN
    for n, text in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
]


@pytest.mark.parametrize("page, n, snippet", SNIPPETS, ids=[f"{page}-{n}" for page, n, _ in SNIPPETS])
def test_a_snippet_runs(
    page: str, n: int, snippet: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "snippet.py").write_text(snippet)  # a file: texts about lines are tested
    for needed in re.findall(r"^(?:import|from) (lightning|transformers)\b", snippet, re.MULTILINE):
        pytest.importorskip(needed)
        torchvision_stub.prepare()
    if "Trainer" in snippet and "transformers" in snippet:
        pytest.importorskip("accelerate")
    port = str(25_000 + os.getpid() % 5_000)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():
        if "torch.distributed" in snippet:
            monkeypatch.setenv(name, value)
    with config.patch(check=False), contextlib.suppress(SystemExit):
        runpy.run_path(str(tmp_path / "snippet.py"), run_name="__main__")
    dynamotor.reset()

    torch.compiler.reset()


def test_the_walk_through_finds_its_wrong_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs/debug/walkthrough.md").read_text()
    (program,) = re.findall(r'```python title="train.py"\n(.*?)```', text, re.DOTALL)
    (result,) = re.findall(r'```python title="train.min.py, in part"\n(.*?)```', text, re.DOTALL)
    monkeypatch.setitem(
        cpp_ops.TEXT, "expm1", cpp_ops.TEXT["expm1"]
    )  # put back the row that the program plants
    forget_kernels(monkeypatch)
    (tmp_path / "train.py").write_text(program)
    assert __main__.main(["minify", str(tmp_path / "train.py")]) == 0
    said = re.search(r"`(DM922: .*?) are left in train.min.py`", text)
    checked = re.search(r"`(the value of .*? is not eager's)`", text)
    printed = capsys.readouterr().out
    assert said and said.group(1) in printed and checked and checked.group(1) in printed
    assert result in (tmp_path / "train.min.py").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    named = [
        target.partition("#")[0]
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(rf"{REPOSITORY}/(?:blob|tree)/main/", "", text))
        if not target.startswith("http")
    ]
    generated = {str((ROOT / "docs" / path).resolve()) for path in _generated()}
    missing = [
        name
        for name in named
        if name
        and not (page.parent / name).exists()
        and not (ROOT / name).exists()
        and str((page.parent / name).resolve()) not in generated
    ]
    files = set(
        re.findall(
            r"`((?:docs|tests|xla|tools|examples|fuzz|bench|dynamotor)/[\w./-]+\.(?:py|md|sh|c|h|json|svg))`",
            text,
        )
    )
    missing += [
        name for name in files if not any((folder / name).exists() for folder in (ROOT, ROOT / "dynamotor"))
    ]
    assert not missing


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if p.name not in ("xla-api.md", "leaving-torch-xla.md")],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_names_of_the_package_exist(page: Path) -> None:
    names = set(re.findall(r"`(dynamotor(?:\.\w+)+)", page.read_text()))
    if "xla" not in dynamotor.list_backends():  # the core alone
        names = {name for name in names if not name.startswith("dynamotor.xla")}
    assert not {name for name in names if not _exists(name)}


def _exists(name: str) -> bool:
    """Whether a dotted name is a module of the package, something in one, or a setting."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            found: object = importlib.import_module(".".join(parts[:n]))
            break
    for part in parts[n:]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@functools.cache
def _hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site/hooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def _generated() -> dict[str, str]:
    """The generated pages of the site by path: made once, for the tests of every page."""
    return _hooks().pages()


def test_every_room_has_a_page_and_names_modules_that_exist() -> None:
    pages, nav = _generated(), (ROOT / "mkdocs.yml").read_text()
    packages = ROOT / "dynamotor", ROOT / "xla" / "dynamotor"
    for room in _hooks().rooms():
        text = pages[f"rooms/{room.name}.md"]
        assert f"rooms/{room.name}.md" in nav and len(text) > 200, room
        modules = re.findall(r"`([a-z_]+\.py)`", text)
        assert modules and not [m for m in modules if not any(list(p.rglob(m)) for p in packages)], room


def test_the_dashboard_is_of_the_committed_files() -> None:
    text = _hooks().dashboard()
    assert (
        "| `cpu-twelve` | infer | 12 | 12 | 1.40 |" in text
        and "| `h200-gpu` | train | 8 | 8 | 2.53 | 1.62 |" in text
    )
    assert "xla device, OpInfo | float32 | 672 | 664 (98.8 %)" in text


def test_the_charts_are_those_of_the_committed_figures() -> None:
    made = _hooks().charts.pictures()
    assert len(made) == 6 and {"h200-train.svg", "cpu-first-call.svg"} <= made.keys()
    for name, text in made.items():
        path = ROOT / "docs/pictures" / name
        assert path.read_text() == text, f"python docs/site/charts.py writes {path}"


def test_the_changelog_begins_with_the_version_and_its_date() -> None:
    newest = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and re.fullmatch(rf"{re.escape(dynamotor.__version__)} \(\d{{4}}-\d\d-\d\d\)", newest[1])


def test_the_api_page_has_every_public_name() -> None:
    text = _generated()["api.md"]
    assert not [name for name in dynamotor.__all__ if f"### `dynamotor.{name}`" not in text]
    described = re.findall(r"### `dynamotor.(\w+)`.*?\n\n(.*?)(?=\n###|\n## |\Z)", text, re.DOTALL)
    assert not [name for name, body in described if len(body) < 40]


def test_every_public_name_but_errors_has_an_example() -> None:
    kinds = (Exception,)
    names = [
        n
        for n in dynamotor.__all__
        if not (isinstance(v := getattr(dynamotor, n), type) and issubclass(v, kinds))
    ]
    assert {name.lower() for name in names} == set(_hooks().reference.examples())
    assert _generated()["api.md"].count("```python") >= 2 * len(names) - 4


@pytest.mark.parametrize("name", sorted(_hooks().reference.examples()))
def test_an_example_of_the_api_runs(name: str) -> None:
    with config.patch(check=False):
        _hooks().reference.examples()[name]()
    dynamotor.reset()


def test_the_settings_page_has_every_setting_with_its_meaning() -> None:
    text = _generated()["settings.md"]
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \| .*? \| (.*?) \|$", text, re.MULTILINE))
    assert rows.keys() == vars(config.snapshot()).keys() and all(len(row) > 20 for row in rows.values())
    assert "`DYNAMOTOR_CACHE_DIR`" in text


def test_search_leads_to_settings_and_leaves_design_notes_out() -> None:
    def found(path: str) -> dict[str, object]:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=path), meta={})
        _hooks().on_page_markdown("text", page)
        return page.meta.get("search", {})

    assert found("decisions/sizes.md") == {"exclude": True}
    assert found("settings.md")["boost"] > 1 and found("index.md") == {}
    assert "`cache_size_limit`" in _generated()["settings.md"]
    (separator,) = re.findall("separator: '(.*)'", (ROOT / "mkdocs.yml").read_text())
    assert (
        re.split(separator, "config.cache_size_limit = 8")[1] == "cache_size_limit"
    )  # one term of the index


def test_the_site_has_a_dark_mode_and_names_the_repository() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert "repo_url: https://" in text and "scheme: slate" in text and "prefers-color-scheme: dark" in text
    for page in ("guide/installation.md", "guide/faq.md", "guide/troubleshooting.md", "guide/training.md"):
        assert page in text and (ROOT / "docs" / page).exists()


def test_terms_of_the_glossary_name_files_that_exist() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 25 and {"dynamic shape", "double backward", "rematerialisation"} <= {
        row[0] for row in rows
    }


def test_every_error_code_has_an_anchor_that_messages_link_to() -> None:
    text = (ROOT / "docs/errors.md").read_text()
    codes = set(re.findall(r"^\| (DM\d{3}) \|", text, re.MULTILINE))
    anchors = set(re.findall(r'<a id="(dm\d{3})"></a>', _hooks().with_anchors(text)))
    assert anchors == {code.lower() for code in codes} and len(codes) > 190
    assert errors.link("DM211") == f"{SITE}errors/#dm211"


def test_the_site_builds(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs-material is not installed; `make docs` installs it")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(tmp_path)], cwd=ROOT, check=True)
    assert (tmp_path / "debug/walkthrough/index.html").is_file() and (
        tmp_path / "rooms/capture/index.html"
    ).is_file()
