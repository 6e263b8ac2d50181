"""What the GPU bench must show, computed from its rows: geometric means, the bars, and a table to read.

>>> summary(report["rows"])["train"]["ratio"], summary(report["rows"])["bars"]
"""

from __future__ import annotations

from typing import Any

from bench.turns import geometric_mean

from .gpu_programs import BATCH

Row = dict[str, Any]
ALL_MODELS = 0.97  # of torch.compile's speed, geometric mean
ONE_MODEL = 0.85
COLD = 0.5  # of torch.compile's first call
OF_COPY = 0.8
KERNEL = 0.95  # of torch.compile's kernel
HOST = 0.5  # of torch.compile's host time a call
NO_WORSE = 1.1  # errors: rounding differs from run to run by less


def errors_hold(row: Row) -> bool:
    """Whether our errors are no worse than torch.compile's."""
    peers = row["errors"]["peer"]
    return all(
        ours <= 1e-6 + NO_WORSE * peers.get(k, 0.0)
        for k, ours in row["errors"]["ours"].items()
        if k in ("out", "grad")
    )


def _models(rows: dict[str, Row], mode: str) -> list[Row]:
    return [r for r in rows.values() if r["mode"] == mode and "ratio" in r]


def _of_mode(rows: dict[str, Row], mode: str) -> dict[str, Any]:
    """Means of one mode."""
    found = _models(rows, mode)
    cold = [r for r in found if r.get("cold_s")]
    return {
        "models": len(found),
        "ratio": round(geometric_mean([r["ratio"] for r in found]), 4),
        "speedup": round(geometric_mean([r["speedup"] for r in found]), 4),
        "peer_speedup": round(geometric_mean([r["peer_speedup"] for r in found]), 4),
        "cold of peer": round(geometric_mean([r["cold_s"]["ours"] / r["cold_s"]["peer"] for r in cold]), 4)
        if cold
        else None,
        "behind": sorted((r["ratio"], r["model"]) for r in found if r["ratio"] < 1),
    }


def summary(rows: dict[str, Row]) -> dict[str, Any]:
    """Means and bars; a bar without all its rows says so."""
    found: dict[str, Any] = {
        mode: _of_mode(rows, mode) for mode in ("train", "infer", "infer_amp") if _models(rows, mode)
    }
    bars: dict[str, Any] = {}
    for mode in ("train", "infer"):
        models = _models(rows, mode)
        if not models:
            continue
        whole = (
            "" if {r["model"] for r in models} >= set(BATCH) else f" ({len(models)} of {len(BATCH)} models)"
        )
        bars[f"{mode}: geometric mean >= {ALL_MODELS}{whole}"] = found[mode]["ratio"] >= ALL_MODELS
        bars[f"{mode}: every model >= {ONE_MODEL}{whole}"] = min(r["ratio"] for r in models) >= ONE_MODEL
        bars[f"{mode}: every model above eager{whole}"] = min(r["speedup"] for r in models) > 1
        if any(r.get("cold_s") for r in models):
            bars[f"{mode}: cold <= {COLD}{whole}"] = found[mode]["cold of peer"] <= COLD
    with_errors = [r for r in rows.values() if r["mode"] in ("train", "infer", "errors") and "errors" in r]
    if with_errors:
        bars[f"errors no worse ({len(with_errors)} rows)"] = all(errors_hold(r) for r in with_errors)
        found["worse errors"] = [f"{r['mode']}/{r['model']}" for r in with_errors if not errors_hold(r)]
    kernels = [r for r in rows.values() if r["mode"] == "kernels" and r.get("bar")]
    if kernels:
        bars[f"kernels >= {OF_COPY} of the copy"] = min(r["of copy"] for r in kernels) >= OF_COPY
        bars[f"kernels >= {KERNEL} of torch.compile's"] = min(r["ratio"] for r in kernels) >= KERNEL
    for row in rows.values():
        if row["mode"] == "overhead" and "of peer" in row:
            bars[f"host time <= {HOST} of torch.compile's"] = row["of peer"] <= HOST
    return {**found, "bars": bars}


