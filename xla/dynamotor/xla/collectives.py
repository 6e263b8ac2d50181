"""What replicas do together: reductions and exchanges of tensors inside the graph, meetings outside it.

>>> xm.all_reduce(xm.REDUCE_SUM, [p.grad for p in model.parameters()], scale=1.0 / xm.xrt_world_size())
>>> xm.rendezvous("checkpoint-written")
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from . import metrics, ops_collective, replication, sync  # noqa: F401  (ops_collective defines torch.ops.dynamotor_xla)
from .compat import tree_map
from .errors import require
from .tensor import is_xla
from .transfer import to_cpu

REDUCE_SUM = "sum"
REDUCE_MUL = "mul"
REDUCE_AND = "and"
REDUCE_OR = "or"
REDUCE_MIN = "min"
REDUCE_MAX = "max"
_REDUCTIONS = (REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX)

Groups = Sequence[Sequence[int]] | None
_ops = torch.ops.dynamotor_xla


def _require(holds: Any, what: str, cure: str) -> None:
    require(holds, "DM643", what, cure=cure)


def _plan(groups: Groups) -> tuple[list[int], int]:
    """(flattened groups, size of a group). DM643 unless the groups are of one size and hold every replica
    once.
    """
    size = replication.size()
    if groups is None:
        return [], size
    flat = [int(rank) for group in groups for rank in group]
    _require(
        sorted(flat) == list(range(size)) and len({len(group) for group in groups}) == 1,
        f"replica groups {groups} do not fit {size} replicas",
        "name every replica once, in groups of one size",
    )
    return ([], size) if len(groups) == 1 and flat == list(range(size)) else (flat, len(groups[0]))


def _check(tensors: Iterable[Any], reduce_type: str = REDUCE_SUM) -> None:
    for tensor in tensors:
        kind = getattr(tensor, "device", type(tensor).__name__)
        on_device = isinstance(tensor, torch.Tensor) and tensor.device.type == "xla"  # in captures, too
        _require(on_device, f"a collective needs XLA tensors, got {kind}", 'move it with .to("xla")')
    _require(
        reduce_type in _REDUCTIONS,
        f"{reduce_type!r} is not a reduction",
        f"use one of {', '.join(_REDUCTIONS)}",
    )
    _require(
        reduce_type not in (REDUCE_AND, REDUCE_OR)
        or not any(t.is_floating_point() or t.is_complex() for t in tensors),
        f"reduction {reduce_type!r} needs integers or booleans",
        "convert the tensor first",
    )
    _require(
        reduce_type not in (REDUCE_MIN, REDUCE_MAX) or not any(t.is_complex() for t in tensors),
        f"complex numbers have no order for reduction {reduce_type!r}",
        "reduce the real and imaginary parts",
    )


def _divisible(tensor: torch.Tensor, dim: int, parts: int) -> None:
    _require(
        not (tensor.shape[dim] % parts),
        f"dimension {dim} of size {tensor.shape[dim]} cannot be split into {parts} equal parts",
        "pad it",
    )


def _dim(tensor: torch.Tensor, dim: int) -> int:
    _require(
        -tensor.dim() <= dim < tensor.dim(),
        f"dimension {dim} does not exist in a tensor of shape {tuple(tensor.shape)}",
        "0-d tensors need a dimension first",
    )
    return dim % tensor.dim()


def all_reduce(
    reduce_type: str,
    inputs: Any,
    scale: float = 1.0,
    groups: Groups = None,
    cctx: Any = None,
    pin_layout: bool = True,
) -> Any:
    """Reduce tensors over the replicas: a single tensor gives a new one, a list is reduced in place and
    returned.

    reduce_type: REDUCE_SUM, MUL, AND, OR, MIN or MAX. scale: the results are multiplied by it. groups:
    replica ordinals that reduce among themselves, as [[0, 1], [2, 3]]; None: all of them. cctx, pin_layout:
    accepted, they mean nothing here. DM643 for wrong arguments; DM640 when a peer has died.
    """
    tensors = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    _check(tensors, reduce_type)
    flat, share = _plan(groups)
    with torch.no_grad():
        reduced = _ops.all_reduce(tensors, reduce_type, float(scale), flat, share) if tensors else []
        if isinstance(inputs, torch.Tensor):
            return reduced[0]
        for tensor, result in zip(tensors, reduced):
            tensor.copy_(result)
    return inputs


def _each(function: Callable[..., torch.Tensor], given: Any, output: Any) -> Any:
    """A function of one tensor, of a tensor or of each in a list; `output`: what takes the results."""
    if isinstance(given, torch.Tensor):
        result = function(given)
        return result if output is None else output.copy_(result)
    results = [function(tensor) for tensor in given]
    _require(
        output is None or len(output) == len(results),
        f"{len(results)} tensors, but output has {0 if output is None else len(output)}",
        "give one output for each",
    )
    if output is None:
        return results
    for out, one in zip(output, results):
        out.copy_(one)
    return output


def all_gather(
    value: torch.Tensor | Sequence[torch.Tensor],
    dim: int = 0,
    groups: Groups = None,
    output: torch.Tensor | Sequence[torch.Tensor] | None = None,
    pin_layout: bool = True,
) -> Any:
    """The values of all replicas of a group, in its order, concatenated along `dim`; of a list: a list.
    `output`: what takes the result.
    """

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        _check([tensor])
        flat, share = _plan(groups)
        return _ops.all_gather(tensor.detach(), _dim(tensor, dim), flat, share)

    return _each(gathered, value, output)


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Split `value` along one dimension, send the i-th part to the i-th replica of the group, concatenate
    what arrives along another.

    split_count: the number of parts, which is the size of a group. DM643 when it is not, or when the parts
    are not equal.
    """
    _check([value])
    flat, share = _plan(groups)
    split, concat = _dim(value, split_dimension), _dim(value, concat_dimension)
    _require(
        split_count == share,
        f"split_count={split_count}, but a group has {share} replicas",
        "use the size of the groups",
    )
    _divisible(value, split, share)
    return _ops.all_to_all(value.detach(), split, concat, flat, share)


