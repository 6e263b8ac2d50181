"""The replicas: who they are, how they find each other, and how they meet outside of the programs that they
run together.

xmp.spawn and torchrun describe a process's place by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT; the first use of the device (or `start`) joins the others. Collectives run over XLA's own
transport: gloo between CPUs, NCCL between GPUs, one device a process.

>>> world = start()
>>> meet(world, "sizes", b"3", range(size()))
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
import torch.distributed as dist
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynamotor.extension_api import XlaError

from .errors import require
from .peers import Peers, start_coordinator

AXIS = "replicas"
"""Name of the mesh axis over which a replicated program's collectives run."""

Program = Callable[..., list[jax.Array]]
Compiled = Callable[[list[jax.Array]], list[jax.Array]]


@dataclass(frozen=True)
class Place:
    """Where a process stands: its ordinal among all replicas and among those of its machine, and where they
    meet.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    hosts_store: bool = False
    attempt: str = "0"

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> Place:
        """What torchrun's variables say; a world of one where they are absent. DM644 when only some are
        there.
        """
        env = os.environ if env is None else env
        if "WORLD_SIZE" not in env or "RANK" not in env:
            return cls()
        size, rank = int(env["WORLD_SIZE"]), int(env["RANK"])
        require(
            size <= 1 or "MASTER_ADDR" in env and "MASTER_PORT" in env,
            "DM644",
            "the replicas cannot find each other",
            why="WORLD_SIZE and RANK are set, MASTER_ADDR or MASTER_PORT is not",
            cure="start the program with torchrun or xmp.spawn, or set both",
        )
        agent_has_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank,
            size,
            int(env.get("LOCAL_RANK", rank)),
            int(env.get("LOCAL_WORLD_SIZE", size)),
            env.get("MASTER_ADDR", "127.0.0.1"),
            int(env.get("MASTER_PORT", 0)),
            rank == 0 and not agent_has_store,
            env.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    def to_environment(self) -> dict[str, str]:
        """The variables that say this, for a process that finds its store running already."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": str(not self.hosts_store),
        }


@dataclass
class World:
    """The replicas that this process has joined. A world of one has neither store, peers nor mesh."""

    place: Place
    store: dist.Store | None = None
    peers: Peers | None = None
    mesh: Mesh | None = None
    serial: dict[str, int] = field(default_factory=dict)


_world: World | None = None
_lock = threading.RLock()


def timeout_seconds() -> float:
    """How long a replica may be silent, or late at the start, before it is given up: DYNAMOTOR_XLA_TIMEOUT,
    100 s by default.
    """
    return float(os.environ.get("DYNAMOTOR_XLA_TIMEOUT", "100"))


def started() -> bool:
    """Whether this process has joined its world."""
    return _world is not None


def place() -> Place:
    """This process's place; does not join anything."""
    return _world.place if _world is not None else Place.from_environment()


def rank() -> int:
    """The ordinal of this process among all replicas."""
    return place().rank


def size() -> int:
    """The number of replicas."""
    return place().size


def start() -> World:
    """Join the world that the environment describes; once joined, returns it. Must come before jax's first
    computation.

    DM642 when the others do not come in time, DM644 when they cannot be reached or jax had started already.
    """
    global _world
    with _lock:
        if _world is None:
            where = Place.from_environment()
            _world = World(where) if where.size == 1 else _join(where)
    return _world


def _join(where: Place) -> World:
    limit = timeout_seconds()
    try:
        base = dist.TCPStore(
            where.address,
            where.port,
            where.size,
            where.hosts_store,
            datetime.timedelta(seconds=limit),
            wait_for_workers=False,
            multi_tenant=True,
        )
        store = dist.PrefixStore(f"dynamotor/{where.attempt}", base)
        if where.rank == 0:
            store.set("coordinator", _announce(where, limit))
        host, jax_port, lifeline_port = store.get("coordinator").decode().split()
        peers = Peers.connect((host, int(lifeline_port)), where.rank)
        world = World(where, store, peers)
        # jax ends the process when a replica is late: it is only started when all are here.
        meet(world, "join", b"", range(where.size), limit)
        _start_jax(where, f"{host}:{jax_port}", limit)
        world.mesh = peers.guard(lambda: _greet(_mesh()))
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, XlaError):
            raise
        raise XlaError(
            "DM644",
            f"replica {where.rank} of {where.size} could not join the others at {where.address}:{where.port}",
            why=str(error)[:500],
            cure="start all replicas; join before jax's first computation; see DYNAMOTOR_XLA_TIMEOUT",
        ) from error
    atexit.register(_leave_at_exit)
    return world


def _mesh() -> Mesh:
    """One device of each process, in the order of ordinals."""
    firsts: dict[int, jax.Device] = {}
    for device in jax.devices():
        firsts.setdefault(device.process_index, device)
    return Mesh(np.array([firsts[index] for index in sorted(firsts)]), (AXIS,))


