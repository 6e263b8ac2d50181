"""Joining a world, programs that all replicas run together, and peers that die."""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="jax is not installed")

from replicas import run_replicas  # noqa: E402

from dynamotor.base.errors import XlaError  # noqa: E402
from dynamotor.xla import replication  # noqa: E402

PROGRAM = """
    import jax, jax.numpy as jnp, numpy as np, os, signal, sys, time
    from dynamotor.xla import replication as r
    from dynamotor.xla.replicated import compile_replicated
    world = r.start()
    me = world.place.rank
"""

KILLED = (
    PROGRAM
    + """
    from dynamotor.base.errors import XlaError
    victim, how = {victim}, signal.{signal}
    step = compile_replicated(lambda x: [jax.lax.psum(x, r.AXIS)], [jnp.ones(3)])
    x = jnp.ones(3)
    try:
        for i in range(200):
            if i == 10 and me == victim:
                os.kill(os.getpid(), how)
            x = step([x])[0] / 2
    except XlaError as error:
        assert error.code == "DM640", error
        assert "replica " + str(victim) in error.why, error
        time.sleep(1)
        print("local work goes on:", float(jnp.ones(3).sum()), error.where)
        sys.stdout.flush()
        os._exit(0)
    raise AssertionError("no error")
"""
)


def test_a_process_alone_is_a_world_of_one() -> None:
    place = replication.Place.from_environment({})
    assert (place.rank, place.size, place.hosts_store) == (0, 1, False)


def test_the_place_is_read_from_torchruns_variables() -> None:
    env = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "5",
    }
    place = replication.Place.from_environment(env)
    assert place == replication.Place(3, 4, 1, 2, "h", 5, False)
    assert replication.Place.from_environment(env | {"RANK": "0"}).hosts_store
    assert not replication.Place.from_environment(
        env | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ).hosts_store


def test_half_a_place_is_an_error() -> None:
    with pytest.raises(XlaError, match="DM644.*find each other"):
        replication.Place.from_environment({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.slow
def test_arrays_of_any_shape_keep_each_replicas_value() -> None:
    texts = run_replicas(
        PROGRAM
        + """
    inputs = [jnp.asarray(float(me + 1)), jnp.arange(6.0).reshape(2, 3) * (me + 1), jnp.zeros((0, 3)), jnp.asarray(me == 0), jnp.full(5, me)]
    step = compile_replicated(lambda s, m, e, b, i: [s * 2, m + 1, e, ~b, i, jax.lax.psum(s, r.AXIS), jax.lax.psum(m, r.AXIS)], inputs)
    for _ in range(2):
        s, m, e, b, i, sums, summ = step(inputs)
        assert float(s) == 2 * (me + 1) and e.shape == (0, 3) and bool(b) == (me != 0) and i.tolist() == [me] * 5
        np.testing.assert_array_equal(m, np.arange(6.0).reshape(2, 3) * (me + 1) + 1)
        assert float(sums) == 3
        np.testing.assert_array_equal(summ, np.arange(6.0).reshape(2, 3) * 3)
    assert r.meet(world, "x", b"payload %d" % me, range(2)) == [b"payload 0", b"payload 1"]
    assert r.meet(world, "x", b"again %d" % me, [1, 0]) == [b"again 1", b"again 0"]
    assert r.meet(world, "alone", b"me", [me]) == [b"me"]
    print("done", me)
    """
    )
    assert "done 0" in texts[0] and "done 1" in texts[1]


@pytest.mark.parametrize(
    ("victim", "signal"),
    [(0, "SIGKILL"), *(pytest.param(1, how, marks=pytest.mark.slow) for how in ("SIGKILL", "SIGSTOP"))],
)
def test_survivors_of_a_dead_peer_get_a_coded_error(victim: int, signal: str) -> None:
    texts = run_replicas(
        KILLED.format(victim=victim, signal=signal),
        survivors=[1 - victim],
        DYNAMOTOR_XLA_TIMEOUT="15" if signal == "SIGSTOP" else "60",
    )
    assert "local work goes on: 3.0" in texts[1 - victim]


def test_a_replica_that_fails_ends_the_others_in_a_collective() -> None:
    texts = run_replicas(
        PROGRAM
        + """
    step = compile_replicated(lambda x: [jax.lax.psum(x, r.AXIS)], [jnp.ones(3)])
    step([jnp.ones(3)])
    if me == 1:
        raise KeyError("mine")
    try:
        step([jnp.ones(3)])
    except RuntimeError as error:
        print(error)
        os._exit(0)
    """,
        survivors=[0],
    )
    assert "DM640" in texts[0] and "replica 1" in texts[0]


@pytest.mark.slow
def test_a_peer_that_never_comes_is_an_error() -> None:
    texts = run_replicas(
        """
    import os, sys
    from dynamotor.xla import replication as r
    if os.environ["RANK"] == "1":
        sys.exit(0)
    try:
        r.start()
    except RuntimeError as error:
        print(error)
        sys.stdout.flush()
        os._exit(0)
    """,
        DYNAMOTOR_XLA_TIMEOUT="3",
    )
    assert "DM642" in texts[0] or "DM640" in texts[0]
