"""Functions entered while a graph break runs natively are captured on their own, and give eager's results."""

import pytest
import torch

import dynamotor
from dynamotor import _C
from dynamotor.base.events import collect, counters


@pytest.fixture(autouse=True)
def _fresh():
    dynamotor.reset()


def captured(function, *args, calls=3):
    """Names captured while the compiled function is called; every result equals eager's."""
    compiled = dynamotor.compile(function, backend="eager")
    with collect("capture") as events:
        for _ in range(calls):
            torch.testing.assert_close(compiled(*args), function(*args))
    return [e.data["name"] for e in events if e.data["graph"] is not None]


def scale(x, factor=2.0, *, shift=0.5):
    return torch.relu(x) * factor + shift


def test_a_callback_of_a_native_function():
    def program(x):
        y = x + 1
        z = sorted([3, 1], key=lambda k: float(scale(y, k).sum()))
        print(z, end="")
        return y * 2, z

    captured(program, torch.randn(3))


def test_a_function_called_by_the_breaking_instruction():
    def inner(x):
        return scale(x, 3.0, shift=1.0).cos()

    @dynamotor.disable
    def untouched(x):
        return scale(x)

    class Meter:
        def update(self, value):
            print(end="")
            return inner(value)

    meter = Meter()

    def program(x):
        return meter.update(x * 2).sin(), untouched(x) + 1

    names = captured(program, torch.randn(3))
    assert names and not any("untouched" in name for name in names)


def test_generator_consumed_natively():
    def batches(x):
        for i in range(2):
            print(end="")
            yield scale(x, float(i))

    def program(x):
        return torch.stack(list(batches(x))).sum(0) + x

    names = captured(program, torch.randn(3))
    assert any("scale" in name for name in names), names


def test_modules_called_natively():
    class Block(torch.nn.Module):
        def __init__(self, n):
            super().__init__()
            self.linear = torch.nn.Linear(n, n)

        def forward(self, x):
            return torch.tanh(self.linear(x))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([Block(4), Block(4)])

        def walk(self, x):
            for block in self.blocks:
                print(end="")
                yield block(x)

        def forward(self, x):
            return sum(self.walk(x))

    net = Net()
    compiled = dynamotor.compile(net, backend="eager")
    x = torch.randn(2, 4)
    with collect("capture") as events:
        for _ in range(3):
            torch.testing.assert_close(compiled(x), net(x))
        net.blocks[0].linear.weight.data.mul_(2)
        torch.testing.assert_close(compiled(x), net(x))
        net.blocks[1] = Block(4).double().float()
        torch.testing.assert_close(compiled(x), net(x))
    assert any("forward" in e.data["name"] for e in events if e.data["graph"] is not None)


def test_exceptions_and_recursion():
    def fails(x, depth):
        if depth == 0:
            raise KeyError("deep")
        print(end="")
        return fails(x + 1, depth - 1)

    def program(x):
        try:
            fails(x, 3)
        except KeyError as error:
            return x * 2, len(str(error))
        return x, 0

    captured(program, torch.randn(2))


def test_break_counters_and_no_hook_left():
    def program(x):
        print(end="")
        return scale(x)

    captured(program, torch.randn(2))
    assert sum(counters["breaks"].values()) >= 1
    assert _C.set_frame_hook(None) is None, "no hook is left behind"


def test_functions_with_star_parameters():
    def inner(x, *more, scale, **others):
        return torch.relu(x) * scale + sum(more) + others["shift"]

    @dynamotor.disable
    def untouched(x):
        return x

    class Reader:
        @property
        def value(self):  # a break inside of a property is not resumed: functions called there are captured
            return inner(untouched(torch.ones(3)), 1, 2, scale=3, shift=4)

    reader = Reader()
    assert "inner" in " ".join(captured(lambda x: reader.value * x, torch.randn(3)))


def test_a_lambda_called_natively():
    class Reader:
        double = staticmethod(lambda x: torch.relu(x) * 2)

        @property
        def value(self):
            return self.double(opened(torch.ones(2, 3)).__next__())

    reader = Reader()
    names = captured(lambda x: reader.value * x, torch.randn(3))
    assert any(name.endswith("Reader.<lambda>") for name in names), names


LINEARS = torch.nn.Linear(3, 3), dynamotor.disable(torch.nn.Linear(3, 3))


@dynamotor.disable
def opened(x):
    return iter([x, x + 1])


def test_pytorchs_own_modules_called_natively():
    class Reader:
        @property
        def value(self):
            return LINEARS[0](opened(torch.ones(2, 3)).__next__())

    reader = Reader()
    assert "Linear.forward" in captured(lambda x: reader.value * x, torch.randn(3))


def test_a_disabled_module_called_natively_is_left_alone():
    class Reader:
        def __init__(self, index):
            self.index = index

        @property
        def value(self):
            return LINEARS[self.index](opened(torch.ones(2, 3)).__next__())

    first, second = Reader(0), Reader(1)
    program = lambda x: (first.value + second.value) * x  # noqa: E731
    graphs = captured(program, torch.randn(3), calls=1)
    assert graphs.count("Linear.forward") == 1, graphs
