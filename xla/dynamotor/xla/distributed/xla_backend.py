"""PyTorch's `torch.distributed` over XLA: the backend `xla`, and `xla://`, which finds the replicas as the
device does.

>>> import dynamotor.xla.distributed.xla_backend
>>> dist.init_process_group("xla", init_method="xla://")
>>> model = DistributedDataParallel(model.to("xla"), gradient_as_bucket_view=True)

Collectives are recorded into the graph and run with it: a returned Work is done at once, in the order of the
program.
"""

# The base class declares the overloads of Python callers; c10d calls what follows with tensors and options.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from dynamotor.extension_api import XlaError

from .. import collectives, compat, metrics, placement, replication, sync
from ..errors import require
from . import (  # noqa: F401
    device_mesh,  # a mesh of replicas has process groups
    functional_collectives,  # of DTensor and FSDP
)
from .spmd.marks import require_layout

_REDUCTIONS = {
    dist.ReduceOp.SUM: collectives.REDUCE_SUM,
    dist.ReduceOp.AVG: collectives.REDUCE_SUM,
    dist.ReduceOp.PRODUCT: collectives.REDUCE_MUL,
    dist.ReduceOp.MIN: collectives.REDUCE_MIN,
    dist.ReduceOp.MAX: collectives.REDUCE_MAX,
    dist.ReduceOp.BAND: collectives.REDUCE_AND,
    dist.ReduceOp.BOR: collectives.REDUCE_OR,
}


def _refuse(what: str, why: str, cure: str) -> NoReturn:
    raise XlaError("DM647", what, why=why, where=metrics.user_line(), cure=cure)


def _done(result: Any) -> dist.Work:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(result)
    return compat.work_from_future()(future)


