"""Tensors: attributes, methods, indexing, views, writes, and what depends on data."""

from __future__ import annotations

import pytest

from .harness import Theme

PRELUDE = r"""
import copy, math, torch
import torch.nn as nn, torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
lin = nn.Linear(4, 4); par = nn.Parameter(torch.ones(4)); norm = nn.BatchNorm1d(4); idx = torch.tensor([0, 2]); const = torch.arange(12.).view(3, 4)
buf = torch.zeros(3)
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x + x
    @staticmethod
    def backward(ctx, g): return g * 2
"""

TABLE = r"""
x.shape, x.size(), x.size(0), x.dim(), x.ndim, x.numel(), x.dtype, x.device, x.is_cuda, x.requires_grad, x.stride(), x.layout, len(x), x.element_size(), x.itemsize, x.is_leaf
x.is_contiguous(), x.t().is_contiguous(), x.is_floating_point(), x.is_complex(), torch.is_tensor(x), x.type(), x.storage_offset(), x.nbytes, x.get_device()
x[0], x[-1], x[1:, :2], x[..., 0], x[None], x[:, None, 1:3], x[idx], x[[0, 1]], x[:, idx], x[idx, idx], x[::2], x[1, 2], x[True], x[torch.tensor([True, False, True])] #2
x[0].item() #2
x.sum(torch.arange(0, 2).tolist()), [x + a.item() for a in torch.linspace(0, 1, 3)], x * torch.tensor(3.0).item(), int(torch.tensor(2.7)), float(torch.tensor(2)), torch.full((2,), len(x)).tolist()
torch.tensor(1).item() == 1, torch.tensor([[1, 2], [3, 4]]).tolist(), (torch.arange(3) * 2 + 1).max().item() > 4, torch.tensor([1.0]).item() + x
x > 0, x == x, x != 0, (x > 0).any(), (x > 0).all(), x.isnan(), x.sign(), x.abs(), x.neg(), x.exp(), x.log1p(), x.sqrt(), x.rsqrt(), x.sigmoid(), x.tanh(), x.relu(), x.floor(), x.round()
x.sum(), x.sum(0), x.sum(dim=1, keepdim=True), x.mean(), x.mean(-1), x.std(), x.var(0), x.max(), x.max(0), x.min(1).values, x.argmax(), x.argmin(1), x.prod(), x.cumsum(0), x.norm(), x.median(), x.logsumexp(0)
x.view(4, 3), x.view(-1), x.reshape(2, 6), x.flatten(), x.t(), x.T, x.mT, x.permute(1, 0), x.transpose(0, 1), x.unsqueeze(0), x[None].squeeze(0), x.expand(2, 3, 4), x.repeat(2, 1), x.flip(0), x.roll(1, 0), x.contiguous(), x.unfold(0, 2, 1), x.swapaxes(0, 1), x.movedim(0, 1), x.narrow(0, 0, 2), x.diagonal()
x.split(2), x.chunk(2, 1), x.unbind(0), torch.cat([x, x]), torch.stack([x, x], 1), torch.hstack([x, x]), torch.split(x, [1, 2]), torch.tensor_split(x, 2), x.tile(2), torch.meshgrid(x[0], x[1], indexing="ij")
x.to(torch.float64), x.double(), x.half().float(), x.int(), x.long(), x.bool(), x.to("cpu"), x.type(torch.int32), x.to(const), x.type_as(const), x.clone(), x.detach(), x.data, x.cpu(), x.float()
x + const, x * lin.weight[:3], x @ lin.weight, torch.matmul(x, x.T), x.mm(x.T), torch.einsum("ij,kj->ik", x, x), x.mv(x[0]), x.dot(x) if x.ndim == 1 else x[0].dot(x[1]), torch.outer(x[0], x[1]), x.addmm(x @ x.T, x), torch.bmm(x[None], x.T[None])
torch.zeros(2), torch.ones(2, 3), torch.full((2,), 3.), torch.arange(5), torch.arange(1, 5, 2), torch.linspace(0, 1, 3), torch.eye(2), torch.empty(2).shape, torch.zeros_like(x), torch.ones_like(x, dtype=torch.int64), torch.full_like(x, 2), x.new_zeros(2), x.new_tensor([1, 2]), torch.tensor([1, 2]), torch.tensor(3.), torch.tensor([[1], [2]]), torch.scalar_tensor(2.), torch.tensor(True)
torch.where(x > 0, x, 0), torch.where(x > 0, x, -x), x.masked_fill(x > 0, 0), x.clamp(0, 1), x.clamp(min=0), x.clip(-1, 1), torch.maximum(x, -x), x.lerp(const, 0.5), x.gather(1, torch.zeros(3, 1, dtype=torch.long)), x.index_select(0, idx), x.take(idx), x.scatter(1, torch.zeros(3, 1, dtype=torch.long), 5.), x.tril(), x.triu(), x.topk(2), x.sort(), x.argsort(), x.unique().shape, torch.searchsorted(x[0].sort().values, x[1]) #2
F.relu(x), F.gelu(x), F.softmax(x, -1), F.log_softmax(x, 1), F.layer_norm(x, (4,)), F.linear(x, lin.weight), F.mse_loss(x, const), F.cross_entropy(x, torch.tensor([0, 1, 2])), F.pad(x, (1, 1)), F.one_hot(idx, 3), F.embedding(idx, x), F.embedding_bag(idx[None], x), F.embedding_bag(idx, x, idx[:1], mode="sum"), F.embedding_bag(idx[None], x, mode="max"), F.normalize(x), F.cosine_similarity(x, const), F.dropout(x, 0.0), F.silu(x), F.softplus(x), F.smooth_l1_loss(x, const), F.scaled_dot_product_attention(x[None], x[None], x[None]), F.interpolate(x[None, None], scale_factor=2), F.conv1d(x[None], x.new_ones(2, 3, 2)), F.max_pool1d(x[None], 2), F.glu(x), F.logsigmoid(x), F.threshold(x, 0, 0), F.binary_cross_entropy_with_logits(x, const.clamp(0, 1))
lin(x), lin(x).requires_grad, par * 2, par.shape, isinstance(par, nn.Parameter), lin.weight.is_leaf, nn.ReLU()(x), nn.Sequential(lin, nn.Tanh())(x), lin.weight.grad_fn is None
lin.weight.grad is None #3
torch.tensor([1.0, 2.0], requires_grad=True) * 2, torch.tensor(1.0, requires_grad=True).is_leaf, torch.ones(2, requires_grad=True).grad_fn is None
nn.Linear(2, 2)(x[:, :2]), nn.Parameter(torch.ones(2)).requires_grad, type(nn.Parameter(x * 2)).__name__, nn.Parameter(torch.ones(4)) * x, isinstance(nn.Parameter(torch.ones(2)), torch.Tensor), nn.Embedding(3, 2)(idx), nn.Sequential(nn.Linear(4, 3), nn.ReLU())(x), nn.LayerNorm(4)(x), nn.MultiheadAttention(4, 2)(x, x, x)[0], nn.BatchNorm1d(4)(x), nn.Conv1d(3, 2, 1)(x[None])
x.type(torch.LongTensor), x.type(torch.DoubleTensor), torch.autograd._profiler_enabled(), Doubled().apply(x), Doubled.apply(x)
torch.autograd.grad((lin(x) ** 2).sum(), lin.parameters()), torch.autograd.grad((m := copy.deepcopy(lin))(x).sum(), m.parameters())
copy.deepcopy(lin)(x), copy.deepcopy(lin).weight is lin.weight, copy.copy(lin).weight is lin.weight, copy.deepcopy(norm)(x), copy.deepcopy([x, 1]), copy.deepcopy(par) * x, copy.deepcopy(nn.Linear(4, 4))(x), sorted(copy.deepcopy(norm).state_dict())
nn.Parameter(x), copy.deepcopy(lin(x)) #2
torch.is_grad_enabled(), torch.get_default_dtype(), torch.promote_types(torch.int32, torch.float16), torch.result_type(x, 1), torch.finfo(torch.float32).eps, torch.iinfo(torch.int8).max, torch.can_cast(torch.float32, torch.int32), torch.broadcast_shapes((3, 1), (1, 4)), torch.Size([1, 2]) + (3,), torch.Size((2, 3)).numel(), torch.device("cpu").type, torch.float32.is_floating_point, torch.float32.itemsize, torch.float16.to_complex()
str(x.dtype), repr(torch.float32), x.dtype == torch.float32, x.dtype in (torch.float16, torch.float32), {torch.float32: 1}[x.dtype], x.device.type == "cpu", x.shape[0] * 2, x.shape[-1] // 2, x.shape[:1], [*x.shape], list(x.size()), tuple(x.shape), math.prod(x.shape), x.shape.numel(), (*x.shape[:-1], 2, 2), x.shape + (1,), len(x.shape), x.shape == torch.Size((3, 4)), x.shape == [3, 4], x.stride(0), x.size(dim=1)
x.view(3, torch.div(x.size(1), 2, rounding_mode="trunc"), 2), x.reshape([torch.tensor(4), 3]), x.new_zeros(size=(torch.arange(3)[2] + 1, 2)), torch.ones((torch.tensor(2), 3)), x.expand(torch.tensor(2), -1, -1), x.as_strided((torch.tensor(2), 2), (1, 2)), x.view(torch.tensor(12)), torch.zeros(torch.tensor(2)), x.view(torch.tensor(4.), 3), x.view(torch.tensor(5), 2)
complex(1, 2) * x, torch.complex(x, x).abs(), torch.view_as_real(torch.complex(x, x)), torch.fft.fft(x).real, x.to(torch.complex64).conj().imag, torch.polar(x.abs(), x).angle()
torch.linalg.norm(x), torch.linalg.det(x[:, :3]), torch.linalg.qr(x)[1].shape, torch.linalg.svd(x).S, torch.det(x[:, :3])
torch.linalg.solve(torch.eye(3), x) #2
torch.linalg.inv(x[:3, :3] @ x[:3, :3].T + torch.eye(3)) #2
x.bool().any().item(), x.tolist(), x.sum().item() > 100, float(x.sum()) == 3, int(torch.tensor(3)), bool(torch.tensor(True)), torch.nonzero(x > 0), x[x > 0].shape, x.sum() in [1], [1, 2, 3][torch.tensor(1)], torch.equal(x, x), torch.allclose(x, x), range(torch.tensor(2)) #4
x.numpy().shape, x.detach().numpy() is not None, str(torch.tensor([1])) #4
x.numpy().imag.sum(), torch.from_numpy(x.numpy().real), torch.from_numpy((x.numpy() * 2).imag[1:] + 1), x.numpy().imag.dtype
torch._dynamo.mark_static(x * 2), torch._dynamo.mark_static(x + 1, 0), torch._dynamo.mark_static(x * 2, index=-1)
torch.ops.aten.add(x, 1), torch.ops.aten.relu.default(x), torch._C._nn.gelu(x), torch.special.expit(x), torch.Tensor.add(x, 1), torch.Tensor.sum(x), torch.nn.functional.relu6(x), torch.add(x, 1, alpha=2), torch.sub(x, 1), torch.true_divide(x, 2), torch.pow(x, 2), torch.square(x), torch.addcmul(x, x, x)

    y = x.clone(); y[0] = 1; y[:, 1] += 2; y[y > 1] = 0; y[idx] = 5.
    return y

    y = x.clone(); y.add_(1).mul_(2); y.zero_(); y.fill_(3); y.copy_(x); y.clamp_(0)
    return y

    y = x.clone(); v = y[0]; v.fill_(7); w = y.view(-1); w[1] = 9
    return y, v, w

    x.add_(1)
    return x

    x[0] = 0; x[1].mul_(3)
    return x.sum()

    buf.add_(1)
    return buf.clone()

    S[1]["t"] = x; S[1]["t"].mul_(2)
    return x

    y = x
    for i in range(3): y = y + i * x
    return y

    outs = []
    for row in x: outs.append(row.sum())
    return torch.stack(outs), len(outs)

    a, b, c = x
    return a * b + c

    v, i = x.max(1)
    r = x.sort(dim=1)
    return v, i, r.values, r.indices

    if x.sum() > 0: return x + 1
    return x - 1 #2

    n = int((x > 0).sum())
    return x[:n] #2

    if x.ndim == 2 and x.shape[1] == 4 and not x.requires_grad: return x * 3
    return x

    y = x.requires_grad_()
    return y.requires_grad #2

    y = x.detach().requires_grad_()
    z = (y * y).sum(); z.backward()
    return y.grad #3

    y = x.detach().clone().requires_grad_()
    g, = torch.autograd.grad((y ** 3).sum(), y)
    return g #3

    y = lin(x); z = y.detach()
    return y.requires_grad, z.requires_grad, z

    with torch.no_grad(): lin.weight.mul_(1.0)
    return lin(x)

    h = None
    for i, layer in enumerate([lin, torch.tanh, lin]): h = layer(x if h is None else h)
    return h

    x.tag = "t"
    return x.tag, hasattr(x, "nope")

    torch.manual_seed(1)
    return torch.rand(2) #3

    state = torch.get_rng_state(); a = torch.rand(2); torch.set_rng_state(state)
    return a == torch.rand(2) #4

    return torch.rand(2), torch.randn_like(x), F.dropout(x, 0.5), torch.randint(0, 5, (2,)), torch.randperm(3), x.bernoulli(0.5), torch.empty(2).normal_()

    d = {k: v for k, v in zip("abc", x)}
    return d["a"] + d["b"], sorted(d)

    y = torch.empty(3, 4); torch.add(x, 1, out=y)
    return y

    return torch.func.functional_call(lin, dict(lin.named_parameters()), (x,))

    from torch.utils.checkpoint import checkpoint
    return checkpoint(lin, x, use_reentrant=False)

    return torch.LongTensor([1, 2]), torch.FloatTensor([1.0]), torch.Tensor([1, 2])

    t = torch.utils._pytree.tree_map(lambda v: v * 2, {"a": x, "b": [x, 3]})
    return t

    q = x.view(1, 3, 4)
    with sdpa_kernel(SDPBackend.MATH): return F.scaled_dot_product_attention(q, q, q), torch._C._get_flash_sdp_enabled()

    q = x.view(1, 3, 4)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True), sdpa_kernel(SDPBackend.FLASH_ATTENTION): a = F.scaled_dot_product_attention(q, q, q)
    return a, torch._C._get_sdp_priority_order(), torch._C._get_flash_sdp_enabled()

    q = x.view(1, 3, 4)
    with sdpa_kernel(SDPBackend.MATH):
        print(torch._C._get_flash_sdp_enabled())
        q = F.scaled_dot_product_attention(q, q, q)
    return q, torch._C._get_flash_sdp_enabled() #2

    try:
        with sdpa_kernel(SDPBackend.MATH): raise KeyError
    except KeyError: return x + torch._C._get_flash_sdp_enabled()
"""

theme = Theme(PRELUDE, TABLE)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("at", range(len(theme.cases)))
def test_as_in_eager(at: int) -> None:
    theme.check(at)
