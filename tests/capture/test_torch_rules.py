"""Torch functions, tensor methods, modules and modes in a captured program give eager's results in one
graph.
"""

from __future__ import annotations

import collections
import copy

import pytest
import torch
import torch.nn.functional as F
from kept_graphs import Recorder
from torch import nn

import dynamotor
from dynamotor.base.errors import CaptureError


def x(*shape, dtype=torch.float64, grad=False):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


PROGRAMS = {
    "functions": lambda a, b: torch.relu(a) + torch.sin(b) * torch.add(a, b, alpha=2),
    "methods": lambda a, b: a.view(6).unsqueeze(0).to(torch.float32).sum(-1, keepdim=True) + b.mean().float(),
    "reflected operators": lambda a, b: 2 - a + 3 / (b * b + 1) - 2**a + (1.5 * b) // 1,
    "comparisons": lambda a, b: (a > b) & (a != 0) | ~(b <= 1),
    "indexing": lambda a, b: a[0] + b[:, None, 1].sum() + a[..., -1:].sum() + a[torch.tensor([1, 0])].sum(),
    "unpacking": lambda a, b: [row * 2 for row in a] + [*b.unbind(1)],
    "size arithmetic": lambda a, b: (
        a.reshape(*b.shape[:-1], -1).view(b.size(0), b.shape[1]).expand(2, *a.shape)
    ),
    "named results": lambda a, b: (a.max(dim=1).values, torch.sort(b, dim=0).indices, a.topk(2)[0]),
    "lists of tensors": lambda a, b: torch.cat([a, b], dim=0).split([1, 3], dim=0),
    "factories": lambda a, b: (
        a + torch.arange(3) + torch.ones_like(a) + torch.zeros(2, 3) + b.new_full((2, 3), 4.0)
    ),
    "constants": lambda a, b: (
        a + torch.tensor(1.5) + torch.tensor([[1], [2]]) + torch.as_tensor([1, 2, 3]) + torch.as_tensor(b)
    ),
    "attributes": lambda a, b: (
        a.T @ b.mT.T + a.dtype.itemsize + a.ndim + len(a) + a.numel() + b.shape.numel()
    ),
    "queries": lambda a, b: (
        a * 2 if torch.is_tensor(b) and a.is_floating_point() and torch.is_grad_enabled() else b
    ),
    "functional": lambda a, b: F.layer_norm(F.gelu(a), (3,)) + F.softmax(b, dim=-1) + F.pad(a, (0, 1))[:, :3],
    "loss": lambda a, b: F.cross_entropy(a, torch.tensor([0, 2])) + F.mse_loss(a, b),
    "pooling": lambda a, b: (
        F.max_pool2d(a.view(1, 1, 2, 3), 2) + F.adaptive_avg_pool2d(b.view(1, 1, 2, 3), 1)
    ),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "identity": lambda a, b: (a.contiguous() is a, a.to(a.dtype) is a, a is b, a + b),
    "data and detach": lambda a, b: a.data * 2 + b.detach(),
    "constant results": lambda a, b: (
        a.shape,
        a.stride(),
        a.dim(),
        b.size(1),
        str(a.dtype) == "torch.float64",
        a.device.type == "cpu",
        a * 1,
    ),
    "dict keyed by tensors": lambda a, b: {a: 1, b: 2}[a] * a,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_match_eager(name):
    fn = PROGRAMS[name]
    backend = Recorder()
    compiled = dynamotor.compile(fn, backend=backend, fullgraph=True)
    for _ in range(2):
        a, b = x(2, 3), x(2, 3)
        torch.testing.assert_close(compiled(a, b), fn(a, b), rtol=0, atol=0)
    assert len(backend.graphs) == 1


def test_in_place_operations_change_the_arguments():
    def fn(a, b):
        view = a[0]
        view += 1
        a.mul_(2)
        b[:, 1] = 5
        c = a.add_(b)
        return c is a, c

    a, b = x(2, 3), x(2, 3)
    a2, b2 = a.clone(), b.clone()
    same, out = dynamotor.compile(fn, backend=Recorder(), fullgraph=True)(a, b)
    assert same is True and out is a
    fn(a2, b2)
    assert torch.equal(a, a2) and torch.equal(b, b2)


def test_an_input_that_is_returned_is_the_very_object():
    a = x(3)
    assert dynamotor.compile(lambda t: t.contiguous(), backend=Recorder())(a) is a


@pytest.mark.parametrize(
    "breaking",
    [
        lambda a: a * a.sum().item(),
        lambda a: a * 2 if a.sum() > 0 else a * 3,
        lambda a: a[a > 0] * 2,
        lambda a: a * len(a.tolist()),
        lambda a: a + float(a.mean()),
    ],
)
def test_data_dependence_breaks_and_still_gives_the_result(breaking):
    a = x(4)
    torch.testing.assert_close(dynamotor.compile(breaking, backend=Recorder())(a), breaking(a))
    with pytest.raises(CaptureError):
        dynamotor.compile(breaking, backend=Recorder(), fullgraph=True)(a)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.head = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Dropout(0.5))
        self.named = nn.ModuleDict({"out": nn.Linear(3, 2)})
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.zeros(()))
        self.calls = 0

    def forward(self, a):
        self.calls += 1
        self.steps = self.steps + 1
        for i, layer in enumerate(self.layers[:2]):
            a = layer(a) * (i + 1)
        a = self.layers[-1](a)
        if self.training and len(self.layers) == 3:
            a = a * self.scale
        return self.named["out"](self.head(a)) + self.steps


