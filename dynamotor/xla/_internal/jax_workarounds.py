"""jax is what the device runs on, so nothing is to be guarded: these let programs that ask first go on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax


def jax_import_guard() -> None:
    """Accepted: jax and the device are one client."""
    jax.local_devices()


def requires_jax(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself: jax is there."""
    return func


@contextlib.contextmanager
def jax_env_context() -> Iterator[None]:
    """Accepted: jax's own settings are the device's."""
    yield


def maybe_get_jax(log: bool = True) -> Any:
    """The package jax."""
    return jax
