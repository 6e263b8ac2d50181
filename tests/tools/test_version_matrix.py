"""The pairs of a Python and a PyTorch that are tested are the same in the tool, the workflow and the documents."""

import re
import sys
from pathlib import Path

from dynamotor.base import platform, probe

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from test_versions import PAIRS, VISION, paths_of, rooms  # noqa: E402


def test_the_workflow_runs_the_pairs_of_the_tool():
    text = (ROOT / ".github/workflows/checks.yml").read_text()
    pairs = re.findall(r'python: "([\d.]+)", torch: "([\d.]+)"', text)
    assert [":".join(pair) for pair in pairs] == list(PAIRS)


def test_every_supported_version_is_in_a_pair():
    pythons, torches = (set(part) for part in zip(*(pair.split(":") for pair in PAIRS), strict=True))
    assert pythons == {f"{major}.{minor}" for major, minor in platform.SUPPORTED_PYTHONS}
    minors = {tuple(map(int, torch.split(".")[:2])) for torch in torches}
    assert min(minors) == probe.TESTED[0] and max(minors) == probe.TESTED[1]
    assert {torch.rpartition(".")[0] for torch in torches} <= VISION.keys()


def test_each_torch_has_two_pythons_and_each_python_the_newest_torch():
    by_torch: dict[str, set[str]] = {}
    for pair in PAIRS:
        python, torch = pair.split(":")
        by_torch.setdefault(torch, set()).add(python)
    assert all(len(pythons) >= 2 for pythons in by_torch.values())
    newest = max(by_torch, key=lambda torch: tuple(map(int, torch.split("."))))
    assert len(by_torch[newest]) == len(platform.SUPPORTED_PYTHONS)


def test_every_room_of_tests_is_run():
    found = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} - {"libraries"}
    assert found == set(rooms()) - {".", "xla"} and all(
        (ROOT / p).exists() for r in rooms() for p in paths_of(r)
    )
