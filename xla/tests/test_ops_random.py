"""Random ops: the right distribution, the same numbers from the same key, aten's edge cases."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from lowering_harness import to_jax  # noqa: E402

from dynamotor.graph import prims  # noqa: E402
from dynamotor.xla import ops_random  # noqa: E402, F401
from dynamotor.xla.lowering import Spec, apply, find  # noqa: E402

aten = torch.ops.aten
COUNT = 20_000


def draw(func, *args, shape=(COUNT,), dtype=torch.float32, seed=0, **kwargs):
    """The lowering's result as a numpy array (a tuple where `shape` is a list of Spec)."""
    arrays = [to_jax(a) for a in args]
    out = tuple(shape) if isinstance(shape, list) else Spec(tuple(shape), dtype)
    rule = find(func)
    assert rule is not None and rule.random, func
    result = jax.jit(lambda key: apply(func, rule, tuple(arrays), kwargs, out, key))(jax.random.key(seed))
    return jax.tree.map(np.asarray, result)


def near(values, mean, std):
    """The sample mean within five standard errors."""
    assert abs(values.astype(np.float64).mean() - mean) < 5 * std / math.sqrt(values.size) + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_rand_is_uniform_and_never_one(dtype):
    values = draw(aten.rand.default, [COUNT], dtype=dtype).astype(np.float64)
    assert values.min() >= 0 and values.max() < 1
    near(values, 0.5 if dtype is not torch.bfloat16 else 0.5 - 2.0**-9, math.sqrt(1 / 12))
    assert np.abs(np.histogram(values, 8, (0, 1))[0] / COUNT - 1 / 8).max() < 0.015


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_randn_is_standard_normal(dtype):
    values = draw(aten.randn.default, [COUNT], dtype=dtype).astype(np.float64)
    near(values, 0, 1)
    near(values**2, 1, math.sqrt(2))
    assert abs((values > 1.96).mean() - 0.025) < 0.006
    assert np.isfinite(values).all()


def test_complex_randn_has_unit_variance():
    values = draw(aten.randn.default, [COUNT], dtype=torch.complex64)
    near(np.abs(values) ** 2, 1, 1)
    near(values.real * values.imag, 0, 0.5)


def test_the_same_key_draws_the_same_and_another_does_not():
    first, again, other = (draw(aten.rand.default, [100], shape=(100,), seed=s) for s in (1, 1, 2))
    assert (first == again).all() and (first != other).any()


SPREAD = [
    (aten.uniform.default, (2.0, 6.0), 4.0, 4 / math.sqrt(12)),
    (aten.normal_functional.default, (3.0, 2.0), 3.0, 2.0),
    (aten.exponential.default, (2.0,), 0.5, 0.5),
    (aten.geometric.default, (0.25,), 4.0, math.sqrt(0.75) / 0.25),
    (aten.log_normal.default, (0.0, 0.5), math.exp(0.125), 0.61),
    (aten.bernoulli.p, (0.3,), 0.3, 0.46),
    (aten.random.to, (10,), 4.5, 2.88),
    (aten.random.default, (), 2.0**23, 2.0**24 / math.sqrt(12)),
    (getattr(aten.random, "from"), (-5, 5), -0.5, 2.88),
]


@pytest.mark.parametrize("func, args, mean, std", SPREAD, ids=[str(row[0]) for row in SPREAD])
def test_in_place_distributions(func, args, mean, std):
    values = draw(func, torch.zeros(COUNT), *args)
    near(values, mean, std)


def test_cauchy_has_its_quartiles():
    values = draw(aten.cauchy.default, torch.zeros(COUNT), 1.0, 2.0)
    assert np.allclose(np.quantile(values, [0.25, 0.5, 0.75]), [-1, 1, 3], atol=0.15)


def test_normal_with_tensors():
    mean, std = torch.linspace(-5, 5, COUNT), torch.full((COUNT,), 0.5)
    near(draw(aten.normal.Tensor_Tensor, mean, std) - mean.numpy(), 0, 0.5)
    near(draw(aten.normal.Tensor_float, mean, 2.0) - mean.numpy(), 0, 2)
    near(draw(aten.normal.float_Tensor, 1.0, std), 1, 0.5)
    near(draw(aten.normal.float_float, 1.0, 3.0, [COUNT]), 1, 3)


