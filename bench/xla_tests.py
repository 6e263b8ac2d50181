"""pytorch/xla's own tests under the alias: which pass, and why the rest do not.

python -m bench xla_tests PATH [--files test_operations,spmd/test_fsdp_v2] [--only Class.test] [--json FILE] [--jobs N]

PATH is the folder `test` of pytorch/xla's sources; its tests need absl-py. A file without test functions is a
program, run with `python -m dynamotor run --torch-xla`. A file given again replaces its rows; with --only, those
of the tests named. The reason for a failure is a row of xla_tests.tsv: a part of "file::Class.test: error", the
kind (a key of KINDS) and the reason. `python -m bench.xla_api` writes docs/xla-api.md from the file of --json.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from bench.tool import read_json, write_json

from .dynamo_tests import Rows, run
from .rows_of_tests import FILE

PLUGIN = "bench.xla_tests_plugin"
REASONS = Path(__file__).with_suffix(".tsv")
# Why a test does not pass, in the order of the document.
KINDS = {
    "open": "open: something is missing here",
    "private": "needs a name that is no part of torch_xla's API",
    "internals": "tests torch_xla's own parts, or an order that only they have",
    "text": "compares texts: programs, messages, names of counters",
    "hardware": "needs another machine, library or more time",
}
PROGRAM = "program"  # the name of the only row of a file without test functions

# The files of each target, as its name in the totals.
GROUPS = {
    "operations": ["test_operations"],
    "core_aten_ops": ["test_core_aten_ops"],
    "loops": [
        "scan/test_scan",
        "scan/test_scan_layers",
        "scan/test_scan_spmd",
        "test_while_loop",
        "test_gradient_accumulation",
        "test_zero1",
        "test_assume_pure",
        "test_assume_pure_spmd",
        "test_assume_pure_torch",
    ],
    "spmd": [
        "spmd/test_xla_sharding",
        "spmd/test_dynamo_spmd",
        "spmd/test_mp_input_sharding",
        "spmd/test_spmd_debugging",
        "spmd/test_spmd_lowering_context",
        "spmd/test_spmd_parameter_wrapping",
        "spmd/test_train_spmd_linear_model",
        "spmd/test_xla_auto_sharding",
        "spmd/test_xla_distributed_checkpoint",
        "spmd/test_xla_sharded_tensor",
        "spmd/test_xla_sharding_hlo",
        "spmd/test_xla_spmd_python_api_interaction",
        "spmd/test_xla_virtual_device",
    ],
    "dtensor": [
        "spmd/test_dtensor_convert_mesh",
        "spmd/test_dtensor_integration",
        "spmd/test_dtensor_integration2",
        "spmd/test_dtensor_integration3",
        "spmd/test_dtensor_redistribute",
        "spmd/test_xla_dtensor_placements",
        "spmd/test_xla_dtensor_spec_conversion",
    ],
    "fsdp_v2": ["spmd/test_fsdp_v2"],
    "ops": ["test_ops", "test_ops_error_message", "test_python_ops", "test_data_type", "test_fp8"]
    + ["test_as_stride_use_slice", "test_inplace_update", "test_gru", "test_grad_checkpoint"]
    + ["test_ops_error_message_functionalization_disabled", "ds/test_dynamic_shapes"],
    "device": ["test_devices", "test_deprecation", "test_env_var_mapper", "test_manual_xla_registration"]
    + ["test_async_closures", "test_callback", "test_metrics", "test_persistent_cache", "test_placeholder"]
    + ["test_profiler_session", "test_input_output_aliases", "test_hlo_metadata", "test_operations_hlo"]
    + ["test_user_computation_debug_cache", "test_compilation_cache_utils", "test_jax_interop"]
    + ["test_dynamic_shapes_detector", "test_xla_graph_execution", "test_mat_mul_precision_get_and_set"]
    + ["test_runtime_client_initialization_error", "test_mat_mul_precision", "test_python_backend"]
    + ["metrics_compare_utils_test", "debug_tool/test_pt_xla_debug", "debug_tool/test_mp_pt_xla_debug"]
    + ["pjrt/test_dtypes", "pjrt/test_runtime", "pjrt/test_runtime_multi_cpu", "pjrt/test_mesh_service"]
    + ["pjrt/test_metrics", "pjrt/test_profiler", "test_torch_distributed_xla_backend", "pjrt/test_ddp"],
    "autocast": ["test_autocast", "test_autocast_xla", "test_syncfree_optimizers"],
    "eager": [f"eager/test_eager{kind}" for kind in ("", "_with_xla_compile", "_with_torch_compile", "_spmd")]
    + ["eager/test_eager_all_reduce_in_place"],
    "dynamo": ["dynamo/test_bridge", "dynamo/test_dynamo", "dynamo/test_dynamo_aliasing"]
    + ["dynamo/test_dynamo_config", "dynamo/test_dynamo_dynamic_shape", "dynamo/test_num_output"]
    + ["dynamo/test_graph_input_matcher", "dynamo/test_none_remover", "dynamo/test_traceable_collectives"]
    + ["dynamo/test_dynamo_integrations_util"],
    "stablehlo": ["stablehlo/test_exports", "stablehlo/test_export_fx_passes", "stablehlo/test_composite"]
    + ["stablehlo/test_implicit_broadcasting", "stablehlo/test_pt2e_qdq", "stablehlo/test_stablehlo_compile"]
    + ["stablehlo/test_stablehlo_custom_call", "stablehlo/test_stablehlo_inference"]
    + ["stablehlo/test_stablehlo_save_load", "stablehlo/test_unbounded_dynamism"]
    + ["stablehlo/test_mlir_debuginfo", "stablehlo/test_xla_export_interpreter"],
    "kernels": ["test_pallas", "test_pallas_spmd", "test_splash_attention", "test_gmm"]
    + ["quantized_ops/test_quantized_matmul", "quantized_ops/test_dot_general"],
    "replicas": ["test_mp_all_gather", "test_mp_all_to_all", "test_mp_collective_matmul", "test_mp_save"]
    + ["test_mp_collective_permute", "test_mp_distributed_mm", "test_mp_early_exit", "test_mp_mesh_reduce"]
    + ["test_mp_reduce_scatter", "test_mp_rendezvous", "test_mp_replication", "test_mp_sync_batch_norm"]
    + ["test_fsdp_auto_wrap", "test_torch_distributed_fsdp_frozen_weight", "torch_distributed/test_ddp"]
    + [
        f"torch_distributed/test_torch_distributed_{kind}_xla_backend"
        for kind in ("all_gather", "all_reduce", "bucketed_all_reduce", "multi_all_reduce", "reduce_scatter")
    ]
    + ["torch_distributed/test_torch_distributed_fsdp_meta"],
}

# Settings of pytorch/xla's own `run_tests.sh`: files that see four devices, and those with further variables.
FOUR_DEVICES = {
    "spmd/test_dtensor_integration3",
    "spmd/test_dtensor_convert_mesh",
    "spmd/test_xla_dtensor_spec_conversion",
    "spmd/test_dtensor_redistribute",
    "spmd/test_xla_sharded_tensor",
    "spmd/test_xla_dtensor_placements",
}
# The same script shows one device to the others. These say so themselves; the rest are asked of four.
ONE_DEVICE = {"spmd/test_spmd_debugging", "spmd/test_xla_spmd_python_api_interaction"}
SETTINGS = {
    "ds/test_dynamic_shapes": {"XLA_EXPERIMENTAL": "nonzero:masked_select:masked_scatter:nms"},
    "test_user_computation_debug_cache": {"XLA_IR_DEBUG": "1", "XLA_HLO_DEBUG": "1"},
    "test_env_var_mapper": {"XLA_IR_DEBUG": "1"},
    "debug_tool/test_pt_xla_debug": {"PT_XLA_DEBUG": "1", "PT_XLA_DEBUG_FILE": "/tmp/pt_xla_debug.txt"},
}


REPLICAS = 2  # processes of a program that torchrun has to start
TORCHRUN = {"test_mp_early_exit"}


def environment(path: Path, file: str, virtual: int) -> dict[str, str]:
    """The variables of a file's process: its settings, and `virtual` devices for one that spreads tensors."""
    # The tests' folder has a `bench.py`, which must not hide this package.
    found = {"PJRT_DEVICE": "CPU", "PYTHONSAFEPATH": "1"} | SETTINGS.get(file, {})
    # The class with which PyTorch's device tests are made for xla.
    found["TORCH_TEST_DEVICES"] = str(path / "pytorch_test_base.py")
    # A file's own folder comes before the others, as where it is run: there are two `args_parse.py`.
    places = [Path(__file__).parents[1], (path / file).parent, path, path.parent / "examples"]
    found["PYTHONPATH"] = os.pathsep.join([*map(str, places), os.environ.get("PYTHONPATH", "")])
    if file in FOUR_DEVICES:
        found["CPU_NUM_DEVICES"] = "4"
    if virtual > 1 and file not in ONE_DEVICE and (file.startswith("spmd/") or "spmd" in file):
        found["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={virtual}"
    return found


def ask(path: Path, file: str, only: list[str], seconds: float, virtual: int) -> Rows:
    """The rows of a file: one for each test, or a single one for a program."""
    settings = environment(path, file, virtual)
    if re.search(r"^\s*(class \w+\(.*(Test|Base)|def test)", (path / f"{file}.py").read_text(), re.M):
        place = path / file
        rows = run(place.parent, place.name, "", only, seconds, PLUGIN, settings)
        return dict.fromkeys(tests_of(path, file), rows[FILE]) if FILE in rows else rows
    command = [sys.executable, "-m"]
    if file in TORCHRUN:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={REPLICAS}", "-m"]
    command += ["dynamotor", "run", "--torch-xla", f"{path / file}.py"]
    try:
        done = subprocess.run(
            command, env=os.environ | settings, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {PROGRAM: {"outcome": "failed", "why": f"more than {seconds} s"}}
    if done.returncode == 0:
        return {PROGRAM: {"outcome": "passed"}}
    return {PROGRAM: {"outcome": "failed", "why": " ".join(done.stderr.split()[-60:])}}


def tests_of(path: Path, file: str) -> list[str]:
    """The test methods that a file defines, as "Class.test", without importing it."""
    tree = ast.parse((path / f"{file}.py").read_text())
    return [
        f"{cls.name}.{member.name}"
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for member in cls.body
        if isinstance(member, ast.FunctionDef) and member.name.startswith("test")
    ]


def reasons(path: Path = REASONS) -> list[tuple[str, str, str]]:
    """The table: part of a row's text, kind, reason."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(line.split("\t")) for line in lines if line and not line.startswith("#")]  # type: ignore[misc]


def explain(name: str, row: dict[str, str], table: list[tuple[str, str, str]]) -> tuple[str, str]:
    """(kind, reason) of a test that does not pass; ("open", "") without a row of the table."""
    text = f"{name}: {row.get('why', '')}"
    return next(((kind, why) for part, kind, why in table if part in text), ("open", ""))


def totals(files: dict[str, Rows]) -> dict[str, Any]:
    """For each group: how many tests pass, how many need private names, and what fails, each with its reason."""
    table = reasons()
    found: dict[str, Any] = {}
    for group, members in GROUPS.items():
        counts: Counter[str] = Counter()
        failing: dict[str, Any] = {}
        for file in members:
            for test, row in files.get(file, {}).items():
                counts[row["outcome"]] += 1
                if row["outcome"] not in ("passed", "skipped"):
                    kind, why = explain(f"{file}::{test}", row, table)
                    counts[kind] += 1
                    error = " ".join(row.get("why", "").split())[:200]
                    failing[f"{file}::{test}"] = {"why": error, "kind": kind, "reason": why}
        found[group] = {"counts": dict(counts), "failing": failing}
    return found


def section(figures: dict[str, Any]) -> list[str]:
    """The lines of docs/xla-api.md about a file that `main` wrote."""
    found = figures["totals"]
    lines = ["## PyTorch/XLA's own tests", "", *ABOUT.splitlines(), ""]
    lines += [f"| group | tests | pass | skipped | {' | '.join(KINDS)} |", "|---" * (4 + len(KINDS)) + "|"]
    for group in GROUPS:
        counts = found[group]["counts"]
        tests = sum(counts.get(outcome, 0) for outcome in ("passed", "skipped", "failed"))
        cells = [tests, *[counts.get(key, 0) for key in ("passed", "skipped", *KINDS)]]
        lines += [f"| {group} | {' | '.join(map(str, cells))} |"] if tests else []
    if absent := [f"`{file}`" for files in GROUPS.values() for file in files if file not in figures["files"]]:
        lines += ["", f"Not run: {', '.join(absent)}."]
    failing = [each for group in GROUPS for each in found[group]["failing"].items()]
    for kind, title in KINDS.items():
        by_reason: dict[str, list[str]] = {}
        for test, row in failing:
            if row["kind"] == kind:
                by_reason.setdefault(row["reason"], []).append(test)
        lines += ["", f"### {title[0].upper()}{title[1:]}", "", "| reason | tests |", "|---|---|"]
        lines += [f"| {why} | {compact(tests)} |" for why, tests in sorted(by_reason.items())]
    return lines


def compact(tests: list[str]) -> str:
    """Names of tests, each file's said once: "`spmd/test_fsdp_v2`: basic, stack"."""
    names: dict[str, list[str]] = {}
    for test in tests:
        file, _, name = test.partition("::")
        names.setdefault(file, []).append(name.rpartition(".")[2].removeprefix("test_"))
    return "; ".join(f"`{file}`: {', '.join(sorted(found))}" for file, found in sorted(names.items()))


ABOUT = """The tests of pytorch/xla (commit 41398bfff3 of April 2026) in their own files, with this package under the name
`torch_xla`; on CPUs, where files of SPMD have four virtual devices. `python -m bench xla_tests PATH --json
docs/results/xla-tests.json` wrote the figures (PATH: the folder `test` of pytorch/xla's sources); a test has a minute; of `test_ops`
about every sixth ran. The names below are without their `test_`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--files", default="", help="comma-separated; a group's name stands for its files")
    parser.add_argument("--only", default="", help="names of tests, comma-separated")
    parser.add_argument("--json", help="file for the figures; an earlier run's are kept")
    parser.add_argument("--seconds", type=float, default=1500.0, help="for one file")
    parser.add_argument("--devices", type=int, default=4, help="virtual devices where tensors are spread")
    parser.add_argument("--jobs", type=int, default=1, help="files at a time")
    options = parser.parse_args()
    named = options.files.split(",") if options.files else list(GROUPS)
    chosen = [file for name in named for file in GROUPS.get(name, [name])]
    path, only = options.path.resolve(), [part for part in options.only.split(",") if part]
    files: dict[str, Rows] = read_json(options.json).get("files", {})

    def one(file: str) -> tuple[str, Rows]:
        return file, ask(path, file, only, options.seconds, options.devices)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for file, rows in pool.map(one, chosen):
            rows = {test: {k: row[k] for k in ("outcome", "why") if row.get(k)} for test, row in rows.items()}
            files[file] = (files.get(file, {}) if only else {}) | rows
            write_json(options.json, {"totals": totals(files), "files": files}, sort_keys=True)
            print(f"{file}: {dict(Counter(row['outcome'] for row in rows.values()))}", flush=True)
    for group, found in totals({file: files[file] for file in chosen}).items():
        if found["counts"]:
            print(group, found["counts"])
            print("".join(f"    {test}: {row['why']}\n" for test, row in found["failing"].items()), end="")


if __name__ == "__main__":
    main()
