"""The device runs on jax, so nothing is to be guarded: these let programs that ask first go on."""

from contextlib import nullcontext as jax_env_context  # noqa: F401
from typing import Any

import jax

_ROWS: dict[str, Any] = {
    "jax_import_guard": jax.local_devices,  # jax and the device are one client
    "requires_jax": lambda func: func,
    "maybe_get_jax": lambda log=True: jax,
}
globals().update(_ROWS)
