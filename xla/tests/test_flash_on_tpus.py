"""Flash attention on a TPU, as far as it can be seen without one: jax's kernel is lowered for that platform."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec  # noqa: E402

import dynamotor.xla  # noqa: E402, F401
from dynamotor.xla.experimental import custom_kernel  # noqa: E402


def abstract_mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> AbstractMesh:
    """A mesh whose axes have the type that those of `Mesh` have by default, in each version of jax."""
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


@pytest.mark.parametrize("divided", ["", "said", "by default"])
@pytest.mark.parametrize("graded", [False, True])
def test_the_kernel_is_lowered_for_tpus(monkeypatch: pytest.MonkeyPatch, divided: str, graded: bool) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    spec = PartitionSpec("fsdp", None, None, None)
    sharding = NamedSharding(abstract_mesh((4,), ("fsdp",)), spec) if divided else None
    q = jax.ShapeDtypeStruct((8, 2, 256, 128), jnp.float32, sharding=sharding)
    ids = jax.ShapeDtypeStruct((8, 256), jnp.int64)

    def attend(q, ids):
        return custom_kernel._flash(
            q, q, q, ids, ids, None, True, 0.1, sharding if divided == "said" else None
        )

    function = jax.grad(lambda q, ids: attend(q, ids).sum()) if graded else attend
    exported = jax.export.export(jax.jit(function), platforms=["tpu"])(q, ids)
    assert exported.out_avals[0].shape == q.shape


@pytest.mark.parametrize(
    "batch, heads, expected",
    [
        (8, 2, (("data", "model"), None)),
        (2, 8, ("data", "model")),
        (3, 4, (None, ("data", "model"))),
        (3, 3, (None, None)),
    ],
)
def test_by_default_each_axis_divides_the_batch_or_the_heads(
    batch: int, heads: int, expected: tuple[object, ...]
) -> None:
    mesh = abstract_mesh((2, 2), ("data", "model"))
    found = []

    def look(q: jax.Array) -> jax.Array:
        found.append(custom_kernel._default_sharding(q, q))
        return q

    for sharding in (NamedSharding(mesh, PartitionSpec()), None):
        jax.eval_shape(look, jax.ShapeDtypeStruct((batch, heads, 8, 8), jnp.float32, sharding=sharding))
    assert found[1] is None and found[0].spec == PartitionSpec(*expected)
