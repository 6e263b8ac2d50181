"""What environment variables say, applied when this module is imported, before jax starts.

PJRT_DEVICE=CPU|CUDA|GPU|TPU selects jax's platform; XRT_* variables of old programs are accepted and have no
effect; XLA_USE_BF16 and XLA_DOWNCAST_BF16 are read in dtypes.py.

>>> os.environ["PJRT_DEVICE"] = "CPU"
>>> import dynamotor.xla
"""

from __future__ import annotations

import importlib.util
import os
import warnings

from .errors import require

# The CPU stays beside every accelerator: transfers and CPU sharing go through it.
PLATFORMS = {"CPU": "cpu", "CUDA": "cuda,cpu", "GPU": "cuda,cpu", "TPU": "tpu,cpu"}


def require_jax() -> None:
    """Raise DM659 where jax is not installed."""
    require(
        importlib.util.find_spec("jax") is not None,
        "DM659",
        "dynamotor.xla needs jax, which is not installed",
        why="XLA comes with jax",
        cure="pip install dynamotor[xla]",
    )


def platforms(device: str) -> str:
    """jax's platform list for a value of PJRT_DEVICE. DM658 for a value that is none of CPU, CUDA, GPU,
    TPU.
    """
    require(
        device.upper() in PLATFORMS,
        "DM658",
        f"PJRT_DEVICE={device} is not known",
        why="a device type is one of " + ", ".join(PLATFORMS),
        cure="set PJRT_DEVICE to one of them, or unset it to let jax choose",
    )
    return PLATFORMS[device.upper()]


def apply() -> None:
    """Read the variables and set jax up; must come before jax's first computation."""
    require_jax()
    # A process must be able to share its GPU with PyTorch and with its neighbours.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    # int64 and float64 are aten's: constants that modules make while they are imported must not be narrowed.
    jax.config.update("jax_enable_x64", True)
    device = os.environ.get("PJRT_DEVICE")
    if device:
        jax.config.update("jax_platforms", platforms(device))
    ignored = sorted(name for name in os.environ if name.startswith("XRT_"))
    if ignored:
        warnings.warn(
            f"{', '.join(ignored)}: variables of the XRT runtime have no effect; PJRT_DEVICE=CPU|CUDA|TPU "
            "selects the device",
            stacklevel=2,
        )


apply()
