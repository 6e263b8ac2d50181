"""Operations that have no lowering of their own, since PyTorch's tables decompose them: values and gradients
are the CPU's.
"""

import copy

import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

import dynamotor.xla  # noqa: E402, F401
from dynamotor.xla import dispatch, metrics  # noqa: E402

F = torch.nn.functional
SEEN = torch.tensor([[True] * 5 + [False]] * 5 + [[False] * 6])  # the last row sees nothing


def attend(x, mask):
    return F.scaled_dot_product_attention(x, x * 2, x + 1, attn_mask=mask)


CASES = {
    "logaddexp2": lambda x: torch.logaddexp2(x, x.flip(0)),
    "sinc": lambda x: torch.sinc(x),
    "softmax of rows that see nothing": lambda x: torch.ops.aten._safe_softmax(
        x.masked_fill(x > 0, -1e999), 0
    ),
    "gradients of views": lambda x: x[1:, ::2] * x[0, 1] + x.diagonal(1)[0],
    "col2im": lambda x: F.fold(x.view(1, 12, 4)[:, :8], (3, 3), 2),
    "im2col": lambda x: F.unfold(x.view(1, 3, 4, 4), (2, 1), dilation=(2, 1), padding=(1, 2), stride=(1, 3)),
    "chunk_cat": lambda x: torch._chunk_cat([x, x], 0, 2),
    "block_diag": lambda x: torch.block_diag(x[:2], x[:1]),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x.view(1, 3, 4, 4), 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.view(1, 4, 3, 4), 2),
    "roll": lambda x: x.roll((1, 2), (0, 1)),
    "roll of the flat tensor": lambda x: x.roll(3),
    "rot90": lambda x: x.rot90(),
    "channel_shuffle": lambda x: F.channel_shuffle(x.view(1, 4, 3, 4), 2),
    "nan_to_num": lambda x: (x / 0).nan_to_num(1.0, 2.0, 3.0) + x.nan_to_num(),
    "mvlgamma": lambda x: torch.mvlgamma(x.abs() + 2, 2),
    "rsub": lambda x: torch.rsub(x, 2),
    "rsub of a number": lambda x: 3 - x,
    "heaviside": lambda x: torch.heaviside(x, x * 0 + 0.5),
    "diag_embed": lambda x: torch.diag_embed(x, 1),
    "trace": lambda x: x.trace(),
    "take_along_dim": lambda x: torch.take_along_dim(
        x, torch.zeros(6, 1, dtype=torch.long, device=x.device), 1
    ),
    "bicubic": lambda x: F.interpolate(x.view(1, 3, 4, 4), scale_factor=2, mode="bicubic"),
    "index_fill": lambda x: x.index_fill(0, torch.tensor([1, 3], device=x.device), 2.0),
    "logit": lambda x: torch.logit(x.sigmoid()),
    "logit clamped": lambda x: torch.logit(x.sigmoid(), 0.3),
    "mish": lambda x: F.mish(x),
    "hardswish": lambda x: F.hardswish(x),
    "hardsigmoid": lambda x: F.hardsigmoid(x),
    "hardtanh": lambda x: F.hardtanh(x),
    "celu": lambda x: F.celu(x, 0.7),
    "cross": lambda x: torch.linalg.cross(x[:, :3], x[:, 3:6]),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "nansum": lambda x: x.nansum(0),
    "count_nonzero": lambda x: torch.count_nonzero(x > 0, 0).float() + x.sum(),
    "multilabel_margin": lambda x: F.multilabel_margin_loss(
        x, torch.tensor([[0, 2, -1, 0, 0, 0, 0, 0]] * 6, device=x.device)
    ),
    "multi_margin": lambda x: F.multi_margin_loss(x, torch.tensor([0, 1, 2, 3, 4, 5], device=x.device)),
    "multi_margin squared": lambda x: F.multi_margin_loss(
        x, torch.tensor([0, 1, 2, 3, 4, 5], device=x.device), p=2
    ),
    "addr": lambda x: torch.addr(x, x[:, 0], x[0], beta=0.5, alpha=2.0),
    "isin": lambda x: torch.isin((x * 2).long(), torch.tensor([1, 0], device=x.device)).float() + x,
    "weight_norm": lambda x: torch._weight_norm(x, x[:, :1] * 0 + 2, 0),
    "logspace": lambda x: torch.logspace(0, 2, 5, device=x.device) + x.sum(),
    "logspace of integers": lambda x: torch.logspace(0, 2, 5, dtype=torch.int32, device=x.device) + x.sum(),
    "new_full": lambda x: x.new_full((2,), 3.0) + x.sum(),
    "nan_to_num of half": lambda x: (x.half() / 0).nan_to_num() + x,
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x) * 0.3),
    "bce sum weight": lambda x: F.binary_cross_entropy(
        x.sigmoid(), torch.ones_like(x) * 0.3, weight=torch.ones_like(x) * 2, reduction="sum"
    ),
    "bce of 0 and 1": lambda x: F.binary_cross_entropy(
        torch.where(x.detach() > 0, x * 0 + 1, x * 0), torch.ones_like(x) * 0.3
    ),
    "bce logits": lambda x: F.binary_cross_entropy_with_logits(
        x * 30, torch.ones_like(x) * 0.3, pos_weight=torch.ones(8, device=x.device) * 2
    ),
    "logsigmoid": lambda x: F.logsigmoid(x * 50),
    "elu": lambda x: F.elu(x, 0.7),
    "elu_": lambda x: F.elu_(x * 1, 0.7),
    "selu": lambda x: F.selu(x),
    "celu of 2": lambda x: F.celu(x, 2.0),
    "xlogy": lambda x: torch.xlogy(x.relu(), x.abs()),
    "xlogy number": lambda x: torch.xlogy(2.0, x.abs()),
    "xlog1py": lambda x: torch.special.xlog1py(x.relu(), x.abs()),
    "xlogy of nan": lambda x: torch.xlogy(x * 0, x / 0),
    "half logsigmoid": lambda x: F.logsigmoid(x.half()).float(),
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "hardshrink": lambda x: F.hardshrink(x, 0.3),
    "hardswish at its bounds": lambda x: F.hardswish(torch.round(x) * 3),
    "threshold": lambda x: F.threshold(x, 0.1, 2.0),
    "argsort": lambda x: x.argsort(1).float() + torch.argsort(torch.round(x), dim=0, stable=True) + x,
    "vdot": lambda x: torch.vdot(x[0], x[1]),
    "rms_norm": lambda x: F.rms_norm(x, (8,), torch.full((8,), 2.0, device=x.device)),
    "std": lambda x: x.std(0) + torch.std_mean(x, 1, correction=2)[0].sum(),
    "norm": lambda x: torch.norm(x, 3, dim=1) + x.norm(),
    "stack": lambda x: torch.stack([x, x * 2, x.long()], 1),
    "attention with a boolean mask": lambda x: attend(x.view(1, 6, 8), SEEN.to(x.device)),
    "attention of heads with a boolean mask": lambda x: attend(x.view(1, 2, 6, 4), SEEN.to(x.device)),
    "attention with a mask of another type": lambda x: attend(
        x.double().view(1, 2, 6, 4), SEEN.float().to(x.device)
    ),
    "prelu": lambda x: F.prelu(x, torch.full((8,), 0.3, device=x.device)) + torch.nn.PReLU().to(x.device)(x),
    "bce at the ends": lambda x: F.binary_cross_entropy(
        (x > 0) * 1.0 + x * 0, (x > 1) * 1.0, torch.rand(8).to(x.device)
    ),
    "bce of each": lambda x: F.binary_cross_entropy(x.sigmoid(), (x > 1) * 1.0, reduction="none"),
    "multi margin with weights": lambda x: F.multi_margin_loss(
        x,
        torch.tensor([0, 1, 2, 3, 4, 7], device=x.device),
        p=2,
        weight=torch.rand(8).to(x.device),
        reduction="sum",
    ),
    "dist": lambda x: torch.dist(x, x.detach() * 2, 3) + torch.dist(x, x.detach() * 2),
    "glu": lambda x: F.glu(x, 1),
    "polar": lambda x: torch.view_as_real(torch.polar(x.abs(), x)),
    "tril_indices": lambda x: (
        x[tuple(torch.tril_indices(6, 5, -1, device=x.device))]
        + torch.triu_indices(6, 2, -3, device=x.device).sum()
    ),
    "spherical_bessel_j0": lambda x: (
        torch.special.spherical_bessel_j0(x.detach() * 3) + torch.special.spherical_bessel_j0(x.detach() / 9)
    ),
    "narrow_copy": lambda x: torch.narrow_copy(x.detach(), 1, 2, 3),
    "entr": lambda x: torch.special.entr(x),
    "rrelu": lambda x: F.rrelu(x, 0.2, 0.3, training=False),
    "igamma": lambda x: torch.igamma(x.detach().abs(), x.abs()) + torch.igammac(x.detach().abs(), x.abs()),
    **{
        f"{name} {how}": (
            lambda x, name=name, how=how, more=more: getattr(F, name)(
                x, (x.detach() * 7 % 2 - 1).sign(), reduction=how, **more
            )
        )
        for how in ("none", "mean", "sum")
        for name, more in (
            ("mse_loss", {}),
            ("smooth_l1_loss", {"beta": 0.3}),
            ("smooth_l1_loss", {"beta": 0.0}),
            ("huber_loss", {"delta": 0.4}),
            ("soft_margin_loss", {}),
        )
    },
}
WITHOUT_GRADIENT = ("chunk_cat", "heaviside", "spherical_bessel_j0")


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_cpus(name):
    if name == "half logsigmoid" and torch.__version__ < "2.12":
        pytest.skip("this PyTorch's kernel rounds an intermediate result, and its decomposition does not")
    found = {}
    metrics.clear()
    for device in ("cpu", "xla"):
        torch.manual_seed(1)
        x = torch.randn(6, 8).to(device).requires_grad_(name not in WITHOUT_GRADIENT)
        y = CASES[name](x)
        if y.requires_grad:
            y.float().nansum().backward()
        found[device] = (y.detach().cpu(), None if x.grad is None else x.grad.cpu())
    torch.testing.assert_close(found["xla"], found["cpu"], rtol=1e-4, atol=1e-5, equal_nan=True)
    assert not [name for name in metrics.all_counters() if name.startswith("aten::")], "it ran on the CPU"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", [torch.nn.BatchNorm1d(3), torch.nn.GroupNorm(3, 3), torch.nn.LayerNorm(4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_norm_is_one_recorded_operation(norm, dtype, training):
    x = torch.randn(2, 3, 4, dtype=dtype) + 2
    here, there = copy.deepcopy(norm).to(dtype).train(training), copy.deepcopy(norm).to(dtype).to("xla")
    there.train(training)
    metrics.clear()
    a, b = x.clone().requires_grad_(), x.to("xla").requires_grad_()
    (here(a) * x).sum().backward()
    (there(b) * x.to("xla")).sum().backward()
    wants = {"BatchNorm1d": "batch_norm", "GroupNorm": "group_norm", "LayerNorm": "layer_norm"}
    name = wants[type(norm).__name__]
    found = [n for n in metrics.all_counters() if name in n]
    assert len(found) == 2 and all(n.startswith("xla::") for n in found), found
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(there(b).cpu(), here(a), **close)
    torch.testing.assert_close(b.grad.cpu(), a.grad, **close)
    for ours, theirs in zip(there.state_dict().values(), here.state_dict().values()):
        torch.testing.assert_close(ours.cpu(), theirs, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("running", [False, True])
def test_statistics_of_batches_have_the_cpus_type(dtype, running):
    x = torch.rand(3, 4).to(dtype)
    kept = (torch.zeros(4), torch.ones(4)) if running else (None, None)
    want = torch.ops.aten.batch_norm_update_stats(x, *kept, 0.1)
    got = torch.ops.aten.batch_norm_update_stats(
        x.to("xla"), *[t if t is None else t.to("xla") for t in kept], 0.1
    )
    for ours, theirs in zip(got, want):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-2, atol=1e-3)


