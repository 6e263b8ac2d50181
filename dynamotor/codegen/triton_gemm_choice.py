"""Which matrix products of a program are computed by a template, and under which tiling.

By default those that the stored table names (gemm_table.py: results of measurements on such a GPU, of
this product or of the same layer with about as many samples); under `mode="max-autotune"` products that are
not in it are timed, the library with the kernels behind it against the template, and the disk cache keeps
what was found.

>>> choose(program, "NVIDIA H200", tune=measure)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..base import cache
from ..base.events import counters, emit
from ..graph.kernel_checks import tf32
from ..lower.program import Program
from ..runtime.triton_build import triton_version
from . import gemm_table
from .triton_few_rows import tiling_of
from .triton_gemm import MULTIPROCESSORS, Tiling
from .triton_gemm_sites import Site, find_sites, put, template_step, trial
from .triton_product import Product

MARGIN = 0.97  # of the library's time that a template must stay under
Measure = Callable[
    [Sequence[Program]], Sequence[float]
]  # milliseconds of programs; infinite for one that does not run
TILINGS = (
    Tiling(128, 256, 64, warps=8, stages=3),
    Tiling(128, 256, 64, warps=8, stages=3, persistent=True),
    Tiling(256, 128, 64, warps=8, stages=3),
    Tiling(128, 128, 64, warps=4, stages=4),
    Tiling(128, 128, 64, warps=8, stages=4),
    Tiling(128, 128, 64, warps=8, stages=3, persistent=True),
    Tiling(128, 128, 128, warps=8, stages=2),
    Tiling(128, 64, 64, warps=4, stages=4),
    Tiling(128, 64, 64, warps=4, stages=4, persistent=True),
    Tiling(256, 64, 64, warps=8, stages=4),
    Tiling(64, 128, 64, warps=4, stages=4),
    Tiling(64, 64, 64, warps=4, stages=5),
    Tiling(64, 64, 128, warps=4, stages=3),
    Tiling(64, 32, 64, warps=4, stages=5),
    Tiling(32, 64, 64, warps=4, stages=5),
    Tiling(16, 128, 128, warps=4, stages=3),
    Tiling(128, 256, 64, warps=8, stages=4, tma=True),
    Tiling(128, 256, 64, warps=8, stages=3, persistent=True, tma=True),
    Tiling(128, 256, 64, warps=8, stages=3, persistent=True, tma=True, tma_store=True),
    Tiling(256, 128, 64, warps=8, stages=3, persistent=True, tma=True),
    Tiling(128, 128, 64, warps=8, stages=4, persistent=True, tma=True, tma_store=True),
    Tiling(128, 128, 64, warps=4, stages=4, tma=True),
    Tiling(256, 64, 64, warps=8, stages=4, persistent=True, tma=True, tma_store=True),
    Tiling(128, 64, 64, warps=4, stages=4, persistent=True, tma=True, tma_store=True),
    Tiling(128, 64, 64, warps=4, stages=4, tma=True),
    Tiling(64, 128, 64, warps=4, stages=4, tma=True),
)


def tilings(
    size: tuple[int, int, int, int], dtype: torch.dtype, product: Product | None = None
) -> list[Tiling]:
    """Candidates for a product: tiles that are not much larger than it, float32 with half of k (the same
    bytes).

    Descriptors only where `product` allows them, programs that take tile after tile where there is more than
    one for each, and small tiles where large ones would leave the GPU idle: omitted ones only cost time
    to build.
    """
    batch, m, n, k = size
    if product is not None and product.window is not None:
        k = product.window.channels  # no tile spans two kernel positions
    found = [
        t
        for t in TILINGS
        if t.m < 2 * max(m, 16) and t.n < 2 * max(n, 16) and (t.k < 2 * max(k, 16) or t.k == 64)
    ]
    many = batch * -(-m // 64) * -(-n // 64) >= 4 * MULTIPROCESSORS
    found = [t for t in found if not (many and t.m * t.n < 64 * 64 and min(m, n) >= 64)]
    found = [t for t in found if not t.persistent or batch * -(-m // t.m) * -(-n // t.n) > MULTIPROCESSORS]
    if dtype is torch.float32:
        found = [replace(t, k=max(t.k // 2, 16)) for t in found]
    found = [replace(t, k=32) if k <= 32 and t.k == 64 else t for t in found]
    found = [t for t in found if (not t.tma if product is None else t.suited(product) == t)]
    return found or [Tiling(16, 16, 64)]


def choose(program: Program, gpu: str, tune: Measure | None = None) -> Program:
    """The program with templates where the table or (with `tune`) a measurement says so, and for parts of
    products of few rows, which no library computes.
    """
    sites = find_sites(program, tf32=bool(tf32()))
    chosen = [(site, tiling_of(site.product)) for site in sites if site.product.in_parts]
    for site in sites if tune is not None or gemm_table.knows(gpu) else ():
        if site.product.in_parts:
            continue
        found = _from_table(site, gpu, gemm_table.stored)
        if found is None:
            found = (
                tuned(program, site, gpu, tune)
                if tune is not None
                else _from_table(site, gpu, gemm_table.nearest)
            )
        if found is not None:
            chosen.append(found)
    return put(program, chosen) if chosen else program


def _from_table(site: Site, gpu: str, look_up: Callable[[str], Tiling | None]) -> tuple[Site, Tiling] | None:
    """The table's tilings; a tiling that these operands do not allow was measured with others, and says
    nothing here.
    """
    for variant in site.variants():
        tiling = look_up(f"{gpu} {variant.label()}")
        if tiling is not None and tiling.suited(variant.product) == tiling:
            return variant, tiling
    return None


Candidate = tuple[int, Tiling]  # which of a site's variants, and how it is cut
_known: dict[str, Candidate | None] = {}


def tuned(program: Program, site: Site, gpu: str, measure: Measure) -> tuple[Site, Tiling] | None:
    """The fastest template for a site, None where the library is faster.

    Measured once for a label and the operands' alignment, then read from the cache.
    """
    candidates = [
        (n, t)
        for n, v in enumerate(site.variants())
        for t in tilings(v.product.size, v.product.compute, v.product)
    ]
    key = cache.digest("gemm-3", gpu, site.label(), repr(candidates), torch.__version__, triton_version())
    if key not in _known:
        stored = cache.load("gemm", key)
        if stored is not None:
            found = json.loads(stored)
            _known[key] = (found["variant"], Tiling(**found["tiling"])) if found else None
        else:
            _known[key] = best = _measure(program, site, candidates, gpu, measure)
            answer = {"variant": best[0], "tiling": best[1].row()} if best else None
            cache.store("gemm", key, json.dumps(answer).encode())
    best = _known[key]
    return (site.variants()[best[0]], best[1]) if best else None


def _measure(
    program: Program, site: Site, candidates: Sequence[Candidate], gpu: str, measure: Measure
) -> Candidate | None:
    """Time the library with the steps around it, and every candidate."""
    variants = site.variants()
    programs = [trial(program, site, [program.steps[n] for n in site.steps()])]
    for n, tiling in candidates:
        variant = variants[n]
        inside = [s for at in site.steps() if at not in variant.steps() for s in [program.steps[at]]]
        programs.append(trial(program, site, [*inside, template_step(program, variant, tiling)]))
    library, *times = measure(programs)
    best = min(range(len(times)), key=times.__getitem__)
    wins = math.isfinite(times[best]) and times[best] < MARGIN * library
    emit(
        "autotune",
        gpu=gpu,
        label=variants[candidates[best][0]].label(),
        tiling=candidates[best][1].row(),
        wins=wins,
        library_ms=library,
        template_ms=times[best],
        all_ms=list(times),
    )
    counters["autotune"]["template" if wins else "library"] += 1
    return candidates[best] if wins else None


def forget() -> None:
    """Forget what this process has measured or read (the disk cache stays)."""
    _known.clear()
    gemm_table.forget()