def _greet(mesh: Mesh) -> Mesh:
    """Run a first sum over the replicas while all are here: gloo gives up on a replica that is 30 s late for
    the first one.
    """
    spec = PartitionSpec(AXIS)
    ones = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, spec), lambda _: np.ones(1, np.float32)
    )
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, AXIS), mesh=mesh, in_specs=spec, out_specs=spec))(
        ones
    )
    assert total.addressable_data(0)[0] == mesh.size
    return mesh


def _announce(where: Place, limit: float) -> str:
    """Start the coordinator beside replica 0; "HOST JAX_PORT LIFELINE_PORT" as the others reach it."""
    local = socket.gethostbyname(where.address).startswith("127.")
    jax_port, lifeline_port = start_coordinator("127.0.0.1" if local else "0.0.0.0", where.size, limit)
    return f"{'127.0.0.1' if local else where.address} {jax_port} {lifeline_port}"


def _start_jax(where: Place, coordinator: str, limit: float) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        where.size,
        where.rank,
        local_device_ids=_local_devices(where),
        cluster_detection_method="deactivate",
        initialization_timeout=int(limit),
        heartbeat_timeout_seconds=int(limit) + 10,
        shutdown_timeout_seconds=10,
        # Replica 0 would host the service here: it gets an unused one, at a port of its own.
        coordinator_bind_address="127.0.0.1:0",
    )


def _local_devices(where: Place) -> list[int] | None:
    """The GPU of this process: the one of its local ordinal, unless the launcher shows it only one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is not None and len(visible.split(",")) < where.local_size else [where.local_rank]


def stop() -> None:
    """Leave the world in good order: wait until all replicas have come here (or one is gone), then close the
    connections.
    """
    global _world
    with _lock:
        world, _world = _world, None
    if world is None or world.peers is None:
        return
    with contextlib.suppress(XlaError):  # the replica that failed says why
        meet(world, "stop", b"", range(world.place.size))
    _disconnect(world.peers)


def abandon() -> None:
    """This replica has failed: let go of the others without a farewell, so that they know."""
    global _world
    world, _world = _world, None
    if world is not None and world.peers is not None:
        world.peers.close()
        jax.distributed.shutdown()


def _leave_at_exit() -> None:
    if _world is not None and _world.peers is not None and _world.peers.dead:
        # A collective may still be blocked in the runtime on a peer that will never answer: its threads
        # cannot be joined.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    if hasattr(sys, "last_value"):  # an exception ends the program
        abandon()
    stop()


def _disconnect(peers: Peers) -> None:
    # In this order: the coordinator ends with the last lifeline, and jax ends processes whose coordinator is
    # gone.
    jax.distributed.shutdown()
    peers.farewell()


def meet(
    world: World, tag: str, payload: bytes, ranks: Sequence[int], limit: float = math.inf
) -> list[bytes]:
    """Exchange payloads with other replicas through the store; returns them in the order of `ranks`. `limit`:
    seconds to wait.

    DM640 when one of them is gone, DM642 when one does not come in time, DM643 when this replica is not among
    them.
    """
    me = world.place.rank
    require(
        me in ranks,
        "DM643",
        f"replica {me} takes no part in the rendezvous {tag!r} of {list(ranks)}",
        cure="call it only on those replicas",
    )
    if world.store is None or world.peers is None:
        return [payload]
    # The same replicas come to the same tag equally often; those behind a turn have all read the messages of
    # the one before.
    tag = f"{tag}/{','.join(map(str, ranks))}"
    turn = world.serial[tag] = world.serial.get(tag, -1) + 1
    try:
        world.store.set(f"meet/{tag}/{turn}/{me}", payload)  # type: ignore[arg-type]  # bytes are taken, too
        keys = [f"meet/{tag}/{turn}/{other}" for other in ranks]
        payloads = [
            payload if other == me else _receive(world, key, other, tag, limit)
            for other, key in zip(ranks, keys)
        ]
        if turn:
            world.store.delete_key(f"meet/{tag}/{turn - 1}/{me}")
    except dist.DistStoreError as error:
        raise world.peers.judge(error) from error
    return payloads


def _receive(world: World, key: str, other: int, tag: str, limit: float) -> bytes:
    assert world.store is not None and world.peers is not None
    start, pause = time.monotonic(), 0.001
    while not world.store.check([key]):
        if (other in world.peers.dead or other in world.peers.left) and not world.store.check([key]):
            raise world.peers.error()
        if time.monotonic() - start > limit:
            what = f"replica {other} did not come to the rendezvous {tag!r} within {limit:.0f} s"
            raise XlaError("DM642", what, cure="start all replicas; see DYNAMOTOR_XLA_TIMEOUT")
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    return world.store.get(key)


def wait(arrays: Sequence[jax.Array]) -> None:
    """Block until arrays are computed, but not for the dead: DM640 when a peer is gone."""
    if (
        _world is None
        or _world.peers is None
        or _world.mesh is None
        or _world.mesh.devices.flat[0].platform == "cpu"
    ):
        jax.block_until_ready(arrays)  # on CPUs collectives were waited for when they were run
    else:
        _world.peers.guard(lambda: jax.block_until_ready(arrays))
