"""The report: its contents, and that it works in a real browser (`make test-report` needs Debian's chromium
and chromium-driver).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from children import run_forked
from torch import nn

import dynamotor
from bench import torchvision_stub
from dynamotor.base.events import _listeners
from dynamotor.tools.record import GraphNode, GraphText, Record
from dynamotor.tools.report import _si, drawing, write
from dynamotor.tools.verdict import Verdict

# `make test-report` sets this folder: screenshots for the documents are taken.
PICTURES = os.environ.get("DYNAMOTOR_PICTURES", "")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(32, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.nn.functional.gelu(self.first(x))
        print(end="")  # breaks the graph
        return self.norm(y).t().softmax(-1) * n


@pytest.fixture(scope="module")
def record() -> Record:
    """A model with a break, called with two sizes and numbers."""
    found, model = Record(), dynamotor.compile(Model())
    with found.listening():
        model(torch.randn(4, 32), 2).sum().backward()
        model(torch.randn(6, 32), 3).sum().backward()
    return found


@pytest.fixture(scope="module")
def page(record: Record, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(record, tmp_path_factory.mktemp("report") / "report.html", "a model")


@pytest.mark.slow
def test_it_shows_source_breaks_guards_recompiles_and_refusals(record: Record, page: Path) -> None:
    text = page.read_text()
    assert "DM211" in text and "print() is called" in text and "breaks the graph" in text
    assert f"{Path(__file__).name}:" in text and "TensorMatch" in text
    assert "argument `x` has size 6 at dimension 0, was 4" in text
    assert "complete only after the nest" in text
    assert all(step.name in text for program in record.programs for step in program.steps)
    assert "= x.shape[0]" in text or "x.shape[0]" in text  # sizes
    steps = [step for passes in record.passes for step in passes.steps]
    assert steps and all(step.added or step.removed for step in steps)
    assert all(step.name in text for step in steps)


def test_it_needs_no_network(page: Path) -> None:
    text = page.read_text()
    assert "<script src" not in text and '<link rel="stylesheet' not in text and "@import" not in text
    assert not [part for part in text.split('src="')[1:] if part.startswith("http")]


@dynamotor.disable
def kept_out(x: torch.Tensor) -> torch.Tensor:
    return x.sin().cos()


class Other(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kept_out(x.relu()) * 2


def test_the_verdict_says_shares_time_and_the_first_thing_to_fix(tmp_path: Path) -> None:
    text = dynamotor.report(Other(), torch.ones(3), path=tmp_path / "r.html").read_text()
    head = text[text.index('id="verdict"') : text.index('id="summary"')]
    assert "50 % of the torch calls ran compiled" in head and "2 of 4" in head
    assert "times as fast as eager" in head and "of the time of a forward pass" in head
    assert "<b>First to fix:</b> [DM222]" in head and "take the mark away" in head
    text = dynamotor.report(lambda x: x.sin() * 2, torch.ones(3), path=tmp_path / "r.html").read_text()
    assert "100 % of the torch calls ran compiled" in text and "Nothing: every function" in text


def test_all_that_is_left_to_eager_is_listed() -> None:
    record = Record()
    with record.listening():
        compiled = dynamotor.compile(Other())
        for _ in range(3):
            compiled(torch.ones(3))
        dynamotor.compile(runs_a_text)(torch.ones(3))
    verdict = Verdict.of(record)
    found = {left.name: left for left in verdict.left}
    assert found["Other"].calls == 6 and found["Other"].why.startswith("[DM222]")
    assert verdict.left[0] is found["Other"] and verdict.first.endswith("or accept the break")
    (never,) = [left for left in verdict.left if left.name.startswith("uses_its_locals")]
    assert never.why.startswith("never captured: it may read its dict of locals later")


def uses_its_locals(x: torch.Tensor) -> torch.Tensor:
    locals()["y"] = 1
    return locals()["x"].sin()


def runs_a_text(x: torch.Tensor) -> torch.Tensor:
    return eval("uses_its_locals(x)")


def test_rows_of_functions_of_one_name_are_told_apart() -> None:
    record = Record()
    with record.listening():
        for factor in (2, 3):
            for size in (3, 4):
                dynamotor.compile(lambda x: x * factor, dynamic=False)(torch.ones(size))  # noqa: B023
        dynamotor.compile(lambda x: x - 1)(torch.ones(3))
    names = [capture.name for capture in record.captures]
    assert len(set(names)) == len(names) > 2


def test_a_report_measures_its_kernels(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.randn(128, 64)
    listeners = len(_listeners)
    path = dynamotor.report(model, x, path=tmp_path / "r.html")
    text = path.read_text()
    assert "% of peak" in text and text.count("FLOP") > 3 and "Peaks measured here" in text
    assert len(_listeners) == listeners and all(p.grad is None for p in model.parameters())


def test_a_drawing_has_a_box_a_call_and_readers_stand_below() -> None:
    nodes = (
        GraphNode("x", "placeholder", "x", (), None, ""),
        GraphNode("a", "call_function", "aten.sin.default(x)", ("x",), None, ""),
        GraphNode("b", "call_function", "aten.cos.default(x)", ("x",), None, ""),
        GraphNode("c", "output", "return", ("a", "b"), None, ""),
    )
    found = drawing(GraphText("g", "captured", "", nodes))
    at = {b["label"]: (b["x"], b["y"]) for b in found["boxes"]}
    assert (
        set(at) == {"sin", "cos", "return"}
        and at["sin"][1] == at["cos"][1] < at["return"][1]
        and at["sin"][0] != at["cos"][0]
    )
    assert len(found["lines"]) == 2


@pytest.mark.slow
def test_a_programs_report_is_written_when_it_ends(tmp_path: Path) -> None:
    code = "import torch, dynamotor\ndynamotor.compile(lambda x: x.sin() + 1)(torch.randn(3))"
    done = run_forked(code, DYNAMOTOR_REPORT=str(tmp_path / "out.html"))
    assert "sin" in (tmp_path / "out.html").read_text() and str(tmp_path / "out.html") in done.stderr


# -- in a browser --------------------------------------------------------------------------------------------
def _why_no_browser() -> str:
    if os.environ.get("DYNAMOTOR_SANITIZE"):
        return "a browser does not start with the sanitizers' libraries"
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed (pip install selenium)"
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not found (apt-get install chromium chromium-driver)" if missing else ""


needs_browser = pytest.mark.skipif(bool(_why_no_browser()), reason=_why_no_browser() or "there is one")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for option in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1280,1000",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ):  # no network
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def _opened(browser: Any, page: Path) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get(page.as_uri())
    WebDriverWait(browser, 60).until(lambda b: b.execute_script("return document.readyState") == "complete")


@needs_browser
def test_sections_open_search_filters_and_the_console_is_silent(browser: Any, page: Path) -> None:
    _opened(browser, page)
    names = browser.execute_script("return [...document.querySelectorAll('h2')].map(h => h.id)")
    assert {
        "summary",
        "source",
        "graphs",
        "guards",
        "recompiles",
        "kernels",
        "refusals",
        "memory",
        "phases",
        "eager",
        "sizes",
    } <= set(names)
    closed = "return [...document.querySelectorAll('details')].filter(d => !d.open).length"
    assert browser.execute_script(closed) > 5
    for summary in browser.find_elements("css selector", "#kernels ~ details:not([open]) > summary")[:2]:
        summary.click()
    before = browser.execute_script(closed)
    _picture(browser, "report.png")
    shown = (
        "return [...document.querySelectorAll('.item')].filter(e => !e.classList.contains('hidden')).length"
    )
    everything = browser.execute_script(shown)
    field = browser.find_element("id", "search")
    field.send_keys("softmax")
    found = browser.execute_script(shown)
    assert 0 < found < everything and browser.find_element("id", "found").text == f"{found} found"
    assert browser.execute_script(closed) < before  # what fits is opened
    assert any(
        code.is_displayed()
        for code in browser.find_elements("xpath", "//summary/code[contains(text(), 'dm_')]")
    )
    field.clear()
    field.send_keys("no such thing")
    assert browser.execute_script(shown) == 0
    assert not browser.get_log("browser")


@needs_browser
@pytest.mark.parametrize("width", [400, 900])
def test_a_narrow_window_needs_no_sideways_scrolling(browser: Any, page: Path, width: int) -> None:
    size = browser.get_window_size()
    try:
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": True},
        )
        _opened(browser, page)
        browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true;")
        wide = "return [document.documentElement.scrollWidth, window.innerWidth]"
        scrolled, window = browser.execute_script(wide)
        assert scrolled <= window == width
        _picture(browser, f"report-{width}.png")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.set_window_size(size["width"], size["height"])


@needs_browser
def test_keys_reach_search_sections_and_pictures(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    _opened(browser, page)
    body = browser.find_element("tag name", "body")
    body.send_keys(Keys.TAB)
    assert browser.switch_to.active_element.text == "skip to the verdict"
    body.send_keys("/")
    assert browser.switch_to.active_element.get_attribute("id") == "search"
    browser.switch_to.active_element.send_keys("no such thing", Keys.ESCAPE)
    assert browser.find_element("id", "search").get_attribute("value") == ""
    summary = browser.find_element("css selector", "details:not([open]) > summary")
    summary.send_keys(Keys.ENTER)
    assert browser.execute_script("return arguments[0].parentElement.open", summary)
    for opened in ("details > summary", "details.picture > summary"):
        browser.execute_script(
            "for (const s of document.querySelectorAll(arguments[0])) s.parentElement.open = true;", opened
        )
    picture = browser.find_element("css selector", ".zoom svg")
    box = "const b = arguments[0].viewBox.baseVal; return [b.x, b.y, b.width]"
    before = browser.execute_script(box, picture)
    picture.send_keys(Keys.ARROW_RIGHT, "+")
    x, y, width = browser.execute_script(box, picture)
    assert x > before[0] and width < before[2]
    steps = next(
        s
        for s in browser.find_elements("css selector", ".steps")
        if s.find_elements("css selector", "section + section")
    )
    shown = (
        "return [...arguments[0].querySelectorAll('section')].findIndex(s => !s.classList.contains('hidden'))"
    )
    places = []
    for key in (Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.END):
        steps.send_keys(key)
        places.append(browser.execute_script(shown, steps))
    assert places[:4] == [0, 1, 0, 0] and places[4] >= 1
    assert not browser.get_log("browser")


@needs_browser
def test_a_picture_of_a_graph_zooms_and_moves(browser: Any, page: Path) -> None:
    _opened(browser, page)
    browser.execute_script(
        "for (const d of document.querySelectorAll('#graphs ~ details, details.picture')) d.open = true;"
    )
    box = (
        "const b = document.querySelector('.zoom svg').viewBox.baseVal; return [b.x, b.y, b.width, b.height]"
    )
    before = browser.execute_script(box)
    browser.execute_script(
        "const s = document.querySelector('.zoom svg'); s.scrollIntoView();"
        "s.dispatchEvent(new WheelEvent('wheel', {deltaY: -1, clientX: 300, clientY: 300, cancelable: true}))"
    )
    assert browser.execute_script(box)[2] < before[2]
    assert browser.execute_script("return document.querySelectorAll('.zoom rect').length") > 5
    _picture(browser, "report-graph.png")
    assert not browser.get_log("browser")


@needs_browser
@pytest.mark.slow
def test_the_report_of_a_bert_training_step_is_small(browser: Any, tmp_path: Path) -> None:
    torchvision_stub.prepare()
    from transformers import BertConfig, BertForMaskedLM

    model, ids = BertForMaskedLM(BertConfig()), torch.randint(0, 30_000, (1, 64))
    path = dynamotor.report(
        lambda ids: model(input_ids=ids, labels=ids).loss, ids, path=tmp_path / "bert.html"
    )
    assert path.stat().st_size < 10e6
    _opened(browser, path)
    elements = browser.execute_script("return document.getElementsByTagName('*').length")
    assert elements < 100_000  # a browser's time grows with them
    _picture(browser, "report-bert.png")
    assert not browser.get_log("browser")


def _picture(browser: Any, name: str) -> None:
    if PICTURES:
        browser.save_screenshot(str(Path(PICTURES) / name))


def test_nothing_has_no_prefix() -> None:
    assert _si(0, "B") == "0 B" and _si(1500, "B") == "1.5 kB"
