"""The functions of torch_xla's C++ module that programs and its own tests call, under their names there.

>>> torch_xla._XLAC._get_xla_sharding_spec(weight)
'{devices=[4,1]<=[4]}'
"""

from __future__ import annotations

import torch

from .backends import get_mat_mul_precision as _xla_get_mat_mul_precision  # noqa: F401
from .backends import set_mat_mul_precision as _xla_set_mat_mul_precision  # noqa: F401
from .core.xla_model import get_memory_info as _xla_memory_info  # noqa: F401
from .core.xla_model import get_rng_state as _xla_get_rng_seed  # noqa: F401
from .core.xla_model import get_stablehlo as _get_xla_tensors_hlo  # noqa: F401
from .core.xla_model import get_stablehlo as _get_xla_tensors_text  # noqa: F401
from .core.xla_model import get_xla_supported_devices as _xla_get_devices  # noqa: F401
from .core.xla_model import optimization_barrier_ as _xla_optimization_barrier_  # noqa: F401
from .core.xla_model import set_rng_state as _xla_set_rng_seed  # noqa: F401
from .core.xla_model import wait_device_ops as _xla_wait_device_ops  # noqa: F401
from .core.xla_model import xla_device as _xla_get_default_device  # noqa: F401
from .core.xla_model import xla_real_devices as _xla_real_devices  # noqa: F401
from .debug.metrics import counter_names as _xla_counter_names  # noqa: F401
from .debug.metrics import counter_value as _xla_counter_value  # noqa: F401
from .debug.metrics import metric_data as _xla_metric_data  # noqa: F401
from .debug.metrics import metric_names as _xla_metric_names  # noqa: F401
from .debug.metrics import metrics_report as _xla_metrics_report  # noqa: F401
from .distributed.spmd.xla_sharding import XLAShardedTensor
from .execute import Graph
from .regions import eager_mode as _set_use_eager_mode  # noqa: F401
from .regions import is_eager_mode as _get_use_eager_mode  # noqa: F401
from .sync import sync
from .tensor import node_of
from .toplevel import device_count as _xla_num_devices  # noqa: F401

_ROWS = {
    # How a tensor lies on the devices, in XLA's words; "" and None for one that is on a single device.
    "_get_xla_sharding_spec": lambda t: (
        XLAShardedTensor(t).hlo_sharding if XLAShardedTensor(t).sharding_spec else ""
    ),
    "_get_xla_sharding_type": lambda t: (
        XLAShardedTensor(t).sharding_type if XLAShardedTensor(t).sharding_spec else None
    ),
    "_xla_sync_multi": lambda tensors, devices=(), wait=False, sync_xla_data=True: sync(wait=wait),
    "_xla_step_marker": lambda device="", devices=(), wait=True, reset_scope=True: sync(wait, device or None),
    "_xla_tensors_from_aten": lambda tensors, devices, shardings=None: [
        t.to(d) for t, d in zip(tensors, devices)
    ],
    "_get_xla_tensor_dimension_size": lambda t, dim: torch.tensor(
        t.shape[dim], dtype=torch.int32, device=t.device
    ),
    "_xla_get_tensor_id": lambda tensor: id(node_of(tensor)),  # its value's own, while it lives
    "_check_tensor_need_materialization": lambda tensors: [node_of(t).data is None for t in tensors],
    "_get_graph_hash": lambda tensors: str(
        Graph.of(node_of(tensors[0]).lane, [node_of(t).position for t in tensors])
    ),
}
globals().update(_ROWS)
