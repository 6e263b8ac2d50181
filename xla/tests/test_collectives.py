"""Collectives: every reduction and dtype, groups, views, constants, dead results, gradients, wrong
arguments.
"""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="jax is not installed")

import torch  # noqa: E402
from replicas import run_replicas  # noqa: E402

import dynamotor.xla.start  # noqa: E402, F401
from dynamotor.base.errors import XlaError  # noqa: E402
from dynamotor.xla import collectives  # noqa: E402
from dynamotor.xla.core import functions as xf  # noqa: E402

PROGRAM = """
    import functools, torch
    import dynamotor.xla.start
    from dynamotor.xla import collectives as c, replication, sync
    from dynamotor.xla.core import functions as xf
    me, n = replication.rank(), replication.size()
    wanted = []

    def check(got, want, name=""):
        wanted.append((got, want, name))

    def settle():
        sync.sync()     # all in one program
        for got, want, name in wanted:
            got = got.cpu()
            assert got.dtype == want.dtype and got.shape == want.shape, (name, got, want)
            tolerance = dict(rtol=2e-2, atol=1e-2) if got.dtype == torch.bfloat16 else dict(rtol=2e-3, atol=1e-5)
            assert torch.allclose(got.to(torch.complex128), want.to(torch.complex128), equal_nan=True, **tolerance), (name, got, want)
        wanted.clear()
"""

ALL_DTYPES = (
    PROGRAM
    + """
    dtypes = {dtypes}

    def value(dtype, i):
        g = torch.Generator().manual_seed(i)
        if dtype == torch.bool:
            return torch.rand(4, 6, generator=g) > 0.4
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(4, 6, generator=g, dtype=dtype if dtype.is_complex else torch.float32).to(dtype)
        return torch.randint(0, 9, (4, 6), generator=g).to(dtype)

    ops = dict(sum=torch.add, mul=torch.mul, min=torch.minimum, max=torch.maximum, **{{"and": torch.bitwise_and, "or": torch.bitwise_or}})
    for dtype in dtypes:
        values = [value(dtype, i) for i in range(n)]
        x = values[me].to("xla")
        for name, f in ops.items():
            exact = not (dtype.is_floating_point or dtype.is_complex)
            if (name in ("and", "or") and not exact) or (name in ("min", "max") and dtype.is_complex):
                continue
            whole = functools.reduce(f, values)
            check(c.all_reduce(name, x), whole, (name, dtype))
            check(c.reduce_scatter(name, x, scatter_dim=1), whole[:, me * 3:me * 3 + 3], ("scatter", name, dtype))
        check(c.all_gather(x, 1), torch.cat(values, 1), ("gather", dtype))
        check(c.all_to_all(x, 0, 1, n), torch.cat([v[me * 2:me * 2 + 2] for v in values], 1), ("all_to_all", dtype))
        check(c.collective_permute(x, [(0, 1)]), values[0] if me == 1 else torch.zeros_like(values[0]), ("permute", dtype))
        whole, base = x.clone(), x.clone()
        c.collective_broadcast([whole, base[0]], 1)
        check(whole, values[1], ("broadcast", dtype))
        check(base, torch.cat([values[1][:1], values[me][1:]]), ("broadcast of a view", dtype))
    settle()
    print("done")
"""
)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "dtypes",
    [
        [torch.float32, torch.float64, torch.bfloat16],
        [torch.int64, torch.int8, torch.uint8],
        [torch.bool, torch.complex64, torch.float16],
    ],
    ids=["floats", "integers", "others"],
)
@pytest.mark.slow
def test_every_collective_in_every_dtype(dtypes: list[torch.dtype]) -> None:
    assert all("done" in text for text in run_replicas(ALL_DTYPES.format(dtypes=dtypes)))


