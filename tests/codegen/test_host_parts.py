"""Graphs with tensors on a GPU and on the CPU: which calls are the host's. The specs say where tensors are; the parts run
on CPU tensors here."""

from __future__ import annotations

import torch
from torch import fx

from dynamotor.codegen import device_of
from dynamotor.codegen.host_parts import split
from dynamotor.graph.module import graph_module
from dynamotor.graph.spec import GraphInfo, TensorSpec

aten = torch.ops.aten
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Building:
    def __init__(self) -> None:
        self.graph = fx.Graph()

    def _at(self, node: fx.Node, device: torch.device, shape: tuple[int, ...]) -> fx.Node:
        node.meta["val"] = TensorSpec.dense(shape, torch.float32, device)
        return node

    def input(self, device: torch.device, *shape: int) -> fx.Node:
        return self._at(self.graph.placeholder(f"x{len(self.graph.nodes)}"), device, shape)

    def call(self, target, device: torch.device, shape: tuple[int, ...], *args, **kwargs) -> fx.Node:
        return self._at(self.graph.call_function(target, args, kwargs), device, shape)

    def parts(self, *results, n_outputs: int = 0, static=()):
        self.graph.output(list(results))
        gm = graph_module(self.graph)
        return split(gm, GraphInfo("forward", "f", frozenset(static), n_outputs)), gm


def calls(part) -> list:
    return [node.target for node in part.gm.graph.nodes if node.op == "call_function"]


def check(parts, gm, *inputs: torch.Tensor) -> None:
    torch.manual_seed(0)
    want = gm.forward(*inputs)
    torch.manual_seed(0)
    got = parts.around(parts.device.gm.forward)(*inputs)
    assert len(got) == len(want) and all(map(torch.equal, got, want))
    assert device_of(parts.device.gm) == (GPU, "")


def test_a_number_drawn_on_the_host_and_returned_is_the_hosts() -> None:
    b = Building()
    w, x = b.input(GPU, 3), b.input(GPU, 3)
    y = b.call(aten.mul.Tensor, GPU, (3,), x, w)
    draw = b.call(aten.rand.default, CPU, (), [])
    saved = b.call(aten.sin.default, GPU, (3,), y)
    parts, gm = b.parts(draw, y, saved, n_outputs=2, static=[0])
    assert calls(parts.before) == [aten.rand.default] and calls(parts.device) == [
        aten.mul.Tensor,
        aten.sin.default,
    ]
    assert parts.info.n_outputs == 1 and [parts.device.inputs[i] for i in parts.info.static_inputs] == [w]
    check(parts, gm, torch.randn(3), torch.randn(3))


def test_a_copy_to_the_gpu_is_made_before_and_one_to_the_host_after() -> None:
    b = Building()
    on_host, x = b.input(CPU, 3), b.input(GPU, 3)
    doubled = b.call(aten.mul.Tensor, CPU, (3,), on_host, 2)
    moved = b.call(aten._to_copy.default, GPU, (3,), doubled)
    y = b.call(aten.add.Tensor, GPU, (3,), x, moved)
    back = b.call(aten._to_copy.default, CPU, (3,), y)
    more = b.call(aten.neg.default, CPU, (3,), back)
    parts, gm = b.parts(y, more, on_host)
    assert calls(parts.before) == [aten.mul.Tensor, aten._to_copy.default] and calls(parts.device) == [
        aten.add.Tensor
    ]
    assert calls(parts.after) == [aten._to_copy.default, aten.neg.default]
    check(parts, gm, torch.randn(3), torch.randn(3))


def test_a_write_into_a_host_tensor_comes_after() -> None:
    b = Building()
    on_host, x = b.input(CPU), b.input(GPU, 3)
    counted = b.call(aten.add.Tensor, CPU, (), on_host, 1)
    y = b.call(aten.mul.Tensor, GPU, (3,), x, counted)
    b.call(aten.copy_.default, CPU, (), on_host, counted)
    parts, gm = b.parts(y)
    assert calls(parts.device) == [aten.mul.Tensor] and calls(parts.after) == [aten.copy_.default]
    count, x = torch.tensor(1.0), torch.ones(3)
    assert parts.around(parts.device.gm.forward)(count, x)[0].tolist() == [2, 2, 2] and count.item() == 2


def test_a_host_call_between_the_gpus_is_not_split() -> None:
    b = Building()
    x = b.input(GPU, 3)
    back = b.call(aten._to_copy.default, CPU, (3,), b.call(aten.sin.default, GPU, (3,), x))
    again = b.call(aten._to_copy.default, GPU, (3,), b.call(aten.neg.default, CPU, (3,), back))
    assert b.parts(again)[0] is None


def test_graphs_of_one_device_are_not_split() -> None:
    for device in (GPU, CPU):
        b = Building()
        assert b.parts(b.call(aten.sin.default, device, (3,), b.input(device, 3)))[0] is None
