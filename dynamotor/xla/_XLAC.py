"""The functions of torch_xla's C++ module that programs and its own tests call, under their names there.

>>> torch_xla._XLAC._get_xla_sharding_spec(weight)
'{devices=[4,1]<=[4]}'
"""

from __future__ import annotations

import torch

from .core.xla_model import get_memory_info as _xla_memory_info  # noqa: F401
from .core.xla_model import get_rng_state as _xla_get_rng_seed  # noqa: F401
from .core.xla_model import get_stablehlo as _get_xla_tensors_hlo  # noqa: F401
from .core.xla_model import get_stablehlo as _get_xla_tensors_text  # noqa: F401
from .core.xla_model import set_rng_state as _xla_set_rng_seed  # noqa: F401
from .core.xla_model import unlazy as _xla_sync_multi  # noqa: F401
from .core.xla_model import wait_device_ops as _xla_wait_device_ops  # noqa: F401
from .core.xla_model import xla_device as _xla_get_default_device  # noqa: F401
from .core.xla_model import xla_real_devices as _xla_real_devices  # noqa: F401
from .debug.metrics import counter_names as _xla_counter_names  # noqa: F401
from .debug.metrics import counter_value as _xla_counter_value  # noqa: F401
from .debug.metrics import metric_data as _xla_metric_data  # noqa: F401
from .debug.metrics import metric_names as _xla_metric_names  # noqa: F401
from .debug.metrics import metrics_report as _xla_metrics_report  # noqa: F401
from .distributed.spmd.xla_sharding import XLAShardedTensor
from .sync import sync as _xla_step_marker  # noqa: F401


def _get_xla_sharding_spec(t: torch.Tensor) -> str:
    """How a tensor lies on the devices, in XLA's words; "" for one that is on a single device."""
    return XLAShardedTensor(t).hlo_sharding if XLAShardedTensor(t).sharding_spec else ""


def _get_xla_sharding_type(t: torch.Tensor) -> str | None:
    """The `ShardingType` of a tensor; None for one that is on a single device."""
    return XLAShardedTensor(t).sharding_type if XLAShardedTensor(t).sharding_spec else None
