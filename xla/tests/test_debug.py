"""Counters and the report, the analysis of compilations and cuts, and the profiler."""

from __future__ import annotations

import os
import re

import pytest
import torch

pytest.importorskip("jax")
from children import run_forked  # noqa: E402

import dynamotor.xla.core.xla_model as xm  # noqa: E402
import dynamotor.xla.debug.metrics as met  # noqa: E402
import dynamotor.xla.debug.profiler as xp  # noqa: E402
from dynamotor.base.errors import DynamotorError  # noqa: E402
from dynamotor.xla.debug import analysis  # noqa: E402


def test_counters_and_times():
    met.clear_all()
    assert met.counter_names() == [] and met.metric_names() == [] and met.metrics_report() == ""
    x = torch.randn(3, 5, device="xla")
    (x @ x.T).cpu()
    torch.unique(x, dim=0)
    assert met.counter_value("xla::mm") == 1 and met.counter_value("nothing") is None
    torch.ops.prims.item(torch.ones((), device="xla"))  # reads a number, as `item` does
    assert met.executed_fallback_ops() == ["aten::unique_dim"]
    total, accumulated, samples = met.metric_data("ExecuteTime")
    assert (
        total == len(samples) >= 1
        and accumulated == pytest.approx(sum(v for _, v in samples))
        and accumulated > 1000
    )
    assert met.metric_data("nothing") is None
    met.clear_counters()
    assert met.counter_names() == [] and "ExecuteTime" in met.metric_names()
    met.clear_metrics()
    assert met.metric_names() == []


def test_bytes_that_move_are_counted():
    met.clear_all()
    x = torch.ones(4, 8).to("xla")
    assert met.metric_data("OutboundData")[:2] == (1, 128) and met.metric_data("InboundData") is None
    (x * 2).cpu()
    assert met.metric_data("InboundData")[1] == 128 == met.metric_data("InboundData")[2][0][1]
    assert "OutboundData" in met.metric_names() and "Metric: InboundData\n" in met.metrics_report()
    met.clear_metrics()
    assert met.metric_data("OutboundData") is None


def test_the_report_has_the_known_shape():
    met.clear_all()
    x = torch.randn(3, 7, device="xla")
    for _ in range(3):
        x = x * 1.5
        xm.mark_step()
    report = met.metrics_report()
    time = r"(\d+[dhm])*(\d\ds)?\d{3}ms\d{3}\.\d{3}us"
    assert re.search(
        rf"Metric: ExecuteTime\n  TotalSamples: 3\n  Accumulator: {time}\n  ValueRate: {time} / second\n",
        report,
    )
    assert re.search(rf"  Rate: [\d.e+]+ / second\n  Percentiles: 1%={time}; .*; 99%={time}\n", report)
    assert re.search(r"Counter: MarkStep\n  Value: 3\n", report)
    short = met.short_metrics_report(["MarkStep"], ["CompileTime"])
    assert "MarkStep" in short and "CompileTime" in short and "ExecuteTime" not in short
    assert "MarkStep" in met.short_metrics_report()
    torch.ones(2).to("xla")
    assert "Metric: TensorToData\n" in met.metrics_report()


@pytest.mark.parametrize(
    "seconds,text",
    [(0.0006, "000ms600.000us"), (1.5, "01s500ms000.000us"), (3723.25, "01h02m03s250ms000.000us")],
)
def test_durations(seconds, text):
    assert met._duration(seconds) == text


def test_analysis_says_what_compiled_and_what_cut():
    def f(n):
        x = torch.ones(n, 3, device="xla").cosh() * 1.75
        xm.mark_step()
        return x

    with analysis.collect() as found:
        f(17)
        f(17)
        x = f(18)
        (x + 1).sum().item()
        torch.unique(x, dim=0)
    kinds = [finding.kind for finding in found]
    compiled = [f for f in found if f.kind == "Compilation"]
    assert (
        compiled[0].cause == "mark_step"
        and compiled[0].line.function == "f"
        and compiled[0].line.filename == __file__
    )
    assert "new structure" in compiled[0].reason or "first" in compiled[0].reason
    cut = next(f for f in found if f.kind == "Cut")
    assert (
        "item" in cut.cause
        and "step closure" in str(cut)
        and cut.line.function == "test_analysis_says_what_compiled_and_what_cut"
    )
    assert "Fallback" in kinds and "aten.unique_dim" in next(str(f) for f in found if f.kind == "Fallback")
    assert all(str(f) for f in found)


def test_nobody_listens_afterwards():
    from dynamotor.base.events import listening

    with analysis.collect():
        assert listening("xla.flush")
    stop = analysis.start(open(os.devnull, "w"))  # noqa: SIM115
    stop()
    assert not listening("xla.flush")


@pytest.mark.slow
def test_the_environment_switches_the_analysis_on(tmp_path):
    program = tmp_path / "p.py"
    program.write_text(
        "import torch, dynamotor.xla\nx = torch.ones(3, device='xla') * 2\nprint(x.sum().item())\n"
    )
    for target in ("", str(tmp_path / "log")):
        more = {"PT_XLA_DEBUG_FILE": target} if target else {}
        code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
        done = run_forked(code, str(program), PT_XLA_DEBUG="1", **more)
        text = (tmp_path / "log").read_text() if target else done.stderr
        assert (
            done.stdout == "6.0\n"
            and "Compilation Analysis:" in text
            and f"{program}:3" in text
            and "print(x.sum().item())" in text
        )


def test_profiles(tmp_path):
    with pytest.raises(DynamotorError, match="DM667"):
        xp.trace("localhost:1", str(tmp_path / "none"), duration_ms=10, num_tracing_attempts=1, timeout_s=20)
    server = xp.start_server(29512)
    assert server is not None
    thread = xp.trace_detached("localhost:29512", str(tmp_path / "p"), duration_ms=200)
    with xp.Trace("block"), xp.StepTrace("train_step", step_num=3):
        y = torch.ones(4, device="xla") * 5
    thread.join()
    assert list((tmp_path / "p").rglob("*.xplane.pb")) and y.sum().item() == 20
    assert xp.start_server(29512) is server
    with pytest.raises(DynamotorError, match="DM667"):
        xp.start_server(29513)


@pytest.mark.slow
def test_the_overhead_bench_measures_recording_and_the_bridge(tmp_path):
    import argparse
    import json

    from bench import xla_overhead

    assert xla_overhead.main(argparse.Namespace(seconds=0.1, json=str(tmp_path / "rows"))) == 0
    *recorded, small, large, lstm = json.loads((tmp_path / "rows").read_text())
    assert [row["recording"] for row in recorded] == list(xla_overhead.OPERATIONS)
    assert all(row["ratio"] == row["xla"] / row["cpu"] > 0 for row in recorded)
    assert [row["mlp"] for row in (small, large)] == [64, 256]
    assert all(0 < row["jit"] < float("inf") for row in (small, large))
    assert sorted(lstm["lstm"]) == ["12", "500"] and lstm["lstm"]["500"] > 0
