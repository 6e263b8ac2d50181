"""State in wrapper subclasses, as torchao's optimizers of few bits keep it: the tensors inside are the program's."""

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters

# Read as torchao's is: a library's optimizer looks up its parameters, state and options alone.
SOURCE = '''
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten


class Scaled(torch.Tensor):
    """Whole numbers of a byte, and a scale."""

    @staticmethod
    def __new__(cls, codes, scale, signed):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=scale.dtype)

    def __init__(self, codes, scale, signed):
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.signed]

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size=None, stride=None):
        return cls(inner["codes"], inner["scale"], *context)

    def wide(self):
        return self.codes.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is aten.copy_.default and isinstance(args[0], cls):
            target, new = args[0], args[1].wide() if isinstance(args[1], cls) else args[1]
            scale = new.abs().max() / 100 + 1e-12
            target.codes.copy_((new / scale).round())
            target.scale.copy_(scale)
            return target
        if func is aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs, cls(args[0].codes, args[0].scale, args[0].signed))
        return func(*[arg.wide() if isinstance(arg, cls) else arg for arg in args], **(kwargs or {}))


def update(p, grad, mean, lr, replaces):
    new = mean.lerp(grad, 0.1)
    if not replaces:
        mean.copy_(new)
    p.sub_(lr * new)
    return new


class Few(torch.optim.Optimizer):
    def __init__(self, parameters, lr, replaces=False):
        super().__init__(parameters, {"lr": lr})
        self.replaces = replaces

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    zeros = torch.zeros(p.shape, dtype=torch.int8)
                    state["mean"] = Scaled(zeros, torch.tensor(1.0), True)
                compiled = torch.compile(update, backend="eager", fullgraph=True)
                compiled(p.detach(), p.grad, state["mean"], group["lr"], self.replaces)
                if self.replaces:
                    state["mean"].codes = (state["mean"].codes + 1) % 7
'''
LIBRARY: dict = {"__name__": "torchao.optim.of_these_tests"}
exec(SOURCE, LIBRARY)


def trained(compiles, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = LIBRARY["Few"](model.parameters(), torch.tensor(0.1), **options)
    step = dynamotor.compile(optimizer.step) if compiles else optimizer.step
    x = torch.randn(8, 6)
    for k in range(5):
        model(x).square().mean().backward()
        step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"].fill_(0.1 / (k + 1))
    states = [optimizer.state[p]["mean"] for p in model.parameters()]
    return [*model.parameters(), *[part for s in states for part in (s.codes, s.scale)]]


@pytest.mark.parametrize("replaces", [False, True])
def test_the_tensors_inside_are_updated_by_the_program(replaces):
    dynamotor.reset()
    counters.clear()
    for ours, eager in zip(trained(True, replaces=replaces), trained(False, replaces=replaces), strict=True):
        torch.testing.assert_close(ours.double(), eager.double(), rtol=1e-5, atol=1e-6)
    assert not [name for name in counters["fallback"] if name.startswith("step.")]


def test_another_wrapper_at_a_place_is_another_program():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = LIBRARY["Few"](model.parameters(), torch.tensor(0.1))
    step, x = dynamotor.compile(optimizer.step), torch.randn(8, 6)
    for _ in range(3):
        model(x).square().mean().backward()
        step()
        optimizer.zero_grad()
    state = optimizer.state[model.weight]
    fresh = LIBRARY["Scaled"](torch.full((3, 6), 50, dtype=torch.int8), torch.tensor(0.5), True)
    state["mean"] = fresh
    model(x).square().mean().backward()
    before = model.weight.detach().clone()
    step()
    want = before - 0.1 * torch.lerp(torch.full((3, 6), 25.0), model.weight.grad, 0.1)
    torch.testing.assert_close(model.weight.detach(), want)
    assert not torch.equal(fresh.codes, torch.full((3, 6), 50, dtype=torch.int8))
