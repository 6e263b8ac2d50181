"""The functions of torch_xla's C++ module that programs and its own tests call, under their names there.

>>> torch_xla._XLAC._get_xla_sharding_spec(weight)
'{devices=[4,1]<=[4]}'
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

import dynamotor

from . import backends, ir_text, metrics as counters, regions, runtime
from .core import xla_builder, xla_model as xm
from .debug import metrics
from .device import device_count, has_started, local_devices
from .distributed.spmd.marks import fitting, from_cpu_shards, lay_out, layout_of, require_layout, words
from .distributed.spmd.xla_sharding import clear_sharding
from .sync import sync
from .tensor import is_xla, node_of
from .transfer import data_of

_ROWS = {
    "_get_base_seed_as_tensor": lambda device="": torch.tensor(
        xm.get_rng_state(device or None), device=device or "xla"
    ),
    "_get_executed_fallback_ops": metrics.executed_fallback_ops,
    "_get_git_revs": lambda: {"torch": torch.version.git_version, "xla": dynamotor.__version__},
    "_get_use_eager_mode": regions.is_eager_mode,
    "_get_xla_tensor_debug_info": lambda t: ir_text.debug_info(t, words(layout_of(t), t.dim())),
    "_get_xla_tensor_shape_type": lambda tensor: ir_text.type_text(tensor.dtype),
    "_get_xla_tensors_hlo": ir_text.hlo_text,
    "_get_xla_tensors_text": lambda tensors: ir_text.text(ir_text.pending(tensors)[0]),
    "_init_computation_client": local_devices,
    "_set_allow_execution": regions.allow_execution,
    "_set_use_eager_mode": regions.eager_mode,
    "_xla_counter_names": metrics.counter_names,
    "_xla_counter_value": metrics.counter_value,
    "_unsafe_buffer_pointer": lambda tensor: data_of(tensor).unsafe_buffer_pointer(),
    "_xla_dot_general": xla_builder.dot_general,
    "_xla_get_all_devices": lambda: [
        attributes["name"] for attributes in runtime.global_runtime_device_attributes()
    ],
    "_xla_get_default_device": xm.xla_device,
    "_xla_get_devices": xm.get_xla_supported_devices,
    "_xla_get_mat_mul_precision": backends.get_mat_mul_precision,
    "_xla_get_rng_seed": xm.get_rng_state,
    "_xla_increment_counter": counters.counter,
    "_xla_memory_info": xm.get_memory_info,
    "_xla_metric_data": metrics.metric_data,
    "_xla_metric_names": metrics.metric_names,
    "_xla_metrics_report": metrics.metrics_report,
    "_xla_num_devices": device_count,
    "_xla_optimization_barrier_": xm.optimization_barrier_,
    "_xla_real_devices": xm.xla_real_devices,
    "_xla_runtime_is_initialized": has_started,
    "_xla_set_mat_mul_precision": backends.set_mat_mul_precision,
    "_xla_set_rng_seed": xm.set_rng_state,
    "_xla_wait_device_ops": xm.wait_device_ops,
    # Layout of a tensor over the devices, in XLA's words; "" and None for one that has none yet.
    "_get_xla_sharding_spec": lambda t: words(layout_of(t), t.dim()),
    "_get_xla_sharding_type": lambda t: None if layout_of(t) is None else t.sharding_type,
    "_xla_mark_sharding": lambda t, sharding: lay_out(t, fitting(t.shape, sharding)),
    "_xla_clear_sharding": clear_sharding,
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
    "_check_tensor_need_materialization": lambda tensors: [
        is_xla(t) and node_of(t).data is None for t in tensors
    ],
    "_get_graph_hash": lambda tensors: ir_text.text(ir_text.pending(tensors)[0]),
    "lowering": SimpleNamespace(LoweringContext=ir_text.LoweringContext),
}
globals().update(_ROWS)
