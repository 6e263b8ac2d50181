"""torch.distributed over XLA: its collectives, DistributedDataParallel, its refusals."""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="jax is not installed")

from children import run_forked  # noqa: E402
from replicas import run_replicas  # noqa: E402

PROGRAM = """
    import copy, torch, torch.distributed as dist, torch.nn as nn, warnings
    import dynamotor.xla.start
    import dynamotor.xla.distributed.xla_backend
    from dynamotor.xla import sync
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("xla", init_method="xla://")
    me, n = dist.get_rank(), dist.get_world_size()
    full = lambda v: torch.full((2,), float(v), device="xla")
    zeros = lambda *s: torch.zeros(*s, device="xla")
"""


def test_collectives() -> None:
    texts = run_replicas(
        PROGRAM
        + """
    seen = {}
    ramp = lambda: torch.arange(4.0, device="xla") + me
    for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        seen[name] = ramp()
        dist.all_reduce(seen[name], getattr(dist.ReduceOp, name))
    seen["broadcast"] = full(me + 1)
    dist.broadcast(seen["broadcast"], 1)
    gathered = [zeros(2) for _ in range(n)]
    dist.all_gather(gathered, full(me + 1))
    seen["all_gather"] = torch.cat(gathered)
    seen["into"], seen["into2d"] = zeros(4), zeros(2, 2)
    dist.all_gather_into_tensor(seen["into"], full(me + 1))
    dist.all_gather_into_tensor(seen["into2d"], full(me + 1))
    seen["scatter_tensor"], seen["scatter_list"] = zeros(2), zeros(2)
    dist.reduce_scatter_tensor(seen["scatter_tensor"], ramp())
    dist.reduce_scatter(seen["scatter_list"], list(ramp().view(2, 2)), dist.ReduceOp.MAX)
    seen["all_to_all"] = zeros(4)
    dist.all_to_all_single(seen["all_to_all"], ramp())
    parts = [zeros(2), zeros(2)]
    dist.all_to_all(parts, list(ramp().view(2, 2)))
    seen["all_to_all_list"] = torch.cat(parts)
    seen["reduce"] = full(me + 1)
    dist.reduce(seen["reduce"], 0)
    at_root = [zeros(2), zeros(2)] if me == 0 else None
    dist.gather(full(me + 1), at_root, 0)
    seen["gather"] = torch.cat(at_root) if me == 0 else zeros(4)
    seen["scatter"] = zeros(2)
    dist.scatter(seen["scatter"], [full(5), full(6)] if me == 0 else None, 0)
    work = dist.all_reduce(full(1), async_op=True)
    assert work.wait() and work.is_completed()
    sync.sync()
    sums = [torch.arange(4.0) * 2 + 1, torch.arange(4.0) + 0.5, torch.arange(4.0) + 1, torch.arange(4.0), torch.arange(4.0) * torch.arange(1, 5.0)]
    want = dict(zip(("SUM", "AVG", "MAX", "MIN", "PRODUCT"), (s.tolist() for s in sums)))
    both, half = [1.0, 1.0, 2.0, 2.0], slice(me * 2, me * 2 + 2)
    want |= dict(broadcast=[2.0, 2.0], all_gather=both, into=both, into2d=[[1.0, 1.0], [2.0, 2.0]], scatter_tensor=[1.0, 3.0, 5.0, 7.0][half],
                 scatter_list=[1.0, 2.0, 3.0, 4.0][half], all_to_all=[0.0, 1.0, 1.0, 2.0] if me == 0 else [2.0, 3.0, 3.0, 4.0])
    want |= dict(all_to_all_list=want["all_to_all"], reduce=[3.0, 3.0] if me == 0 else [2.0, 2.0], gather=both if me == 0 else [0.0] * 4,
                 scatter=[5.0 + me] * 2)
    for name in want:
        assert seen[name].tolist() == want[name], (name, seen[name].tolist(), want[name])
    dist.barrier()
    objects = [None] * n
    dist.all_gather_object(objects, {"replica": me})
    assert objects == [{"replica": 0}, {"replica": 1}]
    listed = [{"from": me}]
    dist.broadcast_object_list(listed, 1)
    assert listed == [{"from": 1}]
    for call, code in ((lambda: dist.send(full(1), 1 - me), "DM647"), (lambda: dist.recv(full(1), 1 - me), "DM647"),
                       (lambda: dist.all_reduce(torch.ones(1)), "DM643"), (lambda: dist.all_reduce(full(1), dist.ReduceOp.BXOR), "DM647"),
                       (lambda: dist.all_to_all_single(zeros(3), zeros(3), [1, 2], [1, 2]), "DM647")):
        try:
            call()
        except RuntimeError as error:
            assert code in str(error), error
        else:
            raise AssertionError(code)
    dist.destroy_process_group()
    print("done")
    """
    )
    assert all("done" in text for text in texts)


@pytest.mark.parametrize(
    ("view", "unused"),
    [
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
        (True, True),
    ],
)
def test_distributed_data_parallel_trains_as_one_process_does(view: bool, unused: bool) -> None:
    texts = run_replicas(
        PROGRAM
        + f"""
    view, unused = {view}, {unused}
    """
        + """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    reference = copy.deepcopy(model)
    if me:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()        # DDP sends replica 0's
    model = nn.parallel.DistributedDataParallel(model.to("xla"), gradient_as_bucket_view=view, find_unused_parameters=unused)
    optimizer, expected = torch.optim.Adam(model.parameters(), lr=0.01), torch.optim.Adam(reference.parameters(), lr=0.01)
    for _ in range(4):
        x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[me::2].to("xla")), y[me::2].to("xla")).backward()
        optimizer.step()
        sync.sync()
        expected.zero_grad()
        nn.functional.cross_entropy(reference(x), y).backward()
        expected.step()
    for got, want in zip(model.parameters(), reference.parameters()):
        assert torch.allclose(got.cpu(), want, atol=2e-6), (got.cpu() - want).abs().max()
    print("done")
    """
    )
    assert all("done" in text for text in texts)


@pytest.mark.slow
def test_buckets_are_agreed_on_within_a_step_that_is_one_graph() -> None:
    texts = run_replicas(
        PROGRAM
        + """
    from dynamotor.xla.regions import compile
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3))
    reference = copy.deepcopy(model)
    model = nn.parallel.DistributedDataParallel(model.to("xla"), gradient_as_bucket_view=True, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)

    @compile(full_graph=True)
    def step(x, y):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to("xla")), y.to("xla")).backward()
        optimizer.step()

    for _ in range(4):
        x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
        step(x[me::2], y[me::2])
        expected.zero_grad()
        nn.functional.cross_entropy(reference(x), y).backward()
        expected.step()
    for got, want in zip(model.parameters(), reference.parameters()):
        assert torch.allclose(got.cpu(), want, atol=2e-6), (got.cpu() - want).abs().max()

    @compile(full_graph=True)
    def cut(x):
        y = full(1) + x     # what came before the step is not the replicas' talk
        dist.all_reduce(y)
        return y.tolist()

    try:
        cut(full(1) * 2)
    except Exception as error:
        assert "DM663" in str(error), error
        print("done")
    """
    )
    assert all("done" in text for text in texts)


def test_one_process_is_a_group_of_one() -> None:
    done = run_forked(
        PROGRAM
        + """
    x = full(2)
    dist.all_reduce(x)
    outs = [zeros(2)]
    dist.all_gather(outs, x)
    dist.barrier()
    print(n, x.tolist(), outs[0].tolist())
    """
    )
    assert done.stdout.strip() == "1 [2.0, 2.0] [2.0, 2.0]", done.stderr
