"""Programs that compute while collectives are on their way, run by two ranks of which the second starts late: the first
one's messages still read, and are still written to, when its later kernels run.

>>> pair.run(compared, "gathered")     # on each rank: how far a compiled call is from eager
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

import dynamotor

LATE = 0.15  # seconds
N = 128
ops = torch.ops._c10d_functional
wait = ops.wait_tensor


def later(x: torch.Tensor) -> torch.Tensor:
    """Kernels and products that write scratch memory."""
    for _ in range(3):
        x = (x @ x.t()).sin() @ x.cos() / N
    return x


def gathered(x: torch.Tensor, group: str) -> torch.Tensor:
    start = ops.all_gather_into_tensor(x.sin(), 2, group)
    return later(x) + wait(start)[:N] + wait(start)[N:]


def gathered_numbers_of_loops_without(x: torch.Tensor, group: str) -> torch.Tensor:
    start = ops.all_gather_into_tensor(torch.complex(x.sin(), x), 2, group)
    return later(x) + wait(start)[:N].real + wait(start)[N:].imag


def gathered_together(x: torch.Tensor, group: str) -> torch.Tensor:
    a, b = ops.all_gather_into_tensor_coalesced([x.sin(), x.cos()], 2, group)
    return later(x) + wait(a)[:N] - wait(b)[N:]


def gathered_into(x: torch.Tensor, group: str) -> torch.Tensor:
    whole = x.new_empty(2 * N, N)
    ops.all_gather_into_tensor_out(x.sin(), 2, group, out=whole)
    return later(x) + wait(whole)[:N] + wait(whole)[N:]


def scattered_together(x: torch.Tensor, group: str) -> torch.Tensor:
    a, b = ops.reduce_scatter_tensor_coalesced([x.sin(), x.cos()], "sum", 2, group)
    return later(x)[: N // 2] + wait(a) - wait(b)


def summed_across(x: torch.Tensor, group: str) -> torch.Tensor:
    start = ops.all_reduce(x.sin().t(), "sum", group)
    return later(x) + wait(start)


def summed_together(x: torch.Tensor, group: str) -> torch.Tensor:
    a, b = ops.all_reduce_coalesced([x.sin(), x.cos().t()], "sum", group)
    return later(x) + wait(a) - wait(b)


def summed_in_place(x: torch.Tensor, group: str) -> torch.Tensor:
    own = x.sin()
    ops.all_reduce_(own, "sum", group)
    return later(x) + wait(own)


def sent_to_all(x: torch.Tensor, group: str) -> torch.Tensor:
    start = ops.broadcast(x.sin(), 0, group)
    return later(x) + wait(start)


def sent_to_all_across(x: torch.Tensor, group: str) -> torch.Tensor:
    start = ops.broadcast(x.sin().t(), 0, group)
    return later(x) + wait(start)


def exchanged(x: torch.Tensor, group: str) -> torch.Tensor:
    start = ops.all_to_all_single(x.sin(), [N // 2] * 2, [N // 2] * 2, group)
    return later(x) + wait(start)


def sent(x: torch.Tensor, group: str) -> torch.Tensor:
    start = ops.isend(x.sin(), 1, 3, group)
    y = later(x)
    wait(start)
    return y


def received(x: torch.Tensor, group: str) -> torch.Tensor:
    start = ops.irecv(torch.zeros_like(x), 0, 3, group)
    return later(x) + wait(start)


def summed_constants(x: torch.Tensor, group: str) -> torch.Tensor:
    start = ops.all_reduce(torch.ones(N, dtype=x.dtype), "sum", group)
    return later(x) + wait(start)


# By name.
PROGRAMS: dict[str, Callable[[torch.Tensor, str], torch.Tensor]] = {
    "gathered": gathered,
    "complex numbers": gathered_numbers_of_loops_without,
    "gathered together": gathered_together,
    "gathered into": gathered_into,
    "scattered together": scattered_together,
    "summed across": summed_across,
    "summed together": summed_together,
    "summed in place": summed_in_place,
    "summed constants": summed_constants,
    "sent to all": sent_to_all,
    "sent to all across": sent_to_all_across,
    "exchanged": exchanged,
} | ({"sent": sent} if hasattr(ops, "isend") else {})


def _input(rank: int) -> torch.Tensor:
    return torch.randn(N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


@contextlib.contextmanager
def _behind_others() -> Iterator[None]:
    """Both threads of a gloo group wait for the second rank: what starts now has not looked at its memory."""
    dist.barrier()
    time.sleep(LATE * dist.get_rank())
    works = [dist.all_reduce(torch.zeros(1), async_op=True) for _ in range(2)]
    yield
    for work in works:
        work.wait()


def compared(rank: int, name: str) -> float:
    """How far results of compiled code are from eager's, at three calls."""
    dynamotor.reset()
    program, x, group = PROGRAMS[name], _input(rank), dist.group.WORLD.group_name
    if program is sent and rank:
        program = received
    expected = program(x, group)
    compiled = dynamotor.compile(program, fullgraph=True)
    compiled(x, group)
    worst = 0.0
    for _ in range(2):
        with _behind_others():
            worst = max(worst, float((compiled(x, group) - expected).abs().max()))
    return worst


@torch.library.custom_op("collective_programs::refuse_negative", mutates_args=())
def refuse_negative(x: torch.Tensor) -> torch.Tensor:
    if bool((x < 0).any()):
        raise ValueError("a negative number")
    return x.clone()


@refuse_negative.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def raising(x: torch.Tensor, signs: torch.Tensor, group: str) -> torch.Tensor:
    start = ops.all_gather_into_tensor(x.sin(), 2, group)
    return later(x) + refuse_negative(signs) + wait(start)[:N] + wait(start)[N:]


def raised_between(rank: int) -> float:
    """The first rank's call raises between start and wait, and other compiled code runs; how far the other rank is from
    eager, which has got its message.
    """
    dynamotor.reset()
    x, signs, group = _input(rank), torch.ones(N, dtype=torch.float64), dist.group.WORLD.group_name
    expected = raising(x, signs, group)
    compiled, other = dynamotor.compile(raising, fullgraph=True), dynamotor.compile(later, fullgraph=True)
    compiled(x, signs, group)
    other(x)
    worst = 0.0
    for _ in range(2):
        with _behind_others():
            if rank:
                worst = max(worst, float((compiled(x, signs, group) - expected).abs().max()))
            else:
                _raises(compiled, x, -signs, group)
                other(x)
    return worst


def _raises(call: Callable[..., object], *args: object) -> None:
    try:
        call(*args)
    except ValueError:
        return
    raise AssertionError("no number is negative")


class _Weighted(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_input(rank))

    def forward(self, x: torch.Tensor, group: str) -> torch.Tensor:
        return x @ wait(ops.all_reduce(self.weight.sin(), "sum", group))


def of_parameters(rank: int) -> float:
    """How far a layer with the parameter's sum over ranks is from eager, when the parameter of one rank changes."""
    dynamotor.reset()
    layer, x, group = _Weighted(rank), _input(2), dist.group.WORLD.group_name
    compiled, worst = dynamotor.compile(layer, fullgraph=True), 0.0
    with torch.no_grad():
        for _ in range(3):
            worst = max(worst, float((compiled(x, group) - layer(x, group)).abs().max()))
            if rank == 0:
                layer.weight += 1
    return worst