class XlaProcessGroup(dist.ProcessGroup):
    """All replicas, or one alone. Messages between two and smaller groups are refused: XLA runs one program
    in all replicas.

    Tensors on the CPU can be gathered, broadcast and scattered, which is what `all_gather_object` and its
    like do.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # without a store: the one for Python subclasses
        self._alone = size == 1
        self._group_name = ""

    # A group without a backend object has no place for its name: functional collectives find groups by name.
    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._group_name

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "xla"

    def _reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> list[torch.Tensor]:
        operation = opts.reduceOp
        named = next((name for known, name in _REDUCTIONS.items() if operation == known), None)
        if named is None:
            _refuse(
                f"the reduction {operation}",
                "XLA has no such reduction",
                "use SUM, AVG, PRODUCT, MIN, MAX, BAND or BOR",
            )
        scale = 1.0 / self.size() if operation == dist.ReduceOp.AVG else 1.0
        return [t.clone() for t in tensors] if self._alone else self._all_reduce(tensors, named, scale)

    def _all_reduce(self, tensors: Sequence[torch.Tensor], named: str, scale: float) -> list[torch.Tensor]:
        reduced = [t.detach().clone() for t in tensors]
        collectives.all_reduce(named, reduced, scale)
        return reduced

    def _gathered(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Every replica's tensor."""
        if self._alone:
            return [tensor.clone()]
        if tensor.device.type == "cpu":
            return [_from_bytes(payload, tensor) for payload in self._exchange(_to_bytes(tensor))]
        return collectives.all_gather(tensor.detach().unsqueeze(0)).unbind(0)

    def _broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        on_cpu = [t for t in tensors if t.device.type == "cpu"]
        for tensor in on_cpu if not self._alone else ():
            mine = _to_bytes(tensor) if self.rank() == root else b""
            tensor.copy_(_from_bytes(self._exchange(mine)[root], tensor))
        if not (self._alone or on_cpu):
            collectives.collective_broadcast(tensors, root)

    def _exchange(self, payload: bytes) -> list[bytes]:
        """Small things on the CPU, such as pickled objects, go through the store."""
        return replication.meet(replication.start(), "torch.distributed", payload, range(self.size()))

    @torch.no_grad()
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        _write(tensors, self._reduce(tensors, opts or dist.AllreduceOptions()))
        return _done(tensors)

    allreduce_coalesced = allreduce

    @torch.no_grad()
    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        reduced = self._reduce(tensors, opts)
        if self.rank() == opts.rootRank:
            _write(tensors, reduced)
        return _done(tensors)

    @torch.no_grad()
    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        self._broadcast(tensors, opts.rootRank)
        return _done(tensors)

    @torch.no_grad()
    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        for places, value in zip(outputs, inputs):
            _write(places, self._gathered(value))
        return _done([t for places in outputs for t in places])

    @torch.no_grad()
    def all_gather_single(self, output: torch.Tensor, value: torch.Tensor, opts: Any = None) -> dist.Work:
        output.copy_(
            torch.cat(list(self._gathered(value))).view_as(output)
            if value.dim()
            else torch.stack(list(self._gathered(value)))
        )
        return _done([output])

    @torch.no_grad()
    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> dist.Work:
        gathered = [self._gathered(value) for value in inputs]
        if self.rank() == opts.rootRank:
            for places, values in zip(outputs, gathered):
                _write(places, values)
        return _done([t for places in outputs for t in places])

    @torch.no_grad()
    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> dist.Work:
        root = self.rank() == opts.rootRank
        for i, output in enumerate(outputs):
            parts = torch.stack(inputs[i]) if root else output.new_zeros((self.size(), *output.shape))
            self._broadcast([parts], opts.rootRank)
            output.copy_(parts[self.rank()])
        return _done(outputs)

    @torch.no_grad()
    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> dist.Work:
        for output, parts in zip(outputs, inputs):
            output.copy_(self._reduce([torch.stack(parts)], opts)[0][self.rank()])
        return _done(outputs)

    @torch.no_grad()
    def reduce_scatter_single(self, output: torch.Tensor, value: torch.Tensor, opts: Any = None) -> dist.Work:
        reduced = self._reduce(
            [value.reshape(self.size(), *output.shape)], opts or dist.ReduceScatterOptions()
        )[0]
        output.copy_(reduced[self.rank()])
        return _done([output])

    @torch.no_grad()
    def all_to_all_single(
        self,
        output: torch.Tensor,
        value: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        if len(set(output_sizes)) > 1 or len(set(input_sizes)) > 1:
            _refuse(
                "all_to_all with parts of different sizes",
                "XLA's all-to-all has equal parts",
                "pad the parts to one size",
            )
        output.copy_(
            value if self._alone else collectives.all_to_all(value, 0, 0, self.size()).view_as(output)
        )
        return _done([output])

    @torch.no_grad()
    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        if len({t.shape for t in (*outputs, *inputs)}) > 1:
            _refuse(
                "all_to_all of tensors of different shapes",
                "XLA's all-to-all has equal parts",
                "pad the tensors to one shape",
            )
        parts = torch.stack(inputs)
        _write(
            outputs, (parts if self._alone else collectives.all_to_all(parts, 0, 0, self.size())).unbind(0)
        )
        return _done(outputs)

    @torch.no_grad()
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        for output, value in zip(outputs, inputs):
            self.all_gather_single(output, value, opts)
        return _done(outputs)

    @torch.no_grad()
    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        for output, value in zip(outputs, inputs):
            self.reduce_scatter_single(output, value, opts)
        return _done(outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Run pending work, and wait for all replicas to do so."""
        sync.sync(wait=True)
        if not self._alone:
            collectives.rendezvous("torch.distributed barrier")
        return _done([])

    def send(self, tensors: Any, target: int, tag: int = 0) -> dist.Work:
        _refuse(
            "send()",
            "XLA runs one program in all replicas: a message needs both sides in it",
            "use xm.collective_permute",
        )

    def recv(self, tensors: Any, source: int, tag: int = 0) -> dist.Work:
        _refuse(
            "recv()",
            "XLA runs one program in all replicas: a message needs both sides in it",
            "use xm.collective_permute",
        )

    recv_anysource = recv
    # The names that earlier versions of PyTorch call these by.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _from_bytes(payload: bytes, like: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(like.dtype).view(like.shape)


def _write(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for target, value in zip(targets, values):
        target.copy_(value)


def _create(store: dist.Store, rank: int, size: int, timeout: Any) -> XlaProcessGroup:
    """The process group of `init_process_group("xla")` and `new_group`. DM648 for a subgroup of several
    replicas, but not all.
    """
    world = replication.start()
    require(
        size in (1, world.place.size),
        "DM648",
        f"a process group of {size} of {world.place.size} replicas",
        why="XLA runs one program in all replicas",
        cure="use the group of all, or the `groups` argument of xm.all_reduce and its like",
    )
    return XlaProcessGroup(rank, size)


def _meet(url: str, timeout: Any = None, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """`xla://`: the replicas that xmp.spawn or torchrun has started, by the store that they have met in."""
    require_layout(
        placement.spmd() is None, "a process group of replicas in SPMD mode", "one process drives all devices"
    )
    world = replication.start()
    store = dist.HashStore() if world.store is None else dist.PrefixStore("torch.distributed", world.store)
    yield store, world.place.rank, world.place.size


def register() -> None:
    """Make the backend and `xla://` known to torch.distributed; once a process."""
    if not hasattr(dist.Backend, "XLA"):
        dist.Backend.register_backend("xla", _create, devices="xla")
        dist.register_rendezvous_handler("xla", _meet)


ProcessGroupXla = XlaProcessGroup  # torch_xla's name
register()
