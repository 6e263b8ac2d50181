"""Placements, meshes and process groups in compiled functions (one process, PyTorch's fake process group)."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import dynamotor
from dynamotor.base.events import counters


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield DeviceMesh("cpu", torch.arange(2))
    dist.destroy_process_group()


def facts(placement):
    sharded = placement.dim if placement.is_shard() else None
    return (
        sharded,
        placement.is_shard(0),
        placement.is_shard(dim=None),
        placement.is_partial(),
        placement == Shard(0),
    )


def test_placements_say_what_they_are():
    compiled = dynamotor.compile(facts, fullgraph=True)
    for placement in (Shard(0), Replicate(), Partial(), Shard(1), Shard(0)):
        assert compiled(placement) == facts(placement)


def test_a_mesh_gives_its_group_again(mesh):
    def group(mesh):
        return mesh.get_group(), mesh.size(0), mesh.get_coordinate()

    assert dynamotor.compile(group, fullgraph=True)(mesh) == group(mesh)


def test_placements_made_inside_are_the_program_s(mesh):
    def gathered(x):
        return x.redistribute(placements=[Replicate()]).to_local() * 2

    x = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)], run_check=False)
    assert dynamotor.compile(gathered, fullgraph=True)(x).shape == gathered(x).shape


def test_equal_meshes_and_placements_take_one_program(mesh):
    def wrapped(x, mesh, placement):
        return DTensor.from_local(x, mesh, [placement], run_check=False) * 2

    compiled, before = dynamotor.compile(wrapped), counters["capture"]["graphs"]
    for placement in (Shard(1), Shard(1), Partial(), Partial()):
        found = compiled(torch.ones(2, 2), DeviceMesh("cpu", torch.arange(2)), placement)
        assert found.placements == (placement,)
    assert counters["capture"]["graphs"] - before == 2