@pytest.mark.slow
def test_what_xla_could_know_by_itself_and_what_nobody_reads() -> None:
    run_replicas(
        PROGRAM
        + """
    full = lambda v, dtype=torch.float32: torch.full((2,), v, device="xla", dtype=dtype)
    # Each replica has another constant in its program.
    check(c.all_reduce("sum", full(me + 1.0)), torch.full((2,), 3.0), "sum")
    check(c.all_reduce("max", full(me, torch.int64)), torch.full((2,), 1), "max")
    check(c.all_gather(full(me + 1.0)), torch.tensor([1.0, 1.0, 2.0, 2.0]), "gather")
    check(c.all_to_all(full(float(me)), 0, 0, 2), torch.tensor([0.0, 1.0]), "all_to_all")
    check(c.collective_permute(full(me + 1.0), [(0, 1), (1, 0)]), torch.full((2,), 2.0 - me), "permute")
    check(c.all_reduce("sum", torch.tensor(me + 1.0, device="xla"), 0.5), torch.tensor(1.5), "0-d")
    settle()
    # Only one replica reads the first result; what follows must not be mistaken for it.
    unread = c.all_reduce("sum", full(1.0))
    if me == 0:
        check(unread, torch.full((2,), 2.0))
    del unread
    check(c.all_reduce("sum", full(10.0 * me)), torch.full((2,), 10.0))
    settle()
    # NaN and infinities
    x = torch.tensor([float("nan"), 1.0, float("inf"), -0.0]) if me == 0 else torch.tensor([0.0, float("nan"), 1.0, 0.0])
    check(c.all_reduce("max", x.to("xla")), torch.tensor([float("nan"), float("nan"), float("inf"), 0.0]))
    check(c.all_reduce("min", x.to("xla")), torch.tensor([float("nan"), float("nan"), 1.0, -0.0]))
    y = x.to("xla")
    c.collective_broadcast([y], 0)
    settle()
    assert torch.equal(y.cpu().view(torch.int32), torch.tensor([float("nan"), 1.0, float("inf"), -0.0]).view(torch.int32))
    """
    )


def test_groups_lists_scales_and_meetings() -> None:
    texts = run_replicas(
        PROGRAM
        + """
    alone = [[0], [1]]
    x = torch.arange(4.0) + 10 * me
    check(c.all_reduce("sum", x.to("xla"), 2.0, alone), x * 2)
    check(c.all_gather(x.to("xla"), 0, alone), x)
    check(c.reduce_scatter("sum", x.to("xla"), 1.0, 0, 1, alone), x)
    swapped = [[1, 0]]
    both = [torch.arange(4.0), torch.arange(4.0) + 10]
    check(c.all_gather(x.to("xla"), 0, swapped), torch.cat([both[1], both[0]]))
    check(c.reduce_scatter("max", x.to("xla"), groups=swapped), both[1][2:] if me == 0 else both[1][:2])
    check(c.reduce_scatter("sum", x.to("xla"), groups=swapped), (both[0] + both[1])[2:] if me == 0 else (both[0] + both[1])[:2])
    many = [x.to("xla"), torch.full((2, 2), me + 1, device="xla"), torch.zeros(0, device="xla")]
    assert c.all_reduce("sum", many, scale=0.5) is many
    check(many[0], (both[0] + both[1]) * 0.5)
    check(many[1], torch.full((2, 2), 1))       # 3 * 0.5, as an integer
    out = torch.zeros(8, device="xla")
    c.all_gather(x.to("xla"), output=out)
    check(out, torch.cat(both))
    buckets = [torch.full((300,), float(me), device="xla") for _ in range(5)]
    c.all_reduce_bucketized_gradients(buckets, scale=0.5, bucket_cap_mb=0.002)
    for bucket in buckets:
        check(bucket, torch.full((300,), 0.5))
    settle()
    assert c.rendezvous("a", b"from %d" % me) == [b"from 0", b"from 1"]
    assert c.rendezvous("a") == [b"", b""]
    if me == 1:
        assert c.rendezvous("one", b"x", [1]) == [b"x"]
    got = c.mesh_reduce("loss", {"v": torch.tensor([me + 1.0], device="xla"), "n": me}, lambda all: [(d["v"].item(), d["n"]) for d in all])
    assert got == [(1.0, 0), (2.0, 1)]
    assert c.do_on_ordinals(lambda t: t.sum().item(), (torch.ones(3, device="xla"),), (1,)) == (3.0 if me == 1 else None)
    model = torch.nn.BatchNorm1d(2).to("xla")
    with torch.no_grad():
        model.weight.fill_(me + 5.0)
        model.running_mean.fill_(me + 7.0)
    c.broadcast_master_param(model)
    assert model.weight.tolist() == [5.0, 5.0] and model.running_mean.tolist() == [7.0, 7.0]
    print("done")
    """
    )
    assert all("done" in text for text in texts)


