"""Shape inference gives what eager gives: sizes, strides, types, aliasing, over layouts and promotions."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from dynamotor.graph.shape_tensor import DataDependent, ShapeTensor, UnsupportedOp, shape_mode
from dynamotor.graph.shapes import infer_spec
from dynamotor.graph.spec import TensorSpec

aten = torch.ops.aten


def layouts(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The same shape contiguous, permuted, sliced, expanded and (4-d) channels-last."""

    def data(*s: int) -> torch.Tensor:
        return (torch.rand(s) * 4 + 0.5).to(dtype)

    rank = len(shape)
    found = [data(*shape)]
    if rank >= 2:
        found.append(data(*shape[::-1]).permute(*reversed(range(rank))))
        found.append(data(*[s * 2 for s in shape])[tuple(slice(None, None, 2) for _ in shape)])
        found.append(data(*shape[:-1], 1).expand(*shape))
        found.append(data(shape[1], shape[0], *shape[2:]).transpose(0, 1))
    if rank == 4:
        found.append(data(*shape).to(memory_format=torch.channels_last))
    return found


def shaped(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return ShapeTensor.make(TensorSpec.of(value), value.requires_grad)
    if isinstance(value, (tuple, list)):
        return type(value)(shaped(v) for v in value)
    return value


def describe(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), tuple(value.stride()), value.dtype
    if isinstance(value, (tuple, list)):
        return [describe(v) for v in value]
    return value


def agree(fn, *args, **kwargs) -> None:
    with torch.no_grad():
        expected = fn(*args, **kwargs)
        with shape_mode():
            actual = fn(*shaped(args), **{k: shaped(v) for k, v in kwargs.items()})
    got, want = describe(actual), describe(expected)
    assert got == want, f"{[describe(a) for a in args]}: {got}, eager {want}"


UNARY = [
    torch.sin,
    torch.neg,
    torch.relu,
    F.gelu,
    torch.sqrt,
    F.silu,
    torch.isnan,
    torch.sign,
    F.hardswish,
    torch.clone,
    torch.logical_not,
    lambda x: x.to(torch.bfloat16),
    lambda x: x.double(),
    lambda x: x.contiguous(),
    lambda x: x + 1,
    lambda x: x * 2.5,
    lambda x: 1 / x,
    lambda x: x > 0,
    lambda x: x.clamp(0, 1),
    torch.empty_like,
    torch.zeros_like,
    lambda x: x.masked_fill(x > 1, 0.0),
    lambda x: x**2,
    lambda x: x.pow(0.5),
    lambda x: torch.where(x > 1, x, 0.0),
    lambda x: x.to(memory_format=torch.preserve_format, dtype=torch.float16),
    torch.tanh,
    lambda x: x.abs_().neg_(),
]


@pytest.mark.parametrize("fn", UNARY)
def test_unary(fn):
    for shape in [(), (3,), (2, 3), (2, 1, 3), (2, 3, 4, 5), (2, 3, 1, 1), (1, 3, 4, 5), (0, 3)]:
        for x in layouts(*shape):
            if not (fn is UNARY[-1] and 0 in x.stride()):
                agree(fn, x)


@pytest.mark.parametrize(
    "fn",
    [
        torch.add,
        torch.mul,
        torch.sub,
        torch.div,
        torch.maximum,
        torch.lt,
        torch.pow,
        torch.atan2,
        lambda a, b: torch.where(a > b, a, b),
        lambda a, b: torch.addcmul(a, a, b),
    ],
)
def test_binary_layouts(fn):
    pairs = [
        ((2, 3), (2, 3)),
        ((2, 3), (3,)),
        ((2, 1, 4), (3, 1)),
        ((2, 3, 4, 5), (2, 3, 4, 5)),
        ((2, 3, 4, 5), (3, 1, 1)),
        ((2, 3, 4, 5), (1, 3, 1, 1)),
        ((2, 3), ()),
        ((1, 3, 1, 1), (2, 1, 4, 5)),
    ]
    for a, b in pairs:
        for x, y in itertools.product(layouts(*a), layouts(*b)):
            agree(fn, x, y)


def test_type_promotion():
    types = [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    ]
    for a, b in itertools.product(types, types):
        for x, y in [
            (torch.ones(2, 3).to(a), torch.ones(3).to(b)),
            (torch.ones(2).to(a), torch.ones(()).to(b)),
            (torch.ones(()).to(a), torch.ones(()).to(b)),
        ]:
            agree(torch.add, x, y)
            agree(torch.div, x, y)
            agree(torch.eq, x, y)
        for scalar in (2, 2.5, True):
            agree(torch.mul, torch.ones(2).to(a), scalar)
            agree(lambda x, s=scalar: torch.where(x > 0, x, s), torch.ones(2).to(a))


REDUCTIONS = [
    lambda x: x.sum(-1),
    lambda x: x.mean(0, keepdim=True),
    lambda x: x.sum(),
    lambda x: x.amax((0, -1)),
    lambda x: x.max(-1),
    lambda x: x.std(-1),
    lambda x: x.var(0, correction=0),
    lambda x: x.argmax(-1),
    lambda x: F.softmax(x, -1),
    lambda x: F.softmax(x, 0),
    lambda x: F.log_softmax(x, -1),
    lambda x: x.cumsum(0),
    lambda x: x.logsumexp(-1),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x.norm(dim=-1),
    lambda x: x.prod(0),
    lambda x: torch.var_mean(x, -1),
    lambda x: x.any(-1),
    lambda x: x.sort(-1),
    lambda x: x.topk(1, -1),
    lambda x: x.sum((0, 1), keepdim=True),
    lambda x: x.sum(-1, dtype=torch.float64),
]


@pytest.mark.parametrize("fn", REDUCTIONS)
def test_reductions(fn):
    for shape in [(2, 3), (2, 3, 4), (2, 3, 4, 5)]:
        for x in layouts(*shape):
            agree(fn, x)


VIEWS = [
    lambda x: x.transpose(0, 1),
    lambda x: x.reshape(-1),
    lambda x: x.flatten(1),
    lambda x: x.unsqueeze(1),
    lambda x: x[0],
    lambda x: x[:, 1:],
    lambda x: x[..., ::2],
    lambda x: x.split(1, 1),
    lambda x: x.chunk(2, 0),
    lambda x: x.unbind(1),
    lambda x: x.expand(3, *x.shape),
    lambda x: x.permute(*reversed(range(x.dim()))),
    lambda x: x.diagonal(),
    lambda x: torch.cat([x, x], 1),
    lambda x: torch.stack([x, x]),
    lambda x: x.repeat(2, *[1] * (x.dim() - 1)),
    lambda x: x.flip(0),
    lambda x: x.roll(1, 0),
    lambda x: F.pad(x, (1, 2)),
    lambda x: x.tril(),
    lambda x: x[None, :, None],
    lambda x: x.movedim(0, -1),
    lambda x: x.unfold(1, 2, 1),
    lambda x: x.narrow(1, 0, 2),
    lambda x: x.squeeze(),
    lambda x: x.repeat_interleave(2, dim=1),
    lambda x: torch.cat([x, x.contiguous()], 0),
    lambda x: x.unflatten(1, (3, 1)),
    lambda x: x.view_as(x),
]


@pytest.mark.parametrize("fn", VIEWS)
def test_views_and_copies(fn):
    for shape in [(2, 3), (2, 3, 4), (2, 3, 4, 6)]:
        for x in layouts(*shape):
            agree(fn, x)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: F.conv2d(x, w, padding=1),
        lambda x, w: F.conv2d(x, w, torch.ones(6, dtype=x.dtype), stride=2),
        lambda x, w: F.conv2d(x, w[:, :1], groups=3),
        lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1), stride=2),
        lambda x, w: F.conv2d(x, w[:, :, :1, :1]),
    ],
)
def test_convolutions(fn):
    for x, w in itertools.product(layouts(2, 3, 8, 8), layouts(6, 3, 3, 3)):
        agree(fn, x, w)
        agree(fn, x.double(), w.double())


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 3, 2, 1),
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: F.adaptive_avg_pool2d(x, 3),
        lambda x: F.interpolate(x, scale_factor=2),
        lambda x: F.adaptive_max_pool2d(x, 2),
        lambda x: F.interpolate(x, size=(5, 7), mode="bilinear"),
        lambda x: F.interpolate(x, size=(5, 7), mode="bicubic"),
        lambda x: F.batch_norm(x, torch.ones(4), torch.ones(4), training=True),
        lambda x: F.pixel_shuffle(x, 2),
        lambda x: F.batch_norm(x, torch.ones(4), torch.ones(4)),
        lambda x: F.group_norm(x, 2),
        lambda x: F.unfold(x, 2),
        lambda x: F.dropout(x, 0.2),
        lambda x: F.instance_norm(x),
        lambda x: F.dropout2d(x),
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5),
        lambda x: torch.native_batch_norm(x, None, None, torch.ones(4), torch.ones(4), False, 0.1, 1e-5),
        lambda x: torch.ops.aten._batch_norm_no_update(x, *[torch.ones(4)] * 4, 0.1, 1e-5),
        lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    ],
)
def test_image_ops(fn):
    for x in layouts(2, 4, 6, 6):
        agree(fn, x)


