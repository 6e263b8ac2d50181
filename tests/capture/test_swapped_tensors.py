"""`torch.utils.swap_tensors` refuses tensors with weak references: guards hold none."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils import swap_tensors

import dynamotor


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def outcome(compiled, change):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    f = dynamotor.compile(m) if compiled else m
    found = []
    for step in range(2):
        dtype = change(m, f) if step else torch.float32
        result = f(torch.arange(6.0).view(2, 3).to(dtype))
        result.square().sum().backward()
        found += [result.detach(), *(p.grad.clone() for p in m.parameters()), *m.buffers()]
    return found


def convert(m, f):
    m.double()
    m.zero_grad()
    return torch.float64


def load(m, f):
    m.zero_grad()
    m.load_state_dict({k: v.clone() * 2 for k, v in m.state_dict().items()}, assign=True)
    return torch.float32


@pytest.mark.parametrize("change", [convert, load], ids=lambda change: change.__name__)
def test_modules_are_converted_and_loaded_by_swaps(change, swapping):
    for ours, eager in zip(outcome(True, change), outcome(False, change), strict=True):
        torch.testing.assert_close(ours, eager)


W, BOX, TENSORS = torch.ones(3), nn.Module(), [torch.ones(3)]
BOX.w = torch.ones(3)


def read_global(x):
    return x * W


def read_attribute(x):
    return x * BOX.w


def read_item(x):
    return x * TENSORS[0]


@pytest.mark.parametrize(
    "fn, tensor",
    [(read_global, lambda: W), (read_attribute, lambda: BOX.w), (read_item, lambda: TENSORS[0])],
    ids=["global", "attribute", "item"],
)
def test_tensors_from_anywhere_are_swapped(fn, tensor):
    dynamotor.reset()
    compiled = dynamotor.compile(fn)
    for other in (torch.full((3,), 2.0), torch.full((3,), 3.0, dtype=torch.float64), torch.ones(1)):
        torch.testing.assert_close(compiled(torch.ones(3)), fn(torch.ones(3)))
        swap_tensors(tensor(), other)
    torch.testing.assert_close(compiled(torch.ones(3)), fn(torch.ones(3)))


@pytest.mark.slow
def test_tensors_that_end_while_their_memory_lives_are_not_read():
    holder = {"w": torch.ones(3)}
    compiled = dynamotor.compile(lambda x: x * holder["w"])
    for i in range(30):
        compiled(torch.ones(3))
        kept = holder["w"].detach()  # keeps the storage
        gone = weakref.ref(holder["w"])
        holder["w"] = kept.add(1) if i % 2 else kept.view(3)
        del kept
        gc.collect()
        assert gone() is None
        torch.testing.assert_close(compiled(torch.ones(3)), holder["w"] * 1)


def test_a_question_that_ends_a_tensor():
    class Odd:
        def __init__(self):
            self.w, self.active = torch.ones(3), False

        def __bool__(self):
            if self.active:
                self.kept, self.w = self.w.detach(), torch.full((3,), 2.0)
            return True

    odd = Odd()
    compiled = dynamotor.compile(lambda x: x * odd.w + (1 if odd else 0))
    torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 2.0))
    odd.active = True
    torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 2.0))  # `odd.w` is read first
    torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 3.0))
