"""The functions of torch_xla's C++ module that programs and its own tests call, under their names there.

>>> torch_xla._XLAC._get_xla_sharding_spec(weight)
'{devices=[4,1]<=[4]}'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def _get_xla_sharding_spec(t: torch.Tensor) -> str:
    """How a tensor lies on the devices, in XLA's words; "" for one that is on a single device."""
    return XLAShardedTensor(t).hlo_sharding if XLAShardedTensor(t).sharding_spec else ""


def _get_xla_sharding_type(t: torch.Tensor) -> str | None:
    """The `ShardingType` of a tensor; None for one that is on a single device."""
    return XLAShardedTensor(t).sharding_type if XLAShardedTensor(t).sharding_spec else None


def _xla_sync_multi(
    tensors: Sequence[torch.Tensor], devices: Any = (), wait: bool = False, sync_xla_data: bool = True
) -> None:
    """Compute tensors, and all that is pending beside them."""
    sync(wait=wait)


def _xla_step_marker(
    device: str = "", devices: Any = (), wait: bool = True, reset_scope: bool = True
) -> None:
    """The barrier at the end of a step, of one device where it is named."""
    sync(wait=wait, device=device or None)


def _xla_tensors_from_aten(
    tensors: Sequence[torch.Tensor], devices: Sequence[str], shardings: Any = None
) -> list[torch.Tensor]:
    """Copies of CPU tensors, each on its device."""
    return [tensor.to(device) for tensor, device in zip(tensors, devices)]


def _get_xla_tensor_dimension_size(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A size as a tensor of the device."""
    return torch.tensor(tensor.shape[dim], dtype=torch.int32, device=tensor.device)


def _xla_get_tensor_id(tensor: torch.Tensor) -> int:
    """A number that is the tensor's value's own, while it lives."""
    return id(node_of(tensor))


def _check_tensor_need_materialization(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Which tensors have not been computed."""
    return [node_of(tensor).data is None for tensor in tensors]


def _get_graph_hash(tensors: Sequence[torch.Tensor]) -> str:
    """A text that is equal for equal pending graphs of tensors of one device."""
    nodes = [node_of(tensor) for tensor in tensors]
    return str(Graph.of(nodes[0].lane, [node.position for node in nodes]))
