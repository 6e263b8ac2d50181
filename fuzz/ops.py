"""The lines that random programs are made of: rows of text, and functions for those that depend on sizes.

A row's `{0}`, `{1}` are tensors; the generator runs each line at once and drops it where PyTorch refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .generate import Generator

Line = tuple[str, tuple[int, ...]] | tuple[str, tuple[int, ...], int]  # text, operands, results

UNARY = """
-{0} | {0}.abs() | {0}.exp() | ({0}.abs() + 0.5).log() | ({0}.abs() + 0.25).sqrt()
({0}.abs() + 0.25).rsqrt() | {0}.sin() | {0}.cos() | {0}.tanh() | {0}.sigmoid() | {0}.relu() | F.gelu({0})
F.gelu({0}, approximate="tanh") | F.silu({0}) | F.mish({0}) | F.hardswish({0}) | F.hardsigmoid({0})
F.relu6({0}) | {0}.square() | {0}.erf() | {0}.erfc() | {0}.atan() | {0}.asinh() | {0}.sinh() | {0}.expm1()
{0}.abs().log1p() | ({0}.abs() + 1).reciprocal() | {0}.floor() | {0}.ceil() | {0}.round() | {0}.trunc()
{0}.frac() | {0}.sign() | F.leaky_relu({0}, 0.1) | F.elu({0}) | F.selu({0}) | F.softplus({0})
F.hardtanh({0}) | F.softsign({0}) | F.logsigmoid({0}) | F.celu({0}, 0.5) | F.tanhshrink({0})
F.softshrink({0}) | F.hardshrink({0}) | F.threshold({0}, 0.25, 1.0) | {0}.clamp(-0.5, 0.75) | {0}.clamp(min=0)
{0}.clamp(max=1) | {0}.isnan() | {0}.isfinite() | {0}.logical_not() | ~{0} | {0}.positive() | {0}.neg()
{0}.deg2rad() | {0}.exp2() | {0}.sgn() | {0}.signbit() | {0}.isinf() | {0}.nan_to_num(0.5, 2.0, -2.0)
torch.sinc({0}) | torch.special.xlogy({0}.abs(), {0}.abs() + 1) | {0}.lgamma() | {0}.cosh() | {0}.clone()
torch.special.bessel_j0({0})
{0}.contiguous() | {0}.detach() | torch.zeros_like({0}) | torch.ones_like({0}) | torch.full_like({0}, 2)
{0} + 1 | {0} * 2 | {0} - 0.5 | {0} / 3 | 2 - {0} | 1 / ({0}.abs() + 1) | {0} ** 2 | {0} ** 3
{0}.abs() ** 0.5 | 2 ** {0} | {0} > 0 | {0} <= 0.5 | {0} == 1 | {0} != 0 | {0} % 3 | {0} // 2
torch.fmod({0}, 2) | {0} & 3 | {0} | 4 | {0} ^ 1 | {0} << 2 | {0} >> 1 | {0} * True | {0}.add(1, alpha=2)
torch.rsub({0}, 1) | {0}.bool() | {0}.heaviside(torch.ones((), dtype={0}.dtype))
torch.where({0} > 0, {0}, 0) | torch.where({0} > 0, 1.5, {0}) | {0}.masked_fill({0} > 0, 0)
{0}.masked_fill({0} < 0, -1) | torch.logit({0}.sigmoid(), 1e-3) | {0}.atan2({0} + 1) | {0}.nextafter({0} + 1)
{0}.div(2, rounding_mode="floor") | {0}.div(2, rounding_mode="trunc") | {0}.conj() | {0}.real
F.dropout({0}, 0.5, False) | F.prelu({0}, torch.full((1,), 0.25))
{0} + 0.1 | {0} - 0.7 | 0.3 - {0} | {0} * 0.3 | {0} / 0.3 | 0.3 / ({0}.abs() + 0.7) | {0} // 0.3 | {0} % 0.3
torch.fmod({0}, 0.3) | {0}.div(0.3, rounding_mode="floor") | {0}.div(0.3, rounding_mode="trunc")
{0} == 0.3 | {0} != 0.1 | {0} > 0.3 | {0} >= 0.3 | {0} < 0.6 | {0} <= 0.6 | {0}.abs() ** 0.3 | 0.3 ** {0}
{0}.add(0.3, alpha=0.7) | {0}.clamp(-0.3, 0.7) | {0}.clamp(min=0.3) | {0}.masked_fill({0} > 0.3, 0.1)
torch.where({0} > 0.3, 0.1, {0}) | torch.full_like({0}, 0.3) | torch.rsub({0}, 0.3, alpha=0.7)
F.threshold({0}, 0.3, 0.1) | F.hardshrink({0}, 0.3) | F.softshrink({0}, 0.3) | F.hardtanh({0}, -0.3, 0.7)
F.leaky_relu({0}, 0.3) | F.elu({0}, 0.7) | {0}.nan_to_num(0.3) | {0}.round(decimals=1) | {0}.fill_(0.3) * 1
{0} * torch.tensor(0.3) | torch.tensor(0.3) - {0} | {0} // torch.tensor(0.3) | {0} > torch.tensor(0.3)
{0} + torch.tensor(0.3, dtype=torch.float64) | torch.tensor(0.3).double() < {0} | {0} % torch.tensor(0.3)
torch.maximum({0}, torch.tensor(0.3)) | {0}.clamp(max=torch.tensor(0.3)) | F.relu({0} - 0.3) + 0.1
"""
BINARY = """
{0} + {1} | {0} - {1} | {0} * {1} | {0} / ({1}.abs() + 1) | torch.maximum({0}, {1}) | torch.minimum({0}, {1})
{0} < {1} | {0} >= {1} | {0} == {1} | {0} != {1} | {0} & {1} | {0} | {1} | {0} ^ {1}
torch.logical_and({0}, {1}) | torch.logical_or({0}, {1}) | torch.atan2({0}, {1}.abs() + 0.5)
torch.where({0} > {1}, {0}, {1}) | torch.where({1} > 0, {0}, 0.5) | torch.hypot({0}, {1})
torch.remainder({0}, {1}.abs() + 1) | torch.fmod({0}, {1}.abs() + 1) | torch.floor_divide({0}, {1}.abs() + 1)
{0}.masked_fill({1} > 0, 0.5) | {0}.add({1}, alpha=2) | {0}.sub({1}, alpha=3) | torch.lerp({0}, {1}, 0.25)
{0}.abs() ** {1} | torch.fmax({0}, {1}) | torch.fmin({0}, {1}) | torch.copysign({0}, {1})
torch.logaddexp({0}, {1}) | torch.addcmul({0}, {1}, {1}) | torch.addcdiv({0}, {1}, {1}.abs() + 1)
{0}.logical_xor({1}) | torch.clamp({0}, max={1}) | torch.clamp({0}, min={1}) | {0}.clamp_min({1})
{0}.div({1}.abs() + 1, rounding_mode="floor") | {0}.type_as({1}) | torch.dist({0}, {1}) | F.mse_loss({0}, {1})
F.smooth_l1_loss({0}, {1}) | F.l1_loss({0}, {1}, reduction="none") | F.huber_loss({0}, {1})
{0}.expand_as({1}) | torch.heaviside({0}, {1}) | {0} << ({1} & 3) | {0} >> ({1} & 3)
torch.logaddexp2({0}, {1}) | F.binary_cross_entropy_with_logits({0}, {1}.sigmoid())
torch.xlogy({0}, {1}.abs() + 0.5) | torch.ldexp({0}, {1}) | F.cosine_similarity({0}, {1}, dim=-1)
torch.isclose({0}, {1}) | {0}.add({1}, alpha=0.3) | {0}.sub({1}, alpha=0.7) | torch.lerp({0}, {1}, 0.3)
torch.addcmul({0}, {1}, {1}, value=0.3) | torch.addcdiv({0}, {1}, {1}.abs() + 1, value=0.3)
torch.lerp({0}, {1}, {0}.tanh()) | torch.lerp({0}, {1}, -0.7)
torch.where({1} > 0.3, {0}, 0.1) | {0}.masked_fill({1} > 0.3, 0.1) | {0} // ({1}.abs() + 0.3)
"""
REDUCTIONS = """
{0}.sum({dims}) | {0}.mean({dims}) | {0}.amax({dims}) | {0}.amin({dims}) | {0}.sum() | {0}.mean() | {0}.max()
{0}.min() | {0}.prod() | {0}.sum({dims}, keepdim=True) | {0}.mean({dims}, keepdim=True)
{0}.amax({dims}, keepdim=True) | {0}.amin({dims}, keepdim=True) | {0}.prod({dim}) | {0}.argmax({dim})
({0} == {0}.amax({dim}, keepdim=True)).sum({dim}) | ({0} - {0}.amax({dims}, keepdim=True)).logical_not()
{0}.argmin({dim}, keepdim=True) | {0}.argmax() | {0}.any({dim}) | {0}.all({dim}) | {0}.any() | {0}.all()
{0}.var({dims}) | {0}.std({dims}, keepdim=True) | {0}.var({dims}, unbiased=False) | {0}.norm()
{0}.norm(dim={dim}) | {0}.norm(p=1, dim={dim}) | torch.linalg.vector_norm({0}, 2, {dim}, keepdim=True)
torch.linalg.vector_norm({0}, float("inf")) | {0}.logsumexp({dim}) | torch.softmax({0}, {dim})
torch.log_softmax({0}, {dim}) | F.softmin({0}, {dim}) | {0}.cumsum({dim}) | {0}.cumprod({dim})
{0}.logcumsumexp({dim}) | {0}.count_nonzero({dim}) | {0}.nansum({dims}) | {0}.sum({dims}, dtype=torch.float64)
{0}.sum({dims}, dtype=torch.float32) | {0}.sum({dims}, dtype=torch.bool) | {0}.prod({dim}, dtype=torch.bool)
{0}.sum({dims}, dtype=torch.int64) | {0}.sum({dims}, dtype=torch.uint8) | {0}.cumsum({dim}, dtype=torch.int8)
{0}.cumprod({dim}, dtype=torch.int8) | {0}.mean({dims}, dtype=torch.float64) | F.normalize({0}, dim={dim}) | F.layer_norm({0}, {0}.shape[-1:])
F.layer_norm({0}, {0}.shape[1:]) | F.rms_norm({0}, {0}.shape[-1:]) | F.instance_norm({0})
F.group_norm({0}, 1) | F.batch_norm({0}, None, None, training=True) | {0}.mean({dims}, dtype=torch.float64)
{0}.nanmean({dims}) | {0}.cumsum({dim}).flip({dim}) | {0}.trace() | {0}.std() | {0}.median()
{0}.diff(dim={dim}) | {0}.renorm(2, 0, 1.0) | F.glu({0}, {dim}) | {0}.sort({dim}, stable=True)[0]
{0}.sort({dim}, stable=True)[1] | {0}.softmax({dim}, dtype=torch.float32)
"""
PAIRS = """
{0}.max({dim}) | {0}.min({dim}, keepdim=True) | torch.var_mean({0}, {dim})
torch.std_mean({0}, {dim}, keepdim=True) | {0}.cummax({dim}) | {0}.cummin({dim})
torch.aminmax({0}, dim={dim}) | {0}.sort({dim}, stable=True) | torch.frexp({0})
"""
VIEWS = """
{0}.transpose({dim}, {dim}) | {0}.flip({dims}) | {0}.unsqueeze({dim}) | {0}.squeeze({dim}) | {0}.squeeze()
{0}.flatten() | {0}.reshape(-1) | {0}.flatten(0, 1) | {0}.select({dim}, 0) | {0}.select({dim}, -1)
{0}.movedim({dim}, {dim}) | {0}.roll(1, {dim}) | {0}.roll(2) | {0}.T | {0}.mT | {0}[::2] | {0}[..., 1:]
{0}[1:] | {0}[..., ::2] | {0}[:, ::3] | {0}[..., :-1] | {0}[None] | {0}[..., None] | {0}[0] | {0}[..., -1]
{0}[:, 1::2] | {0}.unfold({dim}, 2, 1) | {0}.unfold({dim}, 2, 2) | {0}.diagonal() | {0}.diagonal(1)
{0}.diag_embed() | {0}.repeat(2, *[1] * ({0}.dim() - 1)) | {0}.repeat(2, 1) | {0}.tile((2,))
{0}.repeat_interleave(2, {dim}) | {0}.chunk(2, {dim})[0] | {0}.chunk(2, {dim})[-1] | {0}.split(2, {dim})[0]
{0}.unbind({dim})[0] | {0}.tril() | {0}.triu(1) | torch.rot90({0}) | {0}.swapaxes(0, -1)
{0}.narrow({dim}, 0, 1) | {0}.view(-1) | {0}.view_as({0}) | F.pad({0}, (1, 2)) | F.pad({0}, (-1, 1))
F.pad({0}, (0, 1, 2, 0), value=1.0) | F.pad({0}, (1, 1), mode="reflect")
F.pad({0}, (1, 1), mode="replicate") | F.pad({0}, (1, 0), mode="circular") | {0}.expand(2, *{0}.shape)
{0}.expand(3, -1, -1) | {0}.permute(*range({0}.dim() - 1, -1, -1)) | {0}.contiguous() | torch.atleast_2d({0})
torch.broadcast_to({0}, (2, *{0}.shape)) | {0}.unflatten(0, (-1, 1)) | {0}.unflatten(-1, (2, -1))
{0}.ravel() | {0}.as_strided({0}.shape, {0}.stride()) | {0}[..., [0, -1]]
torch.meshgrid({0}, {0}, indexing="ij")[1] | {0}.index_select({dim}, torch.tensor([0])) | {0}.fliplr()
{0}.hsplit(2)[0] | {0}[-1:]
"""
# What gives memory of its own, even where nothing changes, beside what gives its operand then.
COPIES = """
torch.as_strided_copy({0}, {0}.shape, {0}.stride()) | torch.expand_copy({0}, {0}.shape) | {0}.clone()
torch.view_copy({0}, (-1,)) | torch.permute_copy({0}, tuple(range({0}.dim()))) | torch.slice_copy({0}, {dim})
torch.select_copy({0}, {dim}, 0) | torch.diagonal_copy({0}) | torch.t_copy({0}) | torch.detach_copy({0})
torch.transpose_copy({0}, {dim}, {dim}) | torch.squeeze_copy({0}) | torch.unsqueeze_copy({0}, {dim})
torch.alias_copy({0}) | torch.unbind_copy({0}, {dim})[0] | torch.split_copy({0}, 64, {dim})[0]
torch.narrow_copy({0}, {dim}, 0, 1) | torch.unfold_copy({0}, {dim}, 1, 1) | {0}.to({0}.dtype, copy=True)
{0}.to({0}.dtype) | {0}.float() | {0}.double() | {0}.type_as({0}) | {0}.contiguous() | {0}.reshape({0}.shape)
{0}.expand({0}.shape) | {0}.detach() | {0}.repeat(*[1] * {0}.dim()) | torch.cat([{0}]) | {0}.flip(()) | {0} + 0
torch.as_strided_copy({0}, (1,), (1,)) | {0}.view_as({0}) | torch.broadcast_to({0}, {0}.shape) | {0}.long()
"""
# Ops that go through memory in its order, whatever strides a pass would like.
MEMORY = """
{0}.as_strided(({0}.numel(),), (1,)) | torch.as_strided_copy({0}, ({0}.numel() // 2,), (2,))
{0}.as_strided(({0}.numel() // 2, 2), (1, 1)) | torch.as_strided_scatter({0}, {0}.flatten()[:1], (1,), (1,))
"""
JOINS = """
torch.cat([{0}, {1}], {dim}) | torch.stack([{0}, {1}], {dim}) | torch.cat([{0}, {1}, {0}], {dim})
torch.cat([{0}.flatten(), {1}.flatten()]) | torch.hstack([{0}, {1}]) | torch.vstack([{0}, {1}])
torch.cat([{0}, {0}[..., :1]], -1) | torch.cat([{0} * 2, {1}.sum(-1, keepdim=True)], -1)
"""
PRODUCTS = """
{0} @ {1} | {0} @ {1}.mT | {0}.mT @ {1} | {0} @ {0}.mT | torch.outer({0}.flatten()[:17], {1}.flatten()[:9])
F.linear({0}, {1}) | torch.einsum("...i,...i->...", {0}, {1}) | torch.einsum("...i,...j->...ij", {0}, {1})
torch.addmm({0}, {1}, {1}.mT) | torch.baddbmm({0}, {1}, {1}.mT) | torch.dot({0}, {1}) | torch.mv({0}, {1})
torch.tensordot({0}, {1}, 1) | torch.kron({0}, {1}) | torch.cdist({0}, {1})
"""
IMAGES = """
F.max_pool2d({0}, 2) | F.avg_pool2d({0}, 2) | F.max_pool2d({0}, 3, 2, 1) | F.avg_pool2d({0}, 3, 1, 1)
F.adaptive_avg_pool2d({0}, 2) | F.max_pool1d({0}, 2) | F.avg_pool1d({0}, 2)
F.interpolate({0}, scale_factor=2) | F.interpolate({0}, scale_factor=2, mode="bilinear")
F.interpolate({0}, size=5, mode="nearest-exact") | F.pixel_shuffle({0}, 1) | F.unfold({0}, 2)
F.adaptive_max_pool2d({0}, 3) | F.adaptive_avg_pool1d({0}, 3)
F.avg_pool2d({0}, 2, ceil_mode=True, count_include_pad=False) | F.lp_pool2d({0}, 2, 2)
F.pixel_unshuffle({0}, 2) | F.interpolate({0}, size=3, mode="linear")
F.interpolate({0}, size=(5, 3), mode="bicubic") | F.channel_shuffle({0}, 1)
"""
IN_PLACE = """
{0}.add_(1) | {0}.mul_(2) | {0}.zero_() | {0}.fill_(3) | {0}.add_({1}) | {0}.mul_({1})
{0}.sub_({1}, alpha=2) | {0}.copy_({1}) | {0}.clamp_(min=0) | {0}[0].add_(1) | {0}[..., 1:].mul_(2)
{0}[::2].copy_({1}) | {0}.relu_() | {0}.neg_() | {0}.masked_fill_({1} > 0, 1) | {0}.abs_() | {0}.sigmoid_()
{0}.mT.add_(1) | {0}.flatten()[0].fill_(2) | {0}.select({dim}, 0).zero_() | {0}.diagonal().add_(1)
{0}.exp_() | {0}.tril_() | {0}.t_() | {0}.unsqueeze_(0) | {0}.squeeze_() | {0}.transpose_(0, -1)
{0}.addcmul_({1}, {1}) | {0}.lerp_({1}, 0.5) | {0}.pow_(2) | {0}.div_(2) | {0}.fill_diagonal_(1)
{0}.cumsum_({dim}) | {0}.index_fill_({dim}, torch.tensor([0]), 1) | {0}.logical_not_() | {0}.bitwise_not_()
{0}.round_() | {0}.view(-1)[1:].sub_(1) | {0}.unfold(0, 2, 2).add_(1)
{0}.narrow({dim}, 0, 1).copy_({1}.narrow({dim}, 0, 1)) | {0}.ge_({1}) | {0}.tanh_()
"""
ASSIGNMENTS = """
{0}[0] = {1} | {0}[..., 1:] = 2 | {0}[::2] = {1} | {0}[..., 0] = {1} | {0}[{1} > 0] = 1 | {0}[:] = {1}
{0}[..., ::2] = {1} | {0} += {1} | {0} *= 2 | {0} -= 1 | {0}[1:] += {0}[:-1] | {0}[..., -1] *= 2
{0}[[0, -1]] = 1
"""


def _split(rows: str) -> list[str]:
    """The rows of a block: texts with " | " between them (a text may hold the operator too: `{0} | {1}`)."""
    texts = [text for line in rows.strip().splitlines() for text in line.split(" | ")]
    joined: list[str] = []
    for text in texts:
        if joined and text in ("4", "{1}"):
            joined[-1] += f" | {text}"
        else:
            joined.append(text)
    return joined


def dims(g: Generator, x: int) -> str:
    """A dimension or several, as text."""
    n = g.values[x].dim()
    count = g.rng.choice([1, 1, 1, 2, 2, 3])
    chosen = sorted(g.rng.sample(range(n), min(count, n))) if n else [0]
    if g.rng.random() < 0.4:
        chosen = [d - n for d in chosen] if n else chosen
    return str(chosen[0]) if len(chosen) == 1 else str(tuple(chosen))


def dim(g: Generator, x: int) -> str:
    n = g.values[x].dim()
    return str(g.rng.randrange(-n, n)) if n else "0"


def line(rows: str, results: int = 1) -> Callable[[Generator], Line]:
    """A function that fills in a random row of a block."""
    texts = _split(rows)

    def choose(g: Generator) -> Line:
        text = g.rng.choice(texts)
        x = g.pick()
        while "{dims}" in text:
            text = text.replace("{dims}", dims(g, x), 1)
        while "{dim}" in text:
            text = text.replace("{dim}", dim(g, x), 1)
        return text, (x, g.partner(x)) if "{1}" in text else (x,), results

    return choose


def reshape(g: Generator) -> Line:
    """Another grouping of the same elements."""
    x = g.pick()
    n, shape = g.values[x].numel(), []
    while n > 1 and len(shape) < 3:
        d = g.rng.choice([d for d in range(1, n + 1) if n % d == 0][:12] + [n])
        shape.append(d)
        n //= d
    return f"{{0}}.{g.rng.choice(['reshape', 'view'])}({(*shape, n)})", (x,)


def _grouping(g: Generator, n: int) -> tuple[int, ...]:
    """A shape of n elements from its prime factors in any order: its boundaries nest in few others."""
    primes = [p for p in range(2, n + 1) if n % p == 0 and all(p % q for q in range(2, p))]
    factors = [p for p in primes for _ in range(n.bit_length()) if n % p ** (_ + 1) == 0]
    g.rng.shuffle(factors)
    shape = [1] * g.rng.choice([2, 2, 3, 4])
    for factor in factors:
        shape[g.rng.randrange(len(shape))] *= factor
    return tuple(shape)


def regrouped(g: Generator) -> Line:
    """Scans, steps back, cuts and reductions before and behind a view whose dimensions nest in no other's."""
    x = g.pick()
    shape = _grouping(g, g.values[x].numel())
    before, behind = (g.rng.choice(_REGROUPED) for _ in range(2))
    last = g.rng.choice(_REGROUPED_LAST)
    first = before.replace("{dim}", dim(g, x))
    second = (behind + last).replace("{dim}", str(g.rng.randrange(-len(shape), len(shape))))
    return f"{{0}}{first}.reshape({shape}){second}", (x,)


def write_regrouped(g: Generator) -> Line:
    """A write through such a view."""
    x = g.pick()
    part = g.rng.choice(["", "[1:]", "[..., ::2]", ".mT", "[..., -1]", ".select(0, 0)", ".diagonal()"])
    change = g.rng.choice(["add_(1)", "mul_(2)", "zero_()", "neg_()", "copy_({0}.reshape(-1)[0].clone())"])
    return f"{{0}}.view({_grouping(g, g.values[x].numel())}){part}.{change}", (x,), 0


_REGROUPED = (
    "", "", ".flip({dim})", ".flip(0, -1)", ".roll(1, {dim})", ".cumsum({dim})", ".cumprod({dim})",
    ".logcumsumexp({dim})", ".cummax({dim})[0]", ".cummin({dim})[0]", ".softmax({dim})", ".transpose(0, {dim})",
    "[1:]", "[..., ::2]", "[..., :-1]", ".diff(dim={dim})", ".unfold({dim}, 2, 1)",
)  # fmt: skip
_REGROUPED_LAST = (
    "", "", ".sum({dim})", ".logsumexp({dim})", ".amax({dim})", ".softmax({dim})", ".var({dim})", ".cumsum({dim})",
    ".flip({dim}).cumsum({dim})", ".prod({dim})", ".argmax({dim})", ".tanh()",
)  # fmt: skip


def permute(g: Generator) -> Line:
    x = g.pick()
    order = list(range(g.values[x].dim()))
    g.rng.shuffle(order)
    return f"{{0}}.permute({tuple(order)})", (x,)


def cut(g: Generator) -> Line:
    """A slice with bounds and a step in each dimension."""
    x = g.pick()
    parts = []
    for n in g.values[x].shape:
        start = g.rng.choice(["", "", str(g.rng.randrange(-n, n + 1))])
        stop = g.rng.choice(["", "", str(g.rng.randrange(-n, n + 1))])
        parts.append(f"{start}:{stop}" + g.rng.choice(["", "", ":2", ":3"]))
    return f"{{0}}[{', '.join(parts) or '...'}]", (x,)


def cast(g: Generator) -> Line:
    x = g.pick()
    kinds = ["float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "int8", "int16"]
    back = g.rng.choice(["", ".to({0}.dtype)"])  # a value that another type has held
    return f"{{0}}.to(torch.{g.rng.choice(kinds)}){back}", (x,)


def gather(g: Generator) -> Line:
    """Positions that are read from a tensor."""
    x = g.pick()
    shape = g.values[x].shape
    if not shape:
        return "{0}.clone()", (x,)
    d = g.rng.randrange(len(shape))
    n = shape[d]
    kind = g.rng.randrange(7)
    if kind == 0:
        index = g.new_input((g.size(),), "int64", f"index:{n}")
        return f"{{0}}.index_select({d}, {{1}})", (x, index)
    if kind == 1:
        index = g.new_input((*shape[:d], g.size(), *shape[d + 1 :]), "int64", f"index:{n}")
        return f"{{0}}.gather({d}, {{1}})", (x, index)
    if kind == 2:
        index = g.new_input(g.shape(2), "int64", f"index:{shape[0]}")
        return "{0}[{1}]", (x, index)
    if kind == 3 and len(shape) > 1:
        one = g.new_input((g.size(),), "int64", f"index:{shape[0]}")
        other = g.new_input(g.values[one].shape, "int64", f"index:{shape[-1]}")
        return g.rng.choice(["{0}[{1}, ..., {2}]", "{0}[{1}[:, None], ..., {2}]"]), (x, one, other)
    if kind == 4:
        index = g.new_input((*shape[:d], g.size(), *shape[d + 1 :]), "int64", f"index:{n}")
        return f"torch.take_along_dim({{0}}, {{1}}, {d})", (x, index)
    if kind == 5 and len(shape) == 2:
        index = g.new_input(g.shape(2), "int64", f"index:{n}")
        return "F.embedding({1}, {0})", (x, index)
    index = g.new_input((g.size(),), "int64", f"index:{n}")
    return f"{{0}}[{':, ' * d}{{1}}]", (x, index)


def scatter(g: Generator) -> Line:
    """Positions of a tensor that are written: twice only where values are gathered."""
    x = g.pick()
    shape = g.values[x].shape
    if not shape or 0 in shape:
        return "{0}.clone()", (x,)
    last = shape[-1]
    n = g.rng.choice([k for k in (1, 2, last) if k <= last])
    many = g.rng.randrange(1, 2 * last + 1)
    dtype = g.dtype_name(x)
    kind = g.rng.randrange(10)
    once = (
        "{0}.scatter(-1, {1}, {2})",
        "{0}.scatter(-1, {1}, 2)",
        "{0}.index_copy(-1, {1}, {2})",
        "{0}.index_fill(-1, {1}, 1)",
        "torch.index_put({0}.mT.clone(), ({1},), {2}.mT)",
    )
    twice = (
        "{0}.scatter_add(-1, {1}, {2})",
        "{0}.index_add(-1, {1}, {2})",
        "{0}.index_put((*[slice(None)] * 0, {1}), {2}, True)",
        "{0}.scatter_reduce(-1, {1}, {2}, 'amax')",
        "{0}.scatter_reduce(-1, {1}, {2}, 'sum', include_self=False)",
    )
    text = (once + twice)[kind]
    if text is twice[2]:
        index = g.new_input((many,), "int64", f"index:{shape[0]}")
        return "torch.index_put({0}, ({1},), {2}, True)", (x, index, g.new_input((many, *shape[1:]), dtype))
    width, fill = (n, f"perm:{last}") if text in once else (many, f"index:{last}")
    whole = (*shape[:-1], width)
    index = g.new_input((width,) if "index_" in text else whole, "int64", fill)
    return text, (x, index, g.new_input(whole, dtype)) if "{2}" in text else (x, index)


def put_view(g: Generator) -> Line:
    """A tensor with a part replaced."""
    x, y = g.pick(), g.pick()
    text = g.rng.choice(
        [
            "torch.select_scatter({0}, {1}, 0, 0)",
            "torch.slice_scatter({0}, {1}, 0, 0, None, 2)",
            "torch.diagonal_scatter({0}, {1})",
            "torch.slice_scatter({0}, {0}[1:] * 2, 0, 1)",
            "torch.select_scatter({0}, {0}.select(-1, 0) + 1, -1, -1)",
            "{0}.masked_scatter({0} > 0, {1})",
        ]
    )
    return text, (x, y) if "{1}" in text else (x,)


def where(g: Generator) -> Line:
    x = g.pick()
    y = g.partner(x)
    return "torch.where({0} > 0.25, {1}, {2})", (g.partner(x), x, y)


def norm(g: Generator) -> Line:
    """Normalisations with weights."""
    x = g.pick()
    shape, dtype = g.values[x].shape, g.dtype_name(x)
    if not shape:
        return "{0}.clone()", (x,)
    if g.rng.random() < 0.5 or len(shape) < 2:
        text = g.rng.choice(
            [
                "F.layer_norm({0}, ({n},), {1}, {2})",
                "F.layer_norm({0}, ({n},), {1})",
                "F.rms_norm({0}, ({n},), {1})",
            ]
        )
        n = shape[-1]
    else:
        text = g.rng.choice(
            [
                "F.batch_norm({0}, None, None, {1}, {2}, True)",
                "F.group_norm({0}, 1, {1}, {2})",
                "F.group_norm({0}, {n}, {1}, {2})",
                "F.instance_norm({0}, weight={1}, bias={2})",
                "F.batch_norm({0}, {2}, {1}.abs() + 1, {1}, {2})",
            ]
        )
        n = shape[1]
        if len(shape) == 4:  # eager's backward of many groups, channels-last, ends the process
            text = text.replace("({0}, {n},", "({0}, 1,")
    weight, bias = g.new_input((n,), dtype), g.new_input((n,), dtype)
    return text.replace("{n}", str(n)), (x, weight, bias) if "{2}" in text else (x, weight)


def loss(g: Generator) -> Line:
    x = g.pick()
    shape = g.values[x].shape
    if len(shape) < 2:
        return "{0}.sum()", (x,)
    target = g.new_input((shape[0], *shape[2:]), "int64", f"index:{shape[1]}")
    reduction = g.rng.choice(["mean", "sum", "none"])
    extra = g.rng.choice(["", "", ", label_smoothing=0.1", ", ignore_index=0"])
    return f"F.cross_entropy({{0}}, {{1}}, reduction={reduction!r}{extra})", (x, target)


def convolution(g: Generator) -> Line:
    """A small convolution with random weights, now and then read in the order of its memory."""
    x = g.pick()
    shape, dtype = g.values[x].shape, g.dtype_name(x)
    if len(shape) not in (3, 4):
        shape, dtype = (g.rng.choice([1, 2]), g.rng.choice([1, 2, 3, 4]), 5, 4), "float32"
        x = g.new_input(shape, dtype)
    k = g.rng.choice([1, 2, 3])
    weight = g.new_input((g.rng.choice([1, 2, 8]), shape[1], *[k] * (len(shape) - 2)), dtype)
    extra = g.rng.choice(["", ", padding=1", ", stride=2", ", padding=2, dilation=2"])
    read = g.rng.choice(["", "", "", ".as_strided((4,), (1,))"])
    return f"F.conv{len(shape) - 2}d({{0}}, {{1}}{extra}){read}", (x, weight)


MAPS = """
{0} * 2 | {0} + 1 | -{0} | {0}.exp() | {0}.relu() | {0} > 0 | {0}.square() | {0}.sigmoid() | {0}.abs()
{0} - 0.5
"""
JOINED_MAPS = """
{0} + {1} | {0} * {1} | {0} - {1} | torch.maximum({0}, {1}) | {0} < {1} | torch.where({0} > {1}, {0}, {1})
"""
ROW_SUMS = """
{0}.sum({dims}) | {0}.mean({dims}) | {0}.amax({dims}) | {0}.sum({dims}, keepdim=True)
{0}.mean({dims}, keepdim=True) | {0}.sum() | {0}.amax({dims}, keepdim=True) | torch.softmax({0}, {dim})
F.layer_norm({0}, {0}.shape[-1:]) | {0}.var({dims}, keepdim=True) | {0}.argmax({dim}) | {0}.any({dim})
{0}.cumsum({dim}) | {0}.prod({dim}) | {0}.amin({dims}) | {0}.logsumexp({dim}) | {0}.norm(dim={dim})
"""

JOINED_SUMS = """
({0} * {1}).sum({dims}) | ({0} + {1}).amax({dims}, keepdim=True) | torch.softmax({0} * {1}, {dim})
({0} - {1}).square().mean({dims}) | torch.softmax({0} + {1}, {dim}).sum({dims}) | ({0} < {1}).any({dim})
({0} * {1}).mean({dims}, keepdim=True) - {1} | ({0} * {1}).sum() | ({0} * {1}).argmax({dim})
({0} + {1}).cumsum({dim}) | {0} - ({0} * {1}).sum({dims}, keepdim=True) | ({0} + {1}).norm(dim={dim})
"""

# Which kinds of lines a program takes, and how often: those that share loops, products, or all.
Kinds = list[tuple[int, Callable[["Generator"], Line]]]
FUSED: Kinds = [
    (8, line(MAPS)),
    (12, line(JOINED_MAPS)),
    (9, line(ROW_SUMS)),
    (12, line(JOINED_SUMS)),
    (2, reshape),
    (2, regrouped),
    (2, permute),
    (2, cut),
    (2, cast),
    (1, where),
]
# Products with maps before and behind them, several equal ones side by side among them.
EQUAL_PRODUCTS = """
torch.stack([F.relu({0} @ ({1} + i)) for i in range(5)]) | torch.cat([({0} @ {1}[i:]).tanh() for i in range(4)])
torch.stack([F.silu({0} @ ({0}.mT * i)) for i in range(4)]) | torch.cat([F.gelu(F.linear({0}, {1} * i)) for i in range(5)])
torch.stack([({0} @ {0}).sigmoid() * i for i in range(4)]) | torch.stack([F.linear({0}, {1} - i) + {0} for i in range(4)])
"""
MULTIPLIED: Kinds = [
    (20, line(PRODUCTS)),
    (8, line(EQUAL_PRODUCTS)),
    (14, line(MAPS)),
    (10, line(JOINED_MAPS)),
    (4, line(ROW_SUMS)),
    (4, permute),
    (3, reshape),
    (3, cut),
    (2, cast),
    (3, convolution),
]
ALL: Kinds = [
    (22, line(UNARY)),
    (26, line(BINARY)),
    (24, line(REDUCTIONS)),
    (4, line(PAIRS, 2)),
    (14, line(VIEWS)),
    (4, line(COPIES)),
    (2, line(MEMORY)),
    (5, line(JOINS)),
    (4, line(PRODUCTS)),
    (3, line(IMAGES)),
    (5, line(IN_PLACE)),
    (3, line(ASSIGNMENTS, 0)),
    (5, reshape),
    (8, regrouped),
    (1, write_regrouped),
    (4, permute),
    (6, cut),
    (6, cast),
    (6, gather),
    (6, scatter),
    (2, put_view),
    (4, where),
    (4, norm),
    (1, loss),
    (3, convolution),
]
