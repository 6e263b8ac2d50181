"""Questions of a program about a TPU host, answered by jax and the environment; 0 and "" where there is
none.
"""

from __future__ import annotations

import os

import jax


def _tpus() -> list[jax.Device]:
    return [d for d in jax.local_devices() if d.platform == "tpu"]


def _chips() -> int:
    return len({tuple(getattr(d, "coords", (d.id,))) for d in _tpus()})


def _kind() -> str:
    return _tpus()[0].device_kind if _tpus() else ""


def _hosts() -> list[str]:
    return os.environ.get("TPU_WORKER_HOSTNAMES", "localhost").split(",")


def _host() -> int:
    return int(os.environ.get("CLOUD_TPU_TASK_ID", os.environ.get("TPU_WORKER_ID", jax.process_index())))


_ROWS = {
    "num_available_devices": lambda: len(_tpus()),
    "num_available_chips": _chips,
    "num_logical_cores_per_chip": lambda: len(_tpus()) // _chips() if _tpus() else 1,
    "num_expected_global_devices": lambda: jax.device_count() if _tpus() else 0,
    "get_tpu_type": _kind,
    "version": lambda: int("".join(c for c in _kind() if c.isdigit())[:1] or 0),  # 4 for "TPU v4"
    "task_id": _host,
    "worker_id": _host,
    "get_worker_ips": _hosts,
    "num_tpu_workers": lambda: len(_hosts()),
    "discover_master_worker_ip": lambda: _hosts()[0],
}
globals().update(_ROWS)
