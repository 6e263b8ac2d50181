"""compile_step and compile_optimizer: whole steps as one executable, equal to lazy training."""

import copy
import gc

import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

import dynamotor  # noqa: E402
from dynamotor.base.errors import XlaError  # noqa: E402
from dynamotor.xla import metrics  # noqa: E402
from dynamotor.xla.ir import Lane  # noqa: E402
from dynamotor.xla.step import compile_optimizer, compile_step  # noqa: E402
from dynamotor.xla.sync import sync  # noqa: E402

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.07, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.013),
    "adam_capturable": lambda p: torch.optim.Adam(p, lr=0.013, capturable=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.013, weight_decay=0.03, capturable=True),
}


def network():
    """The first layer has no bias: a batch norm would take it away again, and it has rounding alone as its gradient, which Adam
    divides by itself."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 12, bias=False), torch.nn.BatchNorm1d(12), torch.nn.Tanh(), torch.nn.Linear(12, 3)
    )


def lazy_losses(model, optimizer, batches, change=None):
    losses = []
    for index, (x, y) in enumerate(batches):
        if index == 4 and change:
            change(optimizer)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        sync()
        losses.append(loss.item())
    return losses


def batches():
    torch.manual_seed(1)
    return [(torch.randn(8, 6).to("xla"), torch.randint(0, 3, (8,)).to("xla")) for _ in range(7)]


def slower(optimizer):
    optimizer.param_groups[0]["lr"] *= 0.37


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_step_trains_as_the_lazy_device_does_and_compiles_once(name):
    data = batches()
    one, two = network().to("xla"), network().to("xla")
    expected = lazy_losses(one, OPTIMIZERS[name](one.parameters()), data, slower)
    optimizer = OPTIMIZERS[name](two.parameters())
    step = compile_step(two, torch.nn.functional.cross_entropy, optimizer)
    losses, compiled = [], []
    for index, (x, y) in enumerate(data):
        if index == 4:
            slower(optimizer)
        losses.append(step(x, y).item())
        compiled.append(metrics.counters["UncachedCompile"])
    assert losses == pytest.approx(expected, rel=1e-5)
    assert compiled[1] == compiled[-1], "a step after the second compiled again"
    for mine, other in zip(two.state_dict().values(), one.state_dict().values()):
        torch.testing.assert_close(mine.cpu(), other.cpu(), rtol=1e-4, atol=1e-5)


def test_a_compiled_optimizer_steps_as_eager_does():
    model = network()
    device = copy.deepcopy(model).to("xla")
    optimizer, mine = OPTIMIZERS["sgd"](model.parameters()), OPTIMIZERS["sgd"](device.parameters())
    step = compile_optimizer(mine)
    for _ in range(4):
        x = torch.randn(8, 6)
        for net, update, inputs in ((model, optimizer.step, x), (device, step, x.to("xla"))):
            net.zero_grad()
            net(inputs).square().sum().backward()
            update()
    for a, b in zip(device.parameters(), model.parameters()):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-4, atol=1e-4)


def test_lazy_adam_compiles_no_step_after_the_second():
    model = network().to("xla")
    optimizer = OPTIMIZERS["adam"](model.parameters())
    data = batches()
    lazy_losses(model, optimizer, data[:3])
    before = metrics.counters["UncachedCompile"]
    lazy_losses(model, optimizer, data[3:])
    assert metrics.counters["UncachedCompile"] == before


def test_a_model_on_the_cpu_is_refused_with_a_code():
    model = network()
    with pytest.raises(XlaError, match="DM617"):
        compile_step(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_forward_pass_that_reads_data_trains_on_the_lazy_device():
    def loss_fn(output, target):
        loss = torch.nn.functional.cross_entropy(output, target)
        return loss * (1.0 if output.sum().item() > 0 else 2.0)

    def train(device):
        model = network().to(device)
        optimizer = OPTIMIZERS["sgd"](model.parameters())

        def eager(x, y):
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = compile_step(model, loss_fn, optimizer) if device == "xla" else eager
        return [*[step(x.to(device), y.to(device)).cpu() for x, y in batches()], *model.state_dict().values()]

    with pytest.warns(UserWarning, match="trains on the lazy device.*it reads data"):
        got = [t.cpu() for t in train("xla")]
    torch.testing.assert_close(got, train("cpu"), rtol=1e-4, atol=1e-5)


def test_steps_that_are_recorded_each_time_leave_no_cycles():
    """Cycles keep the arrays of a recording until the collector of garbage comes, which is seldom."""
    model = network().to("xla")
    step = compile_step(model, torch.nn.functional.cross_entropy, OPTIMIZERS["adam"](model.parameters()))
    counts = []
    gc.disable()
    try:
        for x, y in batches():
            step(x, y)
            counts.append(sum(type(each) is Lane for each in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[2] == counts[-1]


def test_an_optimizer_that_reads_data_is_refused_with_a_code():
    class Reading(torch.optim.SGD):
        def step(self, closure=None):
            if self.param_groups[0]["params"][0].grad.sum().item() < 1e9:
                super().step(closure)

    model = network().to("xla")
    step = compile_step(model, torch.nn.functional.cross_entropy, Reading(model.parameters(), lr=0.1))
    x, y = batches()[0]
    step(x, y)
    with pytest.raises(XlaError, match="DM618"):
        step(x, y)
    assert all(p.cpu().isfinite().all() for p in model.parameters())  # the refused step has not taken them


@pytest.mark.parametrize("whole", [False, True], ids=["compile_optimizer", "compile_step"])
def test_state_that_is_put_in_place_between_steps_is_used(whole):
    """A loaded optimizer state and a new parameter are other tensors than those that were recorded."""

    def train(device):
        model = network().to(device)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        step = optimizer.step
        if device == "xla":
            step = compile_step(model, torch.Tensor.sum, optimizer) if whole else compile_optimizer(optimizer)
        torch.manual_seed(2)
        for index, x in enumerate(torch.randn(8, 8, 6).to(device)):
            if index == 2:
                kept = copy.deepcopy(optimizer.state_dict())
            if index == 4:
                optimizer.load_state_dict(kept)
            if index == 6:
                model[3].bias = torch.nn.Parameter(torch.ones(3, device=device))
                optimizer.add_param_group({"params": [model[3].bias]})
            if whole and device == "xla":
                step(x)
                continue
            optimizer.zero_grad()
            model(x).sum().backward()
            step()
        return [p.detach().cpu() for p in model.parameters()]

    for mine, expected in zip(train("xla"), train("cpu")):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_an_optimizer_that_replaces_its_state_is_refused_with_a_code():
    class Replacing(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for state in self.state.values():
                state["momentum_buffer"] = state["momentum_buffer"] * 1.0

    model = network().to("xla")
    step = compile_step(
        model, torch.nn.functional.cross_entropy, Replacing(model.parameters(), lr=0.1, momentum=0.9)
    )
    data = batches()
    step(*data[0])
    with pytest.raises(XlaError, match="DM618"):
        step(*data[1])


def test_a_parameter_that_is_frozen_between_two_steps_stays_as_it_is():
    def train(make_step):
        model = network().to("xla")
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        step, losses = make_step(model, optimizer), []
        for index, (x, y) in enumerate(batches()):
            model[0].weight.requires_grad_(index not in (3, 4))
            losses.append(step(x, y).item())
        return losses, [p.detach().cpu() for p in model.parameters()]

    def lazy(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    expected = train(lazy)
    got = train(lambda model, optimizer: compile_step(model, torch.nn.functional.cross_entropy, optimizer))
    torch.testing.assert_close(got, expected)


class Switched(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.other = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
        self.scale, self.which = 1.0, "layer"

    def forward(self, x):
        return getattr(self, self.which)(x) * self.scale


class Smooth(torch.nn.Module):
    smoothing = 0.0

    def forward(self, output, target):
        return torch.nn.functional.cross_entropy(output, target, label_smoothing=self.smoothing)


CHANGES = {
    "an attribute of the model": lambda model, loss: setattr(model, "scale", 2.5),
    "a chosen layer": lambda model, loss: setattr(model, "which", "other"),
    "an attribute of the loss": lambda model, loss: setattr(loss, "smoothing", 0.3),
    "a hook": lambda model, loss: model.layer.register_forward_hook(lambda m, args, out: out * 0.5),
    "another forward": lambda model, loss: setattr(model, "forward", lambda x: model.other(x) - 1),
    "a replaced module": lambda model, loss: setattr(model, "layer", model.other),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_step_sees_what_was_changed_since_it_was_recorded(what):
    def train(compiled):
        torch.manual_seed(0)
        model, loss_fn = Switched().to("xla"), Smooth()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        step = compile_step(model, loss_fn, optimizer)
        losses = []
        for index, (x, y) in enumerate(batches()):
            if index == 3:
                CHANGES[what](model, loss_fn)
            if compiled:
                losses.append(step(x, y).item())
            else:
                losses += lazy_losses_of(model, loss_fn, optimizer, x, y)
        return losses

    assert train(True) == pytest.approx(train(False), rel=1e-5)


def lazy_losses_of(model, loss_fn, optimizer, x, y):
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    return [loss.item()]


def test_a_step_under_autocast_is_another_one():
    def train(compiled):
        torch.manual_seed(0)
        model = Switched().to("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = compile_step(model, torch.nn.functional.cross_entropy, optimizer)
        losses = []
        for index, (x, y) in enumerate(batches()):
            with torch.autocast("xla", torch.bfloat16, enabled=index % 2 == 1):
                if compiled:
                    losses.append(step(x, y).item())
                else:
                    losses += lazy_losses_of(model, torch.nn.functional.cross_entropy, optimizer, x, y)
        return losses

    assert train(True) == pytest.approx(train(False), rel=1e-4)


def test_what_a_step_writes_to_the_model_is_written_at_each_call():
    class Counting(Switched):
        calls = 0

        def forward(self, x):
            self.calls += 1
            self.last = super().forward(x)
            return self.last

    model = Counting().to("xla")
    step = compile_step(model, torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    for index, (x, y) in enumerate(batches()):
        expected = model.layer(x).detach().cpu()
        step(x, y)
        assert model.calls == index + 1
        torch.testing.assert_close(model.last.detach().cpu(), expected, rtol=1e-5, atol=1e-6)


def test_what_was_recorded_before_a_step_reads_the_parameters_of_before():
    model = torch.nn.Linear(2, 2).to("xla")
    step = compile_step(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.ones(3, 2, device="xla"), torch.zeros(3, 2, device="xla")
    for _ in range(3):
        before, doubled = model.weight.detach().cpu(), model.weight.detach() * 2  # not computed yet
        step(x, y)
        assert torch.equal(doubled.cpu(), before * 2)


def test_numbers_on_the_cpu_are_read_at_each_step():
    """An optimizer's tensor on the CPU goes into the graph as a value, not as a constant of the first
    recording.
    """

    class Decaying(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})
            self.state[self.param_groups[0]["params"][0]]["rate"] = torch.tensor(0.1)

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                rate = self.state[self.param_groups[0]["params"][0]]["rate"]
                p.sub_(p.grad * rate)
            rate.mul_(0.5)

    def train(compiled):
        model = network().to("xla")
        optimizer = Decaying(model.parameters())
        step = compile_step(model, torch.nn.functional.cross_entropy, optimizer)
        found = []
        for x, y in batches():
            found += (
                [step(x, y).item()]
                if compiled
                else lazy_losses_of(model, torch.nn.functional.cross_entropy, optimizer, x, y)
            )
        return found

    assert train(True) == pytest.approx(train(False), rel=1e-4)


class _Overflows:
    """A scaler whose second step is skipped, as GradScaler skips steps whose gradients overflow."""

    def __init__(self) -> None:
        self.steps = 0

    def is_enabled(self) -> bool:
        return True

    def scale(self, loss):
        return loss * 8

    def unscale_(self, optimizer) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.div_(8)

    def step(self, optimizer) -> None:
        self.steps += 1
        if self.steps != 2:
            optimizer.step()

    def update(self) -> None:
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0.1},
        {"clip": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.01)},
        {"accumulate": 2},
        {"accumulate": 2, "clip": 0.1, "keep_grads": True},
        {"scaler": _Overflows, "clip": 0.1},
    ],
    ids=["clip", "clip_function", "accumulate", "keep_grads", "scaler"],
)
def test_clip_scaler_and_accumulate_train_as_on_the_cpu(options) -> None:
    torch.manual_seed(0)
    start, batches = torch.nn.Linear(4, 3).state_dict(), torch.randn(6, 5, 4)
    losses, models = [], []
    for device in ("cpu", "xla"):
        model = torch.nn.Linear(4, 3)
        model.load_state_dict(start)
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
        given = {k: v() if v is _Overflows else v for k, v in options.items()}
        loss_fn = lambda y: y.square().mean()  # noqa: E731
        if device == "xla":
            step = dynamotor.compile_step(model, loss_fn, optimizer, **given)
        else:
            step = _by_hand(model, loss_fn, optimizer, **given)
        losses.append([step(batch.to(device)).item() for batch in batches])
        models.append([p.detach().cpu() for p in model.parameters()])
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(models[1], models[0])


def _by_hand(model, loss_fn, optimizer, clip=None, scaler=None, accumulate=1, keep_grads=False):
    calls = 0

    def step(batch):
        nonlocal calls
        if calls % accumulate == 0:
            optimizer.zero_grad()
        loss = loss_fn(model(batch))
        part = loss / accumulate
        (scaler.scale(part) if scaler else part).backward()
        calls += 1
        if calls % accumulate == 0:
            if scaler:
                scaler.unscale_(optimizer)
            if callable(clip):
                clip(list(model.parameters()))
            elif clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            (scaler or optimizer).step(*([optimizer] if scaler else []))
        return loss.detach()

    return step
