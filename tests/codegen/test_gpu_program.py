"""The GPU's call program: whole modules on CPU tensors through Triton's interpreter, and decisions made
about devices.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

pytest.importorskip("triton", reason="triton is not installed")

import dynamotor
from bench.triton_interpret import available
from dynamotor.base.config import config
from dynamotor.base.events import collect, counters
from dynamotor.codegen import device_of
from dynamotor.codegen.gpu_program import to_device
from dynamotor.graph.spec import TensorSpec
from dynamotor.runtime import memory

interpreted = pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1")


@pytest.fixture
def _in_triton():
    with config.patch(target="triton", strict=True):
        yield


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.conv, self.batch_norm = nn.Conv1d(16, 8, 3, padding=1, bias=False), nn.BatchNorm1d(8)

    def forward(self, ids, target):
        x = self.words(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        y = F.relu(self.batch_norm(self.conv(x.transpose(1, 2))))
        return F.cross_entropy(y.mean(-1), target), y


def step(module, call, *inputs):
    """Loss, outputs, gradients and buffers of a training step."""
    loss, y = call(*inputs)
    (loss + y.square().mean()).backward()
    return [loss, y, *(p.grad for p in module.parameters()), *module.buffers()]


@interpreted
@pytest.mark.usefixtures("_in_triton")
def test_a_training_step_is_eagers():
    module = Block()
    plain = copy.deepcopy(module)
    ids, target = torch.randint(0, 20, (3, 7)), torch.tensor([1, 7, -100])
    with collect("code") as events:
        got = step(module, dynamotor.compile(module), ids, target)
    for a, b in zip(got, step(plain, plain, ids, target), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
    assert len(events) == 2 and all("@triton.jit" in e.data["triton"] for e in events)


@interpreted
@pytest.mark.usefixtures("_in_triton")
def test_dropout_keeps_the_same_elements_in_the_backward():
    x = torch.ones(40, 25, requires_grad=True)
    call = dynamotor.compile(lambda x: F.dropout(x, 0.4) * 3)
    torch.manual_seed(3)
    y = call(x)
    y.sum().backward()
    assert torch.equal(y.detach(), x.grad) and 0.4 < (y != 0).float().mean() < 0.8
    torch.manual_seed(3)
    assert torch.equal(call(x), y)


@interpreted
@pytest.mark.usefixtures("_in_triton")
def test_cross_entropy_saves_no_row():
    x, t = torch.randn(6, 300, requires_grad=True), torch.randint(0, 300, (6,))
    with collect("partition") as events:
        F_ce = dynamotor.compile(lambda x, t: F.cross_entropy(x * 2, t))
        F_ce(x, t).backward()
    assert events[0].data["saved_bytes"] < 6 * 300
    grad, x.grad = x.grad, None
    F.cross_entropy(x * 2, t).backward()
    torch.testing.assert_close(grad, x.grad)


@interpreted
@pytest.mark.usefixtures("_in_triton")
def test_calls_at_once_and_again_give_results_of_their_own():
    call = dynamotor.compile(lambda x, w: F.relu(x @ w).sum(1))
    w, xs = torch.randn(8, 8), [torch.randn(4, 8) for _ in range(3)]
    results = [call(x, w) for x in xs]
    for x, result in zip(xs, results, strict=True):
        torch.testing.assert_close(result, F.relu(x @ w).sum(1))


def graph_of(*specs, output=-1):
    """A graph that adds its placeholders."""
    graph = fx.Graph()
    nodes = []
    for n, spec in enumerate(specs):
        nodes.append(graph.placeholder(f"x{n}"))
        nodes[-1].meta["val"] = spec
    total = graph.call_function(torch.ops.aten.add.Tensor, (nodes[0], nodes[-1]))
    total.meta["val"] = specs[0]
    graph.output(((total, *nodes)[output + 1],))
    return fx.GraphModule(nn.Module(), graph)


CUDA0, CUDA1 = torch.device("cuda", 0), torch.device("cuda", 1)


def dense(shape, device="cpu"):
    return TensorSpec.dense(shape, torch.float32, torch.device(device))


def test_the_device_of_a_graph():
    assert device_of(graph_of(dense((2,)), dense((2,)))) == (torch.device("cpu"), "")
    assert device_of(graph_of(dense((2,), CUDA1), dense((2,), CUDA1))) == (CUDA1, "")
    assert "no code generator for meta" in device_of(graph_of(dense((2,), "meta"), dense((2,), "meta")))[1]


def test_numbers_on_the_cpu_take_part_and_tensors_do_not():
    assert device_of(graph_of(dense((2,), CUDA0), dense(()))) == (CUDA0, "")
    assert "tensors on cuda:0 and cpu" in device_of(graph_of(dense((2,), CUDA0), dense((2,))))[1]
    assert "tensors on cuda:0 and cpu" in device_of(graph_of(dense((2,), CUDA0), dense(()), output=1))[1]
    assert "cuda:0 and cuda:1" in device_of(graph_of(dense((2,), CUDA0), dense((2,), CUDA1)))[1]


@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"backend": "cudagraphs"}])
def test_cuda_graphs_without_a_gpu_run_as_they_are(options):
    before = counters["fallback"]["cudagraphs"]
    x = torch.randn(5)
    call = dynamotor.compile(lambda x: x.sin() + 1, **options)
    for _ in range(4):
        torch.testing.assert_close(call(x), x.sin() + 1)
    assert counters["fallback"]["cudagraphs"] == before + ("backend" in options)


@interpreted
@pytest.mark.usefixtures("_in_triton")
def test_out_of_memory_is_coded_and_still_pytorchs(monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")

    monkeypatch.setattr(memory, "new_tensor", full)
    call = dynamotor.compile(lambda x: x * 2)
    with pytest.raises(torch.OutOfMemoryError, match=r"DM306(.|\n)*80 GiB(.|\n)*smaller batch"):
        call(torch.ones(4))


@pytest.mark.regression
@pytest.mark.parametrize("pinned", [False, True])
def test_numbers_of_the_cpu_go_to_the_gpu_without_a_wait(pinned: bool) -> None:
    asked: list[tuple[Any, bool]] = []

    class Number:
        def is_pinned(self) -> bool:
            return pinned

        def to(self, device: torch.device, non_blocking: bool) -> None:
            asked.append((device, non_blocking))

    to_device(torch.device("cuda", 0), Number())  # type: ignore[arg-type]
    assert asked == [(torch.device("cuda", 0), not pinned)]  # pinned memory may be written before it is read
