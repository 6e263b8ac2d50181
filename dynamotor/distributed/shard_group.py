"""The parameters that one `fully_shard` gathers and reduces together, seen from compiled code: an all-gather
before they are used, a reduce-scatter of their gradients.

What goes over the wire, and in which order, is what FSDP2's own hooks send. So one rank may run the hooks
while another runs compiled code. Everything that may change between steps (the shards' memory, whether
gradients are reduced, factors) is read at the time at which the hooks would read it.

>>> group = shard_group_of(state._fsdp_param_groups[0], state)
>>> flat = group.start_gather()                    # runs beside what comes next
>>> weights = group.finish_gather(flat)
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ..base import compat
from ..base.events import emit, listening
from ..graph.spec import TensorSpec, contiguous_stride
from .plan import Bucket, GradientSlot
from .rank_failures import install, told
from .shard_copies import Layout, copied

# Their names since PyTorch 2.13, and before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_reinterpret = compat.reinterpret_tensor
_KEY = "_dynamotor_shards"
_numbers = itertools.count(1)
_groups: weakref.WeakValueDictionary[int, ShardGroup] = weakref.WeakValueDictionary()
# Gradients that are on their way: the oldest are waited for before more bytes than these are in flight.
BYTES_IN_FLIGHT = 256 << 20
MOST_STARTED = 2  # gathers of one group that nothing awaits yet: a module may run twice


def shard_group_of(parameters: Any, state: Any) -> ShardGroup:
    """The group of an `FSDPParamGroup` of an `FSDPState`; the first call attaches it."""
    found = vars(parameters).get(_KEY)
    if found is None:
        found = vars(parameters)[_KEY] = ShardGroup(parameters, state)
    return found


def group_of(number: int) -> ShardGroup:
    """The group that a number in a graph stands for."""
    return _groups[number]


class ShardGroup:
    """One `FSDPParamGroup`. `anchor` is the tensor through which autograd reaches the group: the parameters
    themselves take no part in it, as under the hooks.
    """

    def __init__(self, parameters: Any, state: Any) -> None:
        self.parameters, self.state = parameters, state
        self.number = next(_numbers)
        _groups[self.number] = self
        self.anchor = torch.zeros((), device=parameters.device, requires_grad=True)
        with torch.enable_grad():
            self._node = torch.autograd.graph.get_gradient_edge(self.anchor).node
        self._reduced: dict[tuple[torch.dtype, tuple[int, ...]], Bucket] = {}
        self._started: dict[int, tuple[Any, Any]] = {}  # gathers not yet awaited, by their memory
        self._layouts: dict[tuple[torch.dtype, tuple[int, ...]], Layout] = {}
        self._factors: dict[Any, Any] = {}  # of gradients, by all that decides them
        self._new = compat.empty_strided_cuda if self.on_gpu else compat.empty_strided_cpu
        install(self.group)

    @cached_property
    def on_gpu(self) -> bool:
        return self.anchor.device.type == "cuda"

    @cached_property
    def group(self) -> dist.ProcessGroup:
        return self.parameters.mesh_info.shard_process_group

    @cached_property
    def world(self) -> int:
        return self.group.size()

    @cached_property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def params(self) -> Sequence[Any]:
        """The `FSDPParam`s, in their order within a message."""
        return self.parameters.fsdp_params

    @property
    def reshards(self) -> bool:
        """Whether gathered weights are freed after the forward and gathered again for the backward."""
        return self.parameters.post_forward_mesh_info is not None

    def __repr__(self) -> str:
        return f"ShardGroup({self.parameters._module_fqn or 'root'})"

    # Plans --------------------------------------------------------------------------------------------------
    @cached_property
    def gathered(self) -> Bucket:
        """A rank's part of the all-gather: the padded shards in the type in which they are used."""
        return self._bucket(self.params, self.params[0].param_dtype or self.params[0].orig_dtype)

    def reduced(self, which: tuple[int, ...], dtype: torch.dtype) -> Bucket:
        """A rank's part of the reduce-scatter: the padded shards of the gradients of these parameters."""
        found = self._reduced.get((dtype, which))
        if found is None:
            found = self._reduced[dtype, which] = self._bucket([self.params[i] for i in which], dtype)
        return found

    def _bucket(self, params: Sequence[Any], dtype: torch.dtype) -> Bucket:
        slots: list[GradientSlot] = []
        end = 0
        for param in params:
            shape = tuple(param.padded_sharded_param_size)
            stride: tuple[Any, ...] = contiguous_stride(shape)
            slots.append(GradientSlot(param._param_fqn or "", shape, stride, end))
            end += slots[-1].numel
        return Bucket(tuple(slots), dtype, self.anchor.device)

    @cached_property
    def _memory(self) -> list[tuple[tuple[int, ...], tuple[Any, ...]]]:
        """Shape and strides of the memory that a gather's copies go to: those of the whole parameter, or all
        shards behind each other where they are padded or shards of another dimension.
        """
        whole = [
            tuple(p._orig_size) if _is_whole(p, n * self.world) else (n * self.world,)
            for p, n in zip(self.params, self.gathered.numels, strict=True)
        ]
        return [(shape, contiguous_stride(shape)) for shape in whole]

    @cached_property
    def _apart(self) -> list[int]:
        """The parameters that are not yet whole when the shards of all ranks are behind each other."""
        numels = self.gathered.numels
        return [i for i, p in enumerate(self.params) if not _is_whole(p, numels[i] * self.world)]

    @cached_property
    def own_layout(self) -> Layout:
        """This rank's shards in its part of the all-gather."""
        return _layout(self.gathered, self.gathered.numels, 1)

    @cached_property
    def whole_layout(self) -> Layout:
        """The shards of all ranks behind each other in the all-gather's result."""
        return _layout(self.gathered, [n * self.world for n in self.gathered.numels], self.world)

    def reduced_layout(self, which: tuple[int, ...], bucket: Bucket) -> Layout:
        """Whole gradients in the reduce-scatter's message."""
        key = bucket.dtype, which
        found = self._layouts.get(key)
        if found is None:
            numels = [
                self.params[i]._orig_size.numel()
                if self.params[i].fsdp_placement.dim == 0
                else n * self.world
                for i, n in zip(which, bucket.numels, strict=True)
            ]
            found = self._layouts[key] = _layout(bucket, numels, self.world)
        return found

    def factors(self, replicas: dist.ProcessGroup | None, dtype: torch.dtype) -> Any:
        """What gradients are multiplied by, and how they are summed."""
        group = self.parameters
        factor, force = group.gradient_divide_factor, group.force_sum_reduction_for_comms
        key = replicas is None, dtype, factor, force
        found = self._factors.get(key)
        if found is None:
            found = self._factors[key] = compat.gradient_divide_factors()(
                self.group, replicas, dtype, group.device.type, factor, force
            )
        return found

    @property
    def weights(self) -> tuple[TensorSpec, ...]:
        """A gather's results."""
        return tuple(
            TensorSpec.dense(tuple(p._orig_size), p.param_dtype or p.orig_dtype, self.anchor.device)
            for p in self.params
        )

    # Gathering ----------------------------------------------------------------------------------------------
    def start_gather(self) -> torch.Tensor:
        """Start the all-gather; the memory into which it writes."""
        if reductions.backwards and compat.current_task() == -1:
            reductions.forget()
        with told("while parameters were gathered"):
            flat, arrived, whole = self._gather_beside() if self.on_gpu else (*self._gather(), None)
        self._started[flat.data_ptr()] = arrived, whole
        if len(self._started) > MOST_STARTED:  # the program between start and wait has raised
            self._await(next(iter(self._started)))
        if listening("shards"):
            emit("shards", what="gather", group=self, nbytes=flat.nbytes)
        return flat

    def _gather(self) -> tuple[torch.Tensor, Any]:
        bucket, world = self.gathered, self.world
        flat = self._new((bucket.numel * world,), (1,), bucket.dtype)
        own = _reinterpret(flat, (bucket.numel,), (1,), bucket.numel * self.rank)
        shards = [p._sharded_param_data for p in self.params]
        if not copied(self.own_layout, True, shards, own):
            torch._foreach_copy_(list(own.split(bucket.numels)), shards)
        work = None
        if world > 1:
            work = _all_gather(flat, own, group=self.group, async_op=not self.on_gpu)
        return flat, work

    def _gather_beside(self) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
        """Gather on the stream for gathers, behind the writes of the shards, and copy the parameters out of
        the message there too. The copies write memory of the current stream, and wait until it is free; the
        gather does not.
        """
        stream, before = self.parameters.comm_ctx.all_gather_stream, torch.cuda.current_stream()
        whole, free = self._memory_of_whole(), before.record_event()
        in_backward, hooked = compat.current_task() != -1, self.state._state_ctx.iter_forward_root is not None
        if not in_backward and not hooked:  # the root's own hook has waited
            stream.wait_event(free)
        torch.cuda.set_stream(stream)
        try:
            flat, _ = self._gather()
            stream.wait_event(free)
            self._unpack(flat, whole)
            return flat, stream.record_event(), whole
        finally:
            torch.cuda.set_stream(before)

    def finish_gather(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Wait for an all-gather; the whole parameters."""
        whole = self._await(flat.data_ptr())
        if whole is None:
            whole = self._memory_of_whole()
            self._unpack(flat, whole)
        for i in self._apart:
            whole[i] = _joined(whole[i], self.params[i], self.world)
        return whole

    def _await(self, address: int) -> list[torch.Tensor] | None:
        """Wait for the all-gather into this memory; the whole parameters if they are copied out already."""
        work, whole = self._started.pop(address, (None, None))
        if work is not None:
            with told("while parameters were gathered"):
                work.wait()
        return whole

    def _memory_of_whole(self) -> list[torch.Tensor]:
        dtype = self.gathered.dtype
        return [self._new(shape, stride, dtype) for shape, stride in self._memory]

    def _unpack(self, flat: torch.Tensor, whole: Sequence[torch.Tensor]) -> None:
        """Copy the parameters out of an all-gather's message."""
        if not copied(self.whole_layout, False, whole, flat):
            numels, world = self.gathered.numels, self.world
            rows = [_reinterpret(t, (world, n), (n, 1), 0) for t, n in zip(whole, numels, strict=True)]
            torch.split_with_sizes_copy(flat.view(world, -1), numels, dim=1, out=rows)

    # Reducing -----------------------------------------------------------------------------------------------
    def reduce(self, which: Sequence[int], grads: Sequence[torch.Tensor], late: bool) -> None:
        """Take the gradients of some of the whole parameters; reduce them (late: when the backward ends), or
        keep them where the program has turned that off.
        """
        if not self._is_wanted():
            return
        if not self.parameters.reduce_grads:
            for i, grad in zip(which, grads, strict=True):
                self._keep(self.params[i], grad)
            return
        if len(which) < len(self.params) or any(map(_has_kept, self.params)):
            new: dict[int, torch.Tensor] = dict(zip(which, grads, strict=True))
            found = [(i, self._with_kept(param, new.get(i))) for i, param in enumerate(self.params)]
            which = [i for i, grad in found if grad is not None]
            grads = [grad for _, grad in found if grad is not None]
        if grads:
            reductions.take(Reduction(self, tuple(which), list(grads)), late)

    def no_gradient(self) -> torch.Tensor:
        """What stands for the gradient of the anchor, without use."""
        return self._new((), (), self.anchor.dtype)

    def _is_wanted(self) -> bool:
        """Whether the backward that runs is to write `.grad`: that of `torch.autograd.grad` is not."""
        try:
            return compat.engine_will_run(self._node)
        except RuntimeError:  # so it answers for leaves under torch.autograd.grad
            return False

    def _keep(self, param: Any, grad: torch.Tensor) -> None:
        """Add to the parameter's kept gradient until it is reduced, where the hooks would find it."""
        if not hasattr(param, "_unsharded_param"):
            dtype = param.param_dtype or param.orig_dtype
            numel = param.padded_sharded_param_size.numel()
            param.init_all_gather_outputs([numel], [dtype], self.world, self.parameters.device)
            param.init_unsharded_param()
            param.free_unsharded_param()
        if param.unsharded_accumulated_grad is None:
            param.unsharded_accumulated_grad = torch.empty_like(
                grad, dtype=param.reduce_dtype or grad.dtype, memory_format=torch.contiguous_format
            ).copy_(grad)
        else:
            param.unsharded_accumulated_grad += grad

    def _with_kept(self, param: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient with the part kept from earlier backwards, which is taken out."""
        kept = param.unsharded_accumulated_grad
        param.unsharded_accumulated_grad = None
        unsharded = getattr(param, "_unsharded_param", None)
        if unsharded is not None and unsharded.grad is not None:  # the hooks kept it, in the gradient's type
            kept = unsharded.grad if kept is None else kept + unsharded.grad
            unsharded.grad = None
        if kept is None:
            if grad is None and getattr(self.parameters, "reduce_scatter_unused_params", False):
                return param.unsharded_zero_grad_data
            return grad
        return kept if grad is None else kept.add_(grad)


def _is_whole(param: Any, numel: int) -> bool:
    """Whether so many elements, the shards of all ranks behind each other, are the parameter."""
    return param.fsdp_placement.dim == 0 and param._orig_size.numel() == numel


def _has_kept(param: Any) -> bool:
    """Whether a gradient is kept from an earlier backward."""
    unsharded = getattr(param, "_unsharded_param", None)
    return param.unsharded_accumulated_grad is not None or (
        unsharded is not None and unsharded.grad is not None
    )


def _layout(bucket: Bucket, numels: Sequence[int], world: int) -> Layout:
    """Tensors of so many elements in a message of which each rank has a bucket."""
    slots = bucket.slots
    parts = [(n, slot.numel, slot.offset) for n, slot in zip(numels, slots, strict=True)]
    return Layout(tuple(parts), bucket.numel, world)


def _joined(flat: torch.Tensor, param: Any, world: int) -> torch.Tensor:
    """A whole parameter, from the shards of all ranks behind each other."""
    dim, shape = param.fsdp_placement.dim, list(param.padded_sharded_param_size)
    if dim == 0:
        return flat.narrow(0, 0, param._orig_size.numel()).view(param._orig_size)
    return torch.cat(flat.view(world, *shape).unbind(), dim)


def _rows(grad: torch.Tensor, param: Any, world: int) -> torch.Tensor:
    """A whole gradient with the ranks' parts behind each other in its first dimension."""
    dim = param.fsdp_placement.dim
    return grad if dim == 0 or world == 1 else torch.cat(grad.chunk(world, dim))


@dataclass(eq=False)
class Reduction:
    """The gradients of one group on their way: packed, scattered, (with replicas) summed over these, and
    added to the shards' `.grad`.
    """

    of: ShardGroup
    which: tuple[int, ...]  # the parameters
    grads: list[torch.Tensor]  # let go when they are packed
    work: Any = None
    sent: torch.Tensor | None = None
    output: torch.Tensor | None = None

    @property
    def params(self) -> Sequence[Any]:
        params = self.of.params
        return params if len(self.which) == len(params) else [params[i] for i in self.which]

    @cached_property
    def replicas(self) -> dist.ProcessGroup | None:
        """The group over which shards are replicated (HSDP)."""
        return getattr(self.of.parameters.mesh_info, "replicate_process_group", None)

    @cached_property
    def bucket(self) -> Bucket:
        """This rank's part."""
        return self.of.reduced(self.which, self.of.parameters._reduce_dtype or self.grads[0].dtype)

    @property
    def nbytes(self) -> int:
        """The bytes that are sent."""
        return self.bucket.nbytes * self.of.world

    def pack(self) -> None:
        """Copy the gradients, whose memory the program may use again."""
        of, bucket = self.of, self.bucket
        self.sent = of._new((bucket.numel * of.world,), (1,), bucket.dtype)
        rows = [_rows(g, p, of.world) for g, p in zip(self.grads, self.params, strict=True)]
        layout = of.reduced_layout(self.which, bucket)
        if not copied(layout, True, rows, self.sent):
            torch._chunk_cat(rows, dim=0, num_chunks=of.world, out=self.sent.view(of.world, -1))
        self.grads = []

    def send(self) -> None:
        """Start the reduce-scatter; on a GPU all that follows is queued too."""
        of, sent = self.of, self.sent
        assert sent is not None
        self.factors = of.factors(self.replicas, self.bucket.dtype)
        if listening("shards"):
            emit("shards", what="reduce", group=of, nbytes=self.nbytes)
        if not of.on_gpu:
            self.work = self._scatter(async_op=True)
            return
        stream, before = of.parameters.comm_ctx.reduce_scatter_stream, torch.cuda.current_stream()
        stream.wait_stream(before)
        torch.cuda.set_stream(stream)
        try:
            self._scatter(async_op=False)
            self._hand_out()
            self.work = stream.record_event()
        finally:
            torch.cuda.set_stream(before)
        if reductions.arrived is not None:
            reductions.arrived.append(([p.sharded_param for p in self.params], self.work))

    def _scatter(self, async_op: bool) -> Any:
        of, group, sent = self.of, self.of.parameters, self.sent
        before, _, operation, _ = self.factors
        assert sent is not None
        if before is not None and before != 1:
            sent.div_(before)
        if of.world > 1:
            self.output = sent.new_empty(self.bucket.numel)
            scatter = group._reduce_scatter_process_group
            return _reduce_scatter(self.output, sent, op=operation, group=scatter, async_op=async_op)
        factor = group.gradient_divide_factor
        self.output = sent if factor is None else sent / factor
        return None

    def finish(self) -> None:
        """Wait until the shards have their gradients."""
        if self.work is not None:
            self.work.wait()
        if self.output is not None:
            self._hand_out()
        self.sent = None

    def _hand_out(self) -> None:
        """Sum over the replicas, and add the result to the shards' gradients."""
        output, self.output = self.output, None
        group = self.of.parameters
        assert output is not None
        _, after, _, operation = self.factors
        if self.replicas is not None:
            dist.all_reduce(output, group=self.replicas, op=operation)
        if after is not None and after != 1:
            output.div_(after)
        flat = output.to(group._orig_dtype)
        for param, slot in zip(self.params, self.bucket.slots, strict=True):
            _add_to_gradient(param, flat, slot.offset)


def _add_to_gradient(param: Any, flat: torch.Tensor, offset: int) -> None:
    """Give a shard its gradient, as AccumulateGrad would."""
    shard = param.sharded_param
    local = _reinterpret(flat, param.sharded_size, param.contiguous_sharded_stride, offset)
    if shard.grad is None:
        kind: Any = type(shard)  # DTensor, whose __init__ does nothing, in 3 us
        shard.grad = kind.__new__(kind, local, param._sharding_spec, requires_grad=False)
    else:
        shard.grad._local_tensor += local
    for hook in (getattr(shard, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(shard)


class Reductions:
    """Messages on their way in this process, in order; all of it has arrived when the backward ends."""

    def __init__(self) -> None:
        self.pending: list[Reduction] = []
        self.late: list[Reduction] = []
        self.backwards: set[int] = set()  # those that will call `finish` at their end
        # On a GPU, for those who ask by an empty list: shards, and the event behind their `.grad`.
        self.arrived: list[tuple[list[torch.Tensor], Any]] | None = None

    def take(self, reduction: Reduction, late: bool) -> None:
        """Reduce now, or when the backward ends."""
        if compat.current_task() not in self.backwards:  # one may run inside of another
            self.backwards.add(compat.current_task())
            compat.execution_engine.get().queue_callback(self.finish)
        with told("in a backward, while gradients were reduced"), torch.no_grad():
            self._make_room(reduction.nbytes)
            reduction.pack()
            if late:
                self.late.append(reduction)
            else:
                reduction.send()
                self.pending.append(reduction)

    def _make_room(self, nbytes: int) -> None:
        """Wait for the oldest while there is no room for so many bytes beside messages on their way."""
        while self.pending and nbytes + sum(one.nbytes for one in self.pending) > BYTES_IN_FLIGHT:
            self.pending.pop(0).finish()

    def forget(self) -> None:
        """Drop the leftovers of a backward that raised: its gradients are lost, as under the hooks."""
        for reduction in self.pending:
            if reduction.work is not None:
                reduction.work.wait()
        self.__init__()  # type: ignore[misc]

    def finish(self) -> None:
        """Start late messages, in the order of the hooks, and wait for all."""
        self.backwards.clear()
        late, self.late = sorted(self.late, key=_place), []
        with told("in a backward, while gradients were reduced"), torch.no_grad():
            for reduction in late:
                reduction.send()
                self.pending.append(reduction)
            while self.pending:
                self.pending.pop(0).finish()


def _place(reduction: Reduction) -> int:
    state = reduction.of.state
    return state._state_ctx.all_states.index(state)


reductions = Reductions()
