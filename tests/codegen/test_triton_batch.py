"""Many small maps as one launch: their results are those of separate launches, in an order that programs may
have.
"""

import copy
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="triton is not installed")

import dynamotor
from bench.triton_interpret import available
from dynamotor.base.config import config
from dynamotor.base.errors import InternalError
from dynamotor.base.events import collect
from dynamotor.codegen import gemm_table
from dynamotor.codegen.triton import TritonStep
from dynamotor.codegen.triton_gemm import Tiling
from dynamotor.lower.program import ExternStep

pytestmark = pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def _in_triton():
    with config.patch(target="triton", strict=True, verify=True):
        yield


def launches(events):
    """The pointers of each launch of the programs, and their aten calls."""
    steps = [step for e in events for step in e.data["program"].steps]
    calls = [step for step in steps if isinstance(step, ExternStep)]
    return [len(step.args) for step in steps if isinstance(step, TritonStep)], calls


def compiled(function, *inputs):
    """The results of the compiled function, the inputs afterwards, and its launches."""
    given = [x.clone() for x in inputs]
    with collect("code") as events:
        results = dynamotor.compile(function)(*given)
    return [*results, *given], launches(events)[0]


SIZES = [(), (1,), (1, 1), (), (3,), (64,), (17, 60), (1024,), (1025,), (3, 7, 100), (0,), (2049,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_maps_of_all_sizes_are_two_launches(dtype):
    inputs = [torch.randn(size).mul(9).to(dtype) for size in SIZES]
    got, counts = compiled(lambda *xs: [x * 2 + x.abs() for x in xs], *inputs)
    assert sorted(counts) == [8, 14]  # those of one element have no loop
    torch.testing.assert_close(got, [*(x * 2 + x.abs() for x in inputs), *inputs])


def test_numbers_that_differ_belong_to_their_maps():
    inputs = [torch.randn(n) for n in (5, 1500, 700, 33)]
    factors = [1.5, -2.25, 3.0, 1e-3]

    def scaled(*xs):
        return [torch.where(x > 0, x * f, f - x) for x, f in zip(xs, factors, strict=True)]

    got, counts = compiled(scaled, *inputs)
    assert len(counts) == 1
    torch.testing.assert_close(got, [*scaled(*inputs), *inputs], rtol=0, atol=0)


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def decoded(q, k, v, cos, sin, keys, values, at):
    """Three maps of different kinds: a step of decoding between its products."""
    keys.index_copy_(1, at, rotated(k, cos, sin))
    values.index_copy_(1, at, v)
    return (rotated(q, cos, sin),)


def decoding():
    q, k, v = (torch.randn(n, 1, 64) for n in (32, 8, 8))
    angles = torch.randn(1, 64)
    caches = (torch.randn(8, 50, 64) for _ in range(2))
    return q, k, v, angles.cos(), angles.sin(), *caches, torch.tensor([49])


def test_tiny_maps_of_different_kinds_are_one_launch():
    inputs = decoding()
    got, counts = compiled(decoded, *inputs)
    assert len(counts) == 1
    wanted = [x.clone() for x in inputs]
    torch.testing.assert_close(got, [*decoded(*wanted), *wanted], rtol=0, atol=1e-6)


def test_a_tiny_map_that_reads_another_s_result_has_a_launch_of_its_own():
    def f(x, y):
        z = torch.cat([x, y * 2])  # two maps that nothing joins
        y.copy_(z[3:8].flip(0) + x.sum())
        return z, y * x.sum(), torch.stack([x.exp(), x]).t().contiguous()

    inputs = torch.randn(5), torch.randn(5)
    got, _ = compiled(f, *inputs)
    wanted = [x.clone() for x in inputs]
    torch.testing.assert_close(got, [*f(*wanted), *wanted])


def test_a_position_that_is_checked_is_checked_in_a_launch_of_several():
    inputs = decoding()
    got, counts = compiled(lambda *xs: (*decoded(*xs), xs[0] > 3), *inputs)
    assert len(counts) == 1
    with pytest.raises(Exception, match="out of (range|bounds)"):
        compiled(decoded, *inputs[:-1], torch.tensor([50]))


def test_a_map_that_another_needs_is_not_in_its_launch():
    def chains(*xs):
        ys = [(x * 3).cumsum(0) for x in xs]
        return [(y * 3).cumsum(0) for y in ys]

    inputs = [torch.randn(n, dtype=torch.float64) for n in (5, 1500, 700, 33)]
    got, _ = compiled(chains, *inputs)
    torch.testing.assert_close(got, [*chains(*inputs), *inputs])


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_maps_writes_and_reductions_is_eagers(seed):
    choose = random.Random(seed)
    shapes = [choose.choice([(4,), (40,), (1100,), (6, 50)]) for _ in range(7)]
    plan = [(choose.randrange(6), choose.randrange(7), choose.randrange(7)) for _ in range(40)]

    def program(*xs):
        values, kept = list(xs), []
        for kind, a, b in plan:
            x = values[a]
            if kind == 0:
                values[a] = x * 0.5 + 1
            elif kind == 1:
                x.mul_(0.5).add_(1)
            elif kind == 2:
                kept.append(x.sum())
            elif kind == 3:
                x.add_(values[b].amax())
            elif kind == 4:
                values[a] = x.flatten().cumsum(0).view(x.shape)
            else:
                x.copy_(x.sigmoid())
        return [*values, *kept]

    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    plain = [x.clone() for x in inputs]
    expected = [*program(*plain), *plain]
    got, _ = compiled(program, *inputs)
    torch.testing.assert_close(got, expected)


@pytest.mark.slow
def test_the_update_of_all_parameters_is_few_launches():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(n, n + 3, False), nn.BatchNorm1d(n + 3)) for n in range(5, 20, 3)]
    model = nn.Sequential(*layers).double()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    step = dynamotor.compile_step(model, nn.functional.cross_entropy, optimizers[0])
    with collect("code") as events:
        for _ in range(3):
            batch = torch.randn(9, 5, dtype=torch.float64), torch.randint(0, 4, (9,))
            loss = nn.functional.cross_entropy(plain(batch[0]), batch[1])
            loss.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            torch.testing.assert_close(step(*batch), loss.detach())
    counts, calls = launches(events)
    assert len(events) == 1 and max(counts) >= 4 * len(layers)
    # of a layer: sums of the batch norm there and back, its two maps, the update that follows sums at once
    assert len(counts) + len(calls) < 11 * len(layers)
    for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def test_products_with_maps_behind_them_are_no_maps(monkeypatch):
    """A generated product does not keep the kernel of the map that it computes too: that alone is another result."""

    def layers(x, *weights):
        return [torch.relu(x @ w) for w in weights] + [torch.sigmoid(w @ w) for w in weights]

    given = [torch.randn(64, 64).to(torch.bfloat16) for _ in range(6)]
    rows = {f"interpreter bf16 1x64x64x64 {kind}": Tiling(32, 32, 16) for kind in ("nn", "nn+")}
    monkeypatch.setattr(gemm_table, "table", lambda: rows)
    monkeypatch.setattr(gemm_table, "stored", lambda key: rows.get(key, Tiling(32, 32, 16)))
    with torch.no_grad(), collect("code") as events:
        got = dynamotor.compile(layers)(*given)
    steps, calls = launches(events)
    assert (len(steps), calls) == (10, [])
    torch.testing.assert_close(got, layers(*given), rtol=2e-2, atol=2e-2)


def test_a_launch_with_other_pointers_than_its_kernel_is_refused():
    with collect("code") as events:
        dynamotor.compile(lambda x, y: x * 2 + y)(torch.randn(5), torch.randn(5))
    (step,) = [step for step in events[0].data["program"].steps if isinstance(step, TritonStep)]
    with pytest.raises(InternalError, match="are not its kernel's parameters"):
        replace(step, args=(*step.args, step.args[0]))