def line(key: str, row: Row) -> str:
    """One row as text."""
    if "error" in row:
        return f"{key}: {row['error']}" + "".join(f"\n    {t}" for t in row.get("trace", ()))
    if row["mode"] == "kernels":
        return f"{key}: {row['GB/s']} GB/s, {row['of copy']} of the copy, {row['ratio']} of torch.compile's speed"
    if row["mode"] == "products":
        return f"{key}: {row['ms']} ms"
    if row["mode"] == "shapes":
        seen = f"{row['shapes']}, first calls {row['first_s']} s, built {row['built']['ours']}"
        return f"{key}: {seen}, literal / ours {row['of literal']}"
    if row["mode"] == "overhead":
        return f"{key}: {row['host_us']} us, {row['of peer']} of torch.compile's"
    text = f"{key}:"
    if "ms" in row:
        low, high = row["ratio_spread"]
        text += f" {row['ms']} ms, {row['speedup']}x eager, {row['ratio']} of torch.compile's speed ({low}-{high})"
    if row.get("cold_s"):
        text += f", first call {row['cold_s']} s"
    if "errors" in row:
        text += f", errors {'no worse' if errors_hold(row) else 'WORSE'}: " + str(
            {p: {k: float(f"{v:.2g}") for k, v in e.items()} for p, e in row["errors"].items()}
        )
    return text + (f", fell back {row['fallbacks']}" if row.get("fallbacks") else "")


NAMES = {"BertForMaskedLM": "BERT-base", "vit_base_patch16_224": "ViT-B/16", "GPT2LMHeadModel": "GPT-2"}
NAMES |= {
    "swin_base_patch4_window7_224": "swin_base",
    "T5ForConditionalGeneration": "T5",
    "LlamaForCausalLM": "Llama, 8 layers",
}
HEAD = (
    "| model | training: times eager | times `torch.compile` | first call, s: ours | `torch.compile` "
    "| inference: times eager | times `torch.compile` | first call, s: ours | `torch.compile` |\n|"
    + "---|"
    * 9
)


def markdown(rows: dict[str, Row]) -> str:
    """The README's table: training and inference of each model, medians with their quartiles."""

    def cells(row: Row) -> list[str]:
        if "ratio" not in row:
            return ["-"] * 4
        spread = [
            f"{row[k]:.2f} ({row[f'{k}_spread'][0]:.2f}-{row[f'{k}_spread'][1]:.2f})"
            for k in ("speedup", "ratio")
        ]
        cold = row.get("cold_s") or {}
        return spread + [f"{cold[p]:.1f}" if p in cold else "-" for p in ("ours", "peer")]

    lines = [HEAD]
    for model in BATCH:
        both = [cells(rows.get(f"{mode}/{model}", {})) for mode in ("train", "infer")]
        lines.append(f"| {NAMES.get(model, model)} | {' | '.join(both[0] + both[1])} |")
    return "\n".join(lines)


def _profile(row: Row) -> list[str]:
    """Where the time of a model goes, for each program."""
    lines = []
    for program, found in row["profile"].items():
        lines.append(
            f"  {program:6} {found['gpu_ms']:8.3f} ms on the device, {found['launches']} launches, {found['groups']}"
        )
        for kernel in found["top"][:8] if program != "eager" else ():
            rate = f"{kernel['GB/s']} GB/s, {kernel['fuses'][:60]}" if "GB/s" in kernel else ""
            lines.append(
                f"         {kernel['ms']:8.4f} ms {kernel['calls']:5.1f} x {kernel['name'][:60]} {rate}"
            )
    return lines


def text(report: dict[str, Any]) -> str:
    """The whole report as text: profiles, rows, means and bars."""
    lines: list[str] = []
    for key, row in report["rows"].items():
        if row.get("profile"):
            lines += [key, *_profile(row)]
    lines += [line(key, row) for key, row in report["rows"].items()]
    found = summary(report["rows"])
    lines += [f"{mode}: {values}" for mode, values in found.items() if mode != "bars"]
    lines += [f"{'holds ' if good else 'FAILS '} {bar}" for bar, good in found["bars"].items()]
    if report["not run"]:
        lines.append(f"not run for want of time: {', '.join(report['not run'])}")
    return "\n".join(lines)
