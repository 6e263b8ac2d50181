"""The arguments of `dynamotor.compile`, checked once and handed down as one object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from .config import Config
from .errors import UsageError

MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class CompileOptions:
    """What the user asked for. `options` are fields of `config` that hold while this callable is compiled."""

    fullgraph: bool = False
    dynamic: bool | None = None
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if not isinstance(self.fullgraph, bool):
            raise UsageError("DM102", f"fullgraph must be True or False, not {self.fullgraph!r}")
        if self.dynamic not in (None, True, False):
            raise UsageError("DM103", f"dynamic must be None, True or False, not {self.dynamic!r}")
        if self.mode not in MODES:
            raise UsageError(
                "DM104",
                f"unknown mode {self.mode!r}",
                cure="use one of " + ", ".join(repr(m) for m in MODES[1:]),
            )
        known = {f.name for f in fields(Config)}
        if unknown := sorted(set(self.options) - known):
            raise UsageError(
                "DM105",
                f"unknown option {unknown[0]!r}",
                why="options are fields of dynamotor.config",
                cure="use one of " + ", ".join(sorted(known)),
            )

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of `config` that the mode implies and the options set."""
        found: dict[str, Any] = {}
        if self.mode in ("reduce-overhead", "max-autotune"):
            found["cuda_graphs"] = True
        if (self.mode or "").startswith("max-autotune"):
            found["max_autotune"] = True
        return {**found, **self.options}
