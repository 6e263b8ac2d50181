"""Starts the XLA device, once, on `import dynamotor.xla`: jax's settings, the families of lowerings, the device and its
factories."""

from __future__ import annotations

import importlib
import pkgutil

import jax

from . import (  # noqa: F401  (imported for their rows)
    autocast,
    composites,
    device,
    dispatch,
    execute,
    factories,
    rng,
    shapes,
    specials,
    storage,
    sync,
    views,
)

# int64 and float64 are aten's; without this jax would narrow them.
jax.config.update("jax_enable_x64", True)


def _load_families() -> None:
    """Import every ops_*.py beside this file: each registers its lowerings."""
    package = __name__.rpartition(".")[0]
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if found.name.startswith("ops_"):
            importlib.import_module(f"{package}.{found.name}")


def start() -> None:
    """Register everything with PyTorch. Safe to call again."""
    _load_families()
    factories.install()
    device.install(
        get_rng_state=lambda which=None: rng.get_state_tensor(which),
        set_rng_state=lambda state, which=None: rng.set_state_tensor(state, which),
        manual_seed=rng.set_state,
        manual_seed_all=rng.set_state_all,
        synchronize=lambda which=None: sync.wait_device_ops([] if which is None else [which]),
    )


start()
