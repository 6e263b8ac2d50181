"""Between the CPU and the device: copies in both directions, and jax arrays in and out of tensors.

>>> x = from_cpu(torch.ones(2), lane)
>>> array(wrap_array(jnp.ones(2)))
"""

from __future__ import annotations

import jax
import numpy as np
import torch

from . import device as devices, execute, layout, metrics, placement, replication, sync
from .dtypes import TORCH_TO_JAX, jax_dtype, torch_dtype
from .errors import require
from .ir import Cut, Lane, Meta, Node, lock
from .tensor import Alias, XLATensor, is_xla, node_of, wrap

aten = torch.ops.aten

# Types that numpy does not name: moved as integers of the same width.
_AS_INTEGER = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.int8, torch.float8_e5m2: torch.int8}


def upload(tensor: torch.Tensor, device: jax.Device | jax.sharding.Sharding) -> jax.Array:
    """A copy of a CPU tensor's data on a device. XlaError DM609 for a dtype or layout that XLA has not."""
    require(
        tensor.dtype in TORCH_TO_JAX,
        "DM609",
        f"XLA has no type for {tensor.dtype}",
        cure="convert it with .to(dtype) first",
    )
    require(
        tensor.layout is torch.strided,
        "DM609",
        f"XLA has no tensors of layout {tensor.layout}",
        cure="use .to_dense(), or the CPU",
    )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    # On the CPU jax may use this memory as it is (64-byte aligned): the copy must be its own.
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    narrow, held = _AS_INTEGER.get(tensor.dtype), jax_dtype(tensor.dtype)
    host = tensor.numpy() if narrow is None else tensor.view(narrow).numpy().view(held)
    if host.dtype != held:
        host = host.astype(held)
    metrics.amounts["OutboundData"].add(host.nbytes)
    try:
        return jax.device_put(host, device)
    except jax.errors.JaxRuntimeError as error:
        raise execute.failure(error, "DM605", "a tensor could not be moved to the device") from error


def download(value: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    """A copy of an array's data as a CPU tensor of a dtype."""
    host = np.array(value)
    metrics.amounts["InboundData"].add(host.nbytes)
    narrow = _AS_INTEGER.get(torch_dtype(host.dtype))
    if narrow is None:
        return torch.from_numpy(host).to(dtype)
    return (
        torch.from_numpy(host.view(np.int16 if narrow is torch.int16 else np.int8))
        .view(torch_dtype(host.dtype))
        .to(dtype)
    )


def from_cpu(tensor: torch.Tensor, lane: Lane) -> Node:
    """A leaf with a copy of a CPU tensor."""
    metrics.counter("TransferToDevice")
    with metrics.timing("TransferToDeviceTime"):
        leaf = lane.leaf(upload(tensor, placement.home(lane.device)), Meta.of(tensor.shape, tensor.dtype))
    leaf.uploaded = lane.epoch
    return leaf


def data_of(tensor: XLATensor, cause: str = "data") -> jax.Array:
    """The array behind a tensor; flushes its lane when it is pending."""
    with lock:
        return _data_of(tensor, cause)


def _data_of(tensor: XLATensor, cause: str) -> jax.Array:
    node = node_of(tensor)
    if node.data is None:
        if node.lane.recording:
            raise Cut("it reads data")
        # A view's node is not the value of a root: one of its own keeps it alive through the flush.
        keep = Alias(node) if tensor._alias.root is not None else None
        if keep is not None:
            node.lane.pending.append(keep)
        sync.flush(node.lane, cause)
        require(
            node.data is not None,
            "DM601",
            "this tensor was never computed",
            why="the graph that it belongs to failed to compile or to run",
            cure="look at the first error; recreate the tensors that depend on it",
        )
    return node.data


def to_cpu(tensor: torch.Tensor, cause: str = "cpu") -> torch.Tensor:
    """A CPU copy of a tensor (one that is on the CPU is returned as it is)."""
    if not is_xla(tensor):
        return tensor
    metrics.counter("TransferFromDevice")
    try:
        host, stride = _part_of_small(tensor._alias), layout.preserved(tensor._alias)
        if host is None:
            data = data_of(tensor, cause)
            replication.wait([data])
            with metrics.timing("TransferFromDeviceTime"):
                host = download(data, tensor.dtype)
        if stride is None:
            return host
        # No symbols are here.
        return torch.empty_strided(host.shape, stride, dtype=host.dtype).copy_(host)  # type: ignore[arg-type]
    except jax.errors.JaxRuntimeError as error:
        raise execute.failure(error, "DM605", "an XLA program failed while it ran") from error


# Views that can be made of a row-major copy, whatever strides the tensors report.
_ON_HOST = {
    aten.alias.default,
    aten.detach.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}
_SMALL = 1 << 20  # bytes


def _part_of_small(alias: Alias) -> torch.Tensor | None:
    """A view of a computed value, cut out of it on the CPU: a loop over `x[i].item()` would compile a program
    for every index. None where that cannot be."""
    root, chain = alias.root, []
    while alias.parent is not None:
        chain.append(alias)
        alias = alias.parent
    data = None if root is None or root.lane.recording else root.node.data
    if data is None or data.nbytes > _SMALL or not data.is_fully_addressable:
        return None
    if any(view.func not in _ON_HOST for view in chain):
        return None
    replication.wait([data])
    with metrics.timing("TransferFromDeviceTime"):
        host = download(data, root.meta.dtype)
    for view in reversed(chain):
        func = aten.reshape.default if view.func is aten.view.default else view.func
        host = func(host, *view.args, **(view.kwargs or {}))
    return host.clone(memory_format=torch.contiguous_format)


def array(tensor: XLATensor) -> jax.Array:
    """The jax array behind an xla tensor, without a copy; flushes when it is pending. It is never donated."""
    data = data_of(tensor, "array")
    node_of(tensor).owners += 1
    return data


def wrap_array(value: jax.Array, dtype: torch.dtype | None = None) -> XLATensor:
    """An xla tensor that holds a jax array, without a copy; `dtype` where the torch dtype differs from the
    array's.
    """
    found = list(value.devices())
    index = jax.local_devices().index(found[0]) if len(found) == 1 and found[0] in jax.local_devices() else 0
    lane = devices.lane_of(torch.device("xla", index))
    node = lane.leaf(value, Meta.of(value.shape, dtype or torch_dtype(value.dtype)))
    node.owners += 1  # the caller's reference
    return wrap(Alias(node))
