"""On the device: autocast's rows, torch's GradScaler, attention and dropout as one op, modules beside the
CPU's.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("jax", reason="jax is not installed")

import dynamotor.xla  # noqa: E402, F401
from dynamotor.xla import autocast, metrics  # noqa: E402


def both(*shape):
    """A leaf on the CPU and its twin on the device."""
    here = torch.randn(shape, requires_grad=True)
    return here, here.detach().to("xla").requires_grad_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_run_in_the_lower_type_and_sums_in_float32(dtype):
    x, y = torch.randn(4, 4, device="xla"), torch.randn(4, 4, device="xla")
    with torch.autocast("xla", dtype=dtype):
        low = x @ y
        assert {
            t.dtype
            for t in (low, F.linear(x, y), torch.bmm(x[None], y[None]), F.conv1d(x[None], y[:, :, None]))
        } == {dtype}
        assert {
            t.dtype
            for t in (F.softmax(low, -1), low.sum(), F.layer_norm(low, (4,)), F.mse_loss(low, low), low.exp())
        } == {torch.float32}
        assert (torch.cat([low, x]).dtype, torch.cat([low, low]).dtype, (low + low).dtype) == (
            torch.float32,
            dtype,
            dtype,
        )
        assert F.softmax(low, -1, dtype=torch.float64).dtype == torch.float64
        assert torch.mm(x.double(), y.double()).dtype == torch.float64
    assert (x @ y).dtype == torch.float32


def test_gradients_come_back_in_the_parameters_type():
    x, (here, there) = torch.randn(5, 4), both(4, 3)
    for weight, data in ((here, x), (there, x.to("xla"))):
        with torch.autocast(data.device.type, dtype=torch.bfloat16):
            loss = F.mse_loss(data @ weight, torch.zeros(5, 3, device=data.device))
        loss.backward()
    assert there.grad.dtype == torch.float32
    torch.testing.assert_close(there.grad.cpu(), here.grad, rtol=2e-2, atol=2e-2)


def test_autocast_off_inside():
    x = torch.randn(3, 3, device="xla")
    with torch.autocast("xla"), torch.autocast("xla", enabled=False):
        assert (x @ x).dtype == torch.float32


def test_rows_name_ops_that_exist():
    for names in (autocast.LOWER, autocast.FLOAT32, autocast.FLOAT32_RESULT, autocast.WIDEST):
        for name in names.split():
            assert isinstance(autocast._overload(name), torch._ops.OpOverload)


def test_grad_scaler_shrinks_after_infinite_gradients_and_grows_after_good_ones():
    weight = torch.ones(3, device="xla", requires_grad=True)
    other = torch.ones(2, device="xla", requires_grad=True)
    optimizer = torch.optim.SGD([weight, other], lr=0.5)
    scaler = torch.amp.GradScaler("xla", init_scale=8.0, growth_interval=2)
    scales = []
    for factor in (1.0, float("inf"), 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum() + other.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 4.0, 4.0, 8.0]
    assert weight.tolist() == [-0.5] * 3 and other.tolist() == [-0.5] * 2  # three steps of four


OPTIONS = [
    {},
    {"is_causal": True},
    {"scale": 0.3},
    {"attn_mask": torch.randn(5, 6)},
    {"attn_mask": torch.rand(2, 1, 5, 6) > 0.7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(o) or "plain")
def test_attention_is_one_op(options):
    (query, q), (key, k), (value, v) = both(2, 3, 5, 8), both(2, 3, 6, 8), both(2, 3, 6, 8)
    moved = {name: o.to("xla") if isinstance(o, torch.Tensor) else o for name, o in options.items()}
    counter = "xla::_scaled_dot_product_flash_attention_for_cpu"
    before = metrics.all_counters().get(counter, 0)
    expected, got = (
        F.scaled_dot_product_attention(query, key, value, **options),
        F.scaled_dot_product_attention(q, k, v, **moved),
    )
    assert metrics.all_counters()[counter] == before + 1
    torch.testing.assert_close(got.detach().cpu(), expected.detach())
    grad = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(got, (q, k, v), grad.to("xla")),
        torch.autograd.grad(expected, (query, key, value), grad),
    ):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


def test_attention_that_has_no_fused_form():
    (query, q), (mask, m) = both(2, 3, 5, 8), both(5, 5)
    expected, got = (
        F.scaled_dot_product_attention(query, query, query, mask),
        F.scaled_dot_product_attention(q, q, q, m),
    )
    torch.testing.assert_close(got.detach().cpu(), expected.detach())
    expected.sum().backward(), got.sum().backward()
    torch.testing.assert_close(m.grad.cpu(), mask.grad, rtol=1e-4, atol=1e-5)
    flat = F.scaled_dot_product_attention(q[0, 0], q[0, 1], q[0, 2])
    torch.testing.assert_close(
        flat.detach().cpu(), F.scaled_dot_product_attention(query[0, 0], query[0, 1], query[0, 2]).detach()
    )


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout(p):
    x = torch.ones(4000, device="xla", requires_grad=True)
    y = F.dropout(x, p)
    y.sum().backward()
    assert set(y.tolist()) <= {0.0, y.max().item()} and torch.equal(x.grad.cpu(), y.detach().cpu())
    assert abs(y.mean().item() - (1 if p < 1 else 0)) < 0.1
    assert F.dropout(x, p, training=False) is x
    with torch.inference_mode():
        assert F.dropout(torch.ones(10, device="xla"), p).shape == (10,)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.LSTM(4, 5, 2, bidirectional=True),
        lambda: torch.nn.GRU(4, 5),
        lambda: torch.nn.RNN(4, 5),
        lambda: torch.nn.TransformerEncoderLayer(4, 2, 8).eval(),
        lambda: torch.nn.BatchNorm1d(3),
    ],
)
def test_modules_beside_the_cpu(make):
    module, x = make(), torch.randn(6, 3, 4)
    expected = module(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    got = module.to("xla")(x.to("xla"))
    got = got[0] if isinstance(got, tuple) else got
    torch.testing.assert_close(got.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
