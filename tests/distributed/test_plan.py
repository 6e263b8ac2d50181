"""The bucket plan, the simulator and the `ddp-plan` command, in one process."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from bench import ddp_plan
from bench.ddp_fit import Sample, calibrate
from bench.simulate import Link, Profile, simulate
from dynamotor import DynamotorError, UsageError, compile, explain
from dynamotor.distributed.insert_reductions import gradient_nodes
from dynamotor.distributed.plan import make_plan
from dynamotor.distributed.reduce_step import ReduceStep
from dynamotor.distributed.split import stage_borders
from dynamotor.graph.spec import TensorSpec

aten = torch.ops.aten


def named(*sizes: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    return [(f"p{i}", torch.empty(size, dtype=dtype)) for i, size in enumerate(sizes)]


def test_a_bucket_is_closed_when_it_reaches_its_cap() -> None:
    plan = make_plan(named(10, 10, 10, 10, 10), caps=(40, 80))
    assert [[s.name for s in b.slots] for b in plan.buckets] == [["p0"], ["p1", "p2"], ["p3", "p4"]]
    assert [b.nbytes for b in plan.buckets] == [40, 80, 80]
    assert [s.offset for s in plan.buckets[1].slots] == [0, 10]


def test_each_cap_of_a_list_counts_and_the_last_one_goes_on() -> None:
    plan = make_plan(named(*[10] * 6), caps=(40, 120, 40))
    assert [len(b.slots) for b in plan.buckets] == [1, 3, 1, 1]


def test_dtypes_have_buckets_of_their_own() -> None:
    mixed = [*named(10, 10), ("h", torch.empty(10, dtype=torch.bfloat16)), ("p9", torch.empty(10))]
    plan = make_plan(mixed, caps=(1 << 20,))
    assert [[s.name for s in b.slots] for b in plan.buckets] == [["p0", "p1", "p9"], ["h"]]


def test_the_digest_tells_order_layout_and_borders_apart() -> None:
    one = make_plan(named(10, 10), caps=(40,))
    assert one.digest == make_plan(named(10, 10), caps=(40,)).digest
    assert one.digest != make_plan(named(10, 10), caps=(80,)).digest
    assert one.digest != make_plan(named(10, 10)[::-1], caps=(40,)).digest
    transposed = [("p0", torch.empty(4, 3).t()), ("p1", torch.empty(4, 3))]
    assert (
        make_plan(transposed, caps=(1,)).digest
        != make_plan([("p0", torch.empty(3, 4)), transposed[1]], caps=(1,)).digest
    )


def test_slots_have_the_parameters_strides() -> None:
    weight = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last)
    (slot,) = make_plan([("w", weight)], caps=(1,)).buckets[0].slots
    part = slot.of(torch.arange(48.0))
    assert part.stride() == weight.stride() and not part._is_view()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gpu_packs_a_bucket_in_a_few_kernels(dtype: torch.dtype) -> None:
    plan = make_plan(
        [
            (f"p{i}", torch.empty(3, 4, dtype=dtype).t() if i % 2 else torch.empty(5, dtype=dtype))
            for i in range(4)
        ],
        caps=(1 << 20,),
    )
    slots = plan.buckets[0].slots
    grads = [torch.randn(slot.shape, dtype=dtype) if i in (0, 1) else None for i, slot in enumerate(slots)]
    held = [torch.randn(slot.shape, dtype=dtype) if i in (1, 2) else None for i, slot in enumerate(slots)]
    flats = [torch.full((plan.buckets[0].numel,), float("nan"), dtype=dtype) for _ in range(2)]
    ReduceStep._pack_all([slot.of(flats[0]) for slot in slots], grads, held)
    one_by_one = SimpleNamespace(_scale=1.0)
    for slot, grad, before in zip(slots, grads, held, strict=True):
        ReduceStep._pack(one_by_one, slot.of(flats[1]), grad, before)
    assert torch.equal(*flats)


def test_results_taken_out_of_an_op_late_count_from_the_op() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = TensorSpec.dense((2, 3), torch.float32)
    first = graph.call_function(aten.var_mean.correction, (x, [0]))
    second = graph.call_function(aten.sum.dim_IntList, (x, [0]))
    late = graph.call_function(__import__("operator").getitem, (first, 0))
    graph.output((second, late))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    assert list(gradient_nodes(gm.graph, ["second", "late"], gm.graph.output_node().args[0])) == [
        "late",
        "second",
    ]
    gm.graph.lint()


def test_stages_are_cut_between_values_that_are_tensors_and_stay_unwritten() -> None:
    weights = [torch.empty(8, 8, requires_grad=True) for _ in range(3)]
    graph = fx.Graph()
    x, *w = [graph.placeholder(name) for name in ("x", "a", "b", "c")]
    nodes = []

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = TensorSpec.dense((8, 8), torch.float32)
        nodes.append(node)
        return node

    h = call(torch.mm, x, w[0])
    h = call(torch.mm, h, w[1])
    view = call(torch.t, h)
    call(torch.relu_, view)
    call(torch.mm, view, w[2])
    gm = fx.GraphModule(torch.nn.Module(), graph)
    borders = stage_borders(gm, nodes, [torch.empty(8, 8), *weights], weights, caps=(1,))
    assert borders == [1, 4]  # not between the product, its view and the write through it


def test_a_simulated_step_waits_for_the_link_and_for_the_gradients() -> None:
    profile = Profile(0.010, 0.020, ready=(0.005, 0.010, 0.020), nbytes=(1_000_000,) * 3)
    link = Link(bandwidth=1e9)
    one = link.all_reduce(1_000_000, 2)
    assert one == pytest.approx(1e-3)
    step = simulate(profile, link, world=2)
    expected = [(0.005, 0.005, 0.006), (0.010, 0.010, 0.011), (0.020, 0.020, 0.021)]
    assert all(row == pytest.approx(wanted) for row, wanted in zip(step.rows, expected, strict=True))
    assert step.exposed == pytest.approx(0.001) and step.seconds == pytest.approx(0.031)
    assert simulate(profile.at_the_end(), link, world=2).exposed == pytest.approx(0.003)
    assert simulate(profile, Link(bandwidth=1e8), world=2).exposed == pytest.approx(0.005 + 0.030 - 0.020)


def test_calibration_finds_the_link_again() -> None:
    truth = Link(bandwidth=1e8, latency=1e-4, efficiency=0.7, overhead=5e-4)
    samples = [
        Sample(world, nbytes, bandwidth, 1e-4, truth.at(bandwidth, 1e-4).all_reduce(nbytes, world))
        for world in (2, 4)
        for nbytes in (4, 1 << 16, 1 << 20, 25 << 20)
        for bandwidth in (25e6, 125e6)
    ]
    link = calibrate(samples)
    assert (
        link.efficiency == pytest.approx(0.7)
        and link.overhead == pytest.approx(5e-4)
        and link.error == pytest.approx(0, abs=1e-9)
    )


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="DM141"):
        compile(nn.Linear(2, 2), options={"ddp": "sometimes"})


PROGRAM = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
inputs = (torch.randn(8, 64),)
"""