def test_layer_norm_statistics_follow_the_weights():
    for x in (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bfloat16)):
        agree(lambda x: torch.native_layer_norm(x, (3,), None, None, 1e-5), x)
        agree(lambda x: torch.native_layer_norm(x, (3,), torch.ones(3), torch.ones(3), 1e-5), x)
        agree(lambda x: torch.native_layer_norm(x, (3,), torch.ones(3, dtype=x.dtype), None, 1e-5), x)


def test_convolutions_of_rows():
    for x, w in itertools.product(layouts(2, 3, 8), layouts(6, 3, 3)):
        for dtype in (torch.float32, torch.float64):
            agree(lambda x, w: F.conv1d(x, w, padding=1), x.to(dtype), w.to(dtype))
            agree(lambda x, w: F.conv_transpose1d(x, w.transpose(0, 1), stride=2), x.to(dtype), w.to(dtype))


def test_matrix_products():
    for a, b in itertools.product(layouts(4, 3), layouts(3, 5)):
        agree(torch.mm, a, b)
        agree(torch.addmm, torch.ones(5), a, b)
        agree(lambda a, b: F.linear(a, b.t(), torch.ones(5)), a, b)
    for a, b in itertools.product(layouts(2, 4, 3), layouts(2, 3, 5)):
        agree(torch.bmm, a, b)
        agree(torch.matmul, a, b)
        agree(torch.matmul, a, b[0])
        agree(lambda a, b: F.linear(a, b[0].t()), a, b)
        agree(lambda a, b: torch.einsum("bij,bjk->bki", a, b), a, b)
        agree(lambda a, b: torch.baddbmm(torch.ones(5), a, b), a, b)
    for a, b in itertools.product(layouts(2, 3, 4, 5), layouts(2, 3, 5, 6)):
        agree(torch.matmul, a, b)
    agree(torch.mv, torch.ones(3, 4), torch.ones(4))
    agree(torch.dot, torch.ones(4), torch.ones(4))


