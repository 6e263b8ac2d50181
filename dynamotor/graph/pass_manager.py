"""Named passes over `torch.fx` graphs: each emits an event before and after, and is verified under
`config.verify`.

>>> run_passes(gm, [("dead code", remove_dead_code)], stage="joint")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ..base.config import config
from ..base.events import emit, enabled, listening, log
from .graph_text import program_text

GraphPass = Callable[[torch.fx.GraphModule], None]


def run_passes(
    gm: torch.fx.GraphModule,
    passes: Sequence[tuple[str, GraphPass]],
    *,
    stage: str,
    verify: Callable[[torch.fx.GraphModule], None] | None = None,
) -> None:
    """Run the passes in order, in place; `verify` is called after each when `config.verify` is on."""
    for name, graph_pass in passes:
        seen = listening("pass") or enabled("passes")
        before = program_text(gm) if seen else ""
        start = time.perf_counter()
        graph_pass(gm)
        seconds = time.perf_counter() - start
        if seen:
            after = program_text(gm)
            emit("pass", stage=stage, name=name, seconds=seconds, before=before, after=after)
            log("passes", f"{stage}: {name}" + (f"\n{after}" if after != before else " changes nothing"))
        if verify is not None and config.verify:
            verify(gm)
    gm.recompile()
