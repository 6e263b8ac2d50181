"""The GPU bench on a CPU with tiny models: every way that a row takes, so that no slip shows up first on a
GPU.
"""

import json
import sys
import time

import pytest
import torch

pytest.importorskip("transformers", reason="the models need transformers")

import fake_cuda  # noqa: E402

from bench import gpu_bars, gpu_bench, gpu_bench_worker, gpu_kernels
from bench.gpu_programs import BATCH, distance, group_of
from bench.json_worker import JsonWorker
from dynamotor.base.events import counters

JOB = {
    "device": "cpu",
    "tiny": True,
    "seconds": 0.05,
    "peer": "eager",
    "cold": True,
    "batch": 2,
    "model": "BertForMaskedLM",
}


def rows_of(mode, **more):
    job = {**JOB, "mode": mode, "deadline": time.time() + 600, **more}
    found = {}
    for row in gpu_bench_worker.MODES[mode](job)():
        found[f"{row['mode']}/{row['model']}"] = json.loads(json.dumps(row))
    return found


@pytest.mark.slow
def test_a_model_in_training_and_without_dropout():
    counters.clear()
    (row,) = rows_of("train").values()
    assert set(row["ms"]) == set(row["cold_s"]) | {"eager"} == {"eager", "ours", "peer"}
    assert row["speedup"] > 0 and row["graphs"] == 1 and row["profile"]["ours"]["top"] and "errors" not in row
    found = rows_of("errors")
    assert (
        gpu_bars.errors_hold(found["errors/BertForMaskedLM"])
        and found["errors/BertForMaskedLM"]["errors"]["ours"]["grad"] < 0.1
    )


@pytest.mark.slow
def test_a_model_in_inference_prepared_before_it_is_timed():
    (row,) = rows_of("infer", cold=False, optimizer="").values()
    assert row["cold_s"] == {} and row["errors"]["ours"]["out"] < 0.05 and "ratio" in row


@pytest.mark.slow
def test_kernels_and_host_time():
    found = rows_of("kernels", only=["softmax", "layer norm fwd+bwd"])
    assert len(found) == 2 and all(row["errors"]["ours"]["out"] < 0.05 for row in found.values())
    assert all(
        set(ms) == {"as it is", "aligned"}
        for row in rows_of("products").values()
        for ms in row["ms"].values()
    )
    (row,) = rows_of("overhead").values()
    assert set(row["host_us"]) == {"eager", "ours", "peer", "ours graphs"}


@pytest.mark.slow
def test_shapes_that_change():
    (row,) = rows_of("shapes").values()
    assert len({tuple(shape) for shape in row["shapes"]}) == 3
    assert (
        all(len(row["first_s"][p]) == 3 for p in ("eager", "ours", "literal", "peer"))
        and len(row["ms"]["ours"]) == 3
    )


def test_errors_count_against_torch_compiles_alone():
    row = {
        "mode": "infer",
        "model": "m",
        "errors": {"eager": {"out": 0.3}, "ours": {"out": 0.105}, "peer": {"out": 0.1}},
    }
    assert gpu_bars.summary({"infer/m": row})["worse errors"] == []
    row["errors"]["ours"]["out"] = 0.2
    assert gpu_bars.summary({"infer/m": row})["worse errors"] == ["infer/m"]


def test_the_table_for_people():
    row = {**timed_row(0.5), "speedup_spread": [1.9, 2.1]}
    lines = gpu_bars.markdown(
        {"train/resnet50": row, "infer/GPT2LMHeadModel": {**row, "cold_s": {}}}
    ).splitlines()
    assert len(lines) == 2 + len(BATCH) and len({line.count("|") for line in lines}) == 1
    assert lines[2] == "| resnet50 | 4.00 (1.90-2.10) | 2.00 (1.00-1.00) | 1.0 | 4.0 | - | - | - | - |"
    assert lines[5] == "| GPT-2 | - | - | - | - | 4.00 (1.90-2.10) | 2.00 (1.00-1.00) | - | - |"


def test_a_kernel_that_fails_costs_its_row(monkeypatch):
    def broken(*given):
        raise ValueError("no")

    case = gpu_kernels.KernelCase(broken, [torch.ones(2)], 8)
    monkeypatch.setattr(gpu_kernels, "cases", lambda device, tiny: {"broken": case})
    assert "ValueError: no" in rows_of("kernels")["kernels/broken"]["error"]


class Played:
    """A worker that answers from a script, without a process."""

    script = {}
    started = []
    waited = []

    def __init__(self, job):
        self.job = job
        self.started.append(job["model"])
        row = {"mode": job["mode"], "model": job["model"], **self.script.get(job["model"], {})}
        self.messages = [{"ready": 1}, {"compiled": 1}, {"row": row}, {"done": 1}]
        if row.get("dies"):
            self.messages[2:] = [None]

    def message(self, deadline):
        return self.messages.pop(0)

    def wait_ready(self, deadline):
        self.waited.append(self.job["model"])

    def send(self, line):
        return True

    def end(self, patience=0.0):
        return "a last word"


