"""Recurrent nets: values, gradients and last states are the CPU's; the program does not grow with the
length.
"""

import copy

import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

import dynamotor  # noqa: E402
from dynamotor.base.events import collect  # noqa: E402
from dynamotor.xla import metrics  # noqa: E402
from dynamotor.xla.jax_call import call_jax  # noqa: E402
from dynamotor.xla.sync import sync  # noqa: E402

NETS = {
    "lstm": lambda: torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "lstm, projected": lambda: torch.nn.LSTM(3, 4, proj_size=2, batch_first=True),
    "lstm, without biases": lambda: torch.nn.LSTM(3, 4, bias=False),
    "gru": lambda: torch.nn.GRU(3, 4, bidirectional=True),
    "gru, without biases": lambda: torch.nn.GRU(3, 4, num_layers=2, bias=False, batch_first=True),
    "rnn": lambda: torch.nn.RNN(3, 4),
    "rnn, relu": lambda: torch.nn.RNN(3, 4, nonlinearity="relu", bidirectional=True),
}


def run(net, x, state=None):
    """(outputs, last states..., gradients of everything), on the CPU."""
    x = x.detach().requires_grad_()
    outputs, last = net(x, state)
    data = outputs.data if isinstance(outputs, torch.nn.utils.rnn.PackedSequence) else outputs
    lasts = last if isinstance(last, tuple) else (last,)
    loss = (data * data.cos()).sum() + sum((s * (i + 2)).sum() for i, s in enumerate(lasts))
    loss.backward()
    found = [data, *lasts, x.grad, *[p.grad for p in net.parameters()]]
    return [t.detach().cpu() for t in found]


@pytest.mark.parametrize("name", NETS)
def test_values_and_gradients_are_the_cpus(name):
    torch.manual_seed(0)
    net = NETS[name]().double()
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    expected = run(copy.deepcopy(net), x)
    torch.testing.assert_close(run(net.to("xla"), x.to("xla")), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", ["xla", "inference", "no batch", "bfloat16"])
def test_an_lstm_in_other_modes(mode):
    torch.manual_seed(0)
    net = torch.nn.LSTM(3, 4, num_layers=2)
    x = torch.randn(5, 3) if mode == "no batch" else torch.randn(5, 2, 3)
    expected = run(copy.deepcopy(net), x)
    device = net.to("xla")
    if mode == "xla":
        fast = dynamotor.compile(device, backend="xla")
        with collect("xla.partition") as cuts:
            torch.testing.assert_close(run(fast, x.to("xla")), expected, rtol=1e-4, atol=1e-5)
        assert not cuts
    elif mode == "inference":
        with torch.inference_mode():
            found = device(x.to("xla"))[0].cpu()
        torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)
    elif mode == "bfloat16":
        with torch.autocast("xla", torch.bfloat16):
            found = device(x.to("xla"))[0]
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found.float().cpu(), expected[0], rtol=0.05, atol=0.03)
    else:
        torch.testing.assert_close(run(device, x.to("xla")), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.nn.LSTM, pytest.param(torch.nn.GRU, marks=pytest.mark.slow)])
def test_packed_sequences(kind):
    torch.manual_seed(0)
    net = kind(3, 4, num_layers=2, bidirectional=True).double()
    x = torch.randn(5, 3, 3, dtype=torch.float64)

    def packed(net, x):
        x = x.detach().requires_grad_()
        sequence = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 1]))
        outputs, last = net(sequence)
        lasts = last if isinstance(last, tuple) else (last,)
        padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(outputs)
        (padded.sin().sum() + sum((s * s).sum() for s in lasts)).backward()
        assert lengths.tolist() == [5, 3, 1]
        return [t.detach().cpu() for t in (padded, *lasts, x.grad, *[p.grad for p in net.parameters()])]

    expected = packed(copy.deepcopy(net), x)
    torch.testing.assert_close(packed(net.to("xla"), x.to("xla")), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_program_does_not_grow_with_the_length():
    net = torch.nn.LSTM(3, 4, num_layers=2).to("xla")
    sizes = []
    for length in (3, 40):
        net.zero_grad()
        sync()
        with collect("xla.compiled") as compiled:
            net(torch.zeros(length, 2, 3).to("xla"))[0].sum().backward()
            sync()
        sizes.append(compiled[-1].data["nodes"])
    assert sizes[0] == sizes[1] < 150
    assert not [name for name in metrics.all_counters() if name.startswith("aten::lstm")]


def test_dropout_between_layers_draws_anew_at_each_call():
    net = torch.nn.LSTM(3, 4, num_layers=2, dropout=0.5).to("xla")
    x = torch.ones(5, 2, 3).to("xla")
    assert not torch.equal(net(x)[0].cpu(), net(x)[0].cpu())
    net.eval()
    assert torch.equal(net(x)[0].cpu(), net(x)[0].cpu())


def test_a_jax_function_is_an_operation_with_gradients_of_any_order():
    def function(x, named, power):
        return {"y": named["w"] @ x**power, "count": jnp.sum(x > 0)}

    def both(device):
        torch.manual_seed(0)
        x, w = (torch.randn(*s, dtype=torch.float64).to(device).requires_grad_() for s in ((3,), (2, 3)))
        y = call_jax(function, (x, {"w": w}), {"power": 3})["y"] if device == "xla" else w @ x**3
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        second = torch.autograd.grad(grad.sum(), (x, w))
        return [t.detach().cpu() for t in (y, grad, *second)]

    for found, expected in zip(both("xla"), both("cpu")):
        torch.testing.assert_close(found, expected)
    x = torch.tensor([1.0, -1.0, 2.0], device="xla")
    assert call_jax(function, (x, {"w": torch.ones(2, 3, device="xla")}), {"power": 2})["count"].item() == 2
