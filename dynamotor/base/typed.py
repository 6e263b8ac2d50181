"""Words for annotations."""

from __future__ import annotations

from typing import Any

MaybeNone = Any  # in a union, as typeshed has it: None too, but where code relies on it there is something
