"""The random state: PyTorch's protocol for devices, seeds that hold from the op where they were set,
generators.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("jax", reason="jax is not installed")

import dynamotor  # noqa: E402
from dynamotor.base.errors import XlaError  # noqa: E402
from dynamotor.xla.core import xla_model as xm  # noqa: E402
from dynamotor.xla.regions import eager_mode_context  # noqa: E402
from dynamotor.xla.step import compile_step  # noqa: E402

dropout = torch.nn.functional.dropout


def test_a_seed_holds_from_the_draw_after_it_was_set():
    torch.xla.manual_seed(3)
    first, middle = torch.rand(4, device="xla"), xm.get_rng_state()
    second = torch.randn(4, device="xla")
    torch.xla.manual_seed(3)
    again = torch.rand(4, device="xla")
    torch.rand(4, device="xla")
    xm.set_rng_state(middle)
    replayed = torch.randn(4, device="xla")
    assert torch.equal(first.cpu(), again.cpu()) and torch.equal(second.cpu(), replayed.cpu())
    assert not torch.equal(first.cpu(), torch.rand(4, device="xla").cpu())


def test_the_state_can_be_forked_and_restored_as_every_devices():
    state = torch.xla.get_rng_state()
    with torch.random.fork_rng(devices=[0], device_type="xla"):
        inside = torch.rand(4, device="xla")
        torch.xla.manual_seed(9)
    assert torch.equal(torch.xla.get_rng_state(), state)
    assert torch.equal(torch.rand(4, device="xla").cpu(), inside.cpu())
    assert torch.xla.is_initialized() and len(torch.xla.get_rng_state_all()) == torch.xla.device_count()


def grads_of(run, x):
    torch.xla.manual_seed(4)
    leaf = x.detach().requires_grad_()
    run(leaf).sum().backward()
    return leaf.grad.cpu(), xm.get_rng_state()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["lazy", "eager", "xla", "xla_trace_everytime"])
def test_a_checkpointed_dropout_has_one_mask(mode, reentrant):
    def run(x):
        return dropout(checkpoint(lambda t: dropout(t, 0.5) * t, x, use_reentrant=reentrant), 0.5)

    x = torch.rand(64, device="xla")
    expected = grads_of(lambda x: dropout(dropout(x, 0.5) * x, 0.5), x)
    if mode == "eager":
        with eager_mode_context(True):
            assert_same_draws(grads_of(run, x), expected)
    else:
        fast = run if mode == "lazy" else dynamotor.compile(run, backend=mode)
        for _ in range(2):
            assert_same_draws(grads_of(fast, x), expected)


def assert_same_draws(found, expected):
    torch.testing.assert_close(found[0], expected[0])
    assert found[1] == expected[1], "the random state afterwards is another one"


def test_compiled_steps_draw_what_lazy_steps_draw_with_checkpoints_and_seeds_of_their_own():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            y = checkpoint(lambda t: dropout(self.layer(t), 0.5), x, use_reentrant=False)
            with torch.random.fork_rng(devices=[0], device_type="xla"):
                torch.xla.manual_seed(1)  # the same noise at each step
                noise = torch.rand_like(y)
            return dropout(y + noise, 0.5)

    def train(compiled):
        torch.manual_seed(0)
        net = Net().to("xla")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        xm.set_rng_state(11)
        step = compile_step(net, torch.nn.functional.mse_loss, optimizer)
        losses = []
        for _ in range(4):
            x, y = torch.ones(4, 8).to("xla"), torch.zeros(4, 8).to("xla")
            if compiled:
                losses.append(step(x, y).item())
                continue
            loss = torch.nn.functional.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, xm.get_rng_state()

    lazy, state = train(False)
    compiled, state_after = train(True)
    assert compiled == pytest.approx(lazy, rel=1e-5) and state == state_after


def test_generators_draw_by_themselves_and_can_be_saved():
    generator = torch.Generator(device="xla").manual_seed(5)
    state = torch.xla.get_rng_state()
    first = torch.rand(4, generator=generator, device="xla")
    saved = generator.get_state()
    second = torch.zeros(4, device="xla").uniform_(generator=generator)
    assert torch.equal(torch.xla.get_rng_state(), state)
    generator.set_state(saved)
    assert torch.equal(torch.rand(4, generator=generator, device="xla").cpu(), second.cpu())
    other = torch.Generator(device="xla").manual_seed(5)
    assert torch.equal(
        torch.bernoulli(torch.full((64,), 0.5, device="xla"), generator=other).cpu() != 0, drawn_half(5)
    )
    assert not torch.equal(first.cpu(), second.cpu())
    with pytest.raises(XlaError, match="DM614"):
        torch.rand(4, generator=torch.Generator(), device="xla")


def drawn_half(seed):
    generator = torch.Generator(device="xla").manual_seed(seed)
    return torch.rand(64, generator=generator, device="xla").cpu() < 0.5


def test_torch_manual_seed_seeds_the_device() -> None:
    first = [(torch.manual_seed(3), torch.rand(4, device="xla"))[1] for _ in range(2)]
    torch.manual_seed(4)
    assert torch.equal(*first) and not torch.equal(first[0], torch.rand(4, device="xla"))


def test_a_draw_that_is_refused_moves_no_other() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(4, device="xla").cpu()
    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="DM614"):
        torch.rand(4, device="xla", generator=torch.Generator())
    assert torch.equal(torch.rand(4, device="xla").cpu(), wanted)
