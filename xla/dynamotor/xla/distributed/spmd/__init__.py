"""SPMD: one process drives a mesh of devices. See xla_sharding.

>>> import dynamotor.xla.distributed.spmd as xs
>>> xs.mark_sharding(x, xs.Mesh(range(4), (2, 2), ("data", "model")), ("data", None))
"""

from .api import xla_distribute_module, xla_distribute_tensor
from .debugging import visualize_sharding, visualize_tensor_sharding
from .patched_linear import XLAPatchedLinear, apply_xla_patch_to_nn_linear, xla_patched_nn_linear_forward
from .xla_sharding import (
    HybridMesh,
    Mesh,
    ShardingSpec,
    ShardingType,
    XLAShard,
    XLAShardedTensor,
    annotate_custom_sharding,
    clear_sharding,
    get_1d_mesh,
    get_global_mesh,
    is_spmd,
    mark_sharding,
    mark_sharding_with_gradients,
    set_global_mesh,
    shard_as,
    unwrap_sharded_tensor,
    use_spmd,
    wrap_as_sharded_tensor,
    wrap_if_sharded,
)

__all__ = [
    "HybridMesh",
    "Mesh",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShard",
    "XLAShardedTensor",
    "annotate_custom_sharding",
    "apply_xla_patch_to_nn_linear",
    "clear_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "is_spmd",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "shard_as",
    "unwrap_sharded_tensor",
    "use_spmd",
    "visualize_sharding",
    "visualize_tensor_sharding",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_distribute_module",
    "xla_distribute_tensor",
    "xla_patched_nn_linear_forward",
]