def reduce_scatter(
    reduce_type: str,
    input: torch.Tensor | Sequence[torch.Tensor],
    scale: float = 1.0,
    scatter_dim: int = 0,
    shard_count: int | None = None,
    groups: Groups = None,
    output: torch.Tensor | Sequence[torch.Tensor] | None = None,
    pin_layout: bool = True,
) -> Any:
    """Reduce over the replicas of a group, and keep of the result the part along `scatter_dim` that is this
    replica's; of a list: a list.

    shard_count: the number of parts; the size of a group, which is the default. `output`: what takes the
    result.
    """

    def part(tensor: torch.Tensor) -> torch.Tensor:
        _check([tensor], reduce_type)
        flat, share = _plan(groups)
        _require(
            shard_count in (None, share),
            f"shard_count={shard_count}, but a group has {share} replicas",
            "leave it out",
        )
        dim = _dim(tensor, scatter_dim)
        _divisible(tensor, dim, share)
        return _ops.reduce_scatter(tensor.detach(), reduce_type, float(scale), dim, flat, share)

    return _each(part, input, output)


def collective_permute(value: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Send tensors along `pairs` of (source, target) ordinals; a replica that is no target gets
    zeros.
    """
    _check([value])
    size = replication.size()
    sources, targets = [int(s) for s, _ in pairs], [int(t) for _, t in pairs]
    for ends in (sources, targets):
        _require(
            len(set(ends)) == len(ends) and not any(not 0 <= rank < size for rank in ends),
            f"pairs {list(pairs)} do not fit {size} replicas",
            "let every replica send once and receive once at most",
        )
    return _ops.collective_permute(value.detach(), [rank for pair in zip(sources, targets) for rank in pair])


def collective_broadcast(
    tensors: Sequence[torch.Tensor], root_ordinal: int = 0, groups: Groups = None, pin_layout: bool = True
) -> None:
    """Give every replica the root's values, in place. groups: only None or one group of all replicas."""
    _check(tensors)
    _require(
        not _plan(groups)[0],
        "a broadcast has one root, so that it cannot go over several groups",
        "leave groups out",
    )
    _require(
        0 <= root_ordinal < replication.size(),
        f"there is no replica {root_ordinal}",
        f"ordinals go from 0 to {replication.size() - 1}",
    )
    with torch.no_grad():
        for tensor, result in zip(
            tensors, _ops.collective_broadcast(list(tensors), root_ordinal) if tensors else []
        ):
            tensor.copy_(result)


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Give the parameters and buffers of all replicas the values of replica 0, and run that at once."""
    collective_broadcast([*model.parameters(), *model.buffers()])
    sync.sync()


# ---- gradients


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def reduce_gradients(
    optimizer: torch.optim.Optimizer, groups: Groups = None, pin_layout: bool = True
) -> None:
    """Replace the gradients of an optimizer's parameters by their mean over the replicas (of each group)."""
    share = _plan(groups)[1]
    if share > 1:
        all_reduce(REDUCE_SUM, _gradients(optimizer), scale=1.0 / share, groups=groups)


def all_reduce_bucketized_gradients(
    gradients: Sequence[torch.Tensor],
    scale: float = 1.0,
    groups: Groups = None,
    pin_layout: bool = True,
    bucket_cap_mb: float = 0,
) -> None:
    """All-reduce gradients in place, in buckets of at most `bucket_cap_mb` MB (0: all at once): less memory
    at a time, earlier starts."""
    bucket: list[torch.Tensor] = []
    limit, filled = bucket_cap_mb * 1024 * 1024, 0
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        if bucket and limit and filled + size > limit:
            all_reduce(REDUCE_SUM, bucket, scale, groups)
            bucket, filled = [], 0
        bucket.append(gradient)
        filled += size
    if bucket:
        all_reduce(REDUCE_SUM, bucket, scale, groups)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict[str, Any] | None = None,
    groups: Groups = None,
    pin_layout: bool = True,
) -> Any:
    """Average the gradients over the replicas and call `optimizer.step(**optimizer_args)`, whose value is
    returned.

    barrier: also end the step here. Not needed with MpDeviceLoader or ParallelLoader, which end it when the
    next batch is taken.
    """
    reduce_gradients(optimizer, groups)
    result = optimizer.step(**(optimizer_args or {}))
    if barrier:
        sync.sync()
    return result