def test_attention():
    for q in layouts(2, 3, 4, 8):
        agree(F.scaled_dot_product_attention, q, q, q)
        agree(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), q)
        agree(
            lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(4, 4, dtype=torch.bool)), q
        )
        agree(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), q)


def test_indexing_and_losses():
    i = torch.tensor([[0, 1], [1, 0]])
    for x in layouts(3, 4):
        agree(lambda x: x[i], x)
        agree(lambda x: x[:, i], x)
        agree(lambda x: x[i, i], x)
        agree(lambda x: x.index_select(1, i[0]), x)
        agree(lambda x: x.gather(0, i), x)
        agree(lambda x: x.scatter(0, i, 2.0), x)
        agree(lambda x: x.index_put((i,), torch.ones(())), x)
        agree(lambda x: x.index_add(0, i[0], torch.ones(2, 4)), x)
        agree(lambda x: F.embedding(i, x), x)
        agree(lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2])), x)
        agree(lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2]), reduction="none"), x)
        agree(lambda x: F.mse_loss(x, x), x)
    none = torch.empty(2, 0, dtype=torch.int64)  # no position, so that none is out of bounds
    agree(lambda x: x[none, :, torch.tensor([[1], [2]])], torch.rand(0, 3, 0))
    agree(lambda x: x[none], torch.rand(0, 3))


