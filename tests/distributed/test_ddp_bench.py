"""The bench's arithmetic and its picture, from made-up measurements."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from bench import ddp
from bench.ddp_overlap import evidence, merged
from bench.ddp_picture import lanes, timeline
from bench.simulate import Link

JOB = {"model": "m", "world": 2}
STAMPS = [{"ready": 0.01, "done": 0.03, "backward": 0.04}, {"ready": 0.03, "done": 0.05, "backward": 0.04}]
CELL = {
    "times": {
        "eager": {"step": [0.10, 0.12], "alone": [0.08, 0.08], "forward": [0.04, 0.04]},
        "ingraph": {"step": [0.08, 0.10], "alone": [0.07, 0.07], "forward": [0.03, 0.03]},
    },
    "stamps": {"eager": STAMPS, "ingraph": STAMPS},
    "nbytes": [1_000_000, 1_000_000],
    "compiled": {"ingraph": 1},
    "fallback": {},
    "link": [[1 << 20, 0.1 + 1e-3], [2 << 20, 0.2 + 1e-3], [5 << 20, 0.5 + 1e-3]],
}


def test_a_row_compares_round_by_round() -> None:
    eager, ours = ddp.rows_of(JOB, "none", CELL, None)
    assert eager["vs_eager"] == 1.0 and eager["ms"] == pytest.approx(110)
    assert ours["vs_eager"] == pytest.approx((1.25 + 1.2) / 2) and ours["exposed_ms"] == pytest.approx(20)
    assert ours["ready_fraction"] == pytest.approx(1 / 3) and ours["ok"]
    assert len(ddp.render([ddp.table_row(eager), ddp.table_row(ours)]).splitlines()) == 3


def test_a_mode_that_did_not_compile_fails_its_row() -> None:
    row = ddp.rows_of(JOB, "none", {**CELL, "compiled": {"split": 1}}, None)[1]
    assert not row["ok"] and "not compiled" in row["note"]


def test_a_mode_that_fails_costs_its_row_only() -> None:
    rows = ddp.rows_of(JOB, "none", {**CELL, "errors": {"inductor": "AssertionError: x"}}, None)
    assert (
        [row["mode"] for row in rows] == ["inductor", "eager", "ingraph"]
        and rows[0]["note"].endswith("x")
        and rows[0]["ok"]
    )


def test_a_cell_that_cannot_be_shaped_is_skipped_and_an_error_is_not() -> None:
    assert ddp.rows_of(JOB, "200", {"skipped": "no shaped link here"}, None)[0]["ok"]
    assert not ddp.rows_of(JOB, "200", {"error": "died"}, None)[0]["ok"]


def test_the_simulation_uses_the_fitted_link() -> None:
    fitted = ddp.calibration([("none", CELL), ("80", CELL)], 2)
    assert fitted is not None and fitted.error is not None and fitted.error < 0.02
    row = ddp.rows_of(JOB, "80", CELL, fitted)[1]
    assert row["simulated_ms"] > 100
    assert ddp.predicted(CELL, Link(1e12), 2) == pytest.approx(0.07, rel=1e-3)


def event(name: str, start: float, end: float, cat: str = "kernel") -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start}


TRACE = [
    event("ncclDevKernel_AllReduce", 10, 20),
    event("void sinh_kernel_cuda", 90, 100),
    event("gemm", 1_000, 11_000),
    event("gemm", 13_000, 21_000),
    event("ncclDevKernel_AllReduce", 6_000, 16_000),
    event("ncclDevKernel", 15_000, 17_000),
    event("cudaLaunchKernel", 0, 90_000, "cuda_runtime"),
    {"ph": "M", "name": "process_name"},
]


def test_communication_beside_kernels_is_what_both_cover() -> None:
    found = evidence(TRACE)
    assert (found["collectives_ms"], found["kernels_ms"], found["both_ms"], found["count"]) == (
        11.0,
        18.0,
        9.0,
        2,
    )
    assert found["share"] == pytest.approx(9 / 11) and found["step_ms"] == 20.0
    assert found["lanes"] == {"kernels": [[0.0, 10.0], [12.0, 20.0]], "collectives": [[5.0, 16.0]]}
    assert evidence([])["share"] is None
    assert merged([(3, 4), (0, 2), (1, 3)]) == [(0, 4)]


def test_figures_that_came_before_an_error_stay() -> None:
    cell = {key: value for key, value in CELL.items() if key != "stamps"} | {
        "error": "no more within 9 s",
        "profile": {},
    }
    rows = ddp.rows_of(JOB, "none", cell, None)
    assert [(row["mode"], row["ok"]) for row in rows] == [("-", False), ("eager", True), ("ingraph", True)]
    assert ddp.rows_of(JOB, "none", {"errors": {}}, None)[0]["note"] == "nothing"


def test_the_picture_is_well_formed() -> None:
    root = ElementTree.fromstring(
        timeline([("bert4 <200>", {"eager": STAMPS, "off": []}), ("r", {"ingraph": STAMPS})])
    )
    assert sum(child.tag.endswith("rect") for child in root) >= 10
    root = ElementTree.fromstring(lanes([("bert <32>", {"ingraph": evidence(TRACE), "off": evidence([])})]))
    assert [child.get("d").count("M") for child in root if child.tag.endswith("path")] == [2, 1, 0, 0]


def test_kernels_narrower_than_a_pixel_are_one_bar() -> None:
    kernels = [[k / 1000, k / 1000 + 0.0008] for k in range(1000)] + [[50.0, 60.0]]
    mode = {
        "share": None,
        "collectives_ms": 0.0,
        "step_ms": 100.0,
        "lanes": {"kernels": kernels, "collectives": []},
    }
    root = ElementTree.fromstring(lanes([("m", {"eager": mode})]))
    first, second = next(child.get("d") for child in root if child.tag.endswith("path")).split("z")[:2]
    assert first.startswith("M250.0 ") and "h8.7v" in first and "h82.0v" in second