# ---- outside the graph


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Wait until all replicas (or those named) have come to the rendezvous `tag`; the payloads, in the order
    of ordinals.

    Pending work runs first: it may hold collectives that the others wait for. DM640 when a peer has
    died, DM642 when one is late.
    """
    sync.sync()
    return replication.meet(replication.start(), tag, payload, list(replicas) or range(replication.size()))


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """`reduce_fn` of the list of all replicas' `data`: Python objects, sent through a rendezvous. Tensors in
    them arrive on the CPU."""
    on_cpu = tree_map(lambda x: to_cpu(x.detach()) if is_xla(x) else x, data)
    payloads = rendezvous(tag, pickle.dumps(on_cpu))
    # From replicas of this very job, over its own store: the same program, the same user.
    return reduce_fn([pickle.loads(payload) for payload in payloads])


def do_on_ordinals(target: Callable[..., Any], data: Any = (), ordinals: Sequence[int] = (0,)) -> Any:
    """Call `target(*data)` on some replicas only, with the XLA tensors in `data` moved to the CPU; None on
    the others.

    All replicas must call it: pending work, collectives among it, runs before.
    """
    sync.sync()
    if replication.rank() not in ordinals:
        return None
    if isinstance(data, torch.Tensor):
        data = (data,)
    return target(*tree_map(lambda x: to_cpu(x.detach()) if is_xla(x) else x, tuple(data)))


# ---- with gradients


class _AllReduce(torch.autograd.Function):
    """Sum: the gradient of each replica's value is the sum of all replicas' gradients. Min and max: it goes
    to the values that won."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, reduce_type: str, scale: float, groups: Groups
    ) -> torch.Tensor:
        result = all_reduce(reduce_type, value, 1.0, groups)
        ctx.reduce_type, ctx.scale, ctx.groups = reduce_type, scale, groups
        if reduce_type != REDUCE_SUM:
            ctx.save_for_backward(value, result)
        return result * scale if scale != 1.0 else result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        summed = all_reduce(REDUCE_SUM, gradient, ctx.scale, ctx.groups)
        if ctx.reduce_type == REDUCE_SUM:
            return summed, None, None, None
        value, result = ctx.saved_tensors
        if ctx.reduce_type == REDUCE_MUL:
            return summed * _product_of_others(value, result, ctx.groups), None, None, None
        won = value == result
        count = all_reduce(REDUCE_SUM, won.to(gradient.dtype), 1.0, ctx.groups)
        return torch.where(won, summed / count, torch.zeros_like(summed)), None, None, None


def _product_of_others(value: torch.Tensor, product: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The derivative of a product over the replicas by this replica's factor, zeros among the factors or not:
    with one zero only its own derivative is not zero, and with two all are."""
    zero = value == 0
    ones = torch.ones_like(value)
    rest = all_reduce(
        REDUCE_MUL, torch.where(zero, ones, value), 1.0, groups
    )  # the factors that are not zero
    zeros = all_reduce(REDUCE_SUM, zero.to(value.dtype), 1.0, groups)
    others = torch.where(zeros == 0, product / torch.where(zero, ones, value), torch.zeros_like(value))
    return torch.where(zero & (zeros == 1), rest, others)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, dim: int, groups: Groups) -> torch.Tensor:
        ctx.dim, ctx.groups = dim, groups
        return all_gather(value, dim, groups)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return reduce_scatter(REDUCE_SUM, gradient, 1.0, ctx.dim, groups=ctx.groups), None, None


def differentiable_all_reduce(
    reduce_type: str, value: torch.Tensor, scale: float = 1.0, groups: Groups = None
) -> torch.Tensor:
    """Reduce a tensor over the replicas, like `xm.all_reduce`, with gradients. The result is a new tensor.

    reduce_type: xm.REDUCE_SUM, MUL, AND, OR, MIN or MAX; AND and OR have no gradients. scale: the result is
    multiplied by it. groups: replica ordinals that reduce among themselves, as [[0, 1], [2, 3]]; None: all of
    them together.
    """
    if reduce_type in (REDUCE_AND, REDUCE_OR):
        return all_reduce(reduce_type, value, scale, groups)
    return _AllReduce.apply(value, reduce_type, scale, groups)


def differentiable_all_gather(value: torch.Tensor, dim: int = 0, groups: Groups = None) -> torch.Tensor:
    """The tensors of all replicas, in the order of their ordinals, concatenated along `dim`: `xm.all_gather`
    with gradients. Each replica's value gets the sum of what all replicas have for its part.
    """
    return _AllGather.apply(value, _dim(value, dim), groups)