def test_modules_match_eager_and_update_their_state():
    model = Net()
    reference = copy.deepcopy(model)
    backend = Recorder()
    compiled = dynamotor.compile(model, backend=backend, fullgraph=True)
    for seed in (1, 2, 3):
        a = x(4, 3, dtype=torch.float32)
        torch.manual_seed(seed)
        ours = compiled(a)
        torch.manual_seed(seed)
        theirs = reference(a)
        torch.testing.assert_close(ours, theirs)
        ours.sum().backward()
        theirs.sum().backward()
    assert model.steps == 3 and model.head[0].num_batches_tracked == 3
    torch.testing.assert_close(model.head[0].running_mean, reference.head[0].running_mean)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_hooks_present_at_trace_time_run():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    seen = []
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model[1].register_forward_pre_hook(lambda module, args: seen.append(len(args)))
    compiled = dynamotor.compile(model, backend=Recorder(), fullgraph=True)
    a = x(2, 3, dtype=torch.float32)
    torch.testing.assert_close(compiled(a), model(a))
    assert seen == [1, 1]


def test_a_hook_added_later_is_seen():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled = dynamotor.compile(model, backend=Recorder())
    a = x(2, 3, dtype=torch.float32)
    compiled(a)
    model[0].register_forward_hook(lambda module, args, out: out + 7)
    torch.testing.assert_close(compiled(a), model(a))


def test_no_grad_regions():
    def fn(a, w):
        with torch.no_grad():
            b = a @ w
            assert not torch.is_grad_enabled()
        c = a @ w

        @torch.no_grad()
        def inner(t):
            return t * 3

        with torch.enable_grad():
            d = inner(c) + w.sum()
        return b, c, d, torch.is_grad_enabled()

    a, w = x(2, 3), x(3, 3, grad=True)
    ours = dynamotor.compile(fn, backend=Recorder(), fullgraph=True)(a, w)
    theirs = fn(a, w)
    for mine, other in zip(ours[:3], theirs[:3], strict=True):
        assert mine.requires_grad == other.requires_grad and torch.equal(mine, other)
    assert torch.is_grad_enabled()


def test_a_break_inside_no_grad_keeps_the_mode():
    def fn(a):
        with torch.no_grad():
            b = a * 2
            print(end="")
            c = b + a
        return b, c, a * 3

    a = x(3, grad=True)
    b, c, d = dynamotor.compile(fn, backend=Recorder())(a)
    assert not b.requires_grad and not c.requires_grad and d.requires_grad and torch.is_grad_enabled()
    torch.testing.assert_close(c, a * 3)