def test_factories():
    for fn in [
        lambda: torch.arange(5),
        lambda: torch.arange(0, 1, 0.25),
        lambda: torch.ones(2, 3),
        lambda: torch.full((2,), 3),
        lambda: torch.eye(3),
        lambda: torch.linspace(0, 1, 5),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: torch.randn(2, 3),
        lambda: torch.rand(2, 3, dtype=torch.float64),
        lambda: torch.randint(0, 5, (2,)),
        lambda: torch.zeros(2, device="cpu"),
        lambda: torch.randperm(4),
        lambda: torch.triu(torch.ones(3, 3)),
        lambda: torch.full((2, 2), float("-inf")),
    ]:
        agree(fn)


def test_views_share_memory_and_writes_return_their_argument():
    x = shaped(torch.ones(3, 4))
    assert x.view(12).memory is x.memory and x.t()[0].memory is x.memory and x.detach().memory is x.memory
    assert all(part.memory is x.memory for part in x.split(2))
    assert x.clone().memory is not x.memory
    assert x.add_(1) is x and x.mul_(2) is x
    y = x.t_()
    assert y is x and x.shape == (4, 3) and x.stride() == (1, 4)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.item(),
        lambda x: bool(x),
        lambda x: torch.nonzero(x),
        lambda x: x[x > 0],
        lambda x: torch.unique(x),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: float(x),
        lambda x: torch.equal(x, x),
    ],
)
def test_data_dependence_is_refused(fn):
    with pytest.raises(DataDependent, match="DM210"):
        fn(shaped(torch.ones(1)))


def test_storage_changes_are_refused():
    for fn in (lambda x: x.resize_(5), lambda x: x.set_(shaped(torch.ones(2)))):
        with pytest.raises(UnsupportedOp, match="DM241"):
            fn(shaped(torch.ones(3)))


def test_errors_are_pytorchs_own():
    with pytest.raises(RuntimeError, match="reduction dim|mat1 and mat2"):
        shaped(torch.ones(2, 3)) @ shaped(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="broadcast|must match|size of tensor"):
        shaped(torch.ones(2, 3)) + shaped(torch.ones(2, 4))


def test_autograd_runs_above():
    x = ShapeTensor.make(TensorSpec.dense((2, 3), torch.float32), requires_grad=True)
    y = F.linear(x, shaped(torch.ones(4, 3))).relu().sum()
    (g,) = torch.autograd.grad(y, x)
    assert g.shape == (2, 3) and y.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, shaped(torch.ones(4, 3))).dtype is torch.bfloat16
    with torch.no_grad():
        assert not (x * 2).requires_grad


MASK, AT = torch.ones(5, 5, dtype=torch.bool), torch.zeros(5, 1, dtype=torch.int64)


def t(*shape, order=None, dtype=torch.float32):
    """Ones with dimensions from slowest to fastest as `order` says; a dimension of -n is of n expanded
    elements.
    """
    order = order or range(len(shape))
    memory = torch.ones([max(shape[d], 1) for d in order], dtype=dtype)
    tensor = memory.permute([list(order).index(d) for d in range(len(shape))])
    return tensor.expand([abs(n) for n in shape])