def timed_row(ours, cold=(1.0, 4.0)):
    return {
        "ms": {"eager": 2.0, "ours": ours, "peer": 1.0},
        "speedup": 2.0 / ours,
        "peer_speedup": 2.0,
        "ratio": 1.0 / ours,
        "ratio_spread": [1, 1],
        "cold_s": dict(zip(("ours", "peer"), cold, strict=True)),
    }


@pytest.fixture
def played(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_bench, "Worker", Played)
    Played.script, Played.started = {name: timed_row(0.8) for name in BATCH}, []

    def run(*options):
        args = gpu_bench.arguments().parse_args(
            ["--device", "cpu", "--json", str(tmp_path / "out.json"), *options]
        )
        code = gpu_bench.Session(args).run()
        return code, json.loads((tmp_path / "out.json").read_text())

    return run


def test_all_models_give_the_means_and_the_bars(played):
    code, report = played("--modes", "train,infer")
    assert code == 0 and len(report["rows"]) == 16 and report["summary"]["train"]["ratio"] == 1.25
    assert all(report["summary"]["bars"].values()) and len(report["summary"]["bars"]) == 8
    Played.script["resnet50"] = timed_row(1.25, cold=(3.0, 4.0))
    code, report = played("--modes", "train", "--merge", "there is no such file")
    assert not report["summary"]["bars"]["train: every model >= 0.85"] and report["summary"]["train"][
        "behind"
    ] == [[0.8, "resnet50"]]


def test_a_worker_that_dies_costs_its_row_and_later_runs_are_merged(played, tmp_path):
    Played.script["resnet50"] = {"dies": True}
    code, report = played("--modes", "train", "--models", "resnet50,convnext_base")
    assert code == 1 and "a last word" in report["rows"]["train/resnet50"]["error"]
    (tmp_path / "out.json").rename(tmp_path / "first.json")
    Played.script["resnet50"] = timed_row(0.5)
    code, report = played(
        "--modes", "train", "--models", "resnet50", "--no-cold", "--merge", str(tmp_path / "first.json")
    )
    assert code == 0 and set(report["rows"]) == {"train/resnet50", "train/convnext_base"}
    assert report["rows"]["train/resnet50"]["ratio"] == 2


def test_a_broken_row_does_not_replace_a_whole_one(played, tmp_path):
    played("--modes", "train", "--models", "resnet50")
    (tmp_path / "out.json").rename(tmp_path / "first.json")
    Played.script["resnet50"] = {"dies": True}
    code, report = played("--modes", "train", "--models", "resnet50", "--merge", str(tmp_path / "first.json"))
    assert (
        code == 1
        and report["rows"]["train/resnet50"]["ratio"] == 1.25
        and "a last word" in report["not run"][0]
    )


def test_models_that_compile_side_by_side_are_all_ready_before_one_is_timed(played):
    Played.waited = []
    played(
        "--modes", "train", "--models", "resnet50,convnext_base,GPT2LMHeadModel", "--no-cold", "--side", "2"
    )
    assert Played.waited[:2] == ["resnet50", "convnext_base"] and Played.started[:2] == Played.waited[:2]


def test_what_no_time_is_left_for_is_not_started(played):
    code, report = played("--modes", "train,kernels", "--budget", "5")
    assert code == 1 and not Played.started and len(report["not run"]) == 9
    code, report = played("--modes", "")
    assert code == 0 and report["rows"] == {}


def test_distances_and_kinds_of_kernels():
    a = {"out0": torch.ones(4), "grad w": torch.ones(4), "grad tiny": torch.full((2,), 1e-9)}
    b = {**a, "grad tiny": torch.full((2,), 2e-9)}
    assert distance(a, a) == {"out": 0, "grad": 0, "worst gradient": 0}
    assert distance(b, a)["worst gradient"] < 1e-5
    assert distance({**a, "out0": torch.tensor([1, 1, 1, float("nan")])}, a)["out"] == float("inf")
    assert (
        group_of("sm90_xmma_fprop_implicit_gemm_bf16") == "convolution"
        and group_of("nvjet_tst_128x256") == "matmul"
    )
    assert (
        group_of("dm_add_mul_0123456789") == "generated"
        and group_of("vectorized_elementwise_kernel") == "other"
    )


def test_a_worker_that_talks_and_one_that_dies():
    talk = "import sys; print('noise'); print('{\"a\": 1}', flush=True); print(sys.stdin.readline().strip())"
    worker = JsonWorker([sys.executable, "-c", talk])
    end = time.monotonic() + 20
    assert (
        worker.next(end) == {"a": 1}
        and worker.send('{"b": 2}')
        and worker.next(end) == {"b": 2}
        and worker.next(end) is None
    )
    assert worker.end() == ""
    broken = JsonWorker([sys.executable, "-c", "raise SystemExit('gone')"])
    assert broken.next(end) is None and "gone" in broken.end()
    slow = JsonWorker([sys.executable, "-c", "import time; time.sleep(60)"])
    assert slow.next(time.monotonic() + 0.1) is None and slow.end(0.0) == ""


def test_the_clock_of_a_gpu(monkeypatch):
    fake_cuda.install(monkeypatch)
    clock = gpu_kernels.Clock("cpu")
    clock.cuda = True
    calls = []
    assert clock.milliseconds(lambda: calls.append(1), repeat=4) == 1.0 and len(calls) == 7
