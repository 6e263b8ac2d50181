"""Random numbers: every rule draws from the key of its call, so that a seed and a position in the program
give the same numbers.

Two 32-bit words are taken from each 64-bit draw, which halves the time of threefry on a CPU (a mask of a
million elements: 4.3 ms against 8.6 by jax.random.bernoulli).

>>> torch.rand(3, device="xla")
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from dynamotor.extension_api import prims  # noqa: F401 - defines torch.ops.dynamotor.rand and new_seed

from .dtypes import is_complex, jax_dtype, wide
from .lowering import Lifted, Spec, aten, op, random_op, require, rows
from .promotion import cast

_DIGITS = {
    jnp.dtype(jnp.bfloat16): 8,
    jnp.dtype(jnp.float16): 11,
    jnp.dtype(jnp.float32): 24,
    jnp.dtype(jnp.float64): 53,
}


def _words(key: jax.Array, shape: tuple[int, ...], bits: int = 32) -> jax.Array:
    """Uniform unsigned integers of 32 or 64 bits."""
    count = math.prod(shape)
    if bits == 64:
        return jax.random.bits(key, shape, jnp.uint64)
    pairs = jax.random.bits(key, ((count + 1) // 2,), jnp.uint64)
    return jax.lax.bitcast_convert_type(pairs, jnp.uint32).reshape(-1)[:count].reshape(shape)


def _uniform(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, middle: bool = False) -> jax.Array:
    """Multiples of 2^-digits in [0, 1), which `dtype` holds exactly; `middle`: one digit less, half a step
    further, in (0, 1).
    """
    digits = _DIGITS[jnp.dtype(dtype)] - middle
    bits = 64 if digits > 32 else 32
    held = jnp.float64 if bits == 64 else jnp.float32
    values = (_words(key, shape, bits) >> (bits - digits)).astype(held) * held(2.0**-digits)
    return values + held(2.0 ** -(digits + 1)) if middle else values


def _draw_type(out: Spec) -> np.dtype:
    """The floating type that a distribution is drawn in: float64 where float32 cannot hold the results,
    float32 otherwise.
    """
    exact = (torch.float64, torch.complex128, torch.int64, torch.int32)
    return jnp.dtype(jnp.float64) if out.dtype in exact else jnp.dtype(jnp.float32)


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Standard normal by the inverse of the error function, in float32 or float64."""
    return math.sqrt(2) * jax.lax.erf_inv(_open_symmetric(key, shape, dtype)).astype(dtype)