@pytest.mark.parametrize(
    "func, args",
    [
        (aten.index.Tensor, (t(2), [t(2, 2, order=(1, 0), dtype=torch.int64)])),
        (aten.index.Tensor, (t(3, 3, 1, 1, order=(1, 0, 2, 3)), [t(3, 2, order=(1, 0), dtype=torch.int64)])),
        (
            aten.index.Tensor,
            (t(3, 2, 3), [t(2, 3, order=(1, 0), dtype=torch.int64), None, t(3, dtype=torch.int64)]),
        ),
        (aten.index.Tensor, (t(3, 2), [None, t(2, -4, dtype=torch.int64)])),
        (aten.ldexp.Tensor, (torch.ones(()), t(2, 3, order=(1, 0)))),
        (aten.leaky_relu_backward.default, (t(3, 4), t(3, 4, order=(1, 0)), 0.1, False)),
        (aten.binary_cross_entropy_backward.default, (t(3, 4), t(3, 4, order=(1, 0)), t(3, 4))),
        (aten.normal.Tensor_Tensor, (t(3, 4, order=(1, 0)), t(3, 4, order=(1, 0)))),
        (aten.huber_loss.default, (torch.ones(()), torch.ones((), dtype=torch.float64))),
        (aten.lt.Tensor, (t(-8, 8, dtype=torch.bool), t(8, 8, order=(1, 0), dtype=torch.bfloat16))),
        (aten.div.Tensor, (t(-3, 2, dtype=torch.int64), t(3, 2, order=(1, 0), dtype=torch.int64))),
        (aten.where.self, (t(-3, 2).bool(), t(3, -2, dtype=torch.float64), t(3, 2, order=(1, 0)))),
        (aten.rsub.Tensor, (t(2, 3, order=(1, 0)), t(-2, 3, dtype=torch.bfloat16))),
        (aten._unsafe_masked_index.default, (torch.ones(0, 1, 3), MASK, [AT, AT.T], 0.5)),
        (aten._unsafe_masked_index.default, (torch.ones(3, 3, 0), MASK, [AT], 0.5)),
        (aten._unsafe_masked_index.default, (torch.ones(3, 0, 3), MASK, [None, AT.T], 0.5)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_strides_and_types_of_odd_operands(func, args):
    def spec(value):
        return (
            TensorSpec.of(value)
            if isinstance(value, torch.Tensor)
            else list(map(spec, value))
            if isinstance(value, list)
            else value
        )

    want, got = func(*args), infer_spec(func, tuple(map(spec, args)), {})
    assert got.dtype is want.dtype and got.shape == tuple(want.shape)
    assert [s for n, s in zip(want.shape, got.stride, strict=True) if n > 1] == [
        s for n, s in zip(want.shape, want.stride(), strict=True) if n > 1
    ]


LOSSES = {
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "weighted": lambda x, y: F.binary_cross_entropy_with_logits(x, y, weight=y, pos_weight=x.detach()[0]),
    "each": lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
    "cross_entropy": F.cross_entropy,
    "smoothed": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1, reduction="none"),
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "kl_div": F.kl_div,
    "poisson": F.poisson_nll_loss,
    "soft_margin": F.soft_margin_loss,
    "cosine": lambda x, y: F.cosine_embedding_loss(x, y, y.sign()[:, 0]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_two_types_have_the_kernels(name):
    """By PyTorch's version, the meta kernel says another type than the kernel has."""
    floats = torch.float32, torch.float64, torch.bfloat16, torch.float16
    for mine, other in itertools.product(floats, floats):
        x, y = torch.rand(3, 4).to(mine), torch.rand(3, 4).to(other)
        want = LOSSES[name](x, y)
        with shape_mode():
            got = LOSSES[name](*[ShapeTensor.make(TensorSpec.of(value)) for value in (x, y)])
        assert (got.dtype, got.shape) == (want.dtype, want.shape), (mine, other)