def test_gradients_travel_through_collectives() -> None:
    """Against one process that holds both replicas' values."""
    run_replicas(
        PROGRAM
        + """
    values = [torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    weights = [torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9 + i)) for i in range(2)]

    def compare(name, distributed, together):
        x = values[me].to("xla").requires_grad_()
        y = distributed(x)
        (y * weights[me].to("xla")[:y.shape[0], :y.shape[1]]).sum().backward()
        both = [v.clone().requires_grad_() for v in values]
        outs = together(both)
        sum((o * w[:o.shape[0], :o.shape[1]]).sum() for o, w in zip(outs, weights)).backward()
        check(y.detach(), outs[me].detach(), name)
        check(x.grad, both[me].grad, name)

    compare("sum", lambda x: xf.all_reduce("sum", x, 0.5), lambda b: [(b[0] + b[1]) * 0.5] * 2)
    compare("max", lambda x: xf.all_reduce("max", x), lambda b: [torch.maximum(*b)] * 2)
    compare("mul", lambda x: xf.all_reduce("mul", x, 3.0), lambda b: [b[0] * b[1] * 3.0] * 2)
    compare("gather", lambda x: xf.all_gather(x, 0), lambda b: [torch.cat(b)] * 2)
    settle()
    """
    )


def test_a_replica_alone() -> None:
    x = torch.tensor([1.0, 2.0], device="xla")
    assert collectives.all_reduce("sum", x, 0.5).tolist() == [0.5, 1.0]
    assert collectives.all_gather(x).tolist() == [1.0, 2.0]
    assert collectives.all_to_all(x, 0, 0, 1).tolist() == [1.0, 2.0]
    assert collectives.reduce_scatter("max", x, 2.0).tolist() == [2.0, 4.0]
    assert collectives.collective_permute(x, [(0, 0)]).tolist() == [1.0, 2.0]
    assert collectives.collective_permute(x, []).tolist() == [0.0, 0.0]
    collectives.collective_broadcast([x])
    assert collectives.rendezvous("x", b"me") == [b"me"]
    assert collectives.mesh_reduce("x", 3, sum) == 3
    y = x.clone().requires_grad_()
    xf.all_reduce("sum", y, 2.0).sum().backward()
    assert y.grad.tolist() == [2.0, 2.0]


def test_an_optimizer_step_averages_nothing_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, device="xla"))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    (parameter * 3).sum().backward()
    collectives.optimizer_step(optimizer, barrier=True)
    assert parameter.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: collectives.all_reduce("sum", torch.ones(2)), "XLA tensors, got cpu"),
        (lambda x: collectives.all_reduce("mean", x), "'mean' is not a reduction"),
        (lambda x: collectives.all_reduce("and", x), "integers or booleans"),
        (lambda x: collectives.all_reduce("sum", x, groups=[[0, 1]]), "do not fit 1 replicas"),
        (lambda x: collectives.all_gather(x, 3), "dimension 3 does not exist"),
        (lambda x: collectives.all_to_all(x, 0, 0, 2), "split_count=2"),
        (lambda x: collectives.reduce_scatter("sum", x, shard_count=3), "shard_count=3"),
        (lambda x: collectives.collective_permute(x, [(0, 5)]), "do not fit"),
        (lambda x: collectives.collective_broadcast([x], 4), "no replica 4"),
    ],
)
def test_wrong_arguments_are_coded_errors(call: object, words: str) -> None:
    with pytest.raises(XlaError, match="DM643") as caught:
        call(torch.ones(2, device="xla"))  # type: ignore[operator]
    assert words in str(caught.value) and "test_collectives.py" in str(caught.value)