def _open_symmetric(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Uniform in (-1, 1), symmetric: 2u - 1 of the middles, exact in `dtype`."""
    digits = _DIGITS[dtype]
    return 2 * _uniform(key, shape, dtype) - dtype.type(1 - 2.0**-digits)


# -- uniform and normal --------------------------------------------------------------------------------------


def _uniform_of(key: jax.Array, out: Spec) -> jax.Array:
    dtype = jax_dtype(out.dtype)
    if not is_complex(dtype):
        return _uniform(key, out.shape, dtype)
    part = jnp.dtype(jnp.float64 if dtype == jnp.complex128 else jnp.float32)
    return jax.lax.complex(*(_uniform(k, out.shape, part) for k in jax.random.split(key)))


def _normal_of(key: jax.Array, out: Spec) -> jax.Array:
    dtype = _draw_type(out)
    if not out.dtype.is_complex:
        return _normal(key, out.shape, dtype)
    return jax.lax.complex(
        *(_normal(k, out.shape, dtype) * dtype.type(math.sqrt(0.5)) for k in jax.random.split(key))
    )


def _moved(draw: jax.Array, mean: Any, std: Any) -> jax.Array:
    return draw * cast(std, draw.dtype) + cast(mean, draw.dtype)


rows(
    partial(random_op, out=True, lift=True),
    {
        (aten.rand, aten.rand_like): lambda key, *sizes, out, **options: _uniform_of(key, out),
        (aten.randn, aten.randn_like): lambda key, *sizes, out, **options: _normal_of(key, out),
        aten.normal_functional: lambda key, x, mean=0.0, std=1.0, *, out, generator=None: _moved(
            _normal_of(key, out), mean, std
        ),
        aten.log_normal: lambda key, x, mean=1.0, std=2.0, *, out, generator=None: jnp.exp(
            _moved(_normal_of(key, out), mean, std)
        ),
    },
)


@random_op(aten.uniform, out=True, lift=True)
def _uniform_between(key, x, low=0.0, high=1.0, *, out, generator=None, **named):
    low = named.get("from", low)  # aten's name is a keyword of Python
    high = named.get("to", high)
    low, high = (cast(end, jnp.dtype(jnp.float64)) for end in (low, high))
    return _moved(_uniform_of(key, out), low, high - low)


@random_op(aten.normal, out=True, lift=True)
def _normal_with(key, mean, std=1.0, size=None, *, out, generator=None, dtype=None):
    return _moved(_normal_of(key, out), mean, std)


@random_op(aten.cauchy, out=True)
def _cauchy(key, x, median=0.0, sigma=1.0, *, out, generator=None):
    dtype = _draw_type(out)
    return median + sigma * jnp.tan(dtype.type(math.pi / 2) * _open_symmetric(key, out.shape, dtype))


@random_op(aten.exponential, out=True, lift=True)
def _exponential(key, x, lambd=1.0, *, out, generator=None):
    draw = -jnp.log(_uniform(key, out.shape, _draw_type(out), middle=True))
    return draw / cast(lambd, draw.dtype)


@random_op(aten.geometric, out=True)
def _geometric(key, x, p, *, out, generator=None):
    """The number of the first success: 1, 2, ..."""
    draw = jnp.log(_uniform(key, out.shape, _draw_type(out), middle=True))
    return jnp.maximum(jnp.ceil(draw / math.log1p(-p)), 1) if p < 1 else jnp.ones_like(draw)


# -- integers ------------------------------------------------------------------------------------------------


def _integers(key: jax.Array, low: Any, high: Any, shape: tuple[int, ...]) -> jax.Array:
    """int64 in [low, high): a remainder, as aten takes it, of 64 bits where 32 would be visibly uneven, or
    where the bounds may change.
    """
    if Lifted in (type(low), type(high)):
        low, high = (cast(bound, jnp.dtype(jnp.int64)) for bound in (low, high))
        count = jnp.uint64(high - low)
        return jax.lax.bitcast_convert_type(_words(key, shape, 64) % count, jnp.int64) + low
    count = high - low
    if count >= 2**64:
        return jax.lax.bitcast_convert_type(_words(key, shape, 64), jnp.int64)
    if count > 2**24:
        offsets = _words(key, shape, 64) % jnp.uint64(count)
    else:
        offsets = (_words(key, shape) % jnp.uint32(count)).astype(jnp.uint64)
    return jax.lax.bitcast_convert_type(offsets, jnp.int64) + low


@random_op(aten.randint, out=True, lift=True)
def _randint(key, *bounds_and_size, out, generator=None, dtype=None):
    """(high, size), (low, high, size), (high, size, generator), ..."""
    numbers = [b for b in bounds_and_size if isinstance(b, int) or type(b) is Lifted]
    low, high = (0, *numbers) if len(numbers) == 1 else numbers
    return _integers(key, low, high, out.shape)


@random_op(aten.randint_like, out=True)
def _randint_like(key, x, *bounds, out, generator=None, dtype=None):
    require(all(isinstance(b, int) for b in bounds), "the bounds are tensors")
    low, high = (0, *bounds) if len(bounds) == 1 else bounds
    return _integers(key, low, high, out.shape)


def _last_of(dtype: torch.dtype) -> int:
    """The largest number that `random_()` draws: all of an integer type, all integers that a floating type
    holds.
    """
    if dtype.is_floating_point:
        return 2 ** _DIGITS[jnp.dtype(jax_dtype(dtype))]
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max


@random_op(aten.random, out=True, lift=True)
def _random(key, x, *bounds, out, generator=None, **named):
    """() draws from the whole type, (to) from [0, to), (from, to | None) from [from, to)."""
    bounds = (
        *([named["from"]] if "from" in named else []),
        *bounds,
        *([named["to"]] if "to" in named else []),
    )
    if not bounds:
        return _integers(key, 0, _last_of(out.dtype) + 1, out.shape)
    low, high = (0, *bounds) if len(bounds) == 1 else bounds
    return _integers(key, low, _last_of(out.dtype) + 1 if high is None else high, out.shape)


# -- chances -------------------------------------------------------------------------------------------------


def _chance(key: jax.Array, shape: tuple[int, ...], p: Any) -> jax.Array:
    """True with probability p (a number or an array of the shape)."""
    dtype = jnp.dtype(jnp.float64 if isinstance(p, jax.Array) and p.dtype == jnp.float64 else jnp.float32)
    return _uniform(key, shape, dtype) < cast(p, dtype)


@random_op(aten.native_dropout, lift=True)
def _dropout(key, x, p, train):
    if train is False or p == 0:
        return x, jnp.ones(x.shape, jnp.bool_)
    if p == 1:
        return x * 0, jnp.zeros(x.shape, jnp.bool_)
    keeps = 1 - cast(p, jnp.dtype(jnp.float64))
    kept = _chance(key, x.shape, keeps.astype(jnp.float32))
    return _kept(x, kept, 1 / keeps), kept


def _kept(x: jax.Array, mask: jax.Array, scale: Any) -> jax.Array:
    """A product: NaN and infinity show also where they are dropped."""
    x = wide(x)
    return x * jnp.where(mask, cast(scale, x.dtype), 0)


@random_op(aten.rrelu_with_noise_functional)
def _rrelu(key, x, noise, lower=0.125, upper=1 / 3, training=False, generator=None):
    x = wide(x)
    if not training:
        return jnp.where(x > 0, x, x * ((lower + upper) / 2)), noise
    slope = _uniform(key, x.shape, jnp.dtype(x.dtype)) * (upper - lower) + lower
    return jnp.where(x > 0, x, x * slope), jnp.where(x > 0, 1, slope)


@random_op(aten.multinomial)
def _multinomial(key, weights, num_samples, replacement=False, *, generator=None):
    """With replacement by the inverse of the cumulative weights; without, the largest of weight / exponential
    (as aten).
    """
    weights = wide(weights)
    if not replacement:
        race = weights / -jnp.log(_uniform(key, weights.shape, jnp.dtype(weights.dtype), middle=True))
        return jax.lax.top_k(race, num_samples)[1]
    totals = jnp.cumsum(weights, axis=-1)
    points = _uniform(key, (*weights.shape[:-1], num_samples), jnp.dtype(weights.dtype)) * totals[..., -1:]
    points = jnp.minimum(
        points, jnp.nextafter(totals[..., -1:], 0)
    )  # the product may be rounded up to the end
    find = jnp.vectorize(
        lambda rising, at: jnp.searchsorted(rising, at, side="right"), signature="(n),(m)->(m)"
    )
    return find(totals, points)


# -- distributions that jax samples --------------------------------------------------------------------------


@random_op(aten.binomial)
def _binomial(key, count, prob, generator=None):
    dtype = jnp.float64 if count.dtype == jnp.float64 else jnp.float32
    return jax.random.binomial(key, wide(count), wide(prob), dtype=dtype)


op(aten.native_dropout_backward, lift=True)(_kept)
op(aten._standard_gamma_grad)(lambda alpha, sample: jax.lax.random_gamma_grad(wide(alpha), wide(sample)))


random_op(aten.bernoulli, lift=True)(
    lambda key, x, p=None, *, generator=None: _chance(key, x.shape, x if p is None else p)
)
rows(
    random_op,
    {
        aten.randperm: lambda key, n, *, generator=None, dtype=None: jax.random.permutation(key, n),
        aten._standard_gamma: lambda key, alpha, generator=None: jax.random.gamma(
            key, wide(alpha), dtype=wide(alpha).dtype
        ),
        aten._sample_dirichlet: lambda key, alpha, generator=None: jax.random.dirichlet(
            key, wide(alpha), dtype=wide(alpha).dtype
        ),
        aten.poisson: lambda key, rate, generator=None: jax.random.poisson(key, wide(rate), dtype=jnp.int64),
        torch.ops.dynamotor.new_seed: lambda key: jax.lax.bitcast_convert_type(
            _words(key, (1,), 64) >> 1, jnp.int64
        ),
    },
)


# -- our own counter-based numbers: Philox4x32-10, bit-equal to graph/prims.py -------------------------------

_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def _product_words(x: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """High and low 32 bits of a product of 32-bit words."""
    product = x.astype(jnp.uint64) * jnp.uint64(factor)
    return (product >> 32).astype(jnp.uint32), product.astype(jnp.uint32)


@op(torch.ops.dynamotor.rand)
def _philox_rand(seed, stream, size, *, dtype=None):
    count = math.prod(size)
    low = jnp.arange((count + 3) // 4, dtype=jnp.uint32)
    words = [low, jnp.zeros_like(low), jnp.full_like(low, stream & 0xFFFFFFFF), jnp.zeros_like(low)]
    seed = jax.lax.bitcast_convert_type(seed.reshape(()), jnp.uint64)
    keys = [seed.astype(jnp.uint32), (seed >> 32).astype(jnp.uint32)]
    for _ in range(10):
        (high0, low0), (high1, low1) = (
            _product_words(words[0], _FACTORS[0]),
            _product_words(words[2], _FACTORS[1]),
        )
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
        keys = [key + jnp.uint32(step) for key, step in zip(keys, _KEY_STEPS)]
    lanes = jnp.stack(words, axis=1).reshape(-1)[:count]
    return ((lanes >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)).reshape(tuple(size))