def test_autocast_regions():
    def fn(a, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            b = a @ w
            with torch.autocast("cpu", enabled=False):
                c = b.float() @ w
        return b, c, a @ w

    a, w = x(4, 4, dtype=torch.float32), x(4, 4, dtype=torch.float32)
    ours, theirs = dynamotor.compile(fn, backend=Recorder(), fullgraph=True)(a, w), fn(a, w)
    assert [t.dtype for t in ours] == [torch.bfloat16, torch.float32, torch.float32]
    torch.testing.assert_close(ours, theirs)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_break_inside_autocast_keeps_the_mode(backend):
    context = torch.autocast("cpu", dtype=torch.bfloat16)

    def fn(a):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            b = a @ a
            print(end="")
            c = a @ a
        with context:
            d = a @ a
            print(end="")
        return b, c, d, a @ a

    a = x(4, 4, dtype=torch.float32)
    compiled = dynamotor.compile(fn, backend=backend)
    for _ in range(3):
        ours = compiled(a)
        assert [t.dtype for t in ours] == [torch.bfloat16] * 3 + [torch.float32]
        assert not torch.is_autocast_enabled("cpu")
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()


def test_autocast_as_a_decorator_compiles_once():
    backend = Recorder()
    compiled = dynamotor.compile(
        torch.autocast("cpu", dtype=torch.bfloat16)(lambda a: a @ a), backend=backend, fullgraph=True
    )
    for _ in range(3):
        assert compiled(x(4, 4, dtype=torch.float32)).dtype == torch.bfloat16
    assert len(backend.graphs) == 1


def test_autocast_outside_recompiles():
    backend = Recorder()
    compiled = dynamotor.compile(lambda a: a @ a, backend=backend)
    a = x(4, 4, dtype=torch.float32)
    assert compiled(a).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(a).dtype == torch.bfloat16
    assert compiled(a).dtype == torch.float32 and len(backend.graphs) == 2


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a * 2

    @staticmethod
    def backward(ctx, g):
        return g * 5


def test_custom_autograd_functions_keep_their_backward():
    a = x(3, grad=True)
    dynamotor.compile(lambda t: Double.apply(t * 1), backend=Recorder())(a).sum().backward()
    assert torch.equal(a.grad, torch.full_like(a, 5))


def test_replaced_parameters_and_buffers_are_seen():
    model = nn.Linear(3, 3)
    compiled = dynamotor.compile(model, backend=Recorder())
    a = x(2, 3, dtype=torch.float32)
    compiled(a)
    model.weight = nn.Parameter(torch.zeros(3, 3))
    torch.testing.assert_close(compiled(a), model(a))
    with torch.no_grad():
        model.weight.add_(1)
    torch.testing.assert_close(compiled(a), model(a))
    model.weight.data = torch.randn(3, 3)
    torch.testing.assert_close(compiled(a), model(a))
    model.double()
    torch.testing.assert_close(compiled(a.double()), model(a.double()))


def test_named_tuples_and_module_slices():
    class Pair(collections.namedtuple("Pair", "first second")):
        pass

    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])

    def fn(a):
        return Pair(model[1:3](a), nn.functional.relu(a))

    a = x(2, 3, dtype=torch.float32)
    ours = dynamotor.compile(fn, backend=Recorder(), fullgraph=True)(a)
    assert type(ours) is Pair
    torch.testing.assert_close(tuple(ours), tuple(fn(a)))


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.LSTM(3, 4, batch_first=True),
        lambda: nn.GRU(3, 4, 2),
        lambda: nn.TransformerEncoderLayer(3, 1, 8, batch_first=True),
        lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        lambda: nn.MultiheadAttention(3, 1),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_library_modules_are_one_graph(module, training):
    model = module().train(training)
    backend = Recorder()
    compiled = dynamotor.compile(model, backend=backend, fullgraph=True)
    a = x(2, 5, 3, dtype=torch.float32)
    args = (a, a, a) if isinstance(model, nn.MultiheadAttention) else (a,)
    for seed in (1, 2):
        torch.manual_seed(seed)
        ours = compiled(*args)
        torch.manual_seed(seed)
        torch.testing.assert_close(ours, model(*args))
    assert len(backend.graphs) == 1


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_bags_of_embeddings_are_one_graph_and_have_eagers_gradients(mode, padding):
    model = nn.EmbeddingBag(10, 4, mode=mode, padding_idx=padding, dtype=torch.float64)
    compiled = dynamotor.compile(model, backend="aot_eager", fullgraph=True)
    for size in (5, 6):
        rows = torch.arange(3 * size).view(3, size) ** 2 % 10
        ours, expected = compiled(rows), model(rows)
        assert torch.equal(ours, expected)
        found, wanted = (torch.autograd.grad(out.sin().sum(), model.weight)[0] for out in (ours, expected))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("weighed", [False, True])
