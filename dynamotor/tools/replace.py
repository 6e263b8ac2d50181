"""A program's own `torch.compile` calls, answered by `dynamotor.compile`: the program stays as it is.

>>> with dynamotor.replace_torch_compile():
...     model = torch.compile(model, mode="reduce-overhead")      # dynamotor.compile
...     model.encoder.compile()      # this one too
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..api import compile as compile_, cudagraph_mark_step_begin, reset
from ..base.errors import SettingWarning
from ..base.events import warn_once
from ..capture.stance import STANCES, set_stance

# Arguments of torch.compile that say how its own machinery counts, names or guesses: results do not depend on
# them.
_ITS_OWN = frozenset(("name", "isolate_recompiles", "shapes_spec"))


def _compile(
    model: Callable[..., Any] | None = None,
    *,
    backend: Any = "inductor",
    recompile_limit: int | None = None,
    **arguments: Any,
) -> Any:
    """`dynamotor.compile` with the signature of `torch.compile`; "inductor" means "native"."""
    for name in _ITS_OWN & arguments.keys():
        if arguments.pop(name) not in (None, False):
            warn_once(
                f"torch.compile {name}", f"torch.compile's argument {name!r} has no effect", SettingWarning
            )
    if recompile_limit is not None:
        arguments["options"] = {**(arguments.get("options") or {}), "cache_size_limit": recompile_limit}
    return compile_(model, backend="native" if backend in (None, "inductor") else backend, **arguments)


def _set_stance(stance: str = "default", **rest: Any) -> set_stance:
    """torch.compiler's stances; those that only say when it compiles ("eager_then_compile") are "default".
    Guards are evaluated whatever `skip_guard_eval_unsafe` says."""
    if stance not in STANCES or rest.get("force_backend") is not None:
        warn_once(
            f"torch.compiler stance {stance}",
            f"torch.compiler's stance {stance!r} is taken as 'default'",
            SettingWarning,
        )
    return set_stance(stance if stance in STANCES else "default")


# Replaced attributes, each looked up by programs when they call it.
_STAND_INS = (
    (torch, "compile", _compile),
    (torch.compiler, "reset", reset),
    (torch.compiler, "set_stance", _set_stance),
    (torch.compiler, "cudagraph_mark_step_begin", cudagraph_mark_step_begin),
)


@contextlib.contextmanager
def replace_torch_compile() -> Iterator[None]:
    """While the block (or the decorated function) runs, `torch.compile`, `module.compile()` and
    `torch.compiler.compile` are `dynamotor.compile`, and `torch.compiler.reset`, `set_stance` and
    `cudagraph_mark_step_begin` ours.

    Callables compiled inside stay compiled by dynamotor afterwards. A name that was imported before (`from
    torch
    import compile`) is the old one. Backends are taken by name or as callables, "inductor" is "native".
    """
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _STAND_INS]
    for owner, name, ours in _STAND_INS:
        setattr(owner, name, ours)
    try:
        yield
    finally:
        for owner, name, theirs in before:
            setattr(owner, name, theirs)
