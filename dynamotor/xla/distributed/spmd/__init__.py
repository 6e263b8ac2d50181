"""SPMD: one process drives a mesh of devices. See xla_sharding.

>>> import dynamotor.xla.distributed.spmd as xs
>>> xs.mark_sharding(x, xs.Mesh(range(4), (2, 2), ("data", "model")), ("data", None))
"""

from .xla_sharding import (
    Mesh,
    ShardingSpec,
    XLAShard,
    XLAShardedTensor,
    clear_sharding,
    get_1d_mesh,
    get_global_mesh,
    is_spmd,
    mark_sharding,
    set_global_mesh,
    use_spmd,
    wrap_if_sharded,
)

__all__ = [
    "Mesh",
    "ShardingSpec",
    "XLAShard",
    "XLAShardedTensor",
    "clear_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "is_spmd",
    "mark_sharding",
    "set_global_mesh",
    "use_spmd",
    "wrap_if_sharded",
]
