"""Starts the XLA device, once, on `import dynamotor.xla`: jax's settings, the families of lowerings, the
device and its factories."""

from __future__ import annotations

import importlib
import pkgutil
import secrets
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import torch

from . import (  # noqa: F401  (imported for their rows)
    autocast,
    conversion,
    device,
    dispatch,
    execute,
    loading,
    recurrent,
    rng,
    specials,
    storage,
    sync,
)

# int64 and float64 are aten's; without this jax would narrow them.
jax.config.update("jax_enable_x64", True)


def _load_families() -> None:
    """Import every ops_*.py beside this file: each registers its lowerings."""
    package = __name__.rpartition(".")[0]
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if found.name.startswith("ops_"):
            importlib.import_module(f"{package}.{found.name}")


def _index(which: Any) -> int:
    """The number of a device; `xla` without one is the current device."""
    index = which if isinstance(which, int) else torch.device(which or "xla").index
    return device.current_device() if index is None else index


def start() -> None:
    """Register everything with PyTorch. Safe to call again."""
    _load_families()
    storage.install()
    device.install(
        get_rng_state=lambda which="xla": rng.get_state_tensor(_index(which)),
        set_rng_state=lambda state, which="xla": rng.set_state_tensor(state, _index(which)),
        get_rng_state_all=lambda: [rng.get_state_tensor(index) for index in range(device.device_count())],
        set_rng_state_all=lambda states: [*map(rng.set_state_tensor, states, range(len(states)))],
        # One for each number that a device may have: how many there are is asked at the first use.
        default_generators=[
            SimpleNamespace(
                get_state=partial(rng.get_state_tensor, index),
                set_state=partial(rng.set_state_tensor, device=index),
            )
            for index in range(128)
        ],
        initial_seed=lambda: rng.get_state(device.current_device()),
        manual_seed=lambda seed: rng.set_state(seed, device.current_device()),
        manual_seed_all=rng.set_state_all,
        seed=lambda: rng.set_state(secrets.randbits(63), device.current_device()),
        seed_all=lambda: rng.set_state_all(secrets.randbits(63)),
        synchronize=lambda which=None: sync.wait_device_ops([] if which is None else [which]),
    )


start()