def test_integers_cover_their_range_and_no_more():
    values = draw(aten.randint.low, -3, 4, [COUNT], dtype=torch.int64)
    assert set(values.tolist()) == set(range(-3, 4))
    assert set(draw(aten.randint.default, 2, [100], shape=(100,), dtype=torch.int64).tolist()) == {0, 1}
    large = draw(aten.randint.low, 0, 2**40, [COUNT], dtype=torch.int64)
    assert large.min() >= 0 and large.max() > 2**39 and large.max() < 2**40
    whole = draw(
        getattr(aten.random, "from"), torch.zeros(COUNT, dtype=torch.int64), -(2**63), None, dtype=torch.int64
    )
    assert whole.min() < -(2**62) and whole.max() > 2**62
    small = draw(aten.random.default, torch.zeros(COUNT, dtype=torch.uint8), dtype=torch.uint8)
    assert small.min() == 0 and small.max() == 255


def test_randperm_permutes():
    assert sorted(draw(aten.randperm.default, 50, shape=(50,), dtype=torch.int64).tolist()) == list(range(50))
    assert draw(aten.randperm.default, 0, shape=(0,), dtype=torch.int64).shape == (0,)


def test_bernoulli_of_zero_and_one_is_certain():
    p = torch.tensor([0.0, 1.0]).repeat(500)
    assert (draw(aten.bernoulli.default, p, shape=(1000,)) == p.numpy()).all()
    assert (draw(aten.bernoulli.Tensor, torch.zeros(1000), p, shape=(1000,)) == p.numpy()).all()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout_keeps_its_share_and_scales(p):
    x = torch.randn(COUNT) + 3
    specs = [Spec((COUNT,), torch.float32), Spec((COUNT,), torch.bool)]
    result, mask = draw(aten.native_dropout.default, x, p, True, shape=specs)
    near(mask, 1 - p, 0.5)
    expected = np.where(mask, x.numpy() * (1 / (1 - p) if p < 1 else 0), 0)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    same, all_kept = draw(aten.native_dropout.default, x, p, False, shape=specs)
    assert (same == x.numpy()).all() and all_kept.all()


def test_rrelu_keeps_the_noise_of_its_backward():
    x, specs = torch.randn(COUNT), [Spec((COUNT,), torch.float32)] * 2
    result, noise = draw(
        aten.rrelu_with_noise_functional.default, x, torch.zeros(COUNT), 0.1, 0.3, True, shape=specs
    )
    np.testing.assert_allclose(result, x.numpy() * noise, rtol=1e-6)
    assert (noise[x.numpy() > 0] == 1).all() and noise.min() >= 0.1 and noise[x.numpy() <= 0].max() <= 0.3


def test_multinomial_follows_the_weights():
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0])
    values = draw(aten.multinomial.default, weights, COUNT, True, dtype=torch.int64)
    assert set(values.tolist()) == {1, 2}
    near(values == 2, 0.75, 0.43)
    without = draw(
        aten.multinomial.default, weights.expand(500, 4), 2, False, shape=(500, 2), dtype=torch.int64
    )
    assert (np.sort(without, axis=1) == [1, 2]).all()
    near(without[:, 0] == 2, 0.75, 0.43)


@pytest.mark.slow
def test_sampled_distributions():
    near(draw(aten.poisson.default, torch.full((COUNT,), 4.0)), 4, 2)
    near(draw(aten.binomial.default, torch.full((COUNT,), 10.0), torch.full((COUNT,), 0.3)), 3, 1.45)
    near(draw(aten._standard_gamma.default, torch.full((COUNT,), 2.0)), 2, 1.42)
    near(draw(aten._sample_dirichlet.default, torch.ones(COUNT, 4), shape=(COUNT, 4))[:, 0], 0.25, 0.2)


@pytest.mark.parametrize("size", [[], [0], [7], [3, 5]])
def test_philox_numbers_are_bit_equal_to_eager(size):
    seed, stream = prims.new_seed(), 5
    expected = prims.rand(seed, stream, size)
    func = torch.ops.dynamotor.rand.default
    got = apply(
        func, find(func), (jnp.asarray(seed.numpy()), stream, size), {}, Spec(tuple(size), torch.float32)
    )
    assert (np.asarray(got) == expected.numpy()).all()


def test_a_new_seed_is_a_positive_integer():
    assert draw(torch.ops.dynamotor.new_seed.default, shape=(1,), dtype=torch.int64)[0] >= 0
