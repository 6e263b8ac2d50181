"""The functions of torch_xla's C++ module that programs and its own tests call, under their names there.

>>> torch_xla._XLAC._get_xla_sharding_spec(weight)
'{devices=[4,1]<=[4]}'
"""

from __future__ import annotations

import torch

from . import backends, regions, stablehlo
from .core import xla_builder, xla_model as xm
from .debug import metrics
from .device import device_count
from .distributed.spmd.marks import fitting, from_cpu_shards, lay_out, layout_of, require_layout, words
from .distributed.spmd.xla_sharding import clear_sharding
from .execute import Graph
from .sync import sync
from .tensor import node_of


def _described(t: torch.Tensor) -> str:
    """A tensor's device, the operation that waits to compute it, and its layout."""
    waits = node_of(t).instruction  # type: ignore[arg-type]
    layout = words(layout_of(t), t.dim()) or None
    return f"Device: {t.device}\nIR: {waits and waits.show()}\nShardingSpec: {layout}\n"


_ROWS = {
    "_get_use_eager_mode": regions.is_eager_mode,
    "_get_xla_tensors_hlo": stablehlo.pending_hlo,
    "_get_xla_tensors_text": xm.get_stablehlo,
    "_set_use_eager_mode": regions.eager_mode,
    "_xla_counter_names": metrics.counter_names,
    "_xla_counter_value": metrics.counter_value,
    "_xla_dot_general": xla_builder.dot_general,
    "_xla_get_default_device": xm.xla_device,
    "_xla_get_devices": xm.get_xla_supported_devices,
    "_xla_get_mat_mul_precision": backends.get_mat_mul_precision,
    "_xla_get_rng_seed": xm.get_rng_state,
    "_xla_memory_info": xm.get_memory_info,
    "_xla_metric_data": metrics.metric_data,
    "_xla_metric_names": metrics.metric_names,
    "_xla_metrics_report": metrics.metrics_report,
    "_xla_num_devices": device_count,
    "_xla_optimization_barrier_": xm.optimization_barrier_,
    "_xla_real_devices": xm.xla_real_devices,
    "_xla_set_mat_mul_precision": backends.set_mat_mul_precision,
    "_xla_set_rng_seed": xm.set_rng_state,
    "_xla_wait_device_ops": xm.wait_device_ops,
    # Layout of a tensor over the devices, in XLA's words; "" and None for one that has none yet.
    "_get_xla_sharding_spec": lambda t: words(layout_of(t), t.dim()),
    "_get_xla_sharding_type": lambda t: None if layout_of(t) is None else t.sharding_type,
    "_xla_mark_sharding": lambda t, sharding: lay_out(t, fitting(t.shape, sharding)),
    "_xla_clear_sharding": clear_sharding,
    "_get_xla_tensor_debug_info": _described,
    # One process has all devices in SPMD mode, and replicas meet by themselves.
    "_ensure_xla_coordinator_initialized": lambda global_rank=0, world_size=1, **facts: require_layout(
        world_size == 1, "SPMD mode in several processes", "use one process that drives all devices"
    ),
    "_global_tensor_from_cpu_shards": from_cpu_shards,
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