def arguments(tmp_path: Path, program: str) -> argparse.Namespace:
    path = tmp_path / "program.py"
    path.write_text(program)
    parser = argparse.ArgumentParser()
    ddp_plan.add_arguments(parser)
    return parser.parse_args(
        [str(path), "--world", "64", "--bandwidth", "1", "--bucket-mb", "0.03", "--steps", "2"]
    )


def test_the_command_prints_the_plan_and_a_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ddp_plan.main(arguments(tmp_path, PROGRAM)) == 0
    text = capsys.readouterr().out
    assert text.count("bucket ") >= 3 and "simulated step on 64 ranks" in text and "not calibrated" in text


def test_the_command_says_what_a_program_lacks(tmp_path: Path) -> None:
    with pytest.raises(DynamotorError, match="DM710"):
        ddp_plan.main(arguments(tmp_path, "model = None\n"))


@pytest.fixture
def four_ranks() -> Iterator[None]:
    ddp_plan.fake_group(4)
    yield
    torch.distributed.destroy_process_group()


def test_explain_tells_how_gradients_are_reduced(four_ranks: None) -> None:
    model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), torch.randn(2, 8)
    assert "gradients are reduced ingraph: 1 buckets, 6 parameters" in str(explain(DDP(model))(x))
    text = str(explain(DDP(model, find_unused_parameters=True))(x))
    assert "gradients are reduced split: find_unused_parameters=True" in text and "aten kernels" not in text