def test_bags_may_end_with_the_last_offset(mode, weighed):
    def fn(rows, table, offsets, weights):
        return F.embedding_bag(
            rows, table, offsets, mode=mode, include_last_offset=True, per_sample_weights=weights
        )

    compiled = dynamotor.compile(fn, fullgraph=True)
    table = x(10, 4, dtype=torch.float32, grad=True)
    weights = x(6, dtype=torch.float32, grad=True) if weighed and mode == "sum" else None
    for offsets in ([0, 2, 2, 6], [0, 6], [0, 0, 6]):
        args = torch.tensor([1, 9, 3, 3, 0, 2]), table, torch.tensor(offsets), weights
        ours, expected = compiled(*args), fn(*args)
        torch.testing.assert_close(ours, expected)
        wanted = [t for t in (table, weights) if t is not None]
        for mine, theirs in zip(*(torch.autograd.grad(o.sin().sum(), wanted) for o in (ours, expected))):
            torch.testing.assert_close(mine, theirs)


def test_random_functions_keep_eagers_order():
    def fn(a):
        b = F.dropout(a, 0.5)
        c = torch.rand_like(a)
        return b, c, torch.randn(3), torch.bernoulli(c)

    compiled = dynamotor.compile(fn, backend=Recorder(), fullgraph=True)
    a = x(4)
    torch.manual_seed(0)
    ours = compiled(a)
    torch.manual_seed(0)
    torch.testing.assert_close(ours, fn(a), rtol=0, atol=0)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda a: a.new(a.shape),
        lambda a: a.new(a[:1, :2].size()),
        lambda a: a.new(torch.Size([2, 5])),
        lambda a: a.new(a.size() + torch.Size([3])),
        lambda a: torch.FloatTensor(a.shape),
        lambda a: torch.Tensor(a.shape[:1]),
        lambda a: a.new(4, 3),
        lambda a: a.new(),
    ],
)
def test_only_a_size_makes_a_tensor_of_that_size(function, dynamic):
    a = x(4, 3)
    result = dynamotor.compile(function, backend="eager", dynamic=dynamic)(a)
    assert (result.shape, result.dtype) == (function(a).shape, function(a).dtype)


def test_numbers_in_the_place_of_a_size():
    a = x(4, 3)
    assert dynamotor.compile(lambda a: a.new((4, 3)), backend="eager")(a).equal(a.new((4, 3)))


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_a_shape_as_a_tensor(dynamic):
    compiled = dynamotor.compile(lambda a: torch._shape_as_tensor(a) + 1, fullgraph=True, dynamic=dynamic)
    for shape in ((6,), (7, 4), (8, 4), ()):
        assert compiled(torch.ones(shape)).equal(torch._shape_as_tensor(torch.ones(shape)) + 1)


@torch.jit.script
def scripted(x, y):
    return (x + 1) * y


@torch.jit.script
def scaled(x, by: float = 2.0):
    return x * by


traced = torch.jit.trace(lambda x: x * 3 if x.sum() > 0 else x, torch.ones(3))


def test_scripted_functions_are_in_the_graph():
    def program(x):
        return scripted(x.sin(), x) - scaled(x) + scaled(x, 1.5)

    x = torch.randn(3)
    compiled = dynamotor.compile(program, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), program(x))


@pytest.mark.parametrize("program", [lambda x: scaled(x, 2), lambda x: traced(-x)])
def test_what_torchscript_converts_or_traced_is_its_own(program):
    x = torch.arange(1, 4)
    compiled = dynamotor.compile(program, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), program(x))