WHOLE = {
    "softmax of a number": lambda x: torch.softmax(x[0, 0], 0) + torch.log_softmax(x[0, 1], -1),
    "softmax of nothing": lambda x: (
        torch.softmax(x[:0], 1).sum() + torch.softmax(x[:, :0], 1).sum() + x.sum()
    ),
    "softmax of a transposed tensor": lambda x: torch.softmax(x.t(), 0),
    "layer norm of nothing": lambda x: F.layer_norm(x[:0], [x.shape[1]]).sum() + x.sum(),
    "layer norm of two dimensions": lambda x: F.layer_norm(x, list(x.shape), x.detach() * 2, x.detach()),
    "group norm": lambda x: F.group_norm(x.reshape(2, 4, -1), 2, x[0, :4], x[1, :4]),
    "batch norm": lambda x: F.batch_norm(x, None, None, x[0], x[1], training=True),
    "nll of ignored rows": lambda x: F.nll_loss(
        x, torch.full((len(x),), -100, device=x.device), reduction="sum"
    ),
    "nll of one row": lambda x: F.nll_loss(x[0], torch.tensor(2, device=x.device)),
    "nll of images": lambda x: F.nll_loss(
        x.reshape(2, 4, -1), torch.arange(12, device=x.device).reshape(2, 6) % 4, reduction="none"
    ),
    "nll with weights": lambda x: F.cross_entropy(
        x, torch.arange(len(x), device=x.device), x[0].detach().abs()
    ),
    "gelu": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh") + F.silu(x),
    "cdist without columns": lambda x: torch.cdist(x[:, :0], x[:2, :0], float("inf")).sum() + x.sum(),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", WHOLE)
def test_ops_that_are_decomposed_where_they_are_lowered(name, dtype):
    if dtype is torch.bfloat16 and "cdist" in name:
        pytest.skip("aten's kernel has no bfloat16")
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    a, b = x.clone().requires_grad_(), x.to("xla").requires_grad_()
    close = {"rtol": 3e-2, "atol": 3e-2} if dtype is torch.bfloat16 else {}
    want, got = WHOLE[name](a), WHOLE[name](b)
    torch.testing.assert_close(got.cpu(), want, equal_nan=True, **close)
    assert got.stride() == want.stride()
    want.sum().backward()
    got.sum().backward()
    torch.testing.assert_close(b.grad.cpu(), a.grad, equal_nan=True, **close)


@pytest.mark.parametrize("op", [torch.softmax, torch.log_softmax], ids=lambda op: op.__name__)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32], ids=str)
def test_a_kernel_of_floats_takes_integers_only_where_there_are_none(op, dtype):
    nothing, some = torch.zeros(2, 0, dtype=dtype), torch.zeros(2, 3, dtype=dtype)
    found = op(nothing.to("xla"), 1)
    assert found.dtype is dtype and found.shape == nothing.shape
    for device in ("cpu", "xla"):
        with pytest.raises(NotImplementedError, match="not implemented for"):
            op(some.to(device), 1)


def test_common_layers_are_recorded_whole(monkeypatch):
    slow = []
    monkeypatch.setattr(dispatch, "_without_lowering", lambda func, *_: slow.append(func))
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.GELU(),
    ).eval()
    x = torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        torch.testing.assert_close(layers.to("xla")(x.to("xla")).cpu(), layers.to("cpu")(x))
    assert not slow


def test_types_and_layouts_of_a_decomposed_op_are_asked_for_once_a_kind(monkeypatch):
    asked = []
    check = dispatch.check_types
    monkeypatch.setattr(dispatch, "check_types", lambda *args: (asked.append(args), check(*args)))
    x = torch.randn(5, 7)
    for row in (x, x + 1, x.t(), x.t() * 2):
        ours, theirs = F.hardswish(row.to("xla")), F.hardswish(row)
        torch.testing.assert_close(ours.cpu(), theirs)
        assert ours.stride() == theirs.stride()
    assert len(asked) == 2  # as rows and as columns
    for _ in range(2):
        with pytest.raises(RuntimeError):
            F.hardswish(torch.ones(3, dtype=torch.int64).to("xla"))
