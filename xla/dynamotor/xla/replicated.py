"""One program over all replicas: how a function with collectives is compiled, and what keeps XLA from being
too clever about it.

>>> compiled = compile_replicated(lambda x: [exchange(lambda y: jax.lax.psum(y, AXIS), x)], [array])
>>> compiled([array])       # the sum over all replicas, in each of them

XLA takes the programs of all replicas for one and the same, but they may differ: in constants, in what is
read afterwards, in what stands around the collectives. `exchange` makes all of them send the same messages in
the same order.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import replication
from .peers import Peers
from .replication import AXIS, Compiled, Program


def compile_replicated(program: Program, inputs: Sequence[Any]) -> Compiled:
    """Compile a function of per-replica arrays as one program over all replicas.

    `program(*arrays)` returns a list; it may call jax.lax collectives over AXIS. `inputs`: this replica's
    arrays, or their ShapeDtypeStructs. The result takes and returns lists of this replica's arrays; nothing
    is copied. In a world of one there is no mesh, and AXIS is unbound.
    """
    world = replication.start()
    if world.peers is None or world.mesh is None:
        compiled = jax.jit(program, keep_unused=True).lower(*inputs).compile()
        return lambda arrays: compiled(*arrays)
    layout, axis = _Layout(world.mesh), PartitionSpec(AXIS)
    sent = [i for i, x in enumerate(inputs) if math.prod(x.shape)]
    ins = (axis, *[layout.sharding(inputs[i].shape).spec for i in sent])
    avals = [layout.aval((1,), np.uint32), *[layout.aval(inputs[i].shape, inputs[i].dtype) for i in sent]]

    def body(zero: jax.Array, *arrays: Any) -> list[jax.Array]:
        _trace.zero = zero[0]
        values: list[Any] = [jnp.zeros(x.shape, x.dtype) for x in inputs]
        for i, array in zip(sent, arrays):
            values[i] = array
        return [*program(*values), _trace.zero[None]]

    def stacked(*arrays: Any) -> list[jax.Array]:
        return [y[None] for y in body(*arrays)]

    shapes = jax.eval_shape(
        jax.shard_map(stacked, mesh=world.mesh, in_specs=ins, out_specs=axis, check_vma=False), *avals
    )
    outs = [layout.sharding(y.shape[1:]).spec for y in shapes]
    function = jax.shard_map(body, mesh=world.mesh, in_specs=ins, out_specs=outs, check_vma=False)
    lowered = jax.jit(function, keep_unused=True).lower(*avals)
    # Replicas may compile different programs around the same collectives: they must not wait for each other's
    # autotuning.
    options: dict[str, str | bool] = {"xla_gpu_shard_autotuning": False}
    on_gpu = world.mesh.devices.flat[0].platform == "gpu"
    return _runner(lowered.compile(compiler_options=options if on_gpu else None), sent, world.peers, layout)


_trace = threading.local()


def exchange(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`collective(x)`, for one jax.lax collective over AXIS; every collective must be called through this.

    A zero that only the run knows is mixed into the sent value: otherwise XLA computes the sum of a
    constant by
    itself, though another replica has another constant there. Each result is mixed into the next zero, and
    the last zero is an output of the program: XLA cannot reorder collectives, nor drop one that nothing reads
    here, while the other replicas wait for it.
    """
    result = collective(_mixed(x, _trace.zero))
    if result.size:
        _trace.zero = _trace.zero & (result.reshape(-1)[0] != 0).astype(np.uint32)
    return result


def _mixed(x: jax.Array, zero: jax.Array) -> jax.Array:
    """x, in a way that XLA cannot see through: its bits, exclusive or the zero."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(_mixed(x.real, zero), _mixed(x.imag, zero))
    if x.dtype == bool:
        return x ^ (zero != 0)
    carrier = jnp.dtype(f"uint{x.dtype.itemsize * 8}")
    return jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(x, carrier) ^ zero.astype(carrier), x.dtype
    )


class _Layout:
    """Arrays of one replica as shards of global ones: concatenated along the first dimension.

    Scalars have none: they are declared replicated, which inside shard_map only says that each replica passes
    its own. Empty arrays are not passed at all: XLA's compiler crashes on them in programs of several devices
    (jaxlib 0.11.2).
    """

    def __init__(self, mesh: Mesh) -> None:
        self.size = mesh.size
        self.sharded, self.whole = (
            NamedSharding(mesh, PartitionSpec(AXIS)),
            NamedSharding(mesh, PartitionSpec()),
        )

    def sharding(self, local: tuple[int, ...]) -> NamedSharding:
        return self.sharded if local and 0 not in local else self.whole

    def shape(self, local: tuple[int, ...]) -> tuple[int, ...]:
        return (local[0] * self.size, *local[1:]) if self.sharding(local) is self.sharded else local

    def aval(self, local: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape(local), dtype, sharding=self.sharding(local))

    def globalize(self, array: jax.Array) -> jax.Array:
        return jax.make_array_from_single_device_arrays(
            self.shape(array.shape), self.sharding(array.shape), [array]
        )


def _runner(compiled: Any, sent: list[int], peers: Peers, layout: _Layout) -> Compiled:
    on_cpu = layout.sharded.mesh.devices.flat[0].platform == "cpu"
    zero = jnp.zeros(1, np.uint32)
    # The runtime's executable takes this replica's arrays as they are: a tenth of the time that making global
    # ones takes.
    execute: Any = getattr(compiled.runtime_executable(), "execute_sharded", None)

    def directly(inputs: list[jax.Array]) -> list[jax.Array]:
        return [parts[0] for parts in execute(inputs).disassemble_into_single_device_arrays()]

    def through_jax(inputs: list[jax.Array]) -> list[jax.Array]:
        return [
            result.addressable_data(0) for result in compiled(*[layout.globalize(array) for array in inputs])
        ]

    call = through_jax if execute is None else directly

    def work(inputs: list[jax.Array]) -> list[jax.Array]:
        results = call(inputs)
        if on_cpu:  # gloo's errors belong to this line; on GPUs the host runs ahead
            jax.block_until_ready(results)
        return results

    def run(arrays: list[jax.Array]) -> list[jax.Array]:
        return peers.guard(lambda: work([zero, *[arrays[i] for i in sent]]))[:-1]

    return run
