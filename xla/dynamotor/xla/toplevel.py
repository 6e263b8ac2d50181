"""The functions that stand directly in the package: `torch_xla.device()`, `torch_xla.launch(...)` and the
like.

>>> import dynamotor.xla as torch_xla
>>> torch_xla.manual_seed(0)
>>> x = torch.randn(2, 2, device=torch_xla.device())
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from . import runtime
from .core import xla_model as xm
from .core.xla_model import (
    set_rng_state as manual_seed,  # noqa: F401
    xla_real_devices as real_devices,  # noqa: F401
)
from .device import (
    device_count,  # noqa: F401
    xla_devices as devices,  # noqa: F401
)
from .distributed import xla_multiprocessing as xmp
from .errors import require
from .execute import set_custom_compile_options  # noqa: F401
from .stablehlo import save_as_stablehlo, save_torch_model_as_stablehlo  # noqa: F401
from .sync import sync as _sync


def device(index: int | None = None) -> torch.device:
    """Device number `index` of `devices()`; the current one, where no number is given. DM660 for a wrong
    one.
    """
    return xm.xla_device(index)


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """End a step, as `xm.mark_step` does: the recorded ops become one XLA graph and run; then the step
    closures run.

    wait: block until the device is done. reset_scope: accepted, there are no scopes to reset.
    """
    _sync(wait=wait)


def launch(
    fn: Callable[..., Any], args: tuple = (), start_method: str = "spawn", debug_single_process: bool = False
) -> None:
    """Run `fn(index, *args)` once on every device, each in a process of its own.

    Under torchrun, which has started the processes, `fn` is called in this one with its local rank.
    start_method: that of Python's multiprocessing ("spawn", "fork"). debug_single_process: one process, this
    one. DM666 in SPMD mode, where one process drives all devices.
    """
    require(
        not runtime.is_spmd(),
        "DM666",
        "launch() starts one process a device",
        why="SPMD mode is on",
        cure="call the function itself",
    )
    if torch.distributed.is_torchelastic_launched():
        fn(int(os.environ["LOCAL_RANK"]), *args)
    else:
        xmp.spawn(fn, args=args, nprocs=1 if debug_single_process else None, start_method=start_method)
